"""Methods of a model that call its forward, called on the optimised one."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusepass
from fusepass.api.methods import twin
from fusepass.errors import FusepassWarning

pytestmark = pytest.mark.usefixtures("without_gradients")


class Base(nn.Module):
    def repeat(self, x: Tensor, times: int = 2) -> Tensor:
        """Calls forward so many times."""
        for _ in range(times):
            x = self(x)
        return x


class Net(Base):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.calls = 0

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.norm(torch.nn.functional.gelu(x)) * scale

    def repeat(self, x: Tensor, times: int = 2) -> Tensor:
        assert isinstance(self, Net)
        self.calls += 1
        return super().repeat(x, times)

    def me(self) -> Any:
        return self

    def count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())


X = torch.rand(3, 8)


def test_a_method_that_bypasses_the_optimised_forward_is_told_once() -> None:
    model = Net()
    optimised = fusepass.optimize(model, methods="original", tune="off")
    with pytest.warns(FusepassWarning, match=r"Net\.repeat runs the original forward.*methods=\"original\"") as caught:
        assert torch.equal(optimised.repeat(X), model.repeat(X))
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimised.repeat(X, times=1)
        assert optimised.count() == 16
        optimised.get_submodule("norm")
    assert optimised.report().regions == ()
    assert not model._forward_pre_hooks


def test_what_a_method_raises_is_raised_and_leaves_no_hook() -> None:
    optimised = fusepass.optimize(Net(), methods="original", tune="off")
    with pytest.warns(FusepassWarning, match="runs the original forward"), pytest.raises(RuntimeError):
        optimised.repeat(torch.rand(3, 7))
    assert not optimised.original._forward_pre_hooks


def test_methods_run_the_optimised_forward() -> None:
    """With `super` and `isinstance`; what they assign is the original's."""
    model = Net()
    optimised = fusepass.optimize(model, tune="off")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(optimised.repeat(X, times=3), model.repeat(X, times=3))
    (region,) = optimised.report().regions
    assert "layer_norm" in region.name
    assert model.calls == optimised.calls == 2
    model.norm.weight.data.fill_(2.0)
    torch.testing.assert_close(optimised.repeat(X), model.repeat(X))
    seen = []
    handle = model.register_forward_hook(lambda *_: seen.append(1))
    optimised.repeat(X)
    assert len(seen) == 2
    handle.remove()


def test_what_a_method_takes_for_the_model_is_the_model_in_all_but_forward() -> None:
    model = Net()
    optimised = fusepass.optimize(model, tune="off")
    bound = optimised.me()
    assert (type(bound).__name__, isinstance(bound, Net), bound.norm is model.norm) == ("Net", True, True)
    assert optimised.me() is bound
    bound.extra = nn.Linear(1, 1)
    assert model.extra is bound.extra
    copied = copy.deepcopy(bound)
    assert type(copied) is Net
    assert copied.norm.weight is not model.norm.weight
    assert (type(copy.copy(bound)), copy.copy(bound).norm is model.norm) == (Net, True)
    assert type(copy.deepcopy(optimised).me()) is not type(bound)


def test_a_twin_is_pickled_as_the_original() -> None:
    """Of a class that can be imported, with a method that gives what it is bound to."""
    made = twin(nn.Sequential(nn.Linear(2, 2)), nn.Identity())
    loaded = pickle.loads(pickle.dumps(made))
    assert type(loaded) is nn.Sequential
    assert torch.equal(loaded[0].weight, made[0].weight)


def test_nothing_is_fused_or_told_where_fusing_is_off() -> None:
    optimised = fusepass.optimize(Net(), disable="all")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimised.repeat(X)
    assert optimised.me() is optimised.original
