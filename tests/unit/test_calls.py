"""Which calls need no Python on the way to what serves them: counted, not timed; and that what serves them is right."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fusepass
from fusepass.api.module import OptimizedModule
from fusepass.compile.pipeline import CompiledGraph
from fusepass.dispatch.specialisation import Specialisation
from fusepass.dispatch.specialise import Specialiser
from fusepass.errors import FusepassWarning
from fusepass.runtime import fast_path
from fusepass.runtime.fast_path import MISSED

pytestmark = pytest.mark.filterwarnings("ignore::fusepass.errors.FusepassWarning")

T, U, V = torch.randn(3, 5), torch.randn(3, 5), torch.randn(3, 5)


@pytest.fixture(autouse=True)
def _ready() -> Iterator[None]:
    fast_path.wait()
    with torch.no_grad():
        yield


def optimised(model: nn.Module) -> OptimizedModule:
    return fusepass.optimize(model, tune="off", training="eager")


def served(fused: OptimizedModule, *args: Any, **kwargs: Any) -> Any:
    """The result of a call that needs no Python to find what serves it."""
    asked = mock.Mock(side_effect=AssertionError("Python was asked"))
    with mock.patch.object(Specialiser, "__call__", asked), mock.patch.object(Specialisation, "serve", asked):
        return fused(*args, **kwargs)


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclasses.dataclass
class Record:
    first: Tensor
    factor: float
    second: Tensor


class Any3(nn.Module):
    """Takes anything with three tensors in it."""

    def __init__(self, take: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> None:
        super().__init__()
        self.take = take

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        a, b, c = self.take(*args, **kwargs)
        return torch.tanh(a * b + c) * 2


def three(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return a, b, c


def nested(pair: Any, more: dict[str, Any], factor: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    return pair[0], pair[1] * factor, more["c"]


def record(given: Record, more: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return given.first, given.second * given.factor, more


STORAGE = torch.randn(40)
FORMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "three": (three, (T, U, V), {}),
    "one thrice": (three, (T, T, T), {}),
    "one twice": (three, (T, U, T), {}),
    "named": (three, (T,), {"b": U, "c": V}),
    "one, named, too": (three, (T,), {"b": T, "c": U}),
    "views": (three, (T, T.view(3, 5), T.detach()), {}),
    "views that overlap": (three, tuple(STORAGE[i : i + 15].view(3, 5) for i in (0, 4, 16)), {}),
    "nested": (nested, ((T, U), {"c": V}), {"factor": 2.0}),
    "one everywhere": (nested, ([T, T], {"c": T}), {}),
    "a named tuple": (nested, (Pair(T, U), {"c": T}), {}),
    "a dataclass": (record, (Record(T, 2.0, T), U), {}),
}


@pytest.mark.parametrize("form", FORMS)
def test_calls_of_any_form_need_no_python(form: str) -> None:
    take, args, kwargs = FORMS[form]
    model = Any3(take)
    fused, wanted = optimised(model), model(*args, **kwargs)
    for _ in range(2):
        torch.testing.assert_close(fused(*args, **kwargs), wanted)
    (made,) = fused._specialiser.table
    assert made.pays
    before = made.quick.count()
    for _ in range(3):
        torch.testing.assert_close(served(fused, *args, **kwargs), wanted)
    assert made.quick.count() == before + 3


class Scaled(nn.Module):
    def forward(self, x: Tensor, *, y: Any, scale: Any = 1.0) -> Tensor:
        factor = {"half": 0.5}.get(scale, scale) if isinstance(scale, str) else scale
        text = 1.0 if type(factor) is bool else 2.0
        return torch.atan2(torch.tanh(x * y["y"]) * 0, torch.tensor(factor) * torch.ones_like(x)) + text * factor


def test_values_among_the_arguments_are_compared() -> None:
    model = Scaled()
    fused = optimised(model)
    values: list[Any] = [1.0, 1, True, 0.0, -0.0, "half", 2.0]
    for value in values * 3:
        torch.testing.assert_close(fused(T, y={"y": U}, scale=value), model(T, y={"y": U}, scale=value))
    for value in values:
        torch.testing.assert_close(
            served(fused, T, y={"y": U}, scale=value), model(T, y={"y": U}, scale=value), rtol=0, atol=1e-6
        )
    door = fused._table.door
    assert door((T,), {"y": {"y": U}, "scale": 2.0}) is not MISSED
    for other in [{"y": {"z": U}}, {"y": {"y": U, "z": U}}, {"y": [U]}, {"y": {"y": 1.0}}, {"y": {"y": U[:1]}}]:
        assert door((T,), {**other, "scale": 2.0}) is MISSED
    assert door((T,), {"y": {"y": T}, "scale": 2.0}) is MISSED  # one tensor twice
    assert door((T,), {"y": {"y": U}, "scale": 3.0}) is MISSED
    assert door((T,)) is MISSED


class Same(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.tanh(a * 2) if a is b else torch.sigmoid(a * b)


class Writes(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        a.mul_(2)
        return torch.tanh(b * 2) + 1


class Views(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return a.t(), b.view(-1), torch.tanh(a * b), a


@pytest.mark.parametrize("first", ["one", "two"])
@pytest.mark.invariant(54)
def test_forward_may_ask_whether_two_are_the_same(first: str) -> None:
    model = Same()
    fused = optimised(model)
    for a, b in [(T, T), (T, U)] * 2 if first == "one" else [(T, U), (T, T)] * 2:
        torch.testing.assert_close(fused(a, b), model(a, b))
    for a, b in [(U, U), (U, V)]:
        torch.testing.assert_close(served(fused, a, b), model(a, b))


@pytest.mark.invariant(54)
def test_what_is_written_is_written_in_all_places_of_one_tensor() -> None:
    model = Writes()
    fused = optimised(model)
    for _ in range(4):
        x, y = T.clone(), T.clone()
        torch.testing.assert_close(fused(x, x), model(y, y))
        torch.testing.assert_close(x, y)
        x, y = T.clone(), T.clone()
        torch.testing.assert_close(fused(x, U), model(y, U))
        torch.testing.assert_close(x, y)
        x, y = T.clone(), T.clone()
        torch.testing.assert_close(fused(x, x.view(3, 5)), model(y, y.view(3, 5)))
        torch.testing.assert_close(x, y)


def test_results_that_are_views_are_those_of_the_right_input() -> None:
    fused = optimised(Views())
    for inputs in [(T, U), (T, T), (U, T), (T, T.view(3, 5))] * 3:
        across, flat, product, itself = fused(*inputs)
        assert across.data_ptr() == inputs[0].data_ptr()
        assert flat.data_ptr() == inputs[1].data_ptr()
        assert across._base is inputs[0]
        assert flat._base is (T if inputs[1]._base is T else inputs[1])
        assert itself is inputs[0] or itself.data_ptr() == inputs[0].data_ptr()
        torch.testing.assert_close(product, torch.tanh(inputs[0] * inputs[1]))


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.weight + x)


def test_a_parameter_may_be_passed_as_well() -> None:
    model = Weighted().requires_grad_(False)
    fused = optimised(model)
    for _ in range(3):
        torch.testing.assert_close(fused(model.weight), model(model.weight))
        torch.testing.assert_close(fused(T), model(T))
    torch.testing.assert_close(served(fused, model.weight), model(model.weight))
    model.weight = nn.Parameter(torch.ones(3, 5), requires_grad=False)
    torch.testing.assert_close(fused(model.weight), model(model.weight))


def test_attention_to_itself_needs_no_python() -> None:
    model = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    fused, x = optimised(model), torch.randn(2, 3, 8)
    for _ in range(2):
        fused(x, x, x)
    for result, wanted in zip(served(fused, x, x, x), model(x, x, x), strict=True):
        torch.testing.assert_close(result, wanted)


def test_more_sizes_than_few() -> None:
    model = Any3(three)
    fused = optimised(model)
    sizes = [torch.randn(size, 5) for size in range(1, 10)]
    for x in sizes * 2:
        fused(x, x, x)
    for x in sizes * 2:
        torch.testing.assert_close(served(fused, x, x, x), model(x, x, x))


# Calls that record gradients


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(5, 5), nn.Tanh())

    def forward(self, x: Any, *, more: Any = None) -> Tensor:
        y: Tensor = self.inner(x) * 2 + 1
        return y if more is None else y * more["factor"]


def counted(fused: OptimizedModule, reason: str = "needs gradients") -> int:
    return sum(record.count for record in fused.report().fallbacks if record.reason == reason)


@torch.enable_grad()
@pytest.mark.parametrize("asks", ["a parameter", "an input", "a named input"])
@pytest.mark.invariant(55)
def test_calls_that_record_gradients_need_no_python(asks: str) -> None:
    model = Small().requires_grad_(asks == "a parameter")
    fused = optimised(model)
    x = T.clone().requires_grad_(asks == "an input")
    kwargs = {"more": {"factor": U.clone().requires_grad_()}} if asks == "a named input" else {}
    with pytest.warns(FusepassWarning, match="needs gradients"):
        fused(x, **kwargs)
    for size in (3, 2, 1):  # whatever the sizes
        given = {"more": {"factor": kwargs["more"]["factor"][:size]}} if kwargs else {}
        result = served(fused, x[:size], **given)
        torch.testing.assert_close(result, model(x[:size], **given))
        assert result.requires_grad
    assert counted(fused) == 4
    with torch.no_grad():  # and no less is fused where none are recorded
        for _ in range(2):
            fused(x, **kwargs)
        torch.testing.assert_close(served(fused, x, **kwargs), model(x, **kwargs))
    assert counted(fused) == 4
    assert len(fused.report().regions) == 1


def frozen(model: Small) -> None:
    model.requires_grad_(False)


def without(model: Small) -> None:
    model.inner[0] = nn.Linear(5, 5).requires_grad_(False)


def own_forward(model: Small) -> None:
    model.forward = lambda x: x * 7  # type: ignore[assignment]


def hooked(model: Small) -> None:
    model.register_forward_hook(lambda module, args, result: result + 7)


def other_type(model: Small) -> None:
    model.double()


@torch.enable_grad()
@pytest.mark.parametrize("edit", [frozen, without, own_forward, hooked, other_type])
def test_what_changes_is_noticed_where_gradients_are_recorded(edit: Callable[[Small], None]) -> None:
    model = Small()
    fused = optimised(model)
    fused(T)
    served(fused, T)
    edit(model)
    x = T.double() if edit is other_type else T
    for _ in range(3):
        torch.testing.assert_close(fused(x), model(x))
    fuses = edit in (frozen, without)
    assert len(fused.report().regions) == fuses
    assert counted(fused) == (2 if fuses else 5)
    served(fused, x) if edit is not hooked else None


@torch.enable_grad()
def test_what_a_call_of_a_module_runs_is_noticed_where_gradients_are_recorded() -> None:
    model, seen = Small(), []
    fused = optimised(model)
    fused(T)
    before = nn.Module.__call__

    @functools.wraps(before)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen.append(self)
        return before(self, *args, **kwargs)

    with mock.patch.object(nn.Module, "__call__", call):
        for _ in range(2):
            fused(T)
    assert seen.count(fused) == 2
    served(fused, T)


@torch.enable_grad()
def test_unusual_calls_are_told_apart_where_gradients_are_recorded() -> None:
    model = Small()
    fused = optimised(model)
    fused(T)
    served(fused, T)
    x = T.as_subclass(type("Sub", (Tensor,), {}))
    fused(x)
    assert counted(fused, "an input is a Sub") == 1
    torch.func.vmap(fused)(T)
    assert counted(fused, "a torch.func transform is active") == 1
    with torch.autocast("cpu"):
        for _ in range(2):
            assert fused(T).dtype is model(T).dtype
        served(fused, T)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        fused(T.t())
    exported = torch.export.export(fused, (T,), strict=False)
    torch.testing.assert_close(exported.module()(T), model(T))
    assert counted(fused) == 6


# Calls that the original serves


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_recurrent_layers_need_no_python(layer: Callable[..., nn.Module]) -> None:
    model = layer(3, 4).eval()
    fused, x = optimised(model), torch.randn(5, 2, 3)
    for _ in range(2):
        fused(x)
    torch.testing.assert_close(served(fused, x), model(x))


class Listed(Weighted):
    def __init__(self) -> None:
        super().__init__()
        self.factors = [1.0, 2.0]
        self.seen = {1, 2}

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factors[0] + self.factors[1] + len(self.seen)


def test_lists_and_sets_of_a_model_are_compared_without_looking_for_it_in_python() -> None:
    model = Listed().requires_grad_(False)
    fused = optimised(model)
    edits: list[Callable[[], object]] = [
        lambda: None,
        lambda: model.factors.__setitem__(0, 3.0),
        lambda: model.factors.reverse(),
        lambda: model.factors.append(1.0),
        lambda: model.seen.add(3),
    ]
    for edit in edits:
        edit()
        assert fused._table.door((T,)) is MISSED
        for _ in range(3):
            torch.testing.assert_close(fused(T), model(T))
        torch.testing.assert_close(served(fused, T), model(T))


class Array(nn.Module):
    def forward(self, x: Tensor, function: Any = None) -> Tensor:
        return torch.from_numpy(np.asarray(x.numpy()) + 1)


class Asks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ x.t() if x.sum() > 0 else x.t() @ x


class Alone(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.special.bessel_j0(x)


class Sub(Tensor):
    pass


class PassingOn(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_calls_with_subclasses_need_no_python_and_are_counted() -> None:
    model = Small()
    fused, x, y = optimised(model), T.as_subclass(Sub), T[:2].as_subclass(Sub)
    fused(x)
    assert type(served(fused, x)) is type(served(fused, y)) is Sub
    torch.testing.assert_close(served(fused, y), model(y))
    assert counted(fused, "an input is a Sub") == 4
    with PassingOn():
        fused(x)
    assert type(fused(T)) is Tensor
    assert fused.report().regions
    assert counted(fused, "an input is a Sub") == 5


@pytest.mark.parametrize(("saved", "pays"), [(1e-5, False), (1e-3, True)])
def test_dynamo_serves_where_its_graphs_save_more_than_its_guards_take(saved: float, pays: bool) -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.GELU(), nn.Softmax(1)).eval()
    seen: list[Tensor] = []
    model[1].register_forward_hook(lambda _, given, result: seen.append(result))
    fused = optimised(model)
    with mock.patch.object(CompiledGraph, "seconds_saved", saved):
        for _ in range(12):
            torch.testing.assert_close(fused(T), model(T))
    assert len(seen) == 24
    reasons = [refusal.reason for refusal in fused.report().refusals]
    assert ("its graphs save less than its guards take" in reasons) is not pays
    if not pays:
        torch.testing.assert_close(served(fused, T), model(T))
    fused(T[:2])
    assert len(fused._specialiser._capture_fallbacks._gains) == 2


@pytest.mark.parametrize("model", [Array(), Asks(), Alone()])
def test_calls_that_gain_nothing_in_any_way_need_no_python(model: nn.Module) -> None:
    fused = optimised(model)
    for _ in range(12):
        fused(T)
    torch.testing.assert_close(served(fused, T), model(T))
    torch.testing.assert_close(served(fused, -T), model(-T))
    with mock.patch.object(type(model), "forward", lambda self, x: x * 7):
        torch.testing.assert_close(fused(T), T * 7)
    with torch.enable_grad():
        x = T.clone().requires_grad_()
        if not isinstance(model, Array):
            torch.testing.assert_close(fused(x), model(x))


class Overlapping(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        y.as_strided((4, 4), (1, 1)).relu_()
        return y


@pytest.mark.invariant(55)
def test_fallbacks_that_need_no_python_are_counted() -> None:
    model = Overlapping()
    fused = optimised(model)
    for _ in range(2):
        fused(T)
    for _ in range(3):
        torch.testing.assert_close(served(fused, T), model(T))
    assert counted(fused, "forward writes to a tensor whose elements share memory") == 5
    fused(U[:2])
    assert fused.report().fallbacks[0].count == 6


def test_hooks_do_not_keep_a_call_in_python() -> None:
    model, seen = Weighted().requires_grad_(False), []
    fused = optimised(model)
    model.register_forward_hook(lambda *_: seen.append(1))
    for _ in range(2):
        fused(T)
    torch.testing.assert_close(served(fused, T), model(T))
    assert len(seen) == 4
