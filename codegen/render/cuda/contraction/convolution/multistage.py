"""Writes the body of a CUDA kernel with a convolution of many channels; `codegen.schedule_convolution.multistage` says how it is laid out.

Copies are asynchronous. Each piece of work waits for its own copies, meets the other threads at one barrier, begins the copies of a
later piece, and multiplies. What these copies overwrite was last read before that barrier: a stage of weights one piece
ago, a chunk of the input as many pieces ago as `_least_pieces` in the schedule guarantees.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from fusepass.codegen.ir.convolution import DEPTH, ROWS
from fusepass.codegen.ir.dtype import Precision
from fusepass.codegen.ir.index import contiguous_strides
from fusepass.codegen.ir.program import Kernel
from fusepass.codegen.render.cuda.contraction.convolution.results import GROUP_SLICES, ConvolutionWriter, repair
from fusepass.codegen.render.cuda.contraction.convolution.tiles import Sums, dot, quotient, remainder, table
from fusepass.codegen.render.cuda.contraction.loops import Loop
from fusepass.codegen.render.cuda.family import Text
from fusepass.codegen.render.spelling import ROLLED, block, braces, loop
from fusepass.codegen.render.unit import Place
from fusepass.codegen.schedule_convolution.multistage import SLICE_FLOATS, MultistageSchedule
from fusepass.codegen.schedule_convolution.tiles import COLUMNS, WARPS

FIELDS = 4  # numbers of a piece in the table of pieces
SWAPS, LOADS, LAST = 1, 2, 4  # flags


class MultistageWriter(ConvolutionWriter):
    """Lines of such a kernel: tables of slices and pieces, copies of weights and input, products, results."""

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

    def write(self) -> Text:
        c = self.c
        plan, on = self.plan, self.on
        stride = plan.blocks // plan.channel_blocks
        group = [
            f"float {c.sums}[{on.pair}]{self._sums()} = {{}};",
            f"bool {c.last};",
            ROLLED,
            *block("do", self._piece(), f"}} while (!{c.last});"),
            *self._results(),
        ]
        group = self.over_phases(group) if len(on.phases) > 1 else braces(group)
        if self.states:
            group += ["__syncthreads();", *self.states.end(self._from_row(c.first_row), self.end_channel)]
        tiles = f"for (int {c.number} = {self._first_tile()}; {c.number} < {self.tile_count}; {c.number} += {stride})"
        body = [
            *self._places(),
            *(self.states.begin() if self.states else ()),
            "",
            *self._fetch_weights(),
            "",
            *self._fetch_input(),
            "",
            *self._fetch_piece(stride),
            "",
            f"for (int {c.n} = 0; {c.n} < {plan.stages - 1}; ++{c.n}) {c.fetch_piece}();",
            f"int {c.stage} = 0, {c.slot} = {plan.inputs - 1};",
            *block(tiles, [*self.tile_place(), f"int {c.piece} = 0;", *group]),
        ]
        return Text(tables=tuple(self._tables()), body=tuple(body))

    # ---- tables

    def _tables(self) -> Iterable[str]:
        positions = contiguous_strides(self.weight.shape[2:])
        every = prod(self.weight.shape[2:])
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
        each, chunk = self.packed.strides[0] // SLICE_FLOATS, slices * plan.depth * prod(self.weight.shape[2:])
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

    # ---- products

    def _piece(self) -> list[str]:
        c = self.c
        plan = self.plan
        advance = [f"{c.slot} = {c.slot} + 1 < {plan.inputs} ? {c.slot} + 1 : 0;"]
        if self.settles:
            advance.append(f"{c.settle_input}({c.inputs} + {c.slot} * {plan.chunk_floats});")
        return [
            f"const int* const {c.what} = {self.pieces_name} + {c.piece}++ * {FIELDS};",
            f"fp::await_copies<{plan.stages - 2}>();",
            *block(f"if ({c.what}[3] & {LOADS})", advance),
            *(["fp::publish_to_products();"] if self.together else []),
            "__syncthreads();",
            f"{c.fetch_piece}();",
            *self._multiply(),
            f"{c.stage} = {c.stage} + 1 < {plan.stages} ? {c.stage} + 1 : 0;",
            f"{c.last} = {c.what}[3] & {LAST};",
        ]

    def _multiply(self) -> Iterable[str]:
        c = self.c
        plan, on, n = self.plan, self.on, Loop(c.n, COLUMNS)
        yield f"const float* const {c.mine} = {c.inputs} + {c.slot} * {plan.chunk_floats} + {c.lane} % 4 * {on.pitch} + {c.lane} / 4 * {self.anchor.step[-1]};"
        if self.on.pair > 1:
            yield f"if ({c.what}[3] & {SWAPS}) fp::exchange({c.sums}[0], {c.sums}[1]);  // the sums that grow are always the first"
        first = f"{self._high()} * {plan.rows * SLICE_FLOATS} + " if plan.high > 1 else ""
        if self.together:
            yield from self._multiply_together(f"{c.weights} + ({first}{c.stage} * {plan.piece_floats})")
            return
        yield f"const float* const {c.slices} = {c.weights} + {c.stage} * {plan.piece_floats} + {first}{c.lane} * 4;"
        from_memory = [
            f"{c.b}[{n}][0] = {c.near}[{c.groups}[{self.part}][{n}]];",
            f"{c.b}[{n}][1] = {c.near}[{c.groups}[{self.part}][{n}] + {4 * on.pitch}];",
        ]
        multiply = "fp::multiply_rounded" if self.rounds else "fp::multiply_exactly"
        part = [
            f"float {c.b}[{COLUMNS}][2];",
            *n.over(from_memory),
            f"{multiply}({c.sums}[0][{self.part}], {c.a}, {c.b});",
        ]
        one = [
            f"const float* const {c.a} = {c.slices} + {c.s} * {plan.block_rows * SLICE_FLOATS};",
            f"const float* const {c.near} = {c.mine} + {self.at_name}[{c.what}[0] + {c.s}];",
            *self.part.over(part),
        ]
        yield from loop(c.s, f"{c.what}[1]", one, ROLLED)

    def _multiply_together(self, weights: str) -> Iterable[str]:
        """The products of a piece whose weights begin at `weights`, by four warps together."""
        c = self.c
        plan, far, n = self.plan, 4 * self.on.pitch, Loop(c.n, COLUMNS)
        from_memory = [
            f"{c.a}[{self.part} * 2 + {n} / 2][{n} % 2] = {c.near}[{c.groups}[{self.part}][{n}]];",
            f"{c.a}[{self.part} * 2 + {n} / 2][{n} % 2 + 2] = {c.near}[{c.groups}[{self.part}][{n}] + {far}];",
        ]
        load = [
            f"const float* const {c.near} = {c.mine} + {self.at_name}[{c.what}[0] + {c.s}];",
            *self.part.over(n.over(from_memory)),
        ]
        yield from block(f"const auto {c.load} = [&](float (&{c.a})[{2 * plan.parts}][4], int {c.s})", load, "};")
        yield f"const uint64_t {c.high} = fp::tile_descriptor({weights}, 128, 256);"
        units = plan.units * SLICE_FLOATS // 4  # of 16 bytes, from slice to slice
        if self.rounds:
            yield f"fp::multiply_slices_rounded<{GROUP_SLICES}>({c.sums}[0], {c.what}[1], {c.high}, {units}, {c.load});"
            return
        low = f"{c.high} + {plan.block_rows * SLICE_FLOATS // 4}"
        yield f"fp::multiply_slices_exactly<{GROUP_SLICES}>({c.sums}[0], {c.what}[1], {c.high}, {low}, {units}, {c.load});"

    # ---- results

    def _results(self) -> Iterable[str]:
        c, on = self.c, self.on
        repaired: tuple[str, ...] = ()
        if not self.rounds:
            each = [self.phase] if self.together else [self.phase, self.part]
            yield from self.finite(
                f"{c.sums}[{self.phase}]" if self.together else f"{c.sums}[{self.phase}][{self.part}]", each
            )
            repaired = tuple(repair(self))
        done = (
            f"{c.sums}[1 - {self.phase}]" if on.pair > 1 else f"{c.sums}[{self.phase}]"
        )  # the second phase of a pair comes last
        staging = f"fp::stage<{on.pair}, {on.staged_pitch}>({c.room}, {done}[{self.part}][{self.rows}], {self.phase});"
        if self.together:
            staging = f"fp::stage_group<{on.pair}, {on.staged_pitch}>({c.room}, {done}, {self.part} * 2, {self.rows}, {self.phase});"
        group = self._first_group(str(self.part))
        sums = Sums(staging, self.rows, group, repaired, "#pragma unroll 4", phase=self.phase)
        yield from self.part.over(list(self.epilogue(sums)))
