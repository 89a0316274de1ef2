"""Weights of rows that begin anywhere in memory, laid out once for each place where a row may begin in a vector.

A row's vectors begin at multiples of their width, up to one vector less one element before the row. Weights, which all rows meet, would
begin anywhere in these vectors: they would be loaded element by element in every row. So a small kernel writes them as often as a vector
has elements, each time one element further on; a row reads the copy in which they lie as its own elements do::

    copies[s, s + c] = weight[c]        for s = the row's first element, modulo the width

"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fusepass.codegen.ir.expr import Builder, Expr, Load
from fusepass.codegen.ir.index import Axis, Bound, axis_index
from fusepass.codegen.ir.program import Buffer, Kernel, Program, Role, Store
from fusepass.codegen.ir.vectors import Beginnings, map_values
from fusepass.codegen.passes.places import free_name

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
        name = free_name(program, f"{load.buffer}_shifted")
        buffer = Buffer(name, load.dtype, (width, pitch), (pitch, 1), Role.TEMP)
        program = replace(program, buffers=(*program.buffers, buffer))
        value = builder.load(load.buffer, beside + (load.index - found.column), load.dtype)
        zero = builder.const(0, load.dtype)
        stores.append(Store(name, axis_index(shift) * pitch + axis_index(place), builder.masked(inside, value, zero)))
        copies[load] = builder.load(name, found.start % width * (pitch + 1) + found.column, load.dtype)
    filling = Kernel(f"{kernel.name}_weights", (shift, place), (), (), (), tuple(stores), ("shifted weights",))

    def leaf(node: Expr) -> Expr | None:
        return copies.get(node) if isinstance(node, Load) else None

    reading = map_values(kernel, lambda value: builder.rewrite(value, leaf=leaf), lambda index: index)
    return program, filling, reading
