"""Writes the body of a CUDA kernel with a convolution of few channels; `codegen.schedule_convolution.shared_stationary` says how it is laid out."""

from __future__ import annotations

from collections.abc import Iterable

from fusepass.codegen.ir.convolution import ROWS, Pooling
from fusepass.codegen.ir.dtype import Precision
from fusepass.codegen.ir.program import Kernel
from fusepass.codegen.render.cuda.contraction.convolution.persistent import PersistentWriter
from fusepass.codegen.render.cuda.contraction.convolution.results import GROUP_SLICES, repair
from fusepass.codegen.render.cuda.contraction.convolution.tiles import Sums, dot, table
from fusepass.codegen.render.cuda.contraction.loops import Loop
from fusepass.codegen.render.cuda.family import Text
from fusepass.codegen.render.spelling import ROLLED, as_float, block, loop
from fusepass.codegen.render.unit import Place
from fusepass.codegen.schedule_convolution.shared_stationary import (
    SLICE,
    SharedStationarySchedule,
    first_steps,
    places_of_weights,
)
from fusepass.codegen.schedule_convolution.tiles import COLUMNS


class SharedStationaryWriter(PersistentWriter):
    """Lines of such a kernel."""

    def __init__(self, kernel: Kernel, plan: SharedStationarySchedule, place: Place) -> None:
        super().__init__(kernel, plan, place)
        self.plan: SharedStationarySchedule = plan
        self.together, self.rounds = plan.on.warps > 1, plan.precision is Precision.TF32
        self.taps_name, self.weights_name, self.steps_name, self.halved_name = (
            self.names.exact(f"{kernel.name}_{what}") for what in ("taps", "weights_from", "first_step", "halved")
        )
        self.places = places_of_weights(plan, self.ins)
        self.shares = any(place.halved for place in self.places)

    def write(self) -> Text:
        return self.text(self.plan.buffers, [f"{self.c.settle}();"] if self.settles else [], self._multiply(), "float*")

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
        c = self.c
        steps, plan = sum(self.plan.steps), self.plan
        after_weights = 4 * self._weights() * max(self.anchor.parts, 1)
        yield f"extern __shared__ __align__(16) unsigned char {c.pool}[];"
        yield f"float* const {c.weights} = reinterpret_cast<float*>({c.pool});"
        yield f"int* const {c.taps} = reinterpret_cast<int*>({c.pool} + {after_weights});"
        after_taps = after_weights + 4 * SLICE * steps
        yield f"float* {c.tile} = reinterpret_cast<float*>({c.pool} + {after_taps + 4 * self.on.staged_floats});"
        if plan.buffers == 2:
            yield f"float* {c.next} = {c.tile} + {self.ins * self.on.pitch};"
        yield f"const int {c.lane} = threadIdx.x % 32;"
        yield f"const int {c.warp} = threadIdx.x / 32;"
        yield f"float* const {c.room} = reinterpret_cast<float*>({c.pool} + {after_taps}) + {c.warp} * {16 * self.on.staged_pitch};"
        yield "// where the columns of this warp begin in the tile, 8 positions each"
        yield f"int {c.groups}[{COLUMNS}];"
        n = Loop(c.n, COLUMNS)
        place = self.group_place(f"({c.warp} * {COLUMNS} + {n})")
        yield from n.over([f"{c.groups}[{n}] = {place};"])
        yield from self.channel_group()
        part = self.part_of_group
        first = part if part == "0" else f"{part} * {plan.channels}"
        yield f"const int {c.first_channel} = {self.of_group(first, self.outs)};"

    def _weights(self) -> int:
        """Weights of a block, those that fill slices up among them."""
        return sum(self.plan.steps) * SLICE * self.plan.channels

    def _fetch_weights(self) -> Iterable[str]:
        """Weights in the order in which tensor cores take them; see `Convolution.packed_shape`."""
        c = self.c
        plan, steps = self.plan, sum(self.plan.steps)
        along = self.weight.strides[1 if self.anchor.transposed else 0]
        place = [
            f"const int {c.thread} = {c.i} / 4 % 32;",
            f"const int {c.channel} = {c.first_channel} + {c.i} / 128 % {plan.rows} * 16 + {c.thread} / 4 + {c.i} % 2 * 8;",
            f"const int {c.at} = {c.i} / {SLICE * plan.channels} * 8 + {c.thread} % 4 + {c.i} / 2 % 2 * 4;",
        ]
        if self.together:
            place = [
                f"const int {c.channel} = {c.first_channel} + {c.i} / 64 % {plan.channels // 8} * 8 + {c.i} / 4 % 8;",
                f"const int {c.at} = {c.i} / {SLICE * plan.channels} * 8 + {c.i} / 32 % 2 * 4 + {c.i} % 4;",
            ]
        keep = {
            0: [f"{c.weights}[{c.i}] = {c.value};"],
            1: [f"{c.weights}[{c.i}] = fp::tf32({c.value});"],
            2: [
                f"{c.weights}[{c.i}] = fp::tf32({c.value});",
                f"{c.weights}[{self._weights()} + {c.i}] = {c.value} - {c.weights}[{c.i}];",
            ],
        }
        share = f" / (1 << {self.halved_name}[{c.at}])" if self.shares else ""
        weight = as_float(f"{self.pointers[self.weight.name]}[{c.from_}]", self.weight.dtype)
        yield "// weights and taps, as they are multiplied"
        yield from block(
            f"for (int {c.i} = threadIdx.x; {c.i} < {self._weights()}; {c.i} += {plan.threads})",
            [
                *place,
                f"const int {c.from_} = {self.weights_name}[{c.at}] + {c.channel} * {along}{self.group_weights};",
                f"const float {c.weight} = {c.channel} < {self.end_channel} ? {weight} : 0.0f;",
                f"const float {c.value} = {c.weight}{share};",
                *keep[self.anchor.parts],
            ],
        )
        if self.together:
            yield "fp::publish_to_products();"
        yield f"for (int {c.i} = threadIdx.x; {c.i} < {steps * SLICE}; {c.i} += {plan.threads}) {c.taps}[{c.i}] = {self.taps_name}[{c.i}];"

    def _fetch_tile(self) -> Iterable[str]:
        """How the input below a tile is fetched, for all channels."""
        c = self.c
        yield from self.fetched_input()
        yield from self.settling(f"const auto {c.settle} = [&]", c.tile, self.over_channels_of_input)

    # ---- products

    def _multiply(self) -> Iterable[str]:
        c = self.c
        on, results = self.on, f"{c.sums}[{self.phase}]" if self.anchor.pooled is None else c.largest
        lines = [
            f"float {c.sums}[{on.pair}]{self._sums} = {{}};",
            f"const float* const {c.mine} = {c.tile} + {c.lane} / 4 * {self.anchor.step[-1]};",
            *self.phase.over(self._sum_up()),
        ]
        if self.anchor.pooled is not None:
            yield from self._pool(self.anchor.pooled, lines)
            yield from self._results(results)
            return
        lines += [*([] if self.rounds else self.finite(results, [self.phase])), *self._results(results)]
        yield from self.over_phases(lines)

    @property
    def _sums(self) -> str:
        """The dimensions of a thread's sums of one phase."""
        rows = self.plan.rows
        return f"[2][{self.plan.channels // 2}]" if self.together else f"[{rows}][{COLUMNS}][4]"

    def _results(self, sums: str) -> Iterable[str]:
        """What is done with the results that are in `sums`."""
        c = self.c
        plan, on = self.plan, self.on
        staging = f"fp::stage<{on.pair}, {on.staged_pitch}>({c.room}, {sums}[{self.rows}], {self.phase});"
        if self.together:
            staging = f"fp::stage_group<{on.pair}, {on.staged_pitch}>({c.room}, {sums}, 0, {self.rows}, {self.phase});"
        height = min(plan.channels, ROWS)
        repaired = () if self.rounds else tuple(repair(self, height))
        group = f"{c.warp} * {COLUMNS}"
        yield from self.epilogue(Sums(staging, self.rows, group, repaired, height=height, phase=self.phase))

    def _pool(self, pooled: Pooling, lines: list[str]) -> Iterable[str]:
        """``largest`` of the sums that `lines` give for each ``phase``."""
        c = self.c
        bias = ""
        if pooled.bias is not None:
            bias = f", {self.pointers[pooled.bias]}, {c.first_channel}, {self.end_channel}"
        yield f"float {c.largest}{self._sums};"
        yield f"fp::begin_largest({c.largest});"
        pool = f"fp::pool_sums({c.largest}, {c.sums}[0]{bias});"
        broken = f"{c.broken} = {c.broken} || !fp::all_finite({c.sums}[0]);"
        yield from () if self.rounds else (f"bool {c.broken} = false;",)
        yield from loop(c.phase, len(self.on.phases), [*lines, *([] if self.rounds else [broken]), pool], ROLLED)
        yield from () if self.rounds else (f"{c.broken} = __any_sync(0xffffffffu, {c.broken});",)

    def _sum_up(self) -> list[str]:
        """The products of one phase."""
        c = self.c
        plan = self.plan
        first, last = "0", str(plan.steps[0])
        lines = []
        if len(self.on.phases) > 1:
            first, last = c.first, f"{self.steps_name}[{c.phase} + {self.phase} + 1]"
            lines.append(f"const int {c.first} = {self.steps_name}[{c.phase} + {self.phase}];")
        if self.together:
            return [*lines, *self._multiply_together(first, last)]
        n = Loop(c.n, COLUMNS)
        from_memory = [f"{c.b}[{n}][0] = {c.near}[{c.groups}[{n}]];", f"{c.b}[{n}][1] = {c.far}[{c.groups}[{n}]];"]
        one = [
            f"float {c.a}[{plan.rows}][4], {c.b}[{COLUMNS}][2];",
            f"fp::load_weights({c.a}, {c.weights} + {c.step} * {plan.rows * 128} + {c.lane} * 4);",
            *self._near(c.step),
            *n.over(from_memory),
            f"fp::multiply_slice({c.sums}[{self.phase}], {c.a}, {c.b});",
        ]
        return [*lines, *block(f"for (int {c.step} = {first}; {c.step} < {last}; ++{c.step})", one)]

    def _near(self, step: str) -> Iterable[str]:
        """Where a thread's two places of a slice lie in the tile of the input, for the tile's first position."""
        c = self.c
        yield f"const float* const {c.near} = {c.mine} + {c.taps}[{step} * {SLICE} + {c.lane} % 4];"
        yield f"const float* const {c.far} = {c.mine} + {c.taps}[{step} * {SLICE} + {c.lane} % 4 + 4];"

    def _multiply_together(self, first: str, last: str) -> Iterable[str]:
        """The products of slices from `first` to below `last`, by four warps together."""
        c = self.c
        n = Loop(c.n, COLUMNS)
        from_memory = [
            f"{c.a}[{n} / 2][{n} % 2] = {c.near}[{c.groups}[{n}]];",
            f"{c.a}[{n} / 2][{n} % 2 + 2] = {c.far}[{c.groups}[{n}]];",
        ]
        begin = "" if first == "0" else f"{first} + "
        load = [*self._near(f"({begin}{c.s})"), *n.over(from_memory)]
        yield from block(f"const auto {c.load} = [&](float (&{c.a})[2][4], int {c.s})", load, "};")
        slice_units = self.plan.channels * 2
        count = last if first == "0" else f"{last} - {first}"
        at = f"fp::tile_descriptor({c.weights}, 128, 256)" + ("" if first == "0" else f" + {first} * {slice_units}")
        if self.rounds:
            yield f"fp::multiply_slices_rounded<{GROUP_SLICES}>({c.sums}[{self.phase}], {count}, {at}, {slice_units}, {c.load});"
            return
        yield f"const uint64_t {c.high} = {at};"
        low = f"{c.high} + {self._weights() // 4}"
        yield f"fp::multiply_slices_exactly<{GROUP_SLICES}>({c.sums}[{self.phase}], {count}, {c.high}, {low}, {slice_units}, {c.load});"
