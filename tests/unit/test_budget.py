"""The memory budget: less is saved where less is allowed, and what is computed again is what it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch import config
from torch.autograd.graph import saved_tensors_hooks

import fusepass
from fusepass.training.backend import Backend

BUDGETS = [1.0, 0.6, 0.0]


class Model(nn.Module):
    """Products, functions, a normalisation, dropout, attention and a comparison."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(24, 48), nn.LayerNorm(48), nn.Linear(48, 24)

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(F.gelu(self.norm(self.first(x))), 0.3) + 1
        z = torch.tanh(self.last(y))
        z = F.scaled_dot_product_attention(z, z.sin(), z.cos())
        return z.exp().amax(-1) + z.square().mean(-1)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def _step(call: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> tuple[int, list[Tensor]]:
    """Bytes of what forward saves beside parameters and input, and gradients."""
    given = {x.data_ptr(), *(parameter.data_ptr() for parameter in model.parameters())}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in given:
            saved[memory.data_ptr()] = memory.nbytes()
        return tensor

    torch.manual_seed(5)
    model.zero_grad()
    x.grad = None
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = call(x)
    result.sum().backward()
    assert x.grad is not None
    return sum(saved.values()), [
        x.grad,
        *(parameter.grad for parameter in model.parameters() if parameter.grad is not None),
    ]


@pytest.mark.parametrize("way", ["backend", "optimize", "PyTorch's setting"])
def test_less_is_saved_at_lower_budgets(way: str) -> None:
    model, x = Model(), torch.randn(4, 12, 24, requires_grad=True)
    found = []
    for budget in BUDGETS:
        torch._dynamo.reset()
        if way == "PyTorch's setting":
            with config.patch(activation_memory_budget=budget):
                found.append(_step(torch.compile(model, backend=Backend("graph", {"tune": "off"})), model, x))
            continue
        options = {"tune": "off", "memory_budget": budget}
        if way == "backend":
            call: Callable[[Tensor], Tensor] = torch.compile(model, backend="fusepass", options=options)
        else:
            call = fusepass.optimize(model, training="fused", **options)
        found.append(_step(call, model, x))
    _, wanted = _step(model, model, x)
    sizes = [size for size, _ in found]
    assert sizes[0] > 1.3 * sizes[1] > 1.3 * sizes[2] > 0, sizes
    for _, gradients in found:
        for mine, eager in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(mine, eager, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("budget", BUDGETS)
def test_what_was_dropped_stays_dropped(budget: float) -> None:
    compiled = torch.compile(
        lambda x: F.dropout(x.sin() + 3, 0.4).exp() * 2,
        backend=Backend("graph", {"memory_budget": budget, "tune": "off"}),
    )
    x = torch.rand(40, 50, requires_grad=True)
    result = compiled(x)
    result.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad == 0, result == 2)
    assert 0.3 < (result == 2).float().mean() < 0.5


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.invariant(22)
def test_what_is_compared_has_its_bits(budget: float) -> None:
    """One element of each row is the largest, by the bits that forward found."""
    compiled = torch.compile(
        lambda x: (F.layer_norm(x, (50,)).exp() * x.tanh()).amax(-1),
        backend=Backend("graph", {"memory_budget": budget, "tune": "off"}),
    )
    x = torch.randn(200, 50)
    probe = torch.zeros(200, 50, requires_grad=True)
    compiled(x + probe).sum().backward()
    eager = torch.zeros(200, 50, requires_grad=True)
    (F.layer_norm(x + eager, (50,)).exp() * (x + eager).tanh()).amax(-1).sum().backward()
    torch.testing.assert_close(probe.grad, eager.grad, rtol=1e-3, atol=1e-4)
