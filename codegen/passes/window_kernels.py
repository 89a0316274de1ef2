"""Windows that are reduced get a kernel of their own, where output tiles take less time than reducing them point by point where rows are.

What reduces over their positions is then reduced in that kernel, as behind a depthwise convolution. Where a kernel stores what others
compute from the same windows anyway, they read it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from fusepass.codegen.ir.expr import Builder, Expr, Load, ReductionResult, Window, walk
from fusepass.codegen.ir.index import Axis, Index, flat_index
from fusepass.codegen.ir.program import Kernel, Program, Store
from fusepass.codegen.passes.alignment import align
from fusepass.codegen.passes.axes import merged_axes
from fusepass.codegen.passes.fuse import drop_unused
from fusepass.codegen.passes.partials import Pieces, reduce_positions
from fusepass.codegen.passes.rematerialisation import rematerialise
from fusepass.codegen.passes.rewrite import rewrite_kernel
from fusepass.codegen.passes.splitter import Splitter, forward
from fusepass.codegen.passes.stored import readable

Seconds = Callable[[Program, Collection[Kernel]], float]
"""How long some kernels of a program take together by estimate."""

_CLEARLY = 0.9  # of a time by estimate that another one must be at most to be less


def separate_windows(program: Program, builder: Builder, pieces: Pieces, seconds: Seconds | None) -> Program:
    """`program` with kernels of their own for windows that are reduced, where these take clearly less time; `seconds` is None where there are no
    output tiles, and windows are only loaded from where they are stored."""
    for position, kernel in enumerate(program.kernels):
        if not kernel.reduction_loops or not _is_plain(kernel) or not _windows(kernel):
            continue
        loaded = _loaded(program, builder, position)
        made = loaded or (_computed(program, builder, position) if seconds is not None else None)
        if made is None:
            continue
        found, before, after = _fastest(program, _ways(*made, builder, pieces), seconds)
        if loaded or after < _CLEARLY * before:
            return separate_windows(found, builder, pieces, seconds)
    return program


def _ways(program: Program, position: int, builder: Builder, pieces: Pieces) -> list[Program]:
    """`program` as it is, with what reduces over positions of the windows at `position` in their kernel, and with these computed twice for it."""
    reduced = reduce_positions(program, builder, position, pieces)
    twice = rematerialise(program, builder, position, pieces, lambda *_: True)
    return [program, *filter(None, (reduced, twice))]


def _fastest(program: Program, ways: Sequence[Program], seconds: Seconds | None) -> tuple[Program, float, float]:
    """The fastest of several `ways`, how long what it replaces of `program` takes, and how long it takes; the first one where nothing is known."""
    if seconds is None:
        return ways[0], 0.0, 0.0
    found = []
    for way in ways:
        old = [kernel for kernel in program.kernels if kernel not in way.kernels]
        new = [kernel for kernel in way.kernels if kernel not in program.kernels]
        found.append((way, seconds(program, old), seconds(way, new)))
    return min(found, key=lambda each: each[2] - each[1])


def _is_plain(kernel: Kernel) -> bool:
    return kernel.anchor is None and kernel.partials is None and not kernel.scans


def _windows(kernel: Kernel) -> list[Window]:
    """The windows of a kernel that load, each once; not those inside of others."""
    found = [node for node in kernel.nodes if isinstance(node, Window) and any(_loads(node))]
    inside = {id(below) for window in found for below in walk(window.value)}
    return [window for window in found if id(window) not in inside]


def _loads(node: Expr) -> Iterator[Load]:
    return (below for below in walk(node) if isinstance(below, Load))


def _order(kernel: Kernel) -> tuple[Axis, ...] | None:
    """The axes of a kernel with windows, slowest first in what the first of these reads; None where it does not read along all of them."""
    index = next(_loads(_windows(kernel)[0])).index
    axes = [axis for axis in (*kernel.rows, *kernel.cols) if axis.size > 1]
    steps = {axis: index.stride(axis) or 0 for axis in axes}
    return tuple(sorted(axes, key=lambda axis: -steps[axis])) if min(steps.values(), default=0) > 0 else None


def _loaded(program: Program, builder: Builder, position: int) -> tuple[Program, int] | None:
    """`program` with the windows at `position` loaded from what a pointwise kernel stores, and the place of that kernel; None where none does."""
    kernel = program.kernels[position]
    order = _order(kernel)
    for place, other in enumerate(program.kernels):
        if order is None or not other.is_pointwise or not _is_plain(other) or not _windows(other):
            continue
        between = program.kernels[position:place]
        if any(each.writes & other.reads for each in between):
            continue
        theirs = _order(other)
        aligned = theirs and align(
            kernel, builder, flat_index(order), other, Store("", flat_index(theirs), _windows(other)[0])
        )
        if not aligned:
            continue
        places = {axis: flat_index(along) for axis, along in aligned.along.items()}
        stored = _stored(program, builder, other, places, kernel.writes)
        reading = rewrite_kernel(aligned.kernel, builder, leaf=forward(stored))
        if _windows(reading):
            continue
        kernels = [*program.kernels]
        kernels[position] = reading
        if place > position:
            kernels.insert(position, kernels.pop(place))
        return drop_unused(replace(program, kernels=tuple(kernels))), min(place, position)
    return None


def _stored(
    program: Program, builder: Builder, kernel: Kernel, places: Mapping[Axis, Index], written: Collection[str]
) -> dict[int, Expr]:
    """What a pointwise kernel stores that one which writes the buffers `written` may read, by node, as loads, at other `places`."""
    found: dict[int, Expr] = {}
    for store in kernel.stores:
        dtype = program.buffer(store.buffer).dtype
        load = builder.load(store.buffer, store.index.substitute(places), dtype)
        for node in readable(program, builder.rewrite(store.value, places), dtype, written):
            found.setdefault(id(node), builder.cast(load, node.dtype))
    return found


def _computed(program: Program, builder: Builder, position: int) -> tuple[Program, int] | None:
    """`program` with a kernel before that at `position` which stores what is reduced first of windows, or else the windows, and its place; None
    where that leaves windows."""
    kernel = program.kernels[position]
    order = _order(kernel)
    if order is None:
        return None
    reduced = {id(value): value for each in kernel.reduction_loops[0] for value in each.values}
    for values in (list(reduced.values()), _windows(kernel)):
        work = Splitter(program, builder)
        loads, stores = work.temporaries("windows", values, order)
        reading = rewrite_kernel(kernel, builder, leaf=forward(loads))
        early = not any(isinstance(node, ReductionResult) for node in walk(*values))
        if early and len(values) == 1 and not _windows(reading):
            computing = Kernel(f"{kernel.name}_windows", order, (), (), (), tuple(stores), kernel.origin)
            computing = _of_images(computing, builder, len(_windows(kernel)[0].axes))
            kernels = (*program.kernels[:position], computing, reading, *program.kernels[position + 1 :])
            return replace(program, buffers=tuple(work.buffers), kernels=kernels), position
    return None


def _of_images(kernel: Kernel, builder: Builder, rank: int) -> Kernel:
    """A pointwise kernel by sample, channel and `rank` positions, where its axes in the order of memory can be seen so."""
    while len(kernel.rows) > rank + 2:
        *_, outer, inner = kernel.rows[:-rank]
        merged = merged_axes(kernel, builder, outer, inner)
        if merged is None:
            return kernel
        kernel = merged
    ones = tuple(Axis(f"one{number}", 1) for number in range(rank + 2 - len(kernel.rows)))
    return replace(kernel, rows=(*ones, *kernel.rows))
