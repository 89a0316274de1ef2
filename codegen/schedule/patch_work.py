"""What is laid out in patches, and of windows over one or two axes an estimate of the time that a way to do so takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from fusepass.codegen.device import RESERVED, WARP, DeviceFacts
from fusepass.codegen.ir.expr import Apply
from fusepass.codegen.ir.index import Axis
from fusepass.codegen.ir.ops import CHEAP
from fusepass.codegen.ir.patch_tiles import TileShape, tile_shape
from fusepass.codegen.ir.patches import Below, PatchWindow, behind_windows
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.ir.sliding import Reduced, reduced
from fusepass.codegen.schedule.plan import Schedule
from fusepass.codegen.schedule.shape import ceil

# Instructions of a thread. With the bytes that move these fit times of 711 schedules of 20 pools and 7 depthwise convolutions on an H100, to
# 15 % on average; what is taken of each window's schedules is 3 % behind the fastest one that was timed on average, and 17 % at most.
_START = 54  # besides those below
_COPY = 18  # of a vector that it copies
_ACCESS = 1.4  # that reads what it needs of a row, or a part of that
_CONDITION = 2.5  # that an element of a row is there
_REDUCE = 1.3  # by which two numbers become one
_STORE = 13  # of a result
_TOGETHER = 1.4  # of one that leaves through shared memory, besides
_CONSTANT = 2.6  # of a number that is the same for all results
_PARTIAL = 5  # of a result that is reduced over positions
_MERGE = 120  # of what a thread found of a reduction over positions
_COSTLY = 12  # of what is computed behind windows and is not cheap
_REGISTERS = 16  # besides results, a row, and half of what is the same for all results: the rest is loaded again
_MORE_REGISTERS = 24  # that a thread has where there is room
_SCHEDULERS = 4  # of a multiprocessor, each of which issues one instruction a cycle
_LATENCY, _WAIT = 2.4, 90  # cycles from one of a warp's instructions to the next, and of a block besides these
CLOCK = 1.7e9  # cycles a second
_BEGIN = 150  # cycles from one block to the next on a multiprocessor, at least
SHARP = 4  # how clearly the slower one of instructions and memory decides


@dataclass(frozen=True)
class Work:
    """What is to be laid out."""

    kernel: Kernel
    program: Program
    facts: DeviceFacts
    windows: tuple[PatchWindow, ...]
    aligned: bool

    @property
    def loads(self) -> tuple[tuple[PatchWindow, Below], ...]:
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

    def tiles(self, band: int, cols: int, width: int) -> tuple[TileShape, ...]:
        """The tiles under such a patch of one image, or of a plane."""
        key, lane = (band, cols, width), Axis("lane", width)
        if key not in self._known:
            self._known[key] = tuple(
                tile_shape(self.program, window, below, (band, cols), lane, aligned=self.aligned)
                for window, below in self.loads
            )
        return self._known[key]

    def ways(self, plan: Schedule, tiles: Sequence[TileShape]) -> list[Reduced]:
        """How a thread reduces each window."""
        rest = iter(tiles)
        return [reduced(each, [next(rest) for _ in each.below], plan.unroll, plan.width) for each in self.windows]


@dataclass(frozen=True)
class PatchWork(Work):
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

    def registers(self, unroll: int, width: int, tiles: Sequence[TileShape]) -> int:
        """Of a thread with so many rows of results, at least."""
        row = sum(tile.reach for tile in tiles) if self.separable else 0
        return unroll * width * self.words + self.factors // 2 + row + _REGISTERS

    def seconds(self, plan: Schedule, tiles: Sequence[TileShape]) -> float:
        """How long it takes to go about it by `plan`, whose patches have such tiles."""
        facts = self.facts
        copied = [plan.planes * tile.vectors for tile in tiles]
        sizes = [tile.vector * below.load.dtype.nbytes for tile, (_, below) in zip(tiles, self.loads, strict=True)]
        results = plan.planes * plan.band * min(plan.lanes * plan.width, self.image[1].size)
        moved = sum(count * size for count, size in zip(copied, sizes, strict=True)) + results * self.stored
        issued = _START + _COPY * sum(ceil(count, plan.threads) for count in copied) + _CONSTANT * self.factors
        issued += self._reducing(plan, tiles)
        store = _STORE + (_TOGETHER if plan.exchanges else 0)
        reductions = len(self.kernel.partials.reductions) if self.kernel.partials else 0
        issued += plan.unroll * plan.width * (store * len(self.kernel.stores) + _PARTIAL * reductions + self.behind)
        issued += _MERGE * reductions
        warps = ceil(plan.threads, WARP)
        room = (facts.shared_bytes_per_block + RESERVED) // (plan.shared_bytes + RESERVED)
        held = facts.registers // (warps * WARP * (self.registers(plan.unroll, plan.width, tiles) + _MORE_REGISTERS))
        resident = max(min(max(held, plan.resident), facts.max_threads // plan.threads, room), 1)
        computing = warps * issued / _SCHEDULERS
        memory = moved / (facts.bandwidth / facts.multiprocessors / CLOCK)
        each: float = (computing**SHARP + memory**SHARP) ** (1 / SHARP)
        alone = _LATENCY * issued + _WAIT
        full, rest = divmod(plan.blocks, resident * facts.multiprocessors)
        cycles = full * max(resident * each, alone)
        cycles += max(ceil(rest, facts.multiprocessors) * each, alone) if rest else 0
        return max(cycles, plan.blocks / facts.multiprocessors * _BEGIN) / CLOCK

    def _reducing(self, plan: Schedule, tiles: Sequence[TileShape]) -> float:
        """The instructions of a thread that read tiles and reduce what they have."""
        issued, rest = 0.0, iter(tiles)
        for way in self.ways(plan, tiles):
            window, mine = way.window, [next(rest) for _ in way.window.below]
            rows, _ = window.below[0].span(window.taps, (plan.unroll, 1))
            for below, tile in zip(window.below, mine, strict=True):
                cast = tile.reach if below.load.dtype.nbytes < 4 and way.lanes == 1 else 0
                issued += rows * (_ACCESS * (tile.reach // tile.near) + cast)
            conditions = 0 if way.everywhere or not window.right else mine[0].reach * way.lanes
            points = prod(axis.size for axis in window.window.axes)
            reductions = way.reductions if window.separable else way.states * points
            issued += rows * _CONDITION * conditions + _REDUCE * reductions
            if window.separable:
                issued += rows * mine[0].reach * instructions(window.work)
        return issued


def instructions(applied: Iterable[Apply]) -> int:
    """About how many compute what is `applied`."""
    return sum(1 if node.op in CHEAP else _COSTLY for node in applied)
