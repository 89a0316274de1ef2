"""The spatial axes of a convolution as steps in its input: where the numbers stand that a position of the result is a sum of, and which columns
of the product that it becomes are neighbours in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from fusepass.codegen.ir.convolution import Convolution
from fusepass.codegen.ir.index import contiguous_strides
from fusepass.codegen.ir.product import PLACE, Border, Runs
from fusepass.codegen.ir.program import Buffer


@dataclass(frozen=True)
class Step:
    """One spatial axis of the result: its element ``(first + position) * spread + phase - padding`` is a sum over `taps`.

    A position's tap t reads the packed input at ``position * step + t * apart``, and the weight at ``place(phase, t)``.

    Attributes:
        size: of the result.
        positions, spread: spread 1 but for transposed convolutions, where it is the stride.
        shift: ``first * spread - padding``.
        taps: of each phase.
        step, apart: in elements of the packed input.
        before, after: its border.
        start, along_phase, along_tap: the weight's place is ``start + along_phase * phase + along_tap * tap``.
    """

    size: int
    positions: int
    spread: int
    shift: int
    taps: int
    step: int
    apart: int
    before: int
    after: int
    start: int
    along_phase: int
    along_tap: int


def step_of(anchor: Convolution, source: Buffer, weight: Buffer, result: Buffer, axis: int) -> Step:
    size, given, kernel = (buffer.shape[2 + axis] for buffer in (result, source, weight))
    stride, padding, dilation = anchor.stride[axis], anchor.padding[axis], anchor.dilation[axis]
    if not anchor.transposed:
        after = (size - 1) * stride + (kernel - 1) * dilation + 1 - given - padding
        return Step(size, size, 1, 0, kernel, stride, dilation, padding, after, 0, 0, 1)
    # Element o of the result reads input (o + padding - k dilation) / stride for the k for which that is whole: with o + padding =
    # q stride + phase those are k = phase + j stride and inputs q - j, or with stride 1 k = j and inputs q - j dilation.
    first, last = padding // stride, (size - 1 + padding) // stride
    taps = kernel // stride
    before = (taps - 1) * dilation - first
    after = last + 1 - given
    return Step(
        size,
        positions=last + 1 - first,
        spread=stride,
        shift=first * stride - padding,
        taps=taps,
        step=1,
        apart=dilation,
        before=before,
        after=after,
        start=(taps - 1) * stride,
        along_phase=1,
        along_tap=-stride,
    )


def has_even_phases(anchor: Convolution, weight: Buffer) -> bool:
    """Whether all phases of a transposed convolution have as many kernel positions, one stride apart.

    Zero weights could stand for those that a phase lacks, but with an infinity they would make numbers that are none.
    """
    axes = zip(weight.shape[2:], anchor.stride, anchor.dilation, strict=True)
    return all(stride == 1 or (dilation == 1 and kernel % stride == 0) for kernel, stride, dilation in axes)


def planes_of(source: Buffer, steps: Sequence[Step]) -> tuple[int, ...]:
    """Sizes of the input with its border."""
    return tuple(size + step.before + step.after for size, step in zip(source.shape[2:], steps, strict=True))


def border_of(steps: Sequence[Step], sizes: Sequence[int], strides: Sequence[int], channels: int) -> tuple[Border, ...]:
    """The spatial axes of an input that lies as it is, beyond whose ends there are zeros."""
    below = contiguous_strides([step.positions for step in steps])
    deeper = contiguous_strides([*(step.taps for step in steps), channels])
    return tuple(
        Border(size, stride, step.before, step.positions, rows, step.step, step.taps, terms, step.apart)
        for step, size, stride, rows, terms in zip(steps, sizes, strides, below, deeper, strict=False)
    )


_MOST_BETWEEN = 1 / 12  # of the positions, that columns between the rows of a result may add
_PAIR = 2 * PLACE  # channels that a product takes at once
_MOST_CHANNELS = 64  # of a run: the runs of two blocks have room on the chip then


def runs_of(
    planes: Sequence[int], positions: Sequence[int], taps: Sequence[tuple[int, int]], channels: int
) -> Runs | None:
    """The runs of a convolution whose neighbouring positions read neighbours.

    `planes` are the sizes of the packed input along the spatial axes, its border included; of `positions` along each there are
    `taps`, so many, one so many elements from the next. Where the `channels` are many, a run has some of them. None where nothing is
    read twice along the last axis, where channels do not fill runs, or where there would be many more columns than positions.
    """
    *outer, (count, apart) = taps
    some = channels_of_run(channels)
    if count == 1 or channels % some or some % _PAIR:
        return None
    if columns_of(positions, planes) > (1 + _MOST_BETWEEN) * prod(positions):
        return None
    steps = [(size, step * stride) for (size, step), stride in zip(outer, contiguous_strides(planes), strict=False)]
    steps.append((channels // some, some // PLACE * prod(planes)))
    return Runs(tuple(each for each in steps if each[0] > 1), count, apart, some // PLACE, prod(planes))


def channels_of_run(channels: int) -> int:
    """How many of the channels of a position a run has."""
    return min(channels, _MOST_CHANNELS)


def columns_of(positions: Sequence[int], planes: Sequence[int]) -> int:
    """From the first of `positions` to one past the last, in planes of those sizes."""
    strides = contiguous_strides(planes)
    return 1 + sum((count - 1) * stride for count, stride in zip(positions, strides, strict=True))
