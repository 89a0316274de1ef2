"""A temporary that a product in runs writes gets room for every column of the product, those among them that exist in no result.

Then a row of the product lies in it as it is: neighbours are stored from where they are summed, in whole sectors, and nobody asks which
of them exist but who reduces them. In the result's own shape rows begin anywhere in a sector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Builder, Expr, Gather, Load
from fusepass.codegen.ir.index import axis_index, contiguous_strides, delinearize, linear
from fusepass.codegen.ir.program import Buffer, Kernel, Program, Role, Store
from fusepass.codegen.passes.rewrite import rewrite_kernel

_SECTOR = 8  # floats
_PAIR = 2  # floats at least that whoever reads the temporary can read at once


def roomy(buffer: Buffer, store: Store, kernel: Kernel, planes: Sequence[int], columns: int) -> Buffer | None:
    """`buffer`, which `store` of `kernel` writes at its own point, with room for so many `columns` in `planes` of those sizes.

    None where it is no temporary of such a product alone, or where rows could no longer be read in pairs.
    """
    whole = (
        buffer.role is Role.TEMP and buffer.dtype is DType.F32 and buffer.strides == contiguous_strides(buffer.shape)
    )
    if not whole or store.index != linear([axis_index(axis) for axis in kernel.rows], buffer.strides):
        return None
    if buffer.shape[-1] % _PAIR or (len(planes) > 1 and planes[-1] % _PAIR):
        return None
    shape = (*buffer.shape[:2], -(-columns // _SECTOR) * _SECTOR)
    return replace(buffer, shape=shape, strides=contiguous_strides(shape))


def read_from(kernel: Kernel, builder: Builder, old: Buffer, new: Buffer, planes: Sequence[int]) -> Kernel:
    """`kernel` with its loads of `old` as loads of `new`, in which results lie in `planes` of those sizes."""
    strides = (*new.strides[:2], *contiguous_strides(planes))

    def moved(node: Expr) -> Expr | None:
        if not isinstance(node, Load) or node.buffer != old.name:
            return None
        return builder.load(new.name, linear(delinearize(node.index, old.shape), strides), node.dtype)

    return rewrite_kernel(kernel, builder, leaf=moved)


def with_room(program: Program, builder: Builder, before: Kernel, planes: Sequence[int]) -> Program:
    """`program` with room for the columns of its first kernel in the temporaries that this writes.

    `before` is that kernel with the dimensions of the result as rows. What is read by kernels that reduce stays as it is: their rows would
    lie in pieces. So does what is read at computed places, which count in steps of the result's own strides.
    """
    kernel, *rest = program.kernels
    _, sample, row, column = kernel.rows
    kept = frozenset[str]().union(*(each.reads for each in rest if each.reduction_loops))
    kept |= {node.buffer for each in rest for node in each.nodes if isinstance(node, Gather)}
    stores, buffers = [*kernel.stores], {each.name: each for each in program.buffers}
    for number, (store, own) in enumerate(zip(kernel.stores, before.stores, strict=True)):
        old = buffers[store.buffer]
        new = None if old.name in kept else roomy(old, own, before, planes, column.size)
        if new is None:
            continue
        buffers[old.name] = new
        stores[number] = replace(store, index=linear([axis_index(axis) for axis in (sample, row, column)], new.strides))
        rest = [read_from(each, builder, old, new, planes) for each in rest]
    kernels = (replace(kernel, stores=tuple(stores)), *rest)
    return replace(program, kernels=kernels, buffers=tuple(buffers.values()))
