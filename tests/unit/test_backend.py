"""The torch.compile backend: forward, backward, dynamic shapes and graph breaks, by object and by name."""

from __future__ import annotations

import copy
import operator
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from fusepass.compile.pipeline import CompiledGraph
from fusepass.errors import FusepassWarning
from fusepass.runtime.fallbacks import FallbackCounter
from fusepass.training.backend import Backend, fusepass_backend
from fusepass.training.draws import with_draws
from tests.support.interpreted import interpreted

X = torch.randn(4, 6)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.norm = nn.LayerNorm(5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(torch.relu(self.norm(self.first(x))) * 2, -1)


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


@pytest.fixture
def made() -> list[CompiledGraph]:
    """The graphs that `backend` compiled."""
    return []


@pytest.fixture
def backend(made: list[CompiledGraph]) -> Backend:
    return Backend("test", {}, observe=made.append)


def test_forward(backend: Backend, made: list[CompiledGraph]) -> None:
    net = Net()
    compiled = torch.compile(net, backend=backend, fullgraph=True)
    with torch.no_grad():
        close(compiled(X), net(X))
    assert len(made) == 1
    assert made[0].report.ops_total > 0


@pytest.mark.invariant(22)
def test_gradients_are_eager_s(backend: Backend, made: list[CompiledGraph]) -> None:
    net, twin = Net(), Net()
    twin.load_state_dict(net.state_dict())
    compiled = torch.compile(net, backend=backend, fullgraph=True)
    x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
    for _ in range(2):
        compiled(x).square().sum().backward()
        twin(y).square().sum().backward()
    close(x.grad, y.grad)
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        close(p.grad, q.grad)
    assert len(made) == 2


def test_training_batch_norm(backend: Backend) -> None:
    net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU())
    twin = copy.deepcopy(net)
    compiled = torch.compile(net, backend=backend)
    for _ in range(2):
        close(compiled(X), twin(X))
    for name, value in net.state_dict().items():
        close(value, twin.state_dict()[name])


NORMALISED: dict[str, Callable[[], nn.Module]] = {
    "layer norm": lambda: nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 5)),
    "batch norm": lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU()),
}


@pytest.mark.parametrize("name", NORMALISED)
@pytest.mark.invariant(22)
def test_training_under_autocast_reads_statistics_in_the_type_in_which_they_were_saved(
    backend: Backend, made: list[CompiledGraph], name: str
) -> None:
    """PyTorch's fake kernels take float32 statistics of halves on a CPU for halves."""
    net, x = NORMALISED[name](), torch.randn(64, 6)
    twin = copy.deepcopy(net)
    for model in (torch.compile(net, backend=backend), twin):
        with warnings.catch_warnings(), torch.autocast("cpu", dtype=torch.bfloat16):
            warnings.simplefilter("error", FusepassWarning)
            loss = model(x).float().square().mean()
        loss.backward()
    for (path, p), q in zip(net.named_parameters(), twin.parameters(), strict=True):
        cancelled = name == "batch norm" and path == "0.bias"  # nothing but rounding errors
        assert cancelled or torch.linalg.norm(p.grad - q.grad) <= 0.05 * torch.linalg.norm(q.grad), path
    torch.testing.assert_close(list(net.buffers()), list(twin.buffers()), rtol=2e-2, atol=2e-2)
    assert len(made) == 3, "forward, and backward for what the fake kernels say and for what there is"
    assert all(graph.report.fallbacks == () for graph in made)


@pytest.mark.parametrize("gradients", [False, True])
def test_dynamic_shapes_are_specialised(backend: Backend, made: list[CompiledGraph], gradients: bool) -> None:
    net = Net()
    compiled = torch.compile(net, backend=backend, dynamic=True)
    with torch.set_grad_enabled(gradients):
        for size in (3, 4, 3, 7):
            x = torch.randn(size, 6, requires_grad=gradients)
            result, expected = compiled(x), net(x)
            close(result, expected)
            if gradients:
                (gradient,) = torch.autograd.grad(result.square().sum(), x)
                (expected_gradient,) = torch.autograd.grad(expected.square().sum(), x)
                close(gradient, expected_gradient)
    assert len(made) == 3 * (2 if gradients else 1)
    values = [node.meta["val"] for node in made[0].graph_module.graph.find_nodes(op="placeholder")]
    assert all(isinstance(size, int) for value in values for size in value.shape)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.invariant(21)
def test_dynamic_shapes_are_bounded(made: list[CompiledGraph], gradients: bool) -> None:
    """Sizes beyond the bound run the original operators, which is counted, with one warning."""
    net, fallbacks = Net(), FallbackCounter()
    backend = Backend("test", {"max_signatures": 2, "tune": "off"}, fallbacks=fallbacks, observe=made.append)
    compiled = torch.compile(net, backend=backend, dynamic=True)
    told: list[str] = []
    for size in (3, 4, 5, 6):
        x = torch.randn(size, 6, requires_grad=gradients)
        with warnings.catch_warnings(record=True) as caught, torch.set_grad_enabled(gradients):
            warnings.simplefilter("always")
            result = compiled(x)
            close(result, net(x))
            if gradients:
                close(*(torch.autograd.grad(y.square().sum(), x)[0] for y in (result, net(x))))
        told += [str(each.message) for each in caught if each.category is FusepassWarning]
    graphs = 2 if gradients else 1
    assert len(made) == 2 * graphs
    reason = "called with more than 2 sets of sizes; the option max_signatures allows more"
    assert told == [f"test runs as the original operators: {reason}"]
    assert [(each.reason, each.count) for each in fallbacks.records()] == [(reason, 2 * graphs)]


def test_sizes_in_results(backend: Backend) -> None:
    def function(x: Tensor) -> Any:
        return torch.relu(x) * x.shape[0], x.shape[0] * 2

    compiled = torch.compile(function, backend=backend, dynamic=True)
    for size in (3, 5):
        x = torch.randn(size, 2)
        result, double = compiled(x)
        close(result, torch.relu(x) * size)
        assert double == 2 * size


def test_graph_breaks(backend: Backend, made: list[CompiledGraph]) -> None:
    seen: list[float] = []

    def function(x: Tensor) -> Tensor:
        y = torch.relu(x) * 2
        seen.append(y.sum().item())
        torch._dynamo.graph_break()
        return torch.sigmoid(y) + 1

    close(torch.compile(function, backend=backend)(X), torch.sigmoid(torch.relu(X) * 2) + 1)
    assert len(made) >= 2
    assert len(seen) == 1


def test_mutation(backend: Backend) -> None:
    def function(x: Tensor) -> Tensor:
        x.add_(1)
        return x.relu().mul_(2)

    x, y = X.clone(), X.clone()
    close(torch.compile(function, backend=backend)(x), function(y))
    close(x, y)


def test_found_by_name() -> None:
    assert "fusepass" in torch._dynamo.list_backends()
    net = Net()
    with torch.no_grad():
        close(torch.compile(net, backend="fusepass")(X), net(X))


def test_options() -> None:
    net = Net()
    with torch.no_grad():
        close(torch.compile(net, backend=fusepass_backend, options={"max_signatures": 3})(X), net(X))
    with pytest.raises(Exception, match="unknown"):
        torch.compile(Net(), backend=fusepass_backend, options={"unknown": 3})(X)


class Wasteful(nn.Module):
    """What many algebraic rules have something to say about, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3)
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sigmoid(self.first(x) * 0.5 * 0.25 + 1 - 0.5).clamp(0, 1)
        y = torch.max_pool2d(torch.tanh(y).relu(), 2)
        y = (-(y * 2)).mean((2, 3)).abs()
        y = self.last(y.unsqueeze(0).expand(3, -1, -1).mean(0))
        return torch.softmax(y, 1) * y.logsumexp(1, keepdim=True) + (1 - y).amax(0) - (-y)


@pytest.mark.parametrize("algebra", ["off", "safe", "finite"])
def test_algebra_keeps_results_and_gradients(algebra: str) -> None:
    """AOTAutograd's forward and backward graphs go through the same rules as a captured model."""
    made: list[CompiledGraph] = []
    net, twin = Wasteful(), Wasteful()
    twin.load_state_dict(net.state_dict())
    x, also_x = (torch.randn(2, 3, 20, 20, requires_grad=True) for _ in range(2))
    also_x.data.copy_(x.data)
    compiled = torch.compile(net, backend=Backend("test", {"algebra": algebra}, observe=made.append), fullgraph=True)
    for _ in range(2):
        ours, theirs = compiled(x), twin(also_x)
        close(ours, theirs)
        ours.square().sum().backward()
        theirs.square().sum().backward()
        close(x.grad, also_x.grad)
        for parameter, other in zip(net.parameters(), twin.parameters(), strict=True):
            close(parameter.grad, other.grad)
            parameter.data -= 0.1 * parameter.grad
            other.data -= 0.1 * other.grad
    rules = {rewrite.rule for graph in made for rewrite in graph.report.rewrites}
    assert len(made) == 2
    assert ("affine-chain" in rules) == ("idle-clamp" in rules) == (algebra != "off")


class Counted(nn.Module):
    """Writes to a number that it made before a break of the graph."""

    def __init__(self, write: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.write = write

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        total = x.sum()
        torch._dynamo.graph_break()
        self.write(total)
        return x.exp() + 1, total


@pytest.mark.parametrize(
    "write", [lambda t: t.add_(1), lambda t: operator.iadd(t, 1), lambda t: torch.add(t, 1, out=t)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_number_that_is_written_to_is_no_constant(write: Callable[[Tensor], object], dtype: torch.dtype) -> None:
    x = torch.randn(4, 6, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(Counted(write), backend=Backend("test", {}))
        results = [compiled(x) for _ in range(2)]
    for result in results:
        torch.testing.assert_close(result, Counted(write)(x))


def test_what_is_left_for_its_writes_is_counted() -> None:
    fallbacks = FallbackCounter()
    compiled = torch.compile(Counted(lambda t: t.add_(1)), backend=Backend("test", {}, fallbacks=fallbacks))
    with pytest.warns(FusepassWarning, match="loses writes to a float64 tensor of no dimensions"):
        compiled(torch.randn(4, 6).double())
    compiled(torch.randn(4, 6).double())
    assert [each.count for each in fallbacks.records()] == [2]


class Centred(nn.Module):
    """A convolution's bias and a normalisation's, which cancel where means are subtracted."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        nn.init.normal_(self.norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.convolution(x))
        return y - y.mean((2, 3), keepdim=True)


def test_what_cancels_in_training_has_the_gradients_and_statistics_that_it_has() -> None:
    """Those of the two biases are zero, up to rounding; no region is compiled, so that nothing else is looked at."""
    made: list[CompiledGraph] = []
    net = Centred()
    twin = copy.deepcopy(net)
    x = torch.randn(4, 3, 20, 20)
    options = {"disable": "anchor,normalisation,reduction,pooling,pointwise"}
    compiled = torch.compile(net, backend=Backend("test", options, observe=made.append), fullgraph=True)
    for _ in range(2):
        ours, theirs = compiled(x), twin(x)
        close(ours, theirs)
        ours.pow(3).sum().backward()
        theirs.pow(3).sum().backward()
    for (name, parameter), other in zip(net.named_parameters(), twin.parameters(), strict=True):
        mine, eager = parameter.grad, other.grad
        assert mine is not None
        assert eager is not None
        if name.endswith("bias"):
            assert max(float(mine.abs().max()), float(eager.abs().max())) < 1e-2
        else:
            torch.testing.assert_close(mine, eager, rtol=1e-4, atol=1e-2)
            assert float(mine.abs().max()) > 1
    for buffer, other in zip(net.buffers(), twin.buffers(), strict=True):
        close(buffer, other)
    rules = {rewrite.rule for graph in made for rewrite in graph.report.rewrites}
    assert rules, "the stage has run"
    assert not {rule for rule in rules if "shift" in rule}, "the backward pass reads what the biases were added to"


def _draws_in_vain(x: Tensor) -> Tensor:
    torch.rand([]) * 2  # used, by what is not
    F.dropout(x)
    torch.empty(3).uniform_()
    x.clone().t_().exponential_()
    F.fractional_max_pool2d(x[None], 2, output_size=2, return_indices=True)
    F.gumbel_softmax(x) + F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
    return torch.tanh(x) * 2


def test_sizes_that_nothing_uses_are_no_draws() -> None:
    """Dynamo leaves such calls in a graph, for models that keep a cache, for example."""
    mode, graph = FakeTensorMode(shape_env=ShapeEnv()), fx.Graph()
    x, number = graph.placeholder("x"), graph.placeholder("number")  # of which nothing is known
    fake = mode.from_tensor(X, symbolic_context=StatelessSymbolicContext([DimDynamic.DYNAMIC] * 2))
    graph.call_function(operator.add, (number, 1)).meta["example_value"] = fake.shape[0]
    graph.output((x,))
    with tracing(TracingContext(mode)):
        run = with_draws(fx.GraphModule({}, graph), lambda whole: whole)
    assert len(run(X, 4)) == 1


def test_one_of_several_results_may_be_written_to(backend: Backend) -> None:
    """A copy of a product that is seen in another shape is left away, and the result is a view."""

    def layers(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return F.dropout((x @ w).view(2, 2, -1), 0.0, True).clone(), x * 2

    x, w = torch.randn(4, 6, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    found, _ = torch.compile(layers, backend=backend)(x, w)
    found[0] = 0
    found.sum().backward()
    close(x.grad, torch.cat((torch.zeros(2, 6), w.detach().sum(1).expand(2, 6))))


def _computed_in_vain(x: Tensor) -> Tensor:
    def one(row: Tensor) -> Tensor:
        row.cos() * 2
        return row.sin() + 1

    return torch.vmap(one)(x)


@pytest.mark.parametrize("gradients", [False, True])
def test_what_nothing_uses_in_a_transform_stays_there(backend: Backend, gradients: bool) -> None:
    x = X.clone().requires_grad_(gradients)
    close(torch.compile(_computed_in_vain, backend=backend)(x), X.sin() + 1)


@pytest.mark.parametrize("gradients", [False, True])
def test_numbers_that_nothing_uses_are_drawn(backend: Backend, gradients: bool) -> None:
    states = []
    for call in (_draws_in_vain, torch.compile(_draws_in_vain, backend=backend)):
        torch.manual_seed(0)
        close(call(X.clone().requires_grad_(gradients)), torch.tanh(X) * 2)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
def test_images_are_resized_to_sizes_that_are_open(mode: str) -> None:
    def larger(x: Tensor) -> Tensor:
        return F.interpolate(x, size=(x.shape[-2] * 2, x.shape[-1] + 1), mode=mode).tanh() * 2

    with interpreted():
        compiled = torch.compile(larger, backend="fusepass", dynamic=True)
        for size in (5, 6):
            x = torch.linspace(-1, 1, 2 * size * 7).view(1, 2, size, 7).sin().requires_grad_()
            found, wanted = compiled(x), larger(x)
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
            gradients = [torch.autograd.grad(each.square().sum(), x)[0] for each in (found, wanted)]
            torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)
