"""Products that make scaled halves of their input themselves, rather than read them packed.

The packed input then exists only after an overflow flag: where the guess of the scales was wrong (see `fusepass.codegen.passes.halves`), or where
a weight is infinite, which what became zero would have to stay no zero for. Then everything that finds scales and packs operands is done
again, and so is the product.
"""

from __future__ import annotations

from dataclasses import replace

from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Builder, Op
from fusepass.codegen.ir.product import Product
from fusepass.codegen.ir.program import Kernel, OverflowFlag, Program
from fusepass.codegen.passes.anchors import Choice
from fusepass.codegen.passes.exponents import LARGEST


def fill_products(program: Program, builder: Builder, choose: Choice) -> Program:
    """`program`, each product that can make its right operand making it where `choose` accepts the kernel that does."""
    for kernel in program.kernels:
        product = kernel.anchor
        if isinstance(product, Product) and product.filling is not None and not product.fills:
            filled = replace(kernel, anchor=replace(product, fills=True))
            if choose(program, filled):
                program = _with(program, builder, kernel, filled)
    return program


def _with(program: Program, builder: Builder, kernel: Kernel, filled: Kernel) -> Program:
    product = kernel.anchor
    assert isinstance(product, Product)
    assert product.filling is not None
    flag, packed = product.filling.overflow_flag, product.right.buffer
    place = program.kernels.index(kernel)
    (start,) = (
        number for number, each in enumerate(program.kernels[:place]) if packed in each.writes and each.when is None
    )
    before, between, behind = program.kernels[:start], program.kernels[start + 1 : place], program.kernels[place + 1 :]
    again = [each for each in between if each.when == flag]
    pack = [each for each in again if packed in each.writes]
    once = [each for each in between if each.when is None]
    first = (_flagging(each, builder, flag) if product.left.buffer in each.writes else each for each in once)
    repeated = [each for each in again if each not in pack]
    repeated += [_again(each, flag) for each in once] + pack + [_again(kernel, flag)]
    return replace(program, kernels=(*before, *first, filled, *repeated, *behind))


def _flagging(kernel: Kernel, builder: Builder, flag: str) -> Kernel:
    """`kernel`, which packs weights, with an overflow flag where one is infinite."""
    (store,) = kernel.stores
    magnitude = builder.apply(Op.ABS, builder.cast(store.value, DType.F32))
    infinite = builder.apply(Op.GT, magnitude, builder.const(LARGEST, DType.F32), dtype=DType.BOOL)
    return replace(kernel, overflow_flag=OverflowFlag(flag, infinite))


def _again(kernel: Kernel, flag: str) -> Kernel:
    return replace(kernel, name=f"{kernel.name}_again", when=flag)
