"""Reductions over rows, by the kernel that reduces along them: it has each row on the chip, and keeps what it finds of the columns.

The mean over tokens of what is normalised, the gradients of a normalisation's weights beside that of its input, the mean load of experts
behind a softmax: by themselves they read everything once more. Blocks take pieces of the rows, and leave a result for each piece and
column, which a small kernel merges.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fusepass.codegen.ir.expr import Builder, Expr, Load
from fusepass.codegen.ir.index import Axis
from fusepass.codegen.ir.program import Kernel, Partials, Program
from fusepass.codegen.passes.axes import order_and_merge, rename_axes
from fusepass.codegen.passes.fuse import drop_unused, is_plain
from fusepass.codegen.passes.partials import Pieces
from fusepass.codegen.passes.rewrite import rewrite_kernel
from fusepass.codegen.passes.splitter import Splitter
from fusepass.codegen.passes.unify import unify_siblings


def reduce_over_rows(program: Program, builder: Builder, pieces: Pieces) -> Program:
    """`program` with each reduction over the rows of another kernel in that one, in so many `pieces` as that should have them in."""
    for position, along in enumerate(program.kernels):
        for place, over in enumerate(program.kernels):
            if position == place or not _reduces(along) or not _only_reduces(over):
                continue
            found = _joined(program, builder, position, place, pieces)
            if found is not None:
                return reduce_over_rows(found, builder, pieces)
    return program


def _reduces(kernel: Kernel) -> bool:
    several = kernel.row_count > 1 and kernel.col_count > 1
    return is_plain(kernel) and several and not kernel.is_pointwise and not kernel.scans


def _only_reduces(kernel: Kernel) -> bool:
    reduces = _reduces(kernel) and not kernel.stores and len(kernel.reduction_loops) == 1
    return reduces and all(each.op.arity == 1 and not each.op.finds_place for each in kernel.reductions)


def _joined(program: Program, builder: Builder, position: int, place: int, pieces: Pieces) -> Program | None:
    """`program` with what the kernel at `place` reduces in that at `position`; None where that has other points, or had better not."""
    first, second = sorted((position, place))
    before, between, after = program.kernels[:first], program.kernels[first + 1 : second], program.kernels[second + 1 :]
    if any(kernel.writes & program.kernels[second].reads for kernel in between):
        return None
    alone = replace(program, kernels=(program.kernels[position],))
    (along,) = order_and_merge(alone, builder).kernels
    unified = unify_siblings(along, rename_axes(program.kernels[place], builder, "over_"), builder)
    pair = None if unified is None else _Pair.of(unified.producer, unified.consumer, builder)
    if pair is None:
        return None
    trial, (reducing, *_) = pair.split(program, builder, 1)
    count = pieces(trial, reducing)
    if count is None:
        return None
    split, (reducing, *merging) = pair.split(program, builder, count)
    made = [reducing, *between, *merging] if position < place else [reducing, *merging, *between]
    return drop_unused(replace(split, kernels=(*before, *made, *after)))


@dataclass(frozen=True)
class _Pair:
    """A kernel and one that reduces over its rows, of each sample if there are `samples`, in the same axes."""

    along: Kernel
    over: Kernel
    samples: tuple[Axis, ...]

    @staticmethod
    def of(along: Kernel, over: Kernel, builder: Builder) -> _Pair | None:
        """None where `over` reduces something else, or one of them waits for memory that the other writes."""
        over = _without_memory(along, over, builder)
        rows = tuple(axis for axis in along.rows if axis in over.cols)
        samples = tuple(axis for axis in along.rows if axis in over.rows)
        columns = {axis for axis in along.cols if axis.size > 1}
        if {*over.cols} != {*rows} or {*over.rows} != {*samples, *columns}:
            return None
        if over.reads & along.writes or along.reads & over.writes:
            return None
        return _Pair(replace(along, rows=(*samples, *rows)), over, samples)

    def split(self, program: Program, builder: Builder, count: int) -> tuple[Program, tuple[Kernel, ...]]:
        """`program` with temporaries for results of so many pieces; the kernel that leaves these, and what merges them."""
        work, piece = Splitter(program, builder), Axis("piece", count)
        (reduction_loop,) = self.over.reduction_loops
        where = (*self.samples, piece, *self.along.cols)
        stores = tuple(store for reduction in reduction_loop for store in work.keep(reduction, where, None))
        partials = Partials(
            piece, bool(self.samples), reduction_loop, stores, over=len(self.along.rows) - len(self.samples)
        )
        work.merge_last(self.over, (piece,), {})
        return replace(program, buffers=tuple(work.buffers)), (replace(self.along, partials=partials), *work.kernels)


def _without_memory(along: Kernel, over: Kernel, builder: Builder) -> Kernel:
    """`over` with what `along` stores of the same row, in place of loads."""
    stored = {(store.buffer, store.index): store.value for store in along.row_stores}

    def leaf(node: Expr) -> Expr | None:
        value = stored.get((node.buffer, node.index)) if isinstance(node, Load) else None
        return None if value is None else builder.cast(value, node.dtype)

    return rewrite_kernel(over, builder, leaf=leaf)
