"""The numeric policy: what is right passes, and each kind of wrong result is found and named."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusepass.numerics.check import Comparison, check, compare, observe, reference

INF, NAN = math.inf, math.nan


def softmax_case(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Eager's result and the float64 oracle of a function that rounds at every step."""
    x = torch.randn(64, 33).to(dtype)
    return x.softmax(1).exp(), x.double().softmax(1).exp()


def changed(tensor: Tensor, index: tuple[int, ...], value: float) -> Tensor:
    copied = tensor.clone()
    copied[index] = value
    return copied


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_eager_and_the_rounded_oracle_pass(dtype: torch.dtype) -> None:
    eager, oracle = softmax_case(dtype)
    assert compare(eager, eager, oracle).ok
    assert compare(oracle.to(dtype), eager, oracle).ok


def test_an_ulp_passes_where_eager_is_exact_by_luck() -> None:
    oracle = torch.arange(1.0, 9.0, dtype=torch.float64)
    eager = oracle.float()
    nudged = torch.nextafter(eager, torch.tensor(INF))
    assert compare(nudged, eager, oracle).ok


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_results_below_the_smallest_normal_number_are_some_steps_off(dtype: torch.dtype) -> None:
    step = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    oracle = torch.tensor([0.0, 1e-9 * step, 0.4 * step], dtype=torch.float64)
    one = torch.full((3,), step).to(dtype)
    assert compare(one, torch.zeros(3, dtype=dtype), oracle).ok
    assert not compare(one * 64, torch.zeros(3, dtype=dtype), oracle).ok


def test_one_wrong_element_is_found_and_placed() -> None:
    eager, oracle = softmax_case()
    wrong = changed(eager, (7, 5), eager[7, 5] * 1.0001)
    outcome = compare(wrong, eager, oracle)
    assert not outcome.ok
    assert "max error" in outcome.explain()
    assert "worst at (7, 5)" in outcome.explain()


@pytest.mark.parametrize(
    ("dtype", "narrow"),
    [
        (torch.float64, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.float16, torch.bfloat16),
    ],
)
def test_lost_digits_are_found(dtype: torch.dtype, narrow: torch.dtype) -> None:
    eager, oracle = softmax_case(dtype)
    assert not compare(eager.to(narrow).to(dtype), eager, oracle).ok


def test_a_digit_lost_everywhere_is_found_by_the_norm_alone() -> None:
    """Errors that stay under the largest eager error, but on every element, are systematic."""
    oracle = torch.ones(10_000, dtype=torch.float64)
    eager = changed(oracle, (0,), 1.001).float()
    systematic = (oracle * 1.001).float()
    outcome = compare(systematic, eager, oracle)
    leaf = outcome.leaves[0]
    assert leaf.actual.maximum <= leaf.allowed.maximum
    assert not outcome.ok


def test_truncating_instead_of_rounding_to_half_is_found() -> None:
    oracle = torch.rand(100_000, dtype=torch.float64) + 1
    eager = oracle.half()
    truncated = (oracle.float().view(torch.int32) & -(1 << 13)).view(torch.float32).half()
    twice = torch.nextafter(truncated, torch.tensor(0.0, dtype=torch.half))
    assert compare(eager, eager, oracle).ok
    assert not compare(twice, eager, oracle).ok


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.invariant(15)
def test_a_value_that_is_not_finite_must_be_in_its_place(value: float) -> None:
    eager, oracle = softmax_case()
    with_value = changed(eager, (3, 4), value)
    oracle_with_value = changed(oracle, (3, 4), value)
    assert compare(with_value, with_value, oracle_with_value).ok
    for wrong in (eager, changed(eager, (3, 5), value), changed(with_value, (0, 0), value)):
        outcome = compare(wrong, with_value, oracle_with_value)
        assert not outcome.ok
        assert "out of place" in outcome.explain()
    assert not compare(with_value, eager, oracle).ok


def test_infinities_of_the_other_sign_and_nan_for_inf_are_found() -> None:
    eager = torch.tensor([1.0, INF])
    for wrong in (-INF, NAN, 3.0e38):
        assert not compare(torch.tensor([1.0, wrong]), eager, eager.double()).ok


def test_half_precision_may_overflow_in_eager_only() -> None:
    """exp(12) overflows float16; the fused chain keeps it in float32 and takes the logarithm again."""
    x = torch.tensor([1.0, 2.0, 12.0], dtype=torch.float16)
    eager = x.exp().log()
    fused = x.float().exp().log().half()
    oracle = x.double().exp().log()
    assert eager[2].isinf()
    assert compare(fused, eager, oracle).ok
    assert compare(eager, eager, oracle).ok
    assert not compare(changed(fused, (2,), 11.0), eager, oracle).ok
    assert not compare(changed(fused, (2,), NAN), eager, oracle).ok


def test_overflow_of_the_result_itself_is_not_a_choice() -> None:
    oracle = torch.tensor([1.0, 1.0e9], dtype=torch.float64)
    eager = oracle.half()
    assert compare(eager, eager, oracle).ok
    assert not compare(torch.tensor([1.0, 65504.0], dtype=torch.half), eager, oracle).ok
    # The value beyond float16's range must not widen the tolerance of the others.
    assert not compare(torch.tensor([1.01, INF], dtype=torch.half), eager, oracle).ok


def test_the_overflow_threshold_has_two_sides() -> None:
    oracle = torch.tensor([65519.0, 65521.0], dtype=torch.float64)
    eager = oracle.half()
    assert eager.isinf().tolist() == [False, True]
    for near in ([65504.0, 65504.0], [INF, INF]):
        assert compare(torch.tensor(near, dtype=torch.half), eager, oracle).ok
    assert not compare(torch.tensor([65504.0, -INF], dtype=torch.half), eager, oracle).ok


def test_where_the_oracle_is_nan_eager_is_the_yardstick() -> None:
    eager, oracle = torch.tensor([1.0, 0.5]), torch.tensor([1.0, NAN], dtype=torch.float64)
    assert compare(eager, eager, oracle).ok
    assert not compare(torch.tensor([1.0, 0.6]), eager, oracle).ok


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda t: t.t().contiguous().t(), "strides"),
        (lambda t: t.reshape(33, 64), "shape"),
        (lambda t: t.double(), "dtype"),
        (lambda t: t.to("meta"), "device"),
        (lambda t: t.to_sparse(), "layout"),
        (lambda t: None, "NoneType"),
        (lambda t: (t,), "structure"),
    ],
)
def test_metadata_must_be_eagers(change: Callable[[Tensor], object], word: str) -> None:
    eager, oracle = softmax_case()
    outcome = compare(change(eager), eager, oracle)
    assert not outcome.ok
    assert word in outcome.explain()


def test_the_stride_of_an_axis_of_one_is_no_difference() -> None:
    eager = torch.randn(2, 1, 3, 3)
    other = torch.as_strided(eager, eager.shape, (9, 1, 3, 1))
    assert other.stride() != eager.stride()
    assert compare(other, eager, eager.double()).ok


def test_integers_and_booleans_are_eagers_or_those_of_float64() -> None:
    index = torch.arange(5)
    assert compare(index, index, index).ok
    other = changed(index, (2,), 7)
    assert compare(other, index, other).ok
    assert compare(index, index, other).ok
    assert "1 of 5 torch.int64 values differ" in compare(changed(index, (2,), 6), index, other).explain()
    assert "1 of 5 torch.int64 values differ" in compare(changed(index, (2,), 7), index, index).explain()
    mask = index > 2
    assert not compare(~mask, mask, mask).ok


def test_empty_tensors_scalars_numbers_and_none() -> None:
    empty = torch.empty(0, 3)
    result = {"a": [empty, torch.tensor(1.5)], "b": (None, 3, 2.5, True, "name")}
    oracle = {"a": [empty.double(), torch.tensor(1.5).double()], "b": (None, 3, 2.5, True, "name")}
    assert compare(result, result, oracle).ok
    assert not compare(torch.empty(0, 4), empty, empty.double()).ok
    for position, wrong in ((0, 0), (1, 4), (2, 2.6), (3, False), (4, "other")):
        values = list(result["b"])
        values[position] = wrong
        outcome = compare({"a": result["a"], "b": tuple(values)}, result, oracle)
        assert f"['b'][{position}]" in outcome.explain()


def test_complex_results_follow_the_same_policy() -> None:
    eager = torch.randn(9, dtype=torch.complex64).exp()
    oracle = eager.to(torch.complex128)
    assert compare(eager, eager, oracle).ok
    wrong = changed(eager, (4,), 0)
    assert "worst at (4, " in compare(wrong, eager, oracle).explain()


def test_a_result_judged_in_pieces_is_judged_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    eager, oracle = softmax_case()
    wrong = changed(changed(eager, (50, 2), 9.0), (60, 0), NAN)
    whole = [compare(a, eager, oracle) for a in (eager, wrong, changed(eager, (50, 2), 9.0))]
    monkeypatch.setattr("fusepass.numerics.comparison._CHUNK", 100)
    pieces = [compare(a, eager, oracle) for a in (eager, wrong, changed(eager, (50, 2), 9.0))]
    for one, many in zip(whole, pieces, strict=True):
        assert one.leaves[0].problem == many.leaves[0].problem
        assert many.leaves[0].eager.l2 == pytest.approx(one.leaves[0].eager.l2, rel=1e-12)


class Stateful(nn.Module):
    """BatchNorm, a plain tensor attribute, and an input that is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.shift = torch.full((4,), 0.1)

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return self.norm(x) + self.shift + torch.tensor(0.3)


def test_reference_is_float64_and_touches_nothing() -> None:
    model, x = Stateful(), torch.randn(8, 4)
    state, kept = copy.deepcopy(model.state_dict()), x.clone()
    got = reference(model, (x,))
    wide = x.double() * 2
    spread = (wide.var(0, unbiased=False) + model.norm.eps).sqrt()
    expected = (wide - wide.mean(0)) / spread + torch.full((4,), 0.1).double() + torch.tensor(0.3)
    torch.testing.assert_close(got, expected, rtol=1e-14, atol=1e-14)
    assert torch.equal(x, kept)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert model.norm.weight.dtype == torch.float32


def test_check_accepts_the_model_itself_and_restores_its_buffers() -> None:
    model, x = Stateful(), torch.randn(8, 4)
    for candidate in (model, copy.deepcopy(model), lambda x: model(x)):
        outcome = check(model, candidate, (x,))
        assert outcome.ok, outcome.explain()
        assert {leaf.path for leaf in outcome.leaves} >= {"['output']", "['buffers']['norm.running_var']"}
    assert model.norm.num_batches_tracked == 0


def test_check_sees_and_restores_a_buffer_that_forward_replaces() -> None:
    class Growing(nn.Module):
        """Keeps a table as long as its input."""

        def __init__(self, step: float = 1.0) -> None:
            super().__init__()
            self.register_buffer("table", torch.zeros(1))
            self.step = step

        def forward(self, x: Tensor) -> Tensor:
            if self.table.shape != x.shape:
                self.table = torch.arange(len(x), dtype=x.dtype) * self.step
            return x + self.table

    model, x = Growing(), torch.randn(4)
    table = model.table
    assert check(model, lambda x: model(x), (x,)).ok
    assert model.table is table
    assert failing(check(model, Growing(2.0), (x,))) == {"['output']", "['buffers']['table']"}


def test_check_finds_buffers_that_were_not_updated_and_inputs_that_were_not_changed() -> None:
    class Forgetful(Stateful):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.batch_norm(x * 2, None, None, training=True) + self.shift + 0.3

    model = Stateful()
    problems = failing(check(model, Forgetful(), (torch.randn(8, 4),)))
    assert problems == {
        "['inputs'][0]",
        "['buffers']['norm.running_mean']",
        "['buffers']['norm.running_var']",
        "['buffers']['norm.num_batches_tracked']",
    }


def failing(outcome: Comparison) -> set[str]:
    return {leaf.path for leaf in outcome.leaves if leaf.problem}


def test_runs_see_the_same_random_numbers() -> None:
    model = nn.Dropout(0.5)
    inputs = (torch.randn(50),)
    first, second = observe(model, inputs), observe(model, inputs)
    assert torch.equal(first["output"], second["output"])
    assert (first["output"] == 0).any()


class Narrowed(nn.Module):
    """Rounds to a type of fewer digits in between, as autocast does."""

    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16).float() * 2


@pytest.mark.parametrize(("off", "ok"), [(2**-8, True), (2**-5, False)])
def test_a_cast_may_round_the_other_way(off: float, ok: bool) -> None:
    """The numbers are eager's exactly, but one rounding of the narrow type is no error; four are."""
    x = torch.full((3, 5), 1.0)
    assert check(Narrowed(), lambda x: x * 2 * (1 + off), (x,)).ok is ok
    assert not check(nn.Identity(), lambda x: x * (1 + off), (x,)).ok


class Norm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.norm()


@pytest.mark.parametrize("same", [True, False])
def test_numbers_that_are_one_in_memory_stay_one(same: bool) -> None:
    """Roundings of many numbers average out, that of one number in many places does not."""
    x = torch.ones(1, 1).expand(4096, 1) if same else torch.ones(4096, 1)
    assert check(Norm(), lambda x: x.norm() * (1 + 6e-7), (x,)).ok is same


@pytest.mark.parametrize("autocast", [False, True])
def test_what_forward_makes_of_integers_meets_a_parameter_in_float64(autocast: bool) -> None:
    class Logarithms(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                return super().forward(x.log())

    model, x = Logarithms(5, 4), torch.arange(1, 16, dtype=torch.int32).view(3, 5)
    outcome = check(model, model, (x,))
    assert outcome.ok, outcome.explain()
    exact = reference(model, (x,))
    assert exact.dtype is torch.float64
    torch.testing.assert_close(exact, F.linear(x.double().log(), model.weight.double(), model.bias.double()))
    assert torch.get_default_dtype() is torch.float32
