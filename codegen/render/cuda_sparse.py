"""Writes the body of a CUDA kernel with a convolution whose weights stay in registers, for four warps together; see `codegen.schedule_convolution.sparse`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from math import prod

from fusepass.codegen.ir.convolution import ROWS
from fusepass.codegen.ir.index import contiguous_strides
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.render.cuda_convolution import ConvolutionText
from fusepass.codegen.render.cuda_input import quotient, remainder
from fusepass.codegen.render.cuda_own import Held
from fusepass.codegen.render.cuda_register_stationary import RegisterStationaryWriter
from fusepass.codegen.render.spelling import Identifiers, block
from fusepass.codegen.schedule_convolution.sparse import NEIGHBOURS, PLACE_BYTES, SET_POSITIONS, Run, SparseSchedule
from fusepass.codegen.schedule_convolution.tiles import COLUMNS, GROUP


class SparseWriter(RegisterStationaryWriter[SparseSchedule]):
    """Lines of such a kernel."""

    def __init__(
        self, kernel: Kernel, program: Program, plan: SparseSchedule, pointers: dict[str, str], names: Identifiers
    ) -> None:
        self.steps_name = names.exact(f"{kernel.name}_steps")
        super().__init__(kernel, program, plan, pointers, names)

    def _held(self) -> Held:
        """A thread has two of 16 channels, of two columns of each line."""
        return Held(
            channels=2,
            positions=2 * self.plan.lines,
            row="$k % 2 * 8 + $lane / 4",
            at="$sums[$t / 2 * 4 + $k % 2 * 2 + $t % 2]",
            states="fp::HeldStates",
            push="fp::push_runs<{}>",
            leave="fp::leave_held",
            sums="$sums",
            staging="",
        )

    def write(self) -> ConvolutionText:
        broken = f"const bool $broken = fp::is_broken($scale, $factors, {self.plan.block_channels});"
        return self.text(1, self._pack(), self._sets(), "float*", behind=[broken])

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
        plan, on = self.plan, self.on
        yield f"unsigned char* const $packed = $pool + {first};"
        yield f"float* const $tile = reinterpret_cast<float*>($packed + {plan.packed_room});"
        yield f"float* const $room = reinterpret_cast<float*>($packed) + $warp * {ROWS * on.staged_pitch};"
        yield "unsigned char* const $weights = $packed;"

    def _fetch_weights(self) -> Iterable[str]:
        yield from super()._fetch_weights()
        yield f"const uint32_t $pattern = fp::sparse_pattern($warp % {NEIGHBOURS});"

    _row_of_word = ""

    @property
    def _step_of_word(self) -> str:
        return f"$i / {128 * self.plan.parts}"

    @property
    def _own_weights(self) -> str:
        return f"$weights + $warp % {NEIGHBOURS} * {self.plan.iteration_bytes // NEIGHBOURS}"

    def _halved(self) -> Iterable[str]:
        plan, on = self.plan, self.on
        shape = f"{plan.parts}, {plan.threads}, {plan.input_rows}, {plan.places.width}, {on.extent[-1]}, {plan.places.shift}"
        yield f"fp::pack_runs<{shape}>(reinterpret_cast<uint4*>($packed), {plan.layer}, $tile, {on.pitch}, $scale);"
        if plan.places.slack:  # results that are computed by their definition may have lain there
            zero = f"reinterpret_cast<uint4*>($packed)[{plan.parts * plan.layer} + $i] = {{}};"
            yield from block(f"for (int $i = threadIdx.x; $i < {plan.places.slack}; $i += {plan.threads})", [zero])
        yield "fp::publish_to_products();"

    # ---- products

    def _sets(self) -> list[str]:
        """A group of warps works on one product's columns after another; warps alone, where halves do not suit."""
        plan, on = self.plan, self.on
        assert self._own is not None
        sets = f"for (int $set = $warp; $set < {plan.sets}; $set += {on.block_warps})"
        computed = self._computed()
        if on.tile[-1] % (COLUMNS * GROUP) == 0:
            computed = [*self._skipped(), *computed]
        across = plan.places.width if len(on.tile) > 1 else GROUP
        multiplied = [
            *self._set_place(),
            *self._without_results(),
            f"float $sums[{4 * plan.lines}];",
            f"const fp::SparseColumns $columns = fp::sparse_columns($packed + $place * {PLACE_BYTES}, {plan.places.deeper}, {across});",
            f"fp::multiply_runs<{self.steps_name}, {plan.chain}, {plan.parts}, {plan.lines * GROUP}>"
            f"($sums, $held, $pattern, $columns, {plan.layer});",
            *self._inside(),
            *self._own.reduced("$real", "$every"),
        ]
        groups = f"for (int $set = $warp / {NEIGHBOURS}; $set < {prod(plan.shape)}; $set += {plan.groups})"
        return [
            *self._own.begin(),
            *block("if ($broken)", ["#pragma unroll 1", *block(sets, computed)])[:-1],
            *block("} else", ["#pragma unroll 1", *block(groups, multiplied)]),
            *self._own.end(),
        ]

    def _set_place(self) -> Iterable[str]:
        """``$place``, that of the first column; ``$at_z`` and so on, the first position along each axis."""
        plan, on = self.plan, self.on
        strides = [stride * plan.places.width for stride in contiguous_strides(on.extent[:-1])]
        rest, places = "$set", []
        units = self._units
        for number in reversed(range(len(on.tile))):
            count, unit = plan.shape[number], units[number]
            here = remainder(rest, count) if number else rest
            rest = quotient(rest, count)
            at = f"$at_{self.axes[number][1:]}"
            yield f"const int {at} = {here} * {unit};"
            stride = strides[number] if number + 1 < len(on.tile) else 1
            places.append(f"{at} * {stride}" if number + 1 < len(on.tile) else f"{at} / {NEIGHBOURS}")
        yield f"const int $place = {' + '.join(places)};"

    @property
    def _units(self) -> list[int]:
        """Positions of a set, per axis."""
        return [size // count for size, count in zip(self.on.tile, self.plan.shape, strict=True)]

    def _without_results(self) -> Iterable[str]:
        """Goes on where none of a set's positions is one of the result."""
        tests = [
            f"$tile_{axis[1:]} * {step} + $at_{axis[1:]} >= {size}"
            for axis, step, size, tiles, tile in zip(
                self.axes, self.on.steps, self.sizes[2:], self.on.tiles, self.on.tile, strict=True
            )
            if tiles * tile > size
        ]
        if tests:
            yield f"if ({' || '.join(tests)}) continue;"

    def _inside(self) -> Iterable[str]:
        """``$real``, which has a bit for each of a thread's positions that is one of the result; ``$every``, the same where all of the warp are."""
        plan, on, sizes = self.plan, self.on, self.sizes
        conditions = []
        for number, axis in enumerate(self.axes):
            if on.tiles[number] * on.tile[number] <= sizes[2 + number]:
                continue
            at = f"$tile_{axis[1:]} * {on.steps[number]} + $at_{axis[1:]}"
            if number == len(self.axes) - 1:
                line = f" + $t / 2 * {SET_POSITIONS}" if len(self.axes) == 1 else ""
                at += f"{line} + ($lane % 4 * 2 + $t % 2) * {NEIGHBOURS} + $warp % {NEIGHBOURS}"
            elif number == len(self.axes) - 2:
                at += " + $t / 2"
            conditions.append(f"{at} < {sizes[2 + number]}")
        count = 2 * plan.lines
        whole = f"{(1 << count) - 1:#x}u"
        if not conditions:
            yield f"const unsigned $real = {whole}, $every = {whole};"
            return
        yield "unsigned $real = 0;"
        yield "#pragma unroll"
        yield from block(
            f"for (int $t = 0; $t < {count}; ++$t)", [f"$real |= unsigned({' && '.join(conditions)}) << $t;"]
        )
        yield f"const unsigned $every = __any_sync(0xffffffffu, $real != {whole}) ? ~$real : $real;"
