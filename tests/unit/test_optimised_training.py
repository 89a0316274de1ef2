"""Training through `fusepass.optimize`: results, gradients, buffers and generators beside eager's, judged against float64."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusepass
from fusepass.errors import FusepassWarning
from fusepass.report.records import RegionState
from fusepass.report.report import CaptureRoute, Report

Step = Callable[[nn.Module, Tensor], Tensor]


class Block(nn.Module):
    """A layer of a transformer, normalised first."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.qkv(self.first(x)).chunk(3, -1)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Tied(nn.Module):
    """Words in, words out, by one table."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.block = nn.Embedding(11, 16), Block()
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x[..., 0] * 5).long().clamp(-5, 5) + 5
        return F.cross_entropy(self.head(self.block(self.words(tokens))).flatten(0, 1), tokens.flip(1).flatten())


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.drop, self.last = Block(), nn.Dropout(dropout), nn.Linear(16, 4)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(lambda t: self.drop(self.first(t)), x.sin(), use_reentrant=self.reentrant)
        return self.last(hidden)


class Deep(nn.Module):
    """Stochastic depth below a checkpoint: its random numbers depend on no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        def residual(t: Tensor) -> Tensor:
            return t + self.block(t) * torch.rand(len(t), 1, 1, dtype=t.dtype).add(0.6).floor() / 0.6

        return checkpoint(residual, x.sin(), use_reentrant=False).tanh()


class PartlyScripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.script, self.last = mlp(), torch.jit.script(nn.Linear(8, 16)), mlp()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.script(self.first(x)))
        return result


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.norm = nn.GRU(16, 8, batch_first=True), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.gru(x)[0])).mean(1)


class Writing(nn.Module):
    """Writes to what it made, to a buffer and to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("seen", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        y[..., :4] = y[..., :4].sigmoid()
        y.mul_(2).add_(self.seen)
        self.seen.add_(x.detach().mean((0, 1)))
        return F.silu(y)


class WritingInput(nn.Module):
    """Writes to its input, and gives views."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        torch._dynamo.graph_break()
        return torch.cat([each.flatten() for each in self.write(x)])

    def write(self, x: Tensor) -> tuple[Tensor, ...]:
        x.mul_(2)
        x[..., :3] = 0
        y = torch.sigmoid(self.layer(x)) * x
        return y[0], y.transpose(0, 1), x


class Prompted(nn.Module):
    """Puts a row that it learned in each of some places: the gradient has as many rows as the mask has places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.prompt, self.last = Block(), nn.Parameter(torch.ones(2, 16)), mlp()

    def forward(self, x: Tensor) -> Tensor:
        hidden, places = self.first(x), torch.zeros(x.shape[:2], dtype=torch.bool)
        places[:, 0] = True
        hidden[places] = self.prompt
        return self.last(hidden)


class Force(nn.Module):
    """An energy and its gradient, which forward itself takes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> Tensor:
        energy = self.net(x).square().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8), nn.Softmax(-1))


def image(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Unflatten(-1, (4, 4)), *layers)


def frozen() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return model


def hooked() -> nn.Module:
    model = mlp()
    model[1].register_forward_hook(lambda module, args, result: result * 2)
    model[0].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model[3].weight.register_hook(lambda gradient: gradient * 3)
    return model


def hooked_backward() -> nn.Module:
    model = mlp()
    model[2].register_full_backward_hook(lambda module, grads, outs: (grads[0] * 2,))
    model[0].register_full_backward_pre_hook(lambda module, outs: (outs[0] * 3,))
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "conv and batch norm": lambda: image(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()),
    "block": Block,
    "tied embedding": Tied,
    "gru": Recurrent,
    "dropout": lambda: nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.4), nn.GELU(), nn.LayerNorm(32), nn.Dropout(0.1)),
    "frozen layers": frozen,
    "checkpoint": lambda: Checkpointed(reentrant=False),
    "checkpoint with numbers of their own": Deep,
    "reentrant checkpoint": lambda: Checkpointed(reentrant=True),
    "checkpoint with dropout": lambda: Checkpointed(reentrant=False, dropout=0.3),
    "reentrant checkpoint with dropout": lambda: Checkpointed(reentrant=True, dropout=0.3),
    "hooks": hooked,
    "backward hooks": hooked_backward,
    "writes": Writing,
    "writes to its input": WritingInput,
    "prompt": Prompted,
    "TorchScript part": PartlyScripted,
}
BY_CHILDREN = {"backward hooks", "TorchScript part"}
"""What Dynamo finds no graph in."""

X = torch.linspace(-1, 1, 2 * 3 * 16).view(2, 3, 16).sin()


def stepped(
    call: Callable[..., Any], owner: nn.Module, x: Tensor, *, steps: int = 2, autocast: bool = False
) -> tuple[list[Tensor], Tensor]:
    """Results, gradients, which gather over the steps, and buffers; and the generator's state afterwards."""
    torch.manual_seed(3)
    found = []
    for step in range(steps):
        given = (x + step / 8).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            result = call(given)
        weights = torch.linspace(-1, 2, result.numel(), dtype=result.dtype).view(result.shape)
        (result * weights).sum().backward()
        found += [result.detach(), *([given.grad] if given.grad is not None else [])]
    found += [each.grad for each in owner.parameters() if each.grad is not None]
    return found + [each.clone() for each in owner.buffers()], torch.get_rng_state()


def check(found: list[Tensor], eager: list[Tensor], exact: list[Tensor], unit: float = 2e-7) -> None:
    """Assert that nothing errs more than twice as much as eager, relative to float64."""
    assert len(found) == len(eager) == len(exact)
    for got, theirs, wanted in zip(found, eager, exact, strict=True):
        assert got.dtype is theirs.dtype
        assert got.shape == theirs.shape
        error, allowed = (got - wanted).norm(), 2 * (theirs - wanted).norm() + 4 * unit * wanted.norm() + 1e-12
        assert error <= allowed


def trained(make: Callable[[], nn.Module], x: Tensor = X, *, autocast: bool = False, **options: Any) -> Report:
    """Steps of a model that were compared with eager's; the report of it."""
    models = []
    for _ in range(3):  # no copies, which have no hooks of tensors
        torch.manual_seed(0)
        models.append(make())
    model, eager, wide = models[0], models[1], models[2].double()
    optimised = fusepass.optimize(model, **options)
    found, state = stepped(optimised, model, x, autocast=autocast)
    expected, expected_state = stepped(eager, eager, x, autocast=autocast)
    drawing = not torch.equal(state, torch.Generator().manual_seed(3).get_state())
    exact = expected if drawing else stepped(wide, wide, x.double())[0]  # float64 draws other numbers
    check(found, expected, [each.double() for each in exact], unit=8e-3 if autocast else 2e-7)
    assert torch.equal(state, expected_state)
    return optimised.report()


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_as_exact_as_eager_s(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FusepassWarning)
        report = trained(MODELS[name])
    assert report.fallbacks == ()
    assert report.capture is (CaptureRoute.CHILDREN if name in BY_CHILDREN else CaptureRoute.DYNAMO)
    assert any(region.state is RegionState.FUSED for region in report.regions)
    assert report.backward is not None
    assert any(region.state is RegionState.FUSED for region in report.backward.regions)


@pytest.mark.parametrize("name", ["mlp", "block", "conv and batch norm"])
def test_autocast(name: str) -> None:
    report = trained(MODELS[name], autocast=True)
    assert report.fallbacks == ()
    assert report.backward is not None


def test_the_report_tells_of_backward_and_survives_json() -> None:
    model = mlp()
    optimised = fusepass.optimize(model)
    optimised(X).sum().backward()
    report = optimised.report()
    assert report.backward is not None
    assert report.backward.backward is None
    assert {op.target for region in report.backward.regions for op in region.ops} >= {
        "aten.gelu_backward",
        "aten.native_layer_norm_backward",
    }
    assert not any("backward" in op.target for region in report.regions for op in region.ops)
    assert {op.location for region in report.regions for op in region.ops} == {"0", "1", "2", "3", "4"}
    assert Report.from_json(report.to_json()) == report
    forward, backward = str(report).split("\n\nbackward\n\n")
    assert "gelu_backward" in backward
    assert "gelu_backward" not in forward
    merged = Report.merge([report, report])
    assert merged.backward is not None
    assert merged.backward.ops_total == 2 * report.backward.ops_total


def test_switches_rebuild_nothing() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5), nn.GELU(), nn.LayerNorm(32))
    optimised = fusepass.optimize(model)
    counts = []
    for _ in range(3):
        for training in (True, False):
            optimised.train(training)
            optimised(X).sum().backward()
            with torch.no_grad():
                optimised(X)
        model[0].weight.requires_grad_(False)
        optimised(X).sum().backward()
        model[0].weight.requires_grad_(True)
        report = optimised.report()
        assert report.backward is not None
        counts.append((len(report.graphs), len(report.backward.graphs)))
    assert counts[0] == counts[1] == counts[2]
    assert optimised.report().fallbacks == ()


def test_steps_of_an_optimiser_are_eager_s() -> None:
    torch.manual_seed(0)
    model, steps = mlp(), []
    twin = copy.deepcopy(model)
    for call, owner in ((fusepass.optimize(model), model), (twin, twin)):
        optimiser = torch.optim.AdamW(call.parameters(), lr=1e-2)
        losses = []
        for _ in range(8):
            optimiser.zero_grad()
            loss = (call(X) - 0.3).square().mean()
            loss.backward()
            optimiser.step()
            losses.append(loss.detach())
        steps.append([*losses, *owner.parameters()])
    torch.testing.assert_close(*steps, rtol=1e-3, atol=1e-4)
    assert all(a is b for a, b in zip(fusepass.optimize(model).parameters(), model.parameters(), strict=True))


def test_inputs_alone_may_need_gradients() -> None:
    model = mlp().requires_grad_(False)
    twin = copy.deepcopy(model).double()
    optimised = fusepass.optimize(model)
    x, y = X.clone().requires_grad_(), X.double().requires_grad_()
    for call, given in ((optimised, x), (twin, y)):
        (call(given) * torch.arange(8)).sum().backward()
    torch.testing.assert_close(x.grad, y.grad.float(), rtol=1e-4, atol=1e-6)
    assert not optimised(X).requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())
    assert optimised.report().fallbacks == ()


def test_what_is_changed_between_steps_shows() -> None:
    """Hooks, methods and parameters of the model, after graphs were made."""
    model = mlp()
    optimised = fusepass.optimize(model)
    first = optimised(X)
    handle = model[1].register_forward_hook(lambda module, args, result: result * 0)
    torch.testing.assert_close(optimised(X), model(X))
    assert not torch.equal(optimised(X), first)
    handle.remove()
    torch.testing.assert_close(optimised(X), first)
    outer = optimised.register_forward_hook(lambda module, args, result: result + 1)
    torch.testing.assert_close(optimised(X), first + 1)
    outer.remove()
    model[3].weight = nn.Parameter(torch.zeros(8, 32))
    model[1].forward = torch.sin
    result = optimised(X)
    torch.testing.assert_close(result, model(X))
    result.square().sum().backward()
    assert model[3].weight.grad is not None


def test_training_may_be_left_to_eager() -> None:
    optimised = fusepass.optimize(mlp(), training="eager")
    with pytest.warns(FusepassWarning, match="needs gradients"):
        optimised(X).sum().backward()
    assert optimised.report().regions == ()
    assert [entry.count for entry in optimised.report().fallbacks] == [1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fusepass.optimize(mlp(), disable="all")(X).sum().backward()


# ---- gradients of gradients


def penalised(call: Callable[..., Any], owner: nn.Module, x: Tensor) -> list[Tensor]:
    """Two steps with a penalty on the gradient of the input; all that they make."""
    torch.manual_seed(3)
    found = []
    for step in range(2):
        given = (x + step / 8).requires_grad_()
        result = call(given)
        weights = torch.linspace(-1, 2, result.numel(), dtype=result.dtype).view(result.shape)
        (gradient,) = torch.autograd.grad((result.square() * weights).sum(), given, create_graph=True)
        (gradient.square().sum() + result.sum()).backward()
        found += [result.detach(), gradient.detach()]
    found += [each.grad for each in owner.parameters() if each.grad is not None]
    return found + [each.clone() for each in owner.buffers()]


@pytest.mark.parametrize(
    "name", ["mlp", "conv and batch norm", "dropout", "writes", "writes to its input", "backward hooks"]
)
def test_gradients_of_gradients_are_the_original_s(name: str) -> None:
    models = []
    for _ in range(3):
        torch.manual_seed(0)
        models.append(MODELS[name]().train())
    model, eager, wide = models[0], models[1], models[2].double()
    optimised = fusepass.optimize(model)
    with pytest.warns(FusepassWarning, match="gradients of its gradients are taken"):
        found = penalised(optimised, model, X)
    state = torch.get_rng_state()
    expected = penalised(eager, eager, X)
    assert torch.equal(state, torch.get_rng_state())
    exact = expected if name == "dropout" else penalised(wide, wide, X.double())
    check(found, expected, [each.double() for each in exact])
    assert {entry.reason for entry in optimised.report().fallbacks} == {"gradients of its gradients are taken"}


def test_forward_may_take_gradients() -> None:
    with pytest.warns(FusepassWarning, match="gradients of its gradients are taken"):
        report = trained(Force)
    assert report.backward is not None
    seen = [code() for code in torch._dynamo.convert_frame.input_codes.seen]
    assert "again.py" not in {
        Path(code.co_filename).name for code in seen if code is not None
    }  # Dynamo compiles none of it


def test_many_gradients_at_once_are_the_original_s() -> None:
    model = mlp()
    optimised = fusepass.optimize(model)
    with pytest.warns(FusepassWarning, match="vmap"):
        found = torch.autograd.functional.jacobian(optimised, X, vectorize=True)
    torch.testing.assert_close(found, torch.autograd.functional.jacobian(model, X))
    mapped = torch.func.vmap(torch.func.grad(lambda x: optimised(x).square().sum()))
    with pytest.warns(FusepassWarning, match="torch.func transform"):
        found = mapped(X)
    torch.testing.assert_close(found, torch.func.vmap(torch.func.grad(lambda x: model(x).square().sum()))(X))


def test_an_argument_that_was_written_since_is_told() -> None:
    optimised = fusepass.optimize(nn.Sequential(nn.GELU(), nn.LayerNorm(16)))
    x = X.clone().requires_grad_()
    doubled = x * 2
    result = optimised(doubled)
    with torch.no_grad():
        doubled.add_(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FusepassWarning)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(result.sum(), x, create_graph=True)


def test_what_a_call_was_given_is_let_go() -> None:
    """By backward, though what autograd recorded of the call is still there."""
    optimised = fusepass.optimize(mlp())
    x = X.clone()
    given = weakref.ref(x)
    loss = optimised(x).sum()
    del x
    loss.backward()
    assert loss.grad_fn is not None
    assert given() is None


def test_a_model_that_was_trained_is_let_go() -> None:
    model = mlp()
    optimised = fusepass.optimize(model)
    optimised(X).sum().backward()
    gone = weakref.ref(model)
    del model, optimised
    gc.collect()
    assert gone() is None


def test_more_graphs_than_are_kept_run_as_the_original() -> None:
    class Repeated(nn.Module):
        def forward(self, x: Tensor, name: str) -> Tensor:
            return F.gelu(x * len(name)).sin()

    optimised, x = fusepass.optimize(Repeated(), max_signatures=2), X.clone().requires_grad_()
    optimised(x, "a")
    optimised(x, "bb")
    with pytest.warns(FusepassWarning, match="Dynamo made 2 graphs already"):
        result = optimised(x, "ccc")
    torch.testing.assert_close(result, F.gelu(x * 3).sin())
    torch.testing.assert_close(optimised(x, "dddd"), F.gelu(x * 4).sin())
    assert [entry.count for entry in optimised.report().fallbacks] == [2]


# ---- many processes


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("inside", [True, False])
def test_distributed_data_parallel(inside: bool) -> None:
    torch.manual_seed(0)
    model = mlp()
    twin = copy.deepcopy(model)
    parallel = nn.parallel.DistributedDataParallel
    optimised = fusepass.optimize(model if inside else parallel(model))
    called = parallel(optimised) if inside else optimised
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FusepassWarning)  # DDP's own forward is not one graph
        for call in (called, twin):
            for _ in range(2):
                call(X).square().sum().backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    report = optimised.report()
    assert report.fallbacks == ()
    assert report.backward is not None
    assert report.backward.regions


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("inside", [True, False])
def test_sharded_parameters_train_by_the_original(inside: bool) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = mlp()
    twin = copy.deepcopy(model)
    if inside:
        optimised = fusepass.optimize(model)
        optimised(X)  # graphs of what is not sharded yet
        fully_shard(optimised)
    else:
        fully_shard(model[0])
        fully_shard(model)
        optimised = fusepass.optimize(model)
    with pytest.warns(FusepassWarning, match="FSDP"):
        result = optimised(X)
    result.square().sum().backward()
    twin(X).square().sum().backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
