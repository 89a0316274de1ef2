"""The rules that change not a bit: where each fires and how often, and where it must not; and what applies them."""

from __future__ import annotations

import cProfile
import pstats
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import fx, nn
from torch._ops import OpOverload
from torch.fx._lazy_graph_module import _LazyGraphModule

from fusepass.config import override
from fusepass.garbage import collector_paused
from fusepass.patterns import simplify as driver
from fusepass.patterns.language import op, var
from fusepass.patterns.matcher import Match, match
from fusepass.patterns.rule import Rule
from fusepass.patterns.rules import RULES, arithmetic, copies, views
from fusepass.patterns.simplify import COMMON_SUBEXPRESSION, Application, replace_match, simplify
from fusepass.patterns.worklist import Worklist, Worklists
from tests.support.aten import exported, same_bits, traced

aten = torch.ops.aten
Function = Callable[..., Any]

SPECIAL = torch.tensor(
    [[0.0, -0.0, 1.0, -2.5], [float("nan"), float("inf"), -float("inf"), 3e-310], [1e300, -1e-300, 0.1, -7.0]],
    dtype=torch.float64,
)
INTEGERS = torch.tensor([[0, 1, -1, 5], [2**63 - 1, -(2**63), 7, -7], [3, 2, 1, 0]])
HALVES = torch.tensor(
    [[0.0, -0.0, 1.0, -2.5], [float("nan"), float("inf"), 6e-8, 65504.0], [1.0, 2.0, 3.0, 4.0]]
).half()


@dataclass(frozen=True)
class Case:
    """What one rule does.

    Attributes:
        fires: functions of `x` in which it applies, with how often.
        shared: a function in which the value that goes away, or one inside of it, has another user; once.
        near: functions in which it must not apply.
    """

    fires: tuple[tuple[Function, int], ...]
    shared: Function
    near: tuple[Function, ...]
    x: torch.Tensor = SPECIAL


def inner_and_outer(inner: Function, outer: Function) -> Function:
    """``outer(inner(x))`` where the result of `inner` is used besides."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        value = inner(x)
        return outer(value).sin(), value.cos()

    return function


ROWS = torch.contiguous_format

CASES = {
    "multiply-by-one": Case(
        fires=((lambda x: (x * 1).sin(), 1), (lambda x: (1.0 * x).sin() * 1.0, 2), (lambda x: x.exp() * 1.0, 1)),
        shared=inner_and_outer(lambda x: x.exp(), lambda y: y * 1),
        near=(lambda x: x * 1.5, lambda x: x * x, lambda x: x * True, lambda x: x.long() * 1.0, lambda x: x * 1.0),
    ),
    "divide-by-one": Case(
        fires=((lambda x: (x / 1.0).sin(), 1),),
        shared=inner_and_outer(lambda x: x.exp(), lambda y: y / 1),
        near=(lambda x: 1.0 / x, lambda x: x.long() / 1, lambda x: torch.div(x, 1, rounding_mode="floor").sin()),
    ),
    "subtract-zero": Case(
        fires=((lambda x: (x - 0.0).sin() - 0, 2),),
        shared=inner_and_outer(lambda x: x.exp(), lambda y: y - 0),
        near=(lambda x: (x - -0.0).sin(), lambda x: (0.0 - x).sin(), lambda x: torch.sub(x, 0.0, alpha=2).sin()),
    ),
    "add-negative-zero": Case(
        fires=((lambda x: (x + -0.0).sin(), 1),),
        shared=inner_and_outer(lambda x: x.exp(), lambda y: y + -0.0),
        near=(lambda x: (x + 0.0).sin(), lambda x: (x + 0).sin()),
    ),
    "add-zero-to-integers": Case(
        fires=((lambda x: (x + 0).abs(), 1),),
        shared=inner_and_outer(lambda x: x.abs(), lambda y: y + 0),
        near=(lambda x: (x.double() + 0).abs(), lambda x: (x + 1).abs(), lambda x: (x + 0.0).abs()),
        x=INTEGERS,
    ),
    "power-of-one": Case(
        fires=((lambda x: (x**1).sin(), 1), (lambda x: (x**1.0).sin(), 1)),
        shared=inner_and_outer(lambda x: x.exp(), lambda y: y**1),
        near=(lambda x: (x**2).sin(), lambda x: (1**x).sin(), lambda x: (x**-1).sin()),
    ),
    "double-negation": Case(
        fires=((lambda x: x.neg().neg().sin(), 1), (lambda x: x.neg().neg().neg().neg().sin(), 2)),
        shared=inner_and_outer(lambda x: -x, lambda y: -y),
        near=(lambda x: (-x).sin(), lambda x: x.neg().neg(), lambda x: -(-x + 0.0)),
    ),
    "relu-of-relu": Case(
        fires=((lambda x: x.relu().relu(), 1), (lambda x: x.relu().relu().relu(), 2)),
        shared=inner_and_outer(lambda x: x.relu(), lambda y: y.relu()),
        near=(lambda x: x.relu().neg().relu(), lambda x: (lambda y: (y, y.relu()))(x.relu())),
    ),
    "abs-of-abs": Case(
        fires=((lambda x: x.abs().abs(), 1),),
        shared=inner_and_outer(lambda x: x.abs(), lambda y: y.abs()),
        near=(lambda x: x.abs().neg().abs(),),
    ),
    "idle-clone": Case(
        fires=((lambda x: x.clone().sin(), 1), (lambda x: x.exp().clone(), 1), (lambda x: x.clone().detach() + x, 1)),
        shared=inner_and_outer(lambda x: x.exp(), lambda y: y.clone()),
        near=(
            lambda x: x.clone(),
            lambda x: x.clone().view(-1),
            lambda x: (lambda y: (y, y.clone()))(x.exp()),
            lambda x: x.t().clone(memory_format=torch.contiguous_format).sin(),
        ),
    ),
    "copy-of-copy": Case(
        fires=(
            (lambda x: x.t().exp().clone(memory_format=ROWS).transpose(0, 1).clone(memory_format=ROWS), 1),
            (
                lambda x: (
                    x.t().clone(memory_format=ROWS).unflatten(1, (1, -1)).transpose(0, 2).clone(memory_format=ROWS)
                ),
                1,
            ),
        ),
        shared=inner_and_outer(
            lambda x: x.exp(), lambda y: y.t().clone(memory_format=ROWS).transpose(0, 1).clone(memory_format=ROWS)
        ),
        near=(
            lambda x: x.t().clone(memory_format=ROWS),
            lambda x: x.t().clone(memory_format=ROWS).neg().t().clone(memory_format=ROWS),
            lambda x: x[:, ::2].clone(memory_format=ROWS)[1:].clone(memory_format=ROWS),
        ),
    ),
    "idle-cast": Case(
        fires=((lambda x: aten._to_copy.default(x, dtype=torch.float64).sin(), 1),),
        shared=inner_and_outer(lambda x: x.exp(), lambda y: aten._to_copy.default(y, dtype=torch.float64)),
        near=(lambda x: x.float().sin(), lambda x: aten._to_copy.default(x, dtype=torch.float64)),
    ),
    "widening-cast-and-back": Case(
        fires=((lambda x: x.float().half().sin(), 1), (lambda x: x.double().half().sin(), 1)),
        shared=inner_and_outer(lambda x: x.float(), lambda y: y.half()),
        near=(
            lambda x: x.bfloat16().half().sin(),
            lambda x: x.int().half().sin(),
            lambda x: x.float().double().sin(),
            lambda x: x.to(torch.float8_e5m2).half().sin(),  # types that PyTorch does not promote
            lambda x: x.isnan().int().to(torch.uint16).int().sin(),
        ),
        x=HALVES,
    ),
    "idle-view": Case(
        fires=((lambda x: x.view(3, 4).sin(), 1), (lambda x: x.expand(3, 4).sin(), 1), (lambda x: x[:].sin(), 1)),
        shared=inner_and_outer(lambda x: x.exp(), lambda y: y.view(3, 4)),
        near=(lambda x: x.view(4, 3).sin(), lambda x: x.view(3, 4), lambda x: x[1:].sin(), lambda x: x[0:3:2].sin()),
    ),
    "permutation-of-permutation": Case(
        fires=((lambda x: x.t().t().sin(), 1), (lambda x: x.t().permute(1, 0).t().transpose(0, -1).sin(), 2)),
        shared=inner_and_outer(lambda x: x.t(), lambda y: y.t()),
        near=(lambda x: x.t().sin(), lambda x: x.t().exp().t()),
    ),
    "view-of-view": Case(
        fires=((lambda x: x.view(12).view(2, 6).sin(), 1), (lambda x: x.unsqueeze(0).view(2, 6).squeeze(), 2)),
        shared=inner_and_outer(lambda x: x.view(12), lambda y: y.view(2, 6)),
        near=(lambda x: x.view(12).sin(), lambda x: x[:, :2].unsqueeze(0).sin(), lambda x: x.view(12).exp().view(3, 4)),
    ),
    "view-of-moved-ones": Case(
        fires=(
            (lambda x: x.unsqueeze(0).transpose(0, 1).view(12).sin(), 1),
            (lambda x: x.unsqueeze(2).permute(2, 0, 1).squeeze(0).sin(), 1),
        ),
        shared=inner_and_outer(lambda x: x.unsqueeze(0).transpose(0, 1), lambda y: y.view(2, 6)),
        near=(
            lambda x: x.unsqueeze(0).transpose(0, 1).sin(),
            lambda x: x.unsqueeze(0).transpose(1, 2).unsqueeze(3).sin(),
        ),
    ),
    "expand-of-expand": Case(
        fires=((lambda x: x[0].expand(1, 1, 4).expand(2, 3, 4).sin(), 1),),
        shared=inner_and_outer(lambda x: x[0].expand(1, 4), lambda y: y.expand(3, 4)),
        near=(lambda x: x[0].expand(3, 4).sin(), lambda x: x[:1].expand(3, 4).exp().expand(2, 3, 4)),
    ),
}


def results(graph: fx.GraphModule, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    result = graph(x)
    return result if isinstance(result, tuple) else (result,)


def applied(name: str, function: Function, x: torch.Tensor) -> int:
    """How often the rule applies when only it is allowed; results have the bits that they had."""
    graph = traced(function, x)
    wanted = results(graph, x)
    with override(disable=",".join({rule.name for rule in RULES} - {name} | {COMMON_SUBEXPRESSION})):
        applications = simplify(graph)
    assert all(application.rule == name for application in applications)
    for result, value in zip(results(graph, x), wanted, strict=True):
        assert same_bits(result, value)
    return len(applications)


def test_every_rule_is_tested() -> None:
    exact = (*arithmetic.RULES, *copies.RULES, *views.RULES)
    assert sorted(CASES) == sorted(rule.name for rule in exact)
    assert all(rule.why for rule in RULES)
    assert len({rule.name for rule in RULES}) == len(RULES)


@pytest.mark.parametrize("name", CASES)
def test_a_rule_fires_and_counts(name: str) -> None:
    case = CASES[name]
    for function, count in case.fires:
        assert applied(name, function, case.x) == count


@pytest.mark.parametrize("name", CASES)
def test_a_rule_fires_where_the_inner_value_has_other_users(name: str) -> None:
    assert applied(name, CASES[name].shared, CASES[name].x) == 1


@pytest.mark.parametrize("name", CASES)
def test_a_rule_does_not_fire_on_what_is_only_similar(name: str) -> None:
    for function in CASES[name].near:
        assert applied(name, function, CASES[name].x) == 0


@pytest.mark.parametrize("name", CASES)
def test_a_rule_can_be_disabled(name: str) -> None:
    case = CASES[name]
    with override(disable=name):
        names = [application.rule for application in simplify(traced(case.fires[0][0], case.x))]
    assert name not in names


def ops(graph: fx.GraphModule) -> list[str]:
    return [str(node.target).split(".")[1] for node in graph.graph.nodes if isinstance(node.target, OpOverload)]


def test_rules_enable_each_other_and_dead_code_goes() -> None:
    graph = traced(lambda x: ((-(x.t().t() * 1.0)).neg().relu().relu() / 1, x.exp())[0], SPECIAL)
    applications = simplify(graph)
    assert ops(graph) == ["relu"]
    assert sorted(application.rule for application in applications) == [
        "divide-by-one", "double-negation", "multiply-by-one", "permutation-of-permutation", "relu-of-relu",
    ]  # fmt: skip


def test_equal_operators_run_once() -> None:
    graph = traced(lambda x: (x.exp() * x.exp()).sin() + x.exp(), SPECIAL)
    assert [application.rule for application in simplify(graph)] == [COMMON_SUBEXPRESSION] * 2
    assert ops(graph) == ["exp", "mul", "sin", "add"]
    with override(disable=COMMON_SUBEXPRESSION):
        assert simplify(traced(lambda x: x.exp() * x.exp(), SPECIAL)) == []


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x.exp(), x.exp()),
        lambda x: (x.exp(), x.exp().view(-1)),
        lambda x: (x.max(1).values, x.max(1).values),
        lambda x: torch.randn_like(x) + torch.randn_like(x),
        lambda x: torch.rand_like(x) + torch.rand_like(x),
        lambda x: (x + 0.0).sin() + (x + -0.0 + 0.0).sin(),
    ],
)
def test_what_must_stay_apart_is_not_shared(function: Function) -> None:
    graph = traced(function, SPECIAL)
    before = ops(graph)
    rules = [application for application in simplify(graph, rules=()) if application.rule == COMMON_SUBEXPRESSION]
    assert rules == []
    assert ops(graph) == before


def test_what_is_read_before_and_after_a_write_is_not_shared() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        before = x.exp()
        aten.copy_.default(x, before * 2)
        return before + x.exp()

    graph = traced(function, SPECIAL)
    assert simplify(graph) == []
    assert same_bits(graph(SPECIAL.clone()), function(SPECIAL.clone()))


def test_negative_zero_is_not_taken_for_zero() -> None:
    graph = traced(lambda x: torch.atan2(x * 0.0, x) + torch.atan2(x * -0.0, x), SPECIAL)
    (wanted,) = results(graph, SPECIAL)
    simplify(graph)
    assert same_bits(results(graph, SPECIAL)[0], wanted)


def test_random_numbers_that_nobody_uses_are_still_drawn() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        torch.rand_like(x)
        return torch.rand_like(x)

    graph = traced(function, SPECIAL)
    simplify(graph)
    assert ops(graph) == ["rand_like", "rand_like"]


def test_a_copy_of_memory_that_is_written_later_stays() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        before = x.clone()
        aten.copy_.default(x, before.exp())
        return before.sin()

    graph = traced(function, SPECIAL)
    mine, theirs = SPECIAL.clone(), SPECIAL.clone()
    assert [application.rule for application in simplify(graph)] == []
    assert same_bits(graph(mine), function(theirs))
    assert same_bits(mine, theirs)


@pytest.mark.invariant(6)
def test_results_that_the_caller_sees_keep_their_own_memory() -> None:
    graph = traced(lambda x: (x.relu(), x.relu().relu() * 1.0, x.clone(), x.view(3, 4)), SPECIAL)
    simplify(graph)
    values = results(graph, SPECIAL)
    assert len({value.data_ptr() for value in values[:3]} | {SPECIAL.data_ptr()}) == 4
    assert values[3] is not SPECIAL
    assert values[3].data_ptr() == SPECIAL.data_ptr()


x = var("x")


def wrong(rewrite: Callable[[Match], fx.Node]) -> Application | str:
    """Why a rule with that rewrite is not carried out on ``exp(x).t()``; the graph must be left as it was."""
    graph = traced(lambda a: a.exp().t().sin(), SPECIAL)
    root = graph.graph.find_nodes(op="call_function", target=aten.t.default)[0]
    before = str(graph.graph)
    rule = Rule("wrong", op(aten.t)(op(aten.exp)(x)["inner"]), rewrite, "for the test")
    found = match(rule.pattern, root)
    assert isinstance(found, Match)
    reason = replace_match(rule, found, Worklists())
    assert str(graph.graph) == before
    return reason


@pytest.mark.invariant(6)
def test_a_rewrite_that_changes_metadata_is_not_carried_out() -> None:
    assert wrong(lambda m: m.inner) == "shape (4, 3) would become (3, 4)"
    assert wrong(lambda m: m.call(aten.clone.default, m.root)) == "the result reads what it is to replace"
    reason = wrong(lambda m: m.call(aten._to_copy.default, m.call(aten.t.default, m.inner), dtype=torch.float32))
    assert reason == "type torch.float64 would become torch.float32"
    reason = wrong(
        lambda m: m.call(aten.clone.default, m.call(aten.t.default, m.inner), memory_format=torch.contiguous_format)
    )
    assert reason == "strides (1, 4) would become (3, 1)"
    assert "invalid" in str(wrong(lambda m: m.call(aten.view.default, m.inner, [5])))


def test_a_guard_says_why_not() -> None:
    graph = traced(lambda a: (a + 0).sin(), SPECIAL)
    (rule,) = (rule for rule in RULES if rule.name == "add-zero-to-integers")
    found = match(rule.pattern, graph.graph.find_nodes(op="call_function", target=aten.add.Tensor)[0])
    assert isinstance(found, Match)
    assert replace_match(rule, found, Worklists()) == "-0.0 + 0.0 is 0.0 in torch.float64"


def test_rules_that_undo_each_other_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Views are free, so that the cost model does not stop such rules."""
    monkeypatch.setattr(driver, "MOST_ROUNDS", 3)
    there = Rule("there", op(aten.t)(x), lambda m: m.call(aten.permute.default, m.x, [1, 0]), "for the test")
    back = Rule("back", op(aten.permute, open=True)(x), lambda m: m.call(aten.t.default, m.x), "for the test")
    applications = simplify(traced(lambda a: a.t().sin(), SPECIAL), rules=(there, back))
    assert [application.rule for application in applications] == ["there", "back", "there"]
    assert applications[0] == Application("there", "t")


def test_a_rewrite_that_costs_as_much_is_not_carried_out() -> None:
    there = Rule("there", op(aten.sin)(x), lambda m: m.call(aten.cos.default, m.x), "for the test")
    assert simplify(traced(lambda a: a.sin(), SPECIAL), rules=(there,)) == []


class Long(nn.Module):
    """About 500 operators of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(28))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(28))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            y = (norm(convolution(x)).relu() * 0.5 + 1).clamp(0, 6).permute(0, 2, 3, 1).permute(0, 3, 1, 2)
            y = torch.nn.functional.max_pool2d(torch.sigmoid(y) * y + x, 3, 1, 1)
            x = (y - y.mean((2, 3), keepdim=True)).transpose(1, 2).transpose(1, 2) / 2
        return x


def copied(graph: fx.GraphModule) -> fx.GraphModule:
    copy = fx.GraphModule(graph, fx.Graph())
    copy.graph.output(copy.graph.graph_copy(graph.graph, {}))
    return copy


class Counted(Worklist):
    """Adds the trials up over all graphs."""

    total = 0

    def end_pass(self) -> bool:
        Counted.total, self.trials = Counted.total + self.trials, 0
        return super().end_pass()


class Tireless(Counted):
    """Tries every node in every pass."""

    def nodes(self, graph: fx.Graph) -> Iterator[fx.Node]:
        self._now = None
        return super().nodes(graph)


def simplified(graph: fx.GraphModule, worklist: type[Counted]) -> tuple[str, int]:
    """What becomes of a copy of `graph`, and the trials of nodes that it took."""
    copy, Counted.total = copied(graph), 0
    with patch.object(driver, "Worklist", worklist):
        simplify(copy)
    return copy.code, Counted.total


@pytest.mark.parametrize("training", [False, True])
def test_only_what_may_have_changed_is_tried_again(training: bool) -> None:
    """And nothing is missed by that."""
    graph, _ = exported(Long().train(training), torch.randn(2, 4, 8, 8))
    size = len(ops(graph))
    code, trials = simplified(graph, Counted)
    everything, more = simplified(graph, Tireless)
    assert code == everything
    assert trials < (5.0 if training else 3.6) * size
    assert trials < 0.9 * more


@pytest.mark.parametrize(("training", "least", "most"), [(False, 56, 330), (True, 84, 580)])
def test_five_hundred_operators_take_little_work(training: bool, least: int, most: int) -> None:
    """Calls of Python functions for each operator, about a quarter more than it takes; docs/algebra.md says in what time.

    The module makes its code when it is asked for, as the pipeline's does.
    """
    graph, _ = exported(Long().train(training), torch.randn(2, 4, 8, 8))
    size = len(ops(graph))
    assert size > 470
    simplify(copied(graph))  # what is remembered of operators
    copy, profile = _LazyGraphModule(graph, copied(graph).graph), cProfile.Profile()
    with collector_paused():
        applications = profile.runcall(simplify, copy)
    assert len(applications) >= least
    assert pstats.Stats(profile).total_calls < most * size


@pytest.mark.parametrize("training", [False, True])
def test_five_hundred_operators_take_little_time(training: bool) -> None:
    """About six times as long as copying the graph, which takes 28 ms on a slow machine; quadratic work would take a hundred times as long."""
    graph, _ = exported(Long().train(training), torch.randn(2, 4, 8, 8))
    copying, taken = [], []
    for _ in range(9):
        start = time.process_time()
        copy = _LazyGraphModule(graph, copied(graph).graph)
        copying.append(time.process_time() - start)
        simplify(copy)
        taken.append(time.process_time() - start - copying[-1])
    assert min(taken) < 12 * min(copying)
