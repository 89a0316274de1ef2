"""A small library of programs built by hand, for tests of schedules and renderers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce

from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Builder, Expr, Op, ReduceOp
from fusepass.codegen.ir.index import Axis, Bound, Index, axis_index, contiguous_strides, linear
from fusepass.codegen.ir.program import Buffer, Kernel, Program, Reduction, Role, Store
from fusepass.codegen.ir.verify import verify
from fusepass.codegen.passes.over_rows import reduce_over_rows
from fusepass.codegen.passes.partials import reduce_positions
from fusepass.codegen.passes.teams import form_teams

F32, F16, BF16, F64, I64, BOOL = DType.F32, DType.F16, DType.BF16, DType.F64, DType.I64, DType.BOOL


def buffer(name: str, role: Role, shape: Sequence[int], dtype: DType = F32, strides: Sequence[int] = ()) -> Buffer:
    return Buffer(name, dtype, tuple(shape), tuple(strides) or contiguous_strides(shape), role)


def given(name: str, shape: Sequence[int], dtype: DType = F32) -> Buffer:
    return buffer(name, Role.INPUT, shape, dtype)


def result(name: str, shape: Sequence[int], dtype: DType = F32) -> Buffer:
    return buffer(name, Role.OUTPUT, shape, dtype)


def program(name: str, buffers: Sequence[Buffer], *kernels: Kernel) -> Program:
    """A verified program; inputs and outputs are the buffers with those roles, in order."""
    inputs = tuple(b.name for b in buffers if b.role is Role.INPUT)
    outputs = tuple(b.name for b in buffers if b.role is Role.OUTPUT)
    made = Program(name, tuple(buffers), inputs, outputs, (), kernels)
    verify(made)
    return made


def at(*terms: tuple[Axis, int]) -> Index:
    return linear([axis_index(axis) for axis, _ in terms], [stride for _, stride in terms])


def gelu(b: Builder, x: Expr) -> Expr:
    half = b.apply(Op.MUL, x, b.const(0.5, F32))
    inner = b.apply(Op.ERF, b.apply(Op.MUL, x, b.const(math.sqrt(0.5), F32)))
    return b.apply(Op.MUL, half, b.apply(Op.ADD, inner, b.const(1.0, F32)))


def affine(count: int, dtype: DType = F32, role: Role = Role.INPUT) -> Program:
    """y = 2 * x + 1 on `count` elements."""
    b, i = Builder(), Axis("i", count)
    x = b.cast(b.load("x", axis_index(i), dtype), dtype.compute)
    y = b.apply(Op.ADD, b.apply(Op.MUL, x, b.const(2, x.dtype)), b.const(1, x.dtype))
    kernel = Kernel("affine", (i,), (), (), (), (Store("y", axis_index(i), y),), ("mul", "add"))
    return program("affine", [buffer("x", role, [count], dtype), result("y", [count], dtype)], kernel)


def channel_bias_gelu(n: int, c: int, hw: int) -> Program:
    """gelu(x + bias[c]) on n x c x hw."""
    b = Builder()
    axes = Axis("n", n), Axis("c", c), Axis("hw", hw)
    index = at((axes[0], c * hw), (axes[1], hw), (axes[2], 1))
    value = gelu(b, b.apply(Op.ADD, b.load("x", index, F32), b.load("bias", axis_index(axes[1]), F32)))
    kernel = Kernel("bias_gelu", axes, (), (), (), (Store("y", index, value),), ("add", "gelu"))
    buffers = [
        given("x", [n, c, hw]),
        given("bias", [c]),
        result("y", [n, c, hw]),
    ]
    return program("bias_gelu", buffers, kernel)


def last_axis_bias(rows: int, cols: int) -> Program:
    """x + bias[col], where `cols` need not be a multiple of anything."""
    b, r, c = Builder(), Axis("r", rows), Axis("c", cols)
    index = at((r, cols), (c, 1))
    value = b.apply(Op.ADD, b.load("x", index, F32), b.load("bias", axis_index(c), F32))
    kernel = Kernel("last_bias", (r, c), (), (), (), (Store("y", index, value),), ("add",))
    buffers = [given("x", [rows, cols]), given("bias", [cols])]
    return program("last_bias", [*buffers, result("y", [rows, cols])], kernel)


def transpose(n: int, m: int, dtype: DType = F32) -> Program:
    """y[j, i] = x[i, j]."""
    b, i, j = Builder(), Axis("i", n), Axis("j", m)
    kernel = Kernel(
        "transpose", (j, i), (), (), (), (Store("y", at((j, n), (i, 1)), b.load("x", at((i, m), (j, 1)), dtype)),)
    )
    return program("transpose", [given("x", [n, m], dtype), result("y", [m, n], dtype)], kernel)


def chain(count: int, steps: int, x: str = "x") -> Program:
    """Kernels that each read what the one before wrote, from the last element to the first, and add 1; the first reads `x`."""
    names, kernels = [x, *(f"t{step}" for step in range(1, steps)), "y"], []
    for step, (read, written) in enumerate(itertools.pairwise(names)):
        b, i = Builder(), Axis("i", count)
        loaded = b.load(read, Index(count - 1, ((i, -1),)), F32)
        store = Store(written, axis_index(i), b.apply(Op.ADD, loaded, b.const(1.0, F32)))
        kernels.append(Kernel(f"chain_{step}", (i,), (), (), (), (store,), ("flip", "add")))
    between = [buffer(name, Role.TEMP, [count]) for name in names[1:-1]]
    return program("chain", [given(x, [count]), result("y", [count]), *between], *kernels)


def mixed_layouts(n: int, c: int, hw: int, dtype: DType = F32, other: DType | None = None) -> Program:
    """y = max(x + z + bias, 0) in NCHW and its double in NHWC, from x in NHWC, z in NCHW and one bias per channel."""
    b = Builder()
    other = other or dtype
    image, channel, place = Axis("n", n), Axis("c", c), Axis("hw", hw)
    nchw = at((image, c * hw), (channel, hw), (place, 1))
    nhwc = at((image, c * hw), (place, c), (channel, 1))
    compute = dtype.compute
    x, z = (
        b.cast(b.load(name, index, kind), compute) for name, index, kind in (("x", nhwc, dtype), ("z", nchw, other))
    )
    bias = b.cast(b.load("bias", axis_index(channel), other), compute)
    value = b.apply(Op.MAXIMUM, b.apply(Op.ADD, b.apply(Op.ADD, x, z), bias), b.const(0.0, compute))
    double = b.apply(Op.MUL, value, b.const(2.0, compute))
    stores = (Store("y", nchw, b.cast(value, dtype)), Store("t", nhwc, b.cast(double, dtype)))
    kernel = Kernel("mixed", (image, channel, place), (), (), (), stores, ("add", "relu"))
    buffers = [given("x", [n, c, hw], dtype), given("z", [n, c, hw], other), given("bias", [c], other)]
    return program("mixed", [*buffers, result("y", [n, c, hw], dtype), result("t", [n, c, hw], dtype)], kernel)


def into_channels_last(n: int, c: int, hw: int, dtype: DType = F32) -> Program:
    """NHWC, from x in NCHW."""
    image, channel, place = Axis("n", n), Axis("c", c), Axis("hw", hw)
    x = Builder().load("x", at((image, c * hw), (channel, hw), (place, 1)), dtype)
    store = Store("y", at((image, c * hw), (place, c), (channel, 1)), x)
    kernel = Kernel("into_last", (image, place, channel), (), (), (), (store,), ("clone",))
    return program("into_last", [given("x", [n, c, hw], dtype), result("y", [n, hw, c], dtype)], kernel)


def out_of_channels_last(n: int, c: int, hw: int, dtype: DType = F32, other: DType | None = None) -> Program:
    """NCHW, max(x + bias, 0) of x in NHWC and one bias per channel."""
    b = Builder()
    image, channel, place = Axis("n", n), Axis("c", c), Axis("hw", hw)
    x = b.cast(b.load("x", at((image, c * hw), (place, c), (channel, 1)), dtype), dtype.compute)
    bias = b.cast(b.load("bias", axis_index(channel), dtype), dtype.compute)
    value = b.cast(b.apply(Op.MAXIMUM, b.apply(Op.ADD, x, bias), b.const(0.0, dtype.compute)), other or dtype)
    store = Store("y", at((image, c * hw), (channel, hw), (place, 1)), value)
    kernel = Kernel("out_of_last", (image, channel, place), (), (), (), (store,), ("add", "relu"))
    buffers = [given("x", [n, hw, c], dtype), given("bias", [c], dtype), result("y", [n, c, hw], other or dtype)]
    return program("out_of_last", buffers, kernel)


def concatenate_channels_last(n: int, a: int, c: int, hw: int) -> Program:
    """Two NHWC tensors along channels, the second times 3, into NCHW: guarded loads that cross."""
    b = Builder()
    total = a + c
    image, channel, place = Axis("n", n), Axis("ch", total), Axis("hw", hw)
    first = b.load("x", at((image, a * hw), (place, a), (channel, 1)), F32)
    second = b.load("z", at((image, c * hw), (place, c), (channel, 1)) - a, F32)
    tripled = b.apply(Op.MUL, second, b.const(3.0, F32))
    later = b.masked((Bound(axis_index(channel), a, total),), tripled, b.const(0.0, F32))
    value = b.masked((Bound(axis_index(channel), 0, a),), first, later)
    out = at((image, total * hw), (channel, hw), (place, 1))
    kernel = Kernel("cat", (image, channel, place), (), (), (), (Store("y", out, value),), ("cat",))
    buffers = [given("x", [n, hw, a]), given("z", [n, hw, c]), result("y", [n, total, hw])]
    return program("cat", buffers, kernel)


def max_pool_channels_last(
    n: int, c: int, size: int, window: int, stride: int, padding: int = 0, *, into_last: bool = False
) -> Program:
    """Max pooling of n NHWC images of c x size x size plus a bias per channel, into NCHW or NHWC."""
    b = Builder()
    out = (size + 2 * padding - window) // stride + 1
    image, channel, h, w = Axis("n", n), Axis("c", c), Axis("h", out), Axis("w", out)
    kh, kw = Axis("kh", window), Axis("kw", window)
    y, x = axis_index(h) * stride + axis_index(kh) - padding, axis_index(w) * stride + axis_index(kw) - padding
    where = axis_index(image) * (size * size * c) + y * (size * c) + x * c + axis_index(channel)
    added = b.apply(Op.ADD, b.load("x", where, F32), b.load("bias", axis_index(channel), F32))
    bounded = b.masked((Bound(y, 0, size), Bound(x, 0, size)), added, b.const(-math.inf, F32))
    value = b.window(ReduceOp.MAX, (kh, kw), bounded)
    axes: tuple[Axis, ...] = (image, channel, h, w)
    index = at((image, c * out * out), (channel, out * out), (h, out), (w, 1))
    if into_last:
        axes, index = (image, h, w, channel), at((image, c * out * out), (h, out * c), (w, c), (channel, 1))
    kernel = Kernel("pool", axes, (), (), (), (Store("y", index, value),), ("max_pool2d",))
    buffers = [given("x", [n, size, size, c]), given("bias", [c]), result("y", [n, out * out, c])]
    return program("pool", buffers, kernel)


def concatenate(n: int, a: int, c: int, hw: int) -> Program:
    """Two tensors along channels, the second times 3: guarded loads that stay vectors."""
    b = Builder()
    total = a + c
    axes = Axis("n", n), Axis("ch", total), Axis("hw", hw)
    out = at((axes[0], total * hw), (axes[1], hw), (axes[2], 1))
    first = b.load("x", at((axes[0], a * hw), (axes[1], hw), (axes[2], 1)), F32)
    second = b.load("z", at((axes[0], c * hw), (axes[1], hw), (axes[2], 1)) - a * hw, F32)
    tripled = b.apply(Op.MUL, second, b.const(3.0, F32))
    channel = axis_index(axes[1])
    later = b.masked((Bound(channel, a, total),), tripled, b.const(0.0, F32))
    value = b.masked((Bound(channel, 0, a),), first, later)
    kernel = Kernel("cat", axes, (), (), (), (Store("y", out, value),), ("cat",))
    buffers = [
        given("x", [n, a, hw]),
        given("z", [n, c, hw]),
        result("y", [n, total, hw]),
    ]
    return program("cat", buffers, kernel)


def max_pool(n: int, size: int, window: int, stride: int, padding: int) -> Program:
    """Max pooling of n images of size x size, plus one: a maximum that began at 0 would show."""
    b = Builder()
    out = (size + 2 * padding - window) // stride + 1
    image, h, w = Axis("n", n), Axis("h", out), Axis("w", out)
    kh, kw = Axis("kh", window), Axis("kw", window)
    y = axis_index(h) * stride + axis_index(kh) - padding
    x = axis_index(w) * stride + axis_index(kw) - padding
    loaded = b.load("x", axis_index(image) * (size * size) + y * size + x, F32)
    bounded = b.masked((Bound(y, 0, size), Bound(x, 0, size)), loaded, b.const(-math.inf, F32))
    pooled = b.window(ReduceOp.MAX, (kh, kw), bounded)
    value = b.apply(Op.ADD, pooled, b.const(1.0, F32))
    kernel = Kernel(
        "pool",
        (image, h, w),
        (),
        (),
        (),
        (Store("y", at((image, out * out), (h, out), (w, 1)), value),),
        ("max_pool2d", "add"),
    )
    return program("pool", [given("x", [n, size, size]), result("y", [n, out, out])], kernel)


def reduced_pool(
    n: int, c: int, size: tuple[int, int], window: int, pieces: int, dtype: DType = F32, *, stored: bool = True
) -> Program:
    """Maxima of windows around each place of images, and their sum, mean and squared deviations for each image, reduced in so many pieces."""
    b, kind = Builder(), dtype.compute
    rows = sample, channel, h, w = Axis("n", n), Axis("c", c), Axis("h", size[0]), Axis("w", size[1])
    taps, strides = (Axis("kh", window), Axis("kw", window)), contiguous_strides((n, c, *size))
    places = [axis_index(axis) + axis_index(tap) - window // 2 for axis, tap in zip((h, w), taps, strict=True)]
    x = b.load("x", linear([axis_index(sample), axis_index(channel), *places], strides), dtype)
    inside = tuple(Bound(place, 0, length) for place, length in zip(places, size, strict=True))
    pooled = b.window(ReduceOp.MAX, taps, b.masked(inside, b.cast(x, kind), b.const(-math.inf, kind)))
    where = linear([axis_index(axis) for axis in rows], strides)
    pool = Kernel("pool", rows, (), (), (), (Store("y", where, b.cast(pooled, dtype)),), ("max_pool2d",))
    value = b.cast(b.load("y", where, dtype), F32)
    reduction_loop = Reduction("total", ReduceOp.SUM, (value,), F32), Reduction("r", ReduceOp.MOMENTS, (value,), F32)
    found = {
        "sum": b.reduction_result("total", 0, F32),
        "mean": b.reduction_result("r", 0, F32),
        "m2": b.reduction_result("r", 1, F32),
    }
    each = at((sample, c), (channel, 1))
    stores = tuple(Store(name, each, stat) for name, stat in found.items())
    reduced = Kernel("moments", rows[:2], rows[2:], (reduction_loop,), stores, (), ("sum", "var_mean"))
    y = buffer("y", Role.OUTPUT if stored else Role.TEMP, [n, c, *size], dtype)
    made = program(
        "pool", [given("x", [n, c, *size], dtype), y, *(result(name, [n, c]) for name in found)], pool, reduced
    )
    moved = reduce_positions(made, b, 0, lambda program, kernel: pieces)
    assert moved is not None
    return moved


def pool_of_volumes(
    n: int,
    size: tuple[int, int, int],
    window: int,
    stride: int,
    padding: int,
    op: ReduceOp = ReduceOp.MAX,
    dtype: DType = F32,
) -> Program:
    """Pooling of n volumes, of float32 numbers made of `dtype`, plus one."""
    b, kind = Builder(), dtype.compute
    results = [(length + 2 * padding - window) // stride + 1 for length in size]
    volume, taps = Axis("n", n), [Axis(f"k{name}", window) for name in "dhw"]
    axes = [Axis(name, length) for name, length in zip("dhw", results, strict=True)]
    places = [axis_index(a) * stride + axis_index(tap) - padding for a, tap in zip(axes, taps, strict=True)]
    source, target = (tuple(math.prod(each[at + 1 :]) for at in range(3)) for each in (size, results))
    where = axis_index(volume) * math.prod(size)
    for place, step in zip(places, source, strict=True):
        where = where + place * step
    inside = tuple(Bound(place, 0, length) for place, length in zip(places, size, strict=True))
    other = b.const(-math.inf if op is ReduceOp.MAX else 0.0, kind)
    value = b.masked(inside, b.cast(b.load("x", where, dtype), kind), other)
    pooled = b.apply(Op.ADD, b.window(op, tuple(taps), value), b.const(1.0, kind))
    index = at((volume, math.prod(results)), *zip(axes, target, strict=True))
    kernel = Kernel("pool", (volume, *axes), (), (), (), (Store("y", index, b.cast(pooled, dtype)),), ("max_pool3d",))
    return program("pool", [given("x", [n, *size], dtype), result("y", [n, *results], dtype)], kernel)


def layer_norm(rows: int, cols: int, dtype: DType = F32, *, with_gelu: bool = False, weighted: bool = True) -> Program:
    """LayerNorm over the last axis, with weight and bias if `weighted`; also stores mean and rstd per row."""
    b, r, c = Builder(), Axis("r", rows), Axis("c", cols)
    index = at((r, cols), (c, 1))
    x = b.cast(b.load("x", index, dtype), F32)
    moments = Reduction("moments", ReduceOp.MOMENTS, (x,), F32)
    mean, m2 = b.reduction_result("moments", 0, F32), b.reduction_result("moments", 1, F32)
    variance = b.apply(Op.DIV, m2, b.const(max(cols, 1), F32))
    rstd = b.apply(Op.RSQRT, b.apply(Op.ADD, variance, b.const(1e-5, F32)))
    value = b.apply(Op.MUL, b.apply(Op.SUB, x, mean), rstd)
    if weighted:
        scaled = b.apply(Op.MUL, value, b.cast(b.load("weight", axis_index(c), dtype), F32))
        value = b.apply(Op.ADD, scaled, b.cast(b.load("bias", axis_index(c), dtype), F32))
    value = gelu(b, value) if with_gelu else value
    kernel = Kernel(
        "layer_norm",
        (r,),
        (c,),
        ((moments,),),
        (Store("mean", axis_index(r), mean), Store("rstd", axis_index(r), rstd)),
        (Store("y", index, value),),
        ("native_layer_norm",),
    )
    buffers = [
        given("x", [rows, cols], dtype),
        *(given(name, [cols], dtype) for name in ("weight", "bias") if weighted),
        result("y", [rows, cols], dtype),
        result("mean", [rows]),
        result("rstd", [rows]),
    ]
    return program("layer_norm", buffers, kernel)


def summed_columns(rows: int, cols: int, dtype: DType = F32) -> Program:
    """Twice a matrix, and the sums of its columns."""
    b, r, c = Builder(), Axis("r", rows), Axis("c", cols)
    value = b.apply(Op.MUL, b.cast(b.load("x", at((r, cols), (c, 1)), dtype), F32), b.const(2.0, F32))
    total = Reduction("total", ReduceOp.SUM, (value,), F32)
    sums = Store("sums", axis_index(c), b.reduction_result("total", 0, F32))
    twice = Store("y", at((r, cols), (c, 1)), b.cast(value, dtype))
    kernel = Kernel("summed_columns", (c,), (r,), ((total,),), (sums,), (twice,), ("mul", "sum"))
    buffers = [given("x", [rows, cols], dtype), result("y", [rows, cols], dtype), result("sums", [cols])]
    return program("summed_columns", buffers, kernel)


def norm_and_columns(samples: int, rows: int, cols: int, pieces: int, dtype: DType = F32) -> Program:
    """`layer_norm`, and of what it makes of the input, without weights, sum, mean and squared deviations over the rows of each sample, reduced in so many pieces by its kernel."""
    made, b = layer_norm(samples * rows, cols, dtype), Builder()
    n, r, c = Axis("n", samples), Axis("row", rows), Axis("channel", cols)
    row, x = at((n, rows), (r, 1)), b.load("x", at((n, rows * cols), (r, cols), (c, 1)), dtype)
    value = b.apply(Op.SUB, b.cast(x, F32), b.load("mean", row, F32))
    value = b.apply(Op.MUL, value, b.load("rstd", row, F32))
    reduction_loop = (
        Reduction("total", ReduceOp.SUM, (value,), F32),
        Reduction("columns", ReduceOp.MOMENTS, (value,), F32),
    )
    found = {
        "sums": b.reduction_result("total", 0, F32),
        "means": b.reduction_result("columns", 0, F32),
        "m2": b.reduction_result("columns", 1, F32),
    }
    stores = tuple(Store(name, at((n, cols), (c, 1)), stat) for name, stat in found.items())
    reduced = Kernel("columns", (n, c), (r,), (reduction_loop,), stores, (), ("sum", "var_mean"))
    buffers = [*made.buffers, *(result(name, [samples, cols]) for name in found)]
    both = program("norm_and_columns", buffers, *made.kernels, reduced)
    moved = reduce_over_rows(both, b, lambda program, kernel: pieces)
    assert moved.kernels[0].partials is not None
    return moved


def _softmax(b: Builder, name: str, load: Expr) -> tuple[Reduction, Expr]:
    reduction = Reduction(name, ReduceOp.SOFTMAX, (load,), F32)
    power = b.apply(Op.EXP, b.apply(Op.SUB, load, b.reduction_result(name, 0, F32)))
    return reduction, b.apply(Op.DIV, power, b.reduction_result(name, 1, F32))


def softmax_rows(rows: int, cols: int) -> Program:
    """softmax over the last axis."""
    b, r, c = Builder(), Axis("r", rows), Axis("c", cols)
    index = at((r, cols), (c, 1))
    reduction, value = _softmax(b, "softmax", b.load("x", index, F32))
    kernel = Kernel("softmax", (r,), (c,), ((reduction,),), (), (Store("y", index, value),), ("_softmax",))
    return program("softmax", [given("x", [rows, cols]), result("y", [rows, cols])], kernel)


def softmax_channels(n: int, c: int, hw: int) -> Program:
    """softmax over channels of n x c x hw, then tanh."""
    b = Builder()
    image, place, channel = Axis("n", n), Axis("hw", hw), Axis("c", c)
    index = at((image, c * hw), (channel, hw), (place, 1))
    reduction, value = _softmax(b, "softmax", b.load("x", index, F32))
    value = b.apply(Op.TANH, value)
    kernel = Kernel(
        "softmax_channels",
        (image, place),
        (channel,),
        ((reduction,),),
        (),
        (Store("y", index, value),),
        ("_softmax", "tanh"),
    )
    return program("softmax_channels", [given("x", [n, c, hw]), result("y", [n, c, hw])], kernel)


def softmax_channels_last(n: int, c: int, hw: int, dtype: DType = F32) -> Program:
    """softmax over channels of NHWC data, then tanh, into NCHW; its double into NHWC."""
    b = Builder()
    image, place, channel = Axis("n", n), Axis("hw", hw), Axis("c", c)
    nhwc = at((image, c * hw), (place, c), (channel, 1))
    nchw = at((image, c * hw), (channel, hw), (place, 1))
    reduction, value = _softmax(b, "softmax", b.cast(b.load("x", nhwc, dtype), dtype.compute))
    reduction = replace(reduction, dtype=dtype.compute)
    double = b.apply(Op.MUL, value, b.const(2.0, dtype.compute))
    stores = (
        Store("y", nchw, b.cast(b.apply(Op.TANH, value), dtype)),
        Store("t", nhwc, b.cast(double, dtype)),
    )
    kernel = Kernel("softmax", (image, place), (channel,), ((reduction,),), (), stores, ("_softmax", "tanh"))
    buffers = [given("x", [n, hw, c], dtype), result("y", [n, c, hw], dtype), result("t", [n, hw, c], dtype)]
    return program("softmax", buffers, kernel)


def width_norm_channels_last(n: int, c: int, w: int, dtype: DType = F32) -> Program:
    """Differences from the mean over the width of NWC data, over their spread, into NCW; their double into NWC."""
    b = Builder()
    image, channel, place = Axis("n", n), Axis("c", c), Axis("w", w)
    nwc = at((image, c * w), (place, c), (channel, 1))
    ncw = at((image, c * w), (channel, w), (place, 1))
    x = b.cast(b.load("x", nwc, dtype), dtype.compute)
    moments = Reduction("moments", ReduceOp.MOMENTS, (x,), dtype.compute)
    mean, m2 = b.reduction_result("moments", 0, dtype.compute), b.reduction_result("moments", 1, dtype.compute)
    variance = b.apply(Op.DIV, m2, b.const(w, dtype.compute))
    rstd = b.apply(Op.RSQRT, b.apply(Op.ADD, variance, b.const(1e-5, dtype.compute)))
    value = b.apply(Op.MUL, b.apply(Op.SUB, x, mean), rstd)
    double = b.apply(Op.MUL, value, b.const(2.0, dtype.compute))
    stores = (Store("y", ncw, b.cast(value, dtype)), Store("t", nwc, b.cast(double, dtype)))
    kernel = Kernel("width_norm", (image, channel), (place,), ((moments,),), (), stores, ("native_layer_norm",))
    buffers = [given("x", [n, w, c], dtype), result("y", [n, c, w], dtype), result("t", [n, w, c], dtype)]
    return program("width_norm", buffers, kernel)


def batch_norm_stats(n: int, c: int, hw: int) -> Program:
    """Mean and variance per channel of n x c x hw."""
    b = Builder()
    image, place, channel = Axis("n", n), Axis("hw", hw), Axis("c", c)
    load = b.load("x", at((image, c * hw), (channel, hw), (place, 1)), F32)
    moments = Reduction("moments", ReduceOp.MOMENTS, (load,), F32)
    variance = b.apply(Op.DIV, b.reduction_result("moments", 1, F32), b.const(n * hw, F32))
    stores = (
        Store("mean", axis_index(channel), b.reduction_result("moments", 0, F32)),
        Store("var", axis_index(channel), variance),
    )
    kernel = Kernel("bn_stats", (channel,), (image, place), ((moments,),), stores, (), ("native_batch_norm",))
    buffers = [given("x", [n, c, hw]), result("mean", [c]), result("var", [c])]
    return program("bn_stats", buffers, kernel)


def batch_norm_2d(n: int, c: int, hw: int) -> Program:
    """BatchNorm2d without weights in two kernels: statistics per channel, then the normalised result."""
    b = Builder()
    image, place, channel = Axis("n", n), Axis("hw", hw), Axis("c", c)
    index = at((image, c * hw), (channel, hw), (place, 1))
    x = b.load("x", index, F32)
    moments = Reduction("moments", ReduceOp.MOMENTS, (x,), F32)
    variance = b.apply(Op.DIV, b.reduction_result("moments", 1, F32), b.const(n * hw, F32))
    rstd = b.apply(Op.RSQRT, b.apply(Op.ADD, variance, b.const(1e-5, F32)))
    here = axis_index(channel)
    stores = (Store("mean", here, b.reduction_result("moments", 0, F32)), Store("rstd", here, rstd))
    stats = Kernel("bn_stats", (channel,), (image, place), ((moments,),), stores, (), ("native_batch_norm",))
    centred = b.apply(Op.SUB, x, b.load("mean", here, F32))
    value = b.apply(Op.MUL, centred, b.load("rstd", here, F32))
    apply = Kernel("bn_apply", (image, channel, place), (), (), (), (Store("y", index, value),), ("native_batch_norm",))
    buffers = [
        given("x", [n, c, hw]),
        buffer("mean", Role.TEMP, [c]),
        buffer("rstd", Role.TEMP, [c]),
        result("y", [n, c, hw]),
    ]
    return program("bn_2d", buffers, stats, apply)


def channel_differences(n: int, c: int, hw: int, dtype: DType = F32) -> Program:
    """Differences from the mean over all but the channels of n x c x hw; also stores the mean and the spread per channel."""
    b = Builder()
    image, channel, place = Axis("n", n), Axis("c", c), Axis("hw", hw)
    index = at((image, c * hw), (channel, hw), (place, 1))
    x = b.cast(b.load("x", index, dtype), F32)
    moments = Reduction("moments", ReduceOp.MOMENTS, (x,), F32)
    mean, m2 = b.reduction_result("moments", 0, F32), b.reduction_result("moments", 1, F32)
    variance = b.apply(Op.DIV, m2, b.const(max(n * hw, 1), F32))
    kernel = Kernel(
        "differences",
        (channel,),
        (image, place),
        ((moments,),),
        (Store("mean", axis_index(channel), mean), Store("var", axis_index(channel), variance)),
        (Store("y", index, b.apply(Op.SUB, x, mean)),),
        ("sub",),
    )
    buffers = [given("x", [n, c, hw], dtype), result("y", [n, c, hw], dtype), result("mean", [c]), result("var", [c])]
    return program("differences", buffers, kernel)


def batch_norm_1d(n: int, c: int) -> Program:
    """BatchNorm1d on n x c: statistics over the batch, whose rows are neighbours in memory."""
    b, image, channel = Builder(), Axis("n", n), Axis("c", c)
    index = at((image, c), (channel, 1))
    x = b.load("x", index, F32)
    moments = Reduction("moments", ReduceOp.MOMENTS, (x,), F32)
    variance = b.apply(Op.DIV, b.reduction_result("moments", 1, F32), b.const(n, F32))
    rstd = b.apply(Op.RSQRT, b.apply(Op.ADD, variance, b.const(1e-5, F32)))
    weight = b.load("weight", axis_index(channel), F32)
    value = b.apply(Op.MUL, b.apply(Op.SUB, x, b.reduction_result("moments", 0, F32)), b.apply(Op.MUL, rstd, weight))
    kernel = Kernel(
        "bn_1d",
        (channel,),
        (image,),
        ((moments,),),
        (Store("mean", axis_index(channel), b.reduction_result("moments", 0, F32)),),
        (Store("y", index, value),),
        ("native_batch_norm",),
    )
    buffers = [given("x", [n, c]), given("weight", [c]), result("y", [n, c])]
    return program("bn_1d", [*buffers, result("mean", [c])], kernel)


def row_reduction(rows: int, cols: int, op: ReduceOp, dtype: DType = F32, *, outer: bool = False) -> Program:
    """Every part of one reduction per row; rows are neighbours in memory if `outer`."""
    b, r, c = Builder(), Axis("r", rows), Axis("c", cols)
    index = at((c, rows), (r, 1)) if outer else at((r, cols), (c, 1))
    load = b.load("x", index, dtype)
    accumulate = dtype.compute
    value = b.cast(load, accumulate)
    arg = op in (ReduceOp.ARGMAX, ReduceOp.ARGMIN)
    values = (value, b.position(axis_index(c))) if arg else (value,)
    reduction = Reduction("result", op, values, accumulate)
    kinds = [accumulate, I64 if arg else accumulate][: op.parts]
    outputs = [result(f"part{i}", [rows], kind) for i, kind in enumerate(kinds)]
    stores = tuple(
        Store(f"part{i}", axis_index(r), b.reduction_result("result", i, kind)) for i, kind in enumerate(kinds)
    )
    kernel = Kernel("reduce", (r,), (c,), ((reduction,),), stores, (), (op.value,))
    shape = [cols, rows] if outer else [rows, cols]
    return program("reduce", [given("x", shape, dtype), *outputs], kernel)


def scan(
    rows: int,
    cols: int,
    dtype: DType = F32,
    *,
    op: ReduceOp = ReduceOp.SUM,
    outer: bool = False,
    backward: bool = False,
    behind: bool = False,
) -> Program:
    """Half of all parts of the running `op` over the squares of each row, from its last element on if `backward`; rows are neighbours in memory
    if `outer`. If `behind`, these are times the row's sum."""
    b, r, c = Builder(), Axis("r", rows), Axis("c", cols)
    place = axis_index(c) * -1 + (cols - 1) if backward else axis_index(c)
    index = place * rows + axis_index(r) if outer else axis_index(r) * cols + place
    compute = dtype.compute
    x = b.cast(b.load("x", index, dtype), compute)
    first = (Reduction("sum", ReduceOp.SUM, (x,), compute),)
    value = b.apply(Op.MUL, x, b.apply(Op.MUL, x, b.reduction_result("sum", 0, compute)) if behind else x)
    values = (value, b.position(axis_index(c))) if op.finds_place else (value,)
    running = (Reduction("found", op, values, compute, running=True),)
    types = enumerate(running[0].types)
    parts = [b.cast(b.prefix("found", part, axis_index(c), dtype), compute) for part, dtype in types]
    half = b.apply(
        Op.MUL, reduce(lambda one, another: b.apply(Op.ADD, one, another, dtype=compute), parts), b.const(0.5, compute)
    )
    reduction_loops = (first, running) if behind else (running,)
    kernel = Kernel("scan", (r,), (c,), reduction_loops, (), (Store("y", index, half),), ("cumsum",))
    shape = [cols, rows] if outer else [rows, cols]
    return program("scan", [given("x", shape, dtype), result("y", shape, dtype)], kernel)


def merge_moments(rows: int, pieces: int) -> Program:
    """Mean and m2 per row from partial (count, mean, m2) of `pieces` pieces of 100 elements."""
    b, r, p = Builder(), Axis("r", rows), Axis("p", pieces)
    index = at((r, pieces), (p, 1))
    values = (b.const(100.0, F32), b.load("means", index, F32), b.load("m2s", index, F32))
    reduction = Reduction("moments", ReduceOp.MERGE_MOMENTS, values, F32)
    stores = tuple(
        Store(name, axis_index(r), b.reduction_result("moments", i, F32)) for i, name in enumerate(("mean", "m2"))
    )
    kernel = Kernel("merge", (r,), (p,), ((reduction,),), stores, ())
    buffers = [given("means", [rows, pieces]), given("m2s", [rows, pieces])]
    return program("merge", [*buffers, result("mean", [rows]), result("m2", [rows])], kernel)


def in_teams(made: Program, members: int, teams: int) -> Program:
    """`made` with the rows of its kernels shared by `teams` teams of `members` blocks."""
    shared = form_teams(made, Builder(), lambda program, kernel: (members, teams))
    verify(shared)
    return shared


def in_strips(made: Program, members: int, teams: int, strip: int) -> Program:
    """The same, so many rows at a time."""
    size = members, teams, strip
    shared = form_teams(made, Builder(), lambda program, kernel: None, strips=lambda program, kernel: size)
    verify(shared)
    return shared


SAMPLES: dict[str, Callable[[], Program]] = {
    "affine": lambda: affine(1 << 22),
    "affine_one": lambda: affine(1),
    "affine_odd": lambda: affine(1_000_003),
    "affine_tail": lambda: affine(4 * 1_000_003),
    "affine_f16": lambda: affine(1 << 20, F16),
    "affine_bf16": lambda: affine((1 << 20) + 8, BF16),
    "affine_f64": lambda: affine(99_998, F64),
    "affine_i64": lambda: affine(30_000, I64),
    "bias_gelu": lambda: channel_bias_gelu(8, 48, 126 * 126),
    "bias_gelu_odd": lambda: channel_bias_gelu(3, 5, 49),
    "last_bias": lambda: last_axis_bias(1023, 768),
    "last_bias_odd": lambda: last_axis_bias(1024, 63),
    "transpose": lambda: transpose(512, 300),
    "aligned_copy_transpose": lambda: transpose(2049, 1031),
    "aligned_copy_few": lambda: transpose(67, 35),
    "aligned_copy_f64": lambda: transpose(513, 259, F64),
    "aligned_copy_f16": lambda: transpose(2051, 1029, F16),
    "aligned_copy_last": lambda: into_channels_last(4, 64, 63 * 65),
    "aligned_copy_last_f16": lambda: into_channels_last(8, 64, 63 * 65, F16),
    "aligned_copy_relu": lambda: out_of_channels_last(2, 67, 61 * 61),
    "aligned_copy_both_bf16": lambda: mixed_layouts(2, 67, 1001, BF16, F32),
    "chain": lambda: chain(3_000_001, 9),
    "chain_short": lambda: chain(5_000, 12),
    "mixed": lambda: mixed_layouts(8, 64, 56 * 56),
    "mixed_few_channels": lambda: mixed_layouts(5, 3, 33 * 35),
    "mixed_odd": lambda: mixed_layouts(3, 67, 15 * 17),
    "mixed_f16": lambda: mixed_layouts(4, 96, 28 * 28, F16),
    "mixed_bf16": lambda: mixed_layouts(4, 24, 30 * 30, BF16, F32),
    "mixed_f64": lambda: mixed_layouts(2, 40, 26 * 26, F64),
    "mixed_cat": lambda: concatenate_channels_last(4, 6, 10, 64),
    "mixed_pool": lambda: max_pool_channels_last(4, 48, 34, 3, 2),
    "mixed_pool_padded": lambda: max_pool_channels_last(4, 20, 33, 3, 1, 1),
    "last_pool_along": lambda: max_pool_channels_last(4, 48, 34, 5, 1, 2, into_last=True),
    "last_pool": lambda: max_pool_channels_last(4, 48, 34, 2, 2, into_last=True),
    "cat": lambda: concatenate(4, 6, 10, 64),
    "cat_odd": lambda: concatenate(4, 3, 2, 7),
    "pool2": lambda: max_pool(16, 64, 2, 2, 0),
    "pool6": lambda: max_pool(16, 30, 6, 6, 0),
    "pool8": lambda: max_pool(16, 40, 8, 8, 0),
    "pool5_staged": lambda: max_pool(6, 32, 5, 1, 2),
    "pool3_staged": lambda: max_pool(4, 30, 3, 1, 0),
    "pool13_by_rows": lambda: max_pool(24, 20, 13, 1, 6),
    "pool5_by_odd_rows": lambda: max_pool(40, 13, 5, 1, 2),
    "pool9_by_parts_of_rows": lambda: max_pool(2, 301, 9, 1, 4),
    "pool3_reduced": lambda: reduced_pool(2, 3, (31, 28), 3, 3),
    "pool5_reduced": lambda: reduced_pool(2, 3, (23, 61), 5, 4, stored=False),
    "pool3_reduced_images": lambda: reduced_pool(3, 32, (14, 14), 3, 1, stored=False),
    "pool3_reduced_f16": lambda: reduced_pool(3, 16, (7, 7), 3, 1, F16),
    "pool3_reduced_bf16": lambda: reduced_pool(2, 4, (37, 260), 3, 10, BF16),
    "pool3_in_steps": lambda: max_pool(128, 56, 3, 1, 1),
    "pool3_padded": lambda: max_pool(6, 33, 3, 2, 1),
    "pool_of_volumes": lambda: pool_of_volumes(6, (9, 14, 32), 3, 1, 1),
    "pool_of_volumes_in_parts": lambda: pool_of_volumes(2, (40, 33, 37), 3, 1, 1, ReduceOp.SUM),
    "pool_of_volumes_in_steps": lambda: pool_of_volumes(6, (13, 22, 36), 5, 2, 2),
    "pool_of_small_volumes": lambda: pool_of_volumes(48, (4, 7, 7), 3, 1, 1, dtype=F16),
    "pool_of_odd_volumes": lambda: pool_of_volumes(5, (6, 17, 29), 3, 1, 1, ReduceOp.SUM, F16),
    "layer_norm_64": lambda: layer_norm(20_000, 64, with_gelu=True),
    "layer_norm_63": lambda: layer_norm(1001, 63),
    "layer_norm_768": lambda: layer_norm(3000, 768),
    "layer_norm_1000": lambda: layer_norm(777, 1000),
    "layer_norm_few": lambda: layer_norm(3, 4096),
    "layer_norm_4096": lambda: layer_norm(2000, 4096),
    "layer_norm_20000": lambda: layer_norm(300, 20_000),
    "layer_norm_32768": lambda: layer_norm(264, 32_768),
    "layer_norm_1001": lambda: layer_norm(300, 1001),
    "layer_norm_5121": lambda: layer_norm(90, 5121),
    "layer_norm_1003_f16": lambda: layer_norm(200, 1003, F16),
    "layer_norm_20003": lambda: layer_norm(40, 20_003),
    "layer_norm_registers": lambda: layer_norm(12, 49_152),
    "layer_norm_40000_bf16": lambda: layer_norm(330, 40_000, BF16),
    "layer_norm_shared": lambda: layer_norm(264, 53_248),
    "layer_norm_shared_odd": lambda: layer_norm(140, 52_001),
    "layer_norm_long": lambda: layer_norm(7, 300_000),
    "layer_norm_f16": lambda: layer_norm(4000, 1024, F16),
    "layer_norm_bf16": lambda: layer_norm(501, 320, BF16),
    "softmax_10": lambda: softmax_rows(5000, 10),
    "softmax_2": lambda: softmax_rows(5000, 2),
    "softmax_1": lambda: softmax_rows(500, 1),
    "softmax_1024": lambda: softmax_rows(2048, 1024),
    "softmax_one_row": lambda: softmax_rows(1, 5000),
    "softmax_channels_8": lambda: softmax_channels(16, 8, 128 * 128),
    "softmax_channels_16": lambda: softmax_channels(2, 16, 63 * 63),
    "softmax_channels_64": lambda: softmax_channels(16, 64, 64 * 64),
    "softmax_channels_100": lambda: softmax_channels(2, 100, 30 * 30),
    "softmax_channels_1000": lambda: softmax_channels(3, 1000, 14 * 14),
    "softmax_channels_last_64": lambda: softmax_channels_last(16, 64, 64 * 64),
    "softmax_channels_last_10": lambda: softmax_channels_last(16, 10, 63 * 63),
    "softmax_channels_last_f16": lambda: softmax_channels_last(16, 136, 48 * 48, F16),
    "width_norm_64": lambda: width_norm_channels_last(512, 64, 64),
    "width_norm_short": lambda: width_norm_channels_last(4096, 48, 10),
    "width_norm_odd": lambda: width_norm_channels_last(130, 67, 33),
    "width_norm_200": lambda: width_norm_channels_last(70, 40, 200),
    "width_norm_f16": lambda: width_norm_channels_last(260, 64, 128, F16),
    "width_norm_f64": lambda: width_norm_channels_last(65, 32, 50, F64),
    "softmax_channels_3000": lambda: softmax_channels(3, 3000, 14 * 14),
    "bn_stats": lambda: batch_norm_stats(16, 32, 62 * 62),
    "bn_stats_odd": lambda: batch_norm_stats(5, 7, 11 * 11),
    "bn_2d": lambda: batch_norm_2d(16, 32, 62 * 62),
    "bn_1d": lambda: batch_norm_1d(256, 512),
    "bn_1d_large": lambda: batch_norm_1d(4096, 1024),
    "sum_f32": lambda: row_reduction(1000, 3000, ReduceOp.SUM),
    "sum_outer": lambda: row_reduction(1030, 3000, ReduceOp.SUM, outer=True),
    "sum_empty": lambda: row_reduction(100, 0, ReduceOp.SUM),
    "prod_f64": lambda: row_reduction(100, 77, ReduceOp.PROD, F64),
    "max_f16": lambda: row_reduction(3001, 256, ReduceOp.MAX, F16),
    "min_outer": lambda: row_reduction(128 * 128, 64, ReduceOp.MIN, outer=True),
    "max_bool": lambda: row_reduction(64, 1000, ReduceOp.MAX, BOOL),
    "sum_i64": lambda: row_reduction(64, 1001, ReduceOp.SUM, I64),
    "argmax": lambda: row_reduction(2000, 1000, ReduceOp.ARGMAX),
    "argmin_outer": lambda: row_reduction(1000, 130, ReduceOp.ARGMIN, outer=True),
    "argmax_long": lambda: row_reduction(2, 200_000, ReduceOp.ARGMAX),
    "moments_long": lambda: row_reduction(264, 131_072, ReduceOp.MOMENTS),
    "softmax_state_long": lambda: row_reduction(20, 100_000, ReduceOp.SOFTMAX),
    "merge": lambda: merge_moments(64, 33),
    "merge_one": lambda: merge_moments(1, 264),
    "merge_block": lambda: merge_moments(2, 3000),
    "scan_3": lambda: scan(5000, 3),
    "scan_20": lambda: scan(20_001, 20),
    "scan_1000": lambda: scan(3000, 1000),
    "scan_10000": lambda: scan(410, 10_000),
    "scan_9001": lambda: scan(410, 9001),
    "scan_few": lambda: scan(3, 50_000),
    "scan_f16": lambda: scan(410, 5000, F16),
    "scan_f64": lambda: scan(300, 1002, F64),
    "scan_product": lambda: scan(2000, 30, op=ReduceOp.PROD),
    "scan_backwards": lambda: scan(410, 9000, backward=True),
    "scan_backwards_20": lambda: scan(2001, 20, backward=True),
    "scan_columns": lambda: scan(110_001, 40, outer=True),
    "scan_columns_pairs": lambda: scan(210_000, 20, BF16, outer=True),
    "scan_columns_groups": lambda: scan(4000, 1000, outer=True),
    "scan_columns_backwards": lambda: scan(777, 500, outer=True, backward=True),
    "scan_places": lambda: scan(3000, 1000, op=ReduceOp.LAST_ARGMAX),
    "scan_places_f16": lambda: scan(410, 5001, F16, op=ReduceOp.LAST_ARGMIN),
    "scan_places_columns": lambda: scan(4000, 1000, op=ReduceOp.LAST_ARGMAX, outer=True),
    "scan_exponentials": lambda: scan(410, 9001, op=ReduceOp.SOFTMAX),
    "scan_exponentials_20": lambda: scan(20_001, 20, op=ReduceOp.SOFTMAX, backward=True),
    "scan_exponentials_columns": lambda: scan(4000, 1000, F64, op=ReduceOp.SOFTMAX, outer=True),
    "scan_behind": lambda: scan(3000, 1000, behind=True),
    "scan_behind_9001": lambda: scan(410, 9001, F16, behind=True),
    "scan_behind_20": lambda: scan(20_001, 20, op=ReduceOp.SOFTMAX, behind=True),
    "scan_behind_columns": lambda: scan(110_001, 40, outer=True, behind=True),
    "summed_columns": lambda: summed_columns(256, 4096),
    "summed_columns_odd": lambda: summed_columns(241, 1023),
    "summed_columns_bf16": lambda: summed_columns(256, 1024, BF16),
    "norm_and_columns": lambda: norm_and_columns(3, 50, 768, 2),
    "norm_and_columns_of_one": lambda: norm_and_columns(1, 37, 7, 3),
    "norm_and_columns_odd": lambda: norm_and_columns(2, 23, 131, 2),
    "norm_and_columns_short_bf16": lambda: norm_and_columns(3, 700, 40, 2, BF16),
    "norm_and_columns_long_f16": lambda: norm_and_columns(1, 21, 4104, 2, F16),
    "norm_and_columns_without_rows": lambda: norm_and_columns(2, 19, 64, 8),
    "team_layer_norm": lambda: in_teams(layer_norm(7, 300_000), 33, 7),
    "team_layer_norm_odd": lambda: in_teams(layer_norm(5, 300_001), 7, 3),
    "team_layer_norm_partly_kept": lambda: in_teams(layer_norm(2, 800_000), 5, 1),
    "team_layer_norm_in_registers": lambda: in_teams(layer_norm(3, 400_004, weighted=False), 4, 1),
    "team_layer_norm_f16": lambda: in_teams(layer_norm(9, 200_000, F16), 4, 4),
    "team_layer_norm_ring": lambda: in_teams(layer_norm(5, 1 << 21), 66, 1),
    "team_layer_norm_ring_f16": lambda: in_teams(layer_norm(7, 1 << 22, F16), 66, 2),
    "team_layer_norm_ring_plain": lambda: in_teams(layer_norm(6, 300_004, weighted=False), 10, 2),
    "team_layer_norm_ring_anywhere": lambda: in_teams(layer_norm(6, 300_001, weighted=False), 10, 2),
    "strips_batch_norm_1d": lambda: in_strips(batch_norm_1d(4000, 1024), 8, 4, 64),
    "strips_batch_norm_1d_part": lambda: in_strips(batch_norm_1d(999, 100), 2, 1, 64),
    "strips_small_images": lambda: in_strips(channel_differences(300, 60, 49), 3, 4, 8),
    "strips_small_images_f16": lambda: in_strips(channel_differences(200, 64, 49, F16), 4, 2, 8),
    "team_softmax": lambda: in_teams(softmax_rows(40, 60_000), 3, 16),
    "team_softmax_of_all_blocks": lambda: in_teams(softmax_rows(3, 100_000), 200, 1),
}
