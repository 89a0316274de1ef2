"""A convolution and an average over windows of its result as one convolution."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod

from torch import fx

from fusepass.patterns.analysis.geometry import Axis, Convolution, Geometry, Window
from fusepass.patterns.matcher import Declined
from fusepass.patterns.rules.builder import Builder, shape_of

_FEW = 4
"""So many weights are added one by one, which fuses with what joins the sums."""


_MOST_TERMS = 300
"""Products up to which one sum of all of them is about as exact as eager's average of shorter sums. Added one after
another, n numbers of one sign err by some 3.4e-8 sqrt(n / 3) of their sum in float32: 3.4e-7 for 300."""


@dataclass(frozen=True)
class Composed:
    """One axis of the convolution that gives the sums over windows.

    Attributes:
        taps: for each of its weights the original weights that add up to it.
        stride, dilation: of the convolution.
        before, after: how far it reads over the input's ends; less than 0 where it does not read all.
    """

    taps: tuple[range, ...]
    stride: int
    dilation: int
    before: int
    after: int

    @staticmethod
    def of(axis: Axis, window: Window, count: int) -> Composed:
        """The sums over `count` windows of the results along `axis`.

        Raises:
            Declined: it would read what the original does not, or would not be a convolution.
        """
        return _of_transposed(axis, window, count) if axis.transposed else _of_plain(axis, window, count)


def _of_plain(axis: Axis, window: Window, count: int) -> Composed:
    """Weight ``k`` at place ``q`` of a window reads ``q * stride + k * dilation`` behind the window's start."""
    grid = gcd(axis.stride, axis.dilation)
    last = (window.size - 1) * axis.stride + (axis.kernel - 1) * axis.dilation
    taps = tuple(
        _progression(k for k in range(axis.kernel) if _inside(place - k * axis.dilation, axis.stride, window.size))
        for place in range(0, last + 1, grid)
    )
    stride = window.stride * axis.stride
    after = (count - 1) * stride + last - axis.padding - (axis.extent - 1)
    return Composed(taps, stride, grid, axis.padding, after)


def _of_transposed(axis: Axis, window: Window, count: int) -> Composed:
    """Weight ``k`` adds element ``i`` to ``i * stride + k * dilation - padding``.

    Where windows advance by whole strides, the window ``u`` at its place ``q`` holds such elements ``i`` that
    ``i = u * (window stride / stride) + (q + padding - k * dilation) / stride``.
    """
    if window.stride % axis.stride:
        raise Declined("the windows of the pool do not advance by strides of the transposed convolution")
    offsets = {
        (q + axis.padding - k * axis.dilation) // axis.stride
        for q in range(window.size)
        for k in range(axis.kernel)
        if (q + axis.padding - k * axis.dilation) % axis.stride == 0
    }
    if not offsets:
        raise Declined("the windows hold nothing")
    low, high = min(offsets), max(offsets)
    taps = tuple(
        _progression(
            k for k in range(axis.kernel) if 0 <= j * axis.stride + k * axis.dilation - axis.padding < window.size
        )
        for j in range(low, high + 1)
    )
    stride = window.stride // axis.stride
    return Composed(taps, stride, 1, -low, (count - 1) * stride + high - (axis.extent - 1))


def _inside(offset: int, stride: int, size: int) -> bool:
    return offset % stride == 0 and 0 <= offset // stride < size


def _progression(numbers: Iterable[int]) -> range:
    """Numbers with equal differences as a range.

    Raises:
        Declined: there are none: nothing is read there.
    """
    found = list(numbers)
    if not found:
        raise Declined("it would read elements that the original does not read")
    step = found[1] - found[0] if len(found) > 1 else 1
    return range(found[0], found[-1] + 1, step)


def composed_convolution(build: Builder, call: Convolution, windows: Mapping[int, Window], scale: float) -> fx.Node:
    """``scale`` times the sums over `windows`, by spatial axis, of the results of `call` without its bias.

    Raises:
        Declined: there is no such convolution.
    """
    out = call.shape[2:]
    identity = Window(1, 1)
    chosen = {axis: windows.get(axis, identity) for axis in range(call.rank)}
    counts = {axis: (out[axis] - window.size) // window.stride + 1 for axis, window in chosen.items()}
    axes = [Composed.of(call.axis(axis), window, counts[axis]) for axis, window in chosen.items()]
    if shape_of(call.x)[1] // call.geometry.groups * prod(len(how.taps) for how in axes) > _MOST_TERMS:
        raise Declined("one sum of so many products errs more than an average of shorter ones")
    weight, x, padding = _plain_weight(build, call), call.x, []
    for axis, how in enumerate(axes):
        weight = _gathered(build, weight, 2 + axis, how.taps)
        x, inside = _bordered(build, x, 2 + axis, how, counts[axis])
        padding.append(inside)
    geometry = Geometry(
        stride=tuple(how.stride for how in axes),
        padding=tuple(padding),
        dilation=tuple(how.dilation for how in axes),
        transposed=False,
        output_padding=(0,) * call.rank,
        groups=call.geometry.groups,
    )
    return build.precise_convolution(x, build.scale(weight, scale), geometry)


def _plain_weight(build: Builder, call: Convolution) -> fx.Node:
    """The weight as ``[out, in / groups, *kernel]``."""
    if not call.geometry.transposed:
        return call.weight
    groups, (inputs, outputs, *kernel) = call.geometry.groups, shape_of(call.weight)
    weight = build.view(call.weight, (groups, inputs // groups, outputs, *kernel))
    weight = build.permute(weight, [0, 2, 1, *range(3, 3 + len(kernel))])
    return build.view(weight, (groups * outputs, inputs // groups, *kernel))


def _gathered(build: Builder, weight: fx.Node, dim: int, taps: Sequence[range]) -> fx.Node:
    """Along `dim` the sums of the weights that `taps` name."""
    if list(taps) == [range(tap, tap + 1) for tap in range(shape_of(weight)[dim])]:
        return weight
    return build.cat([_added(build, weight, dim, part) for part in taps], dim)


def _added(build: Builder, weight: fx.Node, dim: int, part: range) -> fx.Node:
    if len(part) > _FEW:
        return build.sum(build.slice(weight, dim, part), [dim])
    total = build.slice(weight, dim, part[:1])
    for tap in part[1:]:
        total = build.add(total, build.slice(weight, dim, range(tap, tap + 1)))
    return total


def _bordered(build: Builder, x: fx.Node, dim: int, how: Composed, count: int) -> tuple[fx.Node, int]:
    """`x` as the convolution needs it along `dim` to give `count` results, and the zeros that it adds itself.

    Raises:
        Declined: nothing of `x` is read.
    """
    extent, reach = shape_of(x)[dim], how.dilation * (len(how.taps) - 1) + 1
    if how.before >= 0 and (extent + 2 * how.before - reach) // how.stride + 1 == count:
        return x, how.before
    part = range(max(0, -how.before), extent + min(0, how.after))
    if not part:
        raise Declined("the windows hold nothing of the input")
    before, after = max(0, how.before), max(0, how.after)
    inside = min(before, after)
    return build.pad(build.slice(x, dim, part), dim, before - inside, after - inside), inside
