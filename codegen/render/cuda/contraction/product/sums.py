"""What the ways of going on with a matrix product's sums have in common."""

from __future__ import annotations

from collections.abc import Iterable

from fusepass.codegen.ir.expr import Apply, Expr, Gather, Load, ReductionResult, Window, children
from fusepass.codegen.ir.ops import Op
from fusepass.codegen.ir.product import Arithmetic, Product
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.ir.transpose import near_step
from fusepass.codegen.render.cuda.partials import RowStates
from fusepass.codegen.render.printer import Printer, Scope
from fusepass.codegen.render.spelling import bare, block
from fusepass.codegen.schedule_product import ProductSchedule

_TOGETHER = 2, 4, 8  # rows that a warp may take together


class SumsWriter:
    """Knows a kernel's sums, and the rows that a thread has some of.

    Attributes:
        sum: of a point.
        stat: the same, rescaled where that is done with all sums of a thread at once.
        states: what is reduced over the columns; None where nothing is.
    """

    def __init__(
        self, kernel: Kernel, program: Program, plan: ProductSchedule, pointers: dict[str, str], printer: Printer
    ) -> None:
        assert isinstance(kernel.anchor, Product)
        self.kernel, self.product, self.program, self.plan = kernel, kernel.anchor, program, plan
        self.pointers, self.printer, self.index_type = pointers, printer, printer.index_type
        self.c = printer.names.locals
        self.pieces, self.batches, self.rows, self.columns = kernel.rows
        self.sum = next(node for node in kernel.nodes if isinstance(node, ReductionResult))
        self.stat = self._rescaled() if self._is_plain else self.sum
        self.states = RowStates(kernel, plan, pointers, printer, self._index) if kernel.partials else None

    @property
    def _is_plain(self) -> bool:
        """Whether a thread has its final sums in the order of `multiply_group`, for rows of the result."""
        tiling = self.plan.tiling
        return tiling.groups and not tiling.turned and tiling.m == 1 and self.product.arithmetic is Arithmetic.HALVES

    def _rescaled(self) -> Expr:
        users = [node for node in self.kernel.nodes if self.sum in children(node)]
        if len(users) != 1 or any(root is self.sum for root in self.kernel.roots):
            return self.sum
        (user,) = users
        rescales = isinstance(user, Apply) and user.op is Op.RESCALE and user.args[0] is self.sum
        return user if rescales and self._of_row(children(user)[1]) else self.sum

    def _of_row(self, node: Expr) -> bool:
        needs = self.printer.dataflow.needs(node)
        inside = () if self.product.apart else self.kernel.cols
        return self.sum not in needs and not needs & {self.columns, *inside}

    @property
    def _reads_rows(self) -> bool:
        """Whether nothing is read but what the rows have in common."""
        return all(self._of_row(node) for node in self.kernel.nodes if isinstance(node, Load | Gather | Window))

    def rescaled(self) -> Iterable[str]:
        """Multiplies a thread's sums, which are those of two rows, with factors that are 1 as a rule."""
        c = self.c
        if self.stat is self.sum:
            return
        factor = children(self.stat)[1]
        outside = self._outside()
        along = outside.child()
        places = self._row_axes(along)
        self.printer.expect([factor])
        rescale = f"fp::rescale({c.sums}[0], {c.down}, {bare(along.value(factor))});"
        yield from outside.lines
        yield from self._two_rows([*places, *along.lines, rescale])

    def _row_axes(self, along: Scope) -> list[str]:
        """Defines what a row of the product stands for, by lines before those of `along`."""
        c = self.c
        apart, several = self.product.apart, self.kernel.col_count
        if not (apart and self.kernel.cols):
            along.define_axis(self.rows, c.row)
            return []
        along.define_axis(self.rows, c.phase)
        along.define_axis(self.kernel.cols[0], c.channel)
        phase = f"{c.row} / {several * apart} * {apart} + {c.row} % {apart}"
        return [
            f"const {self.index_type} {c.phase} = {phase};",
            f"const {self.index_type} {c.channel} = {c.row} / {apart} % {several};",
        ]

    def _outside(self) -> Scope:
        c = self.c
        outside = Scope(self.printer)
        outside.define_axis(self.pieces, c.piece if self.pieces.size > 1 else "0")
        outside.define_axis(self.batches, c.batch if self.batches.size > 1 else "0")
        return outside

    def over_laid_out(
        self, body: list[str], at: tuple[str, str], steps: tuple[str, int], at_once: int, along: Scope, exists: str
    ) -> Iterable[str]:
        """`body` for each ``row`` and ``column`` that a warp has laid out, `at` (down, across) of its tile, in `steps` along both: a statement, a number.

        `along` has the lines of a column; it has points only where `exists` says so.
        """
        c, tiling = self.c, self.plan.tiling
        (down, across), (high, _), (rows, columns) = at, tiling.warp_tile, steps
        row = self._index(f"{c.first_row} + {c.Tile}::warp_row() + {down}")
        loop = [
            f"#pragma unroll {at_once}",
            *block(
                f"for (int {c.down} = 0; {c.down} < {high}; {rows})",
                [f"const {self.index_type} {c.row} = {row};", *body],
            ),
        ]
        inside = [*along.lines, *(block(f"if ({exists})", loop) if exists else loop)]
        if self.columns.size % tiling.columns:
            inside = block(f"if ({c.column} < {self.columns.size})", inside)
        column = self._index(f"{c.first_column} + {c.Tile}::warp_column() + {c.across} + {across}")
        yield "#pragma unroll 1"
        yield from block(
            f"for (int {c.across} = 0; {c.across} < {tiling.laid_out}; {c.across} += {columns})",
            [f"const {self.index_type} {c.column} = {column};", *inside],
        )

    def _two_rows(self, inside: list[str]) -> Iterable[str]:
        """`inside` for both rows of a thread."""
        c = self.c
        rows = self.kernel.matrix[2]
        if rows % self.plan.tiling.rows:
            inside = block(f"if ({c.row} < {rows})", inside)
        row = self._index(f"{c.first_row} + {c.Tile}::warp_row() + {c.lane} / 4 + {c.down} * 8")
        yield "#pragma unroll"
        yield from block(
            f"for (int {c.down} = 0; {c.down} < 2; ++{c.down})", [f"const {self.index_type} {c.row} = {row};", *inside]
        )

    def _rows_between(self) -> int:
        """How many rows lie between two neighbours of one row, that row included, where all stores have them so; else 1."""
        steps = {
            tuple(near_step(store.index, axis) for axis in (self.rows, self.columns)) for store in self.kernel.stores
        }
        found = next((int(apart) for beside, apart in steps if beside == 1 and apart in _TOGETHER), 1)
        return found if len(steps) == 1 and self.plan.tiling.warp_tile[0] % found == 0 else 1

    def _index(self, text: str) -> str:
        return text if self.plan.wide else f"int({text})"
