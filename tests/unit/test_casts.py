"""Casts of a graph's inputs become one call for each type."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fusepass.compile.casts import cast_all, gather_casts

HALF = torch.bfloat16


def several(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, ...]:
    early = a.to(HALF)
    return (
        early @ b.to(HALF),
        (a * 2).to(HALF),
        c.to(HALF),
        d.to(torch.float64),
        b.to(HALF, memory_format=torch.contiguous_format),
    )


def test_casts_of_one_type_are_one_call() -> None:
    x = torch.randn(4, 4)
    inputs = x, torch.randn(4, 4).t(), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.randn(3)
    graph = make_fx(several, tracing_mode="fake")(*inputs)
    wanted = graph(*inputs)
    gather_casts(graph)
    calls = Counter(node.target for node in graph.graph.nodes)
    assert calls[cast_all] == 1
    assert calls[torch.ops.aten._to_copy.default] == 3, "what is computed, another type, and another layout stay"
    for result, each in zip(graph(*inputs), wanted, strict=True):
        assert torch.equal(result, each)
        assert (result.dtype, result.stride()) == (each.dtype, each.stride())


def test_a_step_under_autocast_casts_its_weights_at_once() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))
    compiled, x = torch.compile(model, backend="fusepass"), torch.randn(5, 8)

    def gradients(call: nn.Module) -> list[Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", HALF):
            result = call(x)
        result.float().square().mean().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    gradients(compiled)
    with torch.profiler.profile() as found:
        fused = gradients(compiled)
    names = Counter(event.name for event in found.events())
    assert names["aten::_foreach_copy_"] >= 1
    exact = [each.double() for each in gradients(model)]
    for result, each in zip(fused, exact, strict=True):
        torch.testing.assert_close(result.double(), each, rtol=2e-2, atol=2e-3)
