"""Columns of CPU kernels as text: how many they are, and tiles of them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from fusepass.codegen.ir.index import Axis
from fusepass.codegen.render.numbers import free


def points(axes: Sequence[Axis]) -> int:
    """How many points `axes` have."""
    return prod(axis.size for axis in axes)


def scaled(count: int | str, factor: int) -> str:
    """The text of ``count * factor``."""
    if isinstance(count, int):
        return free(count * factor)
    return count if factor == 1 else f"{free(factor)} * {count}"


def tile(cols: tuple[Axis, ...], size: int) -> tuple[tuple[Axis, ...], Axis | None, tuple[Axis, ...]]:
    """The axis of `cols` to cut into tiles of about `size` points: (axes before it, the axis, axes after it)."""
    if not cols:
        return (), None, ()
    first = len(cols) - 1
    while first > 0 and points(cols[first:]) * 2 <= size:
        first -= 1
    return cols[:first], cols[first], cols[first + 1 :]
