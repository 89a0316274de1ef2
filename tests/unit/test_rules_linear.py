"""Rules about matrix products: where they apply, where not, and that they save work."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fusepass.patterns.simplify import simplify
from tests.support.algebra import Function, rewritten, same_value, within_policy
from tests.support.aten import traced

RULE = "sum-of-products"


def rand(*shape: int) -> torch.Tensor:
    return torch.rand(shape, dtype=torch.float64) - 0.3


X, W, B, P = (6, 10), (8, 10), (8,), (8,)

SUMS: dict[str, tuple[Function, tuple[tuple[int, ...], ...]]] = {
    "mean of features": (lambda x, w, b, p: (F.linear(x, w, b) - p).mean(1, keepdim=True), (X, W, B, P)),
    "sum of features, with itself": (lambda x, w, b: (lambda y: (y + y / 2).sum(-1))(F.linear(x, w, b)), (X, W, B)),
    "sum of features": (lambda x, w, b: F.linear(x, w, b).sum(-1), (X, W, B)),
    "sum of rows": (lambda x, w, b: F.linear(x, w, b).sum(0), (X, W, B)),
    "sum of all": (lambda x, w, b: F.linear(x, w, b).sum(), (X, W, B)),
    "mean of all": (lambda x, w: F.linear(x, w).mean(), (X, W)),
    "scaled features": (lambda x, w, b, p: ((F.linear(x, w, b) + 1) * p / 3 - p).sum(1), (X, W, B, P)),
    "divided features": (lambda x, w, b, p: (2 - F.linear(x, w, b) / (p + 3)).mean(1), (X, W, B, P)),
    "scaled rows": (lambda x, w, r: (r * F.linear(x, w)).mean(1), (X, W, (6, 1))),
    "scaled by a number": (lambda x, w, s: (-(F.linear(x, w) * s)).mean(1), (X, W, ())),
    "plus a tensor": (lambda x, w, z: (F.linear(x, w) + z).mean(1), (X, W, (6, 8))),
    "sequence": (lambda x, w, b: (F.linear(x, w, b) * 2).sum(-1), ((2, 3, 10), W, B)),
    "sequence, positions": (lambda x, w, b: F.linear(x, w, b).mean(1), ((2, 3, 10), W, B)),
    "sequence, samples and features": (lambda x, w, b: F.linear(x, w, b).mean((0, 2)), ((2, 3, 10), W, B)),
    "matmul": (lambda x, y: (x @ y).sum(-1), ((2, 4, 5), (2, 5, 3))),
    "matmul, rows": (lambda x, y: (x @ y).mean(-2, keepdim=True), ((2, 4, 5), (2, 5, 3))),
    "matmul with a transpose": (lambda x, y: (x @ y.transpose(1, 2)).sum((1, 2)), ((2, 4, 5), (2, 3, 5))),
    "addmm with a matrix": (lambda x, y, z: torch.addmm(z, x, y).sum(1), ((4, 5), (5, 3), (4, 3))),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_moves_before_the_product(name: str) -> None:
    function, shapes = SUMS[name]
    inputs = [rand(*shape) for shape in shapes]
    result = same_value(function, *inputs)
    assert result.rules.count(RULE) == 1
    before, after = result.flops(*inputs)
    assert after < before


VECTOR, BATCH = "vector-behind-products", "product-of-one-batch"

VECTORS: dict[str, tuple[Function, tuple[tuple[int, ...], ...]]] = {
    "mv": (lambda x, w, b, v: F.linear(x, w, b).mv(v), (X, W, B, P)),
    "matmul": (lambda x, w, v: F.linear(x, w) @ v, (X, W, P)),
    "of a sequence": (lambda x, w, b, v: F.linear(x, w, b) @ v, ((2, 3, 10), W, B, P)),
    "scaled and shifted": (lambda x, w, p, v: (F.linear(x, w) * p / 2 - p).mv(v), (X, W, P, (8,))),
    "plus a tensor": (lambda x, w, z, v: (F.linear(x, w) + z).mv(v), (X, W, (6, 8), P)),
}


@pytest.mark.parametrize("name", VECTORS)
def test_a_vector_meets_the_weights_first(name: str) -> None:
    function, shapes = VECTORS[name]
    inputs = [rand(*shape) for shape in shapes]
    result = same_value(function, *inputs)
    assert result.rules.count(VECTOR) == 1
    before, after = result.flops(*inputs)
    assert after < before
    within_policy(function, *inputs)


EINSUMS: dict[str, tuple[Function, tuple[tuple[int, ...], ...]]] = {
    "linear": (lambda x, w, b: torch.einsum("bi,oi->bo", x, w) + b, (X, W, B)),
    "linear of a sequence": (lambda x, w, b: torch.einsum("bti,oi->bto", x, w) + b, ((2, 3, 10), W, B)),
    "product": (lambda x, w: torch.einsum("bi,io->bo", x, w).relu(), (X, (10, 8))),
    "turned": (lambda x, w: torch.einsum("ib,io->bo", x, w).relu(), ((10, 6), (10, 8))),
    "one batch": (lambda x, y: (x.unsqueeze(0) @ y.unsqueeze(0)).squeeze(0).relu(), ((4, 5), (5, 3))),
}


@pytest.mark.parametrize("name", EINSUMS)
def test_a_sum_over_indices_is_a_product_of_matrices(name: str) -> None:
    function, shapes = EINSUMS[name]
    result = same_value(function, *(rand(*shape) for shape in shapes))
    assert result.rules.count(BATCH) == 1
    code = str(result.after.graph)
    assert "mm.default" in code
    assert not [name for name in ("bmm", "permute") if name in code]


def test_rules_about_products_see_sums_over_indices() -> None:
    result = same_value(
        lambda x, w, b: (torch.einsum("bti,oi->bto", x, w) + b).sum(-1), rand(2, 3, 10), rand(*W), rand(*B)
    )
    assert {BATCH, RULE} <= set(result.rules)


NEAR: dict[str, tuple[Function, tuple[tuple[int, ...], ...]]] = {
    "not linear": (lambda x, w, b: F.linear(x, w, b).relu().sum(1), (X, W, B)),
    "a square": (lambda x, w: (lambda y: (y * y).sum(1))(F.linear(x, w)), (X, W)),
    "a quotient": (lambda x, w: (1 / F.linear(x, w)).sum(1), (X, W)),
    "rounded down": (lambda x, w: torch.div(F.linear(x, w), 2.0, rounding_mode="floor").sum(1), (X, W)),
    "scaled elements": (lambda x, w, z: (F.linear(x, w) * z).sum(1), (X, W, (6, 8))),
    "one feature": (lambda x, w: F.linear(x, w).sum(1), (X, (1, 10))),
    "samples of a batch of products": (lambda x, y: (x @ y).sum(0), ((2, 4, 5), (2, 5, 3))),
    "features in pieces": (lambda x, w: F.linear(x, w).view(6, 2, 4).sum(1), (X, W)),
    "alpha": (lambda x, y, z: torch.addmm(z, x, y, alpha=2).sum(1), ((4, 5), (5, 3), (3,))),
    "no features": (lambda x, w: F.linear(x, w).sum(1), (X, (0, 10))),
    "the maximum": (lambda x, w: F.linear(x, w).amax(1), (X, W)),
    "cast": (lambda x, w: F.linear(x, w).float().sum(1), (X, W)),
    "a matrix and a vector": (lambda x, v: x.exp().mv(v), (X, (10,))),
    "a function before the vector": (lambda x, w, v: F.linear(x, w).relu().mv(v), (X, W, P)),
    "two products": (lambda x, y: (x @ y).relu(), ((2, 4, 5), (2, 5, 3))),
    "a sum over a batch": (lambda x, y: torch.einsum("bij,bjk->bik", x, y).relu(), ((2, 4, 5), (2, 5, 3))),
    "cast by the sum": (lambda x, w: F.linear(x, w).sum(1, dtype=torch.float32), (X, W)),
}


@pytest.mark.parametrize("name", NEAR)
def test_what_is_only_similar_stays(name: str) -> None:
    function, shapes = NEAR[name]
    rules = same_value(function, *(rand(*shape) for shape in shapes)).rules
    assert not {RULE, VECTOR, BATCH} & set(rules)


PAIRS = "product-with-a-vector"

PAIRED: dict[str, tuple[Function, tuple[tuple[int, ...], ...]]] = {
    "mv": (lambda x, v: x.exp().mv(v), (X, (10,))),
    "a column": (lambda x, v: x.exp() @ v, (X, (10, 1))),
    "a row": (lambda v, x: v @ (x * x), ((1, 6), X)),
    "a vector before": (lambda v, x: v @ x.sigmoid(), ((6,), X)),
    "a batch": (lambda x, v: torch.bmm(x.exp(), v), ((3, 6, 10), (3, 10, 1))),
    "a batch of rows": (lambda v, x: torch.bmm(v, x.exp()), ((3, 1, 6), (3, 6, 10))),
    "sums over an index": (lambda x, v: torch.einsum("blsd,bsd->bld", x.exp(), v), ((2, 4, 3, 5), (2, 3, 5))),
    "both made": (lambda x, v: x.exp() @ v.tanh(), (X, (10, 1))),
}


@pytest.mark.parametrize("name", PAIRED)
def test_a_matrix_that_is_computed_meets_a_vector(name: str) -> None:
    function, shapes = PAIRED[name]
    inputs = [rand(*shape) for shape in shapes]
    result = same_value(function, *inputs)
    assert result.rules.count(PAIRS) == 1
    assert not [name for name in ("mm.default", "mv.default") if name in str(result.after.graph)]
    within_policy(function, *inputs)


UNPAIRED: dict[str, tuple[Function, tuple[tuple[int, ...], ...]]] = {
    "a matrix from memory": (lambda x, v: x @ v, (X, (10, 1))),
    "two columns": (lambda x, y: x.exp() @ y, (X, (10, 2))),
    "an outer product": (lambda x, y: (x @ y).exp(), ((6, 2), (2, 10))),
    "a product of matrices": (lambda x, w, v: (x @ w) @ v, ((6, 2), (2, 10), (10, 1))),
}


@pytest.mark.parametrize("name", UNPAIRED)
def test_the_library_multiplies(name: str) -> None:
    function, shapes = UNPAIRED[name]
    assert PAIRS not in same_value(function, *(rand(*shape) for shape in shapes)).rules


def test_narrow_types_stay() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        result = rewritten(lambda x, w: F.linear(x, w).sum(1), torch.rand(4, 5).to(dtype), torch.rand(6, 5).to(dtype))
        assert result.rules == []


def test_a_product_that_is_used_besides_is_kept() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, w)
        return y.relu() + y.sum(1, keepdim=True)

    same_value(function, rand(*X), rand(*W))


def test_what_is_written_meanwhile_is_not_read_later() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, w)
        torch.ops.aten.copy_.default(x, x * 2)
        return y.sum(1)

    x, w = rand(*X), rand(*W)
    result = rewritten(function, x, w)
    assert RULE not in result.rules
    assert torch.equal(result.after(x.clone(), w), function(x.clone(), w))


def test_two_products_in_one_sum() -> None:
    result = same_value(lambda x, v, w: (F.linear(x, w) - 2 * F.linear(x, v)).sum(1), rand(*X), rand(*W), rand(*W))
    assert result.rules.count(RULE) == 1
    assert "mm" not in str(result.after.graph)


@pytest.mark.parametrize("broken", ["x", "w"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_reaches_the_same_results(broken: str, value: float) -> None:
    x, w = rand(6, 10), rand(8, 10)
    {"x": x, "w": w}[broken][2, 3] = value
    result = rewritten(lambda x, w: F.linear(x, w).mean(1), x, w)
    assert torch.equal(result.after(x, w).isfinite(), result.before(x, w).isfinite())


@pytest.mark.parametrize("shift", [0.0, 0.5])
def test_float32_stays_within_the_policy(shift: float) -> None:
    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        return (F.linear(x, w, b) - p).mean(1, keepdim=True)

    within_policy(function, torch.rand(64, 512), (torch.rand(256, 512) - shift) / 22, rand(256), torch.rand(256))


def test_a_mean_in_steps_is_seen_behind_its_views() -> None:
    """No step of this costs more or less than another but the last."""
    inputs = torch.rand(64, 256), torch.rand(512, 256)
    graph = traced(lambda x, w: F.linear(x, w).view(64, 8, 64).mean(2).mean(1), *inputs)
    wanted = graph(*inputs)
    assert RULE in [application.rule for application in simplify(graph)]
    torch.testing.assert_close(graph(*inputs), wanted)
