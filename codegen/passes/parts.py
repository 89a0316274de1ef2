"""What several results of rows are put together in, such as a concatenation, is written by the kernel that makes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fusepass.codegen.ir.expr import Builder, Expr, Gather, Masked, Window, walk
from fusepass.codegen.ir.index import Axis, axis_index
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.passes.axes import rename_axes
from fusepass.codegen.passes.fuse import drop_unused, fuse_into_producer, is_plain
from fusepass.codegen.passes.rewrite import rewrite_kernel


def fuse_parts(program: Program, builder: Builder) -> Program:
    """Fuse each kernel whose parts along an axis are all made of results that one kernel has per row into that kernel: a store for each."""
    for position, kernel in enumerate(program.kernels):
        parts = list(_parts(kernel, builder))
        if len(parts) < 2:
            continue
        fused = _with_parts(program.kernels, position, parts, builder)
        if fused is not None:
            return fuse_parts(drop_unused(replace(program, kernels=fused)), builder)
    return program


def _with_parts(
    kernels: tuple[Kernel, ...], position: int, parts: list[Kernel], builder: Builder
) -> tuple[Kernel, ...] | None:
    """`kernels` with the `parts` of the one at `position` in one that is there before; None where they do not all go into one."""
    before, after, made = [*kernels[:position]], kernels[position + 1 :], kernels[position].writes
    for part in parts:
        fused = fuse_into_producer([*before, part], len(before), builder)
        if fused is None:
            return None
        before = fused
    writers = [each for each in before if each.writes & made]
    stores = [store for each in writers for store in each.row_stores if store.buffer in made]
    return (*before, *after) if len(writers) == 1 and len(stores) == len(parts) else None


def _parts(kernel: Kernel, builder: Builder) -> Iterator[Kernel]:
    """A pointwise kernel for each part of the one store of `kernel`, whose parts lie one after another along an axis; none where it has none."""
    if kernel.reduction_loops or len(kernel.stores) != 1 or not is_plain(kernel):
        return
    (store,) = kernel.stores
    if any(isinstance(node, Gather | Window) for node in walk(store.value)):
        return
    for axis in kernel.rows:
        found = list(_values(store.value, axis, 0, axis.size))
        if len(found) > 1:
            for number, (low, high, value) in enumerate(found):
                part = Axis(f"{axis.name}_part", high - low)
                rows = tuple(part if each is axis else each for each in kernel.rows)
                alone = replace(kernel, rows=rows, stores=(replace(store, value=value),))
                moved = rewrite_kernel(alone, builder, {axis: axis_index(part) + low})
                yield rename_axes(moved, builder, f"part{number}_")
            return


def _values(value: Expr, axis: Axis, low: int, high: int) -> Iterator[tuple[int, int, Expr]]:
    """The stretches of `axis` from `low` to `high`, in order, on which `value` is something else, if masks of nothing else tell them apart:
    where each begins and ends, and what it is there."""
    if low >= high:
        return
    if isinstance(value, Masked) and len(value.mask) == 1:
        (bound,) = value.mask
        first = bound.index - axis_index(axis)
        if bound.index.stride(axis) == 1 and not first.axes:
            begin, end = (min(max(limit - first.constant, low), high) for limit in (bound.low, bound.high))
            yield from _values(value.other, axis, low, begin)
            yield from _values(value.value, axis, begin, max(begin, end))
            yield from _values(value.other, axis, max(begin, end), high)
            return
    yield low, high, value
