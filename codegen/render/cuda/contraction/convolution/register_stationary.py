"""Writes the body of a CUDA kernel with a convolution whose weights stay in registers; `codegen.schedule_convolution.register_stationary` says how it is laid out."""

from __future__ import annotations

import abc
import itertools
from collections.abc import Iterable, Sequence
from math import prod
from typing import Generic, TypeVar

from fusepass.codegen.ir.convolution import ROWS, ScaledWeights, halves_of_place
from fusepass.codegen.ir.program import Kernel
from fusepass.codegen.render.cuda.contraction.convolution.own_values import Held, OwnValues
from fusepass.codegen.render.cuda.contraction.convolution.persistent import PersistentWriter
from fusepass.codegen.render.cuda.contraction.convolution.results import repair
from fusepass.codegen.render.cuda.contraction.convolution.scaled import BINADES, keep_exponents
from fusepass.codegen.render.cuda.contraction.convolution.tiles import Sums, dot, table
from fusepass.codegen.render.cuda.contraction.loops import UNROLL
from fusepass.codegen.render.cuda.family import Place
from fusepass.codegen.render.spelling import block
from fusepass.codegen.schedule_convolution.chunks import makes_own_values
from fusepass.codegen.schedule_convolution.register_stationary import LANES, PairsSchedule
from fusepass.codegen.schedule_convolution.sparse import SparseSchedule
from fusepass.codegen.schedule_convolution.tiles import COLUMNS

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
        count = plan.block_channels
        yield "// what results are multiplied with, the largest number of each channel of a tile, and exponents"
        yield f"float* const {c.factors} = reinterpret_cast<float*>({c.pool} + {kept + rooms});"
        yield f"unsigned* const {c.largest} = reinterpret_cast<unsigned*>({c.factors} + {count});"
        yield f"int* const {c.exponents} = reinterpret_cast<int*>({c.largest} + {plan.channels * plan.largest_parts});"
        outs = self.pointers[self.halves.channels], self.pointers[self.halves.outs]
        yield from keep_exponents(c, plan.threads, *outs, plan.channels, count, self.sizes[1])

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
        c = self.c
        plan, on = self.plan, self.on
        channels, threads = plan.channels, plan.threads
        return [
            f"fp::find_largest<{channels}, {on.block_warps}, {on.elements}, 4>({c.largest}, {c.tile}, {on.pitch});",
            "__syncthreads();",
            f"const fp::TileScale<{channels}> {c.scale}({c.largest}, {plan.largest_parts}, {c.exponents}, {BINADES});",
            f"fp::leave_factors<{threads}>({c.factors}, {c.scale}.exponent, {c.exponents} + {channels}, {plan.block_channels});",
            *self._halved(),
        ]

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
        iteration = f"{c.turn} * {ROWS * plan.rows} + " if plan.iterations > 1 else ""
        staging = f"{c.pairs}.stage<{self.on.staged_pitch}>({c.room}, {c.sums}[{self.rows}], {c.factors} + {iteration}{self.rows} * {ROWS});"
        pragma = "#pragma unroll 1" if self._own else UNROLL  # of what is left to sums that are not finite
        return Sums(staging, self.rows, plan.covered, f"{c.set} * {COLUMNS}", tuple(repair(self)), pragma)

    def factors(self) -> tuple[list[str], str]:
        """Lines that find what a sum of channel ``channel``, the ``row``-th of an iteration, is multiplied with; how ``sum`` is."""
        c = self.c
        iteration = f"{c.turn} * {ROWS * self.plan.rows} + " if self.plan.iterations > 1 else ""
        return [f"const float {c.factor} = {c.factors}[{iteration}{c.row}];"], f"{c.sum} * {c.factor}"
