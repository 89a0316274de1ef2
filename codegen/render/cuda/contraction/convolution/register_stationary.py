"""Writes the body of a CUDA kernel with a convolution whose weights stay in registers; `codegen.schedule_convolution.register_stationary` says how it is laid out."""

from __future__ import annotations

import abc
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod
from typing import Generic, TypeVar

from fusepass.codegen.ir.convolution import ROWS, ScaledWeights, halves_of_place
from fusepass.codegen.ir.program import Kernel
from fusepass.codegen.render.cuda.contraction.convolution.chunk_tiles import (
    BINADES,
    is_broken,
    kept_scales,
    of_iteration,
    scaled_sum,
    tile_scale,
)
from fusepass.codegen.render.cuda.contraction.convolution.persistent import Held, OwnValues, PersistentWriter
from fusepass.codegen.render.cuda.contraction.convolution.results import repair
from fusepass.codegen.render.cuda.contraction.convolution.tiles import Sums, dot, plus, table
from fusepass.codegen.render.cuda.contraction.loops import UNROLL
from fusepass.codegen.render.cuda.family import Place, Text
from fusepass.codegen.render.spelling import block, braces, either
from fusepass.codegen.schedule_convolution.chunks import makes_own_values
from fusepass.codegen.schedule_convolution.register_stationary import LANES, TOGETHER, PairsSchedule, pattern_of
from fusepass.codegen.schedule_convolution.sparse import SparseSchedule
from fusepass.codegen.schedule_convolution.tiles import COLUMNS, GROUP

S = TypeVar("S", PairsSchedule, SparseSchedule)


class RegisterStationaryWriter(PersistentWriter, abc.ABC, Generic[S]):
    """Lines of such a kernel that its warps' products do not change."""

    whole = True

    def __init__(self, kernel: Kernel, plan: S, place: Place) -> None:
        super().__init__(kernel, plan, place)
        self.plan: S = plan
        assert isinstance(self.anchor.halves, ScaledWeights)
        self.halves = self.anchor.halves
        self.weights_name = place.names.exact(f"{kernel.name}_weights_from")
        self._own = OwnValues(self, self._held()) if makes_own_values(kernel) else None

    @abc.abstractmethod
    def _held(self) -> Held:
        """What a thread has of sums."""

    def _weights_table(self, pairs: Iterable[tuple[tuple[int, int] | None, ...]]) -> Iterable[str]:
        """The constant table of where the halves of words of weights lie, for each (number of a tap, channel) of `pairs`; None for zero."""
        plan = self.plan
        *_, filled = halves_of_place(plan.channels, plan.parts)
        kernel = self.weight.shape[2:]
        strides = [prod(kernel[axis + 1 :]) * plan.parts * filled for axis in range(len(kernel))]
        (phase,) = plan.on.phases
        found = [
            -1 if real is None else dot(phase.taps[real[0]].place, strides) + real[1]
            for real in itertools.chain.from_iterable(pairs)
        ]
        yield f"// For each pair of {self.anchor.name} its halves among the weights of an output channel; -1 for zero."
        yield from table(self.weights_name, found)

    # ---- what a block fetches

    warp = "threadIdx.x / 32"

    @abc.abstractmethod
    def _memory(self, first: int, kept: int) -> Iterable[str]:
        """``tile``, ``room`` and ``weights`` in shared memory, which is free from byte `first` on; `kept` are of weights before all."""

    @property
    @abc.abstractmethod
    def _row_of_word(self) -> str:
        """Where the channels begin of word ``i`` of weights, as what is added to another number."""

    @property
    @abc.abstractmethod
    def _step_of_word(self) -> str:
        """The step, among all in the table, of word ``i`` of weights."""

    @property
    def _own_weights(self) -> str:
        """Where a warp's weights begin."""
        return self.c.weights

    @abc.abstractmethod
    def _halved(self) -> Iterable[str]:
        """Makes halves of a tile, by ``scale``."""

    def _shared(self) -> Iterable[str]:
        c = self.c
        plan = self.plan
        kept, rooms = plan.kept_bytes, 4 * plan.room_floats
        yield f"extern __shared__ __align__(128) unsigned char {c.pool}[];"
        yield f"const int {c.lane} = threadIdx.x % 32;"
        yield f"const int {c.warp} = {self.warp};"
        yield from self._memory(kept + rooms + plan.found_bytes, kept)
        blocks = plan.channel_blocks
        first = f"int(blockIdx.x) % {blocks} * {plan.block_channels}" if blocks > 1 else "0"
        yield f"const int {c.first_channel} = {first};"
        yield from kept_scales(self, plan, f"reinterpret_cast<float*>({c.pool} + {kept + rooms})")

    def _fetch_weights(self) -> Iterable[str]:
        """Weights as `multiply_tile` takes them; where there are no iterations, threads have them before the first tile comes."""
        c = self.c
        plan, outs = self.plan, self.sizes[1]
        *_, filled = halves_of_place(plan.channels, plan.parts)
        total = prod(self.weight.shape[2:]) * plan.parts * filled
        own = f"{self.pointers[self.halves.weight]} + {self.index_type}({c.channel}) * {total}"
        part = f" + {c.i} / 128 % {plan.parts} * {filled}" if plan.parts > 1 else ""
        lines = [
            f"const int {c.thread} = {c.i} / 4 % 32;",
            f"const int {c.channel} = {c.first_channel} + {self._row_of_word}{c.thread} / 4 + {c.i} % 2 * 8;",
            f"const int {c.pair} = ({self._step_of_word} * 2 + {c.i} / 2 % 2) * {LANES} + {c.thread} % 4;",
            f"const int {c.first} = {self.weights_name}[{c.pair} * 2], {c.second} = {self.weights_name}[{c.pair} * 2 + 1];",
            f"const auto* const {c.from_} = {own}{part};",
            f"const fp::half {c.none} = {{}};",
            f"const fp::half {c.one} = {c.channel} < {outs} && {c.first} >= 0 ? {c.from_}[{c.first}] : {c.none};",
            f"const fp::half {c.two} = {c.channel} < {outs} && {c.second} >= 0 ? {c.from_}[{c.second}] : {c.none};",
            f"reinterpret_cast<unsigned*>({c.weights})[{c.i}] = fp::two_halves({c.one}, {c.two});",
        ]
        count = plan.iterations * plan.iteration_bytes // 4
        yield "// weights, as they are multiplied"
        yield from block(f"for (int {c.i} = threadIdx.x; {c.i} < {count}; {c.i} += {plan.threads})", lines)
        yield "__syncthreads();"
        yield f"fp::HeldWeights<{plan.rows}, {plan.steps}, {plan.parts}> {c.held};"
        if plan.iterations == 1:
            yield f"{c.held}.load({self._own_weights});"
            yield "__syncthreads();"

    def _fetch_tile(self) -> Iterable[str]:
        return self.fetched_input()

    def _pack(self) -> list[str]:
        """Makes halves of what was fetched."""
        return [*tile_scale(self, self.plan, 4, BINADES), *self._halved()]

    def _computed(self) -> list[str]:
        """The same of results that are computed by their definition."""
        return list(self.epilogue(self._sums().defined))

    def _skipped(self, at: Sequence[str]) -> Iterable[str]:
        """Goes on where none of a set's positions, of which the first is `at` along each axis of the tile, is one of the result."""
        on, sizes = self.on, self.sizes
        tests = [
            f"{tile_at} * {step} + {place} >= {size}"
            for tile_at, step, place, size, tiles, tile in zip(
                self.tile_at, on.steps, at, sizes[2:], on.tiles, on.tile, strict=True
            )
            if tiles * tile > size
        ]
        if tests:
            yield f"if ({' || '.join(tests)}) continue;"

    def _sums(self) -> Sums:
        c = self.c
        plan = self.plan
        iteration = of_iteration(self, plan)
        staging = f"{c.pairs}.stage<{self.on.staged_pitch}>({c.room}, {c.sums}[{self.rows}], {c.factors} + {iteration}{self.rows} * {ROWS});"
        pragma = "#pragma unroll 1" if self._own else UNROLL  # of what is left to sums that are not finite
        return Sums(staging, self.rows, plan.covered, f"{c.set} * {COLUMNS}", tuple(repair(self)), pragma)

    def factors(self) -> tuple[list[str], str]:
        return scaled_sum(self, self.plan)


class PairsWriter(RegisterStationaryWriter[PairsSchedule]):
    """Lines of a kernel whose warps multiply by themselves; see `schedule_convolution.register_stationary`."""

    def __init__(self, kernel: Kernel, plan: PairsSchedule, place: Place) -> None:
        self.pairs_name = place.names.exact(f"{kernel.name}_pairs")
        super().__init__(kernel, plan, place)
        if plan.iterations > 1:
            self.first_channel = self.c.turn_channel

    def _held(self) -> Held:
        """A thread has two of 16 channels, of 8 positions."""
        c = self.c
        return Held(
            channels=2 * self.plan.rows,
            positions=8,
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
        yield f"using {self.pairs_name} = fp::HeldPairs<{self.on.pitch}, fp::Listed<{quarters}>, fp::Listed<{apart}>>;"

    # ---- what a block fetches

    def _memory(self, first: int, kept: int) -> Iterable[str]:
        c = self.c
        yield f"float* const {c.room} = reinterpret_cast<float*>({c.pool} + {kept}) + {c.warp} * {ROWS * self.on.staged_pitch};"
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
        yield f"fp::halve_tile<{plan.parts}, {plan.threads}, {on.elements}>({c.tile}, {on.pitch}, {c.scale});"

    def _in_iterations(self, lines: Sequence[str]) -> list[str]:
        """`lines` for the channels of each iteration."""
        c = self.c
        plan = self.plan
        broken = is_broken(self, plan)
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
        lines = [f"float {c.sums}[{plan.rows}][{COLUMNS}][4];"]
        for group in range(0, COLUMNS, TOGETHER):
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
        places = ", ".join(f"{c.tile} + ({self.group_place(f'({group}{plus(more)})')})" for more in range(TOGETHER))
        call = f"{c.pairs}.multiply<{self.plan.chain}>({c.sums}, {at}, {c.held}, {c.places});"
        return braces([f"const float* const {c.places}[{TOGETHER}] = {{{places}}};", call])

    def _results(self) -> Iterable[str]:
        sums = self._sums()
        if self._own is None:
            yield from self.epilogue(sums)
            return
        yield from either(self.c.broken, self._computed(), self._own.use(replace(sums, unroll=UNROLL)))
