"""Gradients taken apart: of functions that bend, and of convolutions, each equal to the library's, and what becomes of that of the weight."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.program import CONVERSION_TARGET
from fusepass.codegen.lowering.decompositions import CORRECTED
from fusepass.codegen.lowering.formats import AnchorFormat, channels_last_strides
from fusepass.codegen.lowering.tracer import Spec
from fusepass.codegen.search.space import anchor_formats, search_space
from fusepass.compile.pipeline import CompiledGraph
from fusepass.patterns.partition import partition
from fusepass.training import backend, calls
from fusepass.training.backend import Backend
from fusepass.training.gradients import BENDS, DECOMPOSITIONS, gradients_apart
from fusepass.training.joint import minimum_cut
from tests.support.regions import TILES, region, trace

aten = torch.ops.aten
H200 = DeviceFacts.h200()
APART = DECOMPOSITIONS[aten.convolution_backward.default]

LIMITS: dict[torch._ops.OpOverload, tuple[float | bool, ...]] = {
    aten.threshold_backward.default: (0.3,),
    aten.leaky_relu_backward.default: (0.1, False),
    aten.hardtanh_backward.default: (-0.7, 0.7),
    aten.hardsigmoid_backward.default: (),
}
"""What gradients are given besides a gradient and a value."""

GEOMETRIES = {
    "dense": ((1,), (0,), (1,), 0, 1),
    "padded": ((1,), (1,), (1,), 0, 1),
    "steps": ((2,), (1,), (1,), 1, 1),
    "steps, the last elements in no window": ((3,), (0,), (2,), 1, 2),
    "groups": ((2,), (0,), (1,), 0, 2),
    "depthwise": ((1,), (1,), (1,), 0, 4),
}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_of_binary_cross_entropy_at_its_ends(reduction: int, weighted: bool) -> None:
    """Where probabilities are 0 or 1, what is divided by is a number that PyTorch's kernels round to float32."""
    x, target = torch.tensor([0.0, 1.0, 0.3, 1e-13], dtype=torch.float64), torch.tensor([0.5, 0.0, 1.0, 1.0]).double()
    gradient = torch.randn(x.shape if reduction == 0 else ()).double()
    given = (gradient, x, target, target + 0.3 if weighted else None, reduction)
    backward = aten.binary_cross_entropy_backward.default
    torch.testing.assert_close(CORRECTED[backward](*given), backward(*given), rtol=1e-15, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_of_functions_that_bend(dtype: torch.dtype) -> None:
    """To the bit, for float64, too, in which PyTorch's kernels round some numbers to float32."""
    gradient, x = torch.randn(2, 200).to(dtype), torch.randn(2, 200).mul(4).to(dtype)
    assert BENDS.keys() == LIMITS.keys()
    for target, function in BENDS.items():
        assert torch.equal(function(gradient, x, *LIMITS[target]), target(gradient, x, *LIMITS[target])), target


def convolution_of(rank: int, name: str, *, transposed: bool) -> tuple[Tensor, Tensor, tuple[object, ...]]:
    """An input, a weight, and what `aten.convolution` takes after the bias."""
    stride, padding, dilation, over, groups = GEOMETRIES[name]
    x = torch.randn(2, 4, *(11, 10, 9)[:rank], dtype=torch.float64)
    channels = (4, 8 // groups) if transposed else (8, 4 // groups)
    weight = torch.randn(*channels, *(3, 2, 3)[:rank], dtype=torch.float64)
    return x, weight, (list(stride), list(padding), list(dilation), transposed, [over if transposed else 0], groups)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_each_is_what_the_library_computes(name: str, rank: int, transposed: bool) -> None:
    x, weight, geometry = convolution_of(rank, name, transposed=transposed)
    gradient = torch.randn_like(aten.convolution(x, weight, None, *geometry))
    for mask in product([False, True], repeat=3):
        if not any(mask):
            continue
        wanted = aten.convolution_backward(gradient, x, weight, [8], *geometry, mask)
        found = gradients_apart(gradient, x, weight, [8], *geometry, mask)
        for mine, theirs, asked in zip(found, wanted, mask, strict=True):
            assert (mine is not None) is asked
            if mine is not None:
                assert mine.stride() == theirs.stride()
                torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_they_are_taken_apart_on_a_gpu() -> None:
    """Not where there is one already, on a CPU, for no samples, or where the gradient has windows that are no element's."""

    def asked(device: str, mask: tuple[bool, ...], samples: int = 2, over: int = 0) -> object:
        with FakeTensorMode():
            x, weight = torch.empty(samples, 4, 9, 9, device=device), torch.empty(4, 8, 3, 3, device=device)
            gradient = torch.empty(samples, 8, 13 + over, 13 + over, device=device)
            return APART(gradient, x, weight, [8], [1, 1], [0, 0], [2, 2], True, [over, over], 1, mask)

    assert asked("cuda", (True, True, True)) is not NotImplemented
    assert asked("cuda", (False, True, True)) is not NotImplemented
    assert asked("cuda", (False, True, False)) is NotImplemented
    assert asked("cpu", (True, True, True)) is NotImplemented
    assert asked("cuda", (True, True, True), samples=0) is NotImplemented
    assert asked("cuda", (True, True, True), over=1) is NotImplemented


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let graphs of this CPU be taken apart and cut as those of a GPU are."""

    def apart(gradient: Tensor, x: Tensor, weight: Tensor, *rest: object) -> object:
        known = all(isinstance(size, int) for each in (gradient, x) for size in each.shape)
        mask = rest[-1]
        assert isinstance(mask, list)
        return gradients_apart(gradient, x, weight, *rest) if known and (mask[0] or mask[2]) else NotImplemented

    monkeypatch.setattr(backend, "partition_joint", minimum_cut)
    for module in (backend, calls):  # the latter takes graphs of open sizes apart once these are known
        monkeypatch.setattr(module, "DECOMPOSITIONS", {aten.convolution_backward.default: apart})


def _compiled(model: nn.Module, dynamic: bool | None = None) -> tuple[Callable[[Tensor], Tensor], list[CompiledGraph]]:
    made: list[CompiledGraph] = []
    torch._dynamo.reset()
    how = Backend("graph", {"tune": "off"}, observe=made.append)
    return torch.compile(model, backend=how, dynamic=dynamic), made


MODELS: dict[str, Callable[[], nn.Module]] = {
    "relu": lambda: nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Conv2d(6, 5, 3, stride=2)),
    "batch norm": lambda: nn.Sequential(
        nn.Conv2d(4, 6, 3, bias=False), nn.BatchNorm2d(6), nn.SiLU(), nn.Conv2d(6, 4, 1)
    ),
    "depthwise": lambda: nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1, groups=4), nn.GELU(), nn.Conv2d(8, 8, 5, groups=8)
    ),
    "transposed": lambda: nn.Sequential(
        nn.ConvTranspose2d(4, 6, 3, 2, 1, 1), nn.Tanh(), nn.ConvTranspose2d(6, 3, 2, 2)
    ),
}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.thinned(3)
def test_gradients_are_eager_s(name: str, dynamic: bool | None) -> None:
    model = MODELS[name]().double()
    compiled, made = _compiled(model, dynamic)
    for size in (12, 12, 15) if dynamic else (12,):
        found = []
        x = torch.randn(2, 4, size, size, dtype=torch.float64)
        for run in (model, compiled):
            model.zero_grad()
            given = x.clone().requires_grad_()
            run(given).square().sum().backward()
            found.append([given.grad, *(each.grad for each in model.parameters())])
        for mine, eager in zip(found[1], found[0], strict=True):
            assert mine is not None
            torch.testing.assert_close(mine, eager, rtol=1e-9, atol=1e-9)
    for graph in made:
        for node in graph.before.graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
            assert tuple(node.args[10]) == (False, True, False)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_what_surrounds_them_fuses_with_them() -> None:
    """The gradient of the second convolution's input, of relu, and of the first one's bias."""
    compiled, made = _compiled(MODELS["relu"]())
    compiled(torch.randn(2, 4, 12, 12, requires_grad=True)).square().sum().backward()
    names = [work.region.name for work in made[-1].works]
    assert any(name.startswith("conv_transpose2d") and "threshold_backward" in name and "sum" in name for name in names)


def test_running_statistics_are_written_in_the_graph() -> None:
    """There a few calls write all of them."""
    compiled, made = _compiled(MODELS["batch norm"]())
    compiled(torch.randn(2, 4, 12, 12, requires_grad=True)).sum().backward()
    writes = made[0].before.graph.find_nodes(op="call_function", target=aten.copy_.default)
    assert len(writes) == 3  # mean, variance, and how many batches


def weight_gradient(gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    groups = x.shape[1] // weight.shape[1]
    geometry = ([1, 1], [1, 1], [1, 1], False, [0, 0], groups, [False, True, False])
    result: Tensor = aten.convolution_backward(gradient, x, weight, None, *geometry)[1]
    return result


def tensors(groups: int, size: int = 9, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(2, 8, size, size, dtype=dtype)
    return torch.randn_like(x), x, torch.randn(8, 8 // groups, 3, 3, dtype=dtype)


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("last", [False, True])
def test_that_of_the_weight_is_an_anchor(groups: int, last: bool) -> None:
    """In either format; what lies so already is not converted."""
    gradient, x, weight = tensors(groups)
    if last:
        gradient = gradient.to(memory_format=torch.channels_last)
    chosen = AnchorFormat.CHANNELS_LAST if last else AnchorFormat.CALLER
    made = region(lambda *given: weight_gradient(*given) * 2, gradient, x, weight, anchor_format=chosen)
    *converted, call = made.program.calls
    assert (call.target, call.item) == ("aten.convolution_backward.default", 1)
    assert [each.target for each in converted] == [CONVERSION_TARGET] * last
    if last:
        result = made.program.buffer(call.result)
        assert result.strides == channels_last_strides(result.shape)
    made.check()
    made.check(made.passed(TILES))


def _graph(*inputs: Tensor) -> fx.GraphModule:
    """The graph of a gradient, as if on a GPU."""
    graph, _ = trace(weight_gradient, *inputs)
    for node in graph.graph.nodes:
        if "val" in node.meta:
            on_gpu = partial(Spec.of, device=torch.device("cuda"))
            node.meta["val"] = pytree.tree_map_only(Tensor, on_gpu, node.meta["val"])
    return graph


@pytest.mark.parametrize(
    ("dtype", "size", "kernel", "first", "regions"),
    [
        (torch.bfloat16, 1024, 3, AnchorFormat.CHANNELS_LAST, 1),
        (torch.float16, 1024, 1, AnchorFormat.CALLER, 1),
        (torch.float32, 1024, 3, AnchorFormat.CALLER, 0),
        (torch.bfloat16, 64, 3, AnchorFormat.CALLER, 0),
    ],
)
def test_large_ones_of_halves_may_run_channels_last(
    dtype: torch.dtype, size: int, kernel: int, first: AnchorFormat, regions: int
) -> None:
    gradient, x, weight = (each.to("meta") for each in tensors(8, 8, dtype))
    x, weight = x.new_empty(2, 8, size, size), weight.new_empty(8, 1, kernel, kernel)
    out = size + 3 - kernel
    graph = _graph(gradient.new_empty(2, 8, out, out), x, weight)
    assert len(partition(graph).regions) == regions
    assert anchor_formats(graph, H200)[0] is first
    assert len(anchor_formats(graph, H200)) == 1 + regions
    offered = {spec.anchor_format for spec in search_space(graph, H200, "fast")}
    assert len(offered) == 1 + regions
