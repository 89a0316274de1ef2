"""Weights laid out once as many threads read them, by a small kernel before the one that does.

*Rows that begin anywhere in memory.* A row's vectors begin at multiples of their width, up to one vector less one element before the row.
Weights, which all rows meet, would begin anywhere in these vectors: they would be loaded element by element in every row. So a small kernel
writes them as often as a vector has elements, each time one element further on; a row reads the copy in which they lie as its own elements do::

    copies[s, s + c] = weight[c]        for s = the row's first element, modulo the width

*Windows over what lies channels last.* Neighbouring threads have neighbouring channels, whose weights lie as many elements apart as a window
has taps: each tap of each channel would be a load of its own. Laid out tap by tap, they are loaded as vectors, as what they meet is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod

from fusepass.codegen.ir.expr import Builder, Expr, Load
from fusepass.codegen.ir.index import Axis, Bound, axis_index, flat_index
from fusepass.codegen.ir.program import Buffer, Kernel, Program, Role, Store
from fusepass.codegen.ir.vectors import Beginnings, map_values
from fusepass.codegen.passes.fuse import has_windows, is_plain
from fusepass.codegen.passes.rewrite import rewrite_kernel
from fusepass.codegen.passes.splitter import Splitter, forward

_OFTEN = 64  # times that a kernel reads each of its weights: then laying them out is little beside it

BeginningsOf = Callable[[Program, Kernel], Beginnings | None]


def lay_out_weights(program: Program, builder: Builder, choose: BeginningsOf) -> Program:
    """`program` with a kernel before each one for which `choose` names beginnings."""
    kernels: list[Kernel] = []
    for kernel in program.kernels:
        found = choose(program, kernel)
        if found is not None:
            program, filling, kernel = _laid_out(program, builder, kernel, found)
            kernels.append(filling)
        kernels.append(kernel)
    return replace(program, kernels=tuple(kernels))


def _laid_out(program: Program, builder: Builder, kernel: Kernel, found: Beginnings) -> tuple[Program, Kernel, Kernel]:
    """The program with the copies' buffers, the kernel that fills them, and `kernel` as it reads them."""
    width, count = found.width, kernel.col_count
    pitch = -(-(count + 3 * width) // width) * width  # no vector of a row ends behind its copy
    shift, place = Axis("shift", width), Axis("place", pitch)
    beside = axis_index(place) - axis_index(shift)
    inside = (Bound(beside, 0, count),)
    copies: dict[Load, Expr] = {}
    stores: list[Store] = []
    for load in found.loads:
        name = program.unused_prefix(f"{load.buffer}_shifted")
        buffer = Buffer(name, load.dtype, (width, pitch), (pitch, 1), Role.TEMP)
        program = replace(program, buffers=(*program.buffers, buffer))
        value = builder.load(load.buffer, beside + (load.index - found.column), load.dtype)
        zero = builder.const(0, load.dtype)
        stores.append(Store(name, axis_index(shift) * pitch + axis_index(place), builder.masked(inside, value, zero)))
        copies[load] = builder.load(name, found.start % width * (pitch + 1) + found.column, load.dtype)
    filling = Kernel(f"{kernel.name}_weights", (shift, place), (), (), (), tuple(stores), ("shifted weights",))

    def leaf(node: Expr) -> Expr | None:
        return copies.get(node) if isinstance(node, Load) else None

    reading = map_values(kernel, builder.rewriting(leaf=leaf), lambda index: index)
    return program, filling, reading


def lay_out_taps(program: Program, builder: Builder, least: int | None) -> Program:
    """`program` with a kernel before each one of at least `least` elements whose windows meet weights that lie apart. Nothing changes where
    `least` is None."""
    work, made = Splitter(program, builder), dict[object, str]()
    for kernel in program.kernels:
        copies: dict[int, Expr] = {}
        many = least is not None and kernel.row_count * kernel.col_count >= least
        for load in _apart(program, kernel) if many else ():
            axes = tuple(sorted(load.index.axes, key=lambda axis: (axis == _along(kernel), axis.name)))
            lies = load.buffer, load.index.constant, tuple((axis.size, load.index.stride(axis)) for axis in axes)
            if lies in made:  # as another kernel reads it
                copies[id(load)] = builder.load(made[lies], flat_index(axes), load.dtype)
                continue
            loads, stores = work.temporaries(f"{load.buffer}_by_tap", [load], axes)
            made[lies] = stores[0].buffer
            filling = Kernel(f"{kernel.name}_taps", axes, (), (), (), tuple(stores), ("weights by tap",))
            work.kernels.append(filling)
            copies |= loads
        work.kernels.append(rewrite_kernel(kernel, builder, leaf=forward(copies)) if copies else kernel)
    return replace(program, buffers=tuple(work.buffers), kernels=tuple(work.kernels))


def _along(kernel: Kernel) -> Axis:
    """The axis along which neighbouring threads have neighbouring points."""
    return (kernel.cols or kernel.rows)[-1]


def _apart(program: Program, kernel: Kernel) -> list[Load]:
    """What windows of a kernel load of small inputs at places that lie apart for neighbouring points of it."""
    if not is_plain(kernel) or not has_windows(kernel):
        return []
    along = _along(kernel)
    if along.size == 1 or any(store.index.stride(along) != 1 for store in kernel.stores):
        return []
    return [load for load in kernel.loads() if _lies_apart(program, kernel, load, along)]


def _lies_apart(program: Program, kernel: Kernel, load: Load, along: Axis) -> bool:
    buffer, index = program.buffer(load.buffer), load.index
    step = index.stride(along)
    if buffer.role is not Role.INPUT or step is None or step <= 1 or index.axes <= {*kernel.rows, *kernel.cols}:
        return False
    if any(not isinstance(atom, Axis) for atom, _ in index.terms):
        return False
    first, last = index.bounds
    points = prod(axis.size for axis in index.axes if axis in kernel.rows or axis in kernel.cols)
    return first >= 0 and last < buffer.numel and points * _OFTEN <= kernel.row_count * kernel.col_count
