"""What is laid out in output tiles, and of windows over one or two axes an estimate of the time that a way to do so takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from fusepass.codegen.device import RESERVED, WARP, DeviceFacts
from fusepass.codegen.ir.expr import Apply
from fusepass.codegen.ir.index import Axis
from fusepass.codegen.ir.ops import CHEAP
from fusepass.codegen.ir.output_tiles import Below, TileWindow, behind_windows
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.ir.sliding import Reduced, reduced
from fusepass.codegen.ir.staged_windows import TileShape, tile_shape
from fusepass.codegen.schedule.plan_output_tile import OutputTile, WindowTile
from fusepass.codegen.schedule.shape import SECTOR, ceil
from fusepass.codegen.schedule.staged_tile import tile_under
from fusepass.codegen.schedule.two_stage_windows import (
    FirstIteration,
    first_iteration,
    first_warp,
    iterations_of_access,
)

# Instructions of a thread. With what memory and shared memory move these fit times of 630 schedules of 31 pools on an H100 to 13 % on average (they
# are 10 % too long); what is taken of each window's schedules is 2 % behind the fastest one that was timed on average, and 13 % at most. Of 25
# depthwise convolutions it is 4 % behind on average, and 36 % at most.
_START = 54  # besides those below
_COPY = 12  # of a vector that it copies
_ACCESS = 1.4  # that reads what it needs of a row, or a part of that
_CONDITION = 2.5  # that an element of a row is there
_REDUCE = 1.3  # by which two numbers become one
_STORE = 9  # of a result
_TOGETHER = 1.4  # of one that leaves through shared memory, besides
_CONSTANT = 2.6  # of a number that is the same for all results
_PARTIAL = 5  # of a result that is reduced over positions
_MERGE = 120  # of what a thread found of a reduction over positions
_COSTLY = 12  # of what is computed behind windows and is not cheap
_REGISTERS = 16  # besides results, a row, and half of what is the same for all results: the rest is loaded again
_MORE_REGISTERS = 24  # that a thread has where there is room
_LATENCY, _WAIT = 2.4, 90  # cycles from one of a warp's instructions to the next, and of a block besides these
_NEAR = 128  # bytes that shared memory gives or takes in a cycle
_ITEM = 24  # instructions of a strip of a row that is reduced in a turn of its own, besides those for its elements
_BEGIN = 150  # cycles from one block to the next on a multiprocessor, at least
SHARP = 6  # how clearly the slowest one of instructions, memory and shared memory decides


def cycles_of_launch(blocks: int, resident: int, facts: DeviceFacts, cycles: Callable[[int], float]) -> float:
    """Of so many blocks, of which a multiprocessor has room for some at once: these take `cycles` of their number."""
    full, rest = divmod(blocks, resident * facts.multiprocessors)
    return full * cycles(resident) + (cycles(ceil(rest, facts.multiprocessors)) if rest else 0)


@dataclass(frozen=True)
class Work:
    """What is to be laid out."""

    kernel: Kernel
    program: Program
    facts: DeviceFacts
    windows: tuple[TileWindow, ...]
    aligned: bool

    @property
    def loads(self) -> tuple[tuple[TileWindow, Below], ...]:
        """What has tiles."""
        return tuple((window, below) for window in self.windows for below in window.below)

    @cached_property
    def factors(self) -> int:
        """Numbers that are the same for all results: of all points of windows, or once where windows are separable."""
        points = (1 if each.separable else prod(axis.size for axis in each.window.axes) for each in self.windows)
        return sum(count * len(each.constants) for count, each in zip(points, self.windows, strict=True))

    @cached_property
    def stored(self) -> int:
        """Bytes of what is stored for each result."""
        return sum(self.program.buffer(store.buffer).dtype.nbytes for store in self.kernel.stores)

    @cached_property
    def _known(self) -> dict[tuple[int, int, int], tuple[TileShape, ...]]:
        return {}

    def tiles(self, tile_height: int, cols: int, width: int) -> tuple[TileShape, ...]:
        """The tiles under such an output tile of one image, or of a plane."""
        key, lane = (tile_height, cols, width), Axis("lane", width)
        if key not in self._known:
            self._known[key] = tuple(
                tile_shape(self.program, window, below, (tile_height, cols), lane, aligned=self.aligned)
                for window, below in self.loads
            )
        return self._known[key]

    def ways(self, plan: OutputTile, tiles: Sequence[TileShape]) -> list[Reduced]:
        """How a thread reduces each window."""
        along = plan.along if isinstance(plan, WindowTile) else 0
        rest, size = iter(tiles), (plan.unroll, plan.width, along)
        return [reduced(each, [next(rest) for _ in each.below], *size) for each in self.windows]


@dataclass(frozen=True)
class OutputTileWork(Work):
    """Windows over one or two axes."""

    @property
    def image(self) -> tuple[Axis, Axis]:
        return self.windows[0].image

    @cached_property
    def words(self) -> int:
        """Registers of a result."""
        return sum(max(window.window.dtype.nbytes // 4, 1) for window in self.windows)

    @cached_property
    def separable(self) -> bool:
        return all(window.separable for window in self.windows)

    @cached_property
    def behind(self) -> int:
        """Instructions that make a result of windows."""
        return instructions(node for node in behind_windows(self.kernel) if isinstance(node, Apply))

    def elements(self, tiles: Sequence[TileShape], unroll: int) -> int:
        """What a thread reads of tiles, element by element in its code."""
        rows = [below.span(window.taps, (unroll, 1))[0] for window, below in self.loads]
        return sum(count * tile.reach for count, tile in zip(rows, tiles, strict=True))

    @cached_property
    def others(self) -> tuple[Axis, ...]:
        """The axes that count images."""
        return tuple(axis for axis in self.kernel.rows if axis not in self.image)

    def tiles_under(self, plan: WindowTile) -> tuple[TileShape, ...] | None:
        """The tiles under the output tiles of `plan`; None where they serve no turn for rows."""
        planes = plan.planes if plan.tile_height == self.image[0].size else 1
        key = plan.tile_height, plan.lanes * plan.width, plan.width, planes, plan.along
        if key not in self._known_under:
            lane = Axis("lane", plan.width)
            found = [tile_under(self.program, window, below, self.others, plan, lane) for window, below in self.loads]
            tiles = tuple(tile for tile in found if tile is not None)
            rest = iter(found)
            alike = all(len({_rows_of(next(rest)) for _ in window.below}) == 1 for window in self.windows)
            self._known_under[key] = tiles if len(tiles) == len(found) and (alike or not plan.along) else None
        return self._known_under[key]

    @cached_property
    def _known_under(self) -> dict[tuple[int, ...], tuple[TileShape, ...] | None]:
        return {}

    def first_iterations(self, plan: WindowTile, tiles: Sequence[TileShape]) -> list[FirstIteration]:
        """How the windows' rows are reduced."""
        rest, iterations = iter(tiles), list[FirstIteration]()
        for way in self.ways(plan, tiles):
            first, *_ = [next(rest) for _ in way.window.below]
            iterations.append(first_iteration(plan, way, first, way.window.below[0].load.dtype.nbytes))
        return iterations

    def registers_in_iterations(self, plan: WindowTile, tiles: Sequence[TileShape]) -> int:
        """Of a thread, at least, in the turn that needs more: what all results of a strip need is reduced as it is read."""
        row = sum(min(tile.reach, 2 * plan.along) for tile in tiles) + plan.along
        down = sum(plan.unroll * plan.width + way.rows.size for way in self.ways(plan, tiles))
        return max(row, down) + _REGISTERS

    def registers(self, unroll: int, width: int, tiles: Sequence[TileShape]) -> int:
        """Of a thread with so many rows of results, at least."""
        row = sum(tile.reach for tile in tiles) if self.separable else 0
        return unroll * width * self.words + self.factors // 2 + row + _REGISTERS

    def seconds(self, plan: WindowTile, tiles: Sequence[TileShape]) -> float:
        """How long it takes to go about it by `plan`, whose output tiles have such tiles."""
        facts, rates = self.facts, self.facts.machine.rates
        copied = [plan.planes // tile.images * tile.vectors for tile in tiles]
        sizes = [tile.vector * below.load.dtype.nbytes for tile, (_, below) in zip(tiles, self.loads, strict=True)]
        results = plan.planes * plan.tile_height * min(plan.lanes * plan.width, self.image[1].size)
        read = sum(count * size for count, size in zip(copied, sizes, strict=True))
        moved = read + results * self._sectors(plan)
        issued = _START + _COPY * sum(ceil(count, plan.threads) for count in copied) + _CONSTANT * self.factors
        issued += self._reducing_in_iterations(plan, tiles) if plan.along else self._reducing(plan, tiles)
        store = _STORE + (_TOGETHER if plan.exchanges else 0)
        reductions = len(self.kernel.partials.reductions) if self.kernel.partials else 0
        issued += plan.unroll * plan.width * (store * len(self.kernel.stores) + _PARTIAL * reductions + self.behind)
        issued += _MERGE * reductions
        warps = ceil(plan.threads, WARP)
        room = (facts.shared_bytes_per_block + RESERVED) // (plan.shared_bytes + RESERVED)
        registers = (
            self.registers_in_iterations(plan, tiles) if plan.along else self.registers(plan.unroll, plan.width, tiles)
        )
        held = facts.registers // (warps * WARP * (registers + _MORE_REGISTERS))
        resident = max(min(max(held, plan.resident), facts.max_threads // plan.threads, room), 1)
        computing = warps * issued / rates.schedulers
        memory = moved / (facts.bandwidth / facts.multiprocessors / rates.window_clock)
        near = self._near(plan, tiles) + (read + results * self.stored * (1 + plan.exchanges)) / _NEAR
        each: float = (computing**SHARP + memory**SHARP + near**SHARP) ** (1 / SHARP)
        alone = _LATENCY * issued + _WAIT
        cycles = cycles_of_launch(plan.blocks, resident, facts, lambda count: max(count * each, alone))
        # The first blocks all load, and the last ones compute, while nothing else goes on.
        cycles += min(resident, ceil(plan.blocks, facts.multiprocessors)) * min(memory, max(computing, near))
        return max(cycles, plan.blocks / facts.multiprocessors * _BEGIN) / rates.window_clock

    def _sectors(self, plan: WindowTile) -> float:
        """Bytes of memory for each result that is stored: a part of a sector takes as long as all of it."""
        cols, moved = self.image[1].size, 0.0
        for store in self.kernel.stores:
            nbytes = self.program.buffer(store.buffer).dtype.nbytes
            row = min(plan.lanes * plan.width, cols) * nbytes
            anywhere = not plan.exchanges and cols * nbytes % SECTOR
            moved += nbytes * (1 + (SECTOR - nbytes) / row if anywhere else 1)
        return moved

    def _near(self, plan: WindowTile, tiles: Sequence[TileShape]) -> float:
        """Cycles in which a block's threads read and write shared memory, besides whole vectors."""
        warps, cycles, rest = ceil(plan.threads, WARP), 0.0, iter(tiles)
        spots = first_warp(plan)
        iterations = iter(self.first_iterations(plan, tiles) if plan.along else ())
        for way in self.ways(plan, tiles):
            mine = [next(rest) for _ in way.window.below]
            rows, _ = way.window.below[0].span(way.window.taps, (plan.unroll, 1))
            if plan.along:
                iteration = next(iterations)
                cycles += ceil(iteration.items, WARP) * iteration.cycles(plan.along // way.lanes, mine)
                cycles += warps * rows * iteration.taken
                continue
            for below, tile in zip(way.window.below, mine, strict=True):
                nbytes, (down, right) = below.load.dtype.nbytes, below.steps
                image = tile.elements(nbytes)
                places = [
                    plane * image + group * plan.unroll * down * tile.pitch + lane * plan.width * right
                    for lane, group, plane in spots
                ]
                each = iterations_of_access([place * nbytes for place in places], tile.near * nbytes)
                cycles += warps * rows * (tile.reach // tile.near) * each
        if plan.exchanges:
            cols = self.image[1].size
            places = [
                (plane * plan.tile_height + group * plan.unroll) * cols + lane * plan.width
                for lane, group, plane in spots
            ]
            for store in self.kernel.stores:
                nbytes = self.program.buffer(store.buffer).dtype.nbytes
                each = iterations_of_access([place * nbytes for place in places], nbytes)
                cycles += warps * plan.unroll * plan.width * each
        return cycles

    def _reducing_in_iterations(self, plan: WindowTile, tiles: Sequence[TileShape]) -> float:
        """As `_reducing`, where rows are reduced in a turn of their own."""
        issued, rest = 0.0, iter(tiles)
        for way, iteration in zip(self.ways(plan, tiles), self.first_iterations(plan, tiles), strict=True):
            window, mine = way.window, [next(rest) for _ in way.window.below]
            of_item = _ITEM + _reading(way, mine)
            if window.right and not way.everywhere and iteration.strips > 1:
                of_item += _CONDITION * mine[0].reach
            of_item += _REDUCE * way.points.reductions + plan.along * instructions(window.work)
            of_item += plan.along // way.lanes // iteration.wide
            rows, _ = window.below[0].span(window.taps, (plan.unroll, 1))
            issued += ceil(iteration.items, plan.threads) * of_item
            issued += rows * (_ACCESS + (_CONDITION if window.down else 0)) + _REDUCE * way.reductions_down
        return issued

    def _reducing(self, plan: WindowTile, tiles: Sequence[TileShape]) -> float:
        """The instructions of a thread that read tiles and reduce what they have."""
        issued, rest = 0.0, iter(tiles)
        for way in self.ways(plan, tiles):
            window, mine = way.window, [next(rest) for _ in way.window.below]
            rows, _ = window.below[0].span(window.taps, (plan.unroll, 1))
            issued += rows * _reading(way, mine)
            known = way.everywhere or not window.right or plan.lanes * plan.width == plan.width == self.image[1].size
            conditions = 0 if known else mine[0].reach * way.lanes
            points = prod(axis.size for axis in window.window.axes)
            reductions = way.reductions if window.separable else way.states * points
            issued += rows * _CONDITION * conditions + _REDUCE * reductions
            if window.separable:
                issued += rows * mine[0].reach * instructions(window.work)
        return issued


def _reading(way: Reduced, tiles: Sequence[TileShape]) -> float:
    """Instructions that read what a thread needs of a row of each of its window's tiles."""
    issued = 0.0
    for below, tile in zip(way.window.below, tiles, strict=True):
        issued += _ACCESS * (tile.reach // tile.near)
        issued += tile.reach if below.load.dtype.nbytes < 4 and way.lanes == 1 else 0
    return issued


def _rows_of(tile: TileShape | None) -> tuple[int, int, int]:
    """Which rows of images a tile has."""
    return (tile.rows, tile.top, tile.images) if tile is not None else (0, 0, 0)


def instructions(applied: Iterable[Apply]) -> int:
    """About how many compute what is `applied`."""
    return sum(1 if node.op in CHEAP else _COSTLY for node in applied)
