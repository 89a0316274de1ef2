"""What torch.compile traces of an optimised module: the kernels made for it as it is now, else the original."""

from __future__ import annotations

import copy
import enum
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fusepass

X = torch.randn(4, 8)
GLOBAL = 2.0


class Mode(enum.Enum):
    ONE = 1
    TWO = 2


class Model(nn.Module):
    """Reads all kinds of state."""

    def __init__(self) -> None:
        super().__init__()
        self.act: nn.Module = nn.GELU()
        self.linear = nn.Linear(8, 8)
        self.factors = [2.0, 0.0]
        self.shift = {"by": 1.0}
        self._scale = 3.0
        self.sign = 1.0
        self.mode = Mode.ONE
        self.last: Callable[[Tensor], Tensor] = torch.sigmoid
        self.kind: type = int

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.linear(x)) * self.factors[0] + self.shift["by"]
        x = x * math.copysign(self._scale, self.factors[1]) / torch.ones(8)
        x = x + 4 if self.kind is float else x
        return self.last(x * self.sign if self.mode is Mode.ONE else x)


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield


class Traced:
    """A torch.compile backend that keeps the graphs."""

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []

    def __call__(self, graph: fx.GraphModule, inputs: Any) -> Any:
        self.graphs.append(graph)
        return graph

    @property
    def fused(self) -> bool:
        """Whether the last one has a kernel."""
        return any("fusepass" in str(node.target) for node in self.graphs[-1].graph.nodes)


def _hooked(model: Model) -> None:
    model.linear.register_forward_hook(lambda module, args, result: result * 2)


def _other_forward(model: Model) -> None:
    model.forward = lambda x: x - 1  # type: ignore[method-assign]


CHANGES: dict[str, Callable[[Model], object]] = {
    "another module": lambda model: setattr(model, "act", nn.Tanh()),
    "a module of the same class": lambda model: setattr(model, "linear", nn.Linear(8, 8)),
    "an attribute of a module": lambda model: setattr(model.act, "approximate", "tanh"),
    "a private attribute": lambda model: setattr(model, "_scale", 7.0),
    "an entry of a list": lambda model: model.factors.__setitem__(0, 5.0),
    "an entry of a dict": lambda model: model.shift.__setitem__("by", 9.0),
    "another type of number": lambda model: setattr(model, "sign", -1),
    "a member of an enum": lambda model: setattr(model, "mode", Mode.TWO),
    "a function": lambda model: setattr(model, "last", torch.tanh),
    "a class": lambda model: setattr(model, "kind", float),
    "no bias": lambda model: setattr(model.linear, "bias", None),
    "forward": _other_forward,
    "a hook": _hooked,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
@pytest.mark.thinned(3)
def test_changes_are_noticed_before_and_after_compiling(change: Callable[[Model], object]) -> None:
    model, traced = Model(), Traced()
    opt = fusepass.optimize(model, (X,))
    compiled = torch.compile(opt, backend=traced, fullgraph=True)
    torch.testing.assert_close(compiled(X), model(X))
    assert traced.fused
    change(model)
    torch.testing.assert_close(compiled(X), model(X))
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(opt, backend=traced)(X), model(X))
    assert not traced.fused


def test_the_sign_of_zero_is_noticed() -> None:
    model, traced = Model(), Traced()
    opt = fusepass.optimize(model, (X,))
    model.factors[1] = -0.0
    torch.testing.assert_close(torch.compile(opt, backend=traced, fullgraph=True)(X), model(X))
    assert not traced.fused


def test_tied_parameters_that_part() -> None:
    model, traced = Model(), Traced()
    model.extra = nn.Module()
    model.extra.bias = model.linear.bias
    opt = fusepass.optimize(model, (X,))
    compiled = torch.compile(opt, backend=traced, fullgraph=True)
    torch.testing.assert_close(compiled(X), model(X))
    assert traced.fused
    model.linear.bias = nn.Parameter(torch.full((8,), 3.0))
    torch.testing.assert_close(compiled(X), model(X))
    assert not traced.fused


def test_the_default_dtype_is_noticed() -> None:
    model, traced = Model(), Traced()
    compiled = torch.compile(fusepass.optimize(model, (X,)), backend=traced, fullgraph=True)
    compiled(X)
    assert traced.fused
    torch.set_default_dtype(torch.float64)
    try:
        result, expected = compiled(X), model(X)
    finally:
        torch.set_default_dtype(torch.float32)
    assert result.dtype is expected.dtype is torch.float64
    torch.testing.assert_close(result, expected)


class Global(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * GLOBAL


def test_globals_are_left_to_dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    model, traced = Global(), Traced()
    opt = fusepass.optimize(model, (X,))
    monkeypatch.setitem(globals(), "GLOBAL", 5.0)
    compiled = torch.compile(opt, backend=traced, fullgraph=True)
    torch.testing.assert_close(compiled(X), torch.tanh(X) * 5)
    monkeypatch.setitem(globals(), "GLOBAL", 6.0)
    torch.testing.assert_close(compiled(X), torch.tanh(X) * 6)


def test_what_cannot_be_compared_is_left_to_dynamo() -> None:
    model, traced = Model(), Traced()
    vars(model)["anything"] = object()
    opt = fusepass.optimize(model, (X,))
    torch.testing.assert_close(torch.compile(opt, backend=traced, fullgraph=True)(X), model(X))
    assert not traced.fused


class Times(nn.Module):
    def forward(self, x: Tensor, k: float) -> Tensor:
        return torch.sigmoid(torch.tanh(x)) * k


def test_numbers_that_are_given_differ_by_type_and_sign() -> None:
    model, traced = Times(), Traced()
    opt = fusepass.optimize(model)
    numbers = (2.0, 2, 0.0, -0.0, 1.0, 1, True)
    for k in numbers:
        opt(X, k)
    for k in numbers:
        torch._dynamo.reset()
        result, expected = torch.compile(opt, backend=traced, fullgraph=True)(X, k), model(X, k)
        assert torch.equal(result.signbit(), expected.signbit())
        torch.testing.assert_close(result, expected)
        assert traced.fused is (k != 0)
    torch._dynamo.reset()
    compiled = torch.compile(opt, backend="eager")
    for k in (3.0, 4.0, *numbers):
        assert torch.equal(compiled(X, k).signbit(), model(X, k).signbit())


# ---- compile


def test_compile_in_place_compiles_the_optimised_module() -> None:
    model, traced = Model(), Traced()
    opt = fusepass.optimize(model, (X,))
    expected = opt(X)  # from here on a shorter way serves
    opt(X)
    before = dict(vars(model))
    opt.compile(backend=traced, fullgraph=True)
    torch.testing.assert_close(opt(X), expected)
    assert traced.fused
    torch.testing.assert_close(opt(x=X), expected)
    assert vars(model) == before
    count = len(traced.graphs)
    torch.testing.assert_close(model(X), expected)
    assert len(traced.graphs) == count
    model.act = nn.Tanh()
    torch.testing.assert_close(opt(X), model(X))
    assert len(traced.graphs) == count + 1


def test_hooks_run_once_around_what_is_compiled_in_place() -> None:
    opt = fusepass.optimize(Model(), (X,))
    expected = opt(X)
    opt.compile(backend="eager")
    opt.register_forward_hook(lambda module, args, result: result * 2)
    torch.testing.assert_close(opt(X), expected * 2)


def test_copies_are_not_compiled() -> None:
    traced = Traced()
    opt = fusepass.optimize(Model(), (X,))
    opt.compile(backend=traced)
    for other in (copy.deepcopy(opt), copy.copy(opt), pickle.loads(pickle.dumps(opt))):
        torch.testing.assert_close(other(X), opt.original(X))
    assert not traced.graphs


class Unusual(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) + 1


def test_compile_in_place_of_a_class_with_a_call_of_its_own() -> None:
    model, traced = Unusual(), Traced()
    opt = fusepass.optimize(model)
    before = dict(vars(model))
    opt.compile(backend=traced)
    torch.testing.assert_close(opt(X), X * 2 + 1)
    assert len(traced.graphs) == 1
    assert vars(model) == before
