"""Random numbers by their places in a generator's stream, once loops are what they will be.

Places are quotients and remainders, by which axes would be split; but no memory is read or written there. Behind all that tells axes apart or
merges them, they are indices like any other, so that what neighbours have in common is computed once.
"""

from __future__ import annotations

from dataclasses import replace

from fusepass.codegen.ir.expr import Apply, Builder, Const, Expr, Op, Position
from fusepass.codegen.ir.program import Program
from fusepass.codegen.ir.random import place
from fusepass.codegen.passes.rewrite import rewrite_kernel


def place_numbers(program: Program, builder: Builder) -> Program:
    """Every random number of an element as one of a place in the stream."""

    def placed(node: Expr) -> Expr | None:
        match node:
            case Apply(Op.RANDOM, (seed, offset, Position(index), Const(threads), Const(width)), dtype):
                places = map(builder.position, place(index, int(threads), int(width)))
                return builder.apply(Op.UNIFORM, seed, offset, *places, dtype=dtype)
            case _:
                return None

    kernels = (
        rewrite_kernel(kernel, builder, leaf=placed) if any(map(_is_random, kernel.nodes)) else kernel
        for kernel in program.kernels
    )
    return replace(program, kernels=tuple(kernels))


def _is_random(node: Expr) -> bool:
    return isinstance(node, Apply) and node.op is Op.RANDOM
