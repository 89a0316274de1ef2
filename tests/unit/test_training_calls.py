"""What AOTAutograd calls: gradients, saved tensors and sizes that are others than in the call before; what was written meanwhile."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from fusepass.runtime.fast_path import wait
from fusepass.training import backend, calls
from fusepass.training.backend import Backend
from fusepass.training.gradients import BENDS, DECOMPOSITIONS
from fusepass.training.joint import minimum_cut


@pytest.fixture(autouse=True, params=["as on a CPU", "as on a GPU"])
def _device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "as on a GPU":
        monkeypatch.setattr(backend, "partition_joint", minimum_cut)
        monkeypatch.setattr(backend, "DECOMPOSITIONS", DECOMPOSITIONS | BENDS)
    torch._dynamo.reset()
    wait()


class _Watch(TorchDispatchMode):
    """A mode that does nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _compiled(model: Any) -> Any:
    return torch.compile(model, backend=Backend("graph", {"tune": "off"}))


def _image_model() -> nn.Module:
    norm, relu = nn.BatchNorm2d(6), nn.ReLU()
    model = nn.Sequential(nn.Conv2d(3, 6, 3), norm, relu, nn.Conv2d(6, 4, 3), nn.GELU(), nn.MaxPool2d(2))
    return model.to(memory_format=torch.channels_last)


def _turned(x: Tensor) -> Tensor:
    """The same elements, laid out in another order."""
    return x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim()))) if x.dim() else x


HOOKS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": nullcontext,
    "contiguous": lambda: saved_tensors_hooks(lambda x: x, lambda x: x.detach().contiguous()),
    "turned": lambda: saved_tensors_hooks(_turned, lambda x: x),
    "copied": lambda: torch.autograd.graph.save_on_cpu(),
}


def _step(model: Callable[..., Tensor], x: Tensor, gradient: Callable[[Tensor], Tensor], hooks: str) -> list[Tensor]:
    leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    with HOOKS[hooks]():
        result = model(leaf)
    result.backward(gradient(torch.linspace(-1, 1, result.numel()).view(result.shape)))
    assert leaf.grad is not None
    return [result.detach(), leaf.grad]


GRADIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "repeated": lambda x: torch.ones(()).expand(x.shape),
    "in gaps": lambda x: x[..., None].expand(*x.shape, 2).clone()[..., 0],
    "unaligned": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    "zeros that nobody wrote": lambda x: torch._efficientzerotensor(x.shape),
}


@pytest.mark.invariant(22)
def test_backward_takes_what_comes() -> None:
    """Gradients and saved tensors in any layout, in any call: once what comes each time is known, and before."""
    model, x = _image_model(), torch.randn(2, 3, 10, 10).to(memory_format=torch.channels_last)
    twin = copy.deepcopy(model)
    run = _compiled(model)
    orders = [("channels last", "none"), *((name, "none") for name in GRADIENTS), *(("plain", name) for name in HOOKS)]
    for gradient, hooks in [*orders, *reversed(orders)]:
        for found, wanted in zip(
            _step(run, x, GRADIENTS[gradient], hooks), _step(twin, x, GRADIENTS[gradient], hooks), strict=True
        ):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    for parameter, wanted in zip(model.parameters(), twin.parameters(), strict=True):
        assert parameter.grad is not None
        assert wanted.grad is not None
        cancelled = 2e-3  # of a bias before a normalisation nothing but rounding errors is left
        torch.testing.assert_close(parameter.grad, wanted.grad, rtol=1e-3, atol=cancelled)


def test_the_first_gradient_is_odd() -> None:
    model, x = _image_model(), torch.randn(2, 3, 10, 10).to(memory_format=torch.channels_last)
    twin, run = copy.deepcopy(model), _compiled(model)
    for gradient in ("in gaps", "zeros that nobody wrote", "plain", "in gaps"):
        pairs = zip(
            _step(run, x, GRADIENTS[gradient], "turned"), _step(twin, x, GRADIENTS[gradient], "turned"), strict=True
        )
        for found, wanted in pairs:
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("written", ["weight", "result"])
@pytest.mark.invariant(22)
def test_what_is_saved_and_written_is_noticed(written: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.sigmoid(self.last(torch.tanh(self.first(x))))

    model = Model()
    for run in (model, _compiled(model)):
        for _ in range(3):
            result = run(torch.randn(3, 6))
            with torch.no_grad():
                (result if written == "result" else model.last.weight).mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                result.sum().backward()


@pytest.mark.thinned(3)  # both ways to watch, both devices
@pytest.mark.parametrize("first", ["plain", "watched"])
def test_sizes_that_came_before_are_not_described_again(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where AOTAutograd watches the first call by a mode, as it does for custom operators."""
    model = nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.LayerNorm(5))
    twin = copy.deepcopy(model)
    run = torch.compile(model, backend=Backend("graph", {"tune": "off"}), dynamic=True)
    described: list[object] = []
    key = calls._shape_key
    monkeypatch.setattr(calls, "_shape_key", lambda argument: described.append(argument) or key(argument))
    for number, rows in enumerate([3, 5, 7, 5, 3, 7, 3]):
        described.clear()
        x = torch.randn(rows, 6)
        for each in (run, twin):
            each(x).square().sum().backward()
        assert bool(described) == (number < 3)
    for parameter, wanted in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, wanted.grad, rtol=1e-3, atol=1e-4)
