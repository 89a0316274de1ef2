"""Steps of training that are easily lost: results that nobody asks for, expanded gradients, writes to views, few rows or features."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fusepass.runtime.meta import Meta, with_strides
from fusepass.training import backend
from fusepass.training.backend import Backend
from fusepass.training.draws import with_draws
from fusepass.training.gradients import BENDS, DECOMPOSITIONS
from fusepass.training.joint import minimum_cut


@pytest.fixture(params=["as on a CPU", "as on a GPU"])
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    """Compiles with graphs that are cut as on that device, by operators alone: what is lost is lost before anything is built."""
    if request.param == "as on a GPU":
        monkeypatch.setattr(backend, "partition_joint", minimum_cut)
        monkeypatch.setattr(backend, "DECOMPOSITIONS", DECOMPOSITIONS | BENDS)
    torch._dynamo.reset()
    return lambda model: torch.compile(model, backend=Backend("graph", {"tune": "off"}))


def _step(call: Callable[..., Any], *inputs: Tensor) -> list[Tensor | None]:
    """Results and gradients of their sum, which expands one number."""
    given = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    results = torch.utils._pytree.tree_leaves(call(*given))
    sum(result.sum() for result in results).backward()
    return [*results, *(x.grad for x in given)]


def _same(found: list[Tensor | None], wanted: list[Tensor | None]) -> None:
    for mine, eager in zip(found, wanted, strict=True):
        if eager is None:
            assert mine is None
            continue
        torch.testing.assert_close(mine, eager, rtol=1e-4, atol=1e-5)
        assert mine is not None
        assert Meta.of(mine) == Meta.of(eager)


def _transposed(x: Tensor) -> Tensor:
    y = x * 1.5
    v = y.t()
    v.mul_(3)
    return v


def _unsqueezed(x: Tensor) -> Tensor:
    v = x.clone()
    v.unsqueeze_(0)
    return v


def _every_other(x: Tensor) -> Tensor:
    y = x * 1.5
    y.view(-1)[::2].mul_(3)
    return y


FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "one feature": (lambda x, w: F.linear(F.gelu(x), w), (torch.randn(3, 4), torch.randn(1, 4))),
    "one row": (lambda x, w: F.linear(F.gelu(x), w), (torch.randn(1, 4), torch.randn(3, 4))),
    "an expanded number": (lambda s, x: s.expand(3, 1) @ x, (torch.randn(()), torch.randn(1, 4))),
    "squared differences": (lambda x: F.mse_loss(x.min(1)[0], x, reduction="none"), (torch.randn(1, 4, 9, 9),)),
    "smooth differences": (lambda x: F.smooth_l1_loss(x.min(1)[0], x, reduction="none"), (torch.randn(1, 4, 9, 9),)),
    "cosines": (lambda x: F.cosine_similarity(x.min(1)[0], x), (torch.randn(1, 4, 9, 9),)),
    "targets end at a -1": (
        lambda x, t: F.multilabel_margin_loss(x * 2, t, reduction="none"),
        (torch.randn(3, 5), torch.tensor([[3, 0, -1, 1, 2], [-1, 0, 1, 2, 3], [0, 0, 4, 1, 2]])),
    ),
    "a convolution whose weight is channels last": (
        lambda x, w: F.conv2d(F.batch_norm(x.mT, None, None, training=True), w).sin(),
        (torch.randn(2, 3, 5, 4), torch.randn(4, 3, 3, 3).to(memory_format=torch.channels_last)),
    ),
    "a solver, which may raise": (
        lambda x: torch.linalg.solve(torch.eye(3) * 4 + x, x.sin()).tanh(),
        (torch.rand(3, 3),),
    ),
    "a view is written": (_transposed, (torch.randn(4, 6),)),
    "a shape is changed in place": (_unsqueezed, (torch.randn(4, 6),)),
    "part of a view is written": (_every_other, (torch.randn(4, 6),)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.invariant(41)
def test_functions(name: str, compiled: Callable[[Any], Any]) -> None:
    function, inputs = FUNCTIONS[name]
    _same(_step(compiled(function), *inputs), _step(function, *inputs))


def _frozen(module: nn.Module, *names: str) -> nn.Module:
    for name in names:
        getattr(module, name).requires_grad_(False)
    return module


FIRST: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "layer norm": (nn.LayerNorm(8), (4, 8)),
    "layer norm, frozen bias": (_frozen(nn.LayerNorm(8), "bias"), (4, 8)),
    "layer norm, frozen weight": (_frozen(nn.LayerNorm(8), "weight"), (4, 8)),
    "group norm": (nn.GroupNorm(2, 8), (4, 8, 5)),
    "group norm, frozen bias": (_frozen(nn.GroupNorm(2, 8), "bias"), (4, 8, 5)),
    "batch norm, frozen weight": (_frozen(nn.BatchNorm2d(8), "weight"), (4, 8, 5, 5)),
    "convolution, frozen bias": (_frozen(nn.Conv2d(3, 4, 3), "bias"), (2, 3, 8, 8)),
    "linear, frozen weight": (_frozen(nn.Linear(3, 4), "weight"), (2, 3)),
}


@pytest.mark.parametrize("name", FIRST)
@pytest.mark.invariant(41)
def test_a_layer_whose_input_needs_no_gradient(name: str, compiled: Callable[[Any], Any]) -> None:
    """Nobody asks for some of the results of its gradient."""
    layer, shape = FIRST[name]
    model, x = copy.deepcopy(nn.Sequential(layer, nn.GELU())), torch.randn(shape)
    twin = copy.deepcopy(model)
    _same([_sum(compiled(twin)(x)), *_gradients(twin)], [_sum(model(x)), *_gradients(model)])


def _sum(result: Tensor) -> Tensor:
    result.sum().backward()
    return result


def _gradients(model: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


LAYOUTS = {
    "channels last": torch.randn(2, 4, 5, 5).contiguous(memory_format=torch.channels_last),
    "transposed": torch.randn(2, 4, 5, 6).mT,
    "gaps": torch.randn(2, 4, 5, 9)[..., ::2],
    "permuted": torch.randn(4, 5, 2, 6).permute(2, 0, 1, 3),
    "expanded": torch.randn(2, 4, 1, 6).expand(2, 4, 5, 6),
}


NORMALISED: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(-1) * 2,
    "softmax of channels": lambda x: x.softmax(1) * 2,
    "its logarithm": lambda x: F.log_softmax(x, 1) * 2,
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]).tanh(),
    "group norm": lambda x: F.group_norm(x, 2).tanh(),
    "seen in another shape": lambda x: x.softmax(-1).view(8, -1).exp(),
}


@pytest.mark.thinned(4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NORMALISED)
def test_normalised_values_lie_as_eager_lays_them_out(name: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes their place in the joint graph of a GPU is made of the input, which may lie otherwise."""
    monkeypatch.setattr(backend, "partition_joint", minimum_cut)
    function, x = NORMALISED[name], LAYOUTS[layout].detach().requires_grad_()
    torch._dynamo.reset()
    results = [torch.compile(function, backend=each)(x) for each in ("aot_eager", Backend("graph", {"tune": "off"}))]
    gradients = [torch.autograd.grad(result.square().sum(), x)[0] for result in results]
    for wanted, found in (results, gradients):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert Meta.of(results[1]) == Meta.of(results[0])


@pytest.mark.thinned(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.invariant(42)
def test_strides_behind_a_batch_norm(layout: str, training: bool, compiled: Callable[[Any], Any]) -> None:
    """Fake kernels keep those of the input."""
    model, x = nn.Sequential(nn.BatchNorm2d(4), nn.Tanh()).train(training), LAYOUTS[layout]
    wanted = model(x)
    found = compiled(copy.deepcopy(model))(x)
    assert Meta.of(found) == Meta.of(wanted)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "like",
    [
        torch.randn(9).unfold(0, 4, 1),
        torch.randn(3, 1, 4).expand(3, 5, 4)[:, :, ::2],
        torch.randn(()).expand(4, 4),
        torch.randn(0, 3).t(),
    ],
)
def test_a_copy_may_share_memory_among_elements(like: Tensor) -> None:
    found = with_strides(like.clone(memory_format=torch.contiguous_format), Meta.of(like))
    assert torch.equal(found, like)
    assert found.stride() == like.stride()


def test_strides_of_one_element_need_no_copy() -> None:
    x = torch.randn(1, 4)
    assert with_strides(x, Meta((1, 4), (7, 1), x.dtype)).data_ptr() == x.data_ptr()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.invariant(43)
def test_what_forward_saved_is_let_go_of_where_backward_has_read_it(dynamic: bool) -> None:
    layers = [layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.GELU())]
    model, x = nn.Sequential(*layers), torch.randn(256, 256)
    peaks = []
    for each in ("aot_eager", Backend("graph", {"tune": "off"})):
        torch._dynamo.reset()
        call = torch.compile(model, backend=each, dynamic=dynamic)
        call(x).sum().backward()  # compiles
        loss = call(x).sum()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as found:
            loss.backward()
        peaks.append(_peak(found))
    assert peaks[1] < peaks[0] + x.nbytes


def _peak(profile: torch.profiler.profile) -> int:
    """Bytes allocated at most, beyond what was there before."""
    assert profile.profiler is not None
    events = [each for each in profile.profiler.kineto_results.events() if each.name() == "[memory]"]
    return max(itertools.accumulate(each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())))


@pytest.mark.invariant(41)
def test_writes_draw_nothing() -> None:
    """What a call does not use of a write is not kept among the results, as an unused draw is."""

    def model(x: Tensor) -> Tensor:
        y = x * 2
        y.add_(1)
        y.relu_()
        F.dropout(x)
        F.dropout(x, training=False)
        return y.sum()

    found: list[int] = []

    def counted(graph: fx.GraphModule, inputs: object) -> Callable[..., Any]:
        def whole(traced: fx.GraphModule) -> Callable[..., Any]:
            found.append(len(traced.graph.output_node().args[0]))  # type: ignore[arg-type]
            return traced.forward

        return with_draws(graph, whole)

    torch._dynamo.reset()
    assert torch.compile(model, backend=counted)(torch.ones(3)) == 9
    assert found == [2]
