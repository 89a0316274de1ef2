"""Reductions over the positions of a generated convolution: states per channel in shared memory, stored once per piece.

A warp lays its results out for the stores. There the values that are reduced take the place of the sums; two threads a
channel reduce them, and add what they find to the warp's own state of that channel. Behind the barrier that ends a
tile, where a piece ends with it, the warps' states are merged in their order, stored, and begin anew. The next tile's
first barrier lies between that and the next use of the states.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from fusepass.codegen.ir.convolution import ROWS
from fusepass.codegen.ir.expr import Stat
from fusepass.codegen.ir.program import Kernel, Partials, Reduction
from fusepass.codegen.ir.team import state_bytes
from fusepass.codegen.render.printer import Printer, Scope
from fusepass.codegen.render.spelling import C_TYPES, block
from fusepass.codegen.schedule_convolution import ConvolutionSchedule, piece_count, takers
from fusepass.codegen.schedule_convolution.places import PlacesSchedule
from fusepass.codegen.schedule_convolution.streamed import StreamedSchedule
from fusepass.codegen.schedule_convolution.tiles import MOST_ROWS, dimensions
from fusepass.errors import ScheduleError


class PositionStates:
    """The lines of a kernel that have to do with its `Partials`; ``$word`` in them is a name of the kernel's writer."""

    def __init__(
        self, kernel: Kernel, plan: ConvolutionSchedule, tiles: int, pointers: dict[str, str], printer: Printer
    ) -> None:
        """`tiles` are those of all samples.

        Raises:
            ScheduleError: the kernel was made for a device with another schedule.
        """
        assert kernel.partials is not None
        self.kernel, self.plan, self.tiles, self.pointers, self.printer = kernel, plan, tiles, pointers, printer
        self.partials: Partials = kernel.partials
        self.high = plan.high if isinstance(plan, StreamedSchedule) else 1
        self.warp_channels = plan.rows * ROWS
        self.stride, self.teams = takers(plan), plan.teams if isinstance(plan, PlacesSchedule) else 1
        self.warps = plan.on.block_warps // self.teams
        if self.partials.pieces.size != piece_count(kernel, plan):
            raise ScheduleError(f"{kernel.name} was made for {self.partials.pieces.size} pieces, and has others here")
        assert plan.rows <= MOST_ROWS

    def begin(self) -> Iterable[str]:
        """Where the states are: behind the rooms of all warps."""
        on, count = self.plan.on, self.plan.on.block_warps * self.warp_channels
        place = on.block_warps * ROWS * on.staged_pitch
        yield "// what was found of each channel so far: the states of each warp"
        for number, reduction in enumerate(self.partials.reductions):
            kind = _type(reduction)
            yield (
                f"{kind}* const {_states(number)} = reinterpret_cast<{kind}*>"
                f"($room - $warp * {ROWS * on.staged_pitch} + {place});"
            )
            place += count * state_bytes(reduction) // 4
        empty = [f"{_states(number)}[$i] = {{}};" for number in range(len(self.partials.reductions))]
        yield from block(f"for (int $i = threadIdx.x; $i < {count}; $i += {self.plan.threads})", empty)

    def add(self) -> Iterable[str]:
        """Adds the values of 16 channels that lie in the warp's room, those of ``$inside``, to its states of channels ``$m``."""
        on = self.plan.on
        lines = [f"const fp::Share<{on.pair}> $share($room, {on.staged_pitch}, $inside);"]
        first = f"$warp * {self.warp_channels} + $m * {ROWS}"
        for number in range(len(self.partials.reductions)):
            lines.append(f"fp::leave_row({_states(number)} + {first}, $share);")
        return ["__syncwarp();", "{", *block("", lines)[1:]]

    def end(self, first_channel: str) -> Iterable[str]:
        """Stores the states where a piece ends with the tile; `first_channel` is the block's. Goes behind a barrier."""
        channels = self.high * self.warp_channels
        shape = f"{self.warps}, {self.high}, {self.warp_channels}, {str(self.plan.on.warps > 1).lower()}"
        thread, own = "threadIdx.x", ""
        if self.teams > 1:
            thread, own = f"threadIdx.x % {32 * self.warps}", f" + $team * {self.warps * self.warp_channels}"
        lines = [f"const int $channel = {first_channel} + int({thread});"]
        scope = Scope(self.printer)
        sample, channel, *_ = self.kernel.rows
        for axis, text in ((sample, "$sample"), (channel, "$channel"), (self.partials.pieces, "$piece_of")):
            scope.define_axis(axis, text)
        for number, reduction in enumerate(self.partials.reductions):
            lines.append(
                f"const {_type(reduction)} $found_{number} = fp::gather_channel<{shape}>({_states(number)}{own}, {thread});"
            )
            for store in self.partials.stores:
                if isinstance(store.value, Stat) and store.value.reduction == reduction.name:
                    part = f"$found_{number}.part<{store.value.part}>()"
                    scope.lines.append(f"{self.pointers[store.buffer]}[{scope.index(store.index)}] = {part};")
        exists = f"if ($channel < {dimensions(self.kernel)[1].size})"
        lines += block(exists, scope.lines)
        head = " && ".join(filter(None, [f"{thread} < {channels}" if channels < 32 * self.warps else "", self._ends()]))
        yield f"const int $piece_of = {self._piece()};"
        yield from block(f"if ({head})", lines) if head else ["{", *block("", lines)[1:]]

    def _piece(self) -> str:
        """The piece that a tile belongs to."""
        tiles = prod(self.plan.on.tiles)
        if self.partials.per_sample and tiles < self.stride:
            return f"$number % {tiles}"
        block = f"int(blockIdx.x) / {self.plan.channel_blocks}" if self.plan.channel_blocks > 1 else "int(blockIdx.x)"
        return f"{block} + $team * {self.stride // self.teams}" if self.teams > 1 else block

    def _ends(self) -> str:
        """The condition that a piece ends with a tile; none where each does."""
        tiles = prod(self.plan.on.tiles)
        if self.stride >= self.tiles or (self.partials.per_sample and tiles <= self.stride):
            return ""
        last = f"$number + {self.stride} >= {self.tiles}"
        return f"({last} || ($number + {self.stride}) / {tiles} != $sample)" if self.partials.per_sample else last


def _states(number: int) -> str:
    return f"$states_{number}"


def _type(reduction: Reduction) -> str:
    return f"fp::{reduction.op.value}<{C_TYPES[reduction.dtype]}>"
