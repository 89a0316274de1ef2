"""What writers of CUDA kernels with a convolution know of its tiles: where they lie, and how the input below them comes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from math import prod

from fusepass.codegen.ir.digits import few_digits
from fusepass.codegen.ir.dtype import Precision
from fusepass.codegen.ir.index import contiguous_strides
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.render.printer import Printer
from fusepass.codegen.render.spelling import C_TYPES, Identifiers, block
from fusepass.codegen.schedule_convolution import ConvolutionSchedule
from fusepass.codegen.schedule_convolution.tiles import GROUP, anchor_of, dimensions, in_channels, out_channels

AXES = ("$z", "$y", "$x")
UNROLL = "#pragma unroll"


class TileWriter:
    """Lines of a kernel; ``$word`` in them stands for a C name that no buffer has.

    Attributes:
        ins, outs: input and output channels of a group.
    """

    def __init__(
        self,
        kernel: Kernel,
        program: Program,
        plan: ConvolutionSchedule,
        pointers: dict[str, str],
        names: Identifiers,
    ) -> None:
        self.kernel, self.anchor, self.program, self.pointers = kernel, anchor_of(kernel), program, pointers
        self.plan, self.on, self.input = plan, plan.on, plan.on
        self.source, self.weight = program.buffer(self.anchor.source), program.buffer(self.anchor.weight)
        self.sizes = [axis.size for axis in dimensions(kernel)]
        self.ins, self.outs = in_channels(kernel, program), out_channels(kernel)
        self.axes = AXES[-len(self.on.tile) :]
        self.index_type = "int64_t" if self.on.wide else "int"
        self.printer = Printer(names, pointers, self.index_type, branches=False)
        self.printer.few = few_digits(kernel, program)
        self.names = names
        self._locals: dict[str, str] = {}

    def named(self, line: str) -> str:
        """`line` with a C name for each ``$word``."""

        def name(word: re.Match[str]) -> str:
            if word[1] not in self._locals:
                self._locals[word[1]] = self.names.exact(word[1])
            return self._locals[word[1]]

        return re.sub(r"\$(\w+)", name, line)

    # ---- channels

    def channel_group(self) -> Iterable[str]:
        """``$group``, whose channels a block works on, and ``$end_channel`` behind these, where there are several groups."""
        groups, blocks = self.anchor.groups, self.plan.channel_blocks
        if groups > 1:
            yield f"const int $group = {quotient(remainder('int(blockIdx.x)', blocks), blocks // groups)};"
            yield f"const int $end_channel = $group * {self.outs} + {self.outs};"

    @property
    def part_of_group(self) -> str:
        """Which part of its group's output channels a block works on."""
        return remainder("int(blockIdx.x)", self.plan.channel_blocks // self.anchor.groups)

    def of_group(self, channel: str, each: int) -> str:
        """The place of an output channel of the block's group, among `each` of every group."""
        if self.anchor.groups == 1:
            return channel
        return f"$group * {each}" if channel == "0" else f"$group * {each} + {channel}"

    @property
    def end_channel(self) -> str:
        """Behind the last output channel of the block's group."""
        return str(self.sizes[1]) if self.anchor.groups == 1 else "$end_channel"

    @property
    def group_weights(self) -> str:
        """What is added to where a weight lies, counted by all output channels and the input channels of a group."""
        if self.anchor.groups == 1 or not self.anchor.transposed:
            return ""
        return f" + $group * {self.ins * self.weight.strides[0] - self.outs * self.weight.strides[1]}"

    # ---- tiles

    @property
    def tile_count(self) -> int:
        """Tiles of all samples."""
        return self.source.shape[0] * prod(self.on.tiles)

    def tile_place(self) -> Iterable[str]:
        """Which tile of which sample has number ``$number``."""
        rest = "$number"
        for axis, count in reversed(list(zip(self.axes, self.on.tiles, strict=True))):
            yield f"const int $tile_{axis[1:]} = {remainder(rest, count)};"
            rest = quotient(rest, count)
        yield f"const {self.index_type} $sample = {rest};"

    def input_place(self, element: str) -> tuple[list[str], str, str]:
        """Where an element of a tile's input lies, or the first of as many as a copy brings: the lines that say so, the condition
        that it exists, its index in a channel.
        """
        shape, strides = self.source.shape, self.source.strides
        lines, conditions, index, rest = [], [], [f"$sample * {strides[0]}"], element
        if self.anchor.groups > 1:
            index.append(f"{self.index_type}($group) * {self.ins * strides[1]}")
        for number in reversed(range(len(self.axes))):
            axis, extent, size = self.axes[number], self.input.extent[number], shape[2 + number]
            step, first = self.input.steps[number] * self.anchor.step[number], self.input.origin[number]
            each = self.input.vector if number == len(self.axes) - 1 else 1
            extent //= each
            here = remainder(rest, extent) if number else rest
            here = here if each == 1 or here == "0" else f"{here} * {each}"
            lines.append(f"const {self.index_type} {axis} = $tile_{axis[1:]} * {step} + {here}{plus(first)};")
            conditions.append(f"{axis} >= 0 && {axis} < {size}")
            index.append(f"{axis} * {strides[2 + number]}")
            rest = quotient(rest, extent)
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
        return f"for (int $i = threadIdx.x; $i < {self.input.elements // self.input.vector}; $i += {self.plan.threads})"

    def in_tile(self, channel: str) -> str:
        """Where the elements of copy ``$i`` lie in a tile, from its beginning."""
        return f"({channel} * {self.input.pitch} + $i{'' if self.input.vector == 1 else f' * {self.input.vector}'})"

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
        one = f"fp::{kind}({tile} + {self.in_tile('$channel')});"
        yield "// makes of what this thread has fetched what is multiplied"
        yield from block(head, block(self.copies, [pragma, *block(over_channels, [one])]))[:-1]
        yield "};"

    def from_origin(self, offset: Sequence[int]) -> int:
        """Where a tap lies in a channel of the tile, from the place of a position."""
        inside = contiguous_strides(self.on.extent)
        return dot(offset, inside) - dot(self.on.origin, inside)

    def group_coordinates(self, group: str) -> list[str]:
        """Where a group of 8 positions lies in the tile, per axis and in positions."""
        shape = (*self.on.tile[:-1], self.on.tile[-1] // GROUP)
        found, rest = [], group
        for number in reversed(range(len(shape))):
            here = remainder(rest, shape[number]) if number else rest
            found.append(f"{here} * {GROUP}" if number == len(shape) - 1 and here != "0" else here)
            rest = quotient(rest, shape[number])
        return found[::-1]

    def group_place(self, group: str) -> str:
        """Where the first position of a group lies in the tile of the input."""
        inside = contiguous_strides(self.on.extent)
        parts = [
            f"{at} * {stride * step}"
            for at, stride, step in zip(self.group_coordinates(group), inside, self.anchor.step, strict=True)
            if at != "0"
        ]
        return " + ".join(parts) or "0"


def dot(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(x * y for x, y in zip(a, b, strict=True))


def plus(number: int) -> str:
    return f" {'-' if number < 0 else '+'} {abs(number)}" if number else ""


def quotient(text: str, divisor: int) -> str:
    """``text / divisor`` for a number that is never negative."""
    return text if divisor == 1 else f"{text} / {divisor}"


def remainder(text: str, divisor: int) -> str:
    return "0" if divisor == 1 else f"{text} % {divisor}"


def unrolled(variable: str, count: int, lines: Sequence[str], pragma: str = UNROLL) -> list[str]:
    """A loop over `lines` with a pragma; the lines for 0 where there is nothing more."""
    if count == 1:
        return [re.sub(re.escape(variable) + r"\b", "0", line) for line in lines]
    return [pragma, *block(f"for (int {variable} = 0; {variable} < {count}; ++{variable})", lines)]


def table(name: str, numbers: Sequence[int], per_line: int = 16) -> Iterable[str]:
    rows = [", ".join(map(str, numbers[i : i + per_line])) for i in range(0, len(numbers), per_line)]
    yield f"__constant__ int {name}[{len(numbers)}] = {{"
    yield from (f"    {row}," for row in rows)
    yield "};"
