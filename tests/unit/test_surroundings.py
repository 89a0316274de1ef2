"""What forward reads and changes outside of its module, wherever Python lets it hide."""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import fusepass
from fusepass.capture.trace import CaptureFailure, capture
from fusepass.guards import surroundings

SCALE = 2.0
STEPS = 0
SEEN: list[Any] = []
LIBRARY: Any = types.ModuleType("library")
exec("SCALE = 2.0\ndef act(x): return x.tanh() * SCALE\n", LIBRARY.__dict__)


class Settings:
    scale = 2.0


def scaled(x: Tensor, by: float = 1.0) -> Tensor:
    return x.tanh() * SCALE * by


def of_the_method(self: nn.Module, x: Tensor) -> Tensor:
    return scaled(x) + 1


def decorated(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(function)
    def run(self: nn.Module, x: Tensor) -> Tensor:
        return function(self, x) * SCALE

    return run


class Plain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return scaled(x)


class Derived(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class OfALibrary(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return LIBRARY.act(x) + 1


class Property(nn.Module):
    @property
    def scale(self) -> float:
        return SCALE

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() * self.scale


class ClassMethod(nn.Module):
    @classmethod
    def scale(cls) -> float:
        return SCALE

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() * self.scale()


class Decorated(nn.Module):
    @decorated
    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() + 1


class OfAClass(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() * Settings.scale


class Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.function = functools.partial(scaled, by=3.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x) + 1


def with_forward(make: Callable[[nn.Module], Any]) -> nn.Module:
    model = nn.Identity()
    model.forward = make(model)
    return model


READERS: dict[str, Callable[[], nn.Module]] = {
    "super": Derived,
    "library": OfALibrary,
    "property": Property,
    "class method": ClassMethod,
    "decorator": Decorated,
    "attribute of a class": OfAClass,
    "partial": Holds,
    "bound forward": lambda: with_forward(lambda model: types.MethodType(of_the_method, model)),
    "partial forward": lambda: with_forward(lambda model: functools.partial(of_the_method, model)),
}


@pytest.mark.parametrize("reader", READERS)
@torch.no_grad()
@pytest.mark.invariant(3)
def test_what_changes_around_is_noticed(reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = READERS[reader](), torch.randn(3, 4)
    optimised = fusepass.optimize(model, tune="off")
    first = optimised(x)
    for owner, name in ((globals(), "SCALE"), (vars(LIBRARY), "SCALE")):
        monkeypatch.setitem(owner, name, 5.0)
    monkeypatch.setattr(Settings, "scale", 5.0)
    torch.testing.assert_close(optimised(x), model(x))
    assert not torch.equal(optimised(x), first)


@torch.no_grad()
def test_each_class_has_its_own_value_for_a_method_of_their_base() -> None:
    class Base(nn.Module):
        slope = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return x * self.slope + 1

    class First(Base):
        slope = 2.0

    class Second(Base):
        slope = 3.0

    x, model = torch.ones(3), nn.Sequential(First(), Second())
    optimised = fusepass.optimize(model, tune="off")
    for kind in (First, Second, Base):
        torch.testing.assert_close(optimised(x), model(x))
        kind.slope += 1
    torch.testing.assert_close(optimised(x), model(x))


@torch.no_grad()
def test_a_method_that_its_class_gets_anew_is_noticed() -> None:
    class Base(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * 2 + 1

        def inner(self, x: Tensor) -> Tensor:
            return x

    class Model(Base):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 3

    x, model = torch.randn(3), Model()
    optimised = fusepass.optimize(model, tune="off")
    changes: tuple[tuple[type, str, Any], ...] = (
        (Base, "inner", lambda self, x: x + 5),
        (Model, "inner", lambda self, x: x + 6),
        (Base, "forward", lambda self, x: self.inner(x) * 7),
        (Model, "forward", lambda self, x: self.inner(x) * 8),
    )
    for kind, name, method in changes:
        optimised(x)
        setattr(kind, name, method)
        torch.testing.assert_close(optimised(x), model(x))


def test_only_what_may_change_is_read_at_each_call() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.activation = torch.relu

        def forward(self, x: Tensor) -> Tensor:
            return self.activation(nn.functional.gelu(self.layer(x)).view(x.shape))

    for model in (nn.Sequential(nn.Linear(4, 4), nn.GELU()), Model()):
        around = surroundings.Surroundings(model)
        assert not around.readers
        assert not around.settings
    assert [read() for (kind, _), read in around.methods.items() if kind is Model] == [Model.forward]
    noted = {name for entries, names in around.spaces.values() for name in names if entries is vars(nn.functional)}
    assert {"gelu", "linear"} <= noted


class Counts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        global STEPS
        STEPS += 1
        return x.tanh() * STEPS


class CountsInClass(nn.Module):
    steps = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).steps += 1
        return x.tanh() * self.steps


class SetsInClass(nn.Module):
    last: ClassVar[Any]

    def forward(self, x: Tensor) -> Tensor:
        type(self).last = x.shape
        return x.tanh() + 1


class Appends(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(x.mean())
        return x.tanh() * len(SEEN)


class CountsInDefault(nn.Module):
    def forward(self, x: Tensor, counts: dict[str, int] = {"n": 0}) -> Tensor:  # noqa: B006
        counts["n"] += 1
        return x.tanh() * counts["n"]


def counts_in_closure() -> nn.Module:
    steps = 0

    class Closure(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal steps
            steps += 1
            return x.tanh() * steps

    return Closure()


@pytest.fixture(autouse=True)
def _afresh() -> Iterator[None]:
    yield
    globals()["STEPS"] = CountsInClass.steps = CountsInDefault.forward.__defaults__[0]["n"] = 0  # type: ignore[index]
    SEEN.clear()
    if "last" in vars(SetsInClass):
        del SetsInClass.last


WRITERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "global": (Counts, "global STEPS"),
    "class": (CountsInClass, "CountsInClass.steps"),
    "class at first": (SetsInClass, "SetsInClass.last"),
    "list": (Appends, "global SEEN"),
    "default": (CountsInDefault, "a default of forward['n']"),
    "closure": (counts_in_closure, "steps of a closure"),
}


@torch.no_grad()
def test_what_an_installed_package_remembers_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages keep what they computed once, by a key, in globals of theirs."""
    home = tmp_path / "site-packages"
    home.mkdir()
    text = "known = {}\ndef act(x):\n    known[type(x)] = True\n    return x.tanh() * 2\n"
    (home / "remembering.py").write_text(text)
    monkeypatch.syspath_prepend(str(home))
    package = importlib.import_module("remembering")

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return package.act(x) + 1  # type: ignore[no-any-return]

    failure = capture(Model(), (torch.ones(3),), {})
    assert not isinstance(failure, CaptureFailure), failure
    assert package.known


@pytest.mark.parametrize("writer", WRITERS)
@torch.no_grad()
@pytest.mark.invariant(2)
def test_what_forward_changes_around_is_put_back_and_declined(writer: str) -> None:
    make, text = WRITERS[writer]
    model, x = make(), torch.ones(3)
    failure = capture(model, (x,), {})
    assert isinstance(failure, CaptureFailure)
    assert failure.reason == f"forward changes Python state: {text}"
    assert not STEPS
    assert not SEEN
    assert not CountsInClass.steps
    assert "last" not in vars(SetsInClass)
    torch.testing.assert_close(model(x), x.tanh() + 1 if make is SetsInClass else x.tanh())


@torch.no_grad()
def test_what_forward_counts_around_is_counted_at_each_call() -> None:
    optimised, x = fusepass.optimize(Counts(), tune="off"), torch.ones(3)
    for step in range(1, 5):
        torch.testing.assert_close(optimised(x), x.tanh() * step)
    assert STEPS == 4
