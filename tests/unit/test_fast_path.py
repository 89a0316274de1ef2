"""Calls without Python: what they serve, what sends a call back to Python, and what they leave behind."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fusepass
from fusepass.api.module import OptimizedModule
from fusepass.cli import doctor
from fusepass.dispatch.specialisation import Specialisation
from fusepass.errors import BuildError
from fusepass.runtime import fast_path
from fusepass.runtime.fast_path import MISSED
from tests.support.launchers import launch_of

pytestmark = pytest.mark.usefixtures("without_gradients")

SCALE = 2.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.weight = nn.Parameter(torch.randn(3))
        self.factor = 3.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(x) * self.weight * self.factor) * SCALE


X = torch.randn(5, 3)


@pytest.fixture
def net() -> Net:
    return Net().eval()


def ready(model: nn.Module, *inputs: torch.Tensor) -> OptimizedModule:
    """`model`, optimised, with a call that needs no Python; it has been served twice."""
    optimised = fusepass.optimize(model)
    optimised(*inputs)
    optimised(*inputs)
    assert optimised._specialiser.table.door(inputs) is not MISSED
    return optimised


def door(optimised: OptimizedModule) -> Callable[..., Any]:
    return optimised._specialiser.table.door  # type: ignore[no-any-return]


def test_the_usual_call_needs_no_python(net: Net) -> None:
    optimised, wanted = ready(net, X), net(X)
    with mock.patch.object(Specialisation, "serve", side_effect=AssertionError):
        torch.testing.assert_close(optimised(X), wanted)
        for other in [X[:1], X.double(), X.t().contiguous().t(), X[0]]:
            assert door(optimised)((other,)) is MISSED
    assert door(optimised)(()) is MISSED
    assert door(optimised)((X, X)) is MISSED
    assert door(optimised)((3.0,)) is MISSED


def test_calls_of_models_with_hundreds_of_tensors_need_no_python() -> None:
    class Long(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(torch.randn(3) for _ in range(400))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([*self.weights]).sum(0) * x

    model = Long()
    optimised = ready(model, X)
    with mock.patch.object(Specialisation, "serve", side_effect=AssertionError):
        torch.testing.assert_close(optimised(X), model(X))
        model.weights[399].data.neg_()
        torch.testing.assert_close(optimised(X), model(X))


def hook(*_: object) -> None:
    pass


class Nothing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def replace_parameter(net: Net) -> None:
    net.weight = nn.Parameter(torch.full((3,), 0.5))


def other_parameter_type(net: Net) -> None:
    net.weight.data = net.weight.data.double()


def other_global(_: Net) -> None:
    global SCALE
    SCALE = 4.0


CHANGES: dict[str, Callable[[Net], object]] = {
    "a parameter": replace_parameter,
    "a parameter's type": other_parameter_type,
    "a buffer": lambda net: net.norm.register_buffer("running_mean", torch.ones(3)),
    "an attribute": lambda net: setattr(net, "factor", 5.0),
    "a new attribute": lambda net: setattr(net, "other", 5.0),
    "the mode": lambda net: net.norm.train(),
    "a submodule": lambda net: setattr(net, "norm", nn.BatchNorm1d(3, affine=False).eval()),
    "a global": other_global,
    "a hook": lambda net: net.register_forward_hook(lambda *_: torch.zeros(1)),
    "a hook of a submodule": lambda net: net.norm.register_forward_hook(lambda *_: torch.zeros(1, 3)),
    "requires_grad": lambda net: net.weight.requires_grad_(False),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.invariant(32)
def test_what_changes_in_the_model_is_noticed(change: str, net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "SCALE", SCALE)
    optimised = ready(net, X)
    CHANGES[change](net)
    assert door(optimised)((X,)) is MISSED
    for _ in range(3):  # by Python, and without it again
        torch.testing.assert_close(optimised(X), net(X))


def test_a_hook_for_every_module_is_noticed(net: Net) -> None:
    optimised = ready(net, X)
    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        assert door(optimised)((X,)) is MISSED
    finally:
        handle.remove()
    optimised(X)
    assert door(optimised)((X,)) is not MISSED


def test_hooks_of_the_model_run_at_every_call(net: Net) -> None:
    optimised, seen = ready(net, X), []
    handle = optimised.register_forward_hook(lambda *_: seen.append(1))
    for _ in range(4):
        optimised(X)
    assert len(seen) == 4
    handle.remove()
    optimised(X)
    optimised(X)
    assert len(seen) == 4


def deterministic() -> AbstractContextManager[object]:
    stack = ExitStack()
    stack.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
    torch.use_deterministic_algorithms(True)
    return stack


SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "gradients": torch.enable_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu"),
    "a dispatch mode": Seen,
    "a function mode": Nothing,
    "a device": lambda: torch.device("cpu"),
    "forward-mode differentiation": forward_ad.dual_level,
    "determinism": deterministic,
}


@pytest.mark.parametrize("surroundings", SURROUNDINGS)
@pytest.mark.invariant(32)
def test_what_changes_around_the_model_is_noticed(surroundings: str, net: Net) -> None:
    optimised, wanted = ready(net, X), net(X)
    with SURROUNDINGS[surroundings]():
        assert door(optimised)((X,)) is MISSED
        torch.testing.assert_close(optimised(X).detach().float(), wanted, atol=2e-2, rtol=2e-2)
    optimised(X)
    assert door(optimised)((X,)) is not MISSED
    torch.testing.assert_close(optimised(X), wanted)


def test_subclasses_are_left_to_python(net: Net) -> None:
    optimised = ready(net, X)
    assert door(optimised)((nn.Parameter(X),)) is MISSED
    assert door(optimised)((X.clone().requires_grad_(),)) is MISSED


class Writing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sum", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sum.add_(x.sigmoid())
        return torch.tanh(self.sum * 2)


def test_what_forward_writes_is_written_unless_an_input_lies_there() -> None:
    model = Writing()
    twin = copy.deepcopy(model)
    x = torch.randn(3)
    optimised = ready(model, x)
    twin.load_state_dict(model.state_dict())
    for _ in range(3):
        torch.testing.assert_close(optimised(x), twin(x))
    torch.testing.assert_close(model.sum, twin.sum)
    assert door(optimised)((model.sum.detach(),)) is MISSED
    torch.testing.assert_close(optimised(model.sum.detach()), twin(twin.sum.detach()))
    memory = torch.randn(8)
    model.sum.set_(memory[:3])  # type: ignore[attr-defined]
    assert door(optimised)((memory[2:5],)) is MISSED


class Unfused(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.special.bessel_j0(x) if x.dim() == 2 else torch.tanh(x * 2) + 1


def test_calls_that_gain_nothing_go_straight_to_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Unfused()
    optimised = ready(model, X)
    assert not next(iter(optimised._specialiser.table)).pays
    model.twice = 2.0  # type: ignore[assignment]
    assert door(optimised)((X,)) is MISSED
    optimised(X)
    optimised(X)
    with mock.patch.object(Specialisation, "fitting", side_effect=AssertionError):
        torch.testing.assert_close(optimised(X), torch.special.bessel_j0(X))
    assert door(optimised)((X[:2],)) is MISSED
    other = torch.rand(2, 3, 4)
    for x in (other, X, other, X):
        torch.testing.assert_close(optimised(x), model(x))
    assert [region.name for region in optimised.report().regions] == ["mul_tanh_add"]
    seen: list[int] = []
    handle = optimised.register_forward_hook(lambda *_: seen.append(1))
    optimised(X)
    handle.remove()
    assert seen == [1]
    monkeypatch.setattr(Unfused, "forward", lambda self, x: x + 7)
    torch.testing.assert_close(optimised(X), X + 7)


def test_a_model_with_a_list_is_compared_by_python() -> None:
    class Listed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.factors = [1.0, 2.0]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.factors[0] + self.factors[1]

    model = Listed().eval()
    optimised = fusepass.optimize(model)
    for factor in (1.0, 3.0, 3.0):
        model.factors[0] = factor
        torch.testing.assert_close(optimised(X), model(X))


class Several(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.softmax(x * y, -1), (x + y).exp()


class Two(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = y.exp() - x
        return z, z.tanh() * x


def test_results_inputs_that_are_not_aligned_and_one_input_twice() -> None:
    x, y = torch.randn(4, 33), torch.randn(4, 33)
    model = Several()
    optimised = ready(model, x, y)
    for result, wanted in zip(optimised(x, y), model(x, y), strict=True):
        torch.testing.assert_close(result, wanted)
    odd = torch.randn(4 * 33 + 1)[1:].view(4, 33)
    for inputs in [(odd, y), (x, odd), (x, x)]:
        for result, wanted in zip(optimised(*inputs), model(*inputs), strict=True):
            torch.testing.assert_close(result, wanted)


def test_nothing_is_kept_of_a_call(net: Net) -> None:
    optimised = ready(net, X)
    result = optimised(X)
    alive = weakref.ref(result)
    del result
    assert alive() is None
    gc.collect()
    before = len(gc.get_objects())
    x = X.clone()
    for _ in range(200):
        optimised(x)
    assert len(gc.get_objects()) <= before + 10
    seen = weakref.ref(x)
    del x
    assert seen() is None


def test_what_the_graph_raises_arrives() -> None:
    made = fast_path.types()
    assert made is not None
    call = made.call(
        ({},), lambda *_: True, lambda: True, (lambda: 0,), (), (), lambda *_: 1 / 0, None, (), 1, (0,), (), ()
    )  # fmt: skip
    assert call((X,)) is MISSED
    call.renew(call.moment(), ())
    with pytest.raises(ZeroDivisionError):
        call((X,))


@pytest.mark.invariant(32)
def test_each_comparison_counts() -> None:
    """Of tensors, global settings, what must be 0, and settings with their values."""
    answers: list[object] = [True, True, 0, "as it was"]
    made = fast_path.types()
    assert made is not None
    state = {"right": 1}
    call = made.call(
        (state,),
        lambda *tensors: answers[0],
        lambda: answers[1],
        (lambda: answers[2],),
        (lambda: answers[3],),
        ("as it was",),
        lambda *tensors: (len(tensors),),
        None,
        (X, X),
        1,
        (1, 2),
        (),
        (),
    )
    call.renew(call.moment(), (X, X))
    assert call((X,)) == 2
    for position, other in enumerate([False, None, 1, "another"]):
        kept, answers[position] = answers[position], other
        assert call((X,)) is MISSED
        answers[position] = kept
    assert call((X,)) == 2
    state["right"] = 2
    assert call((X,)) is MISSED
    call.renew(call.moment(), (X, X))
    assert call((X,)) == 2
    call.renew(call.moment(), (X,))  # another number of tensors
    assert call((X,)) is MISSED


def test_until_the_library_is_there_and_without_it_python_serves(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise BuildError("there is no Python.h")

    for name, value in {"_types": None, "_given_up": False, "_building": None}.items():
        monkeypatch.setattr(fast_path, name, value)
    monkeypatch.setattr("fusepass.codegen.build.build", fail)
    monkeypatch.setattr("fusepass.codegen.cache.lookup", lambda key: None)
    assert doctor._calls().found.startswith("by Python")
    assert fast_path.types() is None
    assert fast_path._given_up
    monkeypatch.setattr("fusepass.codegen.build.build", mock.Mock(side_effect=AssertionError))
    fast_path.wait()
    monkeypatch.undo()
    with mock.patch.object(fast_path, "_types", None), mock.patch.object(fast_path, "_given_up", True):
        optimised = fusepass.optimize(net)
        for _ in range(3):
            torch.testing.assert_close(optimised(X), net(X))
        assert door(optimised)((X,)) is MISSED
    for _ in range(2):
        torch.testing.assert_close(optimised(X), net(X))
    assert door(optimised)((X,)) is not MISSED
    assert doctor._calls().found == "without Python"


def test_a_launch_comes_before_the_global_settings_are_compared_until_one_was_in_vain() -> None:
    made = fast_path.types()
    assert made is not None
    launched: list[tuple[int | None, ...]] = []
    answers = [True, 0]
    launcher = launch_of(0, launched, single=False)
    call = made.call(
        ({},), lambda *tensors: tensors[0].numel() == 4, lambda: answers[0], (lambda: answers[1],), (), (), launcher, None, (), 2,
        (1, 0), (), (),
    )  # fmt: skip
    x, y = torch.rand(4), torch.rand(4)
    call.renew(call.moment(), ())
    assert call(x, y) is not MISSED
    assert launched[-1][0] == x.data_ptr()  # the second of what the launcher takes
    for position, other in enumerate([False, 1]):
        kept, answers[position] = answers[position], other
        launched.clear()
        assert [call(x, y) for _ in range(3)] == [MISSED] * 3
        assert len(launched) == 1
        answers[position] = kept
        call.renew(call.moment(), ())
        assert call(x, y) is not MISSED
    launched.clear()
    assert call(torch.rand(8), y) is MISSED  # tensors are compared before
    assert not launched
    failing = launch_of(0, launched, single=False, stream=lambda _: 1 / 0)
    call = made.call(
        ({},), lambda *tensors: True, lambda: answers[0], (), (), (), failing, None, (), 2, (0, 1), (), ()
    )  # fmt: skip
    call.renew(call.moment(), ())
    with pytest.raises(ZeroDivisionError):
        call(x, y)
    answers[0] = False
    assert call(x, y) is MISSED  # what a launch in vain raises, is not for the caller
    launched.clear()
    finished: list[object] = []
    call = made.call(
        ({},), lambda *tensors: True, lambda: False, (), (), (), launcher, finished.append, (), 2, (0, 1), (), ()
    )  # fmt: skip
    call.renew(call.moment(), ())
    assert call(x, y) is MISSED
    assert not launched  # nor before what makes the caller's own types of the results
    assert not finished


def test_settings_of_what_is_gone_from_the_graph_are_not_read() -> None:
    x = torch.randn(5, 1)
    optimised = ready(nn.Sequential(nn.Tanh(), nn.Softmax(-1), nn.Sigmoid()), x)  # a softmax of one element is 1
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert door(optimised)((x,)) is not MISSED
    other = torch.randn(5, 3)
    optimised(other)
    optimised(other)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert door(optimised)((other,)) is MISSED


def test_one_region_alone_is_launched_without_the_graph_around_it() -> None:
    x, y = torch.randn(4, 33), torch.randn(4, 33)
    for model, inputs in [(Two(), (x, y)), (nn.Sequential(nn.Tanh(), nn.Softmax(-1)), (x,))]:
        optimised = fusepass.optimize(model)
        optimised(*inputs)
        (made,) = optimised._specialiser.table
        run, positions = made.compiled.without_python()
        assert type(run).__name__ == "Launcher"
        results = run(*(inputs[i] for i in positions))
        wanted = model(*inputs)
        for result, expected in zip(results, wanted if len(inputs) == 2 else [wanted], strict=True):
            torch.testing.assert_close(result, expected)


def test_a_door_takes_a_tuple(net: Net) -> None:
    made = door(ready(net, X))
    for wrong in [(), (X,), ((X,), (X,))]:
        with pytest.raises(TypeError):
            made(*wrong)
    with pytest.raises(TypeError):
        made(args=(X,))
