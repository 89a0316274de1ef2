"""More programs built by hand, for tests: odd axes, strides, index arithmetic, and every type."""

from __future__ import annotations

from dataclasses import replace

from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Builder, Op, ReduceOp
from fusepass.codegen.ir.index import Axis, Index, axis_index
from fusepass.codegen.ir.program import Kernel, Program, Reduction, Role, Store
from fusepass.codegen.ir.twopass import split_statistics
from tests.support import kernels as k


def grid_sum(shape: tuple[int, ...], cols: tuple[int, ...]) -> Program:
    """sum and largest of 2 * x over the axes `cols` of a contiguous tensor, and 2 * x minus the sum."""
    b = Builder()
    axes = tuple(Axis(f"a{i}", size) for i, size in enumerate(shape))
    strides = k.contiguous_strides(shape)
    index = k.at(*zip(axes, strides, strict=True))
    kept = [i for i in range(len(shape)) if i not in cols]
    out_shape = [shape[i] for i in kept]
    row_index = k.at(*((axes[i], s) for i, s in zip(kept, k.contiguous_strides(out_shape), strict=True)))
    x = b.apply(Op.MUL, b.load("x", index, k.F32), b.const(2.0, k.F32))
    sums = Reduction("total", ReduceOp.SUM, (x,), k.F32)
    tops = Reduction("top", ReduceOp.MAX, (x,), k.F32)
    kernel = Kernel(
        "grid",
        tuple(axes[i] for i in kept),
        tuple(axes[i] for i in cols),
        ((sums, tops),),
        (
            Store("total", row_index, b.reduction_result("total", 0, k.F32)),
            Store("top", row_index, b.reduction_result("top", 0, k.F32)),
        ),
        (Store("y", index, b.apply(Op.SUB, x, b.reduction_result("total", 0, k.F32))),),
    )
    buffers = [
        k.buffer("x", Role.INPUT, shape),
        k.buffer("total", Role.OUTPUT, out_shape),
        k.buffer("top", Role.OUTPUT, out_shape),
        k.buffer("y", Role.OUTPUT, shape),
    ]
    return k.program("grid", buffers, kernel)


def split(program: Program) -> Program:
    """`program` with its statistics in two reduction loops each, as the passes leave rows that stay in the cache."""
    return replace(program, kernels=tuple(split_statistics(kernel, Builder()) for kernel in program.kernels))


def strided(n: int, m: int) -> Program:
    """y = x + z, where x skips elements, z repeats one row, and y leaves gaps."""
    b, i, j = Builder(), Axis("i", n), Axis("j", m)
    x = b.load("x", k.at((i, 3 * m), (j, 2)), k.F32)
    z = b.load("z", axis_index(j), k.F32)
    store = Store("y", k.at((i, m + 5), (j, 1)), b.apply(Op.ADD, x, z))
    buffers = [
        k.buffer("x", Role.INPUT, [n, m], strides=[3 * m, 2]),
        k.buffer("z", Role.INPUT, [n, m], strides=[0, 1]),
        k.buffer("y", Role.OUTPUT, [n, m], strides=[m + 5, 1]),
    ]
    return k.program("strided", buffers, Kernel("strided", (i, j), (), (), (), (store,)))


def shuffle(n: int, r: int) -> Program:
    """A pixel shuffle: quotients and remainders of the fastest axis."""
    b, y, x = Builder(), Axis("y", n), Axis("x", n * r)
    fine, coarse = axis_index(x) % r, axis_index(x) // r
    load = b.load("x", fine * (n * n) + axis_index(y) * n + coarse, k.F32)
    value = b.apply(Op.ADD, load, b.cast(b.position(axis_index(x)), k.F32))
    kernel = Kernel("shuffle", (y, x), (), (), (), (Store("y", k.at((y, n * r), (x, 1)), value),))
    return k.program("shuffle", [k.buffer("x", Role.INPUT, [r, n, n]), k.buffer("y", Role.OUTPUT, [n, n * r])], kernel)


def every_type(count: int) -> Program:
    """Loads every type, converts to every other, and stores."""
    b, i = Builder(), Axis("i", count)
    kinds = tuple(DType)
    here = axis_index(i)
    buffers = [k.buffer(f"x_{kind}", Role.INPUT, [count], kind) for kind in kinds]
    stores = []
    for source in kinds:
        for target in kinds:
            name = f"y_{source}_{target}"
            buffers.append(k.buffer(name, Role.OUTPUT, [count], target))
            stores.append(Store(name, here, b.cast(b.load(f"x_{source}", here, source), target)))
    return k.program("every_type", buffers, Kernel("every_type", (i,), (), (), (), tuple(stores)))


def logic(count: int) -> Program:
    """Booleans loaded, combined, chosen by and stored."""
    b, i = Builder(), Axis("i", count)
    here = axis_index(i)
    p, q = (b.load(name, here, k.BOOL) for name in ("p", "q"))
    x = b.load("x", here, k.F32)
    both = b.apply(Op.AND, p, b.apply(Op.LT, x, b.const(1.5, k.F32), dtype=k.BOOL), dtype=k.BOOL)
    either = b.apply(Op.XOR, b.apply(Op.NOT, q, dtype=k.BOOL), both, dtype=k.BOOL)
    chosen = b.apply(Op.WHERE, either, x, b.apply(Op.EXP, x), dtype=k.F32)
    stores = (Store("either", here, either), Store("chosen", here, chosen))
    buffers = [k.buffer("p", Role.INPUT, [count], k.BOOL), k.buffer("q", Role.INPUT, [count], k.BOOL)]
    buffers += [k.buffer("x", Role.INPUT, [count])]
    buffers += [k.buffer("either", Role.OUTPUT, [count], k.BOOL), k.buffer("chosen", Role.OUTPUT, [count])]
    return k.program("logic", buffers, Kernel("logic", (i,), (), (), (), stores))


def scalar() -> Program:
    """One element, no axes."""
    b = Builder()
    value = b.apply(Op.MUL, b.load("x", Index(), k.F32), b.const(3.0, k.F32))
    kernel = Kernel("scalar", (), (), (), (), (Store("y", Index(), value),))
    return k.program("scalar", [k.buffer("x", Role.INPUT, []), k.buffer("y", Role.OUTPUT, [])], kernel)


def awkward_names(rows: int, cols: int) -> Program:
    """Column sums, less a bias per row, where buffers have the names that renderers like to use themselves."""
    b, r, c = Builder(), Axis("step", rows), Axis("count", cols)
    total = Reduction("kept_0", ReduceOp.SUM, (b.apply(Op.EXP, b.load("lane", k.at((c, rows), (r, 1)), k.F32)),), k.F32)
    value = b.apply(Op.SUB, b.reduction_result("kept_0", 0, k.F32), b.load("block_0", axis_index(r), k.F32))
    kernel = Kernel("for", (r,), (c,), ((total,),), (Store("lanes_0", axis_index(r), value),), ())
    buffers = [k.buffer("lane", Role.INPUT, [cols, rows]), k.buffer("block_0", Role.INPUT, [rows])]
    return k.program("int", [*buffers, k.buffer("lanes_0", Role.OUTPUT, [rows])], kernel)
