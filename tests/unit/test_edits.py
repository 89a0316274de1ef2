"""Edits of a live model: after any of them a call gives what eager gives, on every route, whenever the edit was made."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import fusepass
from fusepass.api.module import OptimizedModule
from fusepass.guards.edits import Code
from fusepass.report.report import CaptureRoute
from tests.support.interpreted import original_operators

Undo = Callable[[], object]
OutputTile = pytest.MonkeyPatch


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.act = nn.Softplus()
        self.gain = 1.5

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.act(self.linear(x)))

    def tail(self, x: Tensor) -> Tensor:
        return x * self.gain


def squash(x: Tensor) -> Tensor:
    return torch.tanh(x) * 0.7


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = Block()
        self.sequence = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.blocks = nn.ModuleList([Block(), Block()])
        self.named = nn.ModuleDict({"one": Block()})
        self.norm = nn.LayerNorm(4)
        self.function = torch.sin

    def forward(self, x: Tensor) -> Tensor:
        y = self.sequence(self.a(x))
        for block in self.blocks:
            y = block(y) + x
        for block in self.named.values():
            y = block(y)
        return squash(F.relu(self.norm(y)) + x.exp().clamp(max=3) - self.function(x))


class OfValues(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if y.sum() < 1e9 else -y


class HiddenFromDynamo(Net):
    @torch._dynamo.disable
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if y.sum() < 1e9 else -y


ROUTES: dict[CaptureRoute, Callable[[], Net]] = {
    CaptureRoute.TRACED: Net,
    CaptureRoute.DYNAMO: OfValues,
    CaptureRoute.CHILDREN: HiddenFromDynamo,
}


class Other(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cos() + 0.25


class OtherBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) - 0.5


class Called(Block):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) * 0.75  # type: ignore[no-any-return]


def moved(result: Tensor) -> Tensor:
    return result * 1.25 + 0.125


def after(module: nn.Module, args: Any, result: Tensor) -> Tensor:
    return moved(result)


def after_with_kwargs(module: nn.Module, args: Any, kwargs: Any, result: Tensor) -> Tensor:
    return moved(result)


def before(module: nn.Module, args: Any) -> Any:
    return (args[0] * 0.5,)


def before_with_kwargs(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return (args[0] * 0.5,), kwargs


def around(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`forward` as a library that wraps methods leaves it."""

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Tensor:
        return moved(forward(*args, **kwargs))

    return run


def _wrap_forward(module: nn.Module) -> None:
    module.forward = around(module.forward)


def _wrap_forward_of_an_instance(module: nn.Module) -> None:
    forward = type(module).forward
    module.forward = types.MethodType(lambda self, x: moved(forward(self, x)), module)


def _partial_forward(module: nn.Module) -> None:
    module.forward = functools.partial(around(type(module).forward), module)


def _in_dict(module: nn.Module) -> None:
    vars(module)["forward"] = around(module.forward)


def _swap_modules(net: Net) -> None:
    net.blocks[0], net.a = net.a, net.blocks[0]


def _shadow(net: Net) -> None:
    vars(net)["norm"] = torch.sin


def _wrap_method(net: Net) -> None:
    net.a.tail = around(net.a.tail)  # type: ignore[method-assign]


def _parametrized(net: Net) -> None:
    class Twice(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight * 2

    parametrize.register_parametrization(net.a.linear, "weight", Twice())


def _call_class(net: Net) -> None:
    net.a.__class__ = Called


EDITS: dict[str, Callable[[Net], object]] = {
    "a forward hook": lambda net: net.a.register_forward_hook(after),
    "a forward hook with kwargs": lambda net: net.a.register_forward_hook(after_with_kwargs, with_kwargs=True),
    "a forward hook that always runs": lambda net: net.a.register_forward_hook(after, always_call=True),
    "a forward hook of a leaf": lambda net: net.a.linear.register_forward_hook(after),
    "a forward hook in a list": lambda net: net.blocks[1].register_forward_hook(after),
    "a pre-hook": lambda net: net.a.act.register_forward_pre_hook(before),
    "a pre-hook with kwargs": lambda net: net.a.register_forward_pre_hook(before_with_kwargs, with_kwargs=True),
    "a hook of the model": lambda net: net.register_forward_hook(after),
    "a pre-hook of the model": lambda net: net.register_forward_pre_hook(before),
    "forward of the model": _wrap_forward,
    "forward of a module": lambda net: _wrap_forward(net.a),
    "forward of a leaf": lambda net: _wrap_forward(net.a.linear),
    "forward of a container": lambda net: _wrap_forward(net.sequence),
    "forward in a list": lambda net: _wrap_forward(net.blocks[1]),
    "a bound forward": lambda net: _wrap_forward_of_an_instance(net.a),
    "a partial forward": lambda net: _partial_forward(net.a),
    "a partial forward of the model": _partial_forward,
    "forward in a module's dict": lambda net: _in_dict(net.a.act),
    "another method": _wrap_method,
    "a function": lambda net: setattr(net, "function", torch.cos),
    "a module": lambda net: setattr(net, "a", Other()),
    "a module of the same class": lambda net: setattr(net, "a", Block()),
    "a leaf": lambda net: setattr(net.a, "act", nn.Tanh()),
    "a module in _modules": lambda net: net._modules.update(a=Other()),
    "modules swapped": _swap_modules,
    "a module hidden by an attribute": _shadow,
    "a list's item": lambda net: net.blocks.__setitem__(1, Other()),
    "a longer list": lambda net: net.blocks.append(Other()),
    "an inserted item": lambda net: net.blocks.insert(0, Other()),
    "a shorter list": lambda net: net.blocks.pop(0),
    "a new list": lambda net: setattr(net, "blocks", nn.ModuleList([Other()])),
    "a dict's item": lambda net: net.named.update({"one": Other()}),
    "a new item": lambda net: net.named.update({"two": Other()}),
    "an item less": lambda net: net.named.pop("one"),
    "a longer sequence": lambda net: net.sequence.append(Other()),
    "an inserted layer": lambda net: net.sequence.insert(1, Other()),
    "a shorter sequence": lambda net: net.sequence.pop(1),
    "a layer of a sequence": lambda net: net.sequence.__setitem__(1, Other()),
    "a class": lambda net: setattr(net.a, "__class__", OtherBlock),
    "a class with a call": _call_class,
    "a leaf's class": lambda net: setattr(net.a.act, "__class__", nn.Sigmoid),
    "a parameter": lambda net: setattr(net.a.linear, "weight", nn.Parameter(torch.eye(4))),
    "a parameter less": lambda net: setattr(net.a.linear, "bias", None),
    "a parameter's data": lambda net: setattr(net.a.linear.weight, "data", torch.eye(4)),
    "a number": lambda net: setattr(net.a, "gain", 3.0),
    "a parametrisation": _parametrized,
    "weight norm": lambda net: parametrizations.weight_norm(net.a.linear).parametrizations.weight.original0.data.mul_(
        2
    ),
    "spectral norm": lambda net: parametrizations.spectral_norm(net.a.linear),
    "old weight norm": lambda net: torch.nn.utils.weight_norm(net.a.linear).weight_g.data.mul_(2),  # type: ignore[operator,union-attr]
    "pruning": lambda net: prune.l1_unstructured(net.a.linear, "weight", amount=0.5),
}


def _patched_forward(kind: type[nn.Module]) -> Callable[[OutputTile], None]:
    return lambda output_tile: output_tile.setattr(kind, "forward", around(kind.forward))


def _after_every_module(module: nn.Module, args: Any, result: Any) -> Any:
    return moved(result) if isinstance(result, Tensor) else result


def _global_hook(output_tile: OutputTile) -> None:
    hooks = nn.modules.module._global_forward_hooks
    output_tile.setitem(hooks, -1, _after_every_module)


def _patched_call(output_tile: OutputTile) -> None:
    call = nn.Module.__call__
    output_tile.setattr(Block, "__call__", lambda self, x: moved(call(self, x)), raising=False)


def _patched_own_call(output_tile: OutputTile) -> None:
    call = nn.Module.__call__
    for kind in ROUTES.values():
        output_tile.setattr(kind, "__call__", lambda self, x: moved(call(self, x)), raising=False)


def _new_attribute_of_a_base(output_tile: OutputTile) -> None:
    output_tile.setattr(Block, "forward", lambda self, x: self.act(self.linear(x)).sin())


AROUND: dict[str, Callable[[OutputTile], object]] = {
    "forward of a class": _patched_forward(Block),
    "another forward of a class": _new_attribute_of_a_base,
    "forward of the model's class": _patched_forward(Net),
    "forward of nn.Linear": _patched_forward(nn.Linear),
    "forward of nn.Softplus": _patched_forward(nn.Softplus),
    "forward of nn.Sequential": _patched_forward(nn.Sequential),
    "a class's call": _patched_call,
    "the call of the model's class": _patched_own_call,
    "a method of a class": lambda output_tile: output_tile.setattr(Block, "tail", lambda self, x: x * 3),
    "a function of nn.functional": lambda output_tile: output_tile.setattr(F, "relu", around(F.relu)),
    "a function that nn.Linear calls": lambda output_tile: output_tile.setattr(F, "linear", around(F.linear)),
    "a function that nn.LayerNorm calls": lambda output_tile: output_tile.setattr(
        F, "layer_norm", around(F.layer_norm)
    ),
    "a function of torch": lambda output_tile: output_tile.setattr(torch, "tanh", around(torch.tanh)),
    "a function that a function calls": lambda output_tile: output_tile.setattr(torch, "relu", around(torch.relu)),
    "a method of tensors": lambda output_tile: output_tile.setattr(Tensor, "exp", around(Tensor.exp)),
    "a global function": lambda output_tile: output_tile.setitem(globals(), "squash", around(squash)),
    "a global module": lambda output_tile: output_tile.setitem(
        globals(), "F", types.SimpleNamespace(relu=torch.sigmoid)
    ),
    "a function's code": lambda output_tile: output_tile.setattr(
        squash, "__code__", (lambda x: torch.tanh(x) * 0.3).__code__
    ),
    "a hook for all modules": _global_hook,
}


@pytest.fixture(autouse=True)
def _quietly() -> Iterator[None]:
    with torch.no_grad(), original_operators():
        yield
    torch._dynamo.reset()


X = torch.linspace(-2, 2, 12).view(3, 4)


def agrees(optimised: OptimizedModule, model: nn.Module) -> Tensor:
    wanted: Tensor = model(X)
    for _ in range(3):
        torch.testing.assert_close(optimised(X), wanted)
    return wanted


def check(route: CaptureRoute, late: bool, edit: Callable[[Net], object], back: Callable[[], object]) -> None:
    model = ROUTES[route]()
    optimised = fusepass.optimize(model)
    old = agrees(optimised, model) if late else model(X)
    if late:
        assert optimised.report().capture is route
    undo = edit(model)
    new = agrees(optimised, model)
    assert not torch.equal(old, new)
    if hasattr(undo, "remove"):
        undo.remove()
        assert torch.equal(agrees(optimised, model), old)
    back()
    agrees(optimised, model)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.thinned(7)  # which has no factor of how many edits there are: each block of them gives others
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("late", [True, False])
@pytest.mark.invariant(44)
def test_an_edit_of_the_model_shows_in_the_next_call(edit: str, route: CaptureRoute, late: bool) -> None:
    check(route, late, EDITS[edit], lambda: None)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.thinned(6)
@pytest.mark.parametrize("edit", AROUND)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("late", [True, False])
@pytest.mark.invariant(44)
def test_an_edit_around_the_model_shows_in_the_next_call(edit: str, route: CaptureRoute, late: bool) -> None:
    with pytest.MonkeyPatch.context() as output_tile:
        check(route, late, lambda _: AROUND[edit](output_tile), lambda: None)


def test_what_another_thread_s_trace_puts_in_place_counts_for_nothing() -> None:
    """Neither if it is there when a call is compared, nor if it was there when the call was recorded."""
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())

    class Tracing(torch.fx.Tracer):
        def call_module(self, module: nn.Module, *rest: Any) -> Any:
            recorded.append(Code(model))
            assert before.unchanged()
            return super().call_module(module, *rest)

    before, recorded = Code(model), list[Code]()
    Tracing().trace(nn.Sequential(nn.ReLU()))
    (code,) = recorded
    assert code.unchanged()
    call = nn.Module.__call__
    try:
        nn.Module.__call__ = lambda *given: call(*given)  # type: ignore[method-assign]
        assert not code.unchanged()
        assert not before.unchanged()
    finally:
        nn.Module.__call__ = call  # type: ignore[method-assign]
    assert code.unchanged()


@pytest.mark.parametrize("home", ["torch.nn.of_a_test", "torchvision_of_a_test"])
def test_only_functions_in_pytorch_s_modules_count_as_put_in_place_of_its_own(home: str) -> None:
    """Packages whose names begin as PyTorch's does, such as torchvision, have functions of their own."""
    module = types.ModuleType(home)
    exec("def forward(self, x):\n    return squash(x)", vars(module))
    module.squash = squash  # type: ignore[attr-defined]
    model = type("Squashing", (nn.Module,), {"forward": module.forward})()
    assert Code(model, dynamo=True).calls_patched == (home == "torch.nn.of_a_test")
