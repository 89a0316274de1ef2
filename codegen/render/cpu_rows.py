"""Prints the bodies of CPU kernels with reductions.

Both walks go over the columns in tiles. A tile's values are put into an array, which the reduction's state takes in one
call: for `INNER` a block of one row (`fp::Row`), for `OUTER` a panel of a few columns of `width` rows (`fp::Lanes`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod

from fusepass.codegen.ir.dataflow import Kept
from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Apply, Expr, Load, Masked, ReduceOp, Stat, Window, children
from fusepass.codegen.ir.index import Axis, Index, axis_index, contiguous_strides, linear
from fusepass.codegen.ir.program import Kernel, Program, Reduction
from fusepass.codegen.render.cpu_loops import SIMD, Body, KernelWriter, from_memory, memory_type
from fusepass.codegen.render.numbers import free
from fusepass.codegen.render.printer import Scope
from fusepass.codegen.render.spelling import Identifiers, block
from fusepass.codegen.schedule_cpu import CpuSchedule, general_room, kept_on_cpu

ElementBody = Callable[[Scope, str], None]


def element_types(reduction: Reduction) -> tuple[DType, ...]:
    """The types of the values that the state of `reduction` takes."""
    if reduction.op in (ReduceOp.ARGMAX, ReduceOp.ARGMIN):
        return (reduction.dtype, DType.I64)
    return (reduction.dtype,) * reduction.op.arity


class RowsWriter(KernelWriter):
    """What `INNER` and `OUTER` have in common."""

    state_type: str  # with the reduction's state where {} is
    part_argument: str
    lanes: str  # extent of an array's last dimension, if any
    lane: str  # subscript of it
    initial: str  # initialiser of arrays
    simd_columns: bool  # whether the innermost loop is over columns

    def __init__(
        self,
        kernel: Kernel,
        program: Program,
        schedule: CpuSchedule,
        names: Identifiers,
        pointers: dict[str, str],
    ) -> None:
        super().__init__(kernel, program, schedule, names, pointers)
        kept = kept_on_cpu(kernel) if schedule.keep else ()
        self.kept: dict[int, tuple[Kept, str]] = {id(k.node): (k, names.numbered("kept")) for k in kept}
        self.col_values: list[tuple[Expr, str, Index]] = []
        self.column = position(kernel.cols)
        self.outer, self.tiled, self.trailing = _tile(self.cols, schedule.block)
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
        """All sweeps and stores of the rows that `scope` defines."""
        for kept, name in self.kept.values():
            scope.lines.append(self.array(kept.node.dtype, name, max(self.kernel.col_count, 1)))
        for phase, sweep in enumerate(self.kernel.sweeps):
            self._sweep(scope, phase, sweep)
        if self.kernel.row_stores:
            self.printer.expect(store.value for store in self.kernel.row_stores)
            self.element_loop(scope, lambda inner: self.store(inner, self.kernel.row_stores))
        if self.kernel.stores:
            roots = [store.value for store in self.kernel.stores]
            self.printer.expect(roots)
            self.prepare(scope, roots)
            self.nest(scope, self.cols, lambda inner: self.element_loop(inner, self._stores), simd=self.simd_columns)

    def _stores(self, scope: Scope) -> None:
        self._bind_known(scope, len(self.kernel.sweeps))
        self.store(scope, self.kernel.stores)

    def _sweep(self, scope: Scope, phase: int, sweep: Sequence[Reduction]) -> None:
        roots = [value for reduction in sweep for value in reduction.values]
        roots += [kept.node for kept, _ in self.kept.values() if kept.first == phase]
        self.printer.expect(roots)
        self.prepare(scope, roots)
        states = [(self._declare(scope, reduction), reduction) for reduction in sweep]

        def tile(inner: Scope, start: str, count: int | str) -> None:
            arrays = _Arrays(self, scope, inner, start)
            pushes = [
                (name, [arrays.pointer(v, t) for v, t in zip(r.values, element_types(r), strict=True)])
                for name, r in states
            ]
            if arrays.filled or any(kept.first == phase for kept, _ in self.kept.values()):
                self._elements(inner, start, count, lambda s, place: self._fill(s, place, phase, arrays))
            total = scaled(count, points(self.trailing))
            inner.lines += [f"{name}.push({total}, {', '.join(values)});" for name, values in pushes]

        self.nest(scope, self.outer, lambda inner: self._tiles(inner, tile), simd=False)
        self._results(states)

    def _declare(self, scope: Scope, reduction: Reduction) -> str:
        name = self.names.exact(reduction.name)
        state = f"fp::{reduction.op.value}<{memory_type(reduction.dtype)}>"
        scope.lines.append(f"{self.state_type.format(state)} {name};")
        return name

    def _results(self, states: Sequence[tuple[str, Reduction]]) -> None:
        for name, reduction in states:
            for part in range(reduction.op.parts):
                text = f"{name}.part<{part}>({self.part_argument})"
                dtype = DType.I64 if reduction.op.gives_position(part) else reduction.dtype
                self.stats[reduction.name, part] = from_memory(text, dtype)

    def _fill(self, scope: Scope, place: str, phase: int, arrays: _Arrays) -> None:
        self._bind_known(scope, phase)
        for kept, name in self.kept.values():
            if kept.first == phase:
                scope.lines.append(f"{self._kept_element(scope, name)} = {scope.value(kept.node)};")
        for (_, dtype), (name, node) in arrays.filled.items():
            scope.lines.append(f"{name}[{place}]{self.lane} = {self.value(scope, node, dtype)};")

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
        inner = scope.child()
        inner.define_axis(self.tiled, f"({start} + {step})" if start else step)

        def element(innermost: Scope) -> None:
            place = scaled(step, points(self.trailing))
            inside = innermost.index(position(self.trailing))
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

    def pointer(self, node: Expr, dtype: DType) -> str:
        """The text of a pointer to the tile's values of `node` as elements of `dtype`."""
        writer = self.writer
        if node.dtype is dtype and id(node) in writer.kept:
            return self._address(writer.kept[id(node)][1], writer.column)
        if isinstance(node, Load) and node.dtype is dtype and writer.contiguous(node.index):
            return self._address(writer.printer.pointers[node.buffer], node.index)
        if (id(node), dtype) not in self.filled:
            name = writer.names.numbered("block")
            size = writer.steps * points(writer.trailing)
            if not writer.schedule.general:
                size = min(size, max(writer.kernel.col_count, 1))
            self.outside.lines.append(writer.array(dtype, name, size))
            self.filled[id(node), dtype] = (name, node)
        return self.filled[id(node), dtype][0]

    def _address(self, pointer: str, index: Index) -> str:
        offset = self.writer.tile_start(self.scope, self.start, index)
        return pointer if offset == "0" else f"{pointer} + {offset}"


def largest(roots: Sequence[Expr], wanted: Callable[[Expr], bool]) -> Iterator[Expr]:
    """The largest computed values below `roots` that are `wanted`; none from below a condition."""
    stack, seen = list(reversed(roots)), set[int]()
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, Apply | Stat) and wanted(node):
            yield node
        elif isinstance(node, Masked):
            stack.append(node.other)
        elif not isinstance(node, Window):
            stack += reversed(children(node))


def position(axes: Sequence[Axis]) -> Index:
    """Where a point of `axes` lies in an array over them."""
    return linear([axis_index(axis) for axis in axes], contiguous_strides([axis.size for axis in axes]))


def points(axes: Sequence[Axis]) -> int:
    """How many points `axes` have."""
    return prod(axis.size for axis in axes)


def scaled(count: int | str, factor: int) -> str:
    """The text of ``count * factor``."""
    if isinstance(count, int):
        return free(count * factor)
    return count if factor == 1 else f"{free(factor)} * {count}"


def _tile(cols: tuple[Axis, ...], size: int) -> tuple[tuple[Axis, ...], Axis | None, tuple[Axis, ...]]:
    """The axis of `cols` to cut into tiles of about `size` points: (axes before it, the axis, axes after it)."""
    if not cols:
        return (), None, ()
    first = len(cols) - 1
    while first > 0 and points(cols[first:]) * 2 <= size:
        first -= 1
    return cols[:first], cols[first], cols[first + 1 :]
