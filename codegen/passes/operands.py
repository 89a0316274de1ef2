"""Operands of a matrix product, copied so that rows lie along its terms and each begins where a whole access does.

Rows of an odd number of elements are copied to shared memory element by element, as often as there are tiles beside them; groups of
warps take float32 numbers from rows along the terms alone. One more pass over an operand is less than either where a product has
arithmetic enough.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil

from fusepass.codegen.ir.expr import Builder
from fusepass.codegen.ir.index import Axis, Bound, axis_index, contiguous_strides, linear
from fusepass.codegen.ir.product import Operand, Product
from fusepass.codegen.ir.program import Buffer, Kernel, Program, Role, Store
from fusepass.codegen.ir.vectors import ACCESS

Seconds = Callable[[Program, Kernel], float]
"""How long the kernel of a product takes, and those that copy its operands."""

_CLEARLY = 0.9  # of the time without copies, by estimate, that there must be at most with them
_LEAST_SAVED = 5e-6  # seconds: of less, estimates know nothing


def lay_out_operands(program: Program, builder: Builder, position: int, seconds: Seconds) -> tuple[Program, int]:
    """`program` with copies of those operands of the product at `position` whose copies take clearly less time than they save, and the
    position of the kernel that reads them."""
    product = _product(program.kernels[position])
    sides = [side for side in ("left", "right") if not _is_whole(getattr(product, side), product)]
    if not sides:
        return program, position
    some = (each for count in range(1, len(sides) + 1) for each in itertools.combinations(sides, count))
    ways = [_with_copies(program, builder, position, each) for each in some]

    def seconds_of(way: tuple[Program, int]) -> float:
        made, place = way
        return seconds(made, made.kernels[place])

    fastest, without = min(ways, key=seconds_of), seconds_of((program, position))
    pays = seconds_of(fastest) < min(_CLEARLY * without, without - _LEAST_SAVED)
    return fastest if pays else (program, position)


def _is_whole(operand: Operand, product: Product) -> bool:
    """Whether rows of an operand lie along the terms, and each begins where a whole access does."""
    steps = (operand.batch, operand.row, operand.offset)
    return operand.inner == 1 and not any(isinstance(step, int) and step % _whole(product) for step in steps)


def _whole(product: Product) -> int:
    """Elements of a whole access."""
    return ACCESS // product.dtype.nbytes


def _with_copies(program: Program, builder: Builder, position: int, sides: Sequence[str]) -> tuple[Program, int]:
    for side in sides:
        kernel = program.kernels[position]
        product, (_, batch, rows, columns) = _product(kernel), kernel.matrix
        operand: Operand = getattr(product, side)
        pitch = ceil(product.inner / _whole(product)) * _whole(product)
        shape = (batch if operand.batch else 1, rows if side == "left" else columns, pitch)
        name, strides = program.unused_name(f"{product.name}_{side}"), contiguous_strides(shape)
        copy = Buffer(name, product.dtype, shape, strides, Role.TEMP)
        laid = Operand(name, strides[0] if operand.batch else 0, pitch, 1)
        reading = replace(kernel, anchor=_reading(product, side, laid))
        kernels = list(program.kernels)
        kernels[position : position + 1] = [_copying(builder, operand, product.inner, copy), reading]
        program = replace(program, buffers=(*program.buffers, copy), kernels=tuple(kernels))
        position += 1
    return program, position


def _reading(product: Product, side: str, laid: Operand) -> Product:
    return replace(product, left=laid) if side == "left" else replace(product, right=laid)


def _copying(builder: Builder, operand: Operand, inner: int, copy: Buffer) -> Kernel:
    """The kernel that writes `copy`, with zeros behind the terms, so that whole accesses are stored."""
    axes = tuple(Axis(f"o{number}", size) for number, size in enumerate(copy.shape))
    at = [axis_index(axis) for axis in axes]
    loaded = builder.load(operand.buffer, operand.place(*at), copy.dtype)
    value = builder.masked((Bound(at[-1], 0, inner),), loaded, builder.const(0.0, copy.dtype))
    store = Store(copy.name, linear(at, copy.strides), value)
    return Kernel(f"{copy.name}_kernel", axes, (), (), (), (store,), ("copied operand",))


def _product(kernel: Kernel) -> Product:
    assert isinstance(kernel.anchor, Product)
    return kernel.anchor
