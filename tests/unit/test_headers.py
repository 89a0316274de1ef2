"""The scalar functions, conversions and element types of templates/include against PyTorch, on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from fusepass.codegen.ir.expr import Op
from tests.support.probe import Probe, include_lines

NAN, INF = float("nan"), float("inf")
C = {
    torch.float32: "float",
    torch.float64: "double",
    torch.int8: "int8_t",
    torch.int16: "int16_t",
    torch.int32: "int32_t",
    torch.int64: "int64_t",
    torch.uint8: "uint8_t",
    torch.bool: "bool",
}
FLOATS = (torch.float32, torch.float64)
INTS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)

FEW_DIGITS = {
    "exp": 2.0**-17,
    "exp2": 2.0**-21,
    "expm1": 2.0**-15,
    "log1p": 2.0**-15,
    "sigmoid": 2.0**-17,
    "tanh": 2.0**-14,
}
"""Functions that are good to few digits: by how much of their result they may be off."""

# op, PyTorch's function, and where PyTorch's is defined
UNARY_FLOAT: dict[Op, tuple[Callable[..., torch.Tensor], float, float]] = {
    Op.EXP: (torch.exp, -110, 95),
    Op.EXP2: (torch.exp2, -150, 130),
    Op.EXPM1: (torch.expm1, -20, 90),
    Op.LOG: (torch.log, 0, 1e30),
    Op.LOG2: (torch.log2, 0, 1e30),
    Op.LOG10: (torch.log10, 0, 1e30),
    Op.LOG1P: (torch.log1p, -1, 1e10),
    Op.SIN: (torch.sin, -1000, 1000),
    Op.COS: (torch.cos, -1000, 1000),
    Op.TAN: (torch.tan, -100, 100),
    Op.ASIN: (torch.asin, -1, 1),
    Op.ACOS: (torch.acos, -1, 1),
    Op.ATAN: (torch.atan, -50, 50),
    Op.SINH: (torch.sinh, -80, 80),
    Op.COSH: (torch.cosh, -80, 80),
    Op.TANH: (torch.tanh, -10, 10),
    Op.ASINH: (torch.asinh, -1e6, 1e6),
    Op.ACOSH: (torch.acosh, 1, 1e6),
    Op.ATANH: (torch.atanh, -1, 1),
    Op.ERF: (torch.erf, -5, 5),
    Op.ERFC: (torch.erfc, -5, 10),
    Op.SQRT: (torch.sqrt, 0, 1e30),
    Op.RSQRT: (torch.rsqrt, 0, 1e30),
    Op.RECIPROCAL: (torch.reciprocal, -1e5, 1e5),
    Op.SIGMOID: (torch.sigmoid, -100, 100),
    Op.LGAMMA: (torch.lgamma, -8, 100),
}
EXACT_FLOAT: dict[Op, Callable[..., torch.Tensor]] = {
    Op.FLOOR: torch.floor,
    Op.CEIL: torch.ceil,
    Op.ROUND: torch.round,
    Op.TRUNC: torch.trunc,
    Op.ABS: torch.abs,
    Op.SIGN: torch.sign,
}
TESTS: dict[Op, Callable[..., torch.Tensor]] = {
    Op.ISNAN: torch.isnan,
    Op.ISINF: torch.isinf,
    Op.SIGNBIT: torch.signbit,
}
BINARY_FLOAT: dict[Op, Callable[..., torch.Tensor]] = {
    Op.FLOOR_DIV: torch.floor_divide,
    Op.REMAINDER: torch.remainder,
    Op.FMOD: torch.fmod,
    Op.POW: torch.pow,
    Op.ATAN2: torch.atan2,
    Op.HYPOT: torch.hypot,
    Op.COPYSIGN: torch.copysign,
    Op.NEXTAFTER: torch.nextafter,
    Op.MAXIMUM: torch.maximum,
    Op.MINIMUM: torch.minimum,
    Op.FMAX: torch.fmax,
    Op.FMIN: torch.fmin,
}
BINARY_INT: dict[Op, Callable[..., torch.Tensor]] = {
    Op.FLOOR_DIV: torch.floor_divide,
    Op.REMAINDER: torch.remainder,
    Op.FMOD: torch.fmod,
    Op.POW: torch.pow,
    Op.MAXIMUM: torch.maximum,
    Op.MINIMUM: torch.minimum,
    Op.SHIFT_LEFT: torch.bitwise_left_shift,
    Op.SHIFT_RIGHT: torch.bitwise_right_shift,
}
INEXACT = {Op.POW: 4, Op.ATAN2: 4, Op.HYPOT: 4}
SPECIAL = [
    *(0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.0, -7.0, 1e-3, -1e-3, 1e10, -1e10, 2.0**31, 2.0**63),
    *(INF, -INF, NAN, 1e-40, -1e-40, 1.4e-45, 3.4e38, -3.4e38, 0.99999994, 1.0000001, 88.8, -104.0, 127.9999, 1e-30),
]


def loop(name: str, result: str, arguments: list[str], expression: str) -> str:
    """A vectorisable loop of `expression` over elements a, b, ... of the arguments."""
    pointers = "".join(f"const {kind}* {'abc'[i]}_, " for i, kind in enumerate(arguments))
    loads = " ".join(f"const {kind} {'abc'[i]} = {'abc'[i]}_[i];" for i, kind in enumerate(arguments))
    return f"""extern "C" void {name}({pointers}{result}* result, int64_t count) {{
    #pragma omp simd
    for (int64_t i = 0; i < count; ++i) {{ {loads} result[i] = {expression}; }}
}}
"""


@cache
def probe() -> Probe:
    parts = [include_lines()]
    for kind in map(C.__getitem__, FLOATS):
        for op in (*UNARY_FLOAT, *EXACT_FLOAT):
            parts.append(loop(f"{op.value}_{kind}", kind, [kind], f"fp::{op.value}(a)"))
        parts += [loop(f"{op.value}_{kind}", "bool", [kind], f"fp::{op.value}(a)") for op in TESTS]
        parts += [loop(f"{op.value}_{kind}", kind, [kind, kind], f"fp::{op.value}(a, b)") for op in BINARY_FLOAT]
        parts.append(loop(f"where_{kind}", kind, ["bool", kind, kind], "fp::where(a, b, c)"))
    for kind in map(C.__getitem__, INTS):
        parts += [loop(f"{op.value}_{kind}", kind, [kind, kind], f"fp::{op.value}(a, b)") for op in BINARY_INT]
        parts += [loop(f"{op.value}_{kind}", kind, [kind], f"fp::{op.value}(a)") for op in EXACT_FLOAT]
        parts.append(loop(f"where_{kind}", kind, ["bool", kind, kind], "fp::where(a, b, c)"))
    for source in C.values():
        for target in C.values():
            parts.append(loop(f"cast_{source}_{target}", target, [source], f"fp::cast<{target}>(a)"))
    for half in ("half", "bfloat16"):
        for kind in C.values():
            parts.append(loop(f"cast_{half}_{kind}", kind, [f"fp::{half}"], f"fp::cast<{kind}>(a)"))
            parts.append(loop(f"cast_{kind}_{half}", f"fp::{half}", [kind], f"fp::cast<fp::{half}>(a)"))
    for name, source, target in (("widen", "fp::half", "float"), ("narrow", "float", "fp::half")):
        arguments = f"const {source}* a, {target}* result, int64_t count"
        parts.append(f'extern "C" void {name}({arguments}) {{ fp::{name}(count, a, result); }}\n')
    parts += [
        loop(f"{name}_float", "float", ["float", "float"], f"fp::{name}(a, b)") for name in ("divide", "divide_by")
    ]
    parts.append(loop("normal_cdf", "float", ["float"], "fp::normal_cdf(a)"))
    parts += [loop(f"{name}_few", "float", ["float"], f"fp::{name}_few(a)") for name in FEW_DIGITS]
    parts.append(loop("divide_by_few", "float", ["float", "float"], "fp::divide_by_few(a, b)"))
    parts.append(loop("plain_log1p_float", "float", ["float"], "fp::plain_log1p(a)"))
    parts.append(loop("plain_tanh_float", "float", ["float"], "fp::plain_tanh(a)"))
    parts.append(loop("tf32_float", "float", ["float"], "fp::tf32(a)"))
    return Probe("headers", "\n".join(parts))


def run(function: str, *inputs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    bits = torch.int16 if dtype in (torch.float16, torch.bfloat16) else dtype
    result = torch.empty(inputs[0].shape, dtype=bits)
    arrays = [t.view(torch.int16).numpy() if t.dtype is torch.bfloat16 else t.numpy() for t in inputs]
    probe()(function, arrays, result.numpy())
    return result.view(dtype)


def ulps(got: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Distance in units of the last place of `exact` rounded to the type of `got`; 0 where both are NaN or equal."""
    spacing = torch.from_numpy(np.spacing(exact.to(got.dtype).abs().numpy())).double()
    distance = (got.double() - exact.double()).abs() / spacing
    same = (got.double() == exact.double()) | (got == exact.to(got.dtype)) | (got.isnan() & exact.isnan())
    return torch.where(same, 0.0, distance)


def pairs(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Every pair of `values`."""
    a, b = torch.meshgrid(values, values, indexing="ij")
    return a.reshape(-1).contiguous(), b.reshape(-1).contiguous()


def integers(dtype: torch.dtype) -> torch.Tensor:
    info = torch.iinfo(dtype)
    values = {
        info.min,
        info.min + 1,
        -128,
        -9,
        -8,
        -7,
        -3,
        -2,
        -1,
        0,
        1,
        2,
        3,
        5,
        7,
        8,
        31,
        63,
        100,
        info.max - 1,
        info.max,
    }
    return torch.tensor(sorted(v for v in values if info.min <= v <= info.max), dtype=dtype)


@pytest.mark.parametrize("op", UNARY_FLOAT, ids=lambda op: op.value)
def test_functions_are_within_four_ulps(op: Op) -> None:
    function, low, high = UNARY_FLOAT[op]
    x = torch.rand(20011) * (high - low) + low
    got = run(f"{op.value}_float", x, dtype=torch.float32)
    exact = function(x.double())
    error = ulps(got, exact)
    if op is Op.LGAMMA:  # near its zeros only the absolute error is small
        error = torch.where(exact.abs() < 0.5, (got - exact).abs() * 1e6, error)
    # libmvec promises 4; where float32's result is below its smallest normal, nothing is promised
    assert error[exact.abs() > 1.2e-38].max() <= 4, error.max()


@pytest.mark.parametrize("op", UNARY_FLOAT, ids=lambda op: op.value)
def test_functions_in_float64(op: Op) -> None:
    function, low, high = UNARY_FLOAT[op]
    x = torch.rand(5003, dtype=torch.float64) * (high - low) + low
    torch.testing.assert_close(run(f"{op.value}_double", x, dtype=torch.float64), function(x), rtol=4e-15, atol=1e-15)


@pytest.mark.parametrize("op", UNARY_FLOAT, ids=lambda op: op.value)
def test_functions_of_special_values(op: Op) -> None:
    x = torch.tensor(SPECIAL)
    for count in (len(SPECIAL), 3):  # in vectors, and by the scalar function
        got = run(f"{op.value}_float", x[-count:].contiguous(), dtype=torch.float32)
        exact = UNARY_FLOAT[op][0](x[-count:].double())
        want = exact.float()
        assert torch.equal(got.isnan(), want.isnan()), (x[-count:], got, want)
        assert torch.equal(got.isinf(), want.isinf()), (x[-count:], got, want)
        finite = want.isfinite() & (want.abs() > 1.2e-38)
        assert ulps(got[finite], exact[finite]).max() <= 4
        tiny = want.abs() <= 1.2e-38
        assert (got[tiny] - want[tiny]).abs().max() < 1e-38 if tiny.any() else True


@pytest.mark.parametrize(("op", "least", "none"), [(Op.EXP, -87.33654, -104), (Op.EXP2, -126.0, -151)], ids=str)
def test_powers_that_are_denormal_or_zero(op: Op, least: float, none: float) -> None:
    ends = torch.tensor([none - 1, -INF, -1e4, NAN])
    x = torch.cat([least + torch.arange(-4001, 4001) * 1e-3, torch.linspace(none, least, 4001), ends])
    got, exact = run(f"{op.value}_float", x, dtype=torch.float32), UNARY_FLOAT[op][0](x.double())
    normal = exact > 1.1763e-38
    assert normal.sum() > 3900
    assert ulps(got[normal], exact[normal]).max() <= 4
    assert (got[:-1].double() - exact[:-1])[~normal[:-1]].abs().max() < 3e-45
    assert got[-4:-1].tolist() == [0, 0, 0]
    assert got[-1].isnan()


@pytest.mark.parametrize(("op", "least", "most"), [(Op.EXP, -87.3, 88.7228), (Op.EXP2, -126.0, 127.9999)], ids=str)
def test_powers_are_near(op: Op, least: float, most: float) -> None:
    """Nearer than the library's for vectors, at whose place they are computed; NaN keeps being one whatever its bits."""
    steps = torch.linspace(least, most, 400_003, dtype=torch.float64).float()
    x = torch.cat([steps, torch.linspace(-1, 1, 100_003), torch.tensor([0.0, -0.0, 1e-30, -1e-30])])
    assert ulps(run(f"{op.value}_float", x, dtype=torch.float32), UNARY_FLOAT[op][0](x.double())).max() <= 1.4
    bits = torch.tensor([0x7F800001, 0x7FC00001, 0x7FFFFFFF, 0x7FC001FF, -1, -0x3FFE01], dtype=torch.int32)
    assert run(f"{op.value}_float", bits.view(torch.float32), dtype=torch.float32).isnan().all()


@pytest.mark.parametrize("dtype", FLOATS, ids=C.__getitem__)
@pytest.mark.parametrize("op", [*EXACT_FLOAT, *TESTS], ids=lambda op: op.value)
def test_exact_functions(op: Op, dtype: torch.dtype) -> None:
    x = torch.cat([torch.tensor(SPECIAL, dtype=dtype), torch.randn(1000, dtype=dtype) * 100])
    reference = EXACT_FLOAT.get(op) or TESTS[op]
    want = reference(x)
    got = run(f"{op.value}_{C[dtype]}", x, dtype=want.dtype)
    assert_same(got, want)


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", FLOATS, ids=C.__getitem__)
@pytest.mark.parametrize("op", BINARY_FLOAT, ids=lambda op: op.value)
def test_functions_of_two_floats(op: Op, dtype: torch.dtype) -> None:
    a, b = pairs(torch.tensor([*SPECIAL, 2.0, 5.3, -5.3, 0.7], dtype=dtype))
    got = run(f"{op.value}_{C[dtype]}", a, b, dtype=dtype)
    want = BINARY_FLOAT[op](a, b)
    if op not in INEXACT:
        # PyTorch's vector fmod gives NaN where a / b overflows; ours does not.
        right = ~(want.isnan() & a.isfinite() & (b != 0) & (a / b).isinf())
        assert_same(got[right], want[right])
        return
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.isinf(), want.isinf())
    normal = want.isfinite() & (want.abs() > torch.finfo(dtype).smallest_normal)
    assert ulps(got[normal], want[normal]).max() <= INEXACT[op]


@pytest.mark.parametrize("dtype", INTS, ids=C.__getitem__)
@pytest.mark.parametrize("op", BINARY_INT, ids=lambda op: op.value)
def test_functions_of_two_integers(op: Op, dtype: torch.dtype) -> None:
    a, b = pairs(integers(dtype))
    if op in (Op.FLOOR_DIV, Op.REMAINDER, Op.FMOD):  # what PyTorch itself survives
        legal = (b != 0) & ~((a == torch.iinfo(dtype).min) & (b == -1))
        a, b = a[legal], b[legal]
    want = BINARY_INT[op](a, b)
    assert_same(run(f"{op.value}_{C[dtype]}", a, b, dtype=dtype), want)


@pytest.mark.parametrize("dtype", INTS, ids=C.__getitem__)
def test_integer_division_never_traps(dtype: torch.dtype) -> None:
    lowest = torch.iinfo(dtype).min
    a = torch.tensor([lowest, lowest, 5, 0], dtype=dtype)
    b = torch.tensor([0, -1 if lowest else 0, 0, 0], dtype=dtype)
    assert run(f"floor_div_{C[dtype]}", a, b, dtype=dtype).tolist() == [0, lowest, 0, 0]
    assert run(f"remainder_{C[dtype]}", a, b, dtype=dtype).tolist() == [lowest, 0, 5, 0]


@pytest.mark.parametrize("dtype", INTS, ids=C.__getitem__)
@pytest.mark.parametrize("op", EXACT_FLOAT, ids=lambda op: op.value)
def test_functions_of_an_integer(op: Op, dtype: torch.dtype) -> None:
    x = integers(dtype)
    assert_same(run(f"{op.value}_{C[dtype]}", x, dtype=dtype), EXACT_FLOAT[op](x))


@pytest.mark.parametrize("dtype", [*FLOATS, *INTS], ids=C.__getitem__)
def test_where_chooses(dtype: torch.dtype) -> None:
    condition = torch.tensor([True, False] * 20)
    a, b = torch.arange(40).to(dtype), torch.arange(40, 80).to(dtype)
    assert_same(run(f"where_{C[dtype]}", condition, a, b, dtype=dtype), torch.where(condition, a, b))


def test_where_does_not_mix_nan_in() -> None:
    condition = torch.tensor([True, False] * 20)
    a, b = torch.full((40,), NAN), torch.full((40,), INF)
    assert_same(run("where_float", condition, a, b, dtype=torch.float32), torch.where(condition, a, b))


@pytest.mark.parametrize("target", C, ids=C.__getitem__)
@pytest.mark.parametrize("source", C, ids=C.__getitem__)
def test_casts(source: torch.dtype, target: torch.dtype) -> None:
    if source.is_floating_point:
        # A float that no int64 can hold is undefined in PyTorch, too.
        values: list[Any] = [
            0.0,
            -0.0,
            0.3,
            -0.3,
            1.9,
            -1.9,
            127.5,
            128.0,
            255.9,
            300.0,
            -1.0,
            -129.0,
            70000.0,
            3e9,
            -3e9,
        ]
        values += [NAN, INF, 1e38] if target.is_floating_point or target is torch.bool else []
        # what 32 bits do not hold is undefined where the type has no more
        values = [v for v in values if target.is_floating_point or target is torch.bool or abs(v) < 2**31]
        x = torch.tensor(values * 3, dtype=source)
    elif source is torch.bool:
        x = torch.tensor([True, False] * 9)
    else:
        x = integers(source)
    assert_same(run(f"cast_{C[source]}_{C[target]}", x, dtype=target), x.to(target))


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=("half", "bfloat16"))
def test_every_half_widens_exactly(half: torch.dtype) -> None:
    name = "half" if half is torch.float16 else "bfloat16"
    x = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(half)
    assert_same(run(f"cast_{name}_float", x, dtype=torch.float32), x.float())
    assert_same(run(f"cast_{name}_bool", x, dtype=torch.bool), x != 0)


@pytest.mark.parametrize("start", [0, 1, 65500])
def test_many_halves_widen_as_each_does(start: int) -> None:
    x = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.float16)[start:]
    got = run("widen", x, dtype=torch.float32)
    assert torch.equal(got.nan_to_num(1.5), x.float().nan_to_num(1.5))
    assert torch.equal(got.signbit(), x.signbit())


@pytest.mark.parametrize("start", [0, 1])
def test_many_floats_round_as_each_does(start: int) -> None:
    """Midway between halves, one ulp to each side, and where halves end."""
    halves = torch.arange(0, 31744, dtype=torch.int32).to(torch.int16).view(torch.float16).double()
    midway = ((halves[1:] + halves[:-1]) / 2).float()
    near = [torch.nextafter(midway, torch.tensor(INF)), torch.nextafter(midway, torch.tensor(-INF))]
    x = torch.cat([midway, *near, torch.tensor(SPECIAL), torch.tensor([65519.996, 65520.0, 2.0**-25])]).float()
    x = torch.cat([x, -x])[start:]
    got, want = run("narrow", x, dtype=torch.float16), x.half()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.view(torch.int16)[~want.isnan()], want.view(torch.int16)[~want.isnan()])


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=("half", "bfloat16"))
def test_rounding_to_half(half: torch.dtype) -> None:
    name = "half" if half is torch.float16 else "bfloat16"
    every = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(half).float()
    every = every[every.isfinite()]
    middle = (every + every.abs().sort().values.diff(append=torch.tensor([0.0])) / 2).float()
    bits = middle.view(torch.int32)
    x = torch.cat(
        [every, middle, (bits + 1).view(torch.float32), (bits - 1).view(torch.float32), torch.tensor(SPECIAL)]
    )
    x = torch.cat([x, torch.tensor([65504.0, 65519.99, 65520.0, -65520.0, 65536.0]), torch.randn(5000) * 1e-6])
    got, want = run(f"cast_float_{name}", x, dtype=half), x.to(half)
    assert_same(got.float(), want.float())
    zeros = want == 0
    assert torch.equal(got[zeros].signbit(), want[zeros].signbit())


def test_tf32_is_rounded_to_nearest() -> None:
    x = torch.cat([torch.randn(1000), torch.tensor(SPECIAL), torch.tensor([1 + 2.0**-11, -1 - 2.0**-11])])
    payloads = torch.tensor([0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32).view(torch.float32)
    x = torch.cat([x, payloads])
    got = run("tf32_float", x, dtype=torch.float32)
    assert torch.equal(got.isnan(), x.isnan())
    assert got[-5:-3].tolist() == [1 + 2.0**-10, -1 - 2.0**-10]
    finite = got.isfinite() & x.isfinite() & (x.abs() > 1.2e-38)
    spacing = 2.0 ** (x[finite].abs().double().log2().floor() - 10)
    assert bool(((got - x)[finite].abs() <= spacing / 2).all())
    assert not bool((got[finite].view(torch.int32) & 0x1FFF).any())
    assert torch.equal(got.isinf(), x.isinf() | (x.abs() > 3.4026e38))


@pytest.mark.parametrize("function", ["divide", "divide_by"])
def test_quotients_without_a_branch(function: str) -> None:
    """They are within a unit of the last place, rounded but for a few, exact where the quotient is, and infinite or NaN where it is."""
    random = torch.randn(2, 200_000, dtype=torch.float64) * 2.0 ** torch.randint(-120, 120, (2, 200_000))
    whole = torch.randint(-4095, 4096, (2, 100_000)).float()
    edges = [3.4028235e38, -3.4028235e38, 1.1754944e-38, 2.3509887e-38, 1e-42, 1 - 2.0**-24, 2.0**126, 2.0**-64]
    for a, b in (random.float(), pairs(torch.tensor([*SPECIAL, *edges])), (whole[0] * whole[1], whole[1])):
        got, want = run(f"{function}_float", a, b, dtype=torch.float32), a / b
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.isinf(), want.isinf())
        assert torch.equal(got.signbit()[want == 0], want.signbit()[want == 0])
        finite = want.isfinite()
        assert ulps(got[finite], want[finite]).max() <= 1
        all_ones = (b.view(torch.int32) & 0x7FFFFF) == 0x7FFFFF
        rounded = finite & (a.abs() > 2.0**-100) & (want.abs() > 2.0**-75) & ~all_ones
        assert (got[rounded] != want[rounded]).sum() <= 1e-5 * rounded.sum()
    assert torch.equal(got[finite], whole[0][finite])


def test_the_normal_distribution() -> None:
    """As near to the exact integral as 1 + erf comes, and where that is small, nearer."""
    x = torch.cat([torch.linspace(-12, 12, 200_001), torch.tensor(SPECIAL)])
    got, want = run("normal_cdf", x, dtype=torch.float32), torch.special.ndtr(x.double())
    assert torch.equal(got.isnan(), want.isnan())
    error = (got - want).abs().nan_to_num()
    assert error.max() <= 1.2e-7
    assert got[x == INF] == 1
    assert got[x == -INF] == 0
    near = x.abs() < 4
    assert (error[near] / want[near]).max() <= 2e-4


def test_log1p_without_a_branch() -> None:
    exponents = torch.randint(-140, 129, (400_000,))
    wide = torch.randn(400_000, dtype=torch.float64) * 2.0**exponents
    x = torch.cat([wide, torch.rand(200_000) * 2 - 1, torch.tensor([*SPECIAL, 3.4e38, 2.2e38, 2.3e38])]).float()
    got, want = run("plain_log1p_float", x, dtype=torch.float32), x.double().log1p()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.isinf(), want.isinf())
    finite = want.isfinite()
    assert ulps(got[finite], want[finite]).max() <= 2


def test_tanh_without_a_branch() -> None:
    exponents = torch.randint(-140, 10, (200_000,))
    x = torch.cat([torch.randn(200_000) * 2.0**exponents, torch.rand(400_000) * 3 - 1.5, torch.tensor(SPECIAL)]).float()
    got, want = run("plain_tanh_float", x, dtype=torch.float32), x.double().tanh()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.signbit()[~want.isnan()], want.signbit()[~want.isnan()])
    assert ulps(got, want)[~want.isnan()].max() <= 2.5


@pytest.mark.parametrize("name", FEW_DIGITS)
def test_functions_of_few_digits(name: str) -> None:
    """They are within their bounds, and infinite, zero or NaN where the function is."""
    small = torch.randn(10_000) * 2.0 ** torch.randint(-30, 1, (10_000,))
    x = torch.cat([torch.linspace(-87, 88, 200_001), small, torch.tensor(SPECIAL)])
    got, want = run(f"{name}_few", x, dtype=torch.float32), getattr(torch, name)(x)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.isinf(), want.isinf())
    tame = want.isfinite() & (want.abs() > 1.2e-38)
    assert ((got - want)[tame].double() / want[tame]).abs().max() <= FEW_DIGITS[name]
    assert got[~tame & want.isfinite()].abs().max() <= 1.2e-38


def test_a_quotient_of_few_digits() -> None:
    random = torch.randn(2, 200_000, dtype=torch.float64) * 2.0 ** torch.randint(-120, 120, (2, 200_000))
    for a, b in (random.float(), pairs(torch.tensor(SPECIAL))):
        got, want = run("divide_by_few", a, b, dtype=torch.float32), a / b
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.isinf(), want.isinf())
        tame = want.isfinite() & (want.abs() > 1.2e-38)
        assert ((got - want)[tame].double() / want[tame]).abs().max() <= 2.0**-21
