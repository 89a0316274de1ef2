"""Single results of a convolution by its definition, in plain arithmetic: for sums that are not finite."""

from __future__ import annotations

from collections.abc import Iterable

from fusepass.codegen.ir.convolution import ROWS, Pooling
from fusepass.codegen.render.cuda_convolution import ConvolutionWriter
from fusepass.codegen.render.cuda_input import plus, quotient
from fusepass.codegen.render.spelling import block

_ONCE = "#pragma unroll 1"


def repair(writer: ConvolutionWriter) -> Iterable[str]:
    """Computes again what is not finite among a position's results: numbers beyond the range have no two TF32 parts.

    The lines are part of `ConvolutionWriter.epilogue`; ``$broken`` says for a warp whether there is something to do.
    """
    at = f"$room[$row * {writer.on.staged_pitch} + $place]"
    pooled = writer.anchor.pooled
    there = f"$channel >= {writer.end_channel}"
    if pooled is None:
        found = ["float $plain = 0.0f;", *_plain_sum(writer), f"{at} = $plain;"]
        there += "" if writer.whole else f" || {at} * 0.0f == 0.0f"
    else:  # the largest may hide what is not finite
        found = [*_largest(writer, pooled), f"{at} = $largest;"]
    lines = [f"const int $channel = $first_channel + $m * {ROWS} + $row;", f"if ({there}) continue;", *found]
    yield _ONCE
    yield from block(f"for (int $row = 0; $row < {ROWS}; ++$row)", lines)


def _largest(writer: ConvolutionWriter, pooled: Pooling) -> list[str]:
    """The largest of the results at all phases of the position in scope, as ``$largest``."""
    bias = f" + {writer.pointers[pooled.bias]}[$channel]" if pooled.bias else ""
    lines = ["float $plain = 0.0f;", *_plain_sum(writer), f"$largest = fp::maximum($largest, $plain{bias});"]
    for axis, size in reversed(list(zip(writer.axes, writer.anchor.stride, strict=True))):
        lines = [_ONCE, *block(f"for (int $r{axis[1:]} = 0; $r{axis[1:]} < {size}; ++$r{axis[1:]})", lines)]
    return ["float $largest = fp::Limits<float>::lowest;", *lines]


def _plain_sum(writer: ConvolutionWriter) -> list[str]:
    """Adds the products for the result at the coordinates in scope to ``$plain``."""
    anchor, source, weight = writer.anchor, writer.source, writer.weight
    out, across = (1, 0) if anchor.transposed else (0, 1)
    channel = writer.of_group("$c", writer.ins)
    where = [f"$sample * {source.strides[0]}", f"{writer.index_type}({channel}) * {source.strides[1]}"]
    weights = [f"$channel * {weight.strides[out]}", f"$c * {weight.strides[across]}"]
    lines: list[str] = []
    real = []
    for number, axis in enumerate(writer.axes):
        tap, place = f"$k{axis[1:]}", f"$i{axis[1:]}"
        lines += _place(writer, number, tap, place)
        real.append(f"{place} >= 0 && {place} < {source.shape[2 + number]}")
        where.append(f"{place} * {source.strides[2 + number]}")
        weights.append(f"{tap} * {weight.strides[2 + number]}")
    x = f"{writer.pointers[source.name]}[{' + '.join(where)}]"
    lines.append(f"const float $x = {' && '.join(real)} ? {x} : 0.0f;")
    lines.append(f"$plain += $x * {writer.pointers[weight.name]}[{' + '.join(weights)}{writer.group_weights}];")
    loops = [("$c", writer.ins)]
    loops += [(f"$k{axis[1:]}", size) for axis, size in zip(writer.axes, weight.shape[2:], strict=True)]
    for variable, size in reversed(loops):
        lines = [_ONCE, *block(f"for (int {variable} = 0; {variable} < {size}; ++{variable})", lines)]
    return lines


def _place(writer: ConvolutionWriter, number: int, tap: str, place: str) -> Iterable[str]:
    """Where a tap reads along a spatial axis, for the result at the coordinates in scope; skips it where it reads nothing."""
    anchor, axis, whole = writer.anchor, writer.axes[number], writer.index_type
    stride, padding, dilation = (each[number] for each in (anchor.stride, anchor.padding, anchor.dilation))
    reach = tap if dilation == 1 else f"{tap} * {dilation}"
    if not anchor.transposed:
        far = axis if stride == 1 else f"{axis} * {stride}"
        yield f"const {whole} {place} = {far}{plus(-padding)} + {reach};"
        return
    at = axis if anchor.pooled is None else f"{axis} * {stride} + $r{axis[1:]}"
    yield f"const {whole} {place}s = {at}{plus(padding)} - {reach};"
    if stride > 1:
        yield f"if ({place}s % {stride} != 0) continue;"
    yield f"const {whole} {place} = {quotient(f'{place}s', stride)};"
