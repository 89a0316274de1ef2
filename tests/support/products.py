"""Programs with a matrix product, as lowering makes them: the library's call, then a chain per element of its result."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Builder, Op
from fusepass.codegen.ir.index import Axis, axis_index, contiguous_strides, linear
from fusepass.codegen.ir.program import Buffer, Kernel, LibraryCall, Program, Ref, Role, Store
from fusepass.codegen.passes.anchors import AnchorOptions, generate_anchors
from fusepass.codegen.passes.axes import order_and_merge
from fusepass.codegen.passes.operands import Seconds
from fusepass.codegen.passes.products import split_products
from fusepass.codegen.schedule_product.tiles import Tiling
from tests.support.interpret import decode
from tests.support.numpy_ops import Array

F16, BF16, F32 = DType.F16, DType.BF16, DType.F32


@dataclass(frozen=True)
class Case:
    """A product of ``rows x inner`` by ``inner x columns`` matrices.

    Attributes:
        batch: matrices; None where there is no such dimension.
        left_down: whether the left operand's rows are neighbours in memory.
        right_across: whether the right operand's columns are neighbours; else its terms are, as in a linear layer.
        spare: elements between rows of the operands that belong to neither.
        dtype: of everything.
        tf32: whether float32 may be rounded.
        shared_right: whether all matrices of a batch have the same right operand.
        length: terms of a piece of the sums; None for all.
        lower: whether the result is zero above its diagonal.
    """

    rows: int
    columns: int
    inner: int
    batch: int | None = None
    left_down: bool = False
    right_across: bool = False
    spare: int = 0
    dtype: DType = F32
    tf32: bool = False
    shared_right: bool = False
    length: int | None = None
    lower: bool = False

    def strides(self, across: int, inner: int, *, rows_first: bool) -> tuple[int, int]:
        """Strides along (rows or columns, terms) of an operand."""
        return (1, across + self.spare) if rows_first else (inner + self.spare, 1)


def program_of(case: Case, *, chain: bool = True) -> Program:
    """``relu(a @ b + bias) * scale + other`` behind the library's call, or the call alone.

    `bias` is per column, `scale` per row, `other` per element, read along a transposed tensor.
    """
    b, dtype = Builder(), case.dtype
    batch = () if case.batch is None else (case.batch,)
    count = case.batch or 1
    row, inner = case.strides(case.rows, case.inner, rows_first=case.left_down)
    column, deep = case.strides(case.columns, case.inner, rows_first=case.right_across)
    apart = [case.rows * case.inner + case.spare * (case.rows + case.inner)]
    apart.append(0 if case.shared_right else case.columns * case.inner + case.spare * (case.columns + case.inner))
    left, right = ((step,) * len(batch) for step in apart)
    shape = (*batch, case.rows, case.columns)
    strides = contiguous_strides(shape)
    buffers = [
        Buffer("a", dtype, (*batch, case.rows, case.inner), (*left, row, inner), Role.INPUT),
        Buffer("w", dtype, (*batch, case.columns, case.inner), (*right, column, deep), Role.INPUT),
        Buffer("bias", dtype, (case.columns,), (1,), Role.INPUT),
        Buffer("scale", dtype, (case.rows,), (1,), Role.INPUT),
        Buffer(
            "other",
            dtype,
            (count, case.columns, case.rows),
            contiguous_strides((count, case.columns, case.rows)),
            Role.INPUT,
        ),
        Buffer("w_t", dtype, (*batch, case.inner, case.columns), (*right, deep, column), Role.ANCHOR),
        Buffer("mm_out", dtype, shape, strides, Role.ANCHOR),
    ]
    calls = (
        LibraryCall("w_t", "aten.transpose.int", (Ref("w"), -2, -1)),
        LibraryCall("mm_out", f"aten.{'b' if batch else ''}mm.default", (Ref("a"), Ref("w_t")), (), case.tf32),
    )
    if not chain:
        return Program("mm", (*buffers[:2], *buffers[-2:]), ("a", "w"), ("mm_out",), calls, ())
    buffers.append(Buffer("y", dtype, shape, strides, Role.OUTPUT))
    axes = tuple(Axis(f"a{number}", size) for number, size in enumerate(shape))
    where = [axis_index(axis) for axis in axes]
    here = linear(where, strides)

    def load(name: str, index: object) -> object:
        return b.cast(b.load(name, index, dtype), F32)  # type: ignore[arg-type]

    total = b.apply(Op.ADD, load("mm_out", here), load("bias", where[-1]))  # type: ignore[arg-type]
    value = b.apply(Op.MUL, b.apply(Op.MAXIMUM, total, b.const(0.0, F32)), load("scale", where[-2]))  # type: ignore[arg-type]
    turned = (*contiguous_strides((count, case.columns, case.rows))[:1][: len(batch)], 1, case.rows)
    value = b.apply(Op.ADD, value, load("other", linear(where, turned)))  # type: ignore[arg-type]
    if case.lower:
        below = b.apply(Op.GE, b.position(where[-2] - where[-1]), b.const(0, DType.I64))
        value = b.apply(Op.WHERE, below, value, b.const(0.0, F32))  # type: ignore[arg-type]
    kernel = Kernel("mm_relu", axes, (), (), (), (Store("y", here, b.cast(value, dtype)),), ("relu", "mul", "add"))
    inputs = ("a", "w", "bias", "scale", "other")
    return Program("mm_relu_mul", tuple(buffers), inputs, ("y",), calls, (kernel,))


def generated(case: Case, *, chain: bool = True, copied: bool = False) -> Program:
    """The same with the product as a kernel, in pieces where the case says so; of copies of all operands that may have one, if `copied`."""
    builder = Builder()
    seconds: Seconds | None = (lambda program, kernel: -len(program.kernels)) if copied else None
    options = AnchorOptions(lambda program, kernel: True, product_seconds=seconds)
    program = generate_anchors(program_of(case, chain=chain), builder, options)
    if case.length is not None:
        length = case.length
        program = split_products(program, builder, lambda program, kernel: length)
    return order_and_merge(program, builder) if copied or case.length is not None else program


H200 = DeviceFacts.h200()
ONE = replace(H200, multiprocessors=1)  # large tiles even for small matrices

CASES: dict[str, Case] = {
    "one": Case(1, 1, 1),
    "linear": Case(130, 132, 72),
    "linear, odd": Case(67, 45, 51),
    "plain": Case(100, 136, 40, right_across=True),
    "both turned": Case(132, 72, 36, left_down=True, right_across=True),
    "turned, odd": Case(33, 35, 37, left_down=True, right_across=True),
    "few rows": Case(5, 130, 300),
    "few columns": Case(130, 3, 70),
    "long, in pieces": Case(20, 40, 520, length=128),
    "in uneven pieces": Case(36, 68, 300, length=128, right_across=True),
    "a batch": Case(40, 36, 33, batch=3),
    "a batch, one right operand": Case(35, 64, 32, batch=2, shared_right=True),
    "a batch, in pieces": Case(17, 33, 200, batch=2, length=64),
    "rows with gaps": Case(64, 64, 40, spare=4),
    "rows with odd gaps": Case(64, 64, 40, spare=3, right_across=True),
    "lower triangle": Case(300, 310, 40, lower=True),
    "lower triangle, halves": Case(140, 300, 72, dtype=F16, batch=2, lower=True),
    "lower triangle, TF32": Case(300, 140, 200, tf32=True, left_down=True, lower=True),
    "TF32": Case(68, 72, 64, tf32=True),
    "TF32, turned": Case(68, 72, 68, tf32=True, left_down=True, right_across=True),
    "half": Case(130, 136, 136, dtype=F16),
    "half, odd": Case(35, 37, 39, dtype=F16),
    "half, plain": Case(72, 80, 72, dtype=F16, right_across=True),
    "half, turned": Case(72, 48, 80, dtype=F16, left_down=True, right_across=True),
    "half, pairs": Case(34, 38, 70, dtype=F16, right_across=True),
    "bfloat16": Case(64, 128, 64, dtype=BF16),
    "bfloat16, turned and odd": Case(33, 35, 37, dtype=BF16, left_down=True, right_across=True),
    "bfloat16, in pieces": Case(16, 40, 512, dtype=BF16, length=128),
}

# For each tile that serves them: several tiles, and more panels than a tile has stages, or one with few numbers.
TILED: dict[str, Case] = {
    "neighbours along the terms": Case(150, 140, 199),
    "neighbours across": Case(132, 136, 40, left_down=True, right_across=True),
    "neighbours across on the right": Case(140, 150, 171, right_across=True),
    "neighbours across on the left": Case(132, 70, 100, left_down=True, batch=2),
    "TF32": Case(150, 140, 200, tf32=True),
    "halves": Case(136, 260, 390, dtype=F16),
    "halves, neighbours across": Case(136, 144, 72, dtype=BF16, left_down=True, right_across=True),
    "few terms": Case(150, 140, 3),
    "few terms, neighbours across": Case(132, 136, 20, left_down=True, right_across=True),
    "few terms, neighbours across on the left": Case(132, 136, 12, left_down=True),
    "few terms, TF32": Case(150, 140, 24, tf32=True),
    "few halves": Case(136, 260, 24, dtype=F16),
}


COPIED = {
    "odd": Case(67, 45, 51),
    "odd halves": Case(130, 72, 71, dtype=F16),
    "both turned": Case(36, 40, 44, left_down=True, right_across=True),
    "turned, odd halves": Case(33, 35, 37, left_down=True, right_across=True, dtype=BF16),
    "odd, between others": Case(20, 24, 33, spare=3, dtype=F16),
    "a batch": Case(40, 36, 33, batch=3),
    "one operand for all of a batch": Case(20, 36, 35, batch=3, shared_right=True, dtype=F16),
    "one term": Case(40, 36, 1, left_down=True),
}
"""Whose operands are to be copied."""


def assert_close(case: Case, program: Program, got: dict[str, Array], wanted: dict[str, Array]) -> None:
    """The result is right up to a tolerance at its elements' scale."""
    (name,) = program.outputs
    found, right = (decode(memory[name], case.dtype).astype(np.float64) for memory in (got, wanted))
    tolerance = {F32: 2e-6, F16: 2e-3, BF16: 1.6e-2}[case.dtype]
    np.testing.assert_allclose(found, right, rtol=tolerance, atol=tolerance * np.abs(right).max())


def tiling_id(tiling: Tiling) -> str:
    """The name of a tile in tests."""
    kind = "groups, turned" if tiling.turned else "groups" if tiling.groups else "warps"
    kind = f"{tiling.teams} teams" if tiling.teams else kind
    return f"{tiling.rows} x {tiling.columns} {kind} {len(tiling.arithmetics)}"


SAMPLES: dict[str, Callable[[], Program]] = {
    **{f"product {name}": functools.partial(generated, case) for name, case in CASES.items()},
    **{f"product of copies, {name}": functools.partial(generated, case, copied=True) for name, case in COPIED.items()},
}
