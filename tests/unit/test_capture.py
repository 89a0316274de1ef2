"""Capture: the graph does what the model does, and tracing leaves no trace."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy
import pytest
import torch
from torch import Tensor, nn

import fusepass
from fusepass.capture.trace import Captured, CaptureFailure, capture
from fusepass.capture.twin import twin
from fusepass.guards.tensors import LiveTensors
from fusepass.structure import Template

aten = torch.ops.aten


def module(forward: Callable[..., Any], **attributes: Any) -> nn.Module:
    """A module with this forward and these attributes."""
    made = type("Made", (nn.Module,), {"forward": forward})()
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def captured(model: nn.Module, *args: Any, **kwargs: Any) -> Captured:
    with torch.no_grad():
        result = capture(model, args, kwargs)
    assert isinstance(result, Captured), result
    return result


def refused(model: nn.Module, *args: Any, **kwargs: Any) -> str:
    with torch.no_grad():
        result = capture(model, args, kwargs)
    assert isinstance(result, CaptureFailure)
    assert "\n" not in result.reason
    return result.reason


def replay(capture: Captured, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the graph with the tensors of `model`."""
    live = LiveTensors(model).tensors
    tensors, form = Template.of_call(args, kwargs)
    assert form.same_form(capture.inputs)
    with torch.no_grad():
        return capture.outputs.fill(capture.graph(*(live[i] for i in capture.state_indices), *tensors))


def targets(capture: Captured) -> list[Any]:
    return [node.target for node in capture.graph.graph.nodes if node.op == "call_function"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose2d(2, 4, 2)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, image: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(image)))


def test_placeholders_are_named_and_nodes_say_where_they_come_from() -> None:
    graph = captured(Net().eval(), torch.randn(1, 2, 3, 3)).graph
    names = [node.name for node in graph.graph.find_nodes(op="placeholder")]
    assert names == [
        "conv_weight", "conv_bias", "norm_weight", "norm_bias", "norm_running_mean", "norm_running_var", "image",
    ]  # fmt: skip
    convolution, *_ = graph.graph.find_nodes(op="call_function", target=aten.convolution.default)
    assert convolution.meta["val"].shape == (1, 4, 4, 4)
    assert list(convolution.meta["nn_module_stack"]) == ["conv"]
    assert "fusepass/capture/trace.py" not in convolution.meta["stack_trace"]
    assert "in forward" in convolution.meta["stack_trace"]


def test_training_batch_norm_writes_its_statistics_at_the_end() -> None:
    model = Net()
    graph = captured(model, torch.randn(2, 2, 3, 3))
    before = copy.deepcopy(model.state_dict())
    assert targets(graph).count(aten.copy_.default) == 3
    assert len(graph.mutated_states) == 3
    x = torch.randn(2, 2, 3, 3)
    twin = copy.deepcopy(model)
    torch.testing.assert_close(replay(graph, model, x), twin(x).detach())
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, twin.state_dict()[name])
    assert not torch.equal(before["norm.running_mean"], model.norm.running_mean)


@pytest.mark.invariant(2)
def test_tracing_changes_nothing() -> None:
    model = nn.Sequential(Net(), nn.Dropout())
    before = copy.deepcopy(model.state_dict())
    attributes = [dict(vars(m)) for m in model.modules()]
    states = random.getstate(), torch.get_rng_state()
    x = torch.randn(2, 2, 3, 3)
    states = random.getstate(), torch.get_rng_state()
    captured(model, x)
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [dict(vars(m)) for m in model.modules()] == attributes
    assert all(type(p) is nn.Parameter and not hasattr(p, "fake_mode") for p in model.parameters())


def test_nested_inputs_and_outputs() -> None:
    @dataclass
    class Pair:
        left: Tensor
        rest: dict[str, Any]

    def forward(self: nn.Module, pair: Pair, *more: Tensor, scale: float, mask: Tensor | None = None) -> Any:
        total = pair.left * scale + sum(pair.rest["items"])
        return {"pair": Pair(total, {"n": None, "mask": mask}), "list": [more[0], (3, "text")]}

    model = module(forward)
    tensors = [torch.randn(3) for _ in range(4)]

    def arguments(values: list[Tensor]) -> tuple[Any, ...]:
        return Pair(values[0], {"items": [values[1], values[2]], "unused": None}), values[3]

    graph = captured(model, *arguments(tensors), scale=2.0)
    names = [node.name for node in graph.graph.graph.find_nodes(op="placeholder")]
    assert names == ["pair_left", "pair_rest_items_0", "pair_rest_items_1", "more_1"]
    others = [torch.randn(3) for _ in range(4)]
    result = replay(graph, model, *arguments(others), scale=2.0)
    assert type(result["pair"]) is Pair
    torch.testing.assert_close(result["pair"].left, others[0] * 2.0 + others[1] + others[2])
    assert result["pair"].rest == {"n": None, "mask": None}
    assert result["list"][0] is others[3]
    assert result["list"][1] == (3, "text")


def test_weight_tying_gives_one_placeholder() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
    second.weight = first.weight
    model = nn.Sequential(first, second)
    graph = captured(model, torch.randn(2, 3))
    assert [slot.dotted for slot in graph.states] == ["0.weight", "0.bias"]
    x = torch.randn(2, 3)
    torch.testing.assert_close(replay(graph, model, x), model(x).detach())


def test_what_symbolic_trace_gets_wrong() -> None:
    def forward(self: nn.Module, x: Tensor) -> Any:
        assert isinstance(x, Tensor)
        assert isinstance(self.linear.weight, nn.Parameter)
        if x.dtype == torch.float32 and x.shape[0] == 2:
            x = x + torch.rand(4)
        with torch.autocast("cpu"):
            return self.linear(x)

    model = module(forward, linear=nn.Linear(4, 4))
    x = torch.randn(2, 4)
    graph = captured(model, x)
    assert aten.rand.default in targets(graph)
    with torch.random.fork_rng():
        result = replay(graph, model, x)
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result, model(x).detach())


def test_outer_autocast_is_in_the_graph() -> None:
    def forward(self: nn.Module, x: Tensor) -> Any:
        with torch.autocast("cpu", enabled=False):
            exact = self.linear(x)
        return exact, self.linear(x)

    model = module(forward, linear=nn.Linear(4, 4))
    x = torch.randn(2, 4)
    with torch.autocast("cpu"):
        graph = captured(model, x)
    assert [result.dtype for result in replay(graph, model, x)] == [torch.float32, torch.bfloat16]


def test_unused_random_numbers_are_still_drawn() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        torch.rand(3)
        x * 2
        return x + torch.rand(2)

    model = module(forward)
    graph = captured(model, torch.zeros(2))
    assert targets(graph).count(aten.rand.default) == 2
    assert aten.mul.Tensor not in targets(graph)
    torch.manual_seed(1)
    result = replay(graph, model, torch.zeros(2))
    torch.manual_seed(1)
    assert torch.equal(result, model(torch.zeros(2)))


def test_mutated_inputs_and_views_of_them() -> None:
    def forward(self: nn.Module, x: Tensor, y: Tensor) -> Any:
        view = x.view(-1)
        x.add_(1)
        fresh = x + 1
        y.copy_(fresh)
        self.kept.mul_(2)
        return view, x, fresh, y[0], self.kept, x.t().split(1)[1], view[1:]

    model = module(forward, kept=torch.ones(2))
    args = torch.randn(2, 3), torch.randn(2, 3)
    graph = captured(model, *args)
    assert graph.mutated_inputs == (0, 1)
    expected_model, expected_args = copy.deepcopy(model), copy.deepcopy(args)
    expected = expected_model(*expected_args)
    results = replay(graph, model, *args)
    for result, value in zip(
        (*results, *args, model.kept), (*expected, *expected_args, expected_model.kept), strict=True
    ):
        assert torch.equal(result, value)
    view, x, fresh, row, kept, column, part = results
    assert x is args[0]
    assert kept is model.kept
    args[0].zero_()
    assert not view.any()
    assert not column.any()
    assert not part.any()
    assert fresh.any()
    args[1].fill_(7)
    assert (row == 7).all()


def test_the_same_tensor_twice_is_one_input() -> None:
    model = module(lambda self, x, y: x * 2 if x is y else x - y)
    x, other = torch.randn(3), torch.ones(3)
    graph = captured(model, x, x)
    assert len(graph.graph.graph.find_nodes(op="placeholder")) == 1
    assert torch.equal(replay(graph, model, other, other), torch.full((3,), 2.0))
    graph = captured(model, x, x.clone())
    assert torch.equal(replay(graph, model, other, torch.zeros(3)), torch.ones(3))


def test_constants_are_kept_but_results_are_fresh() -> None:
    model = module(lambda self, x: (x.minimum(torch.tensor(0.5)), torch.tensor(3.0)))
    graph = captured(model, torch.randn(3))
    assert targets(graph).count(aten.lift_fresh_copy.default) == 1
    first = replay(graph, model, torch.randn(3))[1]
    first.add_(1)
    assert replay(graph, model, torch.randn(3))[1] == 3.0


def test_numpy_memory_is_read_at_each_call() -> None:
    array = numpy.ones(3, dtype=numpy.float32)
    model = module(lambda self, x: x * torch.from_numpy(self.array), array=array)
    graph = captured(model, torch.ones(3))
    array[:] = 2
    assert torch.equal(replay(graph, model, torch.ones(3)), torch.full((3,), 2.0))


def _counts(self: Any, x: Tensor) -> Tensor:
    self.step += 1
    return x * self.step


def _appends(self: Any, x: Tensor) -> Tensor:
    self.seen.append(x.shape)
    return x + 1


def _caches(self: Any, x: Tensor) -> Tensor:
    self.config["last"] = x
    return x + 1


def _reassigns(self: Any, x: Tensor) -> Tensor:
    self.mean = self.mean * 0.9 + x.mean()
    return x - self.mean


def test_python_state_that_forward_changes_is_put_back() -> None:
    x = torch.randn(3)
    model = module(_counts, step=0)
    assert refused(model, x) == "forward changes Python state: self.step"
    assert model.step == 0
    model = module(_appends, seen=[])
    assert refused(model, x) == "forward changes Python state: self.seen"
    assert model.seen == []
    model = nn.Sequential(module(_caches, config={"a": 1}))
    assert refused(model, x) == "forward changes Python state: self.0.config['last']"
    assert model[0].config == {"a": 1}
    model = module(_reassigns)
    model.register_buffer("mean", torch.ones(()))
    before = model.mean
    assert refused(model, x) == "forward changes Python state: self.mean"
    assert model.mean is before


@pytest.mark.invariant(2)
def test_state_is_put_back_when_forward_raises() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.step += 1
        return x if x.sum().item() > 0 else -x

    model = module(forward, step=0)
    assert "depends on the values of a tensor" in refused(model, torch.randn(3))
    assert model.step == 0


def test_indexing_by_numbers_is_recorded_and_by_masks_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a mask makes the size of the result depend on values; the slow export is not needed for numbers."""

    def export(*_: Any) -> Any:
        raise ValueError("not recorded")

    monkeypatch.setattr("fusepass.capture.trace._export", export)
    x, mask = torch.arange(6.0).view(2, 3), torch.tensor([True, False])
    model, numbers = module(lambda self, x, i: x[i] * 2), torch.tensor([1, 0, 1])
    assert torch.equal(replay(captured(model, x, numbers), model, x, numbers), x[numbers] * 2)
    for selection in (mask, mask.to(torch.uint8)):
        assert "not recorded" in refused(model, x, selection)


class Writes(nn.Module):
    """Writes to its input, which only the slow export can trace."""

    seen: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.names, self.function = nn.Linear(3, 3), nn.BatchNorm1d(3), {"a": [1]}, torch.relu

    def forward(self, x: Tensor) -> Tensor:
        Writes.seen.append(self)
        x.add_(1)
        return self.function(self.norm(self.layer(x)))


def test_other_threads_meet_the_model_s_own_tensors_while_it_is_exported() -> None:
    model, x = Writes().train(), torch.rand(4, 3)
    before = [module._parameters | module._buffers for module in model.modules()]
    found: list[bool] = []

    class Watched(list[Any]):
        def append(self, running: Any) -> None:
            now = [module._parameters | module._buffers for module in model.modules()]
            same = all(was[name] is tensors[name] for was, tensors in zip(before, now, strict=True) for name in was)
            found.append(running is not model and same)

    Writes.seen = Watched()
    graph = captured(model, x)
    assert found[-1], "the export runs a twin"
    wanted, inner = copy.deepcopy(model)(x.clone()), x.clone()
    torch.testing.assert_close(replay(graph, model, inner), wanted)
    assert torch.equal(inner, x + 1)
    assert graph.mutated_states
    assert twin(model).function is torch.relu


@pytest.mark.parametrize(
    "kept",
    [
        lambda model: [model.layer],
        lambda model: {"weight": (model.layer.weight,)},
        lambda model: model.layer.forward,
        lambda model: lambda x: model.layer(x),
        lambda model: functools.partial(model.layer),
    ],
)
def test_a_module_that_leads_elsewhere_has_no_twin(kept: Callable[[Any], Any]) -> None:
    model = Writes()
    assert twin(model) is not None
    model.__dict__["kept"] = kept(model)
    assert twin(model) is None


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_pools_of_channels_last_are_recorded_with_their_strides(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool to one element changes strides in place, which needs no slow export."""
    monkeypatch.setattr("fusepass.capture.trace._export", lambda *_: pytest.fail("not recorded"))
    x = torch.rand(2, *[1] * (rank == 1), *[3] * rank, 4).movedim(-1, 1)
    pool = getattr(nn.functional, f"adaptive_avg_pool{rank}d")
    model = module(lambda self, x: pool(x[:, :, 0] if rank == 1 else x, 1) * 2)
    wanted = model(x)
    got = replay(captured(model, x), model, x)
    assert torch.equal(got, wanted)
    assert got.stride() == wanted.stride()


def test_a_set_is_unchanged_whatever_the_order_of_its_copy() -> None:
    names = set(range(100))
    names -= set(range(100)) - {1, 64}
    assert list(names) != list(set(names)), "it lies in a larger table than its copy"
    captured(module(lambda self, x: x + 1, names=names), torch.ones(3))
    adds = module(lambda self, x: (self.names.add(2), x + 1)[1], names=names)
    assert refused(adds, torch.ones(3)) == "forward changes Python state: self.names"
    assert names == {1, 64}


def _draws(self: nn.Module, x: Tensor) -> Tensor:
    return x * random.random()


def _seeds(self: nn.Module, x: Tensor) -> Tensor:
    torch.manual_seed(5)
    return x * torch.rand(3)


def _sets_dtype(self: nn.Module, x: Tensor) -> Tensor:
    torch.set_grad_enabled(not torch.is_grad_enabled())
    return x + 1


def _pops(self: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return batch.pop("x") + 1


def _puts_memory(self: nn.Module, x: Tensor) -> Tensor:
    x.data = x * 2
    return x + 1


CLOSURE = torch.ones(3)


@pytest.mark.parametrize(
    ("forward", "args", "reason"),
    [
        (lambda self, x: x if x.sum().item() > 0 else -x, (torch.ones(3),), "depends on the values"),
        (lambda self, x: x[x > 0], (torch.ones(3),), "depends on the values"),
        (lambda self, x: x * x.sum().item(), (torch.ones(3),), "depends on the values"),
        (lambda self, x: x * CLOSURE, (torch.ones(3),), "neither an input nor an attribute"),
        (_draws, (torch.ones(3),), "seeds a random generator or draws"),
        (_seeds, (torch.ones(3),), "seeds a random generator or draws"),
        (_pops, ({"x": torch.ones(3)},), "changes a container among its inputs"),
        (lambda self, x: self, (torch.ones(3),), "returns a Made"),
        (lambda self, x: None, (torch.ones(3),), "returns no tensor"),
        (lambda self, x, other: x + 1, (torch.ones(3), object()), "an input is a object"),
        (lambda self, x: x + 1, (torch.ones(3, device="meta"),), "device meta is not supported"),
        (lambda self, x: x.to_dense(), (torch.ones(3).to_sparse(),), "sparse"),
        (lambda self, x: x.t_(), (torch.ones(3, 2),), ""),
        (_puts_memory, (torch.ones(3),), "puts other memory in place"),
    ],
)
def test_refusals(forward: Callable[..., Any], args: tuple[Any, ...], reason: str) -> None:
    states = random.getstate(), torch.get_rng_state(), torch.is_grad_enabled()
    assert reason in refused(module(forward), *args)
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    assert torch.is_grad_enabled() == states[2]


def test_changed_grad_mode_is_refused_and_put_back() -> None:
    with torch.no_grad():
        failure = capture(module(_sets_dtype), (torch.ones(3),), {})
        assert isinstance(failure, CaptureFailure)
        assert not torch.is_grad_enabled()
    assert "global setting" in failure.reason


def test_hooks_on_inner_modules_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    model.register_forward_hook(lambda *_: None)
    captured(model, torch.randn(2, 3))
    model[0].register_forward_hook(lambda *_: None)
    assert refused(model, torch.randn(2, 3)) == "forward hooks on 0"


def test_recurrent_layers_trace() -> None:
    model = nn.LSTM(3, 4, batch_first=True)
    x = torch.randn(2, 5, 3)
    weights = list(model._flat_weights)
    graph = captured(model, x)
    assert all(a is b for a, b in zip(model._flat_weights, weights, strict=True))
    result, expected = replay(graph, model, x), model(x)
    torch.testing.assert_close(result[0], expected[0].detach())
    torch.testing.assert_close(result[1][1], expected[1][1].detach())


def test_torchscript_is_refused() -> None:
    scripted = torch.jit.script(nn.Linear(3, 3))
    assert "TorchScript" in refused(scripted, torch.ones(3))
    assert "TorchScript" in refused(nn.Sequential(scripted), torch.ones(3))


def test_parametrised_weights_trace() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)))
    graph = captured(model, torch.randn(2, 3))
    x = torch.randn(2, 3)
    torch.testing.assert_close(replay(graph, model, x), model(x).detach())


def test_errors_of_the_model_are_kept() -> None:
    with torch.no_grad():
        failure = capture(nn.Linear(3, 3), (torch.randn(2, 4),), {})
    assert isinstance(failure, CaptureFailure)
    assert isinstance(failure.error, RuntimeError)
    with torch.no_grad():
        failure = capture(nn.Linear(3, 3), (), {})
    assert isinstance(failure, CaptureFailure)
    assert isinstance(failure.error, TypeError)


@functools.lru_cache(maxsize=4)
def _turned(size: int) -> Tensor:
    return torch.arange(size).flip(0)


class Remembers(nn.Module):
    """A tensor that a function of the model keeps, in a model that AOTAutograd has to trace, as it writes to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(9))

    def forward(self, x: Tensor) -> Tensor:
        x[..., :1].mul_(2)
        return (x * self.weight[_turned(x.shape[-1])]).relu() * 2


def test_what_functions_remember_is_no_tensor_of_a_tracing() -> None:
    _turned.cache_clear()
    model, x = Remembers(), torch.randn(3, 9)
    fused = fusepass.optimize(model)
    with torch.no_grad():
        results = [call(x.clone()) for call in (fused, fused, model)]
    assert type(_turned(9)) is Tensor
    for result in results[:2]:
        torch.testing.assert_close(result, results[2])


class Decays(nn.Module):
    """Changes a parameter in every call, which AOTAutograd has to trace."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.weight.mul_(0.5).clamp_(max=0.4)
        return (x * self.weight).relu() + torch.dropout(x, 0.5, True)


class Draws(nn.Module):
    """Draws from a generator of its own, which it seeds itself or not."""

    def __init__(self, seed: int | None) -> None:
        super().__init__()
        self.seed, self.generator = seed, torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        generator = self.generator if self.seed is None else torch.Generator().manual_seed(self.seed)
        return (x.relu() + 1) * torch.rand(x.shape, generator=generator)


@pytest.mark.parametrize("make", [Decays, lambda: Draws(None), lambda: Draws(5)], ids=["writes", "draws", "seeds"])
def test_a_first_call_changes_parameters_and_generators_once(make: Callable[[], nn.Module]) -> None:
    model, other, x, found = make(), make(), torch.randn(3, 4), []
    fused = fusepass.optimize(model)
    for call in (fused, other, fused, other):
        torch.manual_seed(4)
        with torch.no_grad():
            found.append((call(x), torch.rand(2)))
    for mine, theirs in zip(found[::2], found[1::2], strict=True):
        torch.testing.assert_close(mine, theirs)


def _powers(self: nn.Module, x: Tensor) -> Tensor:
    spectrum = torch.fft.rfft(x * 2)
    return (spectrum * spectrum.conj()).real.relu() + 1


def _parts(self: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    spectrum = torch.fft.rfft(x * 2).conj()
    return spectrum.imag.relu() + 1, (spectrum.imag * 2).sum(1), spectrum.imag, spectrum


@pytest.mark.parametrize("forward", [_powers, _parts])
def test_lazy_conjugation_and_negation(forward: Callable[..., Any]) -> None:
    model, x = module(forward), torch.randn(3, 8)
    fused = fusepass.optimize(model)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), model(x))
    assert fused.report().fused_share > 0


class Profiled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.profiler.record_function("mine"):
            return x.exp() * 2


def test_what_a_profiler_is_told_is_no_operator() -> None:
    captured = capture(Profiled(), (torch.randn(3),), {})
    assert isinstance(captured, Captured)
    assert [
        str(node.target)
        for node in captured.graph.graph.find_nodes(op="call_function", target=torch.ops.aten.exp.default)
    ]
    assert "profiler" not in captured.graph.code
