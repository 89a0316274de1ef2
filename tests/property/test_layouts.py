"""Pointwise kernels over operands of any layouts, types and sizes, the rendered CUDA text run on the host."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Builder, Op
from fusepass.codegen.ir.index import Axis, Index, axis_index, linear
from fusepass.codegen.ir.program import Buffer, Kernel, Program, Role, Store
from fusepass.codegen.ir.verify import verify
from fusepass.codegen.passes.pipeline import run_passes
from fusepass.codegen.render import render
from tests.support.emulate import emulate, needs_compiler
from tests.support.interpret import interpret
from tests.support.regions import TILES
from tests.unit.test_render_cuda import SMALL, assert_close, inputs_of

FLOATS = (DType.F16, DType.BF16, DType.F32, DType.F64)
ORDERS = ((0, 1, 2, 3), (0, 2, 3, 1), *permutations(range(4)))  # the usual two come more often


@dataclass(frozen=True)
class Operand:
    """How a tensor lies: `order` names its dimensions from the slowest, `broadcast` those that it does not have."""

    dtype: DType
    order: tuple[int, ...]
    broadcast: frozenset[int] = frozenset()

    def buffer(self, name: str, role: Role, shape: tuple[int, ...]) -> Buffer:
        sizes = [1 if d in self.broadcast else size for d, size in enumerate(shape)]
        strides, step = [0] * len(shape), 1
        for dimension in reversed(self.order):
            strides[dimension] = step
            step *= sizes[dimension]
        return Buffer(name, self.dtype, tuple(sizes), tuple(strides), role)


operands = st.builds(Operand, st.sampled_from(FLOATS), st.sampled_from(ORDERS))
inputs = st.builds(
    Operand,
    st.sampled_from(FLOATS),
    st.sampled_from(ORDERS),
    st.one_of(st.just(frozenset[int]()), st.frozensets(st.integers(0, 3), max_size=3)),
)
powers = st.sampled_from([2, 4, 8])  # elements of a vector repeat along such an axis
shapes = st.tuples(
    st.integers(1, 3), st.integers(1, 70), st.one_of(st.integers(1, 12), powers), st.one_of(st.integers(1, 12), powers)
)


def program_of(shape: tuple[int, ...], given_: list[Operand], made: list[Operand]) -> Program:
    """Each result is the sum of all inputs times its number."""
    builder = Builder()
    axes = tuple(Axis(f"d{number}", size) for number, size in enumerate(shape))

    def at(buffer: Buffer) -> list[Index]:
        return [axis_index(axis) * (size > 1) for axis, size in zip(axes, buffer.shape, strict=True)]

    buffers = [operand.buffer(f"x{number}", Role.INPUT, shape) for number, operand in enumerate(given_)]
    total = builder.const(0.5, DType.F64)
    for buffer in buffers:
        value = builder.load(buffer.name, linear(at(buffer), buffer.strides), buffer.dtype)
        total = builder.apply(Op.ADD, total, builder.cast(builder.cast(value, buffer.dtype.compute), DType.F64))
    kernels = []
    for number, operand in enumerate(made):
        buffer = operand.buffer(f"y{number}", Role.OUTPUT, shape)
        scaled = builder.apply(Op.MUL, total, builder.const(number + 1.0, DType.F64))
        rounded = builder.cast(builder.cast(scaled, buffer.dtype.compute), buffer.dtype)
        buffers.append(buffer)
        kernels.append(Store(buffer.name, linear(at(buffer), buffer.strides), rounded))
    kernel = Kernel("mixed", axes, (), (), (), tuple(kernels))
    names = [[b.name for b in buffers if b.role is role] for role in (Role.INPUT, Role.OUTPUT)]
    program = Program("mixed", tuple(buffers), tuple(names[0]), tuple(names[1]), (), (kernel,))
    verify(program)
    return run_passes(program, builder, TILES, check=True)


@needs_compiler
@settings(max_examples=12, deadline=None)
@given(shapes, st.lists(inputs, min_size=1, max_size=3), st.lists(operands, min_size=1, max_size=2), st.booleans())
def test_any_layouts(shape: tuple[int, ...], given_: list[Operand], made: list[Operand], aligned: bool) -> None:
    program = program_of(shape, given_, made)
    values = inputs_of(program)
    source = render(program, SMALL, aligned=aligned)
    got = emulate(program, source, values, shift=0 if aligned else 1)
    assert_close(program, got, interpret(program, values))
