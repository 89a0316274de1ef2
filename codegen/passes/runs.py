"""Convolutions as products whose columns are neighbours in memory: which those are."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from fusepass.codegen.ir.index import contiguous_strides
from fusepass.codegen.ir.product import PLACE, Runs

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
