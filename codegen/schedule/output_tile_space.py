"""Which output tiles there may be, by how many threads along rows and below each other, and how many of their blocks a multiprocessor has room for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import gcd, prod
from typing import TypeVar

from fusepass.codegen.device import RESERVED, WARP
from fusepass.codegen.ir.index import Axis
from fusepass.codegen.schedule.output_tile_results import Leaving, bytes_of_results, bytes_of_states
from fusepass.codegen.schedule.output_tile_work import OutputTileWork
from fusepass.codegen.schedule.plan import Memory
from fusepass.codegen.schedule.plan_output_tile import OutputTile, WindowTile
from fusepass.codegen.schedule.shape import ceil, divisors

T = TypeVar("T", bound=OutputTile)

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


def in_turns(
    kind: Callable[..., T],
    image: tuple[Axis, ...],
    images: int,
    width: int,
    unroll: int,
    parts: Sequence[int] = (1,),
    *,
    alone: bool = False,
) -> Iterator[tuple[T, int]]:
    """All output tiles of this `kind` whose tiles come turn by turn, threads having `unroll` rows of `width` results: each with in how many of
    the `parts` a block shares its turns. Where one covers an image, a block has several of so many `images`, unless `alone`.
    """
    y, x = image
    for lanes, groups, part in product(lanes_of_patch(x.size, width), groups_of_patch(y.size, unroll), parts):
        threads, tile_height = lanes * groups * part, min(unroll * groups, y.size)
        output_tiles = ceil(y.size, tile_height) * ceil(x.size, lanes * width)
        several = output_tiles == 1 and not alone and threads <= THREADS[1]
        for planes in divisors(images, THREADS[1] // threads) if several else (1,):
            if THREADS[0] <= threads * planes <= THREADS[1]:
                blocks, each = images // planes * output_tiles, groups * planes * part
                yield (
                    kind(width, unroll, lanes, each, blocks, image=image, planes=planes, tile_height=tile_height),
                    part,
                )


def _least_waste(threads: Iterable[int], each: int, count: int) -> list[int]:
    """Of about as many threads the two with the fewest results that others compute, too."""
    waste = {many: ceil(count, many * each) * many * each - count for many in threads if 0 < many <= THREADS[1]}
    alike = [
        sorted((spare, -many) for many, spare in waste.items() if many.bit_length() == bits)[:2]
        for bits in range(1, 10)
    ]
    return [-many for found in alike for _, many in found]


BLOCKS = 5
"""On a multiprocessor, so that some compute while others wait."""

MOST_READ = 2048
"""Elements of tiles that a thread with several rows, or with a strip of one, reads: they are written out, and compiled for long."""


def patches_of(work: OutputTileWork, way: Leaving, rows: Iterable[tuple[int, int]]) -> Iterator[WindowTile]:
    """All output tiles whose results leave that way, with so many `rows` of a thread and threads below each other; several images where one is small.

    The last output tiles of an image begin earlier where others would end behind it.
    """
    (y, x), width = work.image, way.width
    images, together = prod(axis.size for axis in work.others), way.together > 0 and bool(work.kernel.stores)
    for lanes, (unroll, groups) in product(lanes_of_rows(x.size, way), rows):
        tile_height, cols = min(unroll * groups, y.size), lanes * width
        output_tiles = ceil(y.size, tile_height) * ceil(x.size, cols)
        for planes in divisors(gcd(images, way.together), THREADS[1]) if output_tiles == 1 else (1,):
            if THREADS[0] <= lanes * groups * planes <= THREADS[1]:
                memory, blocks = Memory(work.aligned), images // planes * output_tiles
                plan = WindowTile(width, unroll, lanes, groups * planes, blocks, memory=memory)
                yield replace(plan, image=(y, x), planes=planes, tile_height=tile_height, exchanges=together)


def room_of_block(work: OutputTileWork, blocks: int) -> int:
    """Bytes of shared memory for each of so many blocks on a multiprocessor."""
    return (work.facts.shared_bytes_per_block + RESERVED) // blocks - RESERVED


def with_room(work: OutputTileWork, plan: WindowTile, nbytes: int, registers: int) -> WindowTile:
    """`plan` with room in shared memory for `nbytes`, or for what its threads lay down when these have been read; a thread has so many `registers`
    or more."""
    if plan.exchanges:
        results = plan.planes * plan.tile_height * work.image[1].size
        nbytes = max(nbytes, bytes_of_results(work.kernel, work.program, results))
    of_block = ceil(plan.threads, WARP) * WARP * registers
    resident = max(min(BLOCKS, work.facts.registers // of_block), 1)
    return replace(plan, shared_bytes=max(nbytes, bytes_of_states(work.kernel, plan.threads)), resident=resident)
