"""Reductions over rows that are themselves reduced: along each row first, by the kernel that has the row at hand, then over all rows.

What a loss sums over a whole batch may need statistics of each row, as ``F.kl_div(x.log_softmax(1), y.softmax(1))`` does. By itself the
sum reads everything once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusepass.codegen.ir.expr import Builder
from fusepass.codegen.ir.index import Axis
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.passes.axes import count, rename_axes, split_axes
from fusepass.codegen.passes.fuse import drop_unused, fuse_into_producer
from fusepass.codegen.passes.split import Cut, Splitter


def nest_reductions(program: Program, builder: Builder) -> Program:
    """Split each reduction along the rows of an earlier kernel whose row results it reads, where its first part can be that kernel's."""
    for position, kernel in enumerate(program.kernels):
        nested = _nested(program, builder, position) if _may_be_split(kernel) else None
        if nested is not None:
            return nest_reductions(nested, builder)
    return program


def _may_be_split(kernel: Kernel) -> bool:
    plain = kernel.anchor is None and kernel.partials is None and not kernel.stores and not kernel.scans
    positions = any(reduction.op.gives_position(1) for reduction in kernel.reductions)
    return plain and len(kernel.sweeps) == 1 and not positions


def _nested(program: Program, builder: Builder, position: int) -> Program | None:
    """`program` with the kernel at `position` as two, of which the first one is part of an earlier kernel."""
    kernel = split_axes(program.kernels[position], builder)
    before, after = program.kernels[:position], program.kernels[position + 1 :]
    for rows in _rows_of_others(kernel, before):
        work = Splitter(program, builder)
        work.split(kernel, Cut(rows, kernel))
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


def _rows_of_others(kernel: Kernel, before: tuple[Kernel, ...]) -> list[tuple[Axis, ...]]:
    """Axes of `kernel`, some but not all of those that it reduces, which kernels `before` it have results for each point of."""
    written = {store.buffer for each in before if each.col_count > 1 for store in each.row_stores}
    found = []
    for load in kernel.loads():
        rows = tuple(axis for axis in kernel.cols if axis in load.index.axes)
        if load.buffer in written and 1 < count(rows) < kernel.col_count:
            found.append(rows)
    return list(dict.fromkeys(found))
