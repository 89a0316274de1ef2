"""Kernels that copy whole buffers."""

from __future__ import annotations

from collections.abc import Sequence

from fusepass.codegen.ir.expr import Builder
from fusepass.codegen.ir.index import Axis, axis_index, linear
from fusepass.codegen.ir.program import Buffer, Kernel, Store


def copy_kernel(name: str, pairs: Sequence[tuple[Buffer, Buffer]], builder: Builder, origin: tuple[str, ...]) -> Kernel:
    """The kernel that copies the first buffer of each pair to the second; all are of one shape, and may lie differently."""
    axes = tuple(Axis(f"d{number}", size) for number, size in enumerate(pairs[0][0].shape))
    where = [axis_index(axis) for axis in axes]
    stores = tuple(
        Store(
            made.name, linear(where, made.strides), builder.load(given.name, linear(where, given.strides), given.dtype)
        )
        for given, made in pairs
    )
    return Kernel(name, axes, (), (), (), stores, origin)
