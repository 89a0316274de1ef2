"""Axes in the shape that loops want: split until division disappears, ordered by memory, merged where nothing tells them apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, permutations
from math import inf, prod

from fusepass.codegen.ir.expr import Builder
from fusepass.codegen.ir.index import Axis, Index, axis_index
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.ir.transpose import pace
from fusepass.codegen.passes.rewrite import divisions, indices, rewrite_kernel

_FAR = 32  # elements between neighbours, from which on each lies in lines of its own
_LARGE = 4  # times as many bytes as another buffer has: its order counts, though it does not have all axes


def each_place(kernel: Kernel, builder: Builder, axis: Axis) -> Kernel:
    """`kernel` without the row axis `axis`: its stores once for each place there."""
    rows = tuple(row for row in kernel.rows if row != axis)
    made = [rewrite_kernel(kernel, builder, {axis: Index(place)}) for place in range(axis.size)]
    return replace(kernel, rows=rows, stores=tuple(store for each in made for store in each.stores))


def split_axis(kernel: Kernel, builder: Builder, axis: Axis, inner: int) -> Kernel:
    """`axis` as two axes, the inner of size `inner`; without the last points where that does not divide the axis' size."""
    parts = (Axis(f"{axis.name}o", axis.size // inner), Axis(f"{axis.name}i", inner))
    whole = axis_index(parts[0]) * inner + axis_index(parts[1])
    fresh = rewrite_kernel(kernel, builder, {axis: whole})
    return replace(fresh, rows=_replaced(kernel.rows, axis, parts), cols=_replaced(kernel.cols, axis, parts))


def _replaced(axes: tuple[Axis, ...], axis: Axis, parts: tuple[Axis, ...]) -> tuple[Axis, ...]:
    return tuple(part for a in axes for part in (parts if a == axis else (a,)))


def split_axes(kernel: Kernel, builder: Builder) -> Kernel:
    """Split axes whose quotients and remainders by a divisor of their size are used, so that those become axes themselves."""
    while (found := _splittable(kernel)) is not None:
        kernel = split_axis(kernel, builder, *found)
    return kernel


def _splittable(kernel: Kernel) -> tuple[Axis, int] | None:
    loops = {*kernel.rows, *kernel.cols}
    for index in indices(kernel):
        for atom in divisions(index):
            terms = atom.index.terms
            if atom.index.constant or len(terms) != 1:
                continue
            axis, step = terms[0]
            if not isinstance(axis, Axis) or axis not in loops or atom.divisor % step:
                continue
            inner = atom.divisor // step
            if 1 < inner < axis.size and axis.size % inner == 0:
                return axis, inner
    return None


def order_and_merge(program: Program, builder: Builder) -> Program:
    """Every kernel with rows and cols sorted so that the last axis is the fastest in memory, and merged where possible."""
    return replace(program, kernels=tuple(_tidy(program, kernel, builder) for kernel in program.kernels))


def _tidy(program: Program, kernel: Kernel, builder: Builder) -> Kernel:
    if kernel.anchor is not None or kernel.partials is not None:
        return kernel  # its rows are the dimensions of the anchor's result, or sample, channel and positions
    kernel = _transposing(program, kernel, builder)
    # A scattered store costs more than a scattered load; but what lies along the columns is exchanged in tiles of rows.
    stores = [(store.buffer, store.index) for store in (*kernel.stores, *kernel.row_stores)]
    loads = [(load.buffer, load.index) for load in kernel.loads()]
    read, written = read_and_written_along(program, kernel)
    by_rows = [*loads, *stores] if read in kernel.rows and written in kernel.cols else [*stores, *loads]
    rows = _ordered(program, by_rows, kernel.rows)
    kernel = replace(kernel, rows=rows, cols=_ordered(program, [*stores, *loads], kernel.cols))
    merged = _merge_once(kernel, builder)
    while merged is not None:
        kernel, merged = merged, _merge_once(merged, builder)
    return kernel


def _transposing(program: Program, kernel: Kernel, builder: Builder) -> Kernel:
    """A pointwise `kernel` with axes split where what it reads lies along a part of one, far apart along what it writes: so tiles bring
    both together.
    """
    read, written = read_and_written_along(program, kernel)
    if kernel.reduction_loops or read is not None or written is None:
        return kernel
    large = max(kernel.loads(), key=lambda load: program.buffer(load.buffer).nbytes, default=None)
    apart = split_axes(kernel, builder) if large and (large.index.stride(written) or 0) >= _FAR else kernel
    return kernel if read_and_written_along(program, apart)[0] is None else apart


def read_and_written_along(program: Program, kernel: Kernel) -> tuple[Axis | None, Axis | None]:
    """The axes along which the largest of what `kernel` reads, and of what it writes per element, is contiguous.

    None where there is no such access or axis, or what is read is small.
    """
    loads = [(load.buffer, load.index) for load in kernel.loads()]
    large = [pair for pair in loads if program.buffer(pair[0]).numel >= kernel.row_count * kernel.col_count // 4]
    stores = [(store.buffer, store.index) for store in kernel.stores]
    axes = [axis for axis in (*kernel.rows, *kernel.cols) if axis.size > 1]

    def along(accesses: list[tuple[str, Index]]) -> Axis | None:
        if not accesses:
            return None
        _, index = max(accesses, key=lambda pair: program.buffer(pair[0]).nbytes)
        return next((axis for axis in axes if index.stride(axis) == 1), None)

    return along(large), along(stores)


def nearest(program: Program, kernel: Kernel) -> Axis | None:
    """The axis along which the largest of what `kernel` reads has neighbours, or of its elements those that are read."""
    axes = [axis for axis in (*kernel.rows, *kernel.cols) if axis.size > 1]
    load = max(kernel.loads(), key=lambda load: program.buffer(load.buffer).nbytes, default=None)
    steps = {} if load is None else {axis: pace(load.index, axis) for axis in axes}
    return min((axis for axis in axes if steps.get(axis, inf) < inf), key=steps.__getitem__, default=None)


def _ordered(program: Program, accesses: Sequence[tuple[str, Index]], axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """`axes` of more than one point, slowest in memory first; one axis is kept if all have one point.

    The largest of the `accesses`, each a buffer and an index, decides; the first of those that are as large.
    """
    kept = [axis for axis in axes if axis.size != 1] or list(axes[:1])
    accesses = sorted(accesses, key=lambda pair: -program.buffer(pair[0]).nbytes)

    def key(axis: Axis) -> tuple[int, ...]:
        return tuple(-abs(index.stride(axis) or 0) if index.stride(axis) is not None else -1 for _, index in accesses)

    # A buffer that does not depend on an axis says nothing about its place; the next largest decides.
    for name, index in accesses:
        if all(index.stride(axis) for axis in kept):
            if _LARGE * program.buffer(name).nbytes < program.buffer(accesses[0][0]).nbytes:
                return _inserted(accesses, kept)
            return tuple(sorted(kept, key=lambda axis: (-abs(index.stride(axis) or 0), key(axis))))
    return tuple(sorted(kept, key=key))


def _inserted(accesses: Sequence[tuple[str, Index]], axes: Sequence[Axis]) -> tuple[Axis, ...]:
    """`axes` as the first of the `accesses` has them, those that it has; each other one as the next that has it puts it among these."""
    placed: list[Axis] = []
    for _, index in accesses:
        steps = {axis: abs(index.stride(axis) or 0) for axis in axes}
        for axis in sorted(
            (axis for axis in axes if steps[axis] and axis not in placed), key=lambda axis: -steps[axis]
        ):
            nearer = (number for number, other in enumerate(placed) if 0 < steps[other] < steps[axis])
            placed.insert(next(nearer, len(placed)), axis)
    return tuple(placed)


def _merge_once(kernel: Kernel, builder: Builder) -> Kernel | None:
    for axes in (kernel.rows, kernel.cols):
        for outer, inner in pairwise(axes):
            merged = merged_axes(kernel, builder, outer, inner)
            if merged is not None:
                return merged
    return None


def merge_columns(kernel: Kernel, builder: Builder) -> Kernel:
    """`kernel` with one axis in place of columns that nothing tells apart, in whatever order they are."""
    merged = _merge_any(kernel, builder, kernel.cols)
    return kernel if merged is None else merge_columns(merged, builder)


def merge_rows(kernel: Kernel, builder: Builder) -> Kernel:
    """The same of rows."""
    merged = _merge_any(kernel, builder, kernel.rows)
    return kernel if merged is None else merge_rows(merged, builder)


def _merge_any(kernel: Kernel, builder: Builder, axes: Sequence[Axis]) -> Kernel | None:
    pairs = (merged_axes(kernel, builder, outer, inner) for outer, inner in permutations(axes, 2))
    return next((merged for merged in pairs if merged is not None), None)


def merged_axes(kernel: Kernel, builder: Builder, outer: Axis, inner: Axis) -> Kernel | None:
    """`kernel` with one axis in place of two rows or two columns; None where something tells them apart."""
    if not all(_compatible(index, outer, inner) for index in indices(kernel)):
        return None
    both = Axis(f"{outer.name}_{inner.name}", outer.size * inner.size)
    flat = axis_index(both)
    # Where indices are compatible, outer * |inner| + inner only ever appears as a whole.
    fresh = rewrite_kernel(kernel, builder, {inner: flat, outer: Index()})
    return replace(fresh, rows=_joined(kernel.rows, outer, inner, both), cols=_joined(kernel.cols, outer, inner, both))


def _compatible(index: Index, outer: Axis, inner: Axis) -> bool:
    low, high = index.stride(inner), index.stride(outer)
    return low is not None and high == low * inner.size


def _joined(axes: tuple[Axis, ...], outer: Axis, inner: Axis, both: Axis) -> tuple[Axis, ...]:
    return tuple(both if axis == outer else axis for axis in axes if axis != inner)


def rename_axes(kernel: Kernel, builder: Builder, prefix: str = "") -> Kernel:
    """Short, stable names: ``i0, i1, ...`` for rows and ``j0, j1, ...`` for cols."""
    names = {
        axis: Axis(f"{prefix}{letter}{number}", axis.size)
        for letter, axes in (("i", kernel.rows), ("j", kernel.cols))
        for number, axis in enumerate(axes)
    }
    fresh = rewrite_kernel(kernel, builder, {old: axis_index(new) for old, new in names.items()})
    return replace(
        fresh, rows=tuple(names[axis] for axis in kernel.rows), cols=tuple(names[axis] for axis in kernel.cols)
    )


def count(axes: tuple[Axis, ...]) -> int:
    """Number of points of `axes`."""
    return prod(axis.size for axis in axes)
