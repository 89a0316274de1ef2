"""The cost model: what is counted, what is free, and what goes away with a node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils.flop_counter import FlopCounterMode

from fusepass.codegen.lowering.tracer import Spec
from fusepass.config import override
from fusepass.patterns.cost import cost, dying
from fusepass.patterns.language import op, var
from fusepass.patterns.rates import RATES
from fusepass.patterns.rule import Rule
from fusepass.patterns.simplify import simplify
from tests.support import precision
from tests.support.aten import traced

aten = torch.ops.aten


def calls(function: Callable[..., Any], *inputs: torch.Tensor) -> list[fx.Node]:
    return [node for node in traced(function, *inputs).graph.nodes if isinstance(node.target, OpOverload)]


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (torch.mm, [(3, 5), (5, 7)]),
        (torch.bmm, [(2, 3, 5), (2, 5, 7)]),
        (torch.addmm, [(7,), (3, 5), (5, 7)]),
        (lambda x, w: aten.convolution(x, w, None, [2], [1], [1], False, [0], 2), [(2, 4, 9), (6, 2, 3)]),
        (
            lambda x, w: aten.convolution(x, w, None, [2, 1], [1, 0], [1, 1], True, [1, 0], 1),
            [(2, 4, 5, 5), (4, 3, 3, 3)],
        ),
    ],
)
def test_products_count_as_in_pytorch(function: Callable[..., Any], shapes: list[tuple[int, ...]]) -> None:
    inputs = [torch.randn(shape) for shape in shapes]
    with FlopCounterMode(display=False) as counter:
        function(*inputs)
    assert cost(calls(function, *inputs)).flops == counter.get_total_flops()


def test_the_backward_of_a_convolution_counts_as_in_pytorch() -> None:
    x, weight = torch.randn(2, 4, 9, 9), torch.randn(6, 4, 3, 3)
    gradient = torch.randn(2, 6, 7, 7)

    def function(gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Any:
        mask = [True, True, False]
        return aten.convolution_backward(gradient, x, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, mask)[:2]

    with FlopCounterMode(display=False) as counter:
        function(gradient, x, weight)
    assert cost(calls(function, gradient, x, weight)).flops == counter.get_total_flops()


def test_pointwise_operators_move_nothing_between_neighbours() -> None:
    x = torch.randn(64, 32)
    size = x.numel() * x.element_size()
    chain = calls(lambda x: (x.exp() * 2).t().sin(), x)
    assert cost(chain).bytes == 3 * size, "read once; written, and read again by what follows"
    reduced = calls(lambda x: (x.exp() * 2).sum(1), x)
    assert cost(reduced).bytes == size + 2 * 64 * 4
    product = calls(lambda x: x.mm(x.t()).relu(), x)
    assert cost(product[:2]).bytes == size + 2 * 64 * 64 * 4
    inner = calls(lambda x: (x.exp() * 2).sin().cos(), x)[1:3]
    assert cost(inner).bytes == 0
    assert 0 < cost(inner).seconds < RATES["cpu"].launch


def test_views_cost_nothing() -> None:
    assert cost(calls(lambda x: x.t().unsqueeze(0).expand(3, 5, 4), torch.randn(4, 5))).seconds == 0


def test_a_pool_counts_its_windows_and_is_kept_in_memory_for_another() -> None:
    first, second = calls(
        lambda x: torch.nn.functional.avg_pool2d(torch.nn.functional.avg_pool2d(x, 2), 2), torch.randn(1, 3, 16, 16)
    )
    assert cost([first]).flops == 3 * 16 * 16 + 2 * 3 * 64
    assert cost([second]).flops == 3 * 8 * 8 + 2 * 3 * 16
    assert cost([first, second]).bytes == (3 * 256 + 2 * 3 * 64 + 2 * 3 * 16) * 4
    overlapping = calls(lambda x: aten.max_pool2d_with_indices(x, [3], [1])[0], torch.randn(1, 3, 16, 16))
    assert cost(overlapping[:1]).flops == 2 * 3 * 14 * 14 * (9 + 2)


def test_what_others_need_does_not_die() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shared = x.exp()
        noise = torch.rand_like(x)
        return ((shared * 2).sin() + noise).cos(), shared

    nodes = calls(function, torch.randn(4))
    root = nodes[-1]
    result = nodes[0]
    assert [node.name for node in dying({root: result})] == ["cos", "add", "sin", "mul"]
    assert [node.name for node in dying({root: nodes[-2]})] == ["cos"]


def test_a_rewrite_reports_what_it_saves() -> None:
    rule = Rule(
        name="columns-of-a-product",
        pattern=op(aten.sum, open=True)(op(aten.mm)(var("x"), var("w"))),
        rewrite=lambda m: m.call(aten.mv.default, m.x, m.call(aten.sum.dim_IntList, m.w, [1])),
        why="a sum of the columns of a product is the product with the sum of the columns",
    )
    x, weight = torch.randn(8, 300), torch.randn(300, 200)
    (done,) = simplify(traced(lambda x, w: x.mm(w).sum(1), x, weight), rules=(rule,))
    assert done.before.flops == 2 * 8 * 300 * 200 + 8 * 200 + 8
    assert done.after.flops == 2 * 8 * 300 + 300 * 200 + 300
    assert done.after.seconds < done.before.seconds
    assert done.before.bytes == 4 * (8 * 300 + 300 * 200 + 2 * 8 * 200 + 2 * 8)
    column = torch.randn(300, 1)
    assert simplify(traced(lambda x, w: x.mm(w).sum(1), x, column), rules=(rule,)) == [], "nothing is saved"


@pytest.mark.parametrize(("channels", "faster"), [(64, True), (8, False)])
def test_convolutions_that_may_round_to_tf32_are_cheaper_on_a_gpu(channels: int, faster: bool) -> None:
    nodes = calls(torch.nn.functional.conv2d, torch.randn(2, channels, 9, 9), torch.randn(4, channels, 3, 3))
    for node in nodes[-1:] + nodes[-1].all_input_nodes:
        node.meta["val"] = Spec.of(node.meta["val"], torch.device("cuda"))
    seconds = []
    for allowed in (False, True):
        with precision.cudnn(allow_tf32=allowed):
            seconds.append(cost(nodes).seconds)
    work = cost(nodes).flops
    saved = work / RATES["cuda"].products - work / RATES["cuda"].tf32_products
    assert seconds[0] - seconds[1] == pytest.approx(saved if faster else 0)


def test_off_leaves_everything_but_dead_code() -> None:
    graph = traced(lambda x: (x.relu().relu() + x.exp() + x.exp(), x.cos())[0], torch.randn(3))
    with override(algebra="off"):
        assert simplify(graph) == []
    names = [node.target.overloadpacket for node in graph.graph.nodes if isinstance(node.target, OpOverload)]
    assert names == [aten.relu, aten.relu, aten.exp, aten.add, aten.exp, aten.add]
