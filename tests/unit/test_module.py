"""The optimised module: right results on every way through it, and the same as the original in all else."""

from __future__ import annotations

import copy
import io
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import fusepass
from fusepass.api.module import OptimizedModule
from fusepass.dispatch.specialise import Specialiser
from fusepass.errors import FusepassWarning
from fusepass.report.report import CaptureRoute

X = torch.randn(2, 3, 6, 6)


class Net(nn.Module):
    """Two chains that fuse."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.scale = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(torch.relu(self.norm(self.conv(x))) * self.scale, 1)


@pytest.fixture
def net() -> Net:
    return Net().eval()


@pytest.fixture(autouse=True)
def _without_gradients(request: pytest.FixtureRequest) -> Iterator[None]:
    with torch.set_grad_enabled("gradients" in request.node.name):
        yield


def module(forward: Callable[..., Any], **attributes: Any) -> nn.Module:
    made = type("Made", (nn.Module,), {"forward": forward})()
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def specialisations(opt: OptimizedModule) -> int:
    return len(list(opt._specialiser.table))


def reasons(opt: OptimizedModule) -> dict[str, int]:
    return {entry.reason: entry.count for entry in opt.report().fallbacks}


# ---- results


def test_results_are_the_model_s(net: Net) -> None:
    opt = fusepass.optimize(net)
    for shape in [(2, 3, 6, 6), (1, 3, 5, 7)]:
        for _ in range(2):
            x = torch.randn(shape)
            close(opt(x), net(x))
    assert specialisations(opt) == 2
    assert opt.report().capture is CaptureRoute.TRACED
    assert opt.report().regions


def test_the_usual_call_is_served_at_once(net: Net) -> None:
    opt = fusepass.optimize(net, (X,))
    with mock.patch.object(type(opt._specialiser), "__call__", side_effect=AssertionError):
        close(opt(X), net(X))
        for other in [(X[:1],), (X.double(),), (X.to(memory_format=torch.channels_last),)]:
            with pytest.raises(AssertionError):
                opt(*other)
        with pytest.raises(AssertionError):
            opt(x=X)
    close(opt(x=X), net(X))


def test_training_updates_buffers_as_the_model_does() -> None:
    net = Net()
    twin = copy.deepcopy(net)
    opt = fusepass.optimize(net)
    for _ in range(3):
        x = torch.randn(2, 3, 6, 6)
        close(opt(x), twin(x))
    for name, value in net.state_dict().items():
        close(value, twin.state_dict()[name])
    assert net.norm.num_batches_tracked == 3
    assert specialisations(opt) == 1


@pytest.mark.invariant(4)
def test_parameters_are_live(net: Net) -> None:
    opt = fusepass.optimize(net, (X,))
    changes: list[Callable[[], object]] = [
        lambda: net.conv.weight.mul_(2),
        lambda: net.load_state_dict(Net().state_dict()),
        lambda: setattr(net.conv.bias, "data", torch.ones(4)),
        lambda: setattr(net.conv, "weight", nn.Parameter(torch.randn(4, 3, 3, 3))),
        lambda: net.load_state_dict(Net().state_dict(), assign=True),
        lambda: setattr(net, "scale", 3.0),
        lambda: setattr(opt, "scale", 4.0),
        lambda: setattr(net, "norm", nn.BatchNorm2d(4).eval()),
        lambda: net.double(),
    ]
    for change in changes:
        change()
        x = X.to(net.conv.weight.dtype)
        close(opt(x), net(x))
    assert specialisations(opt) == 5  # the first; two scales, another module, another dtype


def test_control_flow_on_python_values() -> None:
    def forward(self: Any, x: Tensor, sign: int = 1, *, double: bool = False) -> Tensor:
        y = torch.relu(x * sign) if self.training else torch.sigmoid(x * sign)
        return y * 2 if double else y

    model = module(forward)
    opt = fusepass.optimize(model)
    for training in (True, False):
        model.train(training)
        for kwargs in ({}, {"double": True}, {"sign": -1}, {"sign": 1.0}):
            for _ in range(2):
                close(opt(X, **kwargs), model(X, **kwargs))
    assert specialisations(opt) == 8


def test_nested_results_and_keyword_arguments() -> None:
    @dataclass
    class Output:
        logits: Tensor
        extra: dict[str, Any]

    def forward(self: Any, x: Tensor, batch: dict[str, Tensor], *, mask: Tensor | None = None) -> Output:
        y = torch.relu(x + batch["bias"])
        return Output(y if mask is None else y * mask, {"none": None, "count": 3, "all": [y, (x, "text")]})

    opt = fusepass.optimize(module(forward))
    mask = (X > 0).float()
    for kwargs in ({}, {"mask": mask}):
        result = opt(X, {"bias": torch.ones(6)}, **kwargs)
        expected = torch.relu(X + 1)
        assert type(result) is Output
        close(result.logits, expected * mask if kwargs else expected)
        assert result.extra["none"] is None
        assert result.extra["count"] == 3
        close(result.extra["all"][0], expected)
        assert result.extra["all"][1][0] is X
    assert opt.report().capture is CaptureRoute.TRACED


class BesidePlainValues(nn.Module):
    """Its result holds values that are equal to the places of results."""

    def __init__(self, *others: object) -> None:
        super().__init__()
        self.others = others

    def forward(self, x: Tensor) -> Any:
        return (x.relu() + 1, *self.others)


@pytest.mark.parametrize("others", [(True,), (1,), (1.0, 2), (), (None,), (torch.Size((0, 1)),)])
def test_plain_values_beside_a_result(others: tuple[object, ...]) -> None:
    fused = fusepass.optimize(BesidePlainValues(*others))
    x = torch.randn(3, 4)
    with torch.no_grad():
        for _ in range(2):
            result, *rest = fused(x)
            torch.testing.assert_close(result, x.relu() + 1)
            assert [(type(each), each) for each in rest] == [(type(each), each) for each in others]


class CallsItself(nn.Module):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) * 3

    def forward(self, x: Tensor) -> Tensor:
        return x.relu() + 1


def test_a_call_of_the_class_s_own_is_run() -> None:
    model, x = CallsItself(), torch.randn(3, 4)
    fused = fusepass.optimize(model)
    with torch.no_grad(), pytest.warns(FusepassWarning, match="__call__ of its own"):
        torch.testing.assert_close(fused(x), model(x))
    around = nn.Sequential(model, nn.Tanh())
    with torch.no_grad():
        torch.testing.assert_close(fusepass.optimize(around)(x), around(x))


def test_autocast_around_a_block_without_it() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        with torch.autocast("cpu", enabled=False):
            exact = torch.relu(self.linear(x))
        return exact, torch.relu(self.linear(x))

    model = module(forward, linear=nn.Linear(6, 6))
    opt = fusepass.optimize(model)
    with torch.autocast("cpu"):
        results = opt(X), model(X)
    for result, expected in zip(*results, strict=True):
        assert result.dtype == expected.dtype
        torch.testing.assert_close(result, expected)
    close(opt(X), model(X))
    assert specialisations(opt) == 2


def test_random_numbers_follow_the_seed() -> None:
    model = module(lambda self, x: torch.relu(nn.functional.dropout(x) + torch.rand(6)))
    opt = fusepass.optimize(model)
    for compiled in (opt, opt):
        torch.manual_seed(3)
        result = compiled(X)
        torch.manual_seed(3)
        close(result, model(X))


def test_shared_memory_with_what_is_written_runs_the_original() -> None:
    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return torch.relu(x) + torch.relu(y)

    model = module(forward)
    opt = fusepass.optimize(model)
    close(opt(torch.zeros(4), torch.zeros(4)), torch.ones(4))
    both = torch.zeros(4)
    close(opt(both, both), torch.full((4,), 2.0))  # one input
    with pytest.warns(FusepassWarning, match="shared by two"):
        close(opt(both, both.view(4)), torch.full((4,), 4.0))


def test_memory_is_shared_where_elements_are() -> None:
    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return torch.relu(x) + torch.relu(y)

    opt = fusepass.optimize(module(forward))
    memory = torch.zeros(12)
    close(opt(memory[:4], memory[4:8]), torch.ones(4))  # one storage, but neither reads what the other writes
    assert not reasons(opt)
    for first, second in ((0, 1), (3, 0), (0, 3), (1, 0)):
        expected, found = torch.zeros(12), torch.zeros(12)
        right = forward(None, expected[first : first + 4], expected[second : second + 4])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FusepassWarning)
            close(opt(found[first : first + 4], found[second : second + 4]), right)
        close(found, expected)
    assert sum(reasons(opt).values()) == 4


def test_a_full_table_takes_what_comes_again(net: Net) -> None:
    opt = fusepass.optimize(net, max_signatures=2)
    for size in (5, 6):
        opt(torch.randn(1, 3, size, size))
    x = torch.randn(1, 3, 7, 7)
    with pytest.warns(FusepassWarning, match="more than 2 signatures"):
        close(opt(x), net(x))
    assert specialisations(opt) == 2
    assert reasons(opt) == {"called with more than 2 signatures, and with this one for the first time": 1}
    close(opt(x), net(x))  # what comes again is worth forgetting another for
    assert specialisations(opt) == 2
    assert sum(reasons(opt).values()) == 1


def test_disabled_runs_the_original(net: Net) -> None:
    opt = fusepass.optimize(net, disable="all")
    close(opt(X), net(X))
    assert specialisations(opt) == 0


def test_threads_share_specialisations(net: Net) -> None:
    opt = fusepass.optimize(net)
    expected = net(X)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            with torch.no_grad():
                for _ in range(20):
                    close(opt(X), expected)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert specialisations(opt) == 1


# ---- gradients


@pytest.mark.invariant(22)
def test_gradients_are_eager_s(net: Net) -> None:
    twin = copy.deepcopy(net)
    opt = fusepass.optimize(net, (X,))
    x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
    opt(x).square().sum().backward()
    twin(y).square().sum().backward()
    close(x.grad, y.grad)
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        close(p.grad, q.grad)
    assert opt(X).requires_grad
    net.requires_grad_(False)
    assert not opt(X).requires_grad
    assert reasons(opt) == {}


def test_gradients_of_a_plain_attribute() -> None:
    weight = torch.ones(6, requires_grad=True)
    opt = fusepass.optimize(module(lambda self, x: torch.relu(x * self.weight) * 2, weight=weight))
    for _ in range(2):
        opt(X).sum().backward()
    close(weight.grad, 4 * (X * (X > 0)).flatten(0, -2).sum(0))
    assert reasons(opt) == {}


def test_optimiser_steps_show_after_training_with_gradients(net: Net) -> None:
    opt = fusepass.optimize(net, (X,))
    optimiser = torch.optim.SGD(opt.parameters(), lr=0.1)
    opt(X).square().sum().backward()
    optimiser.step()
    with torch.no_grad():
        close(opt(X), net(X))
    assert specialisations(opt) == 1


# ---- ways around tracing


def test_data_dependent_control_flow_goes_to_dynamo() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = torch.relu(self.linear(x))
        if y.sum().item() > 1e6:
            return y
        return torch.sigmoid(y) * 2

    model = module(forward, linear=nn.Linear(6, 6))
    opt = fusepass.optimize(model)
    with pytest.warns(FusepassWarning, match="depends on the values of a tensor"):
        close(opt(X), model(X))
    close(opt(X), model(X))
    report = opt.report()
    assert report.capture is CaptureRoute.DYNAMO
    assert "depends on the values" in report.refusals[0].reason
    assert report.reason is not None


def test_python_counters_count_once_per_call() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.step += 1
        return torch.relu(x) * self.step

    model = module(forward, step=0)
    opt = fusepass.optimize(model)
    with pytest.warns(FusepassWarning, match=r"self\.step"):
        close(opt(X), torch.relu(X))
    for step in range(2, 6):
        close(opt(X), torch.relu(X) * step)
        assert model.step == step
    assert opt.report().capture is CaptureRoute.DYNAMO


def test_dynamo_is_left_out_where_it_has_nothing_to_fuse() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return x @ x if float(x.sum()) > 1e9 else x.sort(-1).values

    model = module(forward)
    opt = fusepass.optimize(model)
    (route,) = _routes_after(opt, X, 8)
    with mock.patch.object(route, "_compiled", side_effect=AssertionError):
        assert torch.equal(opt(X), model(X))
        with pytest.raises(AssertionError):
            opt(X[1:])  # tensors that it did not see
    assert torch.equal(opt(X[1:]), model(X[1:]))
    assert opt.report().capture is CaptureRoute.DYNAMO
    assert not opt.report().fallbacks


def test_dynamo_stays_where_it_has_something_to_fuse() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return x if float(x.sum()) > 1e9 else torch.tanh(x) + 1

    opt = fusepass.optimize(module(forward))
    (route,) = _routes_after(opt, X, 12)
    with mock.patch.object(route, "_compiled", side_effect=AssertionError), pytest.raises(AssertionError):
        opt(X)


def _routes_after(opt: Any, x: Tensor, calls: int) -> list[Any]:
    """What serves an optimised model that was not traced, after so many calls."""
    for _ in range(calls):
        opt(x)
    return list(opt._specialiser._capture_fallbacks.routes)


def test_what_goes_to_dynamo_is_served_while_another_thread_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return x if float(x.sum()) > 1e9 else torch.tanh(x) + 1

    model = module(forward)
    opt = fusepass.optimize(model)
    close(opt(X), model(X))
    assert opt.report().capture is CaptureRoute.DYNAMO
    if hasattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag"):  # of the process; of each thread from PyTorch 2.15 on
        monkeypatch.setattr("torch.fx._symbolic_trace._is_fx_tracing_flag", True)
    close(opt(X), model(X))


def test_inputs_without_a_value_go_to_dynamo() -> None:
    class Holder:
        factor = 3

    model = module(lambda self, x, holder: torch.relu(x) * holder.factor)
    opt = fusepass.optimize(model)
    with pytest.warns(FusepassWarning, match="an input is a Holder"):
        close(opt(X, Holder()), torch.relu(X) * 3)


def test_children_serve_where_dynamo_does_not() -> None:
    class Child(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return torch.sigmoid(torch.relu(self.linear(x)) * 2)

    @torch._dynamo.disable
    def forward(self: Any, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x if x.sum() > 0 else -x

    model = module(forward, blocks=nn.ModuleList([Child(), Child()]))
    calls: list[Tensor] = []
    model.blocks[0].register_forward_hook(lambda m, args, result: calls.append(result))
    expected = model(X)
    opt = fusepass.optimize(model)
    with pytest.warns(FusepassWarning, match="Dynamo"):
        close(opt(X), expected)
    close(opt(X), expected)
    report = opt.report()
    assert report.capture is CaptureRoute.CHILDREN
    assert report.regions
    assert len(calls) == 3
    assert not any("forward" in vars(m) for m in model.modules())


def test_children_are_put_back_when_the_model_raises() -> None:
    @torch._dynamo.disable
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.fail:
            raise KeyError("mine")
        return y if y.sum().item() > 0 else -y

    model = module(forward, linear=nn.Linear(6, 6), fail=False)
    opt = fusepass.optimize(model)
    with pytest.warns(FusepassWarning):
        opt(X)
    opt(X)
    model.fail = True
    with pytest.raises(KeyError, match="mine"):
        opt(X)
    assert "forward" not in vars(model.linear)


def test_nothing_to_capture_is_left_alone_with_the_reason() -> None:
    @torch._dynamo.disable
    def forward(self: Any, x: Tensor) -> Tensor:
        return x if x.sum().item() > 0 else -x

    opt = fusepass.optimize(module(forward))
    with pytest.warns(FusepassWarning):
        close(opt(X), X if X.sum() > 0 else -X)
    with pytest.warns(FusepassWarning, match="runs as the original"):
        opt(X)
    assert opt.report().capture is CaptureRoute.UNTOUCHED
    assert sum(reasons(opt).values()) == 1


def test_what_is_left_alone_is_not_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    @torch._dynamo.disable
    def forward(self: Any, x: Tensor) -> Tensor:
        return x if x.sum().item() > 0 else -x

    model = module(forward)
    opt = fusepass.optimize(model)
    looked_up: list[object] = []
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FusepassWarning)
        for _ in range(3):
            opt(X)
        before, real = opt.report().fallbacks, Specialiser._look_up
        monkeypatch.setattr(Specialiser, "_look_up", lambda *given: looked_up.append(given[1]) or real(*given))
        close(opt(X), model(X))
        close(opt(-X), model(-X))
        assert not looked_up
        assert sum(each.count for each in opt.report().fallbacks) == sum(each.count for each in before) + 2
        for other in (X[0], X.unsqueeze(0)):
            close(opt(other), model(other))
        close(opt(x=X), model(X))
        with torch.enable_grad():
            close(opt(X), model(X))
        model.eval()
        close(opt(X), model(X))
    assert len(looked_up) == 5


def test_torchscript_is_left_alone() -> None:
    scripted = torch.jit.script(nn.Linear(6, 6))
    for model in (scripted, nn.Sequential(scripted, nn.Sigmoid())):
        opt = fusepass.optimize(model)
        with pytest.warns(FusepassWarning, match="TorchScript"):
            close(opt(X), model(X))
        assert opt.state_dict().keys() == model.state_dict().keys()


@pytest.mark.invariant(21)
def test_internal_errors_are_told_and_the_original_runs(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise KeyError("lost")

    monkeypatch.setattr("fusepass.dispatch.making.compile_graph", broken)
    opt = fusepass.optimize(net)
    with pytest.warns(FusepassWarning, match="internal error: KeyError: 'lost'"):
        close(opt(X), net(X))
    with pytest.raises(KeyError, match="lost"):
        fusepass.optimize(net, debug=True)(X)


def test_a_specialisation_that_cannot_be_made_is_an_internal_error(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusepass.dispatch.making.Specialisation", mock.Mock(side_effect=KeyError("lost")))
    opt = fusepass.optimize(net)
    with pytest.warns(FusepassWarning, match="internal error: KeyError: 'lost'"):
        close(opt(X), net(X))


def test_unsupported_devices_are_left_alone() -> None:
    model = nn.Linear(6, 6, device="meta")
    opt = fusepass.optimize(model)
    with pytest.warns(FusepassWarning, match="device meta is not supported"):
        assert opt(X.to("meta")).device.type == "meta"
    assert opt.report().capture is CaptureRoute.UNTOUCHED
    model.to_empty(device="cpu").load_state_dict(nn.Linear(6, 6).state_dict())
    close(opt(X), model(X))
    assert opt.report().capture is CaptureRoute.TRACED


def test_modes_and_transforms_run_the_original(net: Net) -> None:
    opt = fusepass.optimize(net, (X,))
    with FlopCounterMode(display=False) as expected:
        net(X)
    with FlopCounterMode(display=False) as counted, pytest.warns(FusepassWarning, match="dispatch mode"):
        opt(X)
    assert counted.get_total_flops() == expected.get_total_flops() > 0
    with pytest.warns(FusepassWarning, match="transform"):
        result = torch.vmap(opt)(X[:, None])
    close(result, torch.vmap(net)(X[:, None]))
    with pytest.warns(FusepassWarning, match="is tracing"):
        traced = torch.jit.trace(opt, X, check_trace=False)
    close(traced(X), net(X))
    assert specialisations(opt) == 1


def test_lazy_parameters_are_initialised_by_the_original() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.Softmax(-1))
    opt = fusepass.optimize(model)
    with pytest.warns(FusepassWarning, match="first call is to initialise"):
        opt(X)
    close(opt(X), model(X))
    assert specialisations(opt) == 1


# ---- the same as the original


@pytest.mark.invariant(5)
def test_state_dict_and_parameters_are_shared(net: Net) -> None:
    before = copy.deepcopy(net.state_dict())
    opt = fusepass.optimize(net, (X,))
    assert list(opt.state_dict()) == list(before)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert [(n, id(p)) for n, p in opt.named_parameters()] == [(n, id(p)) for n, p in net.named_parameters()]
    assert [n for n, _ in opt.named_modules()] == [n for n, _ in net.named_modules()]
    other = Net().state_dict()
    opt.load_state_dict(other)
    assert torch.equal(net.conv.weight, other["conv.weight"])
    assert not any(name.startswith("forward") for m in net.modules() for name in vars(m))


def test_modes_attributes_and_methods_are_the_original_s(net: Net) -> None:
    opt = fusepass.optimize(net)
    assert opt.train() is opt
    assert net.training
    assert net.norm.training
    assert opt.training
    opt.eval()
    assert not net.training
    assert opt.scale == 2.0
    opt.scale = 5.0
    assert net.scale == 5.0
    opt.conv = nn.Conv2d(3, 2, 3)
    opt.norm = nn.BatchNorm2d(2).eval()
    assert net.conv.out_channels == 2
    close(opt(X), net(X))
    assert opt.to(torch.float64) is opt
    assert net.conv.weight.dtype is torch.float64
    opt.requires_grad_(False)
    assert not net.conv.weight.requires_grad
    seen: list[nn.Module] = []
    opt.apply(seen.append)
    assert net in seen
    assert isinstance(opt, nn.Module)
    assert "Conv2d" in repr(opt)
    with pytest.raises(AttributeError, match="missing"):
        opt.missing  # noqa: B018
    del opt.scale
    assert not hasattr(net, "scale")


@pytest.mark.invariant(5)
def test_hooks_on_either_fire(net: Net) -> None:
    opt = fusepass.optimize(net, (X,))
    seen: list[str] = []
    opt.register_forward_pre_hook(lambda *_: seen.append("pre"))
    handle = net.register_forward_hook(lambda *_: seen.append("post"))
    opt(X)
    assert seen == ["pre", "post"]
    handle.remove()
    net(X)
    assert seen == ["pre", "post", "pre"]
    every = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    opt(X)
    every.remove()
    assert {"OptimizedModule", "Conv2d"} <= set(seen)
    assert specialisations(opt) == 1


def test_hooks_fire_after_an_export(net: Net) -> None:
    """Which puts copies in place of the containers among a module's attributes."""
    opt, seen = fusepass.optimize(net, (X,)), []
    with torch.no_grad():
        opt(X)
        torch.export.export(opt, (X,))
        opt.register_forward_hook(lambda *_: seen.append("post"))
        net.register_forward_pre_hook(lambda *_: seen.append("pre"))
        opt(X)
    assert seen == ["pre", "post"]


def test_state_dict_hooks_and_extra_state_work() -> None:
    class Extra(nn.Linear):
        extra = 1

        def get_extra_state(self) -> Any:
            return {"extra": self.extra}

        def set_extra_state(self, state: Any) -> None:
            self.extra = state["extra"]

    model = Extra(3, 3)
    parent = nn.Sequential(fusepass.optimize(model))
    assert list(parent.state_dict()) == ["0.weight", "0.bias", "0._extra_state"]
    state = parent.state_dict()
    state["0._extra_state"] = {"extra": 9}
    parent.load_state_dict(state)
    assert model.extra == 9


def test_works_as_a_child(net: Net) -> None:
    parent = nn.Sequential(fusepass.optimize(net), nn.Flatten())
    close(parent(X), net(X).flatten(1))
    parent.train()
    assert net.norm.training
    parent.double()
    assert net.conv.weight.dtype is torch.float64
    whole = fusepass.optimize(parent.eval())
    close(whole(X.double()), net(X.double()).flatten(1))
    assert whole.report().capture is CaptureRoute.TRACED


def test_containers_can_be_indexed() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
    opt = fusepass.optimize(model)
    assert opt[1] is model[1]
    assert len(copy.deepcopy(opt)) == 2
    assert list(opt) == list(model)
    close(opt(X), model(X))


def test_copies_are_independent(net: Net) -> None:
    opt = fusepass.optimize(net, (X,), max_signatures=3)
    twin = copy.deepcopy(opt)
    net.conv.weight.zero_()
    assert isinstance(twin, OptimizedModule)
    assert twin.conv.weight.any()
    assert specialisations(twin) == 0
    close(twin(X), twin.original(X))
    close(opt(X), net(X))
    assert twin._options == {"max_signatures": 3}


def test_saves_and_loads(net: Net) -> None:
    opt = fusepass.optimize(net, (X,))
    file = io.BytesIO()
    torch.save(opt, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert isinstance(again, OptimizedModule)
    close(again(X), net(X))


def test_optimising_twice_does_not_wrap_twice(net: Net) -> None:
    again = fusepass.optimize(fusepass.optimize(net))
    assert again.original is net


# ---- the graph, compile, export


def test_graph_module(net: Net) -> None:
    opt = fusepass.optimize(net)
    graph = opt.graph_module(X)
    close(graph(X), net(X))
    assert graph.state_dict().keys() == net.state_dict().keys()
    assert all(graph.get_parameter(name) is p for name, p in net.named_parameters())
    assert "self.conv.weight" in graph.code
    assert "def forward(self, x):" in graph.code
    net.conv.weight.mul_(2)
    close(graph(X), net(X))
    close(graph(X.to(memory_format=torch.channels_last)), net(X))  # it compares nothing, but reads what it is given


def test_graph_module_with_nested_inputs() -> None:
    def forward(self: Any, batch: dict[str, Any], *, scale: float = 1.0) -> dict[str, Tensor]:
        return {"sum": torch.relu(batch["x"] + batch["more"][1]) * scale, "same": batch["x"]}

    opt = fusepass.optimize(module(forward))
    batch = {"x": torch.randn(3), "more": [None, torch.randn(3)]}
    result = opt.graph_module(batch, scale=2.0)(batch, scale=2.0)
    close(result["sum"], torch.relu(batch["x"] + batch["more"][1]) * 2)
    assert result["same"] is batch["x"]


def test_graph_module_without_a_graph() -> None:
    opt = fusepass.optimize(module(lambda self, x: x if x.sum().item() > 0 else -x))
    with pytest.raises(fusepass.CaptureError, match="depends on the values"):
        opt.graph_module(X)


def _fused(graph: torch.fx.Graph) -> int:
    return sum("fusepass" in str(node.target) for node in graph.nodes if node.op == "call_function")


@pytest.mark.invariant(23)
def test_compile_of_the_optimised_module_has_no_graph_break(net: Net) -> None:
    opt = fusepass.optimize(net, (X,))
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(opt, backend=backend, fullgraph=True)
    close(compiled(X), net(X))
    assert len(graphs) == 1
    assert _fused(graphs[0].graph) >= 1
    other = torch.randn(1, 3, 5, 5)
    close(compiled(other), net(other))
    assert _fused(graphs[-1].graph) == 0
    net.scale = 3.0
    close(compiled(X), net(X))
    net.train()
    close(compiled(X), copy.deepcopy(net)(X))


def test_export_of_the_optimised_module(net: Net) -> None:
    opt = fusepass.optimize(net, (X,))
    for strict in (False, True):
        program = torch.export.export(opt, (X,), strict=strict)
        assert _fused(program.graph) == 0
        close(program.module()(X), net(X))
        assert set(program.state_dict) == set(net.state_dict())


def test_gradients_in_compiled_code(net: Net) -> None:
    opt = fusepass.optimize(net, (X,))
    compiled = torch.compile(opt, backend="eager", fullgraph=True)
    compiled(X).square().sum().backward()
    gradient = net.conv.weight.grad
    net.zero_grad()
    net(X).square().sum().backward()
    close(gradient, net.conv.weight.grad)


# ---- the door


def test_example_inputs_compile_at_once(net: Net) -> None:
    for example in ((X,), {"x": X}, X):
        assert specialisations(fusepass.optimize(net, example)) == 1


def test_gradients_do_not_keep_example_inputs_from_compiling(net: Net) -> None:
    opt = fusepass.optimize(net, (X,))
    assert specialisations(opt) == 1
    with torch.no_grad():
        close(opt(X), net(X))
    assert specialisations(opt) == 1


def test_wrong_arguments_say_what_to_pass(net: Net) -> None:
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module, not a function"):
        fusepass.optimize(lambda x: x)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="an instance of Net, not the class"):
        fusepass.optimize(Net)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"unknown option max_signature; the options are .*max_signatures"):
        fusepass.optimize(net, max_signature=3)
    with pytest.raises(ValueError, match="max_signatures is 0"):
        fusepass.optimize(net, max_signatures=0)
    with pytest.raises(TypeError, match="example_inputs is a list; pass a tuple"):
        fusepass.optimize(net, [X])
    with pytest.raises(ValueError, match=r"Net rejects these inputs.*channels"):
        fusepass.optimize(net, (torch.randn(2, 5, 6, 6),))
    with pytest.raises(ValueError, match="Net rejects these inputs with TypeError"):
        fusepass.optimize(net, (X, X))


def test_explain_calls_nothing(net: Net) -> None:
    net.train()
    before = copy.deepcopy(net.state_dict())
    report = fusepass.explain(net, X)
    assert report.capture is CaptureRoute.TRACED
    assert report.model == "Net"
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_explain_of_an_untraceable_model_calls_a_copy() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.step += 1
        return torch.relu(x) * 2

    model = module(forward, step=0)
    with pytest.warns(FusepassWarning, match=r"self\.step"):
        report = fusepass.explain(model, X)
    assert report.capture is CaptureRoute.DYNAMO
    assert model.step == 0
