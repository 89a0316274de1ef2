"""Writes the body of a CUDA kernel with a convolution of many channels; `codegen.schedule_convolution.multistage` says how it is laid out.

Copies are asynchronous. Each piece of work waits for its own copies, meets the other threads at one barrier, begins the copies of a
later piece, and multiplies. What these copies overwrite was last read before that barrier: a stage of weights one piece
ago, a chunk of the input as many pieces ago as `_least_pieces` in the schedule guarantees.
"""

from __future__ import annotations

from collections.abc import Iterable

from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.render.cuda_convolution import GROUP_SLICES, ConvolutionText
from fusepass.codegen.render.cuda_definition import repair
from fusepass.codegen.render.cuda_input import unrolled
from fusepass.codegen.render.cuda_multistage_copies import FIELDS, LAST, LOADS, SWAPS, MultistageCopies
from fusepass.codegen.render.cuda_positions import Sums
from fusepass.codegen.render.spelling import Identifiers, block
from fusepass.codegen.schedule_convolution.multistage import SLICE_FLOATS, MultistageSchedule
from fusepass.codegen.schedule_convolution.tiles import COLUMNS

_ONCE = "#pragma unroll 1"


def multistage_text(
    kernel: Kernel, program: Program, plan: MultistageSchedule, pointers: dict[str, str], names: Identifiers
) -> ConvolutionText:
    """The text of `kernel`; `pointers` names its buffers, `names` knows the identifiers that are taken."""
    return _Writer(kernel, program, plan, pointers, names).write()


class _Writer(MultistageCopies):
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
            group += ["__syncthreads();", *self.states.end(self._from_row("$first_row"), self.end_channel)]
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

    # ---- products

    def _piece(self) -> list[str]:
        plan = self.plan
        advance = [f"$slot = $slot + 1 < {plan.inputs} ? $slot + 1 : 0;"]
        if self.settles:
            advance.append(f"$settle_input($inputs + $slot * {plan.chunk_floats});")
        return [
            f"const int* const $what = {self.pieces_name} + $piece++ * {FIELDS};",
            f"fp::await_copies<{plan.stages - 2}>();",
            *block(f"if ($what[3] & {LOADS})", advance),
            *(["fp::publish_to_products();"] if self.together else []),
            "__syncthreads();",
            "$fetch_piece();",
            *self._multiply(),
            f"$stage = $stage + 1 < {plan.stages} ? $stage + 1 : 0;",
            f"$last = $what[3] & {LAST};",
        ]

    def _multiply(self) -> Iterable[str]:
        plan, on = self.plan, self.on
        yield f"const float* const $mine = $inputs + $slot * {plan.chunk_floats} + $lane % 4 * {on.pitch} + $lane / 4 * {self.anchor.step[-1]};"
        if self.on.pair > 1:
            yield f"if ($what[3] & {SWAPS}) fp::exchange($sums[0], $sums[1]);  // the sums that grow are always the first"
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
        sums = Sums(staging, plan.rows, plan.covered, self._first_group("$h"), repaired, "#pragma unroll 4")
        yield from unrolled("$h", plan.parts, list(self.epilogue(sums)))
