"""Every rule of the verifier has a program that breaks it, and the message names what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Builder, Expr, Op, ReduceOp, Window
from fusepass.codegen.ir.index import Axis, Bound, Index, axis_index
from fusepass.codegen.ir.program import (
    Buffer,
    Kernel,
    LibraryCall,
    OverflowFlag,
    Partials,
    Program,
    Reduction,
    Ref,
    Role,
    Store,
    Team,
)
from fusepass.codegen.ir.verify import verify
from fusepass.errors import IRError

F32 = DType.F32
ROW, COL = Axis("i", 4), Axis("j", 8)
i, j = axis_index(ROW), axis_index(COL)
b = Builder()
X = b.load("x", i * 8 + j, F32)
STAT = b.reduction_result("r0", 0, F32)
SUM = Reduction("r0", ReduceOp.SUM, (X,), F32)
KERNEL = Kernel(
    "k",
    rows=(ROW,),
    cols=(COL,),
    reduction_loops=((SUM,),),
    row_stores=(Store("t", i, STAT),),
    stores=(Store("out", i * 8 + j, b.apply(Op.SUB, X, STAT)),),
)
READER = Kernel("later", (ROW,), (), (), (), (Store("sums", i, b.load("t", i, F32)),))
PROGRAM = Program(
    "p",
    buffers=(
        Buffer("w", F32, (4, 8), (8, 1), Role.INPUT),
        Buffer("x", F32, (4, 8), (8, 1), Role.ANCHOR),
        Buffer("out", F32, (4, 8), (8, 1), Role.OUTPUT),
        Buffer("sums", F32, (4,), (1,), Role.OUTPUT),
        Buffer("t", F32, (4,), (1,), Role.TEMP),
    ),
    inputs=("w",),
    outputs=("out", "sums"),
    calls=(LibraryCall("x", "aten.relu.default", (Ref("w"),)),),
    kernels=(KERNEL, READER),
)


def with_kernel(**changes: object) -> Program:
    return replace(PROGRAM, kernels=(replace(KERNEL, **changes), READER))


def storing(value: Expr, index: Index = i * 8 + j) -> Program:
    return with_kernel(stores=(Store("out", index, value),))


def with_calls(*calls: LibraryCall) -> Program:
    return replace(PROGRAM, calls=calls)


CALL = PROGRAM.calls[0]
SCAN: dict[str, object] = {
    "reduction_loops": ((replace(SUM, running=True),),),
    "row_stores": (),
    "stores": (Store("out", i * 8 + j, b.prefix("r0", 0, j, F32)),),
}
PIECE = Axis("p", 4)


def leaving(total: Reduction, over: int = 1, **changes: object) -> Program:
    """The kernel with what it reduces over its rows, too, in place of a result per row."""
    stores = (Store("t", axis_index(PIECE) + j * 0, b.reduction_result(total.name, 0, F32)),)
    return with_kernel(row_stores=(), partials=Partials(PIECE, False, (total,), stores, over), **changes)


COLUMNS = replace(SUM, name="r1")
LATE = b.load("x", i * 8 + j + 8, F32)
OTHER = axis_index(Axis("z", 3))
BROKEN: dict[str, Callable[[], Program]] = {
    "two buffers share a name": lambda: replace(PROGRAM, buffers=(*PROGRAM.buffers, PROGRAM.buffers[0])),
    "input out is not an input buffer": lambda: replace(PROGRAM, inputs=("w", "out")),
    "output t is neither an output nor an anchor's result": lambda: replace(PROGRAM, outputs=("out", "t")),
    "k: store of f32 to i32 out, which rounds nothing by itself but halves": lambda: replace(
        PROGRAM,
        buffers=tuple(replace(each, dtype=DType.I32) if each.name == "out" else each for each in PROGRAM.buffers),
    ),
    "output nowhere is neither": lambda: replace(PROGRAM, outputs=("nowhere",)),
    "temporary t lies on more memory than it has elements": lambda: replace(
        PROGRAM, buffers=(*PROGRAM.buffers[:-1], Buffer("t", F32, (4,), (2,), Role.TEMP))
    ),
    "output sums is never written": lambda: replace(PROGRAM, kernels=(KERNEL,)),
    "later reads t before it is written": lambda: replace(PROGRAM, kernels=(READER, KERNEL)),
    "later writes sums, which was written before": lambda: replace(PROGRAM, kernels=(KERNEL, READER, READER)),
    "k writes w, which is not its to write": lambda: with_kernel(stores=(Store("w", i * 8 + j, X),)),
    "k writes x, which is not its to write": lambda: with_kernel(stores=(Store("x", i * 8 + j, X),)),
    "k reads x before it is written": lambda: with_calls(),
    "aten.relu.default writes out, which is not its": lambda: with_calls(CALL, replace(CALL, result="out")),
    "aten.relu.default writes x, which is not its": lambda: with_calls(CALL, CALL),
    "aten.relu.default reads t before": lambda: with_calls(replace(CALL, args=((Ref("t"), 1),))),
    "k: two axes share a name": lambda: with_kernel(rows=(ROW, Axis("j", 2))),
    "k: columns without a reduction": lambda: with_kernel(
        reduction_loops=(), row_stores=(), stores=(Store("out", i, X),)
    ),
    "k: row stores in a pointwise kernel": lambda: with_kernel(
        reduction_loops=(), cols=(), stores=(), row_stores=(Store("t", i, b.const(0, F32)),)
    ),
    "later raises an alarm in sums, which is no temporary": lambda: replace(
        PROGRAM, kernels=(KERNEL, replace(READER, overflow_flag=OverflowFlag("sums", b.const(True, DType.BOOL))))
    ),
    "later: an alarm that is no condition per element": lambda: replace(
        PROGRAM, kernels=(KERNEL, replace(READER, overflow_flag=OverflowFlag("t", b.load("t", i, F32))))
    ),
    "k: a convolution, or rows that blocks share, in a kernel that may not run": lambda: with_kernel(
        when="x", team=Team(2, 1, "t")
    ),
    "later reads gone before it is written": lambda: replace(PROGRAM, kernels=(KERNEL, replace(READER, when="gone"))),
    "k: partial results over no rows, of nothing, or of rows that blocks share": lambda: leaving(COLUMNS, over=2),
    "k: partial results of each sample without samples, or of all": lambda: leaving(COLUMNS, rows=(Axis("s", 2), ROW)),
    "k: r0 is reduced along rows and over them": lambda: leaving(SUM),
    "k: r1 is not of one value, or gives a position": lambda: leaving(
        replace(COLUMNS, op=ReduceOp.ARGMAX, values=(X, b.position(i, DType.I64)))
    ),
    "sums over t, which are no output and input": lambda: replace(PROGRAM, updates=(("sums", "t"),)),
    "later: what is stored once, in a kernel that may not run, or that reads what it writes": lambda: replace(
        PROGRAM, kernels=(KERNEL, replace(READER, when="x", once=(Store("sums", Index(), b.const(0, F32)),)))
    ),
    "k: what is stored once, in a kernel that may not run, or that reads what it writes": lambda: with_kernel(
        once=(Store("sums", Index(), b.load("t", Index(), F32)),)
    ),
    "index i uses an axis out of scope": lambda: with_kernel(once=(Store("sums", i, b.const(0, F32)),)),
    "k: two stores to one buffer": lambda: with_kernel(stores=KERNEL.stores * 2),
    "k: a running reduction beside others of its sweep": lambda: with_kernel(
        **{**SCAN, "reduction_loops": ((replace(SUM, running=True), replace(SUM, name="r1")),)}
    ),
    "k: a running reduction beside others of its sweep, or before others": lambda: with_kernel(
        **{**SCAN, "reduction_loops": ((replace(SUM, name="r1", running=True),), *SCAN["reduction_loops"])}
    ),
    "k: a running reduction over several axes": lambda: with_kernel(**SCAN, cols=(COL, Axis("k", 2))),
    "k: a running reduction of rows that blocks share": lambda: with_kernel(**SCAN, team=Team(2, 1, "t")),
    "k: a running reduction used at another column": lambda: with_kernel(
        **{**SCAN, "stores": (Store("out", i * 8 + j, b.prefix("r0", 0, j + 1, F32)),)}
    ),
    "k: running moments": lambda: with_kernel(
        **{**SCAN, "reduction_loops": ((replace(SUM, op=ReduceOp.MOMENTS, running=True),),)}
    ),
    "k: r0 used at a column, where it has no result": lambda: storing(b.prefix("r0", 0, j, F32)),
    "k: two reductions share a name": lambda: with_kernel(reduction_loops=((SUM,), (SUM,))),
    "k: r0 takes 1 values, has 2": lambda: with_kernel(reduction_loops=((replace(SUM, values=(X, X)),),)),
    "k: result of r1 used before its sweep ends": lambda: storing(b.reduction_result("r1", 0, F32)),
    "k: result of r0 used before": lambda: with_kernel(
        reduction_loops=((SUM, Reduction("r1", ReduceOp.SUM, (b.apply(Op.SUB, X, STAT),), F32)),)
    ),
    "k: r0 has no part 1": lambda: storing(b.reduction_result("r0", 1, F32)),
    "k: store to unknown buffer gone": lambda: with_kernel(stores=(Store("gone", i, X),)),
    "k: load from unknown buffer gone": lambda: storing(b.load("gone", i, F32)),
    "k: load of f32 x as f16": lambda: storing(b.load("x", i, DType.F16)),
    "k: load from x: index 8*i + j + 8 spans 8..39 of 32 elements": lambda: storing(LATE),
    "k: load from x: index 8*i + j + -1 spans -1..30": lambda: storing(b.load("x", i * 8 + j - 1, F32)),
    "k: store to out: index 16*i + j spans 0..55 of 32": lambda: storing(X, i * 16 + j),
    "k: index z uses an axis out of scope": lambda: storing(b.position(OTHER, F32)),
    "k: store to t: index 8*i + j uses an axis out of scope": lambda: with_kernel(
        row_stores=(Store("t", i * 8 + j, STAT),)
    ),
    "k: load from x: index 8*i + j uses an axis out of scope": lambda: with_kernel(row_stores=(Store("t", i, X),)),
    "k: where() with unequal branch types": lambda: storing(
        b.apply(Op.WHERE, b.apply(Op.GT, X, STAT, dtype=DType.BOOL), b.const(1, DType.I32), X, dtype=F32)
    ),
    "k: window with Moments": lambda: storing(Window(ReduceOp.MOMENTS, (Axis("w", 2),), X, F32)),
    "k: load from x: index 8*i + j + 8 spans": lambda: storing(
        b.apply(Op.ADD, LATE, b.masked((Bound(i, 0, 3),), LATE, b.const(0, F32)))
    ),
}


def test_the_program_that_is_broken_below_is_well_formed() -> None:
    verify(PROGRAM)


@pytest.mark.parametrize("message", BROKEN)
@pytest.mark.invariant(11)
def test_broken_rule_is_named(message: str) -> None:
    with pytest.raises(IRError) as caught:
        verify(BROKEN[message]())
    assert message in str(caught.value)
    assert "program p(w" in str(caught.value), "the program is shown"


def test_every_fault_is_reported() -> None:
    with pytest.raises(IRError) as caught:
        verify(replace(with_kernel(rows=(ROW, Axis("j", 2))), outputs=("out", "t")))
    assert "output t" in str(caught.value)
    assert "two axes" in str(caught.value)


def test_masked_loads_may_be_out_of_range() -> None:
    verify(storing(b.masked((Bound(i, 0, 3),), LATE, b.const(0, F32))))


def test_nothing_is_out_of_range_in_an_empty_domain() -> None:
    none = Axis("n", 0)
    empty = Buffer("none", F32, (4, 0), (1, 1), Role.OUTPUT)
    kernel = Kernel("e", (ROW, none), (), (), (), (Store("none", i, b.load("w", i * 100, F32)),))
    verify(replace(PROGRAM, buffers=(*PROGRAM.buffers, empty), kernels=(*PROGRAM.kernels, kernel)))


def test_output_of_no_elements_need_not_be_written() -> None:
    empty = Buffer("none", F32, (4, 0), (1, 1), Role.OUTPUT)
    verify(replace(PROGRAM, buffers=(*PROGRAM.buffers, empty), outputs=(*PROGRAM.outputs, "none")))
