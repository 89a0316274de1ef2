"""Writes the body of a CUDA kernel with a convolution whose weights stay in registers; `codegen.schedule_convolution.register_stationary` says how it is laid out."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from math import prod

from fusepass.codegen.ir.convolution import ROWS, ScaledWeights, halves_of_place
from fusepass.codegen.ir.index import contiguous_strides
from fusepass.codegen.ir.program import Kernel
from fusepass.codegen.render.cuda.contraction.convolution.chunk_tiles import BINADES, ScaledTiles
from fusepass.codegen.render.cuda.contraction.convolution.persistent import Held, OwnValues
from fusepass.codegen.render.cuda.contraction.convolution.results import repair
from fusepass.codegen.render.cuda.contraction.convolution.tiles import Sums, coordinates, dot, table
from fusepass.codegen.render.spelling import ROLLED, block, either, loop
from fusepass.codegen.render.unit import Place
from fusepass.codegen.schedule_convolution.register_stationary import (
    NEIGHBOURS,
    PLACE_BYTES,
    SET_POSITIONS,
    RegisterStationarySchedule,
    Run,
)
from fusepass.codegen.schedule_convolution.tiles import COLUMNS, GROUP


class RegisterStationaryWriter(ScaledTiles):
    """Lines of such a kernel."""

    plan: RegisterStationarySchedule

    def __init__(self, kernel: Kernel, plan: RegisterStationarySchedule, place: Place) -> None:
        super().__init__(kernel, plan, place)
        assert isinstance(self.anchor.halves, ScaledWeights)
        self.halves = self.anchor.halves
        self.weights_name, self.steps_name = (
            place.names.exact(f"{kernel.name}_{what}") for what in ("weights_from", "steps")
        )
        self._own = OwnValues(self, self._held())

    def _held(self) -> Held:
        """A thread has two of 16 channels, of two columns of each line."""
        c = self.c
        return Held(
            channels=2,
            positions=2 * self.plan.lines,
            row=lambda k: f"{k} * 8 + {c.lane} / 4",
            at=lambda k, t: f"{c.sums}[{t} / 2 * 4 + {k} % 2 * 2 + {t} % 2]",
            states="fp::HeldStates",
            push=lambda whole: f"fp::push_runs<{whole}>",
            leave="fp::leave_held",
            sums=c.sums,
            staging="",
        )

    # ---- tables

    def _tables(self) -> Iterable[str]:
        plan = self.plan
        *_, filled = halves_of_place(plan.channels, plan.parts)
        strides = [stride * plan.parts * filled for stride in contiguous_strides(self.weight.shape[2:])]
        (phase,) = plan.on.phases
        met = (
            self._met(run, warp, place)
            for warp in range(NEIGHBOURS)
            for run in itertools.chain(*plan.runs)
            for place in range(NEIGHBOURS)
        )
        found = [-1 if real is None else dot(phase.taps[real[0]].place, strides) + real[1] for real in met]
        yield f"// For each pair of {self.anchor.name} its halves among the weights of an output channel; -1 for zero."
        yield from table(self.weights_name, found)
        yield "// Where what a step multiplies lies, in places, from that of the first column's."
        yield f"using {self.steps_name} = fp::Listed<{', '.join(map(str, plan.places.steps))}>;"

    @staticmethod
    def _met(run: Run, warp: int, place: int) -> tuple[int, int] | None:
        """The number of the tap and the channel that the position of a warp multiplies, of the numbers `place` and `place + 4` of a column, of
        which it meets one."""
        tap = run.taps[(place - warp) % NEIGHBOURS]
        return None if tap is None else (tap, run.channel)

    # ---- what a block fetches

    def _shared(self) -> Iterable[str]:
        """Results that are computed by their definition lie in the place of halves."""
        c = self.c
        plan, on = self.plan, self.on
        states = 4 * on.state_floats
        yield f"extern __shared__ __align__(128) unsigned char {c.pool}[];"
        yield f"const int {c.lane} = threadIdx.x % 32;"
        yield f"const int {c.warp} = fp::warp_number();"
        yield f"unsigned char* const {c.packed} = {c.pool} + {states + plan.found_bytes};"
        yield f"float* const {c.tile} = reinterpret_cast<float*>({c.packed} + {plan.packed_room});"
        yield f"float* const {c.room} = reinterpret_cast<float*>({c.packed}) + {c.warp} * {ROWS * on.staged_pitch};"
        yield f"unsigned char* const {c.weights} = {c.packed};"
        blocks = plan.channel_blocks
        first = f"int(blockIdx.x) % {blocks} * {plan.block_channels}" if blocks > 1 else "0"
        yield f"const int {c.first_channel} = {first};"
        yield from self.kept_scales(f"reinterpret_cast<float*>({c.pool} + {states})")

    def _fetch_weights(self) -> Iterable[str]:
        """Weights as `fp::multiply_sparse` takes them; threads have them before the first tile comes."""
        c = self.c
        plan, outs = self.plan, self.sizes[1]
        *_, filled = halves_of_place(plan.channels, plan.parts)
        total = prod(self.weight.shape[2:]) * plan.parts * filled
        own = f"{self.pointers[self.halves.weight]} + {self.index_type}({c.channel}) * {total}"
        part = f" + {c.i} / 128 % {plan.parts} * {filled}" if plan.parts > 1 else ""
        lines = [
            f"const int {c.thread} = {c.i} / 4 % 32;",
            f"const int {c.channel} = {c.first_channel} + {c.thread} / 4 + {c.i} % 2 * 8;",
            f"const int {c.pair} = ({c.i} / {128 * plan.parts} * 2 + {c.i} / 2 % 2) * {NEIGHBOURS} + {c.thread} % 4;",
            f"const int {c.first} = {self.weights_name}[{c.pair} * 2], {c.second} = {self.weights_name}[{c.pair} * 2 + 1];",
            f"const auto* const {c.from_} = {own}{part};",
            f"const fp::half {c.none} = {{}};",
            f"const fp::half {c.one} = {c.channel} < {outs} && {c.first} >= 0 ? {c.from_}[{c.first}] : {c.none};",
            f"const fp::half {c.two} = {c.channel} < {outs} && {c.second} >= 0 ? {c.from_}[{c.second}] : {c.none};",
            f"reinterpret_cast<unsigned*>({c.weights})[{c.i}] = fp::two_halves({c.one}, {c.two});",
        ]
        of_warp = f"{c.weights} + {c.warp} % {NEIGHBOURS} * {plan.weight_bytes // NEIGHBOURS}"
        yield "// weights, as they are multiplied"
        head = f"for (int {c.i} = threadIdx.x; {c.i} < {plan.weight_bytes // 4}; {c.i} += {plan.threads})"
        yield from block(head, lines)
        yield "__syncthreads();"
        yield f"fp::HeldWeights<{plan.steps}, {plan.parts}> {c.held};"
        yield f"{c.held}.load({of_warp});"
        yield "__syncthreads();"
        yield f"const uint32_t {c.pattern} = fp::sparse_pattern({c.warp} % {NEIGHBOURS});"

    def _pack(self) -> list[str]:
        c = self.c
        plan, on = self.plan, self.on
        shape = f"{plan.parts}, {plan.threads}, {plan.input_rows}, {plan.places.width}, {on.extent[-1]}, {plan.places.shift}"
        lines = self.tile_scale(4, BINADES)
        lines.append(
            f"fp::pack_runs<{shape}>(reinterpret_cast<uint4*>({c.packed}), {plan.layer}, {c.tile}, {on.pitch}, {c.scale});"
        )
        if plan.places.slack:  # results that are computed by their definition may have lain there
            zero = f"reinterpret_cast<uint4*>({c.packed})[{plan.parts * plan.layer} + {c.i}] = {{}};"
            lines += block(
                f"for (int {c.i} = threadIdx.x; {c.i} < {plan.places.slack}; {c.i} += {plan.threads})", [zero]
            )
        return [*lines, "fp::publish_to_products();"]

    # ---- products

    def _sets(self) -> list[str]:
        """A group of warps works on one product's columns after another; warps alone, where halves do not suit."""
        c = self.c
        plan, on = self.plan, self.on
        across = plan.places.width if len(on.tile) > 1 else GROUP
        computed = self._computed()
        multiplied = [
            *self._set_place(),
            *self._skipped([self._at(number) for number in range(len(self.axes))]),
            f"float {c.sums}[{4 * plan.lines}];",
            f"const fp::SparseColumns {c.columns} = fp::sparse_columns({c.packed} + {c.place} * {PLACE_BYTES}, {plan.places.deeper}, {across});",
            f"fp::multiply_runs<{self.steps_name}, {plan.chain}, {plan.parts}, {plan.lines * GROUP}>"
            f"({c.sums}, {c.held}, {c.pattern}, {c.columns}, {plan.layer});",
            *self._inside(),
            *self._own.reduced(c.real, c.every),
        ]
        sets = f"for (int {c.set} = {c.warp}; {c.set} < {plan.sets}; {c.set} += {on.block_warps})"
        groups = f"for (int {c.set} = {c.warp} / {NEIGHBOURS}; {c.set} < {prod(plan.shape)}; {c.set} += {plan.groups})"
        return [
            *self._own.begin(),
            *either(
                c.broken,
                [ROLLED, *block(sets, computed)],
                [ROLLED, *block(groups, multiplied)],
            ),
            *self._own.end(),
        ]

    def _computed(self) -> list[str]:
        """What is done with a warp's results that are computed by their definition."""
        sums = Sums("", self.rows, f"{self.c.set} * {COLUMNS}", tuple(repair(self)), ROLLED)
        lines = list(self.epilogue(sums))
        if self.on.tile[-1] % (COLUMNS * GROUP) == 0:
            lines = [*self._skipped(self.group_coordinates(f"({self.c.set} * {COLUMNS})")), *lines]
        return lines

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

    def _set_place(self) -> Iterable[str]:
        """``place``, that of the first column; ``at_z`` and so on, the first position along each axis."""
        c = self.c
        plan, on = self.plan, self.on
        strides = [stride * plan.places.width for stride in contiguous_strides(on.extent[:-1])]
        places, units = [], self._units
        for number, here in reversed([*enumerate(coordinates(c.set, plan.shape))]):
            at = self._at(number)
            yield f"const int {at} = {here} * {units[number]};"
            stride = strides[number] if number + 1 < len(on.tile) else 1
            places.append(f"{at} * {stride}" if number + 1 < len(on.tile) else f"{at} / {NEIGHBOURS}")
        yield f"const int {c.place} = {' + '.join(places)};"

    def _at(self, number: int) -> str:
        """The first position of a set along an axis, in the tile."""
        return self.c.named(f"at_{self.letters[number]}")

    @property
    def _units(self) -> list[int]:
        """Positions of a set, per axis."""
        return [size // count for size, count in zip(self.on.tile, self.plan.shape, strict=True)]

    def _inside(self) -> Iterable[str]:
        """``real``, which has a bit for each of a thread's positions that is one of the result; ``every``, the same where all of the warp are."""
        c = self.c
        plan, on, sizes = self.plan, self.on, self.sizes
        conditions = []
        for number in range(len(self.axes)):
            if on.tiles[number] * on.tile[number] <= sizes[2 + number]:
                continue
            at = f"{self.tile_at[number]} * {on.steps[number]} + {self._at(number)}"
            if number == len(self.axes) - 1:
                line = f" + {c.t} / 2 * {SET_POSITIONS}" if len(self.axes) == 1 else ""
                at += f"{line} + ({c.lane} % 4 * 2 + {c.t} % 2) * {NEIGHBOURS} + {c.warp} % {NEIGHBOURS}"
            elif number == len(self.axes) - 2:
                at += f" + {c.t} / 2"
            conditions.append(f"{at} < {sizes[2 + number]}")
        count = 2 * plan.lines
        whole = f"{(1 << count) - 1:#x}u"
        if not conditions:
            yield f"const unsigned {c.real} = {whole}, {c.every} = {whole};"
            return
        yield f"unsigned {c.real} = 0;"
        yield from loop(c.t, count, [f"{c.real} |= unsigned({' && '.join(conditions)}) << {c.t};"])
        yield f"const unsigned {c.every} = __any_sync(0xffffffffu, {c.real} != {whole}) ? ~{c.real} : {c.real};"
