"""Writes what a CUDA kernel with a matrix product does with sums that are laid out in shared memory: one result of a row in each thread, or several.

Threads take several neighbours of a row where results have 16 bits, of which 32 threads with one each would store half of a line at a time. What is
stored, and what is read beside the sums, goes in vectors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from fusepass.codegen.ir.dataflow import always_loaded
from fusepass.codegen.ir.digits import few_digits
from fusepass.codegen.ir.expr import Apply, Builder, Expr, children
from fusepass.codegen.ir.index import Axis, Bound, Index
from fusepass.codegen.ir.ops import CHEAP
from fusepass.codegen.ir.program import Kernel, Program, Role
from fusepass.codegen.ir.vectors import is_vector, split_index, split_value
from fusepass.codegen.render.cuda.contraction.product.direct import SumsWriter
from fusepass.codegen.render.cuda.contraction.product.lines import Lines
from fusepass.codegen.render.printer import Printer, Scope
from fusepass.codegen.render.spelling import C_TYPES, bare, block, loop
from fusepass.codegen.schedule_product import ProductSchedule
from fusepass.codegen.schedule_product.vectors import are_vectors

_WIDTHS = 8, 4, 2
_NARROW = 2  # bytes of an element
_AT_ONCE = 32  # results of a thread: what it loads for them is on its way together


@dataclass(frozen=True)
class Neighbours:
    """How a warp goes over what it has laid out: `lanes` threads have vectors of a row side by side, others those of the next rows."""

    width: int
    lanes: int

    @property
    def rows(self) -> int:
        """At a time."""
        return 32 // self.lanes


def neighbours_of(kernel: Kernel, program: Program, plan: ProductSchedule) -> Neighbours | None:
    """The widest vectors that all results can be stored in; None where they are not narrow, or no vectors."""
    if kernel.cols or any(program.buffer(store.buffer).dtype.nbytes != _NARROW for store in kernel.stores):
        return None
    high, long = plan.tiling.warp_tile[0], plan.tiling.laid_out
    for width in _WIDTHS if kernel.stores else ():
        found = Neighbours(width, min(32, long // width))
        whole = 32 % found.lanes == 0 and high % found.rows == 0 and long % (found.lanes * width) == 0
        if whole and are_vectors(kernel, width):
            return found
    return None


class ResultVectors:
    """Writes these lines."""

    def __init__(self, sums: SumsWriter, taken: Neighbours) -> None:
        self.sums, self.kernel, self.program, self.plan = sums, sums.kernel, sums.program, sums.plan
        self.pointers, self.printer, self.rows, self.columns = sums.pointers, sums.printer, sums.rows, sums.columns
        self.taken, self.lane, self.builder = taken, Axis("lane of the vector", taken.width), Builder()
        self.c = sums.c

    def write(self, outside: Scope, ready: Expr) -> Iterable[str]:
        """The lines for ``room``, which has `ready` of each point; `outside` knows piece and batch."""
        c = self.c
        taken, tiling, kernel = self.taken, self.plan.tiling, self.kernel
        along = outside.child({self.columns: c.column})
        test, here = along.child(), along.child()
        for scope in (test, here):
            scope.define_axis(self.rows, c.row)
        each = here.child({self.lane: c.i})
        values = [self._split(store.value) for store in kernel.stores]
        partial = None if kernel.partials is None else self._split(kernel.partials.value)
        if partial is None:
            pairs = zip(kernel.stores, values, strict=True)
            lanes = replace(kernel, stores=tuple(replace(store, value=value) for store, value in pairs))
            self.printer.few = few_digits(lanes, self.program)
        roots = [*values, *([partial] if partial is not None else [])]
        self.printer.expect(roots)
        each.bind(self._split(ready), f"{c.laid}[{c.i}]", spare=2)
        self._load(roots, here, each)
        behind = []
        for number, (store, value) in enumerate(zip(kernel.stores, values, strict=True)):
            dtype, stored = self.program.buffer(store.buffer).dtype, c.named(f"stored_{number}")
            kind = C_TYPES[dtype]
            each.lines.append(f"{stored}[{c.i}] = {each.converted(value, dtype)};")
            here.lines.append(f"fp::Vec<{kind}, {taken.width}> {stored};")
            at = here.index(self._first(split_index(store.index, self.columns, self.lane)))
            behind.append(f"fp::store_vector({self.pointers[store.buffer]} + ({at}), {stored});")
        down, across = f"({c.down} + {c.lane} / {taken.lanes})", f"{c.lane} % {taken.lanes} * {taken.width}"
        if taken.rows == 1:
            down, across = c.down, f"{c.lane} * {taken.width}"
        place = f"fp::as_vector<{taken.width}>({c.room}[{down} * {tiling.room_pitch} + {c.across} + {across}])"
        if partial is not None and kernel.partials is not None and kernel.partials.value is not ready:
            each.lines.append(f"{c.laid}[{c.i}] = {bare(each.value(partial))};")
            behind.append(f"{place} = {c.laid};")
        body = [
            f"fp::Vec<float, {taken.width}> {c.laid} = {place};",
            *here.lines,
            *loop(c.i, taken.width, each.lines),
            *behind,
        ]
        bounds = [
            Bound(self._first(split_index(b.index, self.columns, self.lane)), b.low, b.high) for b in kernel.within
        ]
        exists = along.condition(bounds) if kernel.whole_columns else ""
        if bounds and not exists:
            condition = test.condition(bounds)
            body = [*test.lines, *block(f"if ({condition})", body)]
        if self.rows.size % tiling.rows:
            body = block(f"if ({c.row} < {self.rows.size})", body)
        yield from outside.lines
        steps, at_once = (f"{c.down} += {taken.rows}", taken.lanes * taken.width), max(_AT_ONCE // taken.width, 1)
        yield from self.sums.over_laid_out(body, (down, across), steps, at_once, along, exists)

    def _load(self, roots: Iterable[Expr], here: Scope, each: Scope) -> None:
        """Loads what is needed anyway, and lies as the results do, in vectors."""
        for load in dict.fromkeys(load for root in roots for load in always_loaded(root)):
            buffer = self.program.buffer(load.buffer)
            anywhere = buffer.role is Role.INPUT and not self.plan.aligned
            if anywhere or not is_vector(load.index, self.columns, self.lane):
                continue
            name = self.printer.names.numbered(f"{load.buffer}_vector")
            at = f"{self.pointers[load.buffer]} + ({here.index(self._first(load.index))})"
            kind, width = C_TYPES[buffer.dtype], self.taken.width
            here.lines.append(f"const fp::Vec<{kind}, {width}> {name} = fp::load_vector<{width}>({at});")
            each.bind(load, f"{name}[{self.c.i}]", spare=1)

    def _split(self, value: Expr) -> Expr:
        return split_value(value, self.columns, self.lane, self.builder)

    def _first(self, index: Index) -> Index:
        """The index of a vector's first lane."""
        return index.substitute({self.lane: Index(0)})


_ROWS_AT_ONCE = 16  # of results: what the epilogue loads for them is on its way together


class Epilogue(SumsWriter):
    """Writes the lines behind a kernel's sums where a warp lays them out.

    Attributes:
        ready: what `early` makes of a sum; the same where there is nothing that depends on the row alone.
    """

    def __init__(self, kernel: Kernel, program: Program, plan: ProductSchedule, printer: Printer) -> None:
        super().__init__(kernel, program, plan, printer)
        self.ready = self._ready() if self._is_plain else self.stat
        self.lines = Lines(kernel, program, plan, printer, self.ready) if kernel.cols else None

    def _ready(self) -> Expr:
        """What is computed of the sum, and of what depends on the row alone, before anything else."""
        users: dict[int, list[Expr]] = {}
        for node in self.kernel.nodes:
            for child in children(node):
                users.setdefault(id(child), []).append(node)
        roots = {id(root) for root in self.kernel.roots}
        found: Expr = self.stat
        while id(found) not in roots:
            (user, *others) = users[id(found)]
            if others or not isinstance(user, Apply) or user.op not in CHEAP or user.dtype is not self.stat.dtype:
                break
            if any(arg is not found and not self._of_row(arg) for arg in user.args):
                break
            found = user
        return found

    def early(self) -> Iterable[str]:
        """Makes of a thread's sums, which are those of two rows, what can be made of them with what the rows have in common."""
        c = self.c
        if self.ready is self.stat:
            return
        outside = self._outside()
        along = outside.child()
        places = self._row_axes(along)
        here = along.child()
        here.bind(self.stat, c.sum, spare=1)
        self.printer.expect([self.ready])
        value = bare(here.value(self.ready))
        each = [
            f"float& {c.sum} = {c.sums}[0][{c.across} / 2][{c.down} * 2 + {c.across} % 2];",
            *here.lines,
            f"{c.sum} = {value};",
        ]
        inside = [*places, *along.lines, *loop(c.across, 2 * self.plan.tiling.n, each)]
        yield from outside.lines
        yield from self._two_rows(inside)
        yield ""

    def laid_out(self) -> Iterable[str]:
        """What the kernel's stores make of the sums: a warp takes 32 neighbours of a row, row by row.

        Where rows lie between the neighbours of others in memory, it takes as many rows together, and fewer neighbours of each.
        """
        if self.lines:
            yield from self.lines.write()
            return
        together = self._rows_between()
        taken = neighbours_of(self.kernel, self.program, self.plan) if together == 1 else None
        if taken is not None:
            vectors = ResultVectors(self, taken)
            yield from vectors.write(self._outside(), self.ready)
        else:
            yield from self._one_by_one(together)
        if self.states:
            yield from self.states.added() if self.plan.tiling.strip else self.states.of_room()

    def _one_by_one(self, together: int) -> Iterable[str]:
        """The same with one result of a row in each thread, of `together` rows at a time."""
        c = self.c
        tiling = self.plan.tiling
        down, across = (
            (c.down, c.lane) if together == 1 else (f"({c.down} + {c.lane} % {together})", f"{c.lane} / {together}")
        )
        outside = self._outside()
        # Loads that do not depend on the column or the row may leave the conditions on them.
        along = outside.child({self.columns: c.column})
        here = along.child({self.rows: c.row})
        self.printer.expect(self.kernel.roots)
        here.bind(self.ready, c.sum, spare=1)
        # What is computed where it need not exist, and what is done where it does.
        ahead, stores = list[str](), list[str]()
        for number, store in enumerate(self.kernel.stores):
            dtype = self.program.buffer(store.buffer).dtype
            kind, value = C_TYPES[dtype], here.converted(store.value, dtype)
            at = f"{self.pointers[store.buffer]}[{here.index(store.index)}]"
            if self._computes_everywhere:
                stored = c.named(f"stored_{number}")
                ahead, here.lines, value = [*ahead, *here.lines, f"const {kind} {stored} = {value};"], [], stored
            stores.append(f"{at} = {value};")
        here.lines += stores
        place = f"{c.room}[{down} * {tiling.room_pitch} + {c.across} + {across}]"
        if self.kernel.partials is not None and self.kernel.partials.value is not self.ready:
            here.lines.append(f"{place} = {bare(here.value(self.kernel.partials.value))};")
        exists = along.condition(self.kernel.within) if self.kernel.whole_columns else ""
        body = [f"const float {c.sum} = {place};", *here.lines] if here.lines else []
        if self.kernel.within and not exists:
            test = along.child({self.rows: c.row})
            condition = test.condition(self.kernel.within)
            ahead = [body.pop(0), *ahead] if ahead else []
            body = [*ahead, *test.lines, *block(f"if ({condition})", body)]
        if self.rows.size % tiling.rows:
            body = block(f"if ({c.row} < {self.rows.size})", body)
        yield from outside.lines
        steps = f"++{c.down}" if together == 1 else f"{c.down} += {together}", 32 // together
        over = self.over_laid_out(body, (down, across), steps, _ROWS_AT_ONCE, along, exists)
        yield from over if body else ("#pragma unroll 1",)

    def in_strips(self) -> Iterable[str]:
        """The same where a warp lays its sums out strip by strip."""
        c = self.c
        along = f"int64_t({c.along})" if self.plan.tiling.iterations else f"{c.place}.column"
        strip = [
            f"const int64_t {c.first_column} = {along} * {c.Tile}::columns + {c.strip};",
            "__syncwarp();",
            f"{c.Tile}::lay_out({c.room}, {c.sums}, {c.strip});",
            "__syncwarp();",
            *self.laid_out(),
        ]
        yield from self.states.begun() if self.states else ()
        yield "#pragma unroll 1"
        yield from block(f"for (int {c.strip} = 0; {c.strip} < {c.Tile}::columns; {c.strip} += {c.Tile}::strip)", strip)
        yield from self.states.ended() if self.states else ()

    @property
    def _computes_everywhere(self) -> bool:
        """Whether it is computed for points that do not exist, too: of sums, and of what depends on the row alone.

        A branch would keep the elements of an unrolled loop apart.
        """
        if not self.kernel.within or self.kernel.whole_columns or self.kernel.partials is not None:
            return False
        return self._reads_rows
