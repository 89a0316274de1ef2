"""A convolution whose result is read by one kernel behind its statistics is computed once more there, and never written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fusepass.codegen.ir.expr import Builder, Expr, Gather, Load, Window
from fusepass.codegen.ir.program import Kernel, Program, Role
from fusepass.codegen.passes.alignment import Aligned, align
from fusepass.codegen.passes.partials import Pieces, reduce_positions
from fusepass.codegen.passes.rewrite import rewrite_kernel

Rematerialise = Callable[[Program, Kernel, Kernel], bool]
"""Whether two kernels with one convolution, the first of which keeps nothing but what it reduces, take less time than one that stores
its results and another that reads them."""


def never(program: Program, first: Kernel, second: Kernel) -> bool:
    """A `Rematerialise` of devices that compute slowly."""
    return False


def rematerialise(
    program: Program, builder: Builder, position: int, pieces: Pieces, again: Rematerialise
) -> Program | None:
    """`program` with what is reduced over the positions of the convolution at `position` in its kernel, which stores nothing else, and a
    second kernel for it, in the place of the only one that reads its results.

    None where results are read by others, or not each by the one that stands at its point, or where `again` says no.
    """
    reduced = reduce_positions(
        program, builder, position, lambda made, kernel: pieces(made, replace(kernel, stores=()))
    )
    if reduced is None:
        return None
    program = reduced
    kernel = program.kernels[position]
    if len(kernel.stores) != 1:
        return None
    (store,) = kernel.stores
    readers = [number for number, each in enumerate(program.kernels) if store.buffer in each.reads]
    if program.buffer(store.buffer).role is not Role.TEMP or len(readers) != 1:
        return None
    (number,) = readers
    reader = program.kernels[number]
    if reader.anchor is not None or any(isinstance(node, Window | Gather) for node in reader.nodes):
        return None
    read = next(load.index for load in reader.loads() if load.buffer == store.buffer)
    aligned = align(reader, builder, read, kernel, store)
    second = None if aligned is None else _with_convolution(aligned, builder, kernel)
    if second is None or store.buffer in second.reads:
        return None
    first = replace(kernel, stores=())
    kernels = [*program.kernels]
    kernels[position], kernels[number] = first, second
    buffers = tuple(buffer for buffer in program.buffers if buffer.name != store.buffer)
    made = replace(program, kernels=tuple(kernels), buffers=buffers)
    return made if again(made, first, second) else None


def _with_convolution(aligned: Aligned, builder: Builder, kernel: Kernel) -> Kernel | None:
    """A kernel with the convolution of `kernel` in place of the loads of its results; None where it reduces over more than channels."""
    reader, (store,), (_, channel) = aligned.kernel, kernel.stores, kernel.lines
    cols = [axis for axis in reader.cols if axis.size > 1]
    if reader.cols and {*cols} != {*aligned.along[channel]}:
        return None

    def own(node: Expr) -> Expr | None:
        at_hand = isinstance(node, Load) and node.buffer == store.buffer and node.index == store.index
        return builder.cast(store.value, node.dtype) if at_hand else None

    there = rewrite_kernel(rewrite_kernel(reader, builder, aligned.places), builder, leaf=own)
    rows = tuple(axis for axis in kernel.rows if axis is not channel or not reader.cols)
    columns = (channel,) if reader.cols else ()
    origin = tuple(dict.fromkeys((*kernel.origin, *reader.origin)))
    return replace(there, rows=rows, cols=columns, anchor=kernel.anchor, origin=origin)
