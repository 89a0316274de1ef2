"""Pointwise operators: PyTorch's values at ordinary and special numbers, and its type promotion."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusepass.codegen.ir.expr import Apply, Op
from fusepass.codegen.ir.text import program_text
from fusepass.codegen.lowering.lower import lower
from fusepass.codegen.lowering.tracer import Spec
from tests.support.regions import Functional, region
from tests.support.thinned import thinned

NAN, INF = float("nan"), float("inf")
SPECIAL = torch.tensor(
    [NAN, INF, -INF, 0.0, -0.0, 1, -1, 0.5, -0.5, 3, -3, 6, -6, 20, -20, 21, 50, -50, 100, -100, 1e-5, 2.5],
    dtype=torch.float64,
)  # fmt: skip
FLOATS = (torch.float64, torch.float32, torch.bfloat16)
DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, *FLOATS)
FEW = (torch.bool, torch.uint8, torch.int64, torch.float16, torch.float32)
ONE_PER_PROMOTION = ("add", "div", "pow", "eq", "where")

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu6": F.relu6,
    "elu": F.elu,
    "elu(alpha)": lambda x: F.elu(x, 0.3),
    "selu": F.selu,
    "celu": lambda x: F.celu(x, 0.3),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "gelu": F.gelu,
    "gelu(tanh)": lambda x: F.gelu(x, approximate="tanh"),
    "logsigmoid": F.logsigmoid,
    "hardshrink": F.hardshrink,
    "tanhshrink": F.tanhshrink,
    "softsign": F.softsign,
    "softplus": F.softplus,
    "softplus(beta)": lambda x: F.softplus(x, 2.0, 3.0),
    "softshrink": lambda x: F.softshrink(x, 0.7),
    "hardtanh": lambda x: F.hardtanh(x, -2.0, 0.5),
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "silu": F.silu,
    "mish": F.mish,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "threshold": lambda x: F.threshold(x, 0.1, 20.0),
    "prelu": lambda x: F.prelu(x, torch.full_like(x[:1], 0.25)),
    "glu": F.glu,
    "clamp": lambda x: x.clamp(-0.5, 2),
    "clamp_min": lambda x: x.clamp(min=0.25),
    "nan_to_num": lambda x: torch.nan_to_num(x, 1.0, 2.0, 3.0),
    "sinc": torch.sinc,
    "logit": torch.logit,
    "frac": torch.frac,
    "xlogy": lambda x: torch.xlogy(x, x),
    "logaddexp": lambda x: torch.logaddexp(x, -x),
    "lerp": lambda x: torch.lerp(x, x * 2, 0.3),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.5),
    "addcdiv": lambda x: torch.addcdiv(x, x, x + 1, value=0.5),
    "maximum": lambda x: torch.maximum(x, x.flip(0)),
    "minimum": lambda x: torch.minimum(x, x.flip(0)),
    "fmax": lambda x: torch.fmax(x, x.flip(0)),
    "sign": torch.sign,
    "isfinite": torch.isfinite,
    "masked_fill": lambda x: x.masked_fill(x > 1, -INF),
    "pow(2)": lambda x: x**2,
    "pow(3)": lambda x: x**3,
    "pow(4)": lambda x: x**4,
    "pow(7.0)": lambda x: x**7.0,
    "pow(9)": lambda x: x**9,
    "pow(-2)": lambda x: x**-2,
    "pow(0.5)": lambda x: x**0.5,
    "pow(-0.5)": lambda x: x**-0.5,
    "pow(-1)": lambda x: x**-1,
    "pow(2.5)": lambda x: x**2.5,
    "2 ** x": lambda x: 2**x,
    "3 ** x": lambda x: 3**x,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation(name: str) -> None:
    function = ACTIVATIONS[name]
    made = region(lambda *xs: [function(x) for x in xs], *(SPECIAL.to(dtype) for dtype in FLOATS))
    assert len(made.program.kernels) == len(FLOATS)
    made.check()


def test_powers_with_few_factors_are_products() -> None:
    (kernel,) = region(lambda x: x**8 + x**5 + 2**x, SPECIAL).program.kernels
    operators = [node.op for node in kernel.nodes if isinstance(node, Apply)]
    assert (operators.count(Op.MUL), operators.count(Op.EXP2), operators.count(Op.POW)) == (4, 1, 0)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_of_halves(name: str) -> None:
    # PyTorch's square root of a half is the power, unlike that of any other type, so there only exact values will do;
    # elsewhere half overflows on the way and they will not. On some processors oneDNN's GELU of an infinity is NaN.
    with torch.backends.mkldnn.flags(enabled=False):
        region(ACTIVATIONS[name], SPECIAL.half()).check(exact="0.5)" in name)


def test_inplace_spelling_is_the_same() -> None:
    made = region(Functional(lambda x: F.relu_(F.silu(x + 1, inplace=True).mul_(2).add_(1))), SPECIAL)
    made.check()
    assert len(made.program.kernels) == 1


BINARY: dict[str, Callable[[Any, Any], Tensor]] = {
    "add": torch.add,
    "add(alpha)": lambda a, b: torch.add(a, b, alpha=2),
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "div(trunc)": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "div(floor)": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "remainder": torch.remainder,
    "fmod": torch.fmod,
    "pow": torch.pow,
    "maximum": torch.maximum,
    "fmin": torch.fmin,
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
    "logical_and": torch.logical_and,
    "logical_xor": torch.logical_xor,
    "bitwise_and": torch.bitwise_and,
    "bitwise_or": torch.bitwise_or,
    "bitwise_xor": torch.bitwise_xor,
    "atan2": torch.atan2,
    "copysign": torch.copysign,
    "where": lambda a, b: torch.where(a > b, a, b),
    "lshift": torch.bitwise_left_shift,
    "rshift": torch.bitwise_right_shift,
    "clamp": torch.clamp,
}


def _sample(dtype: torch.dtype) -> Tensor:
    return torch.tensor([True, False, True, False] if dtype is torch.bool else [1, 2, 3, 7]).to(dtype)


def _works(function: Callable[..., Tensor], *args: Any) -> bool:
    try:
        function(*args)
    except (RuntimeError, TypeError):
        return False
    return True


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.thinned(3)
def test_types_of_two_tensors(name: str) -> None:
    dtypes = DTYPES if name in ONE_PER_PROMOTION else FEW
    function, samples = BINARY[name], [_sample(dtype) for dtype in dtypes]
    pairs = list(itertools.product(range(len(dtypes)), repeat=2))
    # The second comes with other values, or as a tensor without dimensions, whose type counts for less.
    for other in (lambda x: x.flip(0), lambda x: x[2]):
        good = [(i, j) for i, j in pairs if _works(function, samples[i], other(samples[j]))]
        assert good
        made = region(lambda *xs, other=other, good=good: [function(xs[i], other(xs[j])) for i, j in good], *samples)
        made.check(exact=False)


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize("number", [2, -3, 0.5, True], ids=str)
@pytest.mark.thinned(2)
def test_types_of_a_tensor_and_a_number(name: str, number: float) -> None:
    function = BINARY[name]
    samples = [_sample(dtype) for dtype in DTYPES]
    if name == "pow" and number is True:
        samples = samples[1:]  # PyTorch's decomposition and its kernel disagree on the type of a truth value's power
    calls = [
        (lambda xs, i=i, swap=swap: function(number, xs[i]) if swap else function(xs[i], number))
        for i, swap in itertools.product(range(len(samples)), (False, True))
    ]
    good = [call for call in calls if _works(call, samples)]
    if good:
        region(lambda *xs: [call(xs) for call in good], *samples).check(exact=False)


THREE: dict[str, Callable[[Any, Any, Any], Tensor]] = {
    "addcmul": lambda a, b, c: torch.addcmul(a, b, c, value=2),
    "addcdiv": lambda a, b, c: torch.addcdiv(a, b, c, value=2),
    "where": lambda a, b, c: torch.where(a > 1, b, c),
    "clamp": torch.clamp,
    "sum of products": lambda a, b, c: a * b + c,
    "lerp": torch.lerp,
    "cat": lambda a, b, c: torch.cat([x if x.dim() else x[None] for x in (a, b, c)]),
}


RANKS = [(1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 0)]


@pytest.mark.parametrize(("name", "ranks"), thinned(itertools.product(THREE, RANKS), 3))
@pytest.mark.thinned(3)
def test_types_of_three_tensors(name: str, ranks: tuple[int, ...]) -> None:
    """With and without dimensions: the type of a 0-dim tensor counts for less."""
    samples = [_sample(dtype) for dtype in FEW]

    def arguments(xs: Any, chosen: tuple[int, ...]) -> list[Tensor]:
        return [
            xs[i].roll(place) if rank else xs[i][place + 1]
            for place, (i, rank) in enumerate(zip(chosen, ranks, strict=True))
        ]

    every = itertools.product(range(len(FEW)), repeat=3)
    good = [chosen for chosen in every if _works(THREE[name], *arguments(samples, chosen))]
    region(lambda *xs: [THREE[name](*arguments(xs, chosen)) for chosen in good], *samples).check(exact=False)
    assert good


def test_integers_divided_towards_zero() -> None:
    low = torch.iinfo(torch.int32).min
    a = torch.tensor([7, -7, 7, -7, 0, low, low, 5], dtype=torch.int32)
    b = torch.tensor([2, 2, -2, -2, 3, 3, 1, 7], dtype=torch.int32)
    region(lambda a, b: torch.div(a, b, rounding_mode="trunc"), a, b).check(exact=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_halves_are_compared_with_a_rounded_number(dtype: torch.dtype) -> None:
    x = torch.tensor([0.1, 0.3], dtype=dtype)
    region(lambda x: (x >= 0.1, x <= 0.1, x == 0.3, torch.where(x < 0.1, x, 0.1)), x).check(exact=False)


@pytest.mark.parametrize("source", DTYPES, ids=str)
def test_conversion(source: torch.dtype) -> None:
    x = torch.tensor([0, 1, 2, 3, 100, 127, 200]).to(source)
    if source.is_floating_point:
        x = torch.tensor([0.0, 1.0, 2.0, 3.7, 100.5, 255.0, 0.2], dtype=source)
    elif source is not torch.uint8 and source is not torch.bool:
        x = torch.cat([x, -x])
    region(lambda x: [x.to(target) for target in DTYPES], x).check(exact=False)


@pytest.mark.parametrize(
    "shapes", [[(3, 1), (1, 4)], [(), (2, 3)], [(1,), ()], [(2, 1, 3), (4, 1)], [(0, 3), (3,)]], ids=str
)
def test_broadcast(shapes: list[tuple[int, ...]]) -> None:
    a, b = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    region(lambda a, b: (a * b + a, torch.where(a > b, a, b)), a, b).check()


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: torch.randn(5, 3).t(),
    "every second": lambda: torch.randn(4, 10)[:, ::2],
    "offset": lambda: torch.randn(6, 7)[2:, 1:5],
    "expanded": lambda: torch.randn(3, 1).expand(3, 4),
    "channels_last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "one element": lambda: torch.randn(1, 1, 1),
    "scalar": lambda: torch.randn(()),
    "empty": lambda: torch.randn(3, 0, 2),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout(name: str) -> None:
    x = LAYOUTS[name]().double()
    region(lambda x: (torch.tanh(x) + 1, x * x.sum(), x.mean()), x).check()


@pytest.mark.parametrize("target", [torch.ops.aten.hardswish.default, torch.ops.aten.hardsigmoid.default])
@pytest.mark.parametrize("behind", [False, True], ids=["alone", "before what is decomposed"])
def test_a_sixth_is_the_device_s(target: Any, behind: bool) -> None:
    """ATen's CUDA kernels multiply float64 with a sixth that is rounded to float32; its C++ ones divide by six."""
    texts = {}
    for device in ("cpu", "cuda"):
        graph = torch.fx.Graph()
        x = graph.placeholder("x")
        call = graph.call_function(target, (x,))
        decomposed = graph.call_function(torch.ops.aten.logaddexp.default, (call, x))
        for node in (x, call, decomposed):
            node.meta["val"] = Spec.described((4,), (1,), torch.float64, torch.device(device))
        graph.output((decomposed if behind else call,))
        texts[device] = program_text(lower(torch.fx.GraphModule({}, graph), "region", ["x"])[0])
    assert "0.16666667163372" in texts["cuda"]
    assert "0.16666667163372" not in texts["cpu"]
