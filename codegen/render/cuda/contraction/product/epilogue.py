"""Writes what a CUDA kernel with a matrix product does with sums that are laid out in shared memory."""

from __future__ import annotations

from collections.abc import Iterable

from fusepass.codegen.ir.expr import Apply, Expr, children
from fusepass.codegen.ir.ops import CHEAP
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.render.cuda.contraction.product.lines import Lines
from fusepass.codegen.render.cuda.contraction.product.sums import SumsWriter
from fusepass.codegen.render.cuda.contraction.product.vectors import ResultVectors, neighbours_of
from fusepass.codegen.render.printer import Printer
from fusepass.codegen.render.spelling import C_TYPES, bare, block
from fusepass.codegen.schedule_product import ProductSchedule

_ROWS_AT_ONCE = 16  # of results: what the epilogue loads for them is on its way together


class Epilogue(SumsWriter):
    """Writes the lines behind a kernel's sums where a warp lays them out.

    Attributes:
        ready: what `early` makes of a sum; the same where there is nothing that depends on the row alone.
    """

    def __init__(
        self, kernel: Kernel, program: Program, plan: ProductSchedule, pointers: dict[str, str], printer: Printer
    ) -> None:
        super().__init__(kernel, program, plan, pointers, printer)
        self.ready = self._ready() if self._is_plain else self.stat
        self.lines = Lines(kernel, program, plan, pointers, printer, self.ready) if kernel.cols else None

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
        head = f"for (int {c.across} = 0; {c.across} < {2 * self.plan.tiling.n}; ++{c.across})"
        inside = [*places, *along.lines, "#pragma unroll", *block(head, each)]
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
        along = outside.child()
        along.define_axis(self.columns, c.column)
        here = along.child()
        here.define_axis(self.rows, c.row)
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
            test = along.child()
            test.define_axis(self.rows, c.row)
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
