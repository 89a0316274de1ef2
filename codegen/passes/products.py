"""Library matrix products as anchors of kernels, and sums that are computed in pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fusepass.codegen.ir.dtype import DType, Precision
from fusepass.codegen.ir.expr import Builder, Expr, Op, ReduceOp
from fusepass.codegen.ir.index import Axis, axis_index, contiguous_strides, linear
from fusepass.codegen.ir.product import Operand, Product
from fusepass.codegen.ir.program import (
    ANCHOR_TARGETS,
    CONVERSION_TARGET,
    Buffer,
    Kernel,
    LibraryCall,
    Program,
    Reduction,
    Ref,
    Role,
    Store,
)

Length = Callable[[Program, Kernel], int]

_PLAIN = ("aten.mm.default", "aten.bmm.default")
_ADDING = ("aten.addmm.default", "aten.baddbmm.default")
_LEAST_ROUNDED, _ROUNDED_STEP = 64, 4
_HALVES = (DType.F16, DType.BF16)


def whole_sums(program: Program, kernel: Kernel) -> int:
    """All terms of the sums of the kernel's product."""
    assert isinstance(kernel.anchor, Product)
    return kernel.anchor.inner


@dataclass(frozen=True)
class _Stored:
    """A tensor that exists in memory: a view of a buffer from its beginning."""

    buffer: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def product_of(program: Program, call: LibraryCall) -> Product | None:
    """The call as a product that a kernel could do: float32 or halves, of inputs of the region or views of them."""
    if call.target not in (*_PLAIN, *_ADDING):
        return None
    operands = [_stored(program, value) for value in call.args[-2:]]
    left, right = operands
    result = program.buffer(call.result)
    if left is None or right is None or not result.numel or not left.shape[-1]:
        return None
    if result.dtype is not DType.F32 and result.dtype not in _HALVES:
        return None
    if any(program.buffer(operand.buffer).dtype is not result.dtype for operand in (left, right)):
        return None
    if call.target in _ADDING and (result.dtype is DType.F32 or _stored(program, call.args[0]) is None):
        return None
    left_batch, right_batch = (operand.strides[0] if len(operand.shape) == 3 else 0 for operand in (left, right))
    return Product(
        name=f"{call.result}_sum",
        left=Operand(left.buffer, left_batch, left.strides[-2], left.strides[-1]),
        right=Operand(right.buffer, right_batch, right.strides[-1], right.strides[-2]),
        inner=left.shape[-1],
        length=left.shape[-1],
        dtype=result.dtype,
        precision=Precision.TF32 if call.tf32 and _surely_rounds(left, right) else Precision.FLOAT32,
    )


def _surely_rounds(left: _Stored, right: _Stored) -> bool:
    """Whether the library rounds to TF32 if it may: for few rows, columns or terms, or odd ones, it may take other kernels."""
    sizes = (*left.shape[-2:], right.shape[-1])
    return all(size >= _LEAST_ROUNDED and size % _ROUNDED_STEP == 0 for size in sizes)


def _stored(program: Program, value: object) -> _Stored | None:
    """The argument of a library call as a view of an input; None where it is computed."""
    if not isinstance(value, Ref):
        return None
    described = program.buffer(value.buffer)
    made = {call.result: call for call in program.calls}
    name = value.buffer
    while name in made and _is_view(made[name]):
        (base, *_) = made[name].args
        assert isinstance(base, Ref)
        name = base.buffer
    if program.buffer(name).role is not Role.INPUT:
        return None
    return _Stored(name, described.shape, described.strides)


def _is_view(call: LibraryCall) -> bool:
    return call.target not in ANCHOR_TARGETS and call.target != CONVERSION_TARGET


def product_rows(rows: Sequence[Axis]) -> tuple[Axis, ...]:
    """The rows of a kernel with a product, for those along the dimensions of its result."""
    missing = tuple(Axis(f"{rows[0].name}_none{number}", 1) for number in range(4 - len(rows)))
    return (*missing, *rows)


def product_value(
    program: Program, builder: Builder, call: LibraryCall, product: Product, rows: Sequence[Axis]
) -> Expr:
    """The result of `call` from the sums of `product`, at `rows` along its dimensions, rounded as the library rounds."""
    value = builder.reduction_result(product.name, 0, DType.F32)
    options = dict(call.kwargs)
    if call.target in _ADDING:
        value = _scaled(builder, value, options.get("alpha", 1))
        beta = options.get("beta", 1)
        bias = _stored(program, call.args[0])
        assert bias is not None
        if beta != 0:  # with 0 the bias may be NaN and does not count
            value = builder.apply(Op.ADD, value, _scaled(builder, _read(program, builder, bias, rows), beta))
    return builder.cast(value, product.dtype)


def _scaled(builder: Builder, value: Expr, factor: object) -> Expr:
    assert isinstance(factor, int | float)
    return value if factor == 1 else builder.apply(Op.MUL, value, builder.const(float(factor), DType.F32))


def _read(program: Program, builder: Builder, stored: _Stored, rows: Sequence[Axis]) -> Expr:
    """The elements of `stored`, broadcast along `rows`, in float32."""
    along = rows[len(rows) - len(stored.shape) :]
    strides = [0 if size == 1 else stride for size, stride in zip(stored.shape, stored.strides, strict=True)]
    index = linear([axis_index(axis) for axis in along], strides)
    return builder.cast(builder.load(stored.buffer, index, program.buffer(stored.buffer).dtype), DType.F32)


def without_idle_views(program: Program) -> Program:
    """`program` without library calls for views that nobody reads."""
    read = frozenset[str]().union(*(kernel.reads for kernel in program.kernels), program.outputs)
    kept: list[LibraryCall] = []
    for call in reversed(program.calls):
        if not _is_view(call) or call.result in read:
            kept.append(call)
            read |= {value.buffer for value in call.args if isinstance(value, Ref)}
    gone = {call.result for call in program.calls} - {call.result for call in kept}
    buffers = tuple(buffer for buffer in program.buffers if buffer.name not in gone)
    return replace(program, calls=tuple(reversed(kept)), buffers=buffers)


def split_products(program: Program, builder: Builder, length_of: Length) -> Program:
    """Products whose sums are to have several pieces: one kernel for the pieces, one that adds them in their order.

    `length_of` gives the terms that a piece of a kernel's product should have.
    """
    for kernel in program.kernels:
        if isinstance(kernel.anchor, Product) and not (kernel.within or kernel.partials or kernel.cols):
            length = length_of(program, kernel)
            if length < kernel.anchor.inner:
                program = _split(program, builder, kernel, replace(kernel.anchor, length=length))
    return program


def _split(program: Program, builder: Builder, kernel: Kernel, product: Product) -> Program:
    piece = Axis(f"{kernel.rows[0].name}_piece", product.pieces)
    rows = (piece, *kernel.rows[1:])
    sizes = tuple(axis.size for axis in rows)
    strides = contiguous_strides(sizes)
    name = program.unused_name(f"{product.name}_pieces")
    where = linear([axis_index(axis) for axis in rows], strides)
    value = builder.reduction_result(product.name, 0, DType.F32)
    pieces = replace(
        kernel, name=f"{kernel.name}_pieces", rows=rows, stores=(Store(name, where, value),), anchor=product
    )
    total = Reduction(product.name, ReduceOp.SUM, (builder.load(name, where, DType.F32),), DType.F32)
    merge = replace(
        kernel,
        rows=kernel.rows[1:],
        cols=(piece,),
        reduction_loops=((total,),),
        row_stores=kernel.stores,
        stores=(),
        anchor=None,
    )
    kernels = [new for old in program.kernels for new in ((pieces, merge) if old is kernel else (old,))]
    buffer = Buffer(name, DType.F32, sizes, strides, Role.TEMP)
    return replace(program, kernels=tuple(kernels), buffers=(*program.buffers, buffer))
