"""Results that differ by rounding, or for good reasons, agree; those of a wrong kernel do not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fusepass import measure
from fusepass.numerics.agreement import Agreement, Reference, Tolerance, Verdict, in_float64
from tests.support.regions import trace

SAME, DIFFERENT, UNCLEAR = Verdict.SAME, Verdict.DIFFERENT, Verdict.UNCLEAR
CPU = torch.device("cpu")

Function = Callable[..., Any]


def graph_of(function: Function, *inputs: Tensor) -> fx.GraphModule:
    return trace(function, *inputs)[0]


def verdict(function: Function, *like: Tensor, given: Function, signed: bool = True, wide: bool = True) -> Agreement:
    """What is said of `given` beside `function`, on made-up inputs like these."""
    graph = graph_of(function, *like)
    inputs = measure.made_up(like, CPU, signed=signed)
    exact = in_float64(graph).forward if wide else None
    reference = Reference(function, exact, inputs, Tolerance.of(graph))
    return judged(reference, given(*inputs))


def judged(reference: Reference, results: Any) -> Agreement:
    return reference.judge(results) or reference.by_policy(results)


CASES: dict[str, tuple[Function, tuple[Tensor, ...]]] = {
    "pointwise": (lambda x: torch.tanh(x) * 2, (torch.empty(64, 33),)),
    "half": (lambda x: torch.tanh(x) * 2 + x, (torch.empty(64, 33).half(),)),
    "softmax": (lambda x: (x * 3).softmax(-1), (torch.empty(64, 100),)),
    "sum": (lambda x: x.sum(1), (torch.empty(64, 5000),)),
    "bfloat16 mean": (lambda x: x.mean(1), (torch.empty(64, 5000).bfloat16(),)),
    "layer norm": (lambda x: F.layer_norm(x, (50,)).relu(), (torch.empty(64, 50),)),
    "convolution": (lambda x, w: F.conv2d(x, w).relu(), (torch.empty(2, 8, 9, 9), torch.empty(16, 8, 3, 3))),
    "product": (lambda a, b: torch.sigmoid(a @ b), (torch.empty(32, 70), torch.empty(70, 20))),
    "whole numbers": (lambda x: (x * 2 + 1).sum(1), (torch.empty(64, 33, dtype=torch.int64),)),
    "truth values": (lambda x: x > 0.3, (torch.empty(64, 33),)),
    "extremes": (lambda x: x.argmax(1), (torch.empty(64, 33),)),
}
every_case = pytest.mark.parametrize("name", CASES)


@every_case
def test_the_same_computed_otherwise_agrees(name: str) -> None:
    """Generated code computes in float32 and rounds once; in double it rounds even less. float64 need not be asked."""
    function, like = CASES[name]

    def exact(*inputs: Tensor) -> Any:
        result = in_float64(graph_of(function, *like)).forward(
            *(x.double() if x.is_floating_point() else x for x in inputs)
        )[0]
        return result.to(function(*inputs).dtype)

    inputs = measure.made_up(like, CPU, signed=True)
    graph = graph_of(function, *like)
    for given in (exact, function):
        outcome = Reference(function, None, inputs, Tolerance.of(graph)).judge(given(*inputs))
        assert outcome is not None
        assert outcome.verdict is SAME


@every_case
@pytest.mark.parametrize("wide", [False, True])
def test_neighbours_instead_of_the_right_elements_do_not(name: str, wide: bool) -> None:
    function, like = CASES[name]
    found = verdict(function, *like, given=lambda *inputs: function(*inputs).roll(1), wide=wide)
    assert found.verdict is DIFFERENT


@every_case
def test_a_shifted_input_does_not_agree(name: str) -> None:
    function, like = CASES[name]

    def shifted(x: Tensor, *rest: Tensor) -> Any:
        return function(x.flatten().roll(1).view(x.shape), *rest)

    assert verdict(function, *like, given=shifted).verdict is DIFFERENT


@every_case
def test_a_row_that_is_left_out_does_not_agree(name: str) -> None:
    function, like = CASES[name]

    def lacking(*inputs: Tensor) -> Tensor:
        result: Tensor = function(*inputs)
        return result.index_fill(0, torch.tensor([result.shape[0] - 1]), 0)

    assert verdict(function, *like, given=lacking).verdict is DIFFERENT


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_one_element_that_is_not_finite_does_not_agree(value: float) -> None:
    function, like = CASES["pointwise"]
    found = verdict(function, *like, given=lambda x: function(x).masked_fill(x == x.max(), value))
    assert found.verdict is DIFFERENT
    assert "out of place" in found.detail


def test_what_is_not_finite_in_both_is_no_difference() -> None:
    def root(x: Tensor) -> Tensor:
        return x.sqrt() / x.sign().relu()  # NaN for negative numbers

    like = torch.empty(64, 33)
    assert verdict(root, like, given=root).verdict is SAME
    assert verdict(lambda x: x.abs().neg().log(), like, given=lambda x: x.abs().neg().log()).verdict is UNCLEAR


def rounded(tensor: Tensor) -> Tensor:
    """To TF32's ten bits of mantissa."""
    return (tensor.view(torch.int32) & ~0x1FFF).view(torch.float32)


def test_being_more_exact_than_eager_agrees_and_less_does_not() -> None:
    """An operator that rounds to TF32, as eager may on CUDA, beside one in float32; and the other way round."""
    _, like = CASES["product"]
    graph = graph_of(torch.matmul, *like)
    inputs = measure.made_up(like, CPU, signed=True)
    plain, coarse = torch.matmul, lambda a, b: rounded(a) @ rounded(b)
    for operators, given, expected in ((coarse, plain, SAME), (plain, coarse, DIFFERENT), (coarse, coarse, SAME)):
        reference = Reference(operators, in_float64(graph).forward, inputs, Tolerance.of(graph))
        assert judged(reference, given(*inputs)).verdict is expected


def test_errors_that_the_operators_have_themselves_say_nothing() -> None:
    """A difference of nearly equal numbers is all rounding, in eager as in generated code."""

    def cancels(x: Tensor) -> Tensor:
        return (x + 1e7) - 1e7 - x

    found = verdict(cancels, torch.empty(64, 33), given=lambda x: torch.zeros_like(x))
    assert found.verdict is UNCLEAR
    assert "from float64 themselves" in found.detail


def test_amplified_rounding_is_held_against_float64() -> None:
    """Small differences before a steep function are large ones after it."""

    def steep(x: Tensor) -> Tensor:
        return torch.sin(x * 5e3)

    assert verdict(steep, torch.empty(64, 33), given=lambda x: torch.sin(x * 2.5e3 * 2)).verdict is SAME
    near = verdict(steep, torch.empty(64, 33), given=lambda x: torch.sin(x.double() * 5e3).float())
    assert near.verdict is SAME
    assert verdict(steep, torch.empty(64, 33), given=lambda x: torch.sin(x * 5.001e3)).verdict is DIFFERENT


def test_results_that_hardly_differ_say_nothing() -> None:
    function = lambda x: x * 0 + 3.0  # noqa: E731
    assert verdict(function, torch.empty(64, 33), given=function).verdict is UNCLEAR
    assert verdict(function, torch.empty(64, 33), given=lambda x: x * 0 + 3.1).verdict is DIFFERENT
    assert verdict(lambda x: x.isnan(), torch.empty(64, 33), given=lambda x: x.isnan()).verdict is UNCLEAR


def test_one_number_can_be_compared() -> None:
    assert verdict(lambda x: x.sum(), torch.empty(64, 33), given=lambda x: x.sum()).verdict is SAME
    assert verdict(lambda x: x.sum(), torch.empty(64, 33), given=lambda x: x.sum() + 1).verdict is DIFFERENT


def test_without_float64_only_gross_differences_count() -> None:
    function, like = CASES["pointwise"]
    assert verdict(function, *like, given=lambda x: function(x) * 1.001, wide=False).verdict is UNCLEAR
    assert verdict(function, *like, given=lambda x: function(x) * 1.02, wide=False).verdict is DIFFERENT
    function, like = CASES["half"]
    assert verdict(function, *like, given=lambda x: function(x) * 1.02, wide=False).verdict is UNCLEAR
    assert verdict(function, *like, given=lambda x: function(x) * 1.2, wide=False).verdict is DIFFERENT


def test_several_results_are_wrong_where_one_is() -> None:
    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 0 + 1, x.tanh()

    like = torch.empty(64, 33)
    assert verdict(both, like, given=both).verdict is SAME
    assert verdict(both, like, given=lambda x: (both(x)[0], both(x)[1] + 0.1)).verdict is DIFFERENT
    assert verdict(both, like, given=lambda x: (both(x)[0] + 0.1, both(x)[1])).verdict is DIFFERENT


def test_other_shapes_and_types_do_not_agree() -> None:
    function, like = CASES["pointwise"]
    assert verdict(function, *like, given=lambda x: function(x)[1:]).verdict is DIFFERENT
    assert verdict(function, *like, given=lambda x: function(x).double()).verdict is DIFFERENT


def test_the_bound_grows_with_types_operators_and_sums() -> None:
    one = Tolerance.of(graph_of(lambda x: x.tanh(), torch.empty(64)))[0].l2
    four = Tolerance.of(graph_of(lambda x: x.tanh().sin().cos().exp(), torch.empty(64)))[0].l2
    half = Tolerance.of(graph_of(lambda x: x.tanh(), torch.empty(64).half()))[0].l2
    long = Tolerance.of(graph_of(lambda x: x.sum(), torch.empty(10**4)))[0].l2
    unit = 2.0**-24
    assert one == pytest.approx(4 * 2 * unit)
    assert four == pytest.approx(4 * 3 * unit)
    assert half == pytest.approx(4 * (2.0**-11 + unit))
    assert long == pytest.approx(4 * (1 + 100) * unit)


def test_names_of_types_become_double() -> None:
    graph = graph_of(lambda x: x.half().float() * torch.full((3,), 0.1, dtype=torch.float32), torch.empty(3))
    x = torch.rand(3, dtype=torch.float64)
    (result,) = in_float64(graph).forward(x)
    assert result.dtype is torch.float64
    torch.testing.assert_close(result, x * 0.1, rtol=1e-15, atol=0)


BESIDE: dict[str, Function] = {
    "pool": lambda x: (F.avg_pool2d(x, 3, 1, 1).sum(-2), F.avg_pool2d(x, 3, 1, 1).bfloat16()),
    "chain": lambda x: ((x.tanh() * 2 + x).mean(-1), (x.tanh() * 2 + x).half()),
    "half input": lambda x: ((x.tanh() * 2).sum(-1), x.tanh().half() * 2),
    "statistics": lambda x: (x.bfloat16().sigmoid(), *torch.var_mean(x * 1.1, -1)),
}


@pytest.mark.parametrize("name", BESIDE)
@pytest.mark.invariant(38)
def test_a_float32_result_is_not_made_of_what_was_rounded_for_another(name: str) -> None:
    """As far off as a half it would be, which the half beside it does not excuse; that one may be rounded either way."""
    function, like = BESIDE[name], torch.empty(4, 8, 16, 16)

    def rounds(x: Tensor) -> tuple[Tensor, ...]:
        pairs = zip(function(x.bfloat16().float()), function(x), strict=True)
        return tuple(coarse if coarse.dtype is torch.float32 else own for coarse, own in pairs)

    def wider(x: Tensor) -> tuple[Tensor, ...]:
        pairs = zip(in_float64(graph_of(function, like)).forward(x.double()), function(x), strict=True)
        return tuple(exact.to(own.dtype) for exact, own in pairs)

    assert verdict(function, like, given=rounds).verdict is DIFFERENT
    assert verdict(function, like, given=function).verdict is SAME
    assert verdict(function, like, given=wider).verdict is SAME


def test_a_half_may_be_rounded_otherwise_and_what_is_made_of_it_in_float32_too() -> None:
    like = torch.empty(64, 65).bfloat16()
    assert verdict(
        lambda x: (x * 1.1 + x.tanh(), (x * 1.1 + x.tanh()).float().sum(-1)),
        like,
        given=lambda x: ((x.float() * 1.1 + x.float().tanh()).bfloat16(), (x.float() * 1.1 + x.float().tanh()).sum(-1)),
    ).verdict is SAME  # fmt: skip
