"""What a library convolution says of itself, for the passes that put something else in its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusepass.codegen.ir.index import Bound, Index, contiguous_strides
from fusepass.codegen.ir.program import CONVERSION_TARGET, Buffer, LibraryCall, Program, Ref, Role

CONVOLUTIONS = ("aten.convolution.default", "aten._convolution.default")
"""Targets of library convolutions, whose first nine arguments mean the same. The second one is told how to compute."""


@dataclass(frozen=True)
class Geometry:
    """A convolution of inputs of the region, or of what they are converted into, without a bias, of which no tensor is empty.

    The weight is (results, channels of a group, *kernel), or (channels, results of a group, *kernel) where `transposed`.
    """

    source: Buffer
    weight: Buffer
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    groups: int


def geometry_of(program: Program, call: LibraryCall) -> Geometry | None:
    """The call as such a convolution; None where it is something else."""
    if call.target not in CONVOLUTIONS:
        return None
    source, weight, bias, stride, padding, dilation, transposed, _, groups = call.args[:9]
    operands = [program.buffer(ref.buffer) for ref in (source, weight) if isinstance(ref, Ref)]
    if bias is not None or len(operands) != 2 or not program.buffer(call.result).numel:
        return None
    x, w = operands
    if any(not each.numel or not _is_given(program, each) for each in operands):
        return None
    assert isinstance(groups, int)
    axes = len(x.shape) - 2
    steps = (per_axis(stride, axes), per_axis(padding, axes), per_axis(dilation, axes))
    return Geometry(x, w, *steps, bool(transposed), groups)


def _is_given(program: Program, buffer: Buffer) -> bool:
    """Whether `buffer` is an input of the region, or one laid out channel by channel."""
    made = {call.result for call in program.calls if call.target == CONVERSION_TARGET}
    first = buffer.strides == contiguous_strides(buffer.shape)
    return buffer.role is Role.INPUT or (first and buffer.name in made)


def per_axis(value: object, spatial: int) -> tuple[int, ...]:
    """An argument of a convolution with one number per spatial axis, which may be one for all."""
    assert isinstance(value, tuple)
    return value * spatial if len(value) == 1 else value


def within(indices: Sequence[Index], sizes: Sequence[int]) -> tuple[Bound, ...]:
    """The bounds that say that each index is that of an element along a dimension of its size."""
    return tuple(Bound(index, 0, size) for index, size in zip(indices, sizes, strict=True))
