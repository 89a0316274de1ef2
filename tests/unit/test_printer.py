"""The scalar printer: statements, literals, index arithmetic, and in which scope each value lands."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Builder, Const, Expr, Op, ReduceOp
from fusepass.codegen.ir.index import Axis, Bound, Index, axis_index
from fusepass.codegen.ir.program import Store
from fusepass.codegen.render.cuda.walk.frame import Pool
from fusepass.codegen.render.numbers import free, plain
from fusepass.codegen.render.printer import Printer, Scope
from fusepass.codegen.render.spelling import Constant, Identifiers, bare, block, either, literal, where, written
from fusepass.errors import RenderError

F32 = DType.F32
ROW, COL = Axis("row", 100), Axis("col", 64)


def scopes(*roots: Expr) -> tuple[Scope, Scope]:
    """A scope that knows the row and one inside it that knows the column too."""
    names = Identifiers()
    printer = Printer(names, {name: names.exact(name) for name in ("x", "bias", "scale")})
    printer.expect(roots)
    outer = Scope(printer, at={ROW: "row"})
    return outer, outer.child({COL: "col"})


def shown(scope: Scope) -> list[str]:
    """The statements of a scope without marks."""
    return list(map(plain, scope.lines))


def test_values_land_in_the_outermost_scope_that_knows_their_axes() -> None:
    b = Builder()
    x = b.load("x", axis_index(ROW) * 64 + axis_index(COL), F32)
    bias, scale = b.load("bias", axis_index(ROW), F32), b.load("scale", Index(), F32)
    shift = b.apply(Op.EXP, b.apply(Op.MUL, bias, scale))
    root = b.apply(Op.ADD, x, shift)
    outer, inner = scopes(root)
    assert inner.value(root) == "(x_0 + exp_0)"
    assert shown(inner) == ["const float x_0 = x[64 * row + col];"]
    assert shown(outer) == [
        "const float bias_0 = bias[row];",
        "const float scale_0 = scale[0];",
        "const float exp_0 = fp::exp(bias_0 * scale_0);",
    ]


def test_a_value_used_twice_is_computed_once() -> None:
    b = Builder()
    x = b.load("x", axis_index(COL), F32)
    e = b.apply(Op.EXP, x)
    root = b.apply(Op.MUL, e, b.apply(Op.ADD, e, e))
    _, inner = scopes(root)
    assert inner.value(root) == "(exp_0 * (exp_0 + exp_0))"
    assert sum("fp::exp" in line for line in shown(inner)) == 1


def test_quotients_and_remainders_are_named_once() -> None:
    b = Builder()
    row = axis_index(ROW)
    first, second = b.load("x", row // 7, F32), b.load("bias", row // 7 + row % 7, F32)
    below = b.load("scale", (row - 3) // 7, F32)
    root = b.apply(Op.ADD, b.apply(Op.ADD, first, second), below)
    outer, _ = scopes(root)
    outer.value(root)
    assert shown(outer).count("const int quotient_0 = fp::div(row, 7);") == 1
    assert "const float bias_0 = bias[remainder_0 + quotient_0];" in shown(outer)
    assert shown(outer)[-2:] == [
        "const int quotient_1 = fp::div(row + 4, 7);",
        "const float scale_0 = scale[quotient_1 - 1];",
    ]


def test_coordinates_have_the_names_of_their_axes() -> None:
    b = Builder()
    root = b.load("x", axis_index(ROW) // 7, F32)
    outer, _ = scopes(root)
    outer.printer.coordinates = {(axis_index(ROW) // 7).terms[0][0]: "channel"}
    outer.value(root)
    assert shown(outer) == ["const int channel = fp::div(row, 7);", "const float x_0 = x[channel];"]


def test_masked_loads_stay_under_their_condition() -> None:
    b = Builder()
    place = axis_index(COL) - 1
    guarded = b.apply(Op.EXP, b.load("x", place, F32))
    masked = b.masked((Bound(place, 0, 64),), guarded, b.const(0.0, F32))
    _, inner = scopes(masked)
    assert inner.value(masked) == "masked_0"
    assert shown(inner) == [
        "float masked_0 = 0.0f;",
        "if (col - 1 >= 0) {",
        "    const float x_0 = x[col - 1];",
        "    masked_0 = fp::exp(x_0);",
        "}",
    ]


def test_a_load_of_the_row_alone_does_not_leave_a_mask_of_the_column() -> None:
    b = Builder()
    masked = b.masked((Bound(axis_index(COL), 0, 5),), b.load("x", axis_index(ROW), F32), b.const(1.0, F32))
    outer, inner = scopes(masked)
    inner.value(masked)
    assert shown(outer) == []
    assert "    const float x_0 = x[row];" in shown(inner)


def test_masks_without_loads_are_selections() -> None:
    b = Builder()
    masked = b.masked((Bound(axis_index(COL), 0, 5),), b.const(2.0, F32), b.const(1.0, F32))
    _, inner = scopes(masked)
    inner.value(masked)
    assert shown(inner) == ["const float masked_0 = col < 5 ? 2.0f : 1.0f;"]


def test_windows_are_loops_and_what_does_not_move_in_them_is_outside() -> None:
    b = Builder()
    kh, kw = Axis("kh", 3), Axis("kw", 2)
    load = b.load("x", axis_index(COL) + axis_index(kh) * 8 + axis_index(kw), F32)
    bias = b.load("bias", axis_index(ROW), F32)
    root = b.window(ReduceOp.MAX, (kh, kw), b.apply(Op.ADD, load, bias))
    outer, inner = scopes(root)
    assert inner.value(root) == "max_0.part<0>()"
    assert shown(outer) == ["const float bias_0 = bias[row];"]
    assert shown(inner) == [
        "fp::Max<float> max_0;",
        "#pragma unroll",
        "for (int kh_0 = 0; kh_0 < 3; ++kh_0) {",
        "    #pragma unroll",
        "    for (int kw_0 = 0; kw_0 < 2; ++kw_0) {",
        "        const float x_0 = x[8 * kh_0 + col + kw_0];",
        "        max_0.push(x_0 + bias_0);",
        "    }",
        "}",
    ]


def test_large_windows_stay_loops() -> None:
    b, k = Builder(), Axis("k", 100)
    root = b.window(ReduceOp.SUM, (k,), b.load("x", axis_index(k), F32))
    outer, _ = scopes(root)
    outer.value(root)
    assert not any("unroll" in line for line in shown(outer))


def test_bound_values_are_used_as_bound() -> None:
    b = Builder()
    x = b.load("x", axis_index(COL), F32)
    root = b.apply(Op.NEG, x)
    _, inner = scopes(root)
    inner.bind(x, "vector[v]")
    assert inner.value(root) == "(-vector[v])"
    assert shown(inner) == []


def test_a_statistic_before_its_reduction_is_a_bug() -> None:
    b = Builder()
    stat = b.reduction_result("sum", 0, F32)
    outer, _ = scopes(stat)
    with pytest.raises(RenderError, match=r"sum\.0 is printed before its reduction"):
        outer.value(stat)


def test_an_axis_outside_its_loop_is_a_bug() -> None:
    b = Builder()
    load = b.load("x", axis_index(COL), F32)
    outer, _ = scopes(load)
    with pytest.raises(RenderError, match="axis col is printed outside the loop over it"):
        outer.value(load)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda b, x, y: b.apply(Op.SUB, x, y), "(x_0 - bias_0)"),
        (lambda b, x, y: b.apply(Op.POW, x, y), "fp::pow(x_0, bias_0)"),
        (lambda b, x, y: b.apply(Op.LE, x, y, dtype=DType.BOOL), "(x_0 <= bias_0)"),
        (lambda b, x, y: b.cast(x, DType.F16), "fp::cast<fp::half>(x_0)"),
        (lambda b, x, y: b.apply(Op.NOT, b.cast(x, DType.BOOL)), "(!fp::cast<bool>(x_0))"),
        (lambda b, x, y: b.apply(Op.BIT_NOT, b.cast(x, DType.BOOL)), "(!fp::cast<bool>(x_0))"),
        (lambda b, x, y: b.apply(Op.SIGMOID, b.apply(Op.ADD, x, y)), "fp::sigmoid(x_0 + bias_0)"),
    ],
)
def test_operators(make: Callable[[Builder, Expr, Expr], Expr], text: str) -> None:
    b = Builder()
    root = make(b, b.load("x", Index(), F32), b.load("bias", Index(), F32))
    outer, _ = scopes(root)
    assert outer.value(root) == text


@pytest.mark.parametrize(
    ("value", "dtype", "text"),
    [
        (0.1, F32, "0.1f"),
        (1 / 3, F32, "0.33333334f"),
        (1 / 3, DType.F64, "0.3333333333333333"),
        (2.0, F32, "2.0f"),
        (-1.5, F32, "(-1.5f)"),
        (1e30, F32, "1e+30f"),
        (16777216.0, F32, "16777216.0f"),
        (1e300, F32, "fp::cast<float>(INFINITY)"),
        (-math.inf, DType.F64, "(-fp::cast<double>(INFINITY))"),
        (math.nan, F32, "fp::cast<float>(NAN)"),
        (0.5, DType.BF16, "fp::cast<fp::bfloat16>(0.5f)"),
        (True, DType.BOOL, "true"),
        (-5, DType.I32, "(-5)"),
        (-(2**31), DType.I32, "INT32_MIN"),
        (7, DType.I64, "int64_t(7LL)"),
        (-(2**63), DType.I64, "INT64_MIN"),
        (255, DType.U8, "uint8_t(255)"),
    ],
)
def test_literals(value: float, dtype: DType, text: str) -> None:
    assert plain(literal(Const(value, dtype))) == text


def test_identifiers_avoid_keywords_and_each_other() -> None:
    names = Identifiers()
    assert [names.exact(name) for name in ("x", "x", "float", "2d", "a.b")] == ["x", "x_0", "float_0", "_2d", "a_b"]


def test_bare_strips_only_what_encloses_everything() -> None:
    assert [bare(text) for text in ("(a)", "(a) + (b)", "((a + b))", "a")] == ["a", "(a) + (b)", "a + b", "a"]


def test_a_constant_is_defined_if_something_reads_it() -> None:
    outer, inner = scopes()
    outer.lines.append("// rows")
    first = outer.constant("int", "first", "blockIdx.x * 4")
    row = outer.constant("int", "row", lambda: f"{first} + lane")
    outer.constant("int", "lane", "threadIdx.x")
    inner.define_axis(ROW, row)
    assert not inner.reads(ROW)
    assert written(outer.lines) == ["// rows"]


def test_what_a_constant_that_is_read_reads_is_defined_too() -> None:
    outer, inner = scopes()
    first = outer.constant("int", "first", "blockIdx.x * 4")
    row = outer.constant("int", "row", lambda: f"{first} + lane")
    outer.constant("int", "unread", lambda: f"{row} + 1")
    inner.define_axis(ROW, row)
    assert inner.index(axis_index(ROW) * 2) == f"{free(2)} * row"
    assert inner.reads(ROW)
    assert block("if (there)", outer.lines) == [
        "if (there) {",
        "    const int first = blockIdx.x * 4;",
        "    const int row = first + lane;",
        "}",
    ]


def test_a_constant_is_read_before_its_block_ends() -> None:
    late, early = Constant("int", "late", "1"), Constant("int", "early", "1")
    assert f"{early}" == "early"
    assert either("there", [late.line, early.line], ["other();"]) == [
        "if (there) {",
        "    const int early = 1;",
        "} else {",
        "    other();",
        "}",
    ]
    assert f"{early}" == "early"
    with pytest.raises(RenderError, match="late is read outside the block that defines it"):
        str(late)


def test_a_kernel_s_own_variables_are_none_of_its_buffers() -> None:
    names = Identifiers()
    assert names.exact("sums") == "sums"
    c = names.locals
    assert (c.sums, c.from_, c.named("tile_x"), c.sums) == ("sums_0", "from", "tile_x", "sums_0")
    assert names.exact("from") == "from_0"


def test_an_expression_whose_parts_may_be_longer_elsewhere_is_named_where_it_would_be_there() -> None:
    b = Builder()
    sums = [b.load("x", axis_index(COL) + number, F32) for number in range(2)]
    for spare, named in ((0, False), (30, True)):
        total = b.apply(Op.ADD, *sums)
        root = b.apply(Op.MUL, total, b.const(2.0, F32))
        _, inner = scopes(root)
        for number, each in enumerate(sums):
            inner.bind(each, f"sums[{number}]", spare=spare)
        inner.value(root)
        assert any("add_0" in line for line in inner.lines) is named


def test_lines_stand_under_those_conditions_that_are_in_question() -> None:
    assert where(["x = 0;"], "", "true") == ["x = 0;"]
    assert where(["x = 0;"], "", "i < 4", "true", "live") == ["if (i < 4 && live) {", "    x = 0;", "}"]


def test_an_element_is_stored_in_its_buffer_s_type() -> None:
    b = Builder()
    x = b.load("x", axis_index(ROW), F32)
    outer, _ = scopes(x)
    store = Store("bias", axis_index(ROW) * 2, x)
    found = outer.stored(store, F32), outer.stored(store, DType.F16)
    assert list(map(plain, found)) == ["bias[2 * row] = x_0;", "bias[2 * row] = fp::cast<fp::half>(x_0);"]


def test_parts_of_shared_memory_lie_one_after_another_and_are_counted() -> None:
    pool = Pool("pool")
    assert pool.array("float", "sums", 64) == "float* const sums = reinterpret_cast<float*>(pool);"
    assert pool.take(32) == "pool + 64"
    pool.check("kernel", 96)
    for room, used in ((95, 0), (96, 128)):
        with pytest.raises(RenderError, match=f"kernel has {max(96, used)} bytes in shared memory, not {room}"):
            pool.check("kernel", room, used)
