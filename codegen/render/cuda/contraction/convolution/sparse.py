"""Writes the body of a CUDA kernel with a convolution whose weights stay in registers, for four warps together; see `codegen.schedule_convolution.sparse`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from math import prod

from fusepass.codegen.ir.convolution import ROWS
from fusepass.codegen.ir.index import contiguous_strides
from fusepass.codegen.ir.program import Kernel
from fusepass.codegen.render.cuda.contraction.convolution.chunk_tiles import is_broken
from fusepass.codegen.render.cuda.contraction.convolution.persistent import Held
from fusepass.codegen.render.cuda.contraction.convolution.register_stationary import RegisterStationaryWriter
from fusepass.codegen.render.cuda.contraction.convolution.tiles import coordinates
from fusepass.codegen.render.cuda.family import Place, Text
from fusepass.codegen.render.spelling import block, either
from fusepass.codegen.schedule_convolution.sparse import NEIGHBOURS, PLACE_BYTES, SET_POSITIONS, Run, SparseSchedule
from fusepass.codegen.schedule_convolution.tiles import COLUMNS, GROUP


class SparseWriter(RegisterStationaryWriter[SparseSchedule]):
    """Lines of such a kernel."""

    def __init__(self, kernel: Kernel, plan: SparseSchedule, place: Place) -> None:
        self.steps_name = place.names.exact(f"{kernel.name}_steps")
        super().__init__(kernel, plan, place)

    def _held(self) -> Held:
        """A thread has two of 16 channels, of two columns of each line."""
        c = self.c
        return Held(
            channels=2,
            positions=2 * self.plan.lines,
            row=lambda k: f"{k} % 2 * 8 + {c.lane} / 4",
            at=lambda k, t: f"{c.sums}[{t} / 2 * 4 + {k} % 2 * 2 + {t} % 2]",
            states="fp::HeldStates",
            push=lambda whole: f"fp::push_runs<{whole}>",
            leave="fp::leave_held",
            sums=c.sums,
            staging="",
        )

    def write(self) -> Text:
        return self.text(1, self._pack(), self._sets(), "float*", behind=[is_broken(self, self.plan)])

    def _tables(self) -> Iterable[str]:
        plan = self.plan
        words = (
            tuple(self._met(run, warp, place) for place in range(NEIGHBOURS))
            for warp in range(NEIGHBOURS)
            for run in itertools.chain(*plan.runs)
        )
        yield from self._weights_table(words)
        yield "// Where what a step multiplies lies, in places, from that of the first column's."
        steps = ", ".join(str(step[0].place) for step in plan.runs)
        yield f"using {self.steps_name} = fp::Listed<{steps}>;"

    @staticmethod
    def _met(run: Run, warp: int, place: int) -> tuple[int, int] | None:
        """What the position of a warp multiplies, of the numbers `place` and `place + 4` of a column, of which it meets one."""
        tap = run.taps[(place - warp) % NEIGHBOURS]
        return None if tap is None else (tap, run.channel)

    # ---- what a block fetches

    warp = "fp::warp_number()"

    def _memory(self, first: int, kept: int) -> Iterable[str]:
        """Results that are computed by their definition lie in the place of halves."""
        c = self.c
        plan, on = self.plan, self.on
        yield f"unsigned char* const {c.packed} = {c.pool} + {first};"
        yield f"float* const {c.tile} = reinterpret_cast<float*>({c.packed} + {plan.packed_room});"
        yield f"float* const {c.room} = reinterpret_cast<float*>({c.packed}) + {c.warp} * {ROWS * on.staged_pitch};"
        yield f"unsigned char* const {c.weights} = {c.packed};"

    def _fetch_weights(self) -> Iterable[str]:
        c = self.c
        yield from super()._fetch_weights()
        yield f"const uint32_t {c.pattern} = fp::sparse_pattern({c.warp} % {NEIGHBOURS});"

    _row_of_word = ""

    @property
    def _step_of_word(self) -> str:
        return f"{self.c.i} / {128 * self.plan.parts}"

    @property
    def _own_weights(self) -> str:
        c = self.c
        return f"{c.weights} + {c.warp} % {NEIGHBOURS} * {self.plan.iteration_bytes // NEIGHBOURS}"

    def _halved(self) -> Iterable[str]:
        c = self.c
        plan, on = self.plan, self.on
        shape = f"{plan.parts}, {plan.threads}, {plan.input_rows}, {plan.places.width}, {on.extent[-1]}, {plan.places.shift}"
        yield f"fp::pack_runs<{shape}>(reinterpret_cast<uint4*>({c.packed}), {plan.layer}, {c.tile}, {on.pitch}, {c.scale});"
        if plan.places.slack:  # results that are computed by their definition may have lain there
            zero = f"reinterpret_cast<uint4*>({c.packed})[{plan.parts * plan.layer} + {c.i}] = {{}};"
            yield from block(
                f"for (int {c.i} = threadIdx.x; {c.i} < {plan.places.slack}; {c.i} += {plan.threads})", [zero]
            )
        yield "fp::publish_to_products();"

    # ---- products

    def _sets(self) -> list[str]:
        """A group of warps works on one product's columns after another; warps alone, where halves do not suit."""
        c = self.c
        plan, on = self.plan, self.on
        assert self._own is not None
        sets = f"for (int {c.set} = {c.warp}; {c.set} < {plan.sets}; {c.set} += {on.block_warps})"
        computed = self._computed()
        if on.tile[-1] % (COLUMNS * GROUP) == 0:
            computed = [*self._skipped(self.group_coordinates(f"({c.set} * {COLUMNS})")), *computed]
        across = plan.places.width if len(on.tile) > 1 else GROUP
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
        groups = f"for (int {c.set} = {c.warp} / {NEIGHBOURS}; {c.set} < {prod(plan.shape)}; {c.set} += {plan.groups})"
        return [
            *self._own.begin(),
            *either(
                c.broken,
                ["#pragma unroll 1", *block(sets, computed)],
                ["#pragma unroll 1", *block(groups, multiplied)],
            ),
            *self._own.end(),
        ]

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
        yield "#pragma unroll"
        yield from block(
            f"for (int {c.t} = 0; {c.t} < {count}; ++{c.t})",
            [f"{c.real} |= unsigned({' && '.join(conditions)}) << {c.t};"],
        )
        yield f"const unsigned {c.every} = __any_sync(0xffffffffu, {c.real} != {whole}) ? ~{c.real} : {c.real};"
