"""Attention that is written out becomes the library's: spellings, masks, what is not finite, what is only similar."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

import fusepass
from fusepass.config import override
from fusepass.patterns.analysis.constants import MOST_COMPUTED, Constant
from fusepass.patterns.matcher import Declined
from fusepass.patterns.rules import attention as rule
from fusepass.patterns.rules.attention import _refuse_where_worse
from tests.support.algebra import Rewritten, rewritten, same_value, within_policy
from tests.support.aten import traced

Function = Callable[..., Any]
RULE = "attention"
Q, K, V = (2, 3, 16, 8), (2, 3, 17, 8), (2, 3, 17, 8)
SQUARE = (Q, Q, Q)
FLAT = ((6, 16, 8), (6, 17, 8), (6, 17, 8))
MASK, PADDING, BIAS = (16, 17), (2, 1, 1, 17), (3, 16, 17)


def attend(q: Tensor, k: Tensor, v: Tensor, change: Callable[[Tensor], Tensor] = lambda s: s * 0.3) -> Tensor:
    return change(q @ k.transpose(-2, -1)).softmax(-1) @ v


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v)


def ahead(size: int) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool).triu(1)


FIRES: dict[str, tuple[Function, tuple[tuple[int, ...], ...]]] = {
    "plain": (lambda q, k, v: attend(q, k, v, lambda s: s), (Q, K, V)),
    "scaled": (plain, (Q, K, V)),
    "divided": (lambda q, k, v: attend(q, k, v, lambda s: s / 8**0.5), (Q, K, V)),
    "scaled twice": (lambda q, k, v: attend(q, k, v, lambda s: (s * 3) / 8), (Q, K, V)),
    "one batch": (lambda q, k, v: attend(q, k, v), FLAT),
    "samples second": (
        lambda q, k, v: attend(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1) * 2), ((16, 6, 8),) * 3
    ),
    "samples second, queries scaled": (
        lambda q, k, v: attend((q * 0.5).transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)), ((16, 6, 8),) * 3
    ),
    "einsum": (
        lambda q, k, v: torch.einsum("bhij,bhje->bhie", torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1), v),
        (Q, K, V),
    ),
    "baddbmm": (
        lambda q, k, v: torch.baddbmm(q.new_empty(6, 16, 17), q, k.transpose(1, 2), beta=0, alpha=0.4).softmax(-1) @ v,
        FLAT,
    ),
    "added before": (
        lambda q, k, v, b: torch.baddbmm(b, q, k.transpose(1, 2), beta=2, alpha=0.4).softmax(-1) @ v,
        (*FLAT, (6, 1, 17)),
    ),
    "queries scaled": (lambda q, k, v: attend(q * 0.5, k, v, lambda s: s / 3), (Q, K, V)),
    "heads in a row": (lambda x, y: attend(*(z.unflatten(2, (3, 8)).transpose(1, 2) for z in (x, y, y))), ((2, 16, 24), (2, 17, 24))),
    "seen as heads": (
        lambda q, k, v: (
            (torch.bmm(q, k.transpose(1, 2)).view(2, 3, 16, 17) * 0.5).view(6, 16, 17).softmax(-1) @ v
        ).view(2, 3, 16, 8),
        FLAT,
    ),
    "in another type": (lambda q, k, v: (q @ k.mT).softmax(-1, dtype=torch.float64).to(q.dtype) @ v, (Q, K, V)),
    "masked": (lambda q, k, v, m: attend(q, k, v, lambda s: s.masked_fill(m < 0.2, -math.inf)), (Q, K, V, MASK)),
    "padded": (
        lambda q, k, v, m: attend(q, k, v, lambda s: torch.where(m < 0.2, s, -math.inf)),
        (Q, K, V, PADDING),
    ),
    "chosen otherwise": (
        lambda q, k, v, m: attend(q, k, v, lambda s: torch.where(m > 0.4, -math.inf, s * 0.2)),
        (Q, K, V, MASK),
    ),
    "masked by what lies otherwise": (
        lambda q, k, v, m: attend(q, k, v, lambda s: s.masked_fill(m.transpose(1, 3) < 0.2, -math.inf)),
        (Q, K, V, (2, 17, 16, 1)),
    ),
    "biased": (lambda q, k, v, b: attend(q, k, v, lambda s: s * 0.3 + b), (Q, K, V, BIAS)),
    "scaled behind a bias": (lambda q, k, v, b: attend(q, k, v, lambda s: (b + s * 0.3) * 2), (Q, K, V, BIAS)),
    "biased and masked": (
        lambda q, k, v, b, m: attend(q, k, v, lambda s: (s + b * 2).masked_fill(m < 0.1, -math.inf) / 3),
        (Q, K, V, BIAS, PADDING),
    ),
    "biased in one batch": (lambda q, k, v, b: attend(q, k, v, lambda s: s + b), (*FLAT, (6, 16, 17))),
    "causal": (lambda q, k, v: attend(q, k, v, lambda s: s.masked_fill(ahead(16), -math.inf)), SQUARE),
    "causal by adding": (
        lambda q, k, v: attend(q, k, v, lambda s: s + torch.full((16, 16), -math.inf).triu(1).to(s.dtype)), SQUARE
    ),
    "causal by choosing": (
        lambda q, k, v: attend(q, k, v, lambda s: torch.where(ahead(16)[None, None], float("-inf"), s)), SQUARE
    ),
    "causal by counting": (
        lambda q, k, v: attend(
            q, k, v, lambda s: s.masked_fill(torch.arange(16)[None] > torch.arange(16)[:, None], -math.inf)
        ),
        SQUARE,
    ),
    "masked by a number": (lambda q, k, v, m: attend(q, k, v, lambda s: s.masked_fill(m < 0.2, -6e4)), (Q, K, V, MASK)),
    "masked by two equal numbers": (
        lambda q, k, v, b, m, n: attend(
            q, k, v, lambda s: (s + b).masked_fill(m < 0, -6e4).masked_fill(n < 0.2, -6e4) * 2
        ),
        (Q, K, V, BIAS, PADDING, MASK),
    ),
    "chosen by the lowest number": (
        lambda q, k, v, m: attend(q, k, v, lambda s: torch.where(m < 0.2, s, torch.finfo(s.dtype).min)),
        (Q, K, V, PADDING),
    ),
    "causal by a number": (lambda q, k, v: attend(q, k, v, lambda s: s.masked_fill(ahead(16), -6e4)), SQUARE),
    "causal by adding a number": (
        lambda q, k, v: attend(q, k, v, lambda s: s + torch.full((16, 16), -1e5).triu(1).to(s.dtype)), SQUARE
    ),
}  # fmt: skip
CAUSAL = tuple(name for name in FIRES if name.startswith("causal"))

NEAR: dict[str, tuple[Function, tuple[tuple[int, ...], ...]]] = {
    "weights used twice": (lambda q, k, v: (lambda w: (w @ v, w.sum(-1)))((q @ k.mT).softmax(-1)), (Q, K, V)),
    "scores used twice": (lambda q, k, v: (lambda s: (s.softmax(-1) @ v, s.sum(-1)))(q @ k.mT), (Q, K, V)),
    "another dimension": (lambda q, k, v: (q @ k.mT).softmax(-2) @ v, (Q, K, V)),
    "no softmax": (lambda q, k, v: (q @ k.mT).sigmoid() @ v, (Q, K, V)),
    "hidden by a number that scores may be": (
        lambda q, k, v: attend(q, k, v, lambda s: s.masked_fill(ahead(16), -1e4)),
        SQUARE,
    ),
    "such a number once it is divided": (
        lambda q, k, v: attend(q, k, v, lambda s: s.masked_fill(ahead(16), -1e5) / 8),
        SQUARE,
    ),
    "added behind a number that hides": (
        lambda q, k, v, b, m: attend(q, k, v, lambda s: s.masked_fill(m < 0.2, -1e9) + b),
        (Q, K, V, BIAS, MASK),
    ),
    "hidden by two numbers": (
        lambda q, k, v, m, n: attend(q, k, v, lambda s: s.masked_fill(m < 0, -1e9).masked_fill(n < 0.2, -1e8)),
        (Q, K, V, MASK, PADDING),
    ),
    "a number for each head": (lambda q, k, v, t: attend(q, k, v, lambda s: s * t), (Q, K, V, (3, 1, 1))),
    "turned round": (lambda q, k, v: attend(q, k, v, lambda s: s * -0.3), (Q, K, V)),
    "a function of scores": (lambda q, k, v: attend(q, k, v, lambda s: s.tanh() * 5), (Q, K, V)),
    "transposed weights": (lambda q, k, v: (q @ k.mT).softmax(-1).mT @ v, (Q, K, Q)),
    "scores of no product": (lambda s, v: s.softmax(-1) @ v, ((2, 3, 16, 17), V)),
    "three dimensions of a batch": (plain, ((2, 2, 3, 16, 8), (2, 2, 3, 17, 8), (2, 2, 3, 17, 8))),
    "nothing to attend to": (plain, ((2, 3, 16, 8), (2, 3, 0, 8), (2, 3, 0, 8))),
}


def drawn(shapes: tuple[tuple[int, ...], ...]) -> list[Tensor]:
    return [torch.rand(shape, dtype=torch.float64) - 0.3 for shape in shapes]


def calls(result: Rewritten) -> list[fx.Node]:
    return [node for node in result.after.graph.nodes if "attention" in str(node.target)]


@pytest.mark.parametrize("name", FIRES)
@pytest.mark.thinned(3)
def test_every_spelling_becomes_one_call(name: str) -> None:
    function, shapes = FIRES[name]
    inputs = drawn(shapes)
    result = same_value(function, *inputs)
    (call,) = calls(result)
    assert (call.args[4] is True) is (name in CAUSAL)  # what hides what lies ahead is no tensor
    assert not (name in CAUSAL and call.kwargs.get("attn_mask") is not None)
    assert not any("bmm" in str(node.target) for node in result.after.graph.nodes)
    within_policy(function, *inputs)


@pytest.mark.parametrize("name", FIRES)
@pytest.mark.thinned(15)
def test_what_is_not_finite_stays_so(name: str) -> None:
    """In queries and values, and in one key where nothing is hidden, it reaches the results that it reaches in eager."""
    function, shapes = FIRES[name]
    hides = any(part in name for part in ("causal", "mask", "padded", "chosen", "biased", "added"))
    # Where a number hides, all that an infinite query leaves may be minus infinity, and eager then shows what is hidden.
    places = (2,) if "number" in name else (0, 2) if hides else range(min(len(shapes), 3))
    for place, bad in product(places, (math.nan, math.inf, -math.inf)):
        inputs = drawn(shapes)
        inputs[place].view(-1)[inputs[place].numel() // 2 + 3] = bad
        result = rewritten(function, *inputs)
        wanted, found = result.before(*inputs), result.after(*inputs)
        assert torch.equal(found.isfinite(), wanted.isfinite()), f"{bad} in operand {place}"


@pytest.mark.parametrize("name", ["masked", "padded", "biased and masked"])
def test_rows_of_which_a_mask_leaves_nothing_are_nan(name: str) -> None:
    function, shapes = FIRES[name]
    inputs = drawn(shapes)
    inputs[-1][0] = 9.0 if name == "padded" else -9.0
    result = rewritten(function, *inputs)
    wanted, found = result.before(*inputs), result.after(*inputs)
    assert 0 < wanted.isnan().sum() < wanted.numel()
    assert torch.equal(found.isnan(), wanted.isnan())


@pytest.mark.parametrize("name", ["masked by a number", "masked by two equal numbers", "chosen by the lowest number"])
def test_rows_of_which_a_number_leaves_nothing_weigh_all_alike(name: str) -> None:
    function, shapes = FIRES[name]
    inputs = drawn(shapes)
    inputs[-1][0] = 9.0 if name.startswith("chosen") else -9.0
    result = rewritten(function, *inputs)
    wanted, found = result.before(*inputs), result.after(*inputs)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    rows = found[0] if name.startswith("chosen") else found[:, :, 0]
    average = inputs[2].mean(-2, keepdim=name.startswith("chosen"))
    torch.testing.assert_close(rows, average[0].expand_as(rows) if name.startswith("chosen") else average)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_mask_by_a_number_in_16_bits(dtype: torch.dtype) -> None:
    """The lowest number of float16 leaves differences of scores: where nothing is left, the average of all values is taken."""
    inputs = [each.to(dtype) for each in drawn((Q, K, V))]
    mask = torch.rand(MASK) < 0.3
    mask[2] = True
    result = rewritten(lambda q, k, v, m: attend(q, k, v, lambda s: s.masked_fill(m, -6e4)), *inputs, mask)
    assert RULE in result.rules
    wanted, found = result.before(*inputs, mask), result.after(*inputs, mask)
    exact = inputs[2].double().mean(-2)
    assert (found[:, :, 2].double() - exact).abs().max() <= 2 * (wanted[:, :, 2].double() - exact).abs().max()
    torch.testing.assert_close(found, wanted, rtol=0, atol=torch.finfo(dtype).eps)
    biased = rewritten(
        lambda q, k, v, b, m: attend(q, k, v, lambda s: (s + b).masked_fill(m, -6e4)),
        *inputs,
        torch.rand(BIAS).to(dtype),
        mask,
    )
    assert (RULE in biased.rules) is (dtype is torch.bfloat16)


@pytest.mark.parametrize("name", NEAR)
def test_what_is_only_similar_stays(name: str) -> None:
    function, shapes = NEAR[name]
    assert RULE not in rewritten(function, *drawn(shapes)).rules


@pytest.mark.parametrize("change", [lambda m: m, lambda m: ~m, lambda m: m.triu(2), lambda m: m[:, ::2].repeat(1, 2)])
def test_a_constant_that_hides_something_else_is_a_mask(change: Function) -> None:
    inputs = drawn(SQUARE)
    result = rewritten(
        lambda q, k, v: attend(q, k, v, lambda s: s.masked_fill(change(ahead(16).tril(9)).flip(0), -math.inf)), *inputs
    )
    (call,) = calls(result)
    assert call.args[4] is False
    torch.testing.assert_close(result.after(*inputs), result.before(*inputs), equal_nan=True)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_the_module_is_attention(batch_first: bool, padded: bool) -> None:
    """Which asks for the weights unless it is told otherwise, and leaves them to nobody here."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = torch.nn.MultiheadAttention(24, 3, batch_first=batch_first)

        def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
            value: Tensor = self.attention(x, x, x, key_padding_mask=hidden if padded else None)[0]
            return value

    net, x = Net().eval(), torch.rand(16, 17, 24)
    hidden = torch.rand((16, 17) if batch_first else (17, 16)) < 0.3
    hidden[:, 0] = False
    with torch.no_grad(), override(tune="off"):
        fused = fusepass.optimize(net)
        torch.testing.assert_close(fused(x, hidden), net(x, hidden))
        assert RULE in {rewrite.rule for rewrite in fused.report().rewrites}


def beside_each_other(x: Tensor, w: Tensor) -> Tensor:
    q, k, v = F.linear(x, w).view(2, 16, 3, 3, 8).permute(2, 0, 3, 1, 4).unbind(0)
    return attend(q, k, v).transpose(1, 2).reshape(2, 16, 24)


def as_one_batch(x: Tensor, w: Tensor) -> Tensor:
    """As `nn.MultiheadAttention` does it: three tensors are copied apart, batch and heads are one dimension."""
    apart = F.linear(x, w).unflatten(-1, (3, 24)).unsqueeze(0).transpose(0, -2).squeeze(-2).contiguous()
    q, k, v = (apart[place].view(16, 6, 8).transpose(0, 1) for place in range(3))
    return torch.bmm((q * 0.3 @ k.mT).softmax(-1), v).transpose(0, 1).contiguous().view(32, 24)


@pytest.mark.parametrize(("function", "shape"), [(beside_each_other, (2, 16, 24)), (as_one_batch, (16, 2, 24))])
def test_copies_for_the_products_go(function: Function, shape: tuple[int, ...]) -> None:
    """Heads that lie beside each other are read and written there."""
    inputs = drawn((shape, (72, 24)))
    result = same_value(function, *inputs)
    assert "copy-of-copy" in result.rules
    assert not any("clone" in str(node.target) for node in result.after.graph.nodes)


class Watched(fx.Interpreter):
    """Runs a graph and keeps what one of its nodes gives."""

    def __init__(self, graph: fx.GraphModule, node: fx.Node) -> None:
        super().__init__(graph)
        self.node, self.seen = node, torch.empty(0)

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n is self.node:
            self.seen = value
        return value


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)])
@pytest.mark.parametrize("sizes", [Q, (1, 3, 16, 8), (2, 1, 16, 8)])
def test_results_lie_as_the_graph_says(sizes: tuple[int, ...], order: tuple[int, ...]) -> None:
    shape = tuple(sizes[dim] for dim in order)
    inputs = [value.permute(*(order.index(dim) for dim in range(4))) for value in drawn((shape,) * 3)]
    graph = rewritten(plain, *inputs).after
    (item,) = (user for node in graph.graph.nodes if "attention" in str(node.target) for user in node.users)
    run = Watched(graph, item)
    run.run(*inputs)
    assert run.seen.stride() == item.meta["val"].stride()


@pytest.mark.parametrize("keys", [1, 15, 16])
def test_few_keys_stay_on_a_cpu(keys: int) -> None:
    """The library takes scores that are all NaN, fewer than a vector, for hidden ones."""
    inputs = drawn((Q, (2, 3, keys, 8), (2, 3, keys, 8)))
    assert (RULE in rewritten(plain, *inputs).rules) is (keys >= 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("instructions", [False, True])
def test_products_of_bfloat16_stay_on_a_cpu_with_instructions_for_them(
    dtype: torch.dtype, instructions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library's attention kernel has none; where scores do not fit into caches, or there is little to compute, it is faster all the same."""
    monkeypatch.setattr(rule, "only_products_use_bfloat16", lambda: instructions)
    inputs = [value.to(dtype) for value in drawn(((2, 3, 48, 16),) * 3)]
    stays = instructions and dtype is torch.bfloat16
    assert (RULE not in rewritten(plain, *inputs).rules) is stays
    for shape, keys in (((12, 1024, 64), 1024), ((2, 16, 16), 16)):
        _refuse_where_worse(torch.empty(shape, dtype=dtype, device="meta"), keys, causal=False, biased=False)


@pytest.mark.parametrize(
    ("keys", "causal", "dtype"), [(39, False, torch.bfloat16), (17, True, torch.float16), (39, False, torch.float32)]
)
def test_few_keys_stay_on_a_gpu(keys: int, causal: bool, dtype: torch.dtype) -> None:
    """The library's tiles are too large for them."""
    with FakeTensorMode():
        value = torch.empty(2, 64, 32, device="cuda", dtype=dtype)
    with pytest.raises(Declined, match="few keys"):
        _refuse_where_worse(value, keys, causal, biased=False)
    _refuse_where_worse(value, 40, causal, biased=False)


def test_settings_of_the_user_decide() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        assert RULE not in rewritten(plain, *drawn((Q, K, V))).rules


@pytest.mark.parametrize(
    ("function", "known"),
    [
        (lambda x: torch.arange(4) * 2, True),
        (lambda x: x[:4] * 0, False),
        (lambda x: torch.rand(4), False),
        (lambda x: torch.ones(MOST_COMPUTED + 1)[:4], False),
    ],
)
def test_what_is_computed_of_numbers_alone(function: Function, known: bool) -> None:
    graph = traced(function, torch.rand(9))
    (output,) = graph.graph.find_nodes(op="output")
    constant = Constant.of(output.all_input_nodes[0])
    assert (constant is not None) is known
    if constant is not None:
        assert constant == Constant.of(
            traced(function, torch.rand(9)).graph.find_nodes(op="output")[0].all_input_nodes[0]
        )
        torch.testing.assert_close(constant.value(), torch.arange(4) * 2)


@pytest.mark.parametrize(("heads", "length", "runs"), [(8, 128, True), (8, 16, True), (1, 16, False)])
def test_a_graph_of_no_regions_runs_where_rewriting_pays(heads: int, length: int, runs: bool) -> None:
    class Net(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return plain(q, k, v)

    inputs = [torch.rand(1, heads, length, 16) for _ in range(3)]
    with torch.no_grad():
        fused = fusepass.optimize(Net())
        fused(*inputs)
        assert fused.report().regions == ()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            fused(*inputs)
    assert any("flash_attention" in event.key for event in profile.key_averages()) is runs
