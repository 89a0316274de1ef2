"""Writes the body of a CUDA kernel with a convolution whose weights stay in registers; `codegen.schedule_convolution.held` says how it is laid out."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod

from fusepass.codegen.ir.convolution import ROWS, ScaledWeights, halves_of_place
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.render.cuda_convolution import ConvolutionText, Sums
from fusepass.codegen.render.cuda_definition import repair
from fusepass.codegen.render.cuda_input import UNROLL, dot, plus, table, unrolled
from fusepass.codegen.render.cuda_own import Held, OwnValues
from fusepass.codegen.render.cuda_persistent import PersistentWriter
from fusepass.codegen.render.cuda_scaled import BINADES, keep_exponents
from fusepass.codegen.render.spelling import Identifiers, block
from fusepass.codegen.schedule_convolution.held import LANES, HeldSchedule, pattern_of
from fusepass.codegen.schedule_convolution.places import makes_own_values
from fusepass.codegen.schedule_convolution.tiles import COLUMNS, GROUP


def held_text(
    kernel: Kernel, program: Program, plan: HeldSchedule, pointers: dict[str, str], names: Identifiers
) -> ConvolutionText:
    """The text of `kernel`; `pointers` names its buffers, `names` knows the identifiers that are taken."""
    return HeldWriter(kernel, program, plan, pointers, names).write()


class HeldWriter(PersistentWriter):
    """Lines of such a kernel."""

    whole = True

    def __init__(
        self, kernel: Kernel, program: Program, plan: HeldSchedule, pointers: dict[str, str], names: Identifiers
    ) -> None:
        super().__init__(kernel, program, plan, pointers, names)
        self.plan: HeldSchedule = plan
        assert isinstance(self.anchor.halves, ScaledWeights)
        self.halves = self.anchor.halves
        self.weights_name = names.exact(f"{kernel.name}_weights_from")
        self.pairs_name = names.exact(f"{kernel.name}_pairs")
        self._own = OwnValues(self, self._held()) if makes_own_values(kernel) else None

    def _held(self) -> Held:
        """A thread has two of 16 channels, of 8 positions, or of those that are multiplied at once where nothing is stored."""
        return Held(
            channels=2 * self.plan.rows,
            positions=2 * self.plan.together if self.plan.reduces else 8,
            row="$k / 2 * 16 + $k % 2 * 8 + $lane / 4",
            at="$sums[$k / 2][$t / 2][$k % 2 * 2 + $t % 2]",
            states="fp::HeldStates",
            push=f"fp::push_held<{self.pairs_name}, {{}}>",
            leave="fp::leave_held",
            sums="$sums",
            staging=f"$pairs.stage<{self.on.staged_pitch}>($room, $sums[$m]);",
        )

    def write(self) -> ConvolutionText:
        return self.text(1, ["__syncthreads();", *self._pack()], self._in_turns(self._sets()), "float*")

    def _tables(self) -> Iterable[str]:
        plan = self.plan
        *_, filled = halves_of_place(plan.channels, plan.parts)
        kernel = self.weight.shape[2:]
        strides = [prod(kernel[axis + 1 :]) * plan.parts * filled for axis in range(len(kernel))]
        (phase,) = plan.on.phases
        found = []
        for pair in itertools.chain(*plan.quarters):
            for real in (pair.first, pair.second):
                found.append(-1 if real is None else dot(phase.taps[real[0]].place, strides) + real[1])
        yield f"// For each pair of {self.anchor.name} its halves among the weights of an output channel; -1 for zero."
        yield from table(self.weights_name, found)
        patterns = list(dict.fromkeys(map(pattern_of, plan.places)))
        listed = [(patterns.index(pattern_of(places)), places[0]) for places in plan.places]
        quarters = ", ".join(str(number) for each in listed for number in each)
        apart = ", ".join(str(number) for pattern in patterns for number in pattern[1:])
        yield "// Where pairs lie in a tile, a quarter of 16 terms x 8 positions after another; how far those of a quarter lie apart."
        along = str(plan.along).lower()
        yield f"using {self.pairs_name} = fp::HeldPairs<{along}, {self.on.pitch}, fp::Listed<{quarters}>, fp::Listed<{apart}>>;"

    # ---- what a block fetches

    def _shared(self) -> Iterable[str]:
        plan = self.plan
        kept = plan.turns * plan.turn_bytes if plan.turns > 1 else 0
        rooms = 4 * plan.room_floats
        yield "extern __shared__ __align__(128) unsigned char $pool[];"
        yield "const int $lane = threadIdx.x % 32;"
        yield "const int $warp = threadIdx.x / 32;"
        place = kept + rooms + plan.found_bytes if plan.reduces else kept
        yield f"float* const $room = reinterpret_cast<float*>($pool + {place}) + $warp * {ROWS * self.on.staged_pitch};"
        yield f"float* const $tile = reinterpret_cast<float*>($pool + {kept + rooms + plan.found_bytes});"
        yield f"unsigned char* const $weights = {'$pool' if kept else 'reinterpret_cast<unsigned char*>($tile)'};"
        blocks = plan.channel_blocks
        first = f"int(blockIdx.x) % {blocks} * {plan.block_channels}" if blocks > 1 else "0"
        yield f"const int $first_channel = {first};"
        count = plan.block_channels
        yield "// what results are multiplied with, the largest number of each channel of a tile, and exponents"
        yield f"float* const $factors = reinterpret_cast<float*>($pool + {kept + rooms});"
        yield f"unsigned* const $largest = reinterpret_cast<unsigned*>($factors + {count});"
        yield f"int* const $exponents = reinterpret_cast<int*>($largest + {plan.channels * plan.largest_parts});"
        outs = self.pointers[self.halves.channels], self.pointers[self.halves.outs]
        yield from keep_exponents(plan.threads, *outs, plan.channels, count, self.sizes[1])

    def _fetch_weights(self) -> Iterable[str]:
        """Weights as `multiply_tile` takes them; where there are no turns, threads have them before the first tile comes."""
        plan, outs = self.plan, self.sizes[1]
        *_, filled = halves_of_place(plan.channels, plan.parts)
        total = prod(self.weight.shape[2:]) * plan.parts * filled
        own = f"{self.pointers[self.halves.weight]} + {self.index_type}($channel) * {total}"
        part = f" + $i / 128 % {plan.parts} * {filled}" if plan.parts > 1 else ""
        lines = [
            "const int $thread = $i / 4 % 32;",
            f"const int $channel = $first_channel + $i / {128 * plan.parts * plan.steps} * {ROWS} + $thread / 4 + $i % 2 * 8;",
            f"const int $pair = ($i / {128 * plan.parts} % {plan.steps} * 2 + $i / 2 % 2) * {LANES} + $thread % 4;",
            f"const int $first = {self.weights_name}[$pair * 2], $second = {self.weights_name}[$pair * 2 + 1];",
            f"const auto* const $from = {own}{part};",
            "const fp::half $none = {};",
            f"const fp::half $one = $channel < {outs} && $first >= 0 ? $from[$first] : $none;",
            f"const fp::half $two = $channel < {outs} && $second >= 0 ? $from[$second] : $none;",
            "reinterpret_cast<unsigned*>($weights)[$i] = fp::two_halves($one, $two);",
        ]
        count = plan.turns * plan.turn_bytes // 4
        yield "// weights, as they are multiplied"
        yield from block(f"for (int $i = threadIdx.x; $i < {count}; $i += {plan.threads})", lines)
        yield "__syncthreads();"
        yield f"const {self.pairs_name} $pairs;"
        yield f"fp::HeldWeights<{plan.rows}, {plan.steps}, {plan.parts}> $held;"
        if plan.turns == 1:
            yield "$held.load($weights);"
            yield "__syncthreads();"

    def _in_turns(self, lines: Sequence[str]) -> list[str]:
        """`lines` for the channels of each turn."""
        plan = self.plan
        broken = f"const bool $broken = fp::is_broken($scale, $factors, {plan.block_channels});"
        if plan.turns == 1:
            return [broken, *lines]
        own = [
            f"const int $turn_channel = $first_channel + $turn * {ROWS * plan.rows};",
            f"$held.load($weights + $turn * {plan.turn_bytes});",
            *(line.replace("$first_channel", "$turn_channel") for line in lines),
        ]
        return [
            broken,
            "#pragma unroll 1",
            *block(f"for (int $turn = 0; $turn < {plan.turns}; ++$turn)", own),
        ]

    def _fetch_tile(self) -> Iterable[str]:
        return self.fetched_input()

    def _pack(self) -> list[str]:
        """Makes halves of what was fetched, in its place."""
        plan, on = self.plan, self.on
        channels, threads = plan.channels, plan.threads
        halved = f"fp::halve_tile<{str(plan.along).lower()}, {plan.parts}, {threads}, {on.elements}>"
        return [
            f"fp::find_largest<{channels}, {on.block_warps}, {on.elements}, 4>($largest, $tile, {on.pitch});",
            "__syncthreads();",
            f"const fp::TileScale<{channels}> $scale($largest, {plan.largest_parts}, $exponents, {BINADES[self.anchor.precision]});",
            f"fp::leave_factors<{threads}>($factors, $scale.exponent, $exponents + {channels}, {plan.block_channels});",
            f"{halved}($tile, {on.pitch}, $scale);",
        ]

    # ---- products

    def _sets(self) -> list[str]:
        """Each warp works on 32 positions after another, four groups of 8."""
        plan, on = self.plan, self.on
        if plan.reduces:
            lines = [*block("if ($broken)", self._computed())[:-1], *block("} else", self._reduced())]
        else:
            lines = [f"float $sums[{plan.rows}][{COLUMNS}][4];"]
            for group in range(0, COLUMNS, plan.together):
                lines += self._products(f"$set * {COLUMNS}{plus(group)}", group)
            lines += self._results()
        if on.tile[-1] % (COLUMNS * GROUP) == 0:
            lines = [*self._skipped(), *lines]
        head = f"for (int $set = $warp; $set < {plan.sets}; $set += {on.block_warps})"
        lines = ["#pragma unroll 1", *block(head, lines)]
        return [*self._own.begin(), *lines, *self._own.end()] if self._own else lines

    def _products(self, group: str, at: int) -> list[str]:
        """Those of groups of positions that are multiplied at once, the sums of which are the `at`-th ones."""
        together = self.plan.together
        places = ", ".join(f"$tile + ({self.group_place(f'({group}{plus(more)})')})" for more in range(together))
        call = f"$pairs.multiply<{self.plan.chain}>($sums, {at}, $held, $places);"
        return (
            [f"const float* const $places[{together}] = {{{places}}};", call]
            if self.plan.reduces
            else [
                "{",
                *block("", [f"const float* const $places[{together}] = {{{places}}};", call])[1:],
            ]
        )

    def _reduced(self) -> list[str]:
        """Where nothing is stored, values of positions that are multiplied at once are reduced where their sums were."""
        assert self._own is not None
        together = self.plan.together
        whole = f"{(1 << together * GROUP) - 1:#x}u"
        each = [
            f"float $sums[{self.plan.rows}][{together}][4];",
            *self._products(f"$set * {COLUMNS} + $side * {together}", 0),
            f"const unsigned $real = $inside[0] >> $side * {together * GROUP} & {whole};",
            *self._own.reduced("$real", whole),
        ]
        sums = Sums("", self.plan.rows, self.plan.covered, f"$set * {COLUMNS}")
        sides = COLUMNS // together
        return [*self.over_positions(sums, []), *unrolled("$side", sides, each)]

    def _computed(self) -> list[str]:
        """The same of results that are computed by their definition."""
        sums = self._sums()
        return list(self.epilogue(replace(sums, staging="")))

    def _skipped(self) -> Iterable[str]:
        """Goes on where none of a set's positions, which are neighbours, is one of the result."""
        on, sizes = self.on, self.sizes
        at = self.group_coordinates(f"($set * {COLUMNS})")
        tests = [
            f"$tile_{axis[1:]} * {step} + {place} >= {size}"
            for axis, step, place, size, tiles, tile in zip(
                self.axes, on.steps, at, sizes[2:], on.tiles, on.tile, strict=True
            )
            if tiles * tile > size
        ]
        if tests:
            yield f"if ({' || '.join(tests)}) continue;"

    def _sums(self) -> Sums:
        plan = self.plan
        turn = f"$turn * {ROWS * plan.rows} + " if plan.turns > 1 else ""
        staging = f"$pairs.stage<{self.on.staged_pitch}>($room, $sums[$m], $factors + {turn}$m * {ROWS});"
        pragma = "#pragma unroll 1" if self._own else UNROLL  # of what is left to sums that are not finite
        return Sums(staging, plan.rows, plan.covered, f"$set * {COLUMNS}", tuple(repair(self)), pragma)

    def _results(self) -> Iterable[str]:
        sums = self._sums()
        if self._own is None:
            yield from self.epilogue(sums)
            return
        yield from block("if ($broken)", list(self.epilogue(sums)))[:-1]
        yield from block("} else", list(self._own.use(replace(sums, unroll=UNROLL))))

    def factors(self) -> tuple[list[str], str]:
        """Lines that find what a sum of channel ``$channel``, the ``$row``-th of a turn, is multiplied with; how ``$sum`` is."""
        turn = f"$turn * {ROWS * self.plan.rows} + " if self.plan.turns > 1 else ""
        return [f"const float $factor = $factors[{turn}$row];"], "$sum * $factor"
