"""How the tiles of a CUDA kernel with a convolution by halves come: as halves that were packed, or as they are; see `passes.packing`.

A tile that is no halves yet is fetched as it is. Its threads find the largest number of each channel, then the scale, and lay the tile's halves
out in chunks; while these are multiplied, the next tile is fetched.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence

from fusepass.codegen.ir.convolution import HALVES, ROWS, ScaledHalves, ScaledWeights, halves_of_place
from fusepass.codegen.ir.expr import ReduceOp, ReductionResult, walk
from fusepass.codegen.ir.index import contiguous_strides
from fusepass.codegen.ir.program import Kernel
from fusepass.codegen.render.cuda.contraction.convolution.chunks import ChunkWriter
from fusepass.codegen.render.cuda.contraction.convolution.persistent import PersistentWriter
from fusepass.codegen.render.cuda.contraction.convolution.tiles import Sums, coordinates, dot, plus
from fusepass.codegen.render.cuda.contraction.loops import Loop, ReductionLoops
from fusepass.codegen.render.cuda.family import Text
from fusepass.codegen.render.spelling import C_TYPES, block, either
from fusepass.codegen.render.unit import Place
from fusepass.codegen.schedule_convolution.chunks import BLOCK, ChunkSchedule
from fusepass.codegen.schedule_convolution.register_stationary import RegisterStationarySchedule
from fusepass.codegen.schedule_convolution.tiles import Tiles

BINADES, BINADES_BY_PARTS = 24, 15
"""How many powers of two a channel may be smaller than the largest of its tile; the second one where low parts are not scaled
(`ChunkSchedule.by_parts`). The largest number of the tile has exponent 14 as a half, that of such a channel -10 or -1, and steps of halves
end at 2^-24: a number is off by 2^-25 where its own digits do not end before. One half is off by 2^-15 of the largest number of its channel,
which TF32 rounds by up to 2^-11 of it; with a low part times 2^11, 2^-26; with one as it is 2^-24, by which float32 may round it.
"""

_EXTREMES = (ReduceOp.MAX, ReduceOp.MIN)  # whose results do not depend on the order


class ScaledTiles(PersistentWriter, abc.ABC):
    """What writers share whose kernels make halves of tiles of the input themselves."""

    whole = True
    plan: ChunkSchedule | RegisterStationarySchedule

    @abc.abstractmethod
    def _pack(self) -> list[str]:
        """Makes halves of what was fetched."""

    @abc.abstractmethod
    def _sets(self) -> list[str]:
        """Multiplies, and uses what comes of it."""

    def write(self) -> Text:
        c = self.c
        broken = f"const bool {c.broken} = fp::is_broken({c.scale}, {c.factors}, {self.plan.block_channels});"
        return self.text(1, self._pack(), self._sets(), "float*", behind=[broken])

    def _fetch_tile(self) -> Iterable[str]:
        return self.fetched_input()

    def kept_scales(self, factors: str) -> Iterable[str]:
        """Room for what scales are made of, from `factors` on; the exponents of all input channels and of a block's output channels are kept there."""
        c, halves, ins, count = self.c, self.anchor.halves, self.plan.channels, self.plan.block_channels
        assert isinstance(halves, ScaledWeights)
        yield "// what results are multiplied with, the largest number of each channel of a tile, and exponents"
        yield f"float* const {c.factors} = {factors};"
        yield f"unsigned* const {c.largest} = reinterpret_cast<unsigned*>({c.factors} + {count});"
        yield f"int* const {c.exponents} = reinterpret_cast<int*>({c.largest} + {ins * self.plan.largest_parts});"
        keep = f"fp::keep_exponents<{self.plan.threads}>({c.exponents}"
        yield f"{keep}, {self.pointers[halves.channels]}, 0, {ins}, {ins});"
        yield f"{keep} + {ins}, {self.pointers[halves.outs]}, {c.first_channel}, {count}, {self.sizes[1]});"

    def tile_scale(self, vector: int, binades: int) -> list[str]:
        """``scale``, that of a tile which was fetched, `vector` numbers of a row at a time, and ``factors`` of results; see `BINADES`."""
        c, plan, tile, ins = self.c, self.plan, self.input, self.plan.channels
        return [
            f"fp::find_largest<{ins}, {plan.on.block_warps}, {tile.elements}, {vector}>({c.largest}, {c.tile}, {tile.pitch});",
            "__syncthreads();",
            f"const fp::TileScale<{ins}> {c.scale}({c.largest}, {plan.largest_parts}, {c.exponents}, {binades});",
            f"fp::leave_factors<{plan.threads}>({c.factors}, {c.scale}.exponent, {c.exponents} + {ins}, {plan.block_channels});",
        ]

    @property
    def of_iteration(self) -> str:
        """What is added to a channel of an iteration to be one of the block."""
        return f"{self.c.turn} * {ROWS * self.plan.rows} + " if self.plan.iterations > 1 else ""

    def factors(self) -> tuple[list[str], str]:
        c = self.c
        return [f"const float {c.factor} = {c.factors}[{self.of_iteration}{c.row}];"], f"{c.sum} * {c.factor}"


class PackedWriter(ChunkWriter):
    """Lines of a kernel whose halves are fetched as they are packed in memory."""

    def write(self) -> Text:
        plan = self.plan
        return self.text(plan.buffers, ["fp::publish_to_products();"], self._sets(), "unsigned char*", plan.teams)

    def _tile_pointers(self) -> Iterable[str]:
        """Where tiles of the input lie."""
        c = self.c
        plan = self.plan
        own = f" + {c.team} * {plan.buffers * plan.tile_bytes}" if plan.teams > 1 else ""
        yield f"unsigned char* {c.tile} = {c.pool} + {plan.weight_bytes + 4 * self.on.staged_floats}{own};"
        if plan.buffers == 2:
            yield f"unsigned char* {c.next} = {c.tile} + {plan.tile_bytes};"

    def _fetch_tile(self) -> Iterable[str]:
        """How the input below a tile is fetched, for all layers."""
        c = self.c
        plan, on = self.plan, self.on
        assert isinstance(self.halves, ScaledHalves)
        source = self.program.buffer(self.halves.source)
        lines, conditions, index = list[str](), [], [f"{c.sample} * {source.strides[0]}"]
        for number, here in reversed([*enumerate(coordinates(c.element if plan.layers > 1 else c.i, on.extent))]):
            axis, extent, tile = self.axes[number], on.extent[number], on.steps[number]
            if number == len(self.axes) - 1 and extent != plan.run and not plan.neighbours:
                lines.append(f"const unsigned {c.along} = {here};")
                here = f"{c.along} - {c.along} / {plan.run} * {plan.run - BLOCK}"
            origin = f" + {c.named(self._origins[number])}" if plan.origins_vary else plus(on.origin[number])
            first = f"{self.tile_at[number]} * {tile}{origin}"
            lines.append(f"const {self.index_type} {axis} = {first} + int({here});")
            conditions.append(f"{axis} >= 0 && {axis} < {self.source.shape[2 + number]}")
            index.append(f"{axis} * {source.strides[1 + number]}")
        lines += [
            f"const bool {c.real} = {' && '.join(conditions)};",
            f"const {C_TYPES[source.dtype]}* const {c.from_} = {self.pointers[source.name]} + ({c.real} ? {' + '.join(index)} : 0);",
        ]
        to, layer = f"{c.to} + {c.i} * {2 * HALVES}", ""
        if plan.layers > 1:  # those of a position are neighbours in memory
            lines.insert(0, f"const unsigned {c.element} = {c.i} / {plan.layers}, {c.layer} = {c.i} % {plan.layers};")
            to = f"{c.to} + ({c.layer} * {plan.layer_places} + {c.element}) * {2 * HALVES}"
            layer = f" + {c.layer} * {HALVES}"
        lines.append(f"fp::begin_copy_bytes<{2 * HALVES}>({to}, {c.from_}{layer}, {c.real} ? {2 * HALVES} : 0);")
        copies = plan.layers * on.elements
        # without signs, quotients by known numbers take fewer instructions
        thread = "threadIdx.x % 128" if plan.teams > 1 else "threadIdx.x"
        loop = block(f"for (unsigned {c.i} = {thread}; {c.i} < {copies}; {c.i} += {plan.threads // plan.teams})", lines)
        yield "// begins to fetch the input below a tile, zeros where there is none"
        yield from block(
            f"const auto {c.fetch} = [&](int {c.number}, unsigned char* {c.to})",
            [*self.tile_place(), *loop],
            "};",
        )

    def _staging(self, *, shared: bool = False) -> str:
        """Lays the sums of the ``m``-th 16 channels out as results, in a room that is `shared` or the warp's; see `Sums`."""
        c = self.c
        assert isinstance(self.halves, ScaledHalves)
        room, pitch = self._room if shared else (c.room, self.on.staged_pitch)
        if not self.halves.scales:
            return f"fp::stage_values<{pitch}>({room}, {c.sums}, {self.rows});"
        factors = ", ".join(f"{self.pointers[name]} + {c.sample} * {self.sizes[1]}" for name in self.halves.scales)
        channels = f"{self.first_channel} + {self.rows} * {ROWS}, {self.sizes[1]}"
        return f"fp::stage_places<{pitch}>({room}, {c.sums}, {self.rows}, {factors}, {channels});"

    def factors(self) -> tuple[list[str], str]:
        c = self.c
        assert isinstance(self.halves, ScaledHalves)
        if not self.halves.scales:
            return super().factors()
        last = self.sizes[1] - 1
        first, second = (
            f"({self.pointers[name]} + {c.sample} * {self.sizes[1]})[{c.at}]" for name in self.halves.scales
        )
        return [
            f"const int {c.at} = fp::least({c.channel}, {last});",
            f"const float {c.factor} = {first}, {c.another} = {second};",
        ], f"{c.sum} * {c.factor} * {c.another}"


class ScalingWriter(ChunkWriter, ScaledTiles):
    """Lines of a kernel that makes halves of its tiles itself."""

    plan: ChunkSchedule

    def __init__(self, kernel: Kernel, plan: ChunkSchedule, place: Place) -> None:
        super().__init__(kernel, plan, place)
        assert plan.source is not None
        self.input: Tiles = plan.source
        self.packed = self.c.halves

    def _shared(self) -> Iterable[str]:
        c = self.c
        yield from super()._shared()
        plan = self.plan
        at = plan.weight_bytes + 4 * self.on.staged_floats
        yield f"unsigned char* const {self.packed} = {c.pool} + {at};"
        yield f"float* const {c.tile} = reinterpret_cast<float*>({c.pool} + {at + plan.tile_bytes});"
        yield from self.kept_scales(f"{c.tile} + {plan.channels * self.input.pitch}")

    def _tile_pointers(self) -> Iterable[str]:
        return ()

    def _pack(self) -> list[str]:
        c = self.c
        plan, source, threads = self.plan, self.input, self.plan.threads
        *_, filled = halves_of_place(plan.channels, plan.parts)
        binades = BINADES_BY_PARTS if plan.by_parts else BINADES
        lines = [*self._place_in_input(), f"const auto {c.to} = {self.packed} + {c.i} * {2 * HALVES};"]
        lines.append(
            f"fp::pack_place<{filled}, {plan.parts}, {'false' if plan.by_parts else 'true'}>({c.to}, {plan.layer_places * 2 * HALVES}, {c.tile} + {c.from_}, {source.pitch}, {c.scale});"
        )
        return [
            *self.tile_scale(source.vector, binades),
            "#pragma unroll 2",
            *block(f"for (unsigned {c.i} = threadIdx.x; {c.i} < {self.on.elements}; {c.i} += {threads})", lines),
            "fp::publish_to_products();",
        ]

    def _place_in_input(self) -> Iterable[str]:
        """``from``: where the position of place ``i`` lies in a channel of what was fetched."""
        c = self.c
        on, source = self.on, self.input
        strides = contiguous_strides(source.extent)
        terms = [str(dot(on.origin, strides) - dot(source.origin, strides))]
        for number, here in reversed([*enumerate(coordinates(c.i, on.extent))]):
            if number == len(on.tile) - 1 and on.extent[number] != self.plan.run and not self.plan.neighbours:
                yield f"const unsigned {c.along} = {here};"
                here = f"({c.along} - {c.along} / {self.plan.run} * {self.plan.run - BLOCK})"
            terms.append(f"{here} * {strides[number]}")
        yield f"const unsigned {c.from_} = {' + '.join(terms)};"

    def finite(self, sums: str, loops: Sequence[Loop], test: str = "") -> Iterable[str]:
        """Of finite halves, all sums are: what is not finite is found where halves are made."""
        return ()

    def reductions(self, sums: Sums) -> Iterable[str]:
        """Where one reduction loop suffices, of values that are the same function of each position's sums, these stay in registers."""
        if not self._reduces_registers():
            return super().reductions(sums)
        computed = list(super().reductions(sums.defined))
        return either(self.c.broken, computed, self._reduced_registers(sums))

    def _reduces_registers(self) -> bool:
        kernel = self.kernel
        if len(kernel.reduction_loops) != 1 or kernel.stores or self.on.pair > 1:
            return False
        (reduction_loop,) = kernel.reduction_loops
        values = [value for reduction in reduction_loop for value in reduction.values]
        along = {axis for value in values for axis in self.printer.dataflow.needs(value)} & {*kernel.rows[1:]}
        return not along and all(reduction.op in _EXTREMES for reduction in reduction_loop)

    def _reduced_registers(self, sums: Sums) -> list[str]:
        """A thread has every fourth pair of channels of four positions: `fp::stage_scaled` says which."""
        c = self.c
        kernel, (reduction_loop,), t = self.kernel, self.kernel.reduction_loops, Loop(c.t, 2)
        j = Loop(c.j, 4)
        reduction_loops = ReductionLoops(kernel, self.program, self.printer, j)
        states = [reduction_loops.declared(reduction, "[4]") for reduction in reduction_loop]
        values = [value for reduction in reduction_loop for value in reduction.values]
        (stat,) = [
            each for each in walk(*values) if isinstance(each, ReductionResult) and each.reduction == self.anchor.name
        ]
        outer = reduction_loops.row_scope(values, {kernel.rows[0]: c.sample})
        each = [
            f"const int {c.j} = {c.i} / 2 % 2 * 2 + {t};",
            f"const float {c.sum} = {c.sums}[0][{t}][{self.rows} * {ROWS // 2} + {c.i}] * {c.factor};",
            *outer.lines,
            *reduction_loops.column(outer, c.channel, stat, reduction_loop, ()),
        ]
        row = f"{c.i} / 4 * 8 + {c.lane} % 4 * 2 + {c.i} % 2"
        lines = [
            f"const int {c.row} = {self.rows} * {ROWS} + {row}, {c.channel} = {self.first_channel} + {c.row};",
            f"const float {c.factor} = {c.factors}[{c.row}];",
            *t.over(each),
        ]
        lines[1:] = self.of_result(lines[1:])
        pushed = self.rows.over(Loop(c.i, ROWS // 2).over(lines))
        # Of four threads that share positions, each then has one of these.
        own = []
        for name in map(reduction_loops.state, reduction_loop):
            own += [f"fp::merge_across<1, 4>({name}[{c.j}]);"]
            own += [f"{name}[0] = fp::chosen({c.lane} % 4 == {c.j}, {name}[{c.j}], {name}[0]);"]
        places, inside = self.position(sums.group, f"({c.lane} % 4 * 8 + {c.lane} / 4)")
        axes = dict(zip(kernel.rows, (c.sample, *self.axes), strict=True))
        scope = reduction_loops.row_scope([store.value for store in kernel.row_stores], axes, "0")
        scope.lines += [reduction_loops.stored(scope, store) for store in kernel.row_stores]
        stored = block(f"if ({inside})", scope.lines)
        return [*states, *pushed, *j.over(own), *places, *stored]

    def _staging(self, *, shared: bool = False) -> str:
        c = self.c
        room, pitch = self._room if shared else (c.room, self.on.staged_pitch)
        return f"fp::stage_scaled<{pitch}>({room}, {c.sums}, {self.rows}, {c.factors} + {self.of_iteration}{self.rows} * {ROWS});"
