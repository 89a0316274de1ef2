"""Writes the body of a CUDA kernel with a convolution of many channels; `codegen.schedule_convolution.streamed` says how it is laid out.

Copies are asynchronous. Each piece of work waits for its own copies, meets the other threads at one barrier, begins the copies of a
later piece, and multiplies. What these copies overwrite was last read before that barrier: a stage of weights one piece
ago, a chunk of the input as many pieces ago as `_least_pieces` in the schedule guarantees.
"""

from __future__ import annotations

from collections.abc import Iterable

from fusepass.codegen.ir.convolution import DEPTH, ROWS
from fusepass.codegen.ir.dtype import Precision
from fusepass.codegen.ir.index import contiguous_strides
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.render.cuda_convolution import (
    GROUP_SLICES,
    ConvolutionText,
    ConvolutionWriter,
    Sums,
    dot,
    quotient,
    remainder,
    table,
    unrolled,
)
from fusepass.codegen.render.cuda_definition import repair
from fusepass.codegen.render.spelling import Identifiers, block
from fusepass.codegen.schedule_convolution.streamed import SLICE_FLOATS, StreamedSchedule
from fusepass.codegen.schedule_convolution.tiles import COLUMNS, WARPS

_FIELDS = 4  # numbers of a piece in the table of pieces
_SWAPS, _LOADS, _LAST = 1, 2, 4  # flags
_ONCE = "#pragma unroll 1"


def streamed_text(
    kernel: Kernel, program: Program, plan: StreamedSchedule, pointers: dict[str, str], names: Identifiers
) -> ConvolutionText:
    """The text of `kernel`; `pointers` names its buffers, `names` knows the identifiers that are taken."""
    return _Writer(kernel, program, plan, pointers, names).write()


class _Writer(ConvolutionWriter):
    def __init__(
        self, kernel: Kernel, program: Program, plan: StreamedSchedule, pointers: dict[str, str], names: Identifiers
    ) -> None:
        super().__init__(kernel, program, plan, pointers, names)
        assert self.anchor.packed is not None
        self.plan: StreamedSchedule = plan
        self.packed = program.buffer(self.anchor.packed)
        self.rounds, self.together = plan.precision is Precision.TF32, plan.on.warps > 1
        self.pieces = plan.pieces()
        self.slices = plan.slices()
        self.pieces_name, self.at_name, self.from_name = (
            names.exact(f"{kernel.name}_{what}") for what in ("pieces", "input_at", "weights_from")
        )

    def write(self) -> ConvolutionText:
        plan, on = self.plan, self.on
        stride = plan.blocks // plan.channel_blocks
        group = [
            f"float $sums[{on.pair}]{self._sums()} = {{}};",
            "bool $last;",
            _ONCE,
            *block("do", self._piece())[:-1],
            "} while (!$last);",
            *self._results(),
        ]
        if len(on.phases) > 1:
            head = f"for (int $phase = 0; $phase < {len(on.phases)}; $phase += {on.pair})"
            group = [_ONCE, *block(head, group)]
        else:
            group = block("", group)
            group[0] = "{"
        if self.states:
            group += ["__syncthreads();", *self.states.end(f"$first_row * {ROWS}")]
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
            f"for (int $n = 0; $n < {plan.stages - 1}; ++$n) $fetch_piece();",
            f"int $stage = 0, $slot = {plan.inputs - 1};",
            f"for (int $number = {self._first_tile()}; $number < {self.tile_count}; $number += {stride}) {{",
            *("    " + line for line in (*self.tile_place(), "int $piece = 0;", *group)),
            "}",
        ]
        return ConvolutionText(tuple(self._tables()), tuple(map(self.named, body)))

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
        yield f"// {_SWAPS} where it goes on with the other phase of a pair, {_LOADS} where it brings input, {_LAST} where it is the last of its phases."
        numbers = [
            number
            for piece in self.pieces
            for number in (
                piece.first,
                piece.count,
                piece.chunk,
                _SWAPS * piece.swaps + _LOADS * piece.loads + _LAST * piece.last,
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
        plan, on = self.plan, self.on
        weights = plan.stages * plan.piece_floats
        inputs = plan.inputs * plan.chunk_floats
        yield "extern __shared__ __align__(16) unsigned char $pool[];"
        yield "float* const $weights = reinterpret_cast<float*>($pool);"
        yield f"float* const $inputs = $weights + {weights};"
        yield "const int $lane = threadIdx.x % 32;"
        yield "const int $warp = threadIdx.x / 32;"
        yield f"float* const $room = $inputs + {inputs} + $warp * {ROWS * on.staged_pitch};"
        yield f"const int $first_row = {remainder('int(blockIdx.x)', plan.channel_blocks)}{self._times(plan.block_rows)};"
        high = self._high()
        yield f"const int $first_channel = ($first_row + {high} * {plan.rows}) * {ROWS};"
        yield "// where the columns of this warp begin in the tile, 8 positions each"
        yield f"int $groups[{plan.parts}][{COLUMNS}];"
        place = self.group_place(f"({self._first_group('$h')} + $n)")
        columns = unrolled("$n", COLUMNS, [f"$groups[$h][$n] = {place};"])
        yield from unrolled("$h", plan.parts, columns)

    def _times(self, factor: int) -> str:
        return f" * {factor}" if self.plan.channel_blocks > 1 else ""

    def _sums(self) -> str:
        """The dimensions of a thread's sums of one phase."""
        plan = self.plan
        return f"[{2 * plan.parts}][{8 * plan.rows}]" if self.together else f"[{plan.parts}][{plan.rows}][{COLUMNS}][4]"

    def _high(self) -> str:
        """The place of a warp along the output channels; warps that multiply together share theirs."""
        if not self.together:
            return remainder("$warp", self.plan.high)
        return quotient("$warp", WARPS // self.plan.high) if self.plan.high > 1 else "0"

    def _first_group(self, part: str) -> str:
        warp = quotient("$warp", self.plan.high)
        if self.together:
            warp = "$warp" if self.plan.high == 1 else remainder("$warp", WARPS // self.plan.high)
        if self.plan.parts == 1:
            return f"{warp} * {COLUMNS}"
        return f"({warp} * {self.plan.parts} + {part}) * {COLUMNS}"

    # ---- copies

    def _fetch_weights(self) -> Iterable[str]:
        """How a piece's slices are fetched: each warp copies 16 output channels of a slice, which are 512 neighbouring bytes.

        Where warps multiply together, all high parts of a slice come before its low ones.
        """
        plan, last = self.plan, self.packed.shape[0] - 1
        slices = max(self.anchor.parts, 1)  # of 512 bytes, for 16 output channels and one kernel position
        each, chunk = self.packed.strides[0] // SLICE_FLOATS, slices * plan.depth * self._positions()
        row = f"$first_row + {remainder('$i', plan.block_rows)}"
        if (last + 1) % plan.block_rows:
            row = (
                f"{row} < {last} ? {row} : {last}"  # what lies past the end is computed of other numbers and not stored
            )
        place = f"{self.index_type}($row) * {each} + $chunk * {chunk}"
        place += f" + {self.from_name}[$first + {quotient('$i', plan.units)}]{f' * {slices}' if slices > 1 else ''}"
        if slices > 1:
            place += f" + $i / {plan.block_rows} % {slices}"
        copy = [
            f"const int $row = {row};",
            f"const {self.index_type} $from = ({place}) * {SLICE_FLOATS} + $lane * 4;",
            f"fp::begin_copy_bytes<16>($to + $i * {SLICE_FLOATS} + $lane * 4, {self.pointers[self.packed.name]} + $from, 16);",
        ]
        yield "// begins to fetch slices of weights"
        head = "const auto $fetch_weights = [&](int $first, int $count, int $chunk, float* $to)"
        yield from block(head, block(f"for (int $i = $warp; $i < $count * {plan.units}; $i += {WARPS})", copy))[:-1]
        yield "};"

    def _fetch_input(self) -> Iterable[str]:
        """How the input of a chunk below a tile is fetched, and rounded once it is there, by the thread that fetched it."""
        plan, shape, strides = self.plan, self.source.shape, self.source.strides
        channels = plan.depth * DEPTH
        lines, real, index = self.input_place("$i")
        exists = "$real" if plan.chunks * channels == shape[1] else f"$real && $from_channel + $channel < {shape[1]}"
        offset = f"$from + {self.index_type}($from_channel + $channel) * {strides[1]}"
        over_channels = f"for (int $channel = 0; $channel < {channels}; ++$channel)"
        lines += [
            f"const bool $real = {real};",
            f"const {self.index_type} $from = {index};",
            "#pragma unroll 8",
            *block(
                over_channels,
                [
                    f"const bool $there = {exists};",
                    f"const float* const $source = {self.pointers[self.source.name]} + ($there ? {offset} : 0);",
                    self.copy_input(f"$to + {self.in_tile('$channel')}", "$source", "$there"),
                ],
            ),
        ]
        yield "// begins to fetch the input of a chunk below a tile, zeros where there is none"
        inner = [*self.tile_place(), f"const int $from_channel = $chunk * {channels};", *block(self.copies, lines)]
        yield from block("const auto $fetch_input = [&](int $number, int $chunk, float* $to)", inner)[:-1]
        yield "};"
        if self.rounds:
            rounding = block(self.copies, ["#pragma unroll 8", *block(over_channels, [self.round_in_tile("$to")])])
            yield "// rounds what this thread has fetched"
            yield from block("const auto $round_input = [&](float* $to)", rounding)[:-1]
            yield "};"

    def _fetch_piece(self, stride: int) -> Iterable[str]:
        """How the next piece is fetched; there is a group of copies even where there is none, so that they can be counted."""
        plan = self.plan
        ready = [
            f"const int* const $what = {self.pieces_name} + $piece_ahead * {_FIELDS};",
            f"$fetch_weights($what[0], $what[1], $what[2], $weights + $stage_ahead * {plan.piece_floats});",
            *block(
                f"if ($what[3] & {_LOADS})",
                [
                    f"$fetch_input($tile_ahead, $what[2], $inputs + $slot_ahead * {plan.chunk_floats});",
                    f"$slot_ahead = $slot_ahead + 1 < {plan.inputs} ? $slot_ahead + 1 : 0;",
                ],
            ),
            f"$stage_ahead = $stage_ahead + 1 < {plan.stages} ? $stage_ahead + 1 : 0;",
            *block(f"if (++$piece_ahead == {len(self.pieces)})", ["$piece_ahead = 0;", f"$tile_ahead += {stride};"]),
        ]
        yield f"int $tile_ahead = {self._first_tile()}, $piece_ahead = 0, $stage_ahead = 0, $slot_ahead = 0;"
        lines = [*block(f"if ($tile_ahead < {self.tile_count})", ready), "fp::end_copies();"]
        yield from block("const auto $fetch_piece = [&]()", lines)[:-1]
        yield "};"

    # ---- products

    def _piece(self) -> list[str]:
        plan = self.plan
        advance = [f"$slot = $slot + 1 < {plan.inputs} ? $slot + 1 : 0;"]
        if self.rounds:
            advance.append(f"$round_input($inputs + $slot * {plan.chunk_floats});")
        return [
            f"const int* const $what = {self.pieces_name} + $piece++ * {_FIELDS};",
            f"fp::await_copies<{plan.stages - 2}>();",
            *block(f"if ($what[3] & {_LOADS})", advance),
            *(["fp::publish_to_products();"] if self.together else []),
            "__syncthreads();",
            "$fetch_piece();",
            *self._multiply(),
            f"$stage = $stage + 1 < {plan.stages} ? $stage + 1 : 0;",
            f"$last = $what[3] & {_LAST};",
        ]

    def _multiply(self) -> Iterable[str]:
        plan, on = self.plan, self.on
        yield f"const float* const $mine = $inputs + $slot * {plan.chunk_floats} + $lane % 4 * {on.pitch} + $lane / 4 * {self.anchor.step[-1]};"
        if self.on.pair > 1:
            yield f"if ($what[3] & {_SWAPS}) fp::exchange($sums[0], $sums[1]);  // the sums that grow are always the first"
        first = f"{self._high()} * {plan.rows * SLICE_FLOATS} + " if plan.high > 1 else ""
        if self.together:
            yield from self._multiply_together(f"$weights + ({first}$stage * {plan.piece_floats})")
            return
        yield f"const float* const $slices = $weights + $stage * {plan.piece_floats} + {first}$lane * 4;"
        from_memory = [
            "$b[$n][0] = $near[$groups[$h][$n]];",
            f"$b[$n][1] = $near[$groups[$h][$n] + {4 * on.pitch}];",
        ]
        multiply = "fp::multiply_rounded" if self.rounds else "fp::multiply_exactly"
        part = [
            f"float $b[{COLUMNS}][2];",
            *unrolled("$n", COLUMNS, from_memory),
            f"{multiply}($sums[0][$h], $a, $b);",
        ]
        one = [
            f"const float* const $a = $slices + $s * {plan.block_rows * SLICE_FLOATS};",
            f"const float* const $near = $mine + {self.at_name}[$what[0] + $s];",
            *unrolled("$h", plan.parts, part),
        ]
        yield _ONCE
        yield from block("for (int $s = 0; $s < $what[1]; ++$s)", one)

    def _multiply_together(self, weights: str) -> Iterable[str]:
        """The products of a piece whose weights begin at `weights`, by four warps together."""
        plan, far = self.plan, 4 * self.on.pitch
        from_memory = [
            "$a[$h * 2 + $n / 2][$n % 2] = $near[$groups[$h][$n]];",
            f"$a[$h * 2 + $n / 2][$n % 2 + 2] = $near[$groups[$h][$n] + {far}];",
        ]
        load = [
            f"const float* const $near = $mine + {self.at_name}[$what[0] + $s];",
            *unrolled("$h", plan.parts, unrolled("$n", COLUMNS, from_memory)),
        ]
        yield from block(f"const auto $load = [&](float (&$a)[{2 * plan.parts}][4], int $s)", load)[:-1]
        yield "};"
        yield f"const uint64_t $high = fp::tile_descriptor({weights}, 128, 256);"
        units = plan.units * SLICE_FLOATS // 4  # of 16 bytes, from slice to slice
        if self.rounds:
            yield f"fp::multiply_slices_rounded<{GROUP_SLICES}>($sums[0], $what[1], $high, {units}, $load);"
            return
        low = f"$high + {plan.block_rows * SLICE_FLOATS // 4}"
        yield f"fp::multiply_slices_exactly<{GROUP_SLICES}>($sums[0], $what[1], $high, {low}, {units}, $load);"

    # ---- results

    def _results(self) -> Iterable[str]:
        plan, on = self.plan, self.on
        repaired: tuple[str, ...] = ()
        if not self.rounds:
            each = [("$p", on.pair)] if self.together else [("$p", on.pair), ("$h", plan.parts)]
            yield from self.finite("$sums[$p]" if self.together else "$sums[$p][$h]", each)
            repaired = tuple(repair(self))
        done = "$sums[1 - $p]" if on.pair > 1 else "$sums[$p]"  # the second phase of a pair comes last
        staging = f"fp::stage<{on.pair}, {on.staged_pitch}>($room, {done}[$h][$m], $p);"
        if self.together:
            staging = f"fp::stage_group<{on.pair}, {on.staged_pitch}>($room, {done}, $h * 2, $m, $p);"
        held = f"{done}[$h * 2 + $t]"
        sums = Sums(held, staging, plan.rows, plan.covered, self._first_group("$h"), repaired, "#pragma unroll 4")
        yield from unrolled("$h", plan.parts, list(self.epilogue(sums)))
