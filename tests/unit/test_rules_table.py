"""Every registered rule: that it has examples and near misses, what it does in narrow types and to shared values."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fusepass.config import Algebra, override
from fusepass.numerics.check import compare, nudged
from fusepass.patterns.cost import NOTHING
from fusepass.patterns.rules import RULES
from fusepass.patterns.simplify import Application, simplify
from tests.support.aten import traced
from tests.support.thinned import thinned
from tests.unit import test_algebra as algebra
from tests.unit import test_rules_attention as attention
from tests.unit import test_rules_cancelling as cancelling
from tests.unit import test_rules_convolution as convolution
from tests.unit import test_rules_folding as folding
from tests.unit import test_rules_linear as linear
from tests.unit import test_rules_pooling as pooling
from tests.unit import test_rules_preceding as preceding
from tests.unit import test_rules_spelling as spelling
from tests.unit import test_simplify as exact

Function = Callable[..., Any]
FEW = 4
"""Examples of a rule that are tried here; its own file tries all."""

NAMED = {rule.name: rule for rule in RULES}


@dataclass(frozen=True)
class Tested:
    """A rule's tests: functions in which it applies, with inputs for them, and functions in which it must not."""

    fires: tuple[tuple[Function, tuple[Tensor, ...]], ...]
    near: tuple[Function, ...]


def _drawn(function: Function, shapes: tuple[tuple[int, ...], ...]) -> tuple[Function, tuple[Tensor, ...]]:
    return function, tuple(torch.rand(shape, dtype=torch.float64) - 0.3 for shape in shapes)


def _near(table: Mapping[str, Any]) -> tuple[Function, ...]:
    return tuple(entry if callable(entry) else entry[0] for entry in table.values())


def _tested() -> dict[str, Tested]:
    table = {
        name: Tested(tuple((function, (case.x,)) for function, _ in case.fires), case.near)
        for name, case in exact.CASES.items()
    }
    for name, case in algebra.CASES.items():
        x = torch.randn(case.shape, dtype=torch.float64)
        table[name] = Tested(tuple((function, (x,)) for function in case.fires), case.near)
    sources: list[tuple[str, Function, tuple[tuple[int, ...], ...], Mapping[str, Any]]] = [
        *((attention.RULE, function, shapes, attention.NEAR) for function, shapes in attention.FIRES.values()),
        *((case.rule, case.function, case.shapes, cancelling.NEAR) for case in cancelling.FIRES.values()),
        *((rule, function, shapes, folding.NEAR) for function, shapes, rule in folding.FOLDS.values()),
        *((rule, function, shapes, preceding.NEAR) for function, shapes, rule in preceding.FIRES.values()),
        ("product-of-product", *folding.PRODUCTS["without bias"], folding.NEAR),
        ("biased-product-of-product", *folding.PRODUCTS["two layers"], folding.NEAR),
        *((linear.RULE, function, shapes, linear.NEAR) for function, shapes in linear.SUMS.values()),
        *((linear.VECTOR, function, shapes, linear.NEAR) for function, shapes in linear.VECTORS.values()),
        *((linear.PAIRS, function, shapes, linear.UNPAIRED) for function, shapes in linear.PAIRED.values()),
        *((linear.BATCH, function, shapes, linear.NEAR) for function, shapes in linear.EINSUMS.values()),
        *((pooling.POINT, function, shapes, pooling.NEAR) for function, shapes in pooling.POINTS.values()),
        *((convolution.SUM, function, shapes, convolution.NEAR) for function, shapes in convolution.SUMS.values()),
        *(("average-pool-of-convolution", *entry, pooling.NEAR) for entry in pooling.FILTERS.values()),
        *(("average-pool-of-products", *entry, pooling.NEAR) for entry in pooling.PRODUCTS.values()),
        ("average-pool-of-everything", lambda x: F.avg_pool2d(x.exp(), (7, 8)), (cancelling.X,), pooling.NEAR),
        ("reduction-of-reshaped", lambda x: x.exp().flatten(2).mean(2), (spelling.X,), spelling.NEAR),
        ("reduction-of-reordered", lambda x: x.exp().permute(0, 2, 3, 1).sum((1, 2)), (spelling.X,), spelling.NEAR),
        ("reshaped-reduction", lambda x: x.amax((2, 3)).view(2, 4, 1, 1).exp(), (spelling.X,), spelling.NEAR),
        ("broadcast-operand", lambda x: x - x[:1].expand_as(x), (spelling.X,), spelling.NEAR),
        ("adaptive-average-pool", lambda x: F.adaptive_avg_pool2d(x, 4), (spelling.X,), spelling.NEAR),
        ("adaptive-max-pool-of-everything", lambda x: F.adaptive_max_pool2d(x, 1), (spelling.X,), spelling.NEAR),
    ]
    for rule, function, shapes, near in sources:
        before = table.get(rule, Tested((), ()))
        table[rule] = Tested((*before.fires, _drawn(function, shapes)), _near(near))
    return table


TESTED = _tested()


def alone(name: str, graph: fx.GraphModule, *, gate: bool = False) -> list[Application]:
    """What that rule alone does to `graph`; whether or not that pays, unless there is a `gate`."""
    rule = NAMED[name]
    with override(algebra=rule.level, disable="common-subexpression"):
        if gate:
            return simplify(graph, rules=(rule,))
        with patch("fusepass.patterns.simplify.cost", return_value=NOTHING):
            return simplify(graph, rules=(rule,))


def every(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, tuple | list) else [result]


def test_every_rule_has_examples_and_near_misses() -> None:
    assert TESTED.keys() == NAMED.keys()
    assert all(tested.fires and tested.near for tested in TESTED.values())


@pytest.mark.parametrize("name", TESTED)
def test_a_rule_applies_by_itself_and_changes_no_value(name: str) -> None:
    for number, (function, inputs) in enumerate(TESTED[name].fires[:FEW]):
        graph = traced(function, *inputs)
        assert len(alone(name, graph)) >= 1, f"function {number}"
        if NAMED[name].level is Algebra.SAFE:
            wanted = every(function(*inputs))
            for found, value in zip(every(graph(*inputs)), wanted, strict=True):
                tolerance = 1e-10 if value.dtype is torch.float64 else 1e-2
                torch.testing.assert_close(found, value, rtol=tolerance, atol=tolerance, equal_nan=True)


TRIES, ENOUGH = 8, 2
"""Random shapes and values for each rule, and in how many of them it has to apply."""

OWN_SHAPES = frozenset(
    {"average-pool-of-everything", "idle-view", "reduction-of-copies", "reshaped-reduction", "view-of-view"}
)
"""Rules whose examples name the shapes of their inputs."""


def drawn(
    inputs: tuple[Tensor, ...], sizes: Mapping[int, int], least: float, generator: torch.Generator
) -> list[Tensor]:
    """Random tensors like `inputs`, their sizes changed alike wherever they are alike."""
    made = []
    for value in inputs:
        shape = [sizes.get(size, size) for size in value.shape]
        if value.is_floating_point():
            made.append((torch.rand(shape, generator=generator, dtype=torch.float64) + least).to(value.dtype))
        else:
            made.append(torch.randint(-9, 9, shape, generator=generator).to(value.dtype))
    return made


def converted(inputs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [value.to(dtype) if value.is_floating_point() else value for value in inputs]


@pytest.mark.parametrize("name", thinned(TESTED, 3))
def test_a_rule_on_random_shapes_and_values(name: str) -> None:
    """In float64 nothing but rounding changes, in float32 no more than the policy allows."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    least = 0.1 if NAMED[name].level is Algebra.FINITE else -0.5  # a root or a logarithm, undone, is for what it takes
    applied = 0
    for number in range(TRIES):
        function, inputs = TESTED[name].fires[number % len(TESTED[name].fires)]
        more = torch.randint(0, 4, (64,), generator=generator).tolist()
        sizes = {size: size + more[size % 64] for value in inputs for size in value.shape if size > 1}
        wide = drawn(inputs, {} if name in OWN_SHAPES else sizes, least, generator)
        try:
            before = traced(function, *wide)
        except (RuntimeError, ValueError, IndexError):
            continue  # the example names sizes of its own
        after = exact.copied(before)
        if not alone(name, after):
            continue  # it does not apply to these sizes
        applied += 1
        for found, value in zip(every(after(*wide)), every(before(*wide)), strict=True):
            tolerance = 1e-10 if value.dtype is torch.float64 else 1e-2
            torch.testing.assert_close(found, value, rtol=tolerance, atol=tolerance, equal_nan=True)
        if name not in OWN_TYPES:
            _holds_in_float32(name, function, converted(wide, torch.float32), generator)
        if applied == ENOUGH:
            return
    assert applied


def _holds_in_float32(name: str, function: Function, narrow: list[Tensor], generator: torch.Generator) -> None:
    """An error of a few roundings may be eager's on inputs that differ by one."""
    wide = converted(narrow, torch.float64)
    before, oracle = traced(function, *narrow), function(*wide)
    after = exact.copied(before)
    assert alone(name, after)
    runs = [narrow, *([nudged(value, generator) for value in narrow] for _ in range(3))]
    comparisons = [compare(after(*narrow), before(*inputs), oracle) for inputs in runs]
    assert any(comparison.ok for comparison in comparisons), comparisons[0].explain()


@pytest.mark.parametrize("name", TESTED)
def test_a_rule_is_switched_off_by_its_name_and_by_a_lower_level(name: str) -> None:
    (function, inputs), *_ = TESTED[name].fires
    rule = NAMED[name]
    lower = [Algebra.OFF, *([Algebra.SAFE] if rule.level is Algebra.FINITE else [])]
    with patch("fusepass.patterns.simplify.cost", return_value=NOTHING):
        with override(algebra=rule.level, disable=f"common-subexpression,{name}"):
            assert simplify(traced(function, *inputs), rules=(rule,)) == []
        for level in lower:
            with override(algebra=level, disable="common-subexpression"):
                assert simplify(traced(function, *inputs), rules=(rule,)) == []


def with_everything_returned(graph: fx.GraphModule) -> fx.GraphModule:
    """`graph` as a function that gives each tensor on the way, too."""
    (output,) = graph.graph.find_nodes(op="output")
    made = [node for node in graph.graph.nodes if node.op == "call_function"]
    values = [node for node in made if isinstance(node.meta["val"], Tensor)]
    output.args = (tuple(values),)
    graph.recompile()
    return graph


@pytest.mark.parametrize("name", TESTED)
def test_values_that_others_use_stay_and_are_not_made_twice_at_a_loss(name: str) -> None:
    for function, inputs in TESTED[name].fires[:FEW]:
        graph = with_everything_returned(traced(function, *inputs))
        wanted = graph(*inputs)
        for done in alone(name, graph, gate=True):
            assert done.after.seconds <= done.before.seconds
        for found, value in zip(graph(*inputs), wanted, strict=True):
            torch.testing.assert_close(
                found, value, rtol=1e-2, atol=1e-2 if value.is_floating_point() else 0, equal_nan=True
            )


WIDE_ONLY = frozenset(
    {
        "affine-into-convolution", "affine-into-product", "average-pool-of-convolution", "average-pool-of-everything",
        "average-pool-of-products", "biased-product-of-product", "convolution-of-convolution", "factor-before-sum",
        "normalisation-into-convolution", "normalisation-into-product", "product-of-product",
        "scale-before-biased-product", "scale-before-convolution", "scale-before-product", "sum-of-convolution",
        "sum-of-products", "average-pool-before-points", "product-of-one-batch", "vector-behind-products",
        "product-with-a-vector",
    }
)  # fmt: skip
"""Rules that leave float16 and bfloat16 alone: weights or sums that eager keeps in float32 would be rounded."""

OWN_TYPES = frozenset({"add-zero-to-integers", "widening-cast-and-back", "idle-cast", "idle-maximum", "idle-minimum"})
"""Rules whose examples name types."""


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", sorted(TESTED.keys() - OWN_TYPES))
@pytest.mark.thinned(3)
def test_what_a_rule_does_in_narrow_types(name: str, dtype: torch.dtype) -> None:
    """Those that apply keep to the policy, even if each operator of the result rounds; fewer operators round less."""
    applied = 0
    for function, inputs in TESTED[name].fires[:FEW]:
        ordinary = [value.nan_to_num(0.5, 2.0, -2.0) if value.is_floating_point() else value for value in inputs]
        narrow = [value.to(dtype) if value.is_floating_point() else value for value in ordinary]
        try:
            graph = traced(function, *narrow)
        except RuntimeError:
            continue  # it names types of its own
        done = alone(name, graph)
        applied += len(done)
        if done and NAMED[name].level is Algebra.SAFE:
            wide = [value.double() if value.is_floating_point() else value for value in narrow]
            try:
                found, original = graph(*narrow), function(*narrow)
            except NotImplementedError:
                continue  # PyTorch has no such operator in the type
            comparison = compare(found, original, function(*wide))
            assert comparison.ok, comparison.explain()
    assert bool(applied) is (name not in WIDE_ONLY)
