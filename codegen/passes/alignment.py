"""A kernel that reads what another one writes, with axes that lie along the other's, or along the dimensions of what it reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from fusepass.codegen.ir.expr import Builder, Load
from fusepass.codegen.ir.index import Axis, Index, axis_index, delinearize, linear
from fusepass.codegen.ir.program import Buffer, Kernel, Store
from fusepass.codegen.passes.axes import merged_axes, split_axis


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


def with_whole_dimensions(reader: Kernel, builder: Builder, result: Buffer) -> Kernel:
    """`reader` with one axis where several walk a dimension of `result` together, if nothing tells them apart."""
    load = next(load for load in reader.loads() if load.buffer == result.name)
    for size, stride in zip(result.shape, result.strides, strict=True):
        inner = next((axis for axis in reader.rows if axis.size != 1 and load.index.stride(axis) == stride), None)
        if inner is None or inner.size == size:
            continue
        above = stride * inner.size
        outer = next((axis for axis in reader.rows if axis.size != 1 and load.index.stride(axis) == above), None)
        merged = outer and size % (outer.size * inner.size) == 0 and merged_axes(reader, builder, outer, inner)
        if merged:
            return with_whole_dimensions(merged, builder, result)
    return reader


def dimensions_of(reader: Kernel, load: Load, result: Buffer) -> tuple[Axis, ...] | None:
    """The axes of `reader` in the order of the dimensions of `result`, if `load` takes each element at one point."""
    unused = [axis for axis in (*reader.rows, *reader.cols) if axis.size != 1]
    rows = []
    for number, (size, stride) in enumerate(zip(result.shape, result.strides, strict=True)):
        found = next((axis for axis in unused if axis.size == size and load.index.stride(axis) == stride), None)
        if size == 1:
            rows.append(Axis(f"one{number}", 1))
        elif found is None:
            return None
        else:
            unused.remove(found)
            rows.append(found)
    exact = not unused and load.index == linear([axis_index(axis) for axis in rows], result.strides)
    return tuple(rows) if exact else None
