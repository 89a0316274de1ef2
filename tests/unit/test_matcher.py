"""What a pattern of the language matches, what it captures, and what it says when it does not match."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch._ops import OpOverload

from fusepass.patterns.language import Call, const, equals, of_class, op, result, var
from fusepass.patterns.matcher import Declined, Match, Mismatch, every, match
from fusepass.patterns.opclass import OpClass
from fusepass.patterns.search import Ways, may_be, possible
from tests.support.aten import traced

aten = torch.ops.aten
x, y = var("x"), var("y")
relu, add, mul, neg = op(aten.relu), op(aten.add), op(aten.mul), op(aten.neg)


def last(function: Callable[..., Any], count: int = 2) -> fx.Node:
    """The last operator that `function` calls on `count` matrices."""
    graph = traced(function, *(torch.randn(4, 8) for _ in range(count)))
    return [node for node in graph.graph.nodes if isinstance(node.target, OpOverload)][-1]


def found(pattern: Call, function: Callable[..., Any]) -> Match:
    result = match(pattern, last(function))
    assert isinstance(result, Match), str(result)
    return result


def missed(pattern: Call, function: Callable[..., Any]) -> str:
    result = match(pattern, last(function))
    assert isinstance(result, Mismatch)
    return str(result)


def test_captures_are_attributes() -> None:
    result = found(relu(add(x, y)["sum"]), lambda a, b: (a.exp() + b).relu())
    assert (result.x.target, result.y.op, result.sum.target) == (aten.exp.default, "placeholder", aten.add.Tensor)
    assert result.root.target is aten.relu.default
    assert result.nodes == {result.root, result.sum}
    with pytest.raises(AttributeError, match="no capture called 'z'"):
        _ = result.z


def test_another_operator_does_not_match() -> None:
    assert missed(relu(x), lambda a, b: a.exp()).startswith("exp: is a call of aten.exp.default, not of")
    assert "add: is a call of aten.add.Tensor" in missed(relu(relu(x)), lambda a, b: (a + b).relu())


def test_a_name_stands_for_one_value() -> None:
    assert found(mul(x, x), lambda a, b: a * a).x.op == "placeholder"
    assert "is not what x stands for already" in missed(mul(x, x), lambda a, b: a * b)


def test_operands_are_exchanged_only_where_that_is_allowed() -> None:
    swapped: Callable[..., Any] = lambda a, b: b * a.relu()  # noqa: E731
    either = op(aten.mul, commutative=True)
    assert "is a call of" in missed(mul(relu(x), neg(y)), lambda a, b: b.neg() * a.relu())
    result = found(either(relu(x), neg(y)), lambda a, b: b.neg() * a.relu())
    assert (result.x.name, result.y.name) == ("a_1", "b_1")
    second = found(either(relu(x), y), swapped)
    assert (second.x.name, second.y.name) == ("a_1", "b_1")


def test_a_choice_made_early_is_taken_back() -> None:
    """The first operand fits ``neg(x)`` both ways round; only one of them lets the second fit ``mul(x, y)``."""
    either = op(aten.add, commutative=True)
    result = found(either(neg(x), mul(neg(x), y)), lambda a, b: (a.neg() * b) + a.neg())
    assert result.x.op == "placeholder"


def test_arguments_not_mentioned_have_their_defaults() -> None:
    assert found(add(x, y), lambda a, b: a + b)
    assert "argument alpha is 2" in missed(add(x, y), lambda a, b: torch.add(a, b, alpha=2))
    assert found(op(aten.add, open=True)(x, y), lambda a, b: torch.add(a, b, alpha=2))
    captured = found(add(x, y, alpha=const("alpha")), lambda a, b: torch.add(a, b, alpha=2))
    assert captured.alpha == 2
    assert found(add(x, y, alpha=const("alpha")), lambda a, b: a + b).alpha == 1
    assert "takes other arguments" in missed(relu(x, beta=const("beta")), lambda a, b: a.relu())


def test_constants_are_no_tensors_and_satisfy_their_predicate() -> None:
    one = mul(x, const("one", equals(1)))
    assert found(one, lambda a, b: a * 1.0).one == 1.0
    assert found(one, lambda a, b: a * 1).one == 1
    assert "argument 2.0 is no Const" in missed(one, lambda a, b: a * 2.0)
    assert "is no Const" in missed(one, lambda a, b: a * b)
    assert "is no Var" in missed(mul(x, y), lambda a, b: a * 2.0)


@pytest.mark.parametrize(
    ("number", "value", "accepted"),
    [
        (1, 1, True), (1, 1.0, True), (1, True, False), (1, None, False), (1, 1 + 1e-16, True), (1, "1", False),
        (0.0, 0, True), (0.0, -0.0, False), (-0.0, -0.0, True), (-0.0, 0, False), (1, 10**400, False),
    ],
)  # fmt: skip
def test_equals(number: float, value: object, accepted: bool) -> None:
    assert equals(number)(value) is accepted


def test_a_result_with_other_users_may_be_an_inner_value() -> None:
    def used_again(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        inner = a.neg()
        other = inner + b
        return other, inner.relu()  # type: ignore[return-value]

    assert found(relu(neg(x)), used_again)


def test_a_class_matches_any_operator_in_it() -> None:
    pointwise = of_class(OpClass.POINTWISE)
    assert found(relu(pointwise(x)["f"]), lambda a, b: (a * b).relu()).f.target is aten.mul.Tensor
    assert found(relu(pointwise(x)["f"]), lambda a, b: a.exp().relu()).f.target is aten.exp.default
    assert "not of OpClass.POINTWISE" in missed(relu(pointwise(x)), lambda a, b: a.sum(0).relu())


def test_new_nodes_have_fake_results_and_invalid_ones_are_declined() -> None:
    result = found(relu(x), lambda a, b: a.relu())
    made = result.call(aten.permute.default, result.x, [1, 0])
    assert tuple(made.meta["val"].shape) == (8, 4)
    assert made.next is result.root
    with pytest.raises(Declined, match="shape"):
        result.call(aten.view.default, result.x, [5])


def maximum(function: Callable[..., Any]) -> fx.Node:
    """The node of the first result of the last ``max`` that `function` calls."""
    calls = traced(function, torch.randn(4, 8)).graph.find_nodes(op="call_function", target=aten.max.dim)
    return next(user for user in calls[-1].users if user.args[1] == 0)


def test_a_result_of_several() -> None:
    pattern = result(0, op(aten.max, open=True)(relu(x))["call"])
    node = maximum(lambda a: a.relu().max(1).values.exp())
    hit = match(pattern, node)
    assert isinstance(hit, Match)
    assert hit.root is node
    assert hit.captures["call"] is node.args[0]
    assert hit.nodes == {node, node.args[0], node.args[0].args[0]}  # type: ignore[union-attr]
    assert isinstance(match(result(1, op(aten.max, open=True)(x)), node), Mismatch)
    assert isinstance(match(pattern, node.args[0]), Mismatch)  # type: ignore[arg-type]


def test_a_call_of_which_two_results_are_used_is_no_single_result() -> None:
    node = maximum(lambda a: (lambda found: found.values + found.indices)(a.max(1)))
    reason = match(result(0, op(aten.max, open=True)(x)), node)
    assert "another of its results is used" in str(reason)


def ways(pattern: Call, node: fx.Node) -> list[Match]:
    return list(Ways(node).of(pattern))


def test_every_way_is_found() -> None:
    node = last(lambda a, b: a + b)
    both = [(way.x.name, way.y.name) for way in ways(op(aten.add, commutative=True)(x, y), node)]
    assert both == [("a_1", "b_1"), ("b_1", "a_1")]
    assert ways(op(aten.add, commutative=True)(x, relu(y)), node) == []
    assert ways(op(aten.add)(x, const("number")), node) == []
    assert len(ways(op(aten.add)(x, const("number", equals(2))), last(lambda a, b: a + 2))) == 1


PATTERNS = (
    add(x), add(x, y), op(aten.add, open=True)(x), op(aten.add, open=True)(x, y), op(aten.add, commutative=True)(x, y)["sum"],
    add(x, x), add(relu(x), y), add(x, alpha=const("alpha")), op(aten.add, open=True)(y)["sum"],
    add(x, const("number")), mul(x, y), of_class(OpClass.POINTWISE)(x), result(0, op(aten.max, open=True)(x)),
)  # fmt: skip
CALLS = (
    lambda a, b: a + b,
    lambda a, b: a + a,
    lambda a, b: a + 2,
    lambda a, b: a.relu() + b,
    lambda a, b: torch.add(a, b, alpha=2),
    lambda a, b: a * b,
    lambda a: a.max(1).values,
)


def test_quick_looks_miss_nothing() -> None:
    """What is found at once, or for several patterns together, is what the search with backtracking finds."""
    count = 0
    for function in CALLS:
        node = maximum(function) if function is CALLS[-1] else last(function)
        shared = Ways(node)
        for pattern in PATTERNS:
            wanted = [(way.captures, way.nodes) for way in every(pattern, node)]
            call = node if isinstance(node.target, OpOverload) else node.all_input_nodes[0]
            if may_be(pattern, node) and possible(pattern, call):
                assert [(way.captures, way.nodes) for way in shared.of(pattern)] == wanted
                count += len(wanted)
            else:
                assert not wanted
    assert count > 20


def test_new_nodes_may_have_several_results() -> None:
    hit = found(relu(x), lambda a, b: (a + b).relu())
    values = hit.call(aten.max.dim, hit.x, 1)
    assert tuple(hit.item(values, 1).meta["val"].shape) == (4,)
    assert hit.item(values, 1).meta["val"].dtype is torch.int64
    assert hit.call(aten.sin.default, hit.x, like=hit.root).meta["val"] is hit.root.meta["val"]
