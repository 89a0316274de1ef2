"""What writers of CUDA kernels with a convolution share: results on their way from sums to memory, and by their definition where sums are not finite.

By the definition, in plain arithmetic, a thread has a position, and computes the channels of it that are laid out at once: the input is loaded once
for all of them, and their weights, which do not wait for each other, by all threads of a warp together.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from fusepass.codegen.ir.convolution import ROWS, Pooling
from fusepass.codegen.ir.expr import Expr, ReductionResult
from fusepass.codegen.ir.program import Reduction, Store
from fusepass.codegen.render.cuda.contraction.convolution.laid_out import (
    Along,
    channels_together,
    pairs,
    store_channels,
    store_neighbours,
    takes_pairs,
)
from fusepass.codegen.render.cuda.contraction.convolution.tiles import (
    Sums,
    TileWriter,
    is_first,
    plus,
    quotient,
    store_own,
)
from fusepass.codegen.render.cuda.contraction.loops import Loop, ReductionLoops
from fusepass.codegen.render.cuda.family import Text
from fusepass.codegen.render.cuda.partials import PositionStates
from fusepass.codegen.render.printer import Scope
from fusepass.codegen.render.spelling import ROLLED, as_float, bare, block, braces, loop, where

GROUP_SLICES = 2  # that a thread has on their way into the tensor core where four warps multiply together


class ConvolutionWriter(TileWriter):
    """Lines of a kernel, its results among them; see `TileWriter`.

    Attributes:
        whole: whether all sums of a tile are computed again where some are.
    """

    whole = False

    def write(self) -> Text:
        """The kernel."""
        raise NotImplementedError

    @functools.cached_property
    def states(self) -> PositionStates | None:
        """What is reduced over positions; None where nothing is."""
        if self.kernel.partials is None:
            return None
        return PositionStates(self.kernel, self.plan, self.tile_count, self.rows, self.printer)

    # ---- sums

    def finite(self, sums: str, loops: Sequence[Loop], test: str = "fp::all_finite") -> Iterable[str]:
        """``broken``, for a warp: whether some of its sums in `sums`, which are those at hand in `loops`, are not finite."""
        c = self.c
        lines = [f"{c.broken} = {c.broken} || !{test}({sums});"]
        for each in reversed(loops):
            lines = each.over(lines)
        yield f"bool {c.broken} = false;"
        yield from lines
        yield f"{c.broken} = __any_sync(0xffffffffu, {c.broken});"

    # ---- results

    def epilogue(self, sums: Sums) -> Iterable[str]:
        """What the kernel's expressions make of the sums: a thread takes neighbouring results, channel by channel or position by position."""
        if not self.kernel.is_pointwise:
            yield from self.reductions(sums)
        elif takes_pairs(self):
            yield from self._pairs(sums)
        elif (width := channels_together(self)) > 1:
            yield from self._over_rows(sums, [*self._repaired(sums), *store_channels(self, sums, width)])
        else:
            yield from self.over_channels(sums, self._stores(), sums.unroll)

    def factors(self) -> tuple[list[str], str]:
        """Lines that find what a sum of channel ``channel``, the ``row``-th of an iteration, is multiplied with; how ``sum`` is."""
        return [], self.c.sum

    def own_staging(self, sums: Sums) -> str:
        """As `Sums.staging`, for `stored_own`."""
        return sums.staging

    def stored_own(self, sums: Sums) -> Iterable[str]:
        """Stores results that are all finite, as they are laid out."""
        return self.epilogue(sums)

    def over_channels(self, sums: Sums, lines: Sequence[str], unroll: str, ahead: Sequence[str] = ()) -> Iterable[str]:
        """`lines` for each result, ``sum``, at ``channel`` and the spatial axes; `ahead` before each position's channels."""
        c = self.c
        row = [
            f"const int {c.channel} = {self.first_channel} + {self.rows} * {ROWS} + {c.row};",
            f"const float {c.sum} = {c.room}[{self.staged}];",
            *lines,
        ]
        row[1:] = self.of_result(row[1:])
        taken = block(f"if ({c.broken})", sums.repair) if sums.repair else []
        positions = self.over_positions(sums, [*taken, *ahead, *Loop(c.row, sums.height).over(row, unroll)])
        yield from self._over_rows(sums, positions)

    def _over_rows(self, sums: Sums, lines: Sequence[str]) -> Iterable[str]:
        """`lines` for 16 channels after another, which are laid out before and reduced behind them."""
        yield from sums.over_rows([*lines, *(self.states.add() if self.states else ())])

    def _pairs(self, sums: Sums) -> Iterable[str]:
        """The same for two neighbours at a time."""
        lines = self._repaired(sums)
        if self.states:
            lines = [*self.over_positions(sums, []), *lines]
        yield from self._over_rows(sums, [*lines, *pairs(self, sums)])

    def vectors(self, sums: Sums, width: int) -> Iterable[str]:
        """The same for `width` neighbours."""
        yield from self._over_rows(sums, [*self._repaired(sums), *store_neighbours(self, sums, width)])

    def along(self, sums: Sums, width: int) -> Iterable[str]:
        """The same where rows along the last axis are reduced; see `cuda.contraction.convolution.laid_out`."""
        along = Along(self, sums)
        yield from along.begin()
        yield from self._over_rows(sums, [*self._repaired(sums), *along.lines(width)])

    def _repaired(self, sums: Sums) -> list[str]:
        """What is not finite in ``room`` is computed again there."""
        lines = [*self._where_inside(sums, sums.repair), "__syncwarp();"]
        return block(f"if ({self.c.broken})", lines) if sums.repair else []

    @property
    def staged(self) -> str:
        """Where a thread's result of a row lies in ``room``."""
        c = self.c
        place = c.lane if self.on.pair == 1 else f"{self.half} * 32 + {c.lane}"
        return f"{c.row} * {self.on.staged_pitch} + {place}"

    def _where_inside(self, sums: Sums, lines: Sequence[str]) -> list[str]:
        places, inside = self.position(sums.group)
        return self.half.over([*places, *block(f"if ({inside})", lines)])

    def over_positions(self, sums: Sums, lines: Sequence[str]) -> list[str]:
        """`lines` for each position of a thread, where it is one of the result."""
        c = self.c
        if self.states is None:
            return self._where_inside(sums, lines)
        places, inside = self.position(sums.group)
        once = f"{c.is_inside} && ({is_first(self.on, self.anchor.spread[-1], c)})" if self.on.pace else c.is_inside
        places += [
            f"const bool {c.is_inside} = {inside};",
            f"{c.inside}[{self.half}] = __ballot_sync(0xffffffffu, {once});",
        ]
        if lines:
            places += block(f"if ({c.is_inside})", lines)
        return [f"unsigned {c.inside}[{self.on.pair}];", *braces(self.half.over(places))]

    # ---- reductions over channels

    def reductions(self, sums: Sums) -> Iterable[str]:
        """The kernel's reduction loops over channels and its stores: a thread has all channels of its positions, one after another."""
        c = self.c
        kernel = self.kernel
        reduction_loops = ReductionLoops(kernel, self.program, self.printer, self.half)
        axes = dict(zip(kernel.rows, (c.sample, *self.axes), strict=True))
        (stat, *_) = [
            node for node in kernel.nodes if isinstance(node, ReductionResult) and node.reduction == self.anchor.name
        ]

        def phase(roots: Sequence[Expr], reduction_loop: Sequence[Reduction], stores: Sequence[Store]) -> list[str]:
            outer = reduction_loops.row_scope(roots, axes)
            inner = reduction_loops.column(outer, c.channel, stat, reduction_loop, stores)
            return braces(self.over_channels(sums, inner, sums.unroll, outer.lines))

        for reduction_loop in kernel.reduction_loops:
            yield from (reduction_loops.declared(reduction, f"[{self.on.pair}]") for reduction in reduction_loop)
            yield from phase([value for each in reduction_loop for value in each.values], reduction_loop, ())
        if kernel.row_stores:
            scope = reduction_loops.row_scope([store.value for store in kernel.row_stores], axes)
            for store in kernel.row_stores:
                scope.lines.append(reduction_loops.stored(scope, store))
            yield from braces(self.over_positions(sums, scope.lines))
        if kernel.stores:
            yield from phase([store.value for store in kernel.stores], (), kernel.stores)

    # ---- where results go

    def _stores(self) -> list[str]:
        c = self.c
        scope = Scope(self.printer, at=dict(zip(self.kernel.rows, (c.sample, c.channel, *self.axes), strict=True)))
        for node in self.kernel.nodes:
            if isinstance(node, ReductionResult):
                scope.bind(node, c.sum, spare=1)
        self.printer.expect(self.kernel.roots)
        for store in self.kernel.stores:
            scope.lines.append(self._store(scope, store))
        if self.kernel.partials is not None:
            value = bare(scope.value(self.kernel.partials.value))
            scope.lines.append(f"{c.room}[{self.staged}] = {value};")
        return scope.lines

    def _store(self, scope: Scope, store: Store) -> str:
        dtype = self.program.buffer(store.buffer).dtype
        if not self.on.pace:
            return scope.stored(store, dtype)
        value, target = scope.converted(store.value, dtype), self.pointers[store.buffer]
        return store_own(target, scope.index(store.index), value, self.index_type, dtype.nbytes, self.c)


def repair(writer: ConvolutionWriter, height: int = ROWS) -> Iterable[str]:
    """Computes again what is not finite among a position's results, `height` channels of which are laid out: numbers beyond the range have no
    two TF32 parts.

    The lines are part of `ConvolutionWriter.epilogue`; ``broken`` says for a warp whether there is something to do.
    """
    return _Definition(writer, height).lines()


class _Definition:
    """Writes them, for a position and the ``rows`` channels from ``from_channel`` on that are left of the result."""

    def __init__(self, writer: ConvolutionWriter, height: int) -> None:
        self.writer, self.height = writer, height
        self.cut = writer.outs % height > 0  # there may be fewer than are laid out

    def lines(self) -> Iterable[str]:
        c = self.writer.c
        writer, pooled = self.writer, self.writer.anchor.pooled
        at = f"{c.room}[{writer.staged}]"
        found, result = (self._sums(), c.plain) if pooled is None else (self._largest(pooled), c.largest)
        yield f"const int {c.from_channel} = {writer.first_channel} + {writer.rows} * {ROWS}, {c.rows} = {writer.end_channel} - {c.from_channel};"
        if writer.whole or pooled is not None:  # the largest may hide what is not finite
            yield from block(f"if ({c.rows} > 0)", [*found, *self._each(f"{at} = {result}[{c.row}];")])
            return
        test = f"{at} * 0.0f != 0.0f"
        yield f"bool {c.wanted} = false;"
        yield from self._each(f"{c.wanted} = {c.wanted} || {test};")
        yield from block(
            f"if ({c.wanted} && {c.rows} > 0)", [*found, *self._each(f"if ({test}) {at} = {result}[{c.row}];")]
        )

    def _each(self, line: str) -> list[str]:
        """`line` for each ``row``, if it is a channel of the result."""
        c = self.writer.c
        return Loop(c.row, self.height).over(where([line], f"{c.row} < {c.rows}" if self.cut else ""))

    def _largest(self, pooled: Pooling) -> list[str]:
        """The largest of the results at all phases of the position in scope, as ``largest``."""
        c = self.writer.c
        writer = self.writer
        bias = f" + {writer.pointers[pooled.bias]}[{c.from_channel} + {c.row}]" if pooled.bias else ""
        lines = [
            *self._sums(),
            *self._each(f"{c.largest}[{c.row}] = fp::maximum({c.largest}[{c.row}], {c.plain}[{c.row}]{bias});"),
        ]
        for letter, size in reversed(list(zip(writer.letters, writer.anchor.stride, strict=True))):
            lines = loop(c.named(f"r{letter}"), size, lines, ROLLED)
        begin = Loop(c.row, self.height).over([f"{c.largest}[{c.row}] = fp::Limits<float>::lowest;"])
        return [f"float {c.largest}[{self.height}];", *begin, *lines]

    def _sums(self) -> list[str]:
        """The sums of the products for the results at the coordinates in scope, as ``plain``."""
        c = self.writer.c
        writer, source, weight = self.writer, self.writer.source, self.writer.weight
        out, across = (1, 0) if writer.anchor.transposed else (0, 1)
        channel = writer.of_group(c.c, writer.ins)
        where = [f"{c.sample} * {source.strides[0]}", f"{writer.index_type}({channel}) * {source.strides[1]}"]
        weights = [f"{c.from_channel} * {weight.strides[out]}", f"{c.c} * {weight.strides[across]}"]
        levels = [(c.c, writer.ins, list[str]())]
        real = []
        for number, letter in enumerate(writer.letters):
            tap, place = c.named(f"k{letter}"), c.named(f"i{letter}")
            levels.append((tap, weight.shape[2 + number], [*_place(writer, number, tap, place)]))
            real.append(f"{place} >= 0 && {place} < {source.shape[2 + number]}")
            where.append(f"{place} * {source.strides[2 + number]}")
            weights.append(f"{tap} * {weight.strides[2 + number]}")
        x = as_float(f"{writer.pointers[source.name]}[{' + '.join(where)}]", source.dtype)
        factor = as_float(f"{c.weight}[{c.row} * {weight.strides[out]}]", weight.dtype)
        lines = [
            f"const float {c.number} = {' && '.join(real)} ? {x} : 0.0f;",
            f"const auto* const {c.weight} = {writer.pointers[weight.name]} + ({' + '.join(weights)}{writer.group_weights});",
            *self._each(f"{c.plain}[{c.row}] = fp::fma({c.number}, {factor}, {c.plain}[{c.row}]);"),
        ]
        for variable, count, before in reversed(levels):
            lines = loop(variable, count, [*before, *lines], ROLLED)
        return [f"float {c.plain}[{self.height}] = {{}};", *lines]


def _place(writer: ConvolutionWriter, number: int, tap: str, place: str) -> Iterable[str]:
    """Where a tap reads along a spatial axis, for the result at the coordinates in scope; skips it where it reads nothing."""
    anchor, axis, whole = writer.anchor, writer.axes[number], writer.index_type
    stride, padding, dilation = (each[number] for each in (anchor.stride, anchor.padding, anchor.dilation))
    reach = tap if dilation == 1 else f"{tap} * {dilation}"
    if not anchor.transposed:
        far = axis if stride == 1 else f"{axis} * {stride}"
        yield f"const {whole} {place} = {far}{plus(-padding)} + {reach};"
        return
    letter = writer.letters[number]
    scaled = writer.c.named(f"i{letter}s")
    at = axis if anchor.pooled is None else f"{axis} * {stride} + {writer.c.named(f'r{letter}')}"
    yield f"const {whole} {scaled} = {at}{plus(padding)} - {reach};"
    if stride > 1:
        yield f"if ({scaled} % {stride} != 0) continue;"
    yield f"const {whole} {place} = {quotient(scaled, stride)};"
