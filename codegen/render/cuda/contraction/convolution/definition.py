"""Results of a convolution by its definition, in plain arithmetic: for sums that are not finite.

A thread has a position, and computes the channels of it that are laid out at once: the input is loaded once for all of them, and their
weights, which do not wait for each other, by all threads of a warp together.
"""

from __future__ import annotations

from collections.abc import Iterable

from fusepass.codegen.ir.convolution import ROWS, Pooling
from fusepass.codegen.render.cuda.contraction.convolution.results import ConvolutionWriter
from fusepass.codegen.render.cuda.contraction.convolution.tiles import plus, quotient
from fusepass.codegen.render.cuda.contraction.loop import Loop
from fusepass.codegen.render.spelling import as_float, block

_ONCE = "#pragma unroll 1"


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
        return Loop(c.row, self.height).over(block(f"if ({c.row} < {c.rows})", [line]) if self.cut else [line])

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
            phase = c.named(f"r{letter}")
            lines = [_ONCE, *block(f"for (int {phase} = 0; {phase} < {size}; ++{phase})", lines)]
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
        levels = [(f"for (int {c.c} = 0; {c.c} < {writer.ins}; ++{c.c})", list[str]())]
        real = []
        for number, letter in enumerate(writer.letters):
            tap, place = c.named(f"k{letter}"), c.named(f"i{letter}")
            head = f"for (int {tap} = 0; {tap} < {weight.shape[2 + number]}; ++{tap})"
            levels.append((head, [*_place(writer, number, tap, place)]))
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
        for head, before in reversed(levels):
            lines = [_ONCE, *block(head, [*before, *lines])]
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
