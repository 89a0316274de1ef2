"""Reductions over rows that are themselves reduced: along each row first, by the kernel that has the row at hand, then over all rows.

What a loss sums over a whole batch may need statistics of each row, as ``F.kl_div(x.log_softmax(1), y.softmax(1))`` does. By itself the
sum reads everything once more. Of ``F.cross_entropy`` it reads the statistics and one element of each row, in which it touches other
memory for each: where rows are short, that is much of what they have, and the kernel that has the row at hand finds it near.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from fusepass.codegen.ir.expr import Builder, Expr, Gather, Load, walk
from fusepass.codegen.ir.index import Axis
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.passes.axes import count, rename_axes, split_axes
from fusepass.codegen.passes.fuse import drop_unused, fuse_into_producer
from fusepass.codegen.passes.splitter import Cut, Splitter

_SHORT_ROW = 4096  # elements; longer ones may be read again, and what is found once at their ends then holds up more threads than it saves


def nest_reductions(program: Program, builder: Builder) -> Program:
    """Split each reduction along the rows of an earlier kernel whose row results it reads, where its first part can be that kernel's."""
    for position, kernel in enumerate(program.kernels):
        nested = _nested(program, builder, position) if _may_be_split(kernel) else None
        if nested is not None:
            return nest_reductions(nested, builder)
    return program


def _may_be_split(kernel: Kernel) -> bool:
    plain = kernel.anchor is None and kernel.partials is None and not kernel.stores and not kernel.scans
    positions = any(reduction.op.finds_place for reduction in kernel.reductions)
    return plain and len(kernel.reduction_loops) == 1 and not positions


def _nested(program: Program, builder: Builder, position: int) -> Program | None:
    """`program` with the kernel at `position` as two, of which the first one is part of an earlier kernel."""
    kernel = split_axes(program.kernels[position], builder)
    before, after = program.kernels[:position], program.kernels[position + 1 :]
    results = {store.buffer: each.col_count for each in before if each.col_count > 1 for store in each.row_stores}
    computed = _computed(kernel, results)
    for rows in _rows_of_others(kernel, results, computes=bool(computed)):
        work = Splitter(program, builder)
        if count(rows) < kernel.col_count:
            work.split(kernel, Cut(rows, kernel))
        else:
            work.compute(kernel, computed)
        partial, *merging = work.kernels
        fused = _into_producers(before, rename_axes(partial, builder, f"n{position}_"), builder)
        if fused is not None:
            kernels = (*fused, *merging, *after)
            return drop_unused(replace(program, buffers=tuple(work.buffers), kernels=kernels))
    return None


def _into_producers(before: Sequence[Kernel], kernel: Kernel, builder: Builder) -> Sequence[Kernel] | None:
    """The kernels `before` and `kernel`, which is part of one of them, or makes one of several; None where it stays alone."""
    kernels: Sequence[Kernel] = (*before, kernel)
    while (fused := fuse_into_producer(kernels, kernels.index(kernel), builder)) is not None:
        (kernel,) = [each for each in fused if each not in kernels]
        kernels = fused
    return kernels if len(kernels) <= len(before) else None


def _rows_of_others(kernel: Kernel, results: Mapping[str, int], *, computes: bool) -> list[tuple[Axis, ...]]:
    """Axes of `kernel`, of those that it reduces, for each point of which it reads one of the `results` of earlier kernels' rows, which
    have so many elements; all of them, where it `computes` something of each and these rows are short."""
    found = []
    for load in kernel.loads():
        rows = tuple(axis for axis in kernel.cols if axis in load.index.axes)
        if load.buffer not in results or count(rows) < 2:
            continue
        alone = count(tuple(axis for axis in kernel.rows if axis not in load.index.axes)) == 1
        if count(rows) < kernel.col_count or (computes and alone and results[load.buffer] <= _SHORT_ROW):
            found.append(rows)
    return list(dict.fromkeys(found))


def _computed(kernel: Kernel, results: Collection[str]) -> list[Expr]:
    """What `kernel` reduces that it computes from `results` and something else in memory."""
    values = {id(value): value for reduction in kernel.reductions for value in reduction.values}
    read = {key: [node for node in walk(value) if isinstance(node, Load | Gather)] for key, value in values.items()}
    return [
        value
        for key, value in values.items()
        if len(read[key]) > 1 and any(isinstance(node, Load) and node.buffer in results for node in read[key])
    ]
