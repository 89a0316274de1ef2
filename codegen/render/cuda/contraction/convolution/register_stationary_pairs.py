"""Writes the body of a CUDA kernel with a convolution whose weights stay in registers, each warp for itself; `codegen.schedule_convolution.register_stationary`
says how it is laid out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace

from fusepass.codegen.ir.convolution import ROWS
from fusepass.codegen.ir.program import Kernel
from fusepass.codegen.render.cuda.contraction.convolution.own_values import Held
from fusepass.codegen.render.cuda.contraction.convolution.register_stationary import RegisterStationaryWriter
from fusepass.codegen.render.cuda.contraction.convolution.tiles import Sums, plus
from fusepass.codegen.render.cuda.contraction.loops import UNROLL, Loop
from fusepass.codegen.render.cuda.family import Place, Text
from fusepass.codegen.render.spelling import block, braces, either
from fusepass.codegen.schedule_convolution.register_stationary import PairsSchedule, pattern_of
from fusepass.codegen.schedule_convolution.tiles import COLUMNS, GROUP


class PairsWriter(RegisterStationaryWriter[PairsSchedule]):
    """Lines of a kernel whose warps multiply by themselves; see `schedule_convolution.register_stationary`."""

    def __init__(self, kernel: Kernel, plan: PairsSchedule, place: Place) -> None:
        self.pairs_name = place.names.exact(f"{kernel.name}_pairs")
        super().__init__(kernel, plan, place)
        if plan.iterations > 1:
            self.first_channel = self.c.turn_channel

    def _held(self) -> Held:
        """A thread has two of 16 channels, of 8 positions, or of those that are multiplied at once where nothing is stored."""
        c = self.c
        return Held(
            channels=2 * self.plan.rows,
            positions=2 * self.plan.together if self.plan.reduces else 8,
            row=lambda k: f"{k} / 2 * 16 + {k} % 2 * 8 + {c.lane} / 4",
            at=lambda k, t: f"{c.sums}[{k} / 2][{t} / 2][{k} % 2 * 2 + {t} % 2]",
            states="fp::HeldStates",
            push=lambda whole: f"fp::push_held<{self.pairs_name}, {whole}>",
            leave="fp::leave_held",
            sums=c.sums,
            staging=f"{c.pairs}.stage<{self.on.staged_pitch}>({c.room}, {c.sums}[{self.rows}]);",
        )

    def write(self) -> Text:
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
        c = self.c
        place = first if self.plan.reduces else kept
        yield f"float* const {c.room} = reinterpret_cast<float*>({c.pool} + {place}) + {c.warp} * {ROWS * self.on.staged_pitch};"
        yield f"float* const {c.tile} = reinterpret_cast<float*>({c.pool} + {first});"
        weights = c.pool if kept else f"reinterpret_cast<unsigned char*>({c.tile})"
        yield f"unsigned char* const {c.weights} = {weights};"

    def _fetch_weights(self) -> Iterable[str]:
        yield from super()._fetch_weights()
        yield f"const {self.pairs_name} {self.c.pairs};"

    @property
    def _row_of_word(self) -> str:
        return f"{self.c.i} / {128 * self.plan.parts * self.plan.steps} * {ROWS} + "

    @property
    def _step_of_word(self) -> str:
        return f"{self.c.i} / {128 * self.plan.parts} % {self.plan.steps}"

    def _halved(self) -> Iterable[str]:
        """In the place of the tile."""
        c = self.c
        plan, on = self.plan, self.on
        shape = f"{str(plan.along).lower()}, {plan.parts}, {plan.threads}, {on.elements}"
        yield f"fp::halve_tile<{shape}>({c.tile}, {on.pitch}, {c.scale});"

    def _in_iterations(self, lines: Sequence[str]) -> list[str]:
        """`lines` for the channels of each iteration."""
        c = self.c
        plan = self.plan
        broken = f"const bool {c.broken} = fp::is_broken({c.scale}, {c.factors}, {plan.block_channels});"
        if plan.iterations == 1:
            return [broken, *lines]
        own = [
            f"const int {c.turn_channel} = {c.first_channel} + {c.turn} * {ROWS * plan.rows};",
            f"{c.held}.load({c.weights} + {c.turn} * {plan.iteration_bytes});",
            *lines,
        ]
        return [
            broken,
            "#pragma unroll 1",
            *block(f"for (int {c.turn} = 0; {c.turn} < {plan.iterations}; ++{c.turn})", own),
        ]

    # ---- products

    def _sets(self) -> list[str]:
        """Each warp works on 32 positions after another, four groups of 8."""
        c = self.c
        plan, on = self.plan, self.on
        if plan.reduces:
            lines = either(c.broken, self._computed(), self._reduced())
        else:
            lines = [f"float {c.sums}[{plan.rows}][{COLUMNS}][4];"]
            for group in range(0, COLUMNS, plan.together):
                lines += self._products(f"{c.set} * {COLUMNS}{plus(group)}", group)
            lines += self._results()
        if on.tile[-1] % (COLUMNS * GROUP) == 0:
            lines = [*self._skipped(self.group_coordinates(f"({c.set} * {COLUMNS})")), *lines]
        head = f"for (int {c.set} = {c.warp}; {c.set} < {plan.sets}; {c.set} += {on.block_warps})"
        lines = ["#pragma unroll 1", *block(head, lines)]
        return [*self._own.begin(), *lines, *self._own.end()] if self._own else lines

    def _products(self, group: str, at: int) -> list[str]:
        """Those of groups of positions that are multiplied at once, the sums of which are the `at`-th ones."""
        c = self.c
        together = self.plan.together
        places = ", ".join(f"{c.tile} + ({self.group_place(f'({group}{plus(more)})')})" for more in range(together))
        call = f"{c.pairs}.multiply<{self.plan.chain}>({c.sums}, {at}, {c.held}, {c.places});"
        lines = [f"const float* const {c.places}[{together}] = {{{places}}};", call]
        return lines if self.plan.reduces else braces(lines)

    def _reduced(self) -> list[str]:
        """Where nothing is stored, values of positions that are multiplied at once are reduced where their sums were."""
        c = self.c
        assert self._own is not None
        together = self.plan.together
        side = Loop(c.side, COLUMNS // together)
        whole = f"{(1 << together * GROUP) - 1:#x}u"
        each = [
            f"float {c.sums}[{self.plan.rows}][{together}][4];",
            *self._products(f"{c.set} * {COLUMNS} + {side} * {together}", 0),
            f"const unsigned {c.real} = {c.inside}[0] >> {side} * {together * GROUP} & {whole};",
            *self._own.reduced(c.real, whole),
        ]
        sums = Sums("", self.rows, self.plan.covered, f"{c.set} * {COLUMNS}")
        return [*self.over_positions(sums, []), *side.over(each)]

    def _results(self) -> Iterable[str]:
        sums = self._sums()
        if self._own is None:
            yield from self.epilogue(sums)
            return
        yield from either(self.c.broken, self._computed(), self._own.use(replace(sums, unroll=UNROLL)))
