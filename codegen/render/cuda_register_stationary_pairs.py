"""Writes the body of a CUDA kernel with a convolution whose weights stay in registers, each warp for itself; `codegen.schedule_convolution.register_stationary`
says how it is laid out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace

from fusepass.codegen.ir.convolution import ROWS
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.render.cuda_convolution import ConvolutionText
from fusepass.codegen.render.cuda_input import UNROLL, plus, unrolled
from fusepass.codegen.render.cuda_own import Held
from fusepass.codegen.render.cuda_positions import Sums
from fusepass.codegen.render.cuda_register_stationary import RegisterStationaryWriter
from fusepass.codegen.render.spelling import Identifiers, block
from fusepass.codegen.schedule_convolution.register_stationary import PairsSchedule, pattern_of
from fusepass.codegen.schedule_convolution.tiles import COLUMNS, GROUP


class PairsWriter(RegisterStationaryWriter[PairsSchedule]):
    """Lines of a kernel whose warps multiply by themselves; see `schedule_convolution.register_stationary`."""

    def __init__(
        self, kernel: Kernel, program: Program, plan: PairsSchedule, pointers: dict[str, str], names: Identifiers
    ) -> None:
        self.pairs_name = names.exact(f"{kernel.name}_pairs")
        super().__init__(kernel, program, plan, pointers, names)

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
        return self.text(1, ["__syncthreads();", *self._pack()], self._in_iterations(self._sets()), "float*")

    def _tables(self) -> Iterable[str]:
        plan = self.plan
        yield from self._weights_table((pair.first, pair.second) for pair in itertools.chain(*plan.quarters))
        patterns = list(dict.fromkeys(map(pattern_of, plan.places)))
        listed = [(patterns.index(pattern_of(places)), places[0]) for places in plan.places]
        quarters = ", ".join(str(number) for each in listed for number in each)
        apart = ", ".join(str(number) for pattern in patterns for number in pattern[1:])
        yield "// Where pairs lie in a tile, a quarter of 16 terms x 8 positions after another; how far those of a quarter lie apart."
        along = str(plan.along).lower()
        yield f"using {self.pairs_name} = fp::HeldPairs<{along}, {self.on.pitch}, fp::Listed<{quarters}>, fp::Listed<{apart}>>;"

    # ---- what a block fetches

    def _memory(self, first: int, kept: int) -> Iterable[str]:
        place = first if self.plan.reduces else kept
        yield f"float* const $room = reinterpret_cast<float*>($pool + {place}) + $warp * {ROWS * self.on.staged_pitch};"
        yield f"float* const $tile = reinterpret_cast<float*>($pool + {first});"
        yield f"unsigned char* const $weights = {'$pool' if kept else 'reinterpret_cast<unsigned char*>($tile)'};"

    def _fetch_weights(self) -> Iterable[str]:
        yield from super()._fetch_weights()
        yield f"const {self.pairs_name} $pairs;"

    @property
    def _row_of_word(self) -> str:
        return f"$i / {128 * self.plan.parts * self.plan.steps} * {ROWS} + "

    @property
    def _step_of_word(self) -> str:
        return f"$i / {128 * self.plan.parts} % {self.plan.steps}"

    def _halved(self) -> Iterable[str]:
        """In the place of the tile."""
        plan, on = self.plan, self.on
        shape = f"{str(plan.along).lower()}, {plan.parts}, {plan.threads}, {on.elements}"
        yield f"fp::halve_tile<{shape}>($tile, {on.pitch}, $scale);"

    def _in_iterations(self, lines: Sequence[str]) -> list[str]:
        """`lines` for the channels of each iteration."""
        plan = self.plan
        broken = f"const bool $broken = fp::is_broken($scale, $factors, {plan.block_channels});"
        if plan.iterations == 1:
            return [broken, *lines]
        own = [
            f"const int $turn_channel = $first_channel + $turn * {ROWS * plan.rows};",
            f"$held.load($weights + $turn * {plan.iteration_bytes});",
            *(line.replace("$first_channel", "$turn_channel") for line in lines),
        ]
        return [
            broken,
            "#pragma unroll 1",
            *block(f"for (int $turn = 0; $turn < {plan.iterations}; ++$turn)", own),
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

    def _results(self) -> Iterable[str]:
        sums = self._sums()
        if self._own is None:
            yield from self.epilogue(sums)
            return
        yield from block("if ($broken)", self._computed())[:-1]
        yield from block("} else", list(self._own.use(replace(sums, unroll=UNROLL))))
