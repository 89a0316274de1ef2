"""How a CUDA kernel with a streamed convolution fetches: tables of slices and pieces, copies of weights and input."""

from __future__ import annotations

from collections.abc import Iterable

from fusepass.codegen.ir.convolution import DEPTH, ROWS
from fusepass.codegen.ir.dtype import Precision
from fusepass.codegen.ir.index import contiguous_strides
from fusepass.codegen.ir.program import Kernel
from fusepass.codegen.render.cuda.contraction.convolution.results import ConvolutionWriter
from fusepass.codegen.render.cuda.contraction.convolution.tiles import dot, quotient, remainder, table
from fusepass.codegen.render.cuda.contraction.loop import Loop
from fusepass.codegen.render.cuda.family import Place
from fusepass.codegen.render.spelling import block
from fusepass.codegen.schedule_convolution.multistage import SLICE_FLOATS, MultistageSchedule
from fusepass.codegen.schedule_convolution.tiles import COLUMNS, WARPS

FIELDS = 4  # numbers of a piece in the table of pieces
SWAPS, LOADS, LAST = 1, 2, 4  # flags


class MultistageCopies(ConvolutionWriter):
    """Lines of a kernel that have to do with what it fetches."""

    def __init__(self, kernel: Kernel, plan: MultistageSchedule, place: Place) -> None:
        super().__init__(kernel, plan, place)
        assert self.anchor.packed is not None
        self.plan: MultistageSchedule = plan
        self.part = Loop(self.c.h, plan.parts)
        self.packed = self.program.buffer(self.anchor.packed)
        self.rounds, self.together = plan.precision is Precision.TF32, plan.on.warps > 1
        self.pieces = plan.pieces()
        self.slices = plan.slices()
        self.pieces_name, self.at_name, self.from_name = (
            place.names.exact(f"{kernel.name}_{what}") for what in ("pieces", "input_at", "weights_from")
        )

    # ---- tables

    def _tables(self) -> Iterable[str]:
        positions = contiguous_strides(self.weight.shape[2:])
        every = self._positions()
        at, origin = [], []
        for number, group, tap in self.slices:
            here = self.on.phases[number].taps[tap]
            at.append(group * DEPTH * self.on.pitch + self.from_origin(here.offset))
            origin.append(group * every + dot(here.place, positions))
        yield f"// For each slice of {self.anchor.name}, one kernel position of {DEPTH} channels: its place in the input of a chunk."
        yield from table(self.at_name, at or [0])
        yield "// Its place among the packed slices of a chunk."
        yield from table(self.from_name, origin or [0])
        yield "// For each piece of a tile: its first slice, their number, the chunk of input channels, and the sum of"
        yield f"// {SWAPS} where it goes on with the other phase of a pair, {LOADS} where it brings input, {LAST} where it is the last of its phases."
        numbers = [
            number
            for piece in self.pieces
            for number in (
                piece.first,
                piece.count,
                piece.chunk,
                SWAPS * piece.swaps + LOADS * piece.loads + LAST * piece.last,
            )
        ]
        yield from table(self.pieces_name, numbers)

    def _positions(self) -> int:
        """Kernel positions."""
        total = 1
        for size in self.weight.shape[2:]:
            total *= size
        return total

    # ---- where things are

    def _first_tile(self) -> str:
        return quotient("int(blockIdx.x)", self.plan.channel_blocks)

    def _places(self) -> Iterable[str]:
        c = self.c
        plan, on, n = self.plan, self.on, Loop(c.n, COLUMNS)
        weights = plan.stages * plan.piece_floats
        inputs = plan.inputs * plan.chunk_floats
        yield f"extern __shared__ __align__(16) unsigned char {c.pool}[];"
        yield f"float* const {c.weights} = reinterpret_cast<float*>({c.pool});"
        yield f"float* const {c.inputs} = {c.weights} + {weights};"
        yield f"const int {c.lane} = threadIdx.x % 32;"
        yield f"const int {c.warp} = threadIdx.x / 32;"
        yield f"float* const {c.room} = {c.inputs} + {inputs} + {c.warp} * {ROWS * on.staged_pitch};"
        yield from self.channel_group()
        yield f"const int {c.first_row} = {self.part_of_group}{self._times(plan.block_rows)};"
        yield f"const int {c.first_channel} = {self._from_row(f'({c.first_row} + {self._high()} * {plan.rows})')};"
        yield "// where the columns of this warp begin in the tile, 8 positions each"
        yield f"int {c.groups}[{plan.parts}][{COLUMNS}];"
        place = self.group_place(f"({self._first_group(str(self.part))} + {n})")
        columns = n.over([f"{c.groups}[{self.part}][{n}] = {place};"])
        yield from self.part.over(columns)

    def _times(self, factor: int) -> str:
        return f" * {factor}" if self.plan.channel_blocks > self.anchor.groups else ""

    def _from_row(self, row: str) -> str:
        """The first output channel of a tile of 16 of the block's group."""
        return self.of_group(f"{row} * {ROWS}", self.outs)

    def _sums(self) -> str:
        """The dimensions of a thread's sums of one phase."""
        plan = self.plan
        return f"[{2 * plan.parts}][{8 * plan.rows}]" if self.together else f"[{plan.parts}][{plan.rows}][{COLUMNS}][4]"

    def _high(self) -> str:
        """The place of a warp along the output channels; warps that multiply together share theirs."""
        c = self.c
        if not self.together:
            return remainder(c.warp, self.plan.high)
        return quotient(c.warp, WARPS // self.plan.high) if self.plan.high > 1 else "0"

    def _first_group(self, part: str) -> str:
        c = self.c
        warp = quotient(c.warp, self.plan.high)
        if self.together:
            warp = c.warp if self.plan.high == 1 else remainder(c.warp, WARPS // self.plan.high)
        if self.plan.parts == 1:
            return f"{warp} * {COLUMNS}"
        return f"({warp} * {self.plan.parts} + {part}) * {COLUMNS}"

    # ---- copies

    def _fetch_weights(self) -> Iterable[str]:
        """How a piece's slices are fetched: each warp copies 16 output channels of a slice, which are 512 neighbouring bytes.

        Where warps multiply together, all high parts of a slice come before its low ones.
        """
        c = self.c
        plan, rows = self.plan, self.packed.shape[0] // self.anchor.groups
        slices = max(self.anchor.parts, 1)  # of 512 bytes, for 16 output channels and one kernel position
        each, chunk = self.packed.strides[0] // SLICE_FLOATS, slices * plan.depth * self._positions()
        row = f"{c.first_row} + {remainder(c.i, plan.block_rows)}"
        if rows % plan.block_rows:  # what lies past the end is computed of other numbers and not stored
            row = f"{row} < {rows - 1} ? {row} : {rows - 1}"
        place = f"{self.index_type}({self.of_group(c.row, rows)}) * {each} + {c.chunk} * {chunk}"
        place += f" + {self.from_name}[{c.first} + {quotient(c.i, plan.units)}]{f' * {slices}' if slices > 1 else ''}"
        if slices > 1:
            place += f" + {c.i} / {plan.block_rows} % {slices}"
        copy = [
            f"const int {c.row} = {row};",
            f"const {self.index_type} {c.from_} = ({place}) * {SLICE_FLOATS} + {c.lane} * 4;",
            f"fp::begin_copy_bytes<16>({c.to} + {c.i} * {SLICE_FLOATS} + {c.lane} * 4, {self.pointers[self.packed.name]} + {c.from_}, 16);",
        ]
        yield "// begins to fetch slices of weights"
        head = f"const auto {c.fetch_weights} = [&](int {c.first}, int {c.count}, int {c.chunk}, float* {c.to})"
        yield from block(
            head,
            block(f"for (int {c.i} = {c.warp}; {c.i} < {c.count} * {plan.units}; {c.i} += {WARPS})", copy),
            "};",
        )

    def _fetch_input(self) -> Iterable[str]:
        """How the input of a chunk below a tile is fetched, and settled once it is there, by the thread that fetched it."""
        c = self.c
        plan, strides = self.plan, self.source.strides
        channels = plan.depth * DEPTH
        lines, real, index = self.input_place(c.i)
        exists = (
            c.real if plan.chunks * channels == self.ins else f"{c.real} && {c.from_channel} + {c.channel} < {self.ins}"
        )
        offset = f"{c.from_} + {self.index_type}({c.from_channel} + {c.channel}) * {strides[1]}"
        over_channels = f"for (int {c.channel} = 0; {c.channel} < {channels}; ++{c.channel})"
        lines += [
            f"const bool {c.real} = {real};",
            f"const {self.index_type} {c.from_} = {index};",
            "#pragma unroll 8",
            *block(
                over_channels,
                [
                    f"const bool {c.there} = {exists};",
                    f"const auto* const {c.source} = {self.pointers[self.source.name]} + ({c.there} ? {offset} : 0);",
                    self.copy_input(f"{c.to} + {self.in_tile(c.channel)}", c.source, c.there),
                ],
            ),
        ]
        yield "// begins to fetch the input of a chunk below a tile, zeros where there is none"
        inner = [
            *self.tile_place(),
            f"const int {c.from_channel} = {c.chunk} * {channels};",
            *block(self.copies, lines),
        ]
        yield from block(f"const auto {c.fetch_input} = [&](int {c.number}, int {c.chunk}, float* {c.to})", inner, "};")
        settle = f"const auto {c.settle_input} = [&](float* {c.to})"
        yield from self.settling(settle, c.to, over_channels, "#pragma unroll 8")

    def _fetch_piece(self, stride: int) -> Iterable[str]:
        """How the next piece is fetched; there is a group of copies even where there is none, so that they can be counted."""
        c = self.c
        plan = self.plan
        ready = [
            f"const int* const {c.what} = {self.pieces_name} + {c.piece_ahead} * {FIELDS};",
            f"{c.fetch_weights}({c.what}[0], {c.what}[1], {c.what}[2], {c.weights} + {c.stage_ahead} * {plan.piece_floats});",
            *block(
                f"if ({c.what}[3] & {LOADS})",
                [
                    f"{c.fetch_input}({c.tile_ahead}, {c.what}[2], {c.inputs} + {c.slot_ahead} * {plan.chunk_floats});",
                    f"{c.slot_ahead} = {c.slot_ahead} + 1 < {plan.inputs} ? {c.slot_ahead} + 1 : 0;",
                ],
            ),
            f"{c.stage_ahead} = {c.stage_ahead} + 1 < {plan.stages} ? {c.stage_ahead} + 1 : 0;",
            *block(
                f"if (++{c.piece_ahead} == {len(self.pieces)})",
                [f"{c.piece_ahead} = 0;", f"{c.tile_ahead} += {stride};"],
            ),
        ]
        yield f"int {c.tile_ahead} = {self._first_tile()}, {c.piece_ahead} = 0, {c.stage_ahead} = 0, {c.slot_ahead} = 0;"
        lines = [*block(f"if ({c.tile_ahead} < {self.tile_count})", ready), "fp::end_copies();"]
        yield from block(f"const auto {c.fetch_piece} = [&]()", lines, "};")
