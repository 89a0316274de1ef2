"""Programs with a convolution, as lowering makes them: the library's call, then a chain per element of its result."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from unittest.mock import patch

import torch

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import pass_options
from fusepass.codegen.ir.dtype import DType, Precision
from fusepass.codegen.ir.expr import Builder, Expr, Op, ReduceOp
from fusepass.codegen.ir.index import Axis, Index, axis_index, contiguous_strides, linear
from fusepass.codegen.ir.product import Product
from fusepass.codegen.ir.program import Buffer, Kernel, LibraryCall, Program, Reduction, Ref, Role, Store
from fusepass.codegen.passes.anchors import AnchorOptions, AnchorSource, generate_anchors
from fusepass.codegen.passes.filled import fill_products
from fusepass.codegen.passes.halves import scales_of
from fusepass.codegen.passes.partials import Pieces
from fusepass.codegen.schedule_convolution import serves
from fusepass.codegen.schedule_product import serves as serves_product

F32 = DType.F32


@dataclass(frozen=True)
class Case:
    """A convolution; tuples have one number per spatial axis."""

    source: tuple[int, ...]
    out_channels: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool = False
    output_padding: tuple[int, ...] = ()
    channels_last: bool = False
    precision: Precision = Precision.FLOAT32
    groups: int = 1
    warps: int = 1
    dtype: DType = F32
    halves: bool = False  # scaled ones are multiplied, by groups of warps
    tiled: bool = False  # these in tiles of the input, whatever number of channels
    held: bool = False  # these with weights in registers
    filled: bool = False  # these of guessed scales, in products that make them themselves
    plain: bool = False  # of few results, as plain arithmetic
    pointwise: bool = False  # of single positions, as a product of the tensors
    result_last: bool = False  # the result lies channels last

    @property
    def weight(self) -> tuple[int, ...]:
        """The shape of the weight."""
        first, second = (self.source[1], self.out_channels) if self.transposed else (self.out_channels, self.source[1])
        return (first, second // self.groups, *self.kernel)

    @property
    def computed_by(self) -> AnchorSource:
        """Who computes it."""
        if self.plain:
            return AnchorSource.ARITHMETIC
        if not self.halves:
            return AnchorSource.GENERATED
        if self.held:
            return AnchorSource.REGISTER_STATIONARY
        return AnchorSource.TILED_HALVES if self.tiled else AnchorSource.HALVES

    @property
    def geometry(self) -> tuple[object, ...]:
        """What aten.convolution takes after the bias."""
        missing = self.output_padding or (0,) * len(self.kernel)
        return (self.stride, self.padding, self.dilation, self.transposed, missing, self.groups)

    @property
    def result(self) -> tuple[int, ...]:
        """The shape of the result."""
        meta = [torch.empty(shape, device="meta") for shape in (self.source, self.weight)]
        return tuple(torch.convolution(*meta, None, *self.geometry).shape)  # type: ignore[call-overload]


def program_of(case: Case, *, chain: bool = True, residual: bool = False) -> Program:
    """``relu(conv + bias) * 2`` as a chain of one kernel behind the library's call, or the call alone.

    With a `residual`, a tensor like the result is added.
    """
    b, dtype = Builder(), case.dtype
    shape = case.result
    strides = _strides(case.source, last=case.channels_last)
    along = _strides(shape, last=case.result_last)
    buffers = [
        Buffer("x", dtype, case.source, strides, Role.INPUT),
        Buffer("w", dtype, case.weight, contiguous_strides(case.weight), Role.INPUT),
        Buffer("bias", dtype, (case.out_channels,), (1,), Role.INPUT),
        Buffer("conv_out", dtype, shape, along, Role.ANCHOR),
    ]
    operands = (Ref("x"), Ref("w"), None, *case.geometry)
    rounded = case.precision is Precision.TF32
    call = LibraryCall("conv_out", "aten.convolution.default", operands, tf32=rounded)
    inputs = ("x", "w", "bias")
    if not chain:
        return Program("conv", (*buffers[:2], buffers[3]), inputs[:2], ("conv_out",), (call,), ())
    buffers.append(Buffer("y", dtype, shape, along, Role.OUTPUT))
    axes = tuple(Axis(f"a{number}", size) for number, size in enumerate(shape))
    here = linear([axis_index(axis) for axis in axes], along)
    total = b.apply(Op.ADD, _load(b, case, "conv_out", here), _load(b, case, "bias", axis_index(axes[1])))
    value = b.apply(Op.MUL, b.apply(Op.MAXIMUM, total, b.const(0.0, F32)), b.const(2.0, F32))
    if residual:
        buffers.append(Buffer("r", dtype, shape, along, Role.INPUT))
        inputs, value = (*inputs, "r"), b.apply(Op.ADD, value, _load(b, case, "r", here))
    kernel = Kernel("conv_relu", axes, (), (), (), (Store("y", here, b.cast(value, dtype)),), ("relu", "mul"))
    return Program("conv_relu_mul", tuple(buffers), inputs, ("y",), (call,), (kernel,))


def _strides(shape: tuple[int, ...], *, last: bool) -> tuple[int, ...]:
    """Of a tensor (samples, channels, *spatial) that is contiguous, or lies channels last."""
    whole, *inner = contiguous_strides((shape[0], *shape[2:], shape[1]))
    return (whole, 1, *inner[:-1]) if last else contiguous_strides(shape)


def _load(b: Builder, case: Case, name: str, index: Index) -> Expr:
    return b.cast(b.load(name, index, case.dtype), F32)


class Over(enum.Enum):
    """What is computed of the channels of a position."""

    LOGSUMEXP = "logsumexp"
    SOFTMAX = "softmax"
    NORMALISED = "normalised"
    ARGMAX = "argmax"


def reduced(case: Case, over: Over) -> Program:
    """``over(conv + bias)`` along the channels, as one kernel behind the library's call."""
    b = Builder()
    program = program_of(case)
    shape = case.result
    axes = tuple(Axis(f"a{number}", size) for number, size in enumerate(shape))
    rows, cols = (axes[0], *axes[2:]), (axes[1],)
    inner = contiguous_strides((shape[0], *shape[2:]))
    per_row, per_element = (
        linear([axis_index(axis) for axis in rows], inner),
        linear([axis_index(axis) for axis in axes], contiguous_strides(shape)),
    )
    x = b.apply(Op.ADD, _load(b, case, "conv_out", per_element), _load(b, case, "bias", axis_index(axes[1])))
    x = b.apply(Op.MUL, x, b.const(1 / 64, F32))  # exponentials of large numbers would magnify rounding
    top, total, mean = (
        b.reduction_result("top", 0, F32),
        b.reduction_result("total", 0, F32),
        b.reduction_result("moments", 0, F32),
    )
    shifted = b.apply(Op.EXP, b.apply(Op.SUB, x, top))
    softmax = ((Reduction("top", ReduceOp.MAX, (x,), F32),), (Reduction("total", ReduceOp.SUM, (shifted,), F32),))
    reduction_loops, stored, dtype, whole = softmax, b.apply(Op.DIV, shifted, total), F32, True
    if over is Over.LOGSUMEXP:
        stored, whole = b.apply(Op.ADD, b.apply(Op.LOG, total), top), False
    elif over is Over.NORMALISED:
        reduction_loops = ((Reduction("moments", ReduceOp.MOMENTS, (x,), F32),),)
        variance = b.apply(Op.DIV, b.reduction_result("moments", 1, F32), b.const(case.out_channels, F32))
        scale = b.apply(Op.RSQRT, b.apply(Op.ADD, variance, b.const(1e-5, F32)))
        stored = b.apply(Op.MUL, b.apply(Op.SUB, x, mean), scale)
    elif over is Over.ARGMAX:
        place = b.position(axis_index(axes[1]))
        reduction_loops = ((Reduction("first", ReduceOp.ARGMAX, (x, place), F32),),)
        stored, dtype, whole = b.reduction_result("first", 1, DType.I64), DType.I64, False
    store = Store("y", per_element if whole else per_row, stored)
    kernel = Kernel(
        over.value, rows, cols, reduction_loops, () if whole else (store,), (store,) if whole else (), (over.value,)
    )
    sizes = shape if whole else (shape[0], *shape[2:])
    result = Buffer("y", dtype, sizes, contiguous_strides(sizes), Role.OUTPUT)
    return replace(program, buffers=(*program.buffers[:-1], result), kernels=(kernel,))


def generated_reduction(case: Case, over: Over) -> Program:
    """The same with the convolution in the kernel."""
    return _generated(case, reduced(case, over), Builder())


class Across(enum.Enum):
    """What is computed of the positions."""

    EACH = "sum, extremes and moments of each plane"
    BATCH = "batch norm"
    LAYER = "layer norm"
    ALL = "sum of everything"


def pooled(case: Case, across: Across, b: Builder) -> Program:
    """Reductions over the positions of ``conv + bias``, and what is done with them, as one kernel behind the library's call."""
    program, shape = program_of(case), case.result
    axes = tuple(Axis(f"a{number}", size) for number, size in enumerate(shape))
    kept = {Across.EACH: axes[:2], Across.BATCH: axes[1:2], Across.LAYER: axes[:1], Across.ALL: ()}[across]
    rows = kept or (Axis("one", 1),)
    cols = tuple(axis for axis in axes if axis not in kept)
    per_element = linear([axis_index(axis) for axis in axes], contiguous_strides(shape))
    x = b.apply(Op.ADD, _load(b, case, "conv_out", per_element), _load(b, case, "bias", axis_index(axes[1])))
    moments = Reduction("moments", ReduceOp.MOMENTS, (x,), F32)
    reductions = {Across.ALL: (Reduction("total", ReduceOp.SUM, (x,), F32),)}.get(across, (moments,))
    stores: tuple[Store, ...] = ()
    kinds = {"y": ("total", 0)}
    if across is Across.EACH:
        others = (("total", ReduceOp.SUM), ("top", ReduceOp.MAX), ("bottom", ReduceOp.MIN))
        reductions = (moments, *(Reduction(name, op, (x,), F32) for name, op in others))
        kinds = {"total": ("total", 0), "top": ("top", 0), "bottom": ("bottom", 0), "mean": ("moments", 0)}
        kinds["squares"] = ("moments", 1)
    elif across is not Across.ALL:
        variance = b.apply(
            Op.DIV, b.reduction_result("moments", 1, F32), b.const(prod(axis.size for axis in cols), F32)
        )
        scale = b.apply(Op.RSQRT, b.apply(Op.ADD, variance, b.const(1e-5, F32)))
        result = b.apply(Op.MUL, b.apply(Op.SUB, x, b.reduction_result("moments", 0, F32)), scale)
        stores, kinds = (Store("y", per_element, result),), {"mean": ("moments", 0)}
    sizes = tuple(axis.size for axis in rows)
    strides = contiguous_strides(sizes)
    per_row = linear([axis_index(axis) for axis in rows], strides)
    row_stores = tuple(Store(name, per_row, b.reduction_result(*which, F32)) for name, which in kinds.items())
    results = [Buffer(name, F32, sizes, strides, Role.OUTPUT) for name in kinds]
    if stores:
        results.append(program.buffers[-1])
    kernel = Kernel(across.value, rows, cols, (reductions,), row_stores, stores, (across.value,))
    buffers = (*program.buffers[:-1], *results)
    return replace(program, buffers=buffers, kernels=(kernel,), outputs=tuple(each.name for each in results))


def generated_pooling(case: Case, across: Across, facts: DeviceFacts | None = None) -> Program:
    """The same with the reductions in the convolution's kernel, as far as they can be there."""
    facts = facts or DeviceFacts.h200()
    pieces = pass_options(facts).pieces
    builder = Builder()
    return _generated(case, pooled(case, across, builder), builder, pieces)


def generated(case: Case, *, chain: bool = True, residual: bool = False, facts: DeviceFacts | None = None) -> Program:
    """The same with the convolution as a kernel: the first form, or the first that `facts` have room for."""
    return _generated(case, program_of(case, chain=chain, residual=residual), Builder(), facts=facts)


def _generated(
    case: Case,
    program: Program,
    builder: Builder,
    pieces: Pieces = lambda program, kernel: None,
    facts: DeviceFacts | None = None,
) -> Program:
    def choose(made: Program, kernel: Kernel) -> bool:
        if isinstance(kernel.anchor, Product) and kernel.anchor.dtype is F32 and not case.pointwise:
            return False
        fits = serves_product if isinstance(kernel.anchor, Product) else serves
        return facts is None or fits(made, kernel, facts)

    options = AnchorOptions(choose, case.computed_by, warps=4 if case.halves else case.warps, pieces=pieces)
    if not case.filled:
        return generate_anchors(program, builder, options)
    with patch.dict(scales_of.__kwdefaults__, least=0):
        made = generate_anchors(program, builder, options)
    return fill_products(made, builder, lambda program, kernel: True)


FILLED = {
    name: replace(case, precision=Precision.TF32, halves=True, filled=True)
    for name, case in {
        "2d": Case((2, 32, 17, 132), 20, (3, 3), (1, 1), (1, 1), (1, 1)),
        "2d, two chunks of a warp": Case((1, 64, 16, 256), 20, (3, 3), (1, 1), (1, 1), (1, 1)),
        "2d, transposed, no border behind": Case((2, 32, 17, 128), 64, (3, 3), (1, 1), (2, 1), (1, 1), True),
        "2d, six chunks, dilated": Case((1, 48, 20, 128), 8, (3, 2), (1, 1), (1, 1), (2, 3)),
        "3d": Case((1, 32, 2, 30, 128), 12, (1, 3, 3), (1, 1, 1), (0, 1, 0), (1, 1, 1)),
    }.items()
}

DEPTHWISE: dict[str, Case] = {
    "depthwise": Case((2, 6, 9, 13), 6, (3, 3), (1, 1), (1, 1), (1, 1), groups=6),
    "depthwise, strided and dilated": Case((2, 3, 17, 19), 6, (5, 2), (2, 3), (3, 0), (1, 2), groups=3),
    "depthwise, channels last": Case((2, 8, 9, 10), 8, (7, 7), (1, 1), (3, 3), (1, 1), channels_last=True, groups=8),
    "depthwise, small images": Case((2, 4, 16, 24), 4, (5, 5), (1, 1), (2, 2), (1, 1), groups=4),
    "depthwise, bands": Case((1, 2, 192, 64), 2, (3, 3), (1, 1), (1, 1), (1, 1), groups=2),
    "depthwise, odd": Case((2, 3, 47, 53), 3, (5, 5), (1, 1), (2, 2), (1, 1), groups=3),
    "depthwise, wide": Case((1, 2, 23, 611), 2, (3, 3), (1, 1), (1, 1), (1, 1), groups=2),
    "depthwise, wide, vectors": Case((1, 2, 19, 1040), 2, (3, 5), (1, 1), (1, 2), (1, 1), groups=2),
    "depthwise, every second column": Case((2, 4, 24, 32), 4, (5, 5), (1, 2), (4, 2), (2, 1), groups=4),
    "depthwise, every second row": Case((2, 4, 31, 32), 8, (7, 5), (2, 1), (9, 0), (3, 1), groups=4),
    "depthwise, transposed": Case((2, 4, 7, 9), 4, (4, 4), (2, 2), (1, 1), (1, 1), True, groups=4),
    "depthwise, transposed, uneven": Case((2, 3, 6, 7), 6, (3, 5), (1, 3), (2, 1), (2, 1), True, (1, 2), groups=3),
    "depthwise, transposed, steps of one": Case((2, 4, 12, 16), 4, (5, 5), (1, 1), (2, 2), (1, 1), True, groups=4),
    "depthwise, transposed, copies": Case((2, 3, 9, 14), 6, (3, 5), (1, 1), (0, 1), (2, 1), True, groups=3),
    "depthwise, 3d, no border": Case((2, 3, 5, 6, 7), 3, (3, 3, 2), (1, 1, 1), (0, 0, 0), (1, 1, 1), groups=3),
    "depthwise, 3d, planes": Case((2, 8, 6, 12, 16), 8, (3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1), groups=8),
    "depthwise, 3d, every second plane": Case(
        (1, 6, 9, 14, 15), 6, (5, 3, 3), (2, 1, 1), (2, 1, 1), (1, 1, 1), groups=6
    ),
    "depthwise, 1d": Case((6, 4, 200), 4, (9,), (1,), (4,), (1,), groups=4),
    "depthwise, 1d, odd": Case((3, 5, 131), 5, (31,), (1,), (15,), (1,), groups=5),
    "depthwise, 1d, one sample": Case((1, 6, 300), 6, (15,), (1,), (14,), (1,), groups=6),
    "depthwise, 1d, steps": Case((4, 6, 260), 6, (31,), (2,), (15,), (1,), groups=6),
    "depthwise, 1d, short rows": Case((16, 8, 12), 8, (7,), (1,), (3,), (1,), groups=8),
    "depthwise, 7 x 7": Case((2, 3, 20, 24), 3, (7, 7), (1, 1), (3, 3), (1, 1), groups=3),
    "depthwise, large windows": Case((1, 3, 40, 48), 3, (11, 11), (1, 1), (5, 5), (1, 1), groups=3),
    "depthwise, 3d, large windows": Case((1, 4, 9, 14, 16), 4, (5, 5, 5), (1, 1, 1), (2, 2, 2), (1, 1, 1), groups=4),
    "depthwise, 3d": Case((1, 4, 5, 6, 7), 4, (3, 1, 2), (1, 1, 1), (1, 0, 1), (1, 1, 1), groups=4),
}

POINTWISE: dict[str, Case] = {
    "2d": Case((2, 12, 5, 7), 20, (1, 1), (1, 1), (0, 0), (1, 1), pointwise=True),
    "1d, TF32": Case((3, 40, 33), 7, (1,), (1,), (0,), (1,), precision=Precision.TF32, pointwise=True),
    "3d, many channels": Case((1, 130, 2, 3, 4), 70, (1, 1, 1), (1, 1, 1), (0, 0, 0), (1, 1, 1), pointwise=True),
    "2d, whole vectors, TF32": Case(
        (2, 64, 8, 12), 96, (1, 1), (1, 1), (0, 0), (1, 1), precision=Precision.TF32, pointwise=True
    ),
    "2d, channels last": Case((2, 24, 4, 6), 33, (1, 1), (1, 1), (0, 0), (1, 1), channels_last=True, pointwise=True),
    "2d, transposed": Case((1, 9, 5, 6), 17, (1, 1), (1, 1), (0, 0), (1, 1), True, pointwise=True),
    "2d, one position": Case((5, 33, 1, 1), 6, (1, 1), (1, 1), (0, 0), (1, 1), pointwise=True),
    "2d, whole input": Case((9, 6, 3, 4), 11, (3, 4), (2, 1), (0, 0), (1, 1), pointwise=True),
    "3d, whole input, TF32": Case(
        (3, 20, 2, 3, 4), 8, (2, 3, 4), (1, 1, 1), (0, 0, 0), (1, 1, 1), precision=Precision.TF32, pointwise=True
    ),
    "2d, transposed, one position": Case((7, 12, 1, 1), 5, (3, 4), (2, 1), (0, 0), (1, 1), True, pointwise=True),
    "1d, transposed, one position, TF32": Case(
        (4, 36, 1), 24, (4,), (1,), (0,), (1,), True, precision=Precision.TF32, pointwise=True
    ),
}

PATCHES: dict[str, Case] = {
    name: replace(case, pointwise=True, warps=4)
    for name, case in {
        "2d": Case((2, 20, 8, 20), 9, (4, 4), (4, 4), (0, 0), (1, 1)),
        "2d, odd images, TF32": Case((2, 20, 9, 19), 10, (3, 4), (3, 4), (0, 0), (1, 1), precision=Precision.TF32),
        "2d, result channels last": Case((3, 20, 9, 18), 24, (3, 4), (3, 4), (0, 0), (1, 1), result_last=True),
        "2d, halves": Case((2, 12, 16, 24), 10, (8, 8), (8, 8), (0, 0), (1, 1), dtype=DType.F16),
        "1d": Case((3, 40, 33), 10, (8,), (8,), (0,), (1,)),
        "1d, bfloat16": Case((3, 24, 130), 40, (16,), (16,), (0,), (1,), dtype=DType.BF16),
        "3d": Case((2, 12, 4, 9, 18), 10, (2, 3, 4), (2, 3, 4), (0, 0, 0), (1, 1, 1)),
    }.items()
}
"""Convolutions whose windows lie side by side: products of all windows, as they lie, and the weights."""

LARGE_KERNEL = Case((2, 3, 58, 57), 96, (11, 11), (4, 4), (2, 2), (1, 1), warps=4)
"""No block has room for all of its weights, nor for those of 64 output channels in two parts."""

CASES: dict[str, Case] = {
    "2d": Case((2, 3, 11, 13), 5, (3, 3), (1, 1), (0, 0), (1, 1)),
    "2d, 8 to 40 channels": Case((1, 8, 9, 20), 40, (3, 3), (1, 1), (1, 1), (1, 1)),
    "2d, 70 channels": Case((1, 2, 7, 9), 70, (2, 3), (1, 1), (0, 1), (1, 1)),
    "2d, 80 channels": Case((2, 2, 7, 9), 80, (3, 3), (1, 1), (0, 1), (1, 1)),
    "2d, strided and dilated": Case((2, 4, 15, 17), 6, (3, 2), (2, 3), (2, 1), (2, 3)),
    "2d, one by one": Case((1, 1, 1, 1), 1, (1, 1), (1, 1), (0, 0), (1, 1)),
    "2d, result channels last": Case(
        (2, 3, 9, 21), 20, (3, 3), (2, 2), (1, 1), (1, 1), channels_last=True, result_last=True
    ),
    "2d, channels last": Case((2, 6, 9, 10), 16, (3, 3), (1, 1), (1, 1), (1, 1), channels_last=True),
    "1d": Case((3, 5, 50), 7, (4,), (1,), (2,), (1,)),
    "1d, strided": Case((2, 2, 300), 16, (7,), (5,), (3,), (1,)),
    "3d": Case((2, 3, 6, 9, 10), 16, (4, 4, 4), (1, 1, 1), (0, 0, 0), (1, 1, 1)),
    "3d, padded": Case((1, 8, 4, 6, 7), 12, (3, 3, 3), (1, 2, 1), (1, 1, 1), (1, 1, 1)),
    "transposed 2d": Case((2, 4, 5, 6), 9, (3, 3), (2, 2), (1, 1), (1, 1), True, (1, 1)),
    "transposed 2d, kernel below stride": Case((1, 3, 4, 5), 4, (2, 1), (3, 2), (0, 0), (1, 1), True),
    "transposed 2d, dilated": Case((1, 3, 6, 5), 17, (3, 4), (2, 3), (2, 1), (3, 2), True, (1, 2)),
    "transposed 2d, stride 1": Case((1, 5, 6, 7), 8, (5, 5), (1, 1), (1, 1), (1, 1), True),
    "transposed 3d": Case((1, 3, 3, 4, 5), 16, (3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1), True, (1, 1, 1)),
    "many channels": Case((2, 20, 9, 11), 24, (3, 3), (1, 1), (1, 1), (1, 1)),
    "many channels, one by one": Case((1, 40, 5, 7), 70, (1, 1), (1, 1), (0, 0), (1, 1)),
    "many channels, strided and dilated": Case((1, 16, 15, 17), 6, (3, 2), (2, 3), (2, 1), (2, 3)),
    "many channels, last": Case((2, 24, 6, 7), 33, (3, 3), (1, 1), (1, 1), (1, 1), channels_last=True),
    "many channels, to 128": Case((1, 12, 9, 6), 121, (3, 2), (1, 1), (1, 0), (1, 1)),
    "many channels, to 80": Case((2, 9, 7, 9), 80, (3, 3), (1, 1), (0, 1), (1, 1)),
    "many channels, to 208": Case((2, 20, 4, 5), 208, (1, 2), (1, 1), (0, 1), (1, 1)),
    "many channels, 1d": Case((3, 9, 50), 7, (4,), (1,), (2,), (1,)),
    "many channels, 3d": Case((1, 32, 4, 5, 6), 64, (3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1)),
    "many channels, transposed": Case((1, 20, 5, 6), 9, (3, 3), (2, 2), (1, 1), (1, 1), True, (1, 1)),
    "many channels, kernel below stride": Case((1, 17, 4, 5), 4, (2, 1), (3, 2), (0, 0), (1, 1), True),
    "many channels, transposed by 1": Case((1, 9, 6, 7), 8, (5, 5), (1, 1), (1, 1), (1, 1), True),
    "many channels, transposed 3d": Case((1, 32, 2, 3, 4), 64, (4, 4, 4), (2, 2, 2), (1, 1, 1), (1, 1, 1), True),
    "2d, rows of whole vectors": Case((2, 3, 6, 16), 5, (3, 5), (1, 1), (1, 2), (1, 1)),
    "many channels, rows of whole vectors": Case((2, 20, 7, 36), 24, (3, 4), (2, 1), (1, 3), (1, 1)),
    "transposed 2d, rows of whole vectors": Case((1, 20, 5, 8), 9, (3, 3), (2, 2), (1, 1), (1, 1), True, (1, 1)),
    "transposed 1d": Case((2, 16, 9), 33, (4,), (2,), (1,), (1,), True),
}

GROUPED: dict[str, Case] = {
    "4 groups, transposed by 2 and 3": Case((2, 8, 5, 6), 12, (3, 5), (2, 3), (1, 2), (2, 1), True, groups=4),
    "2 groups, 2d": Case((1, 16, 9, 20), 16, (3, 3), (1, 1), (1, 1), (1, 1), groups=2),
    "2 groups of many channels": Case((2, 46, 9, 8), 42, (3, 3), (1, 1), (1, 1), (1, 1), groups=2),
    "5 groups of one channel, transposed": Case(
        (2, 5, 5, 6), 5, (3, 3), (2, 2), (1, 1), (3, 3), True, (1, 1), groups=5
    ),
    "2 groups, to 160": Case((1, 4, 7, 9), 160, (3, 3), (1, 1), (0, 1), (1, 1), groups=2),
    "3 groups, channels last": Case((2, 9, 15, 17), 21, (3, 2), (2, 3), (2, 1), (2, 3), channels_last=True, groups=3),
    "2 groups, transposed 3d": Case(
        (1, 6, 3, 4, 5), 8, (3, 5, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1), True, (1, 1, 1), groups=2
    ),
    "2 groups of many channels, transposed": Case(
        (1, 40, 5, 6), 18, (3, 3), (2, 2), (1, 1), (1, 1), True, (1, 1), groups=2
    ),
    "3 groups, to 243": Case((1, 60, 4, 5), 243, (1, 2), (1, 1), (0, 1), (1, 1), groups=3),
    "2 groups, one by one": Case((1, 44, 5, 7), 70, (1, 1), (1, 1), (0, 0), (1, 1), groups=2),
    "2 groups, 1d": Case((3, 10, 50), 8, (4,), (1,), (2,), (1,), groups=2),
}
"""Convolutions of several groups of channels, none of which is one channel of a plain one."""

DIRECT_HALVES: dict[str, Case] = {
    name: replace(case, dtype=dtype, warps=warps)
    for name, case, dtype, warps in (
        ("odd rows", CASES["2d, strided and dilated"], DType.F16, 4),
        ("rows of 16", CASES["2d, rows of whole vectors"], DType.BF16, 4),
        ("rows of 12", Case((2, 3, 9, 12), 20, (3, 3), (1, 1), (1, 1), (1, 1)), DType.F16, 4),
        ("rows of 10", CASES["2d, channels last"], DType.F16, 4),
        ("to 70", replace(CASES["2d, 70 channels"], source=(1, 2, 7, 14)), DType.BF16, 4),
        ("one warp", CASES["2d, rows of whole vectors"], DType.F16, 1),
        ("1d", CASES["1d, strided"], DType.F16, 4),
        ("3d", CASES["3d, padded"], DType.BF16, 4),
        ("transposed", CASES["transposed 2d, dilated"], DType.F16, 4),
        ("2 groups", GROUPED["2 groups, 2d"], DType.BF16, 4),
        ("last", replace(CASES["2d, result channels last"], out_channels=24), DType.BF16, 4),
        ("last, 2 groups", replace(GROUPED["2 groups, 2d"], out_channels=16, result_last=True), DType.F16, 4),
        ("last, transposed", replace(CASES["transposed 2d"], out_channels=8, result_last=True), DType.BF16, 4),
        ("2 groups, many channels", Case((1, 48, 6, 16), 48, (3, 3), (1, 1), (1, 1), (1, 1), groups=2), DType.F16, 4),
        ("2 groups, many channels, one warp", GROUPED["2 groups of many channels"], DType.F16, 1),
    )
}
"""Convolutions of halves of few channels, or in groups."""

REDUCED = (
    "2d",
    "2d, 8 to 40 channels",
    "transposed 2d",
    "many channels",
    "many channels, transposed",
    "many channels, 1d",
    "many channels, to 128",
)
"""Those that are also reduced over channels in the same kernel."""

POOLED = (
    "1d",
    "1d, strided",
    "2d",
    "2d, 8 to 40 channels",
    "2d, 80 channels",
    "2d, channels last",
    "3d",
    "transposed 2d",
    "transposed 2d, dilated",
    "transposed 3d",
    "many channels",
    "many channels, to 208",
    "many channels, transposed",
)
"""Those that are also reduced over positions in the same kernel."""

FEW = (
    "2d",
    "2d, 8 to 40 channels",
    "2d, 70 channels",
    "2d, one by one",
    "2d, channels last",
    "1d",
    "3d",
    "transposed 1d",
    "transposed 2d",
    "transposed 2d, dilated",
    "transposed 2d, kernel below stride",
    "transposed 2d, stride 1",
    "transposed 3d",
)
"""Those of few channels that scaled halves serve."""

HALVED: dict[str, Case] = {
    "2d": Case((2, 24, 9, 11), 20, (3, 3), (1, 1), (1, 1), (1, 1)),
    "2d, strided and dilated": Case((2, 20, 15, 17), 6, (3, 2), (2, 3), (2, 1), (2, 3)),
    "2d, odd channels, one by one": Case((3, 61, 5, 7), 70, (1, 1), (1, 1), (0, 0), (1, 1)),
    "2d, channels last": Case((2, 24, 6, 7), 33, (3, 3), (1, 1), (0, 1), (1, 1), channels_last=True),
    "2d, border that nothing reads": Case((1, 32, 8, 8), 8, (2, 2), (3, 3), (0, 0), (1, 1)),
    "2d, a border of whole vectors": Case((2, 24, 3, 64), 8, (3, 3), (1, 1), (1, 1), (1, 1)),
    "1d": Case((3, 32, 50), 7, (4,), (1,), (2,), (1,)),
    "3d": Case((1, 32, 4, 5, 6), 64, (3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1)),
    "3d, strided": Case((2, 18, 5, 9, 8), 12, (2, 3, 1), (1, 2, 2), (0, 1, 0), (2, 1, 1)),
    "transposed": Case((2, 24, 6, 7), 9, (3, 5), (1, 1), (1, 1), (1, 1), True),
    "transposed, dilated": Case((1, 40, 6, 7), 8, (3, 2), (1, 1), (0, 1), (2, 3), True),
    "transposed, cut": Case((1, 40, 9, 8), 8, (2, 3), (1, 1), (2, 3), (1, 1), True),
    "transposed, by 2": Case((2, 24, 5, 6), 9, (4, 4), (2, 2), (1, 1), (1, 1), True),
    "transposed, by 2 and 3, odd": Case((2, 24, 5, 6), 9, (4, 3), (2, 3), (1, 0), (1, 1), True, (1, 2)),
    "transposed, by 1 and 2, dilated": Case((1, 32, 4, 5), 4, (2, 6), (1, 2), (0, 3), (2, 1), True, (0, 1)),
    "transposed 1d": Case((2, 24, 9), 33, (4,), (2,), (1,), (1,), True),
    "transposed 3d, by 2": Case((1, 32, 2, 3, 4), 16, (2, 4, 4), (2, 2, 2), (0, 1, 2), (1, 1, 1), True, (1, 0, 1)),
    "transposed 3d": Case((1, 32, 3, 4, 5), 16, (5, 3, 3), (1, 1, 1), (0, 1, 2), (1, 1, 1), True),
    "2d, neighbours": Case((2, 32, 7, 30), 20, (3, 3), (1, 1), (1, 1), (1, 1)),
    "2d, neighbours, dilated": Case((1, 64, 4, 75), 72, (2, 5), (1, 1), (1, 4), (3, 2), False),
    "transposed, neighbours, by 2": Case((2, 48, 8, 19), 20, (4, 4), (2, 2), (1, 1), (1, 1), True),
}
"""Convolutions of many channels that are products of scaled halves where they may be rounded to TF32."""

FEW_RESULTS: dict[str, Case] = {
    name: replace(case, plain=True)
    for name, case in {
        "to 3": Case((2, 24, 19, 44), 3, (3, 3), (1, 1), (1, 1), (1, 1)),
        "to 1, odd rows": Case((3, 5, 23, 37), 1, (3, 3), (1, 1), (1, 1), (1, 1)),
        "to 8, 7 x 7": Case((1, 4, 20, 24), 8, (7, 7), (1, 1), (3, 3), (1, 1)),
        "to 2, small images": Case((24, 8, 5, 6), 2, (3, 3), (1, 1), (1, 1), (1, 1)),
        "to 4, single positions": Case((2, 48, 6, 20), 4, (1, 1), (1, 1), (0, 0), (1, 1)),
        "to 5, no border": Case((2, 16, 12, 70), 5, (2, 3), (1, 1), (0, 0), (1, 1)),
        "to 3, strided and dilated": Case((2, 6, 33, 41), 3, (3, 4), (2, 3), (2, 1), (3, 2)),
        "to 2, 1d": Case((4, 12, 333), 2, (5,), (1,), (2,), (1,)),
        "to 2, 1d, half a vector more": Case((2, 12, 334), 2, (3,), (1,), (1,), (1,)),
        "to 2, 3d": Case((2, 8, 5, 9, 12), 2, (3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1)),
        "to 2, 3d, strided": Case((1, 6, 7, 9, 11), 2, (3, 2, 3), (2, 1, 2), (2, 0, 1), (1, 2, 1)),
        "transposed to 3, by 2": Case((2, 16, 9, 20), 3, (4, 4), (2, 2), (1, 1), (1, 1), True),
        "transposed to 3, by 2, to odd sizes": Case((2, 8, 7, 12), 3, (3, 3), (2, 2), (0, 0), (1, 1), True),
        "transposed to 1, by 3 and 2, to a row more": Case((1, 9, 5, 13), 1, (4, 2), (3, 2), (0, 0), (1, 1), True),
        "transposed to 3, by 2, uneven": Case((2, 8, 7, 12), 3, (3, 3), (2, 2), (1, 1), (1, 1), True, (1, 1)),
        "transposed to 1, by 2 and 3": Case((2, 8, 7, 13), 1, (2, 5), (2, 3), (0, 1), (1, 1), True),
        "transposed to 4": Case((2, 8, 7, 13), 4, (3, 5), (1, 1), (1, 3), (1, 1), True),
        "transposed to 2, 1d": Case((3, 8, 50), 2, (4,), (4,), (0,), (1,), True),
        "transposed to 1, 3d": Case((2, 8, 3, 4, 9), 1, (2, 2, 2), (2, 2, 2), (0, 0, 0), (1, 1, 1), True),
    }.items()
}
"""Convolutions to few channels that are plain arithmetic, as output tiles."""

SAMPLES: dict[str, Callable[[], Program]] = {
    **{
        f"convolution {name}": functools.partial(generated, case)
        for name, case in (CASES | DEPTHWISE | FEW_RESULTS).items()
    },
    **{
        f"convolution {name}, {dtype.value}": functools.partial(generated, replace(FEW_RESULTS[name], dtype=dtype))
        for name in ("to 3", "to 1, odd rows", "transposed to 3, by 2")
        for dtype in (DType.F16, DType.BF16)
    },
    **{
        f"convolution {name}, {over.value}": functools.partial(generated_reduction, CASES[name], over)
        for name in REDUCED
        for over in Over
    },
    **{
        f"convolution {name}, {across.value}": functools.partial(generated_pooling, CASES[name], across)
        for name in POOLED
        for across in Across
        if across is Across.EACH or name in ("2d", "transposed 3d", "many channels")
    },
    **{
        f"convolution {name}, TF32": functools.partial(generated, replace(case, precision=Precision.TF32))
        for name, case in CASES.items()
        if "many channels" in name
    },
    **{
        f"convolution {name}, {precision.value}, 4 warps": functools.partial(
            generated, replace(case, precision=precision, warps=4)
        )
        for name, case in CASES.items()
        for precision in Precision
    },
    **{
        f"convolution {name}, {precision.value}, {warps} warps": functools.partial(
            generated, replace(case, precision=precision, warps=warps)
        )
        for name, case in GROUPED.items()
        for precision in Precision
        for warps in (1, 4)
    },
    **{
        f"convolution {name}, {across.value}, 4 warps": functools.partial(
            generated_pooling, replace(GROUPED[name], warps=4), across
        )
        for name in ("2 groups, 2d", "2 groups of many channels", "2 groups, transposed 3d")
        for across in Across
    },
    **{f"convolution of halves, {name}": functools.partial(generated, case) for name, case in DIRECT_HALVES.items()},
    **{
        f"convolution of halves, 2 groups, {across.value}": functools.partial(
            generated_pooling, DIRECT_HALVES["2 groups"], across
        )
        for across in (Across.EACH, Across.BATCH)
    },
    **{
        f"convolution of halves, rows of 16, {over.value}": functools.partial(
            generated_reduction, DIRECT_HALVES["rows of 16"], over
        )
        for over in (Over.SOFTMAX, Over.ARGMAX)
    },
    **{f"convolution of patches, {name}": functools.partial(generated, case) for name, case in PATCHES.items()},
    **{
        f"convolution, large kernel, {dtype.value}": functools.partial(generated, replace(LARGE_KERNEL, dtype=dtype))
        for dtype in (F32, DType.F16)
    },
    **{
        f"convolution {name}, residual, {'halves' if halves else '4 warps'}": functools.partial(
            generated, replace(CASES[name], warps=4, halves=halves), residual=True
        )
        for name in ("2d, 8 to 40 channels", "2d, rows of whole vectors", "transposed 3d")
        for halves in (False, True)
    },
    **{
        f"convolution {name}, {across.value}, 4 warps": functools.partial(
            generated_pooling, replace(CASES[name], warps=4), across
        )
        for name in ("2d, 8 to 40 channels", "transposed 3d", "many channels")
        for across in Across
    },
    **{
        f"convolution {name}, {over.value}, 4 warps": functools.partial(
            generated_reduction, replace(CASES[name], warps=4), over
        )
        for name in REDUCED
        for over in Over
    },
    **{f"convolution {name}, filled": functools.partial(generated, case) for name, case in FILLED.items()},
    **{
        f"convolution {name}, {precision.value}, halves": functools.partial(
            generated, replace(CASES[name], precision=precision, halves=True)
        )
        for name in FEW
        for precision in Precision
    },
    **{
        f"convolution {name}, of {dtype} in places": functools.partial(
            generated, replace(CASES[name], dtype=dtype, halves=True, tiled=True)
        )
        for name in ("2d", "2d, 70 channels", "3d", "transposed 2d", "many channels")
        for dtype in (DType.F16, DType.BF16)
    },
    "convolution 3d, planes, of float16 in places": functools.partial(
        generated_pooling, replace(CASES["3d"], dtype=DType.F16, halves=True), Across.EACH
    ),
    "convolution 2d, softmax, of bfloat16 in places": functools.partial(
        generated_reduction, replace(CASES["2d"], dtype=DType.BF16, halves=True), Over.SOFTMAX
    ),
    **{
        f"convolution {name}, {across.value}, halves": functools.partial(
            generated_pooling, replace(CASES[name], halves=True), across
        )
        for name in ("2d, 8 to 40 channels", "transposed 3d")
        for across in Across
    },
    **{
        f"convolution 3d, {across.value}, held halves": functools.partial(
            generated_pooling, replace(CASES["3d"], halves=True, held=True), across
        )
        for across in (Across.EACH, Across.ALL)
    },
    **{
        f"convolution {name}, products of halves": functools.partial(
            generated, replace(case, precision=Precision.TF32, halves=True)
        )
        for name, case in HALVED.items()
    },
    **{
        f"convolution {name}, of {dtype}{', last' if last else ''}": functools.partial(
            generated, replace(HALVED[name], dtype=dtype, halves=True, channels_last=last, result_last=last)
        )
        for name, dtype, last in (
            ("2d", DType.BF16, False),
            ("2d, neighbours", DType.F16, False),
            ("2d, neighbours", DType.F16, True),
            ("3d, strided", DType.F16, False),
            ("transposed, by 2", DType.BF16, True),
        )
    },
    **{
        f"convolution {name}, {across.value}, products of halves": functools.partial(
            generated_pooling, replace(HALVED[name], precision=Precision.TF32, halves=True), across
        )
        for name, across in (("2d", Across.LAYER), ("transposed, by 2 and 3, odd", Across.EACH))
    },
    **{
        f"convolution {name}, {over.value}, products of halves": functools.partial(
            generated_reduction, replace(HALVED[name], precision=Precision.TF32, halves=True), over
        )
        for name, over in (("2d, odd channels, one by one", Over.ARGMAX), ("transposed 3d, by 2", Over.SOFTMAX))
    },
}

LARGE: dict[str, Case] = {
    "2d, 64 to 128": Case((128, 64, 128, 128), 128, (3, 3), (1, 1), (0, 0), (1, 1)),
    "2d, 256 to 256": Case((32, 256, 56, 56), 256, (3, 3), (1, 1), (1, 1), (1, 1)),
    "2d, strided": Case((32, 128, 56, 56), 256, (3, 3), (2, 2), (1, 1), (1, 1)),
    "2d, one by one": Case((32, 256, 56, 56), 64, (1, 1), (1, 1), (0, 0), (1, 1)),
    "3d, 32 to 64": Case((16, 32, 16, 64, 64), 64, (3, 3, 3), (1, 1, 1), (0, 0, 0), (1, 1, 1)),
    "transposed 2d": Case((16, 128, 32, 32), 64, (3, 3), (2, 2), (1, 1), (1, 1), True, (1, 1)),
    "transposed 3d": Case((32, 32, 16, 32, 32), 64, (4, 4, 4), (2, 2, 2), (1, 1, 1), (1, 1, 1), True),
    "transposed 3d, stride 1": Case((16, 64, 16, 32, 32), 128, (5, 5, 5), (1, 1, 1), (0, 0, 0), (1, 1, 1), True),
    "transposed 2d, 64 to 64": Case((32, 64, 256, 256), 64, (4, 4), (2, 2), (1, 1), (1, 1), True, (1, 1)),
    "2d, 8 to 64": Case((128, 8, 128, 128), 64, (3, 3), (1, 1), (0, 0), (1, 1)),
    "3d, 8 to 32": Case((64, 8, 32, 64, 64), 32, (3, 3, 3), (1, 1, 1), (0, 0, 0), (1, 1, 1)),
    "3d, 3 to 16": Case((1024, 3, 16, 32, 32), 16, (4, 4, 4), (1, 1, 1), (0, 0, 0), (1, 1, 1)),
    "transposed 3d, 16 to 32": Case((16, 16, 16, 32, 32), 32, (3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1), True),
    "transposed 3d, 3 to 16": Case(
        (128, 3, 16, 32, 32), 16, (3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1), True, (1, 1, 1)
    ),
    "2d, 8 to 64, strided": Case((128, 8, 384, 384), 64, (6, 6), (4, 4), (0, 0), (1, 1)),
    "depthwise": Case((64, 256, 56, 56), 256, (3, 3), (1, 1), (1, 1), (1, 1), groups=256),
}
"""Sizes worth a measurement."""


def multiplying(program: Program) -> Kernel:
    """The kernel with the convolution."""
    return next(kernel for kernel in program.kernels if kernel.anchor is not None)
