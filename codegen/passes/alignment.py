"""A kernel that reads what another one writes, with axes that lie along the other's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from fusepass.codegen.ir.expr import Builder
from fusepass.codegen.ir.index import Axis, Index, axis_index, delinearize
from fusepass.codegen.ir.program import Kernel, Store
from fusepass.codegen.passes.axes import split_axis


@dataclass(frozen=True)
class Aligned:
    """A kernel that reads what another one writes, each element once.

    Attributes:
        kernel: with each of its axes along one of the other's.
        places: its axes in terms of the other's.
        along: for each of the other's axes, its own, slowest first.
    """

    kernel: Kernel
    places: Mapping[Axis, Index]
    along: Mapping[Axis, tuple[Axis, ...]]


def align(reader: Kernel, builder: Builder, read: Index, anchored: Kernel, store: Store) -> Aligned | None:
    """`reader`, which loads from what `store` of `anchored` writes at the index `read`, with axes that lie along its axes."""
    steps = {axis: store.index.stride(axis) or 0 for axis in anchored.rows if axis.size > 1}
    if not all(steps.values()):
        return None
    waiting = [axis for axis in (*reader.rows, *reader.cols) if axis.size > 1]
    strides = {axis: read.stride(axis) or 0 for axis in waiting}
    while waiting:
        axis = waiting.pop()
        stride = strides[axis]
        if stride <= 0:
            return None
        inside = (step for step in steps.values() if stride < step < stride * axis.size)
        step = next(inside, None)
        if step is None:
            continue
        if step % stride or stride * axis.size % step:
            return None
        reader = split_axis(reader, builder, axis, step // stride)
        outer, inner = Axis(f"{axis.name}o", stride * axis.size // step), Axis(f"{axis.name}i", step // stride)
        read = read.substitute({axis: axis_index(outer) * inner.size + axis_index(inner)})
        strides |= {outer: step, inner: stride}
        waiting += [outer, inner]
    own = [axis for axis in (*reader.rows, *reader.cols) if axis.size > 1]
    along: dict[Axis, tuple[Axis, ...]] = dict.fromkeys(anchored.rows, ())
    places: dict[Axis, Index] = {}
    for axis, step in steps.items():
        within = sorted(
            (each for each in own if step <= strides[each] < step * axis.size), key=lambda each: -strides[each]
        )
        along[axis] = tuple(within)
        if prod(each.size for each in within) != axis.size:
            return None
        places |= zip(within, delinearize(axis_index(axis), [each.size for each in within]), strict=True)
    if set(places) != set(own) or read.substitute(places) != store.index:
        return None
    return Aligned(reader, places, along)
