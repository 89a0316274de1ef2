"""What writers of CUDA kernels with a convolution know of its tiles: where they lie, how the input below them comes, and at which positions of
the result a thread stands.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

from fusepass.codegen.ir.convolution import ROWS
from fusepass.codegen.ir.digits import few_digits
from fusepass.codegen.ir.dtype import Precision
from fusepass.codegen.ir.index import contiguous_strides
from fusepass.codegen.ir.program import Kernel
from fusepass.codegen.render.cuda.contraction.loops import Loop
from fusepass.codegen.render.printer import Printer
from fusepass.codegen.render.spelling import C_TYPES, ROLLED, UNROLL, Locals, bare, block, where
from fusepass.codegen.render.unit import Place
from fusepass.codegen.schedule_convolution import ConvolutionSchedule
from fusepass.codegen.schedule_convolution.tiles import (
    GROUP,
    SECTOR,
    Tiles,
    anchor_of,
    dimensions,
    in_channels,
    out_channels,
)

_LETTERS = "zyx"


class TileWriter:
    """Lines of a kernel.

    Attributes:
        c: C names of the kernel's own variables.
        rows: the loop over 16 output channels after another.
        phase, half: those over the phases of a pair, and over a warp's results of one channel, 32 after another.
        first_channel: the C name of the first output channel of those at hand.
        letters: of the spatial axes.
        axes, tile_at: C names of a position along each of them, and of the number of the tile at hand.
        ins, outs: input and output channels of a group.
    """

    def __init__(self, kernel: Kernel, plan: ConvolutionSchedule, place: Place) -> None:
        program, self.names = place.program, place.names
        self.kernel, self.anchor, self.program, self.pointers = kernel, anchor_of(kernel), program, place.pointers
        self.plan, self.on, self.input = plan, plan.on, plan.on
        self.source, self.weight = program.buffer(self.anchor.source), program.buffer(self.anchor.weight)
        self.sizes = [axis.size for axis in dimensions(kernel)]
        self.ins, self.outs = in_channels(kernel, program), out_channels(kernel)
        c = self.c = self.names.locals
        self.rows, self.first_channel = Loop(c.m, plan.rows), c.first_channel
        self.phase, self.half = Loop(c.p, plan.on.pair), Loop(c.half, plan.on.pair)
        self.letters = _LETTERS[-len(self.on.tile) :]
        self.axes = tuple(map(c.named, self.letters))
        self.tile_at = tuple(c.named(f"tile_{letter}") for letter in self.letters)
        self.index_type = "int64_t" if self.on.wide else "int"
        self.printer = Printer(self.names, self.pointers, self.index_type, branches=False)
        self.printer.few = few_digits(kernel, program)

    # ---- channels

    def channel_group(self) -> Iterable[str]:
        """``group``, whose channels a block works on, and ``end_channel`` behind these, where there are several groups."""
        c = self.c
        groups, blocks = self.anchor.groups, self.plan.channel_blocks
        if groups > 1:
            yield f"const int {c.group} = {quotient(remainder('int(blockIdx.x)', blocks), blocks // groups)};"
            yield f"const int {c.end_channel} = {c.group} * {self.outs} + {self.outs};"

    @property
    def part_of_group(self) -> str:
        """Which part of its group's output channels a block works on."""
        return remainder("int(blockIdx.x)", self.plan.channel_blocks // self.anchor.groups)

    def of_group(self, channel: str, each: int) -> str:
        """The place of an output channel of the block's group, among `each` of every group."""
        c = self.c
        if self.anchor.groups == 1:
            return channel
        return f"{c.group} * {each}" if channel == "0" else f"{c.group} * {each} + {channel}"

    @property
    def end_channel(self) -> str:
        """Behind the last output channel of the block's group."""
        return str(self.sizes[1]) if self.anchor.groups == 1 else self.c.end_channel

    @property
    def group_weights(self) -> str:
        """What is added to where a weight lies, counted by all output channels and the input channels of a group."""
        if self.anchor.groups == 1 or not self.anchor.transposed:
            return ""
        return f" + {self.c.group} * {self.ins * self.weight.strides[0] - self.outs * self.weight.strides[1]}"

    @property
    def fills_up(self) -> bool:
        """Whether blocks work on channels past the last one of the result."""
        return self.sizes[1] != self.plan.covered

    def of_result(self, lines: Iterable[str]) -> list[str]:
        """`lines` where ``channel`` is one of the result."""
        return where(lines, f"{self.c.channel} < {self.end_channel}" if self.fills_up else "")

    # ---- tiles

    @property
    def tile_count(self) -> int:
        """Tiles of all samples."""
        return self.source.shape[0] * prod(self.on.tiles)

    def tile_place(self) -> Iterable[str]:
        """Which tile of which sample has number ``number``."""
        sample, *places = coordinates(self.c.number, (self.source.shape[0], *self.on.tiles))
        for at, place in reversed([*zip(self.tile_at, places, strict=True)]):
            yield f"const int {at} = {place};"
        yield f"const {self.index_type} {self.c.sample} = {sample};"

    def input_place(self, element: str) -> tuple[list[str], str, str]:
        """Where an element of a tile's input lies, or the first of as many as a copy brings: the lines that say so, the condition
        that it exists, its index in a channel.
        """
        c = self.c
        shape, strides = self.source.shape, self.source.strides
        lines, conditions, index = [], [], [f"{c.sample} * {strides[0]}"]
        if self.anchor.groups > 1:
            index.append(f"{self.index_type}({c.group}) * {self.ins * strides[1]}")
        *outer, along = self.input.extent
        for number, here in reversed([*enumerate(coordinates(element, (*outer, along // self.input.vector)))]):
            axis, size, first = self.axes[number], shape[2 + number], self.input.origin[number]
            step = self.input.steps[number] * self.anchor.step[number]
            each = self.input.vector if number == len(self.axes) - 1 else 1
            here = here if each == 1 or here == "0" else f"{here} * {each}"
            lines.append(f"const {self.index_type} {axis} = {self.tile_at[number]} * {step} + {here}{plus(first)};")
            conditions.append(f"{axis} >= 0 && {axis} < {size}")
            index.append(f"{axis} * {strides[2 + number]}")
        return lines, " && ".join(conditions), " + ".join(index)

    def copy_input(self, to: str, source: str, real: str) -> str:
        """Begins a copy of input elements to a place of the tile, of halves to the beginning of their numbers' room."""
        if self.input.vector == 1 and not self.source.dtype.is_half:
            return f"fp::begin_copy({to}, {source}, {real});"
        nbytes = self.source.dtype.nbytes * self.input.vector
        return f"fp::begin_copy_bytes<{nbytes}>({to}, {source}, {real} ? {nbytes} : 0);"

    @property
    def copies(self) -> str:
        """The head of a loop over a thread's copies of one channel of a tile."""
        c = self.c
        return f"for (int {c.i} = threadIdx.x; {c.i} < {self.input.elements // self.input.vector}; {c.i} += {self.plan.threads})"

    def in_tile(self, channel: str) -> str:
        """Where the elements of copy ``i`` lie in a tile, from its beginning."""
        return f"({channel} * {self.input.pitch} + {self.c.i}{'' if self.input.vector == 1 else f' * {self.input.vector}'})"

    @property
    def settles(self) -> bool:
        """Whether elements of a tile that are there are not yet what is multiplied."""
        return self.source.dtype.is_half or self.anchor.precision is Precision.TF32

    def settling(self, head: str, tile: str, over_channels: str, pragma: str = UNROLL) -> Iterable[str]:
        """The function with this head, which makes of what a thread has fetched to `tile` what is multiplied, in place; nothing where it is
        that already. Halves are numbers of TF32.
        """
        if not self.settles:
            return
        kind = f"round_numbers<{self.input.vector}>"
        if self.source.dtype.is_half:
            kind = f"widen_numbers<{C_TYPES[self.source.dtype]}, {self.input.vector}>"
        one = f"fp::{kind}({tile} + {self.in_tile(self.c.channel)});"
        yield "// makes of what this thread has fetched what is multiplied"
        yield from block(head, block(self.copies, [pragma, *block(over_channels, [one])]), "};")

    def from_origin(self, offset: Sequence[int]) -> int:
        """Where a tap lies in a channel of the tile, from the place of a position."""
        inside = contiguous_strides(self.on.extent)
        return dot(offset, inside) - dot(self.on.origin, inside)

    def group_coordinates(self, group: str) -> list[str]:
        """Where a group of 8 positions lies in the tile, per axis and in positions."""
        *outer, last = coordinates(group, (*self.on.tile[:-1], self.on.tile[-1] // GROUP))
        return [*outer, last if last == "0" else f"{last} * {GROUP}"]

    def group_place(self, group: str) -> str:
        """Where the first position of a group lies in the tile of the input."""
        inside = contiguous_strides(self.on.extent)
        parts = [
            f"{at} * {stride * step}"
            for at, stride, step in zip(self.group_coordinates(group), inside, self.anchor.step, strict=True)
            if at != "0"
        ]
        return " + ".join(parts) or "0"

    # ---- positions

    def position(self, group: str, column: str = "", start: str = "") -> tuple[list[str], str]:
        """The coordinates of the result that a thread takes, and the condition that it exists.

        It is the position of the warp that `column` says, in the phase of a pair that `start` says; by default a warp takes neighbours.
        """
        c = self.c
        on, sizes = self.on, self.sizes
        column = column or (c.lane if on.pair == 1 else f"({self.half} * 32 + {c.lane}) / {on.pair}")
        coordinates = self.group_coordinates(f"({group} + {column} / 8)")
        inner = f"{column} % 8"
        coordinates[-1] = inner if coordinates[-1] == "0" else f"{coordinates[-1]} + {inner}"
        own = f"({self.half} * 32 + {c.lane}) % {on.pair}" if 32 % on.pair else f"{c.lane} % {on.pair}"
        starts, conditions, lines = self._phase_starts(start or own), [], []
        for number, axis in enumerate(self.axes):
            position = f"({self.tile_at[number]} * {on.steps[number]} + {coordinates[number]})"
            spread = self.anchor.spread[number]
            at = position if spread == 1 else f"{position} * {spread} + {starts[number]}"
            lines.append(f"const {self.index_type} {axis} = {bare(at)};")
            if on.pace or on.tiles[number] * on.tile[number] * spread > sizes[2 + number]:
                conditions.append(f"{axis} < {sizes[2 + number]}")
        if on.pace:
            lines += own_sectors(on, self.anchor.spread[-1], self.c)
        return lines, " && ".join(conditions) or "true"

    def over_phases(self, lines: Sequence[str], first: str = "0", last: str = "") -> list[str]:
        """`lines` for each ``phase``, or several that are worked on together, from the `first` to before the `last`: for all, if nothing is said."""
        if len(self.on.phases) == 1:
            return list(lines)
        phase = self.c.phase
        head = f"for (int {phase} = {first}; {phase} < {last or len(self.on.phases)}; {phase} += {self.on.pair})"
        return [ROLLED, *block(head, lines)]

    def _phase_starts(self, start: str) -> list[str]:
        """The first result element of a phase, per axis; `start` is that of a pair along the last one."""
        starts = ["0"] * len(self.axes)
        if len(self.on.phases) > 1:
            _, *starts = coordinates(self.c.phase, (1, *map(min, self.anchor.spread, self.sizes[2:])))
        return [*starts[:-1], start] if self.on.pair > 1 else starts


def dot(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(x * y for x, y in zip(a, b, strict=True))


def plus(number: int) -> str:
    return f" {'-' if number < 0 else '+'} {abs(number)}" if number else ""


def quotient(text: str, divisor: int) -> str:
    """``text / divisor`` for a number that is never negative."""
    return text if divisor == 1 else f"{text} / {divisor}"


def remainder(text: str, divisor: int) -> str:
    return "0" if divisor == 1 else f"{text} % {divisor}"


def coordinates(place: str, sizes: Sequence[int]) -> list[str]:
    """Those of a place in a grid of `sizes`, slowest first; the first one has no bound."""
    found = []
    for size in reversed(sizes[1:]):
        found.append(remainder(place, size))
        place = quotient(place, size)
    return [place, *reversed(found)]


def table(name: str, numbers: Sequence[int], per_line: int = 16) -> Iterable[str]:
    rows = [", ".join(map(str, numbers[i : i + per_line])) for i in range(0, len(numbers), per_line)]
    yield f"__constant__ int {name}[{len(numbers)}] = {{"
    yield from (f"    {row}," for row in rows)
    yield "};"


@dataclass(frozen=True)
class Sums:
    """Where the writer of results finds them.

    Attributes:
        staging: the statement that lays the sums of a `phase`, or of all phases of a pair, and of 16 channels, those at hand in `rows`, out in
            ``room``; nothing where `repair` computes all results.
        rows: the loop over 16 channels after another.
        group: the first of these groups in the tile.
        repair: lines before the results of a position are taken, of which ``row`` says the channel.
        unroll: the pragma of the loop over channels.
        height: channels that are laid out at once.
        phase: the loop over the phases of a pair, where they are laid out one after another.
    """

    staging: str
    rows: Loop
    group: str
    repair: tuple[str, ...] = ()
    unroll: str = UNROLL
    height: int = ROWS
    phase: Loop | None = None

    @property
    def defined(self) -> Sums:
        """The same where all results are computed by their definition."""
        return replace(self, staging="")

    def over_rows(self, lines: Sequence[str]) -> list[str]:
        """`lines` for 16 channels after another, whose sums are laid out before."""
        if not self.staging:
            return self.rows.over(["__syncwarp();", *lines], ROLLED)
        staged = [self.staging] if self.phase is None else self.phase.over([self.staging])
        return self.rows.over(["__syncwarp();", *staged, "__syncwarp();", *lines])


def own_sectors(on: Tiles, spread: int, c: Locals) -> list[str]:
    """``ahead``, how far a result is from the tile's first one, and ``own``: the tile stores it where that, counted from the beginning
    of its sector, is less. The first tile of a row and the last one store all to its ends. `spread` is `Convolution.spread`.
    """
    step = on.pace * spread
    before = f"({c.tile_x} ? 0 : {SECTOR})"  # of a row begins a sector
    return [
        f"const int {c.ahead} = int({c.x}) - {c.tile_x} * {step} + {before};",
        f"const unsigned {c.own} = {c.tile_x} == {on.tiles[-1] - 1} ? {1 << 30} : {step} + {before};",
    ]


def store_own(target: str, index: str, value: str, index_type: str, nbytes: int, c: Locals) -> str:
    """The statement that stores `value`, of so many bytes, at `target[index]`, if the tile stores it."""
    own = f"unsigned({c.ahead} - int({c.at} % {SECTOR // nbytes})) < {c.own}"
    return f"if (const {index_type} {c.at} = {index}; {own}) {target}[{c.at}] = {value};"


def is_first(on: Tiles, spread: int, c: Locals) -> str:
    """The condition that no later tile has a result."""
    return f"int({c.x}) < ({c.tile_x} + 1) * {on.pace * spread} || {c.tile_x} == {on.tiles[-1] - 1}"
