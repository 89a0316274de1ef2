"""Scalar expressions: one node per value, exact folding only, rewriting that reaches every index."""

from __future__ import annotations

import math
import operator
import pickle
from collections.abc import Callable

import pytest

from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import (
    Apply,
    Builder,
    Const,
    Expr,
    Load,
    Masked,
    Op,
    Position,
    ReduceOp,
    ReductionResult,
    Window,
    children,
    known_index,
    walk,
)
from fusepass.codegen.ir.index import Axis, Bound, Index, axis_index

I8, J4 = Axis("i", 8), Axis("j", 4)
i, j = axis_index(I8), axis_index(J4)


@pytest.fixture
def b() -> Builder:
    return Builder()


def test_a_builder_in_another_process_knows_what_it_has_made(b: Builder) -> None:
    def made(builder: Builder) -> Expr:
        value = builder.load("x", i * 4 + j, DType.F32)
        for constant in (0.0, -0.0, math.nan, 2.0):
            value = builder.apply(Op.ADD, value, builder.const(constant, DType.F32))
        for _ in range(10_000):  # deeper than Python's stack
            value = builder.apply(Op.TANH, value)
        return value

    value = made(b)
    other, sent = pickle.loads(pickle.dumps((b, value)))
    assert made(other) is sent
    assert made(Builder()) is not sent
    assert len(list(walk(sent))) == len(list(walk(value)))


def test_equal_expressions_are_one_node(b: Builder) -> None:
    def made() -> Expr:
        x = b.load("x", i * 4 + j, DType.F32)
        inside = b.masked((Bound(i, 1, 8),), x, b.const(0.0, DType.F32))
        window = b.window(ReduceOp.MAX, (J4,), inside)
        return b.apply(
            Op.ADD, window, b.apply(Op.MUL, b.reduction_result("r0", 1, DType.F32), b.position(i, DType.F32))
        )

    assert made() is made()


def test_different_expressions_are_different_nodes(b: Builder) -> None:
    x, y = b.load("x", i, DType.F32), b.load("x", i + 1, DType.F32)
    assert x is not y
    assert b.apply(Op.SUB, x, y) is not b.apply(Op.SUB, y, x)
    assert b.const(1.0, DType.F32) is not b.const(1.0, DType.F64)
    assert b.const(0.0, DType.F32) is not b.const(-0.0, DType.F32)
    assert b.const(math.nan, DType.F32) is b.const(math.nan, DType.F32)
    assert b.const(1, DType.I32) is not b.const(True, DType.BOOL)
    assert b.apply(Op.EQ, x, y, dtype=DType.BOOL) is not b.apply(Op.EQ, x, y, dtype=DType.F32)


def test_cast_to_its_own_type_is_nothing(b: Builder) -> None:
    x = b.load("x", i, DType.F32)
    assert b.cast(x, DType.F32) is x
    assert isinstance(b.cast(x, DType.F64), Apply)


@pytest.mark.parametrize(
    ("value", "source", "target", "folded"),
    [
        (0.1, DType.F64, DType.F32, 0.1),
        (3, DType.I64, DType.F32, 3.0),
        (2.9, DType.F32, DType.I32, 2),
        (-2.9, DType.F32, DType.I8, -2),
        (math.nan, DType.F32, DType.BOOL, True),
        (True, DType.BOOL, DType.F64, 1.0),
        (255, DType.I32, DType.U8, 255),
    ],
)
def test_exact_casts_of_literals_fold(b: Builder, value: float, source: DType, target: DType, folded: float) -> None:
    cast = b.cast(b.const(value, source), target)
    assert isinstance(cast, Const)
    assert (cast.value, type(cast.value), cast.dtype) == (folded, type(folded), target)


@pytest.mark.parametrize(
    ("value", "source", "target"),
    [
        (0.1, DType.F32, DType.F64),  # float32's 0.1 is another number
        (math.nan, DType.F32, DType.I64),
        (math.inf, DType.F64, DType.I32),
        (300, DType.I32, DType.U8),
        (-1, DType.I32, DType.U8),
        (1e10, DType.F64, DType.I32),
    ],
)
def test_inexact_casts_of_literals_stay(b: Builder, value: float, source: DType, target: DType) -> None:
    assert isinstance(b.cast(b.const(value, source), target), Apply)


def test_integer_literals_wrap(b: Builder) -> None:
    assert b.const(-3, DType.U8).value == 253  # type: ignore[union-attr]
    assert b.const(200, DType.I8).value == -56  # type: ignore[union-attr]


def test_position_without_axes_is_a_number(b: Builder) -> None:
    assert isinstance(b.position(i), Position)
    constant = b.position(Index(3))
    assert isinstance(constant, Const)
    assert (constant.value, constant.dtype) == (3, DType.I64)


def test_mask_keeps_only_bounds_that_can_fail(b: Builder) -> None:
    x, zero = b.load("x", i, DType.F32), b.const(0.0, DType.F32)
    assert b.masked((Bound(i, 0, 8),), x, zero) is x
    masked = b.masked((Bound(i, 0, 8), Bound(j, 1, 4)), x, zero)
    assert isinstance(masked, Masked)
    assert masked.mask == (Bound(j, 1, 4),)


def test_walk_gives_each_node_once_operands_first(b: Builder) -> None:
    x = b.load("x", i, DType.F32)
    square = b.apply(Op.MUL, x, x)
    total = b.apply(Op.ADD, square, x)
    assert list(walk(total, square)) == [x, square, total]
    assert children(square) == (x, x)


def test_rewrite_replaces_axes_everywhere(b: Builder) -> None:
    x = b.load("x", i * 4 + j, DType.F32)
    root = b.masked((Bound(i - 1, 0, 4),), b.window(ReduceOp.SUM, (J4,), x), b.position(i, DType.F32))
    k = axis_index(Axis("k", 4))
    fresh = b.rewrite(root, {I8: k * 2})
    assert {str(index) for node in walk(fresh) for index in _indices(node)} == {"8*k + j", "2*k", "2*k + -1"}
    assert b.rewrite(root, {}) is root


def test_rewrite_can_make_a_mask_disappear(b: Builder) -> None:
    x = b.load("x", i, DType.F32)
    root = b.masked((Bound(i, 0, 4),), x, b.const(0.0, DType.F32))
    assert isinstance(b.rewrite(root, {I8: j}), Load)


def test_rewrite_replaces_leaves(b: Builder) -> None:
    x = b.load("x", i, DType.F32)
    root = b.apply(Op.ADD, x, b.apply(Op.EXP, x))
    stat = b.reduction_result("r0", 0, DType.F32)
    fresh = b.rewrite(root, leaf=lambda node: stat if node is x else None)
    assert fresh is b.apply(Op.ADD, stat, b.apply(Op.EXP, stat))


@pytest.mark.parametrize(
    ("op", "parts", "arity"),
    [
        (ReduceOp.SUM, 1, 1),
        (ReduceOp.MOMENTS, 2, 1),
        (ReduceOp.MERGE_MOMENTS, 2, 3),
        (ReduceOp.SOFTMAX, 2, 1),
        (ReduceOp.MERGE_SOFTMAX, 2, 2),
        (ReduceOp.ARGMAX, 2, 2),
    ],
)
def test_parts_and_arity(op: ReduceOp, parts: int, arity: int) -> None:
    assert (op.parts, op.arity) == (parts, arity)


@pytest.mark.parametrize(("half", "compute"), [(DType.F16, DType.F32), (DType.BF16, DType.F32), (DType.F64, DType.F64)])
def test_halves_compute_in_float32(half: DType, compute: DType) -> None:
    assert half.compute is compute


def _indices(node: Expr) -> list[Index]:
    match node:
        case Load(index=index) | Position(index=index):
            return [index]
        case Masked(mask=mask):
            return [bound.index for bound in mask]
        case Window() | Apply() | Const() | ReductionResult():
            return []


POSITIONS: dict[Op, Callable[[int, int], int | bool]] = {
    Op.ADD: operator.add,
    Op.SUB: operator.sub,
    Op.MUL: operator.mul,
    Op.FLOOR_DIV: operator.floordiv,
    Op.REMAINDER: operator.mod,
    Op.LT: operator.lt,
    Op.LE: operator.le,
    Op.GT: operator.gt,
    Op.GE: operator.ge,
    Op.EQ: operator.eq,
    Op.NE: operator.ne,
}


@pytest.mark.parametrize("op", POSITIONS)
@pytest.mark.parametrize("second", [-9, -1, 0, 3, 5, 12, None])
def test_arithmetic_on_positions(b: Builder, op: Op, second: int | None) -> None:
    """Of `i` in 0 .. 9 less 2, and a number or `j` in 0 .. 3: an index or a constant with the values of Python, if it is one of them."""
    ten, four = Axis("i", 10), Axis("j", 4)
    first = b.position(axis_index(ten) - 2)
    other = b.position(axis_index(four)) if second is None else b.const(second, DType.I64)
    compares = op in (Op.LT, Op.LE, Op.GT, Op.GE, Op.EQ, Op.NE)
    found = b.apply(op, first, other, dtype=DType.BOOL if compares else DType.I64)
    points = [(at, along) for at in range(10) for along in (range(4) if second is None else [second])]
    if isinstance(found, Apply):
        values = {POSITIONS[op](at - 2, along) for at, along in points} if compares else set()
        assert len(values) == 2 or (not compares and op in (Op.MUL, Op.FLOOR_DIV, Op.REMAINDER))
        assert compares or second is None or (second <= 0 and op is not Op.MUL)
        return
    for at, along in points:
        index = known_index(found)
        got = index.substitute({ten: Index(at), four: Index(along)}).constant if index is not None else found.value
        assert got == POSITIONS[op](at - 2, along)


@pytest.mark.parametrize("second", [-9, -2, 3, 7, 12])
@pytest.mark.parametrize(("op", "of"), [(Op.MAXIMUM, max), (Op.MINIMUM, min)])
def test_extremes_of_positions(b: Builder, op: Op, of: Callable[[int, int], int], second: int) -> None:
    """Of `i` in 0 .. 9 less 2, and a number: the one of them that always is it."""
    ten = Axis("i", 10)
    found = b.apply(op, b.position(axis_index(ten) - 2), b.const(second, DType.I64))
    index = known_index(found)
    assert (index is None) is (-2 < second < 7)
    for at in range(10) if index is not None else ():
        assert index.substitute({ten: Index(at)}).constant == of(at - 2, second)


def test_arithmetic_on_positions_stays_where_its_type_would_wrap(b: Builder) -> None:
    position = b.position(axis_index(Axis("i", 1 << 20)), DType.I32)
    assert isinstance(b.apply(Op.MUL, position, b.const(1 << 10, DType.I32)), Position)
    assert isinstance(b.apply(Op.MUL, position, b.const(1 << 12, DType.I32)), Apply)


@pytest.mark.parametrize("start", [0, 1 << 20])
def test_arithmetic_on_positions_stays_where_indices_of_32_bits_would_wrap(b: Builder, start: int) -> None:
    position, large = b.position(axis_index(Axis("i", 10)) + start), b.const(2_000_000_000, DType.I64)
    assert isinstance(b.apply(Op.MUL, position, large), Apply)
    near = b.apply(Op.MUL, b.position(axis_index(Axis("i", 2))), large)
    assert isinstance(near, Position)
    assert isinstance(b.apply(Op.SUB, near, b.apply(Op.MUL, b.position(axis_index(Axis("j", 2))), large)), Position)
    assert isinstance(b.apply(Op.ADD, near, large), Apply)


def test_a_choice_that_is_known_is_made(b: Builder) -> None:
    one, other, sure = b.const(1.0, DType.F32), b.load("x", Index(), DType.F32), b.const(False, DType.BOOL)
    assert b.apply(Op.WHERE, sure, one, other) is other
