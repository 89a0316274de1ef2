"""How many threads may stand along the rows of an output tile, and below each other."""

from __future__ import annotations

from collections.abc import Iterable

from fusepass.codegen.device import WARP
from fusepass.codegen.schedule.output_tile_results import Leaving
from fusepass.codegen.schedule.shape import ceil

THREADS = 64, 256
"""Least and most of a block that takes an output tile."""


def lanes_of_rows(count: int, way: Leaving) -> list[int]:
    """Threads for each row of an output tile: for a whole row of so many results, or for equal parts of it, as far as may be."""
    if way.together:
        return [ceil(count, way.width)]
    vectors = count // way.width
    parts = {ceil(vectors, each) for each in range(1, ceil(vectors, WARP) + 1)}
    return sorted(lanes for lanes in parts if lanes <= THREADS[1])


def lanes_of_patch(count: int, width: int) -> list[int]:
    """Threads for each row of an output tile: vectors of equal parts of a row, which may overlap and must not end behind it."""
    parts = {ceil(ceil(count, each), width) for each in range(1, ceil(count, WARP) + 1)} | {count // width}
    return _least_waste((lanes for lanes in parts if lanes * width <= count), width, count)


def groups_of_patch(height: int, unroll: int) -> list[int]:
    """Threads below each other, of which the last one's rows may be also others'."""
    return _least_waste({ceil(ceil(height, each), unroll) for each in range(1, height + 1)}, unroll, height)


def _least_waste(threads: Iterable[int], each: int, count: int) -> list[int]:
    """Of about as many threads the two with the fewest results that others compute, too."""
    waste = {many: ceil(count, many * each) * many * each - count for many in threads if 0 < many <= THREADS[1]}
    alike = [
        sorted((spare, -many) for many, spare in waste.items() if many.bit_length() == bits)[:2]
        for bits in range(1, 10)
    ]
    return [-many for found in alike for _, many in found]
