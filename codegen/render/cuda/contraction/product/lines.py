"""The epilogue of a CUDA kernel with a matrix product whose own columns are rows of the product, or neighbours in one.

Sums are laid out in shared memory. There a thread takes a *line*, all columns of a row of the kernel: of neighbours, lines of its warp's
rows; of rows of the product, which several warps have, lines of the block's tile.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Apply, Expr, children, descend, walk
from fusepass.codegen.ir.index import Axis
from fusepass.codegen.ir.ops import CHEAP
from fusepass.codegen.ir.product import Product
from fusepass.codegen.ir.program import Kernel, Program, Reduction, Store
from fusepass.codegen.render.cuda.contraction.loops import ReductionLoops
from fusepass.codegen.render.printer import Printer
from fusepass.codegen.render.spelling import block, braces
from fusepass.codegen.schedule_product import ProductSchedule
from fusepass.codegen.schedule_product.tiles import WARP_ROWS

_AT_ONCE = 16  # columns that are loaded together


class Lines:
    """Writes them; `ready` is what the sums have become before they are laid out."""

    def __init__(self, kernel: Kernel, program: Program, plan: ProductSchedule, printer: Printer, ready: Expr) -> None:
        assert isinstance(kernel.anchor, Product)
        self.kernel, self.tiling, self.ready, self.index_type = kernel, plan.tiling, ready, printer.index_type
        self.apart, self.c = kernel.anchor.apart, printer.names.locals
        printer.along = frozenset(kernel.cols)
        self.reduction_loops = ReductionLoops(kernel, program, printer)

    @property
    def _groups(self) -> int:
        """How many rows of the kernel that lie `apart` from each other, with all of their columns, a tile has."""
        return min(self.kernel.rows[2].size // self.apart, self.tiling.rows // (self.kernel.col_count * self.apart))

    @property
    def _parts(self) -> int:
        """Threads of a warp that share a line."""
        lines = self.tiling.columns * self.apart * self._groups if self.apart else self.tiling.threads
        return max(self.tiling.threads // lines, 1)

    def write(self) -> Iterable[str]:
        """What is made of the sums that lie in ``room``."""
        c = self.c
        parts, count, start, step = 1, WARP_ROWS * self._windows, c.lane, 32
        if self.apart:
            parts, count = self._parts, self.tiling.columns * self.apart * self._groups
            start, step = "threadIdx.x", self.tiling.threads // self._parts
            if parts > 1:
                start = f"threadIdx.x / 32 * {32 // parts} + {c.lane} % {32 // parts}"
        yield "__syncthreads();" if self.apart else "__syncwarp();"
        yield "#pragma unroll 1"
        head = f"for (int {c.line} = {start}; {c.line} < {count}; {c.line} += {step})"
        yield from block(head, [*self._place(), *self._phases()])

    @property
    def _windows(self) -> int:
        """Lines beside each other in a row of a warp."""
        return self.tiling.laid_out // self.kernel.col_count

    def _place(self) -> Iterable[str]:
        """The row and the column of a line, and where its first sum lies."""
        c = self.c
        pitch, points = self.tiling.room_pitch, self.kernel.col_count
        whole = self.index_type
        if not self.apart:
            yield f"const {whole} {c.row} = {whole}({c.first_row}) + {c.Tile}::warp_row() + {c.line} / {self._windows};"
            yield f"const {whole} {c.column} = {whole}({c.first_column}) / {points} + {c.line} % {self._windows};"
            yield f"float {c.values}[{points}];"
            yield f"fp::take({c.values}, {c.room} + {c.line} / {self._windows} * {pitch} + {c.line} % {self._windows} * {points});"
            return
        together, inner = points * self.apart, self.apart
        first = f"{whole}({c.first_row}) / {together} * {inner}"
        yield f"const int {c.across} = {c.line} / {inner} % {self.tiling.columns};"
        yield f"const int {c.down} = {c.line} / {inner * self.tiling.columns} * {together} + {c.line} % {inner};"
        yield f"const {whole} {c.row} = {first} + {c.down} / {together} * {inner} + {c.line} % {inner};"
        yield f"const {whole} {c.column} = {whole}({c.first_column}) + {c.across};"
        yield f"float* const {c.at} = reinterpret_cast<float*>({c.pool}) + {c.down} * {pitch} + {c.across};"

    def _existing(self) -> tuple[list[str], str]:
        """The condition that the line exists, and lines before it."""
        c = self.c
        *_, rows, columns = self.kernel.rows
        *_, high, long = self.kernel.matrix
        conditions = []
        if high % (self.kernel.col_count * self.apart * self._groups if self.apart else self.tiling.rows):
            conditions.append(f"{c.row} < {rows.size}")
        if long % self.tiling.columns:
            conditions.append(f"{c.column} < {columns.size}")
        test = self.reduction_loops.row_scope([], self._axes)
        conditions += [test.condition(self.kernel.within)] if self.kernel.within else []
        return test.lines, " && ".join(conditions)

    @property
    def _axes(self) -> dict[Axis, str]:
        c = self.c
        pieces, batches, rows, columns = self.kernel.rows
        batch = c.batch if batches.size > 1 else "0"
        return {pieces: "0", batches: batch, rows: c.row, columns: c.column}

    def _phases(self) -> Iterable[str]:
        c = self.c
        kernel, parts = self.kernel, self._parts
        lines, exists = self._existing()
        yield from lines
        yield from [f"const bool {c.exists} = {exists};"] if exists else ()
        where = f"if ({c.exists})" if exists else ""
        ends = [store.value for store in (*kernel.row_stores, *kernel.stores)]
        ready = self.ready
        for number, reduction_loop in enumerate(kernel.reduction_loops):
            yield from map(self.reduction_loops.declared, reduction_loop)
            roots, *others = [
                [value for each in phase for value in each.values] for phase in kernel.reduction_loops[number:]
            ]
            kept = self._kept(ready, roots, [*itertools.chain(*others), *ends])
            yield from _inside(where, self._phase(ready, roots, reduction_loop, (), kept))
            ready = kept or ready
            if parts > 1:
                merge = f"fp::merge_across<{32 // parts}, 32>"
                yield from (f"{merge}({self.reduction_loops.state(reduction)});" for reduction in reduction_loop)
        scope = self.reduction_loops.row_scope([store.value for store in kernel.row_stores], self._axes)
        for store in kernel.row_stores:
            scope.lines.append(self.reduction_loops.stored(scope, store))
        if kernel.row_stores:
            first = [c.exists] if exists else []
            first += [f"{c.lane} < {32 // parts}"] if parts > 1 else []
            yield from _inside(f"if ({' && '.join(first)})" if first else "", scope.lines)
        if kernel.stores:
            roots = [store.value for store in kernel.stores]
            yield from _inside(where, self._phase(ready, roots, (), kernel.stores, None))

    def _kept(self, ready: Expr, roots: Sequence[Expr], later: Sequence[Expr]) -> Expr | None:
        """The largest value of a phase through which alone `later` ones go on from `ready`, if that saves more than keeping costs."""
        for node in reversed(list(walk(*roots))):
            above = [each for each in walk(node) if isinstance(each, Apply) and ready in _below(each)]
            costly = any(each.op not in CHEAP for each in above) or (above and not self.apart)
            if costly and node.dtype is DType.F32 and _leads(later, node, ready):
                return node
        return None

    def _phase(
        self,
        ready: Expr,
        roots: Sequence[Expr],
        reduction_loop: Sequence[Reduction],
        stores: Sequence[Store],
        kept: Expr | None,
    ) -> list[str]:
        c = self.c
        outer = self.reduction_loops.row_scope([*roots, *([] if kept is None else [kept])], self._axes)
        sum_at = f"{c.at}[{c.col} * {self.apart * self.tiling.room_pitch}]" if self.apart else f"{c.values}[{c.col}]"
        lines = self.reduction_loops.column(outer, c.col, ready, reduction_loop, stores, kept, sum_at)
        unroll = f"#pragma unroll {_AT_ONCE}" if self.apart else "#pragma unroll"
        parts = self._parts
        first, step = (f"{c.lane} / {32 // parts}", f"{c.col} += {parts}") if parts > 1 else ("0", f"++{c.col}")
        head = f"for (int {c.col} = {first}; {c.col} < {self.kernel.col_count}; {step})"
        return [*outer.lines, unroll, *block(head, [f"const float {c.sum} = {sum_at};", *lines])]


def _below(node: Expr) -> list[Expr]:
    return list(walk(node))


def _leads(roots: Sequence[Expr], node: Expr, ready: Expr) -> bool:
    """Whether `roots` need `node`, and `ready` through it alone."""
    found = [*descend(roots, lambda each: () if each is node else children(each))]
    return any(each is node for each in found) and not any(each is ready for each in found)


def _inside(head: str, lines: Sequence[str]) -> list[str]:
    """`lines` with names of their own, where `head` says."""
    return block(head, lines) if head else braces(lines)
