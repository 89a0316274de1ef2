"""Reductions over the positions of a generated convolution or the columns of a product: a state per channel and piece, which is stored.

Of a convolution, states are in shared memory. A warp lays its results out for the stores. There the values that are reduced take the place of the sums; two threads a
channel reduce them, and add what they find to the warp's own state of that channel. Behind the barrier that ends a
tile, where a piece ends with it, the warps' states are merged in their order, stored, and begin anew. The next tile's
first barrier lies between that and the next use of the states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import prod

from fusepass.codegen.ir.convolution import ROWS
from fusepass.codegen.ir.expr import ReductionResult
from fusepass.codegen.ir.program import Kernel, Partials, Reduction
from fusepass.codegen.ir.team import state_bytes
from fusepass.codegen.render.printer import Printer, Scope
from fusepass.codegen.render.spelling import C_TYPES, block, braces, loop
from fusepass.codegen.schedule_convolution import ConvolutionSchedule, piece_count
from fusepass.codegen.schedule_convolution.chunks import ChunkSchedule
from fusepass.codegen.schedule_convolution.multistage import MultistageSchedule
from fusepass.codegen.schedule_convolution.register_stationary import RegisterStationarySchedule
from fusepass.codegen.schedule_convolution.tiles import MOST_ROWS
from fusepass.codegen.schedule_product import ProductSchedule
from fusepass.errors import ScheduleError

_MOST_WORDS = 4  # of 32 columns each, that the two threads of a row reduce at once


class PartialStores:
    """The lines that store what was found of a kernel's `Partials`."""

    def __init__(self, kernel: Kernel, printer: Printer) -> None:
        assert kernel.partials is not None
        self.kernel, self.printer = kernel, printer
        self.c = printer.names.locals
        self.partials: Partials = kernel.partials

    def _found(self, number: int) -> str:
        """The state of a piece's reduction of that number."""
        return self.c.named(f"found_{number}")

    def stored(self, sample: str, channel: str, piece: str) -> list[str]:
        """The lines for one sample, channel and piece; ``found_n`` is the state of the n-th reduction."""
        axes = *self.kernel.lines, self.partials.pieces
        scope = Scope(self.printer, at=dict(zip(axes, (sample, channel, piece), strict=True)))
        states = {reduction.name: self._found(number) for number, reduction in enumerate(self.partials.reductions)}
        store_partials(self.partials, scope, states)
        return scope.lines


def store_partials(partials: Partials, scope: Scope, states: Mapping[str, str]) -> None:
    """Add the lines that store what the `states` of some reductions, by name, hold to `scope`, which knows sample, channel and piece."""
    for store in partials.stores:
        if isinstance(store.value, ReductionResult) and store.value.reduction in states:
            part = f"{states[store.value.reduction]}.part<{store.value.part}>()"
            scope.lines.append(f"{scope.printer.pointers[store.buffer]}[{scope.index(store.index)}] = {part};")


class RowStates(PartialStores):
    """Reductions over the columns of a matrix product's tile: states of each of a warp's rows, in the threads that share the row.

    What a warp has of a row is a piece, so that nothing is exchanged between warps or tiles.
    """

    def __init__(self, kernel: Kernel, plan: ProductSchedule, printer: Printer, index: Callable[[str], str]) -> None:
        """`index` makes a place an index.

        Raises:
            ScheduleError: the kernel was made for a device with another schedule.
        """
        super().__init__(kernel, printer)
        self.tiling, self.index = plan.tiling, index
        _, self.batches, self.rows, self.columns = kernel.rows
        if self.partials.pieces.size != plan.pieces:
            raise ScheduleError(f"{kernel.name} was made for {self.partials.pieces.size} pieces, and has others here")

    def of_room(self) -> Iterable[str]:
        """Reduces what a warp has laid out in ``room``, 16 rows by strips of columns after another.

        Strips are wide, as merging what was found of one with what was found before takes as long as some 32 columns do.
        """
        c = self.c
        high, _ = self.tiling.warp_tile
        lines = [*self._begun(c.down), *self._strips(c.down), *self.ended()]
        yield "__syncwarp();"
        if high > ROWS:
            lines = [
                "#pragma unroll 1",
                *block(f"for (int {c.down} = 0; {c.down} < {high}; {c.down} += {ROWS})", lines),
            ]
            yield from lines
        else:
            yield from braces([f"constexpr int {c.down} = 0;", *lines])

    def begun(self) -> Iterable[str]:
        """States of a warp's 16 rows, before what it lays out is `added`, and `ended` at last."""
        return self._begun("0")

    def added(self) -> Iterable[str]:
        """Adds what a warp has laid out in ``room``."""
        return ["__syncwarp();", *self._strips("0")]

    def ended(self) -> list[str]:
        """Stores the states."""
        return self._stores(f"{self._share}::is_first()")

    @property
    def _is_apart(self) -> bool:
        return bool(self.kernel.within) and not self.kernel.whole_columns

    @property
    def _words(self) -> int:
        return 1 if self._is_apart else min(self.tiling.laid_out // 32, _MOST_WORDS)

    @property
    def _share(self) -> str:
        return f"fp::Share<{self._words}, {str(self._is_apart).lower()}>"

    def _begun(self, down: str) -> list[str]:
        c = self.c
        row = f"const {self.printer.index_type} {c.row} = {self.index(f'{c.first_row} + {c.Tile}::warp_row() + {down} + {self._share}::row()')};"
        return [
            row,
            *(f"{state_type(each)} {self._found(number)};" for number, each in enumerate(self.partials.reductions)),
        ]

    def _strips(self, down: str) -> list[str]:
        c = self.c
        share, words, pitch = self._share, self._words, self.tiling.room_pitch
        strip = [
            *(self._inside_apart(share) if self._is_apart else self._inside(words)),
            f"const {share} {c.share}({c.room} + {down} * {pitch} + {c.across}, {pitch}, {c.inside});",
            *(f"fp::add_row({self._found(number)}, {c.share});" for number in range(len(self.partials.reductions))),
        ]
        head = f"for (int {c.across} = 0; {c.across} < {self.tiling.laid_out}; {c.across} += {32 * words})"
        return ["#pragma unroll 1", *block(head, strip)]

    def _rows(self, number: int) -> str:
        """What a thread found so far of its two rows, for the reduction of that number."""
        return self.c.named(f"rows_{number}")

    def own_begun(self) -> Iterable[str]:
        """States of the two rows of which a thread has sums, before `own_added`, and `own_ended` at last."""
        for number, each in enumerate(self.partials.reductions):
            yield f"fp::OwnRow<{state_type(each)}> {self._rows(number)}[2];"

    def own_columns(self, words: int) -> list[str]:
        """Which columns of the strip from ``across`` on exist, where that is the same in all rows."""
        c = self.c
        if self._is_apart:
            return []
        made = f"const auto {c.own} = fp::OwnColumns<{words}>::of_strip({c.inside});"
        return [*self._inside(words), made]

    def own_added(self, words: int) -> list[str]:
        """Adds the values that took the sums' places in a strip of ``row``."""
        c = self.c
        lines = self._own_apart(words) if self._is_apart else []
        for number in range(len(self.partials.reductions)):
            lines.append(f"fp::push_strip({self._rows(number)}[{c.down}], {c.sums}[0], {c.down}, {c.own});")
        return lines

    def _own_apart(self, words: int) -> list[str]:
        """Which columns of a strip exist in a thread's row."""
        c = self.c
        lines, exists = self._column(f"{c.i} / 2 * 8 + {c.lane} % 4 * 2 + {c.i} % 2")
        each = [
            *lines,
            f"{c.mine}[{c.i} / 8] |= unsigned({exists}) << fp::OwnColumns<{words}>::bit({c.i} % 8);",
        ]
        return [
            f"unsigned {c.mine}[{words}] = {{}};",
            *loop(c.i, 8 * words, each),
            f"const auto {c.own} = fp::OwnColumns<{words}>::of_thread({c.mine});",
        ]

    def own_ended(self) -> Iterable[str]:
        """Stores the states of both rows."""
        c = self.c
        row = f"const {self.printer.index_type} {c.row} = {self.index(f'{c.first_row} + {c.Tile}::warp_row() + {c.lane} / 4 + {c.down} * 8')};"
        lines = [row]
        for number, each in enumerate(self.partials.reductions):
            lines.append(
                f"const {state_type(each)} {self._found(number)} = fp::found_of({self._rows(number)}[{c.down}]);"
            )
        yield from loop(c.down, 2, [*lines, *self._stores(f"{c.lane} % 4 == 0")])

    def _inside(self, words: int) -> list[str]:
        """Which of the columns from ``across`` on exist, in all rows alike."""
        c = self.c
        if not self.kernel.within:
            bits = [f"fp::lowest_bits({self.columns.size} - ({self._first}) - {32 * word})" for word in range(words)]
            bits = bits if self._tail else ["0xffffffffu"] * words
            return [f"const unsigned {c.inside}[{words}] = {{{', '.join(bits)}}};"]
        lines, exists = self._column(f"{c.i} * 32 + {c.lane}")
        each = [*lines, f"{c.inside}[{c.i}] = __ballot_sync(0xffffffffu, {exists});"]
        return [f"unsigned {c.inside}[{words}];", *loop(c.i, words, each)]

    @property
    def _first(self) -> str:
        """The first column of a warp's strip."""
        c = self.c
        return self.index(f"{c.first_column} + {c.Tile}::warp_column() + {c.across}")

    @property
    def _tail(self) -> bool:
        """Whether the last tile has columns that do not exist."""
        return bool(self.columns.size % self.tiling.columns)

    def _column(self, place: str) -> tuple[list[str], str]:
        """The lines that find the ``column`` at that place of a strip, and the condition that it exists in ``row``."""
        c = self.c
        scope = Scope(self.printer, at={self.rows: c.row, self.columns: c.column})
        exists = scope.condition(self.kernel.within)
        exists = f"{c.column} < {self.columns.size} && {exists}" if self._tail else exists
        return [f"const {self.printer.index_type} {c.column} = {self._first} + {place};", *scope.lines], exists

    def _inside_apart(self, share: str) -> list[str]:
        """Which of the 32 columns from ``across`` on exist in a thread's row."""
        c = self.c
        lines, exists = self._column(f"{share}::place({c.i})")
        each = [*lines, f"{c.inside}[0] |= unsigned({exists}) << {share}::place({c.i});"]
        return [
            f"unsigned {c.inside}[1] = {{}};",
            *loop(c.i, f"{share}::count", each),
            f"{c.inside}[0] |= __shfl_xor_sync(0xffffffffu, {c.inside}[0], 4);",
        ]

    def _stores(self, first: str) -> list[str]:
        """Stores states in the `first` thread of a row."""
        c = self.c
        across, (_, long) = self.tiling.warps_across, self.tiling.warp_tile
        piece = c.along if self.tiling.iterations else f"int({c.place}.column)"
        if across > 1:
            piece = f"int({c.place}.column) * {across} + {c.Tile}::warp_column() / {long}"
        stores = self.stored(c.batch if self.batches.size > 1 else "0", c.row, c.piece_of)
        exists = first
        if self.rows.size % self.tiling.rows:
            exists += f" && {c.row} < {self.rows.size}"
        return [f"const int {c.piece_of} = {piece};", *block(f"if ({exists})", stores)]


class PositionStates(PartialStores):
    """The lines of a kernel that have to do with its `Partials`."""

    def __init__(self, kernel: Kernel, plan: ConvolutionSchedule, tiles: int, rows: object, printer: Printer) -> None:
        """`tiles` are those of all samples; `rows` names the 16 channels at hand.

        Raises:
            ScheduleError: the kernel was made for a device with another schedule.
        """
        super().__init__(kernel, printer)
        self.plan, self.tiles, self.rows = plan, tiles, rows
        self.high = plan.high if isinstance(plan, MultistageSchedule) else 1
        self.iterations = plan.iterations if isinstance(plan, ChunkSchedule) else 1
        self.warp_channels = self.iterations * plan.rows * ROWS
        self.stride, self.teams = plan.takers, plan.teams if isinstance(plan, ChunkSchedule) else 1
        self.warps = plan.on.block_warps // self.teams
        if self.partials.pieces.size != piece_count(kernel, plan):
            raise ScheduleError(f"{kernel.name} was made for {self.partials.pieces.size} pieces, and has others here")
        assert self.iterations * plan.rows <= MOST_ROWS

    def begin(self) -> Iterable[str]:
        """Where the states are: behind the rooms of all warps."""
        c = self.c
        on, count = self.plan.on, self.plan.on.block_warps * self.warp_channels
        place = on.block_warps * ROWS * on.staged_pitch
        if isinstance(self.plan, RegisterStationarySchedule):  # rooms are where the tile is
            place = -(on.state_floats + self.plan.found_bytes // 4)
        yield "// what was found of each channel so far: the states of each warp"
        for number, reduction in enumerate(self.partials.reductions):
            kind = state_type(reduction)
            yield (
                f"{kind}* const {self._states(number)} = reinterpret_cast<{kind}*>"
                f"({c.room} - {c.warp} * {ROWS * on.staged_pitch} + {place});"
            )
            place += count * state_bytes(reduction) // 4
        empty = [f"{self._states(number)}[{c.i}] = {{}};" for number in range(len(self.partials.reductions))]
        yield from block(f"for (int {c.i} = threadIdx.x; {c.i} < {count}; {c.i} += {self.plan.threads})", empty)

    def _states(self, number: int) -> str:
        return self.c.named(f"states_{number}")

    def add(self) -> Iterable[str]:
        """Adds the values of 16 channels that lie in the warp's room, those of ``inside``, to its states of channels ``m``."""
        c = self.c
        on = self.plan.on
        lines = [f"const fp::Share<{on.pair}> {c.share}({c.room}, {on.staged_pitch}, {c.inside});"]
        for number in range(len(self.partials.reductions)):
            lines.append(f"fp::leave_row({self.of_iteration(number)} + {self.rows} * {ROWS}, {c.share});")
        return ["__syncwarp();", *braces(lines)]

    def of_iteration(self, number: int) -> str:
        """Where the warp's states of a reduction lie, those of the channels of an iteration."""
        c = self.c
        iteration = f" + {c.turn} * {self.plan.rows * ROWS}" if self.iterations > 1 else ""
        return f"{self._states(number)} + {c.warp} * {self.warp_channels}{iteration}"

    def end(self, first_channel: str, end_channel: str) -> Iterable[str]:
        """Stores the states where a piece ends with the tile, those of a block's channels before `end_channel`. Goes behind a barrier."""
        c = self.c
        channels = self.high * self.warp_channels
        shape = f"{self.warps}, {self.high}, {self.warp_channels}, {str(self.plan.on.warps > 1).lower()}"
        thread, own = "threadIdx.x", ""
        if self.teams > 1:
            thread, own = f"threadIdx.x % {32 * self.warps}", f" + {c.team} * {self.warps * self.warp_channels}"
        lines = [f"const int {c.channel} = {first_channel} + int({thread});"]
        for number, reduction in enumerate(self.partials.reductions):
            gathered = f"fp::gather_channel<{shape}>({self._states(number)}{own}, {thread})"
            lines.append(f"const {state_type(reduction)} {self._found(number)} = {gathered};")
        lines += block(f"if ({c.channel} < {end_channel})", self.stored(c.sample, c.channel, c.piece_of))
        head = " && ".join(filter(None, [f"{thread} < {channels}" if channels < 32 * self.warps else "", self._ends()]))
        yield f"const int {c.piece_of} = {self._piece()};"
        yield from block(f"if ({head})", lines) if head else braces(lines)

    def _piece(self) -> str:
        """The piece that a tile belongs to."""
        c = self.c
        tiles = prod(self.plan.on.tiles)
        if self.partials.per_sample and tiles < self.stride:
            return f"{c.number} % {tiles}"
        block = f"int(blockIdx.x) / {self.plan.channel_blocks}" if self.plan.channel_blocks > 1 else "int(blockIdx.x)"
        return f"{block} + {c.team} * {self.stride // self.teams}" if self.teams > 1 else block

    def _ends(self) -> str:
        """The condition that a piece ends with a tile; none where each does."""
        c = self.c
        tiles = prod(self.plan.on.tiles)
        if self.stride >= self.tiles or (self.partials.per_sample and tiles <= self.stride):
            return ""
        last = f"{c.number} + {self.stride} >= {self.tiles}"
        return f"({last} || ({c.number} + {self.stride}) / {tiles} != {c.sample})" if self.partials.per_sample else last


def state_type(reduction: Reduction) -> str:
    """What its results are collected in."""
    return f"fp::{reduction.op.value}<{C_TYPES[reduction.dtype]}>"
