"""Writes the body of a CUDA kernel with a convolution by scaled halves; `codegen.schedule_convolution.chunks` says how it is laid out."""

from __future__ import annotations

import abc
import functools
import itertools
from collections.abc import Iterable
from dataclasses import replace
from math import ceil, prod

from fusepass.codegen.ir.convolution import HALVES, ROWS, few_halves, halves_of_place
from fusepass.codegen.ir.dtype import DType, Precision
from fusepass.codegen.ir.index import contiguous_strides
from fusepass.codegen.ir.program import Kernel
from fusepass.codegen.render.cuda.contraction.convolution.laid_out import pairs_of_warps, shared_pitch, takes_pairs
from fusepass.codegen.render.cuda.contraction.convolution.persistent import Held, OwnValues, PersistentWriter
from fusepass.codegen.render.cuda.contraction.convolution.results import repair
from fusepass.codegen.render.cuda.contraction.convolution.tiles import (
    Sums,
    coordinates,
    dot,
    table,
)
from fusepass.codegen.render.cuda.contraction.loops import Loop
from fusepass.codegen.render.spelling import C_TYPES, ROLLED, UNROLL, block, either
from fusepass.codegen.render.unit import Place
from fusepass.codegen.schedule_convolution.chunks import (
    BLOCK,
    LONGEST_CHAIN,
    TOGETHER,
    ChunkSchedule,
    has_own_values,
    padded_places,
    warps_of_a_run,
)
from fusepass.codegen.schedule_convolution.tiles import COLUMNS

_CHAIN = 4  # products that are begun at once
_MOST_AT_ONCE = 64  # whose descriptors are written out


class ChunkWriter(PersistentWriter, abc.ABC):
    """Lines of such a kernel; `chunk_tiles` has those of how tiles come."""

    def __init__(self, kernel: Kernel, plan: ChunkSchedule, place: Place) -> None:
        super().__init__(kernel, plan, place)
        self.plan: ChunkSchedule = plan
        assert self.anchor.halves is not None
        self.halves = self.anchor.halves
        self.each = prod(halves_of_place(self.source.shape[1], plan.parts))  # halves of a position
        self._own = OwnValues(self, self._held()) if has_own_values(kernel, plan) else None
        self.turns = Loop(self.c.turn, plan.iterations)
        self.packed = self.c.tile  # where a tile's halves lie
        if plan.iterations > 1:
            self.first_channel = self.c.turn_channel
        self._origins = [f"origin_{letter}" for letter in self.letters]
        self.places_name, self.weights_name, self.steps_name, self.origins_name = (
            place.names.exact(f"{kernel.name}_{what}")
            for what in ("places", "weights_from", "first_product", "origins")
        )

    def _held(self) -> Held:
        """A thread has a fourth of the channels of four positions; the eight that have the same ones merge states, each of some of them."""
        c = self.c
        return Held(
            channels=ROWS * self.plan.rows // 4,
            positions=4,
            row=lambda k: f"{k} / 4 * 16 + {k} % 4 / 2 * 8 + {c.lane} % 4 * 2 + {k} % 2",
            at=lambda k, t: f"{c.sums}[0][{t} / 2][{k} / 4 * 8 + {k} % 4 / 2 * 4 + {t} % 2 * 2 + {k} % 2]",
            states="fp::OwnStates",
            push=lambda whole: f"fp::push_sums<{whole}>",
            leave="fp::leave_sums",
            sums=f"{c.sums}[0]",
            staging=f"fp::stage_values<{self._room[1]}>({self._room[0]}, {c.sums}, {self.rows});",
        )

    # ---- tables

    def _tables(self) -> Iterable[str]:
        where, weights = [], []
        strides = [stride * self.each for stride in contiguous_strides(self.weight.shape[2:])]
        for phase in padded_places(self.plan):
            for first, second in zip(phase[::2], phase[1::2], strict=True):
                where.append(first[0] | second[0] - first[0] << 16)
            for _, real, number, layer in phase:
                weights.append(-1 if real is None else dot(real.taps[number].place, strides) + layer * HALVES)
        yield f"// For each product of {self.anchor.name}, where its first place lies, and 2^16 times how far off the second is."
        yield from table(self.places_name, where)
        yield "// For each place its halves among the weights of an output channel; -1 where a product is filled up."
        yield from table(self.weights_name, weights)
        steps = [0, *itertools.accumulate(self.plan.slices)]
        if self.plan.by_parts:
            crossed = map(self.plan.crossed, self.plan.on.phases)
            steps = [
                step for first, count in zip(steps, crossed, strict=False) for step in (first, first + count)
            ] + steps[-1:]
            yield "// The first product of each phase and its first one of high parts alone, and the end of the last."
        else:
            yield "// The first product of each phase, and the end of the last."
        yield from table(self.steps_name, steps)
        if self.plan.origins_vary:
            yield "// For each part of the phases, where a tile's input begins."
            yield from table(self.origins_name, [*itertools.chain(*self.plan.origins)])

    # ---- what a block fetches

    def _shared(self) -> Iterable[str]:
        c = self.c
        plan = self.plan
        yield f"extern __shared__ __align__(128) unsigned char {c.pool}[];"
        yield f"unsigned char* const {c.weights} = {c.pool};"
        if plan.teams > 1:
            yield f"const int {c.team} = threadIdx.x / 128;"
        yield from self._tile_pointers()
        yield f"const int {c.lane} = threadIdx.x % 32;"
        yield f"const int {c.warp} = fp::warp_number();"
        room = f"reinterpret_cast<float*>({c.pool} + {plan.weight_bytes}) + {c.warp} * {ROWS * self.on.staged_pitch}"
        yield f"float* const {c.room} = {room};"
        if self.together > 1:
            yield f"float* const {c.shared} = {c.room} - {c.warp} % {self.together} * {ROWS * self.on.staged_pitch};"
        first = f"int(blockIdx.x) % {plan.channel_blocks} / {plan.phase_blocks} * {ROWS * plan.rows * plan.iterations}"
        yield f"const int {c.first_channel} = {first if plan.channel_blocks > plan.phase_blocks else '0'};"
        if plan.phase_blocks > 1:
            yield f"const int {c.part} = int(blockIdx.x) % {plan.phase_blocks};"
            yield f"const int {c.first_phase} = {c.part} * {plan.part};"
            yield f"const int {c.first_product} = {self.steps_name}[{c.first_phase}];"
            if plan.origins_vary:
                for number, origin in enumerate(self._origins):
                    yield f"const int {c.named(origin)} = {self.origins_name}[{c.part} * {len(self.axes)} + {number}];"

    @abc.abstractmethod
    def _tile_pointers(self) -> Iterable[str]:
        """Where tiles of the input lie."""

    def _fetch_weights(self) -> Iterable[str]:
        """Weights as tensor cores take them: 8 columns x 8 halves side by side; see `tile_descriptor`."""
        c = self.c
        plan, columns, outs = self.plan, self.plan.columns, self.sizes[1]
        own = ROWS * plan.rows  # columns of high parts
        column = f"{c.i} / 32 % {columns // 8} * 8 + {c.i} / 2 % 8"
        product = f"{c.i} / {4 * columns}"
        if plan.phase_blocks > 1:
            product = f"({c.first_product} + {product})"
        lines = [
            f"const int {c.column} = {column};",
            f"const int {c.channel} = {self._turn_channel} + {c.column}{f' % {own}' if columns > own else ''};",
            f"const int {c.place} = {self.weights_name}[{product} * 2 + {c.i} / 16 % 2];",
            f"int {c.half} = {c.place} + {c.i} % 2 * 4;",
            f"bool {c.real} = {c.place} >= 0 && {c.channel} < {outs};",
        ]
        if plan.columns > own:
            filled = self.each // 2
            lines += [
                f"const bool {c.high} = {c.half} % {self.each} < {filled};",
                "// products with low parts have columns of their own",
                f"if ({c.column} < {own}) {c.half} += {c.high} ? {filled} : -{filled};",
                f"else {c.real} = {c.real} && {c.high};",
            ]
        total = prod(self.weight.shape[2:]) * self.each
        to = (
            f"{c.weights} + {c.i} * 8"
            if plan.iterations == 1
            else f"{c.weights} + {c.turn} * {plan.iteration_bytes} + {c.i} * 8"
        )
        copy = f"fp::begin_copy_bytes<8>({to}, {self.pointers[self.halves.weight]}"
        lines.append(
            f"{copy} + ({c.real} ? {self.index_type}({c.channel}) * {total} + {c.half} : 0), {c.real} ? 8 : 0);"
        )
        yield "// weights, as they are multiplied"
        head = f"for (int {c.i} = threadIdx.x; {c.i} < {plan.iteration_bytes // 8}; {c.i} += {plan.threads})"
        yield from self.turns.over(block(head, lines), ROLLED)

    @property
    def _turn_channel(self) -> str:
        """The first channel of a ``turn``."""
        c = self.c
        return (
            c.first_channel if self.plan.iterations == 1 else f"{c.first_channel} + {c.turn} * {ROWS * self.plan.rows}"
        )

    # ---- products

    def block_place(self) -> str:
        """Where the places of ``block``, a block of positions, begin in a tile."""
        plan, on = self.plan, self.on
        row = on.tile[-1] // BLOCK
        if plan.neighbours:
            axes = [*zip(on.tile[:-1], contiguous_strides(on.extent)[:-1], strict=True), (row, BLOCK)]
        else:  # in a plane, they are equally far from each other
            axes = [(prod(on.tile[:-2]), prod(on.extent[-2:])), (row * prod(on.tile[-2:-1]), plan.run)]
        axes = [(size, stride) for size, stride in axes if size > 1]
        sizes, strides = zip(*axes, strict=True) if axes else ((), ())
        places = coordinates(self.c.block, sizes)
        return " + ".join(f"{place} * {stride}" for place, stride in zip(places, strides, strict=True)) or "0"

    @property
    def chains(self) -> tuple[int, int]:
        """Products that may be added in the tensor core with any others, and those of which no more than `LONGEST_CHAIN` may in a row; of the largest phase."""
        crossed = max(map(self.plan.crossed, self.on.phases))
        limited = max(self.plan.slices) - crossed if self.anchor.precision is Precision.FLOAT32 else 0
        return max(self.plan.slices) - limited, limited

    @property
    def at_once(self) -> bool:
        """Whether the products of a chain are written out, those of few channels."""
        plan, exact = self.plan, self.anchor.precision is Precision.FLOAT32
        few = few_halves(plan.channels, self.anchor.step) and plan.slices[0] <= _MOST_AT_ONCE
        return few and len(self.on.phases) == 1 and plan.by_parts is exact

    def sum_up(self) -> list[str]:
        """The products of one phase."""
        c = self.c
        # Both bounds come from memory: of loops whose counts it knows, the compiler begins too many products at once.
        plan, (free, limited) = self.plan, self.chains
        phase = f"{c.phase} + {self.phase}" if len(self.on.phases) > 1 else str(self.phase)
        at, each = (f"({phase}) * 2", 2) if plan.by_parts else (phase, 1)
        bounds = [f"{self.steps_name}[{at}{f' + {number}' if number else ''}]" for number in range(each + 1)]
        chain = ceil(limited / ceil(limited / LONGEST_CHAIN)) if limited else _CHAIN
        half = C_TYPES[self.source.dtype if self.source.dtype.is_half else DType.F16]
        call = f"fp::add_places{('_by_parts' if plan.by_parts else '_exactly') if limited else ''}<{half}, {chain}>"
        if self.at_once:
            call, bounds = f"fp::sum_up_places<{half}, {chain}, {free}, {limited}>", []
        given = ", ".join((f"{c.sums}[{self.phase}]", self.places_name, *bounds, *self.descriptors()))
        return [f"{call}({given});"]

    def descriptors(self) -> tuple[str, str, str]:
        """Of inputs and weights, and how far the weights of a product are from those of the next one."""
        c = self.c
        plan = self.plan
        unit = plan.columns * 2
        weights = f"fp::tile_descriptor({c.weights}, 128, 256)"
        if plan.phase_blocks > 1:
            weights += f" - {c.first_product} * {unit}"
        if plan.iterations > 1:
            weights += f" + {c.turn} * {plan.iteration_bytes // 16}"
        return c.inputs, weights, str(unit)

    def _sets(self) -> list[str]:
        c = self.c
        plan = self.plan
        group = "0" if plan.teams > 1 else f"{c.warp} / 4"
        blocks = f"({f'{c.set} * {plan.tile_warps // 4} + ' if plan.sets > 1 else ''}{group}) * {TOGETHER}"
        lines = [
            f"const int {c.block} = {blocks};",
            f"const uint64_t {c.inputs} = fp::place_descriptor({self.packed}, {plan.run}) + ({self.block_place()});",
            *self._multiply(),
        ]
        lines = Loop(c.set, plan.sets).over(lines, ROLLED)
        if self._own:
            lines = [*self._own.begin(), *lines, *self._own.end()]
        if plan.iterations > 1:  # around the sets, so that a thread loads the factors of its channels once
            lines.insert(0, f"const int {c.turn_channel} = {self._turn_channel};")
        return self.turns.over(lines, ROLLED)

    def own_staging(self, sums: Sums) -> str:
        return self._staging(shared=True)

    def stored_own(self, sums: Sums) -> Iterable[str]:
        c = self.c
        if self.together == 1:
            return self.epilogue(sums)
        warps = self.plan.tile_warps
        sets = f"{c.set} * {warps}" if self.plan.sets > 1 else ""
        first = f"{c.warp} / {self.together} * {self.together}" if self.together < warps else ""
        group = f"({' + '.join(filter(None, (sets, first))) or '0'}) * {COLUMNS}"
        return pairs_of_warps(self, replace(sums, group=group), self.together)

    def _multiply(self) -> Iterable[str]:
        c = self.c
        plan, on = self.plan, self.on
        warp = f"{c.warp} % {plan.tile_warps}" if plan.teams > 1 else c.warp
        first = f"({c.set} * {plan.tile_warps} + {warp}) * {COLUMNS}" if plan.sets > 1 else f"{warp} * {COLUMNS}"
        pragma = ROLLED if self._own else UNROLL  # of what is left to sums that are not finite
        sums = Sums(self._staging(), self.rows, first, tuple(repair(self)), pragma)
        if self.kernel.reduction_loops and self.anchor.column > 1:
            results = self.along(sums, plan.vector)
        else:
            broken = sums.defined if self._own and self.whole else sums
            results = self.vectors(sums, plan.vector) if plan.vector > 1 else self.epilogue(broken)
        if self._own:
            results = either(c.broken, results, self._own.use(replace(sums, unroll=UNROLL)))
        lines = [
            f"float {c.sums}[{on.pair}][2][{ROWS * plan.rows // 2}] = {{}};",
            *self.phase.over(self.sum_up()),
            *self.finite(f"{c.sums}[{self.phase}]", [self.phase]),
            *results,
        ]
        first, last = (
            ("0", str(plan.part)) if plan.phase_blocks == 1 else (c.first_phase, f"{c.first_phase} + {plan.part}")
        )
        yield from self.over_phases(lines, first, last)

    @functools.cached_property
    def together(self) -> int:
        """`warps_of_a_run`, if they may wait for each other, and threads take pairs."""
        return warps_of_a_run(self.kernel, self.plan) if takes_pairs(self) else 1

    @property
    def _room(self) -> tuple[str, int]:
        """Where a warp lays out what it has in common with others, and how far channels are apart there."""
        c = self.c
        if self.together == 1:
            return c.room, self.on.staged_pitch
        return f"{c.shared} + {c.warp} % {self.together} * {COLUMNS * 8}", shared_pitch(self.together)

    @abc.abstractmethod
    def _staging(self, *, shared: bool = False) -> str:
        """Lays the sums of the ``m``-th 16 channels out as results, in a room that is `shared` or the warp's; see `Sums`."""
