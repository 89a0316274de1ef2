"""Prints the bodies of CPU kernels with reductions.

Both walks go over the columns in tiles. A tile's values are put into an array, which the reduction's state takes in one
call: for `INNER` a block of one row (`fp::Row`), for `OUTER` a panel of a few columns of `width` rows (`fp::Lanes`).
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence

from fusepass.codegen.ir.conversions import narrowed, widened
from fusepass.codegen.ir.dataflow import Kept
from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Apply, Expr, Load, Op, Prefix, ReduceOp
from fusepass.codegen.ir.index import Index, flat_index
from fusepass.codegen.ir.program import Kernel, Reduction, Store
from fusepass.codegen.render.cpu.loops import SIMD, Body, KernelWriter, from_memory, memory_type
from fusepass.codegen.render.cpu.rows.columns import points, scaled, tile
from fusepass.codegen.render.printer import Scope
from fusepass.codegen.render.spelling import block
from fusepass.codegen.render.unit import Place
from fusepass.codegen.schedule_cpu import CpuSchedule, general_room, kept_on_cpu

ElementBody = Callable[[Scope, str], None]


def element_types(reduction: Reduction) -> tuple[DType, ...]:
    """The types of the values that the state of `reduction` takes."""
    if reduction.op.finds_place:
        return (reduction.dtype, DType.I64)
    return (reduction.dtype,) * reduction.op.arity


def taken(reduction: Reduction) -> list[tuple[Expr, DType]]:
    """What the state of `reduction` takes, and as which type. Moments in double take floats as they are, and less time for it."""
    values = list(zip(reduction.values, element_types(reduction), strict=True))
    if reduction.op is ReduceOp.MOMENTS and reduction.dtype is DType.F64:
        (value,) = reduction.values
        if isinstance(value, Apply) and value.op is Op.CAST and value.args[0].dtype is DType.F32:
            return [(value.args[0], DType.F32)]
    return values


class RowsWriter(KernelWriter, abc.ABC):
    """What `INNER` and `OUTER` have in common."""

    part_argument: str
    lanes: str  # extent of an array's last dimension, if any
    lane: str  # subscript of it
    initial: str  # initialiser of arrays
    simd_columns: bool  # whether the innermost loop is over columns

    def __init__(self, kernel: Kernel, schedule: CpuSchedule, place: Place) -> None:
        super().__init__(kernel, schedule, place)
        kept = kept_on_cpu(kernel) if schedule.keep else ()
        self.kept: dict[int, tuple[Kept, str]] = {id(k.node): (k, self.names.numbered("kept")) for k in kept}
        self.col_values: list[tuple[Expr, str, Index]] = []
        self.column = flat_index(kernel.cols)
        self.outer, self.tiled, self.trailing = tile(self.cols, schedule.block)
        self.steps = max(schedule.block // points(self.trailing), 1)

    def element_loop(self, scope: Scope, body: Body) -> None:
        """`body` for the rows that stand side by side, with all that is known of them."""
        raise NotImplementedError

    def prepare(self, scope: Scope, roots: Sequence[Expr]) -> None:
        """Compute what `roots` need once per row."""

    def array(self, dtype: DType, name: str, size: int) -> str:
        """The declaration of an array of one element per column, for each of the rows side by side."""
        size = general_room(size) if self.schedule.general else size
        return f"{memory_type(dtype)} {name}[{size}]{self.lanes}{self.initial};"

    def per_row(self, scope: Scope) -> None:
        """All reduction loops and stores of the rows that `scope` defines."""
        for kept, name in self.kept.values():
            scope.lines.append(self.array(kept.node.dtype, name, max(self.kernel.col_count, 1)))
        for phase, reduction_loop in enumerate(
            self.kernel.reduction_loops[:-1] if self.kernel.scans else self.kernel.reduction_loops
        ):
            self._reduction_loop(scope, phase, reduction_loop)
        if self.kernel.row_stores:
            self.printer.expect(store.value for store in self.kernel.row_stores)
            self.element_loop(scope, lambda inner: self.store(inner, self.kernel.row_stores))
        if self.kernel.scans:
            self._scan(scope)
        elif self.kernel.stores:
            roots = [store.value for store in self.kernel.stores]
            self.printer.expect(roots)
            self.prepare(scope, roots)
            if any(self._narrows(store) for store in self.kernel.stores):
                self._stores_of_halves(scope)
            else:
                self.nest(scope, self.cols, lambda s: self.element_loop(s, self._stores), simd=self.simd_columns)

    def _stores(self, scope: Scope) -> None:
        self._bind_known(scope, len(self.kernel.reduction_loops))
        self.store(scope, self.kernel.stores)

    def _narrows(self, store: Store) -> bool:
        return (
            self.simd_columns
            and self.tiled is not None
            and bool(narrowed(store, self.program))
            and self.contiguous(store.index)
        )

    def _stores_of_halves(self, scope: Scope) -> None:
        """The stores, tile by tile: halves are rounded where all floats of a tile are there."""
        rounded = [(store, self.names.numbered("wide")) for store in self.kernel.stores if self._narrows(store)]
        others = [store for store in self.kernel.stores if not self._narrows(store)]
        scope.lines += [self.array(DType.F32, name, self.tile_points) for _, name in rounded]

        def element(inner: Scope, place: str) -> None:
            self._bind_known(inner, len(self.kernel.reduction_loops))
            for store, name in rounded:
                value = narrowed(store, self.program)
                assert value is not None
                inner.lines.append(f"{name}[{place}] = {inner.value(value)};")
            self.store(inner, others)

        def tile(inner: Scope, start: str, count: int | str) -> None:
            self._elements(inner, start, count, element)
            for store, name in rounded:
                target = self.address(inner, start, self.printer.pointers[store.buffer], store.index)
                inner.lines.append(f"fp::narrow({scaled(count, points(self.trailing))}, {name}, {target});")

        self.nest(scope, self.outer, lambda inner: self._tiles(inner, tile), simd=False)

    @property
    def tile_points(self) -> int:
        """The points of a tile, at most."""
        size = self.steps * points(self.trailing)
        return size if self.schedule.general else min(size, max(self.kernel.col_count, 1))

    def address(self, scope: Scope, start: str, pointer: str, index: Index) -> str:
        """The text of a pointer to the element at `index` that is the first of the tile that starts at `start`."""
        offset = self.tile_start(scope, start, index)
        return pointer if offset == "0" else f"{pointer} + {offset}"

    def _reduction_loop(self, scope: Scope, phase: int, reduction_loop: Sequence[Reduction]) -> None:
        roots = [value for reduction in reduction_loop for value, _ in taken(reduction)]
        roots += [kept.node for kept, _ in self.kept.values() if kept.first == phase]
        self.printer.expect(roots)
        self.prepare(scope, roots)
        states = [(self._declare(scope, reduction), reduction) for reduction in reduction_loop]

        def tile(inner: Scope, start: str, count: int | str) -> None:
            arrays = _Arrays(self, scope, inner, start)
            pushes = [(name, [arrays.pointer(*value) for value in taken(r)]) for name, r in states]
            total = scaled(count, points(self.trailing))
            kept = {node: name for node, name in self.kept.values() if node.first == phase}
            arrays.widen(total, kept)
            if not arrays.complete(kept):
                self._elements(inner, start, count, lambda s, place: self._fill(s, place, phase, arrays))
            inner.lines += [f"{name}.push({total}, {', '.join(values)});" for name, values in pushes]

        self.nest(scope, self.outer, lambda inner: self._tiles(inner, tile), simd=False)
        self._results(states)

    @abc.abstractmethod
    def state_type(self, state: str) -> str:
        """What holds states of this type."""

    @abc.abstractmethod
    def scan_type(self, state: str) -> str:
        """The same of a running reduction."""

    def _scan(self, scope: Scope) -> None:
        """The running reduction and the stores, tile by tile."""
        (reduction,), stores = self.kernel.reduction_loops[-1], self.kernel.stores
        roots = [*reduction.values, *(store.value for store in stores)]
        self.printer.expect(roots)
        self.prepare(scope, roots)
        state = self.names.exact(reduction.name)
        arrays = [(self.names.numbered("block"), dtype) for dtype in reduction.types]
        kind = f"fp::{reduction.op.value}<{memory_type(reduction.dtype)}>"
        scope.lines.append(f"{self.scan_type(kind)} {state};")
        scope.lines += [self.array(dtype, array, self.tile_points) for array, dtype in arrays]

        def fill(inner: Scope, place: str) -> None:
            self._bind_known(inner, 0)
            for (array, dtype), value in zip(arrays, reduction.values, strict=False):
                inner.lines.append(f"{array}[{place}]{self.lane} = {self.value(inner, value, dtype)};")

        def results(inner: Scope, place: str) -> None:
            self._bind_known(inner, 0)
            for node in self.kernel.nodes:
                if isinstance(node, Prefix):
                    inner.bind(node, f"{arrays[node.part][0]}[{place}]{self.lane}")
            self.store(inner, stores)

        def tile(inner: Scope, start: str, count: int | str) -> None:
            self._elements(inner, start, count, fill)
            blocks = ", ".join(array for array, _ in arrays)
            inner.lines.append(f"{state}.run({scaled(count, points(self.trailing))}, {blocks});")
            self._elements(inner, start, count, results)

        self._tiles(scope, tile)

    def _declare(self, scope: Scope, reduction: Reduction) -> str:
        name = self.names.exact(reduction.name)
        state = f"fp::{reduction.op.value}<{memory_type(reduction.dtype)}>"
        scope.lines.append(f"{self.state_type(state)} {name};")
        return name

    def _results(self, states: Sequence[tuple[str, Reduction]]) -> None:
        for name, reduction in states:
            for part, dtype in enumerate(reduction.types):
                text = f"{name}.part<{part}>({self.part_argument})"
                self.stats[reduction.name, part] = from_memory(text, dtype)

    def _fill(self, scope: Scope, place: str, phase: int, arrays: _Arrays) -> None:
        self._bind_known(scope, phase)
        kept = [(k.node, self._kept_element(scope, name)) for k, name in self.kept.values() if k.first == phase]
        blocks = [(dtype, node, f"{name}[{place}]{self.lane}") for (_, dtype), (name, node) in arrays.filled.items()]
        for node, text in (*kept, *((node, text) for _, node, text in blocks)):
            if id(node) in arrays.widened:
                scope.bind(node, text)
        scope.lines += [f"{text} = {scope.value(node)};" for node, text in kept if id(node) not in arrays.widened]
        for dtype, node, text in blocks:
            if id(node) not in arrays.widened:
                scope.lines.append(f"{text} = {self.value(scope, node, dtype)};")

    def _bind_known(self, scope: Scope, phase: int) -> None:
        """Make known in `scope`, where all columns are defined, what was computed before `phase`."""
        for node, name, place in self.col_values:
            scope.bind(node, from_memory(f"{name}[{scope.index(place)}]", node.dtype))
        for kept, name in self.kept.values():
            if kept.first < phase:
                scope.bind(kept.node, from_memory(self._kept_element(scope, name), kept.node.dtype))

    def _kept_element(self, scope: Scope, name: str) -> str:
        return f"{name}[{scope.index(self.column)}]{self.lane}"

    def _tiles(self, scope: Scope, body: Callable[[Scope, str, int | str], None]) -> None:
        """The loop over tiles; `body` gets where a tile starts ("" for the only one) and how many points it has."""
        if self.tiled is None or self.tiled.size <= self.steps:
            body(scope, "", self.tiled.size if self.tiled else 1)
            return
        inner, start = scope.child(), self.variables[self.tiled]
        count = self.tile_count(inner, self.tiled, self.steps, "count")
        body(inner, start, count)
        scope.lines += block(self.head(start, self.tiled.size, self.steps), inner.lines)

    def _elements(self, scope: Scope, start: str, count: int | str, body: ElementBody) -> None:
        """The loops over a tile's elements; `body` gets the text of an element's place in the tile."""
        if self.tiled is None:
            self.element_loop(scope, lambda inner: body(inner, "0"))
            return
        step = self.names.numbered("step") if start else self.variables[self.tiled]
        inner = scope.child({self.tiled: f"({start} + {step})" if start else step})

        def element(innermost: Scope) -> None:
            place = scaled(step, points(self.trailing))
            inside = innermost.index(flat_index(self.trailing))
            body(innermost, place if inside == "0" else f"{place} + {inside}")

        self.nest(inner, self.trailing, lambda s: self.element_loop(s, element), simd=self.simd_columns)
        scope.lines += [SIMD] if self.simd_columns and not self.trailing else []
        scope.lines += block(self.head(step, count), inner.lines)

    def tile_start(self, scope: Scope, start: str, index: Index) -> str:
        """The text of `index` at the first element of the tile that starts at `start`."""
        fixed = self.trailing if start or self.tiled is None else (self.tiled, *self.trailing)
        inner = scope.child()
        if start and self.tiled is not None:
            inner.define_axis(self.tiled, start)
        text = inner.index(index.substitute({axis: Index() for axis in fixed}))
        scope.lines += inner.lines
        return text

    def contiguous(self, index: Index) -> bool:
        """Whether a tile's elements lie in memory as they would in the array that the state takes."""
        raise NotImplementedError


class _Arrays:
    """Where a tile's values are: kept or in memory already, or in an array to be filled."""

    def __init__(self, writer: RowsWriter, outside: Scope, scope: Scope, start: str) -> None:
        """`outside` is around the loops over tiles, `scope` inside."""
        self.writer = writer
        self.outside = outside
        self.scope = scope
        self.start = start
        self.filled: dict[tuple[int, DType], tuple[str, Expr]] = {}
        self.widened: set[int] = set()

    def widen(self, count: str, kept: Mapping[Kept, str]) -> None:
        """Fill at once what is nothing but neighbouring halves as floats, of `kept` and of the arrays."""
        arrays = [(k.node, self._address(name, self.writer.column)) for k, name in kept.items() if self._widens(k.node)]
        arrays += [(node, name) for name, node in self.filled.values() if self._widens(node)]
        for node, array in arrays:
            load = widened(node)
            assert load is not None
            source = self._address(self.writer.printer.pointers[load.buffer], load.index)
            self.scope.lines.append(f"fp::widen({count}, {source}, {array});")
            self.widened.add(id(node))

    def _widens(self, node: Expr) -> bool:
        load = widened(node) if self.writer.simd_columns and self.writer.tiled is not None else None
        return load is not None and self.writer.contiguous(load.index)

    def complete(self, kept: Mapping[Kept, str]) -> bool:
        """Whether nothing is left to fill, of `kept` or of the arrays."""
        nodes = (*(each.node for each in kept), *(node for _, node in self.filled.values()))
        return all(id(node) in self.widened for node in nodes)

    def pointer(self, node: Expr, dtype: DType) -> str:
        """The text of a pointer to the tile's values of `node` as elements of `dtype`."""
        writer = self.writer
        if node.dtype is dtype and id(node) in writer.kept:
            return self._address(writer.kept[id(node)][1], writer.column)
        if isinstance(node, Load) and node.dtype is dtype and writer.contiguous(node.index):
            return self._address(writer.printer.pointers[node.buffer], node.index)
        if (id(node), dtype) not in self.filled:
            name = writer.names.numbered("block")
            self.outside.lines.append(writer.array(dtype, name, writer.tile_points))
            self.filled[id(node), dtype] = (name, node)
        return self.filled[id(node), dtype][0]

    def _address(self, pointer: str, index: Index) -> str:
        return self.writer.address(self.scope, self.start, pointer, index)
