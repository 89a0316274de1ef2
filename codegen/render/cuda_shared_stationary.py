"""Writes the body of a CUDA kernel with a convolution of few channels; `codegen.schedule_convolution.shared_stationary` says how it is laid out."""

from __future__ import annotations

from collections.abc import Iterable

from fusepass.codegen.ir.convolution import ROWS, Pooling
from fusepass.codegen.ir.dtype import Precision
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.render.cuda_convolution import GROUP_SLICES, ConvolutionText
from fusepass.codegen.render.cuda_definition import repair
from fusepass.codegen.render.cuda_input import dot, table, unrolled
from fusepass.codegen.render.cuda_persistent import PersistentWriter
from fusepass.codegen.render.cuda_positions import Sums
from fusepass.codegen.render.spelling import Identifiers, as_float, block
from fusepass.codegen.schedule_convolution.shared_stationary import (
    SLICE,
    SharedStationarySchedule,
    first_steps,
    places_of_weights,
)
from fusepass.codegen.schedule_convolution.tiles import COLUMNS


def shared_stationary_text(
    kernel: Kernel, program: Program, plan: SharedStationarySchedule, pointers: dict[str, str], names: Identifiers
) -> ConvolutionText:
    """The text of `kernel`; `pointers` names its buffers, `names` knows the identifiers that are taken."""
    return _Writer(kernel, program, plan, pointers, names).write()


class _Writer(PersistentWriter):
    def __init__(
        self,
        kernel: Kernel,
        program: Program,
        plan: SharedStationarySchedule,
        pointers: dict[str, str],
        names: Identifiers,
    ) -> None:
        super().__init__(kernel, program, plan, pointers, names)
        self.plan: SharedStationarySchedule = plan
        self.together, self.rounds = plan.on.warps > 1, plan.precision is Precision.TF32
        self.taps_name, self.weights_name, self.steps_name, self.halved_name = (
            names.exact(f"{kernel.name}_{what}") for what in ("taps", "weights_from", "first_step", "halved")
        )
        self.places = places_of_weights(plan, self.ins)
        self.shares = any(place.halved for place in self.places)

    def write(self) -> ConvolutionText:
        return self.text(self.plan.buffers, ["$settle();"] if self.settles else [], self._multiply(), "float*")

    # ---- tables

    def _tables(self) -> Iterable[str]:
        taps, weights = [], []
        across = 0 if self.anchor.transposed else 1  # the weight's dimension of input channels
        for place in self.places:
            tap = place.phase.taps[place.tap]
            taps.append(place.channel * self.on.pitch + self.from_origin(tap.offset))
            weights.append(place.channel * self.weight.strides[across] + dot(tap.place, self.weight.strides[2:]))
        yield f"// For each tap of {self.anchor.name}, in slices of {SLICE}: its place in a tile of the input."
        yield from table(self.taps_name, taps)
        yield "// Its place among the weights of an output channel."
        yield from table(self.weights_name, weights)
        if self.shares:
            yield "// How often its weight is halved: what fills a slice up shares the last one, so that what is not finite meets no zero."
            yield from table(self.halved_name, [place.halved for place in self.places])
        if len(self.on.phases) > 1:
            yield "// The first slice of each phase, and the end of the last."
            yield from table(self.steps_name, first_steps(self.plan.steps))

    # ---- what a block fetches

    def _shared(self) -> Iterable[str]:
        steps, plan = sum(self.plan.steps), self.plan
        after_weights = 4 * self._weights() * max(self.anchor.parts, 1)
        yield "extern __shared__ __align__(16) unsigned char $pool[];"
        yield "float* const $weights = reinterpret_cast<float*>($pool);"
        yield f"int* const $taps = reinterpret_cast<int*>($pool + {after_weights});"
        after_taps = after_weights + 4 * SLICE * steps
        yield f"float* $tile = reinterpret_cast<float*>($pool + {after_taps + 4 * self.on.staged_floats});"
        if plan.buffers == 2:
            yield f"float* $next = $tile + {self.ins * self.on.pitch};"
        yield "const int $lane = threadIdx.x % 32;"
        yield "const int $warp = threadIdx.x / 32;"
        yield f"float* const $room = reinterpret_cast<float*>($pool + {after_taps}) + $warp * {16 * self.on.staged_pitch};"
        yield "// where the columns of this warp begin in the tile, 8 positions each"
        yield f"int $groups[{COLUMNS}];"
        place = self.group_place(f"($warp * {COLUMNS} + $n)")
        yield from unrolled("$n", COLUMNS, [f"$groups[$n] = {place};"])
        yield from self.channel_group()
        part = self.part_of_group
        first = part if part == "0" else f"{part} * {plan.channels}"
        yield f"const int $first_channel = {self.of_group(first, self.outs)};"

    def _weights(self) -> int:
        """Weights of a block, those that fill slices up among them."""
        return sum(self.plan.steps) * SLICE * self.plan.channels

    def _fetch_weights(self) -> Iterable[str]:
        """Weights in the order in which tensor cores take them; see `Convolution.packed_shape`."""
        plan, steps = self.plan, sum(self.plan.steps)
        along = self.weight.strides[1 if self.anchor.transposed else 0]
        place = [
            "const int $thread = $i / 4 % 32;",
            f"const int $channel = $first_channel + $i / 128 % {plan.rows} * 16 + $thread / 4 + $i % 2 * 8;",
            f"const int $at = $i / {SLICE * plan.channels} * 8 + $thread % 4 + $i / 2 % 2 * 4;",
        ]
        if self.together:
            place = [
                f"const int $channel = $first_channel + $i / 64 % {plan.channels // 8} * 8 + $i / 4 % 8;",
                f"const int $at = $i / {SLICE * plan.channels} * 8 + $i / 32 % 2 * 4 + $i % 4;",
            ]
        keep = {
            0: ["$weights[$i] = $value;"],
            1: ["$weights[$i] = fp::tf32($value);"],
            2: ["$weights[$i] = fp::tf32($value);", f"$weights[{self._weights()} + $i] = $value - $weights[$i];"],
        }
        share = f" / (1 << {self.halved_name}[$at])" if self.shares else ""
        weight = as_float(f"{self.pointers[self.weight.name]}[$from]", self.weight.dtype)
        yield "// weights and taps, as they are multiplied"
        yield from block(
            f"for (int $i = threadIdx.x; $i < {self._weights()}; $i += {plan.threads})",
            [
                *place,
                f"const int $from = {self.weights_name}[$at] + $channel * {along}{self.group_weights};",
                f"const float $weight = $channel < {self.end_channel} ? {weight} : 0.0f;",
                f"const float $value = $weight{share};",
                *keep[self.anchor.parts],
            ],
        )
        if self.together:
            yield "fp::publish_to_products();"
        yield f"for (int $i = threadIdx.x; $i < {steps * SLICE}; $i += {plan.threads}) $taps[$i] = {self.taps_name}[$i];"

    def _fetch_tile(self) -> Iterable[str]:
        """How the input below a tile is fetched, for all channels."""
        yield from self.fetched_input()
        yield from self.settling("const auto $settle = [&]", "$tile", self.over_channels_of_input)

    # ---- products

    def _multiply(self) -> Iterable[str]:
        on, results = self.on, "$sums[$p]" if self.anchor.pooled is None else "$largest"
        lines = [
            f"float $sums[{on.pair}]{self._sums} = {{}};",
            f"const float* const $mine = $tile + $lane / 4 * {self.anchor.step[-1]};",
            *unrolled("$p", on.pair, self._sum_up()),
        ]
        if self.anchor.pooled is not None:
            yield from self._pool(self.anchor.pooled, lines)
            yield from self._results(results)
            return
        lines += [*([] if self.rounds else self.finite(results, [("$p", on.pair)])), *self._results(results)]
        if len(on.phases) > 1:
            yield "#pragma unroll 1"
            yield from block(f"for (int $phase = 0; $phase < {len(on.phases)}; $phase += {on.pair})", lines)
        else:
            yield from lines

    @property
    def _sums(self) -> str:
        """The dimensions of a thread's sums of one phase."""
        rows = self.plan.rows
        return f"[2][{self.plan.channels // 2}]" if self.together else f"[{rows}][{COLUMNS}][4]"

    def _results(self, sums: str) -> Iterable[str]:
        """What is done with the results that are in `sums`."""
        plan, on = self.plan, self.on
        staging = f"fp::stage<{on.pair}, {on.staged_pitch}>($room, {sums}[$m], $p);"
        if self.together:
            staging = f"fp::stage_group<{on.pair}, {on.staged_pitch}>($room, {sums}, 0, $m, $p);"
        height = min(plan.channels, ROWS)
        repaired = () if self.rounds else tuple(repair(self, height))
        yield from self.epilogue(Sums(staging, plan.rows, plan.covered, f"$warp * {COLUMNS}", repaired, height=height))

    def _pool(self, pooled: Pooling, lines: list[str]) -> Iterable[str]:
        """``$largest`` of the sums that `lines` give for each ``$phase``."""
        bias = ""
        if pooled.bias is not None:
            bias = f", {self.pointers[pooled.bias]}, $first_channel, {self.end_channel}"
        yield f"float $largest{self._sums};"
        yield "fp::begin_largest($largest);"
        pool = f"fp::pool_sums($largest, $sums[0]{bias});"
        broken = "$broken = $broken || !fp::all_finite($sums[0]);"
        yield from () if self.rounds else ("bool $broken = false;",)
        yield "#pragma unroll 1"
        each = [line.replace("$p]", "0]") for line in lines] + [*([] if self.rounds else [broken]), pool]
        yield from block(f"for (int $phase = 0; $phase < {len(self.on.phases)}; ++$phase)", each)
        yield from () if self.rounds else ("$broken = __any_sync(0xffffffffu, $broken);",)

    def _sum_up(self) -> list[str]:
        """The products of one phase."""
        plan = self.plan
        first, last = "0", str(plan.steps[0])
        lines = []
        if len(self.on.phases) > 1:
            first, last = "$first", f"{self.steps_name}[$phase + $p + 1]"
            lines.append(f"const int $first = {self.steps_name}[$phase + $p];")
        if self.together:
            return [*lines, *self._multiply_together(first, last)]
        from_memory = ["$b[$n][0] = $near[$groups[$n]];", "$b[$n][1] = $far[$groups[$n]];"]
        one = [
            f"float $a[{plan.rows}][4], $b[{COLUMNS}][2];",
            f"fp::load_weights($a, $weights + $step * {plan.rows * 128} + $lane * 4);",
            *self._near("$step"),
            *unrolled("$n", COLUMNS, from_memory),
            "fp::multiply_slice($sums[$p], $a, $b);",
        ]
        return [*lines, *block(f"for (int $step = {first}; $step < {last}; ++$step)", one)]

    def _near(self, step: str) -> Iterable[str]:
        """Where a thread's two places of a slice lie in the tile of the input, for the tile's first position."""
        yield f"const float* const $near = $mine + $taps[{step} * {SLICE} + $lane % 4];"
        yield f"const float* const $far = $mine + $taps[{step} * {SLICE} + $lane % 4 + 4];"

    def _multiply_together(self, first: str, last: str) -> Iterable[str]:
        """The products of slices from `first` to below `last`, by four warps together."""
        from_memory = [
            "$a[$n / 2][$n % 2] = $near[$groups[$n]];",
            "$a[$n / 2][$n % 2 + 2] = $far[$groups[$n]];",
        ]
        begin = "" if first == "0" else f"{first} + "
        load = [*self._near(f"({begin}$s)"), *unrolled("$n", COLUMNS, from_memory)]
        yield from block("const auto $load = [&](float (&$a)[2][4], int $s)", load)[:-1]
        yield "};"
        slice_units = self.plan.channels * 2
        count = last if first == "0" else f"{last} - {first}"
        at = "fp::tile_descriptor($weights, 128, 256)" + ("" if first == "0" else f" + {first} * {slice_units}")
        if self.rounds:
            yield f"fp::multiply_slices_rounded<{GROUP_SLICES}>($sums[$p], {count}, {at}, {slice_units}, $load);"
            return
        yield f"const uint64_t $high = {at};"
        low = f"$high + {self._weights() // 4}"
        yield f"fp::multiply_slices_exactly<{GROUP_SLICES}>($sums[$p], {count}, $high, {low}, {slice_units}, $load);"
