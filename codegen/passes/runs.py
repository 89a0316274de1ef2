"""Convolutions as products whose columns are neighbours in memory: which those are."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from fusepass.codegen.ir.index import contiguous_strides
from fusepass.codegen.ir.product import PLACE, Runs

_MOST_BETWEEN = 1 / 12  # of the positions, that columns between the rows of a result may add
_PAIR = 2 * PLACE  # channels that a product takes at once
_MOST_CHANNELS = 64  # of which the runs of two blocks have room on the chip


def runs_of(
    planes: Sequence[int], positions: Sequence[int], taps: Sequence[tuple[int, int]], channels: int
) -> Runs | None:
    """The runs of a convolution whose neighbouring positions read neighbours.

    `planes` are the sizes of the packed input along the spatial axes, its border included; of `positions` along each there are
    `taps`, so many, one so many elements from the next. None where nothing is read twice along the last axis, where the `channels`
    of runs have no room on the chip, or where there would be many more columns than positions.
    """
    *outer, (count, apart) = taps
    if count == 1 or channels % _PAIR or channels > _MOST_CHANNELS:
        return None
    if columns_of(positions, planes) > (1 + _MOST_BETWEEN) * prod(positions):
        return None
    steps = [(size, step * stride) for (size, step), stride in zip(outer, contiguous_strides(planes), strict=False)]
    return Runs(tuple(each for each in steps if each[0] > 1), count, apart, channels // PLACE, prod(planes))


def columns_of(positions: Sequence[int], planes: Sequence[int]) -> int:
    """From the first of `positions` to one past the last, in planes of those sizes."""
    strides = contiguous_strides(planes)
    return 1 + sum((count - 1) * stride for count, stride in zip(positions, strides, strict=True))
