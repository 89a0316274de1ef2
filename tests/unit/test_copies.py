"""Operators that put elements elsewhere: which are regions of their own, and that results alias what eager's alias."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map_only

import fusepass
from fusepass.autotune import candidates
from fusepass.autotune.work import Work
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.forms import Forms
from fusepass.codegen.generate import pass_options
from fusepass.codegen.lowering.tensor import Unsupported
from fusepass.compile.splice import subgraph
from fusepass.config import override
from fusepass.patterns.partition import partition
from tests.support.candidates import generate_candidates
from tests.support.regions import region

Function = Callable[[Tensor], Tensor]
CONTIGUOUS = torch.contiguous_format

ACROSS: dict[str, Function] = {
    "channels last": lambda x: x.clone(memory_format=torch.channels_last),
    "to channels last": lambda x: x.to(memory_format=torch.channels_last),
    "halves, channels last": lambda x: x.to(torch.float16, memory_format=torch.channels_last),
    "permute": lambda x: x.permute(0, 2, 3, 1).clone(memory_format=CONTIGUOUS),
    "movedim": lambda x: x.movedim(1, -1).clone(memory_format=CONTIGUOUS),
    "transpose": lambda x: x.mT.clone(memory_format=CONTIGUOUS),
    "windows": lambda x: x.unfold(2, 2, 2).clone(memory_format=CONTIGUOUS),
}
"""What is read along another axis than it is written along."""

ALONG: dict[str, Function] = {
    "heads": lambda x: x.transpose(1, 2).reshape(x.shape[0], -1),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
    "pixel_unshuffle": lambda x: F.pixel_unshuffle(x, 2),
    "channel_shuffle": lambda x: F.channel_shuffle(x, 2),
    "cat": lambda x: torch.cat([x, x], 1),
    "stack": lambda x: torch.stack([x, x], -1),
    "roll": lambda x: x.roll((1, 2), (2, 3)),
    "flip": lambda x: x.flip(3),
    "repeat": lambda x: x.repeat(1, 2, 1, 1),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
    "pad": lambda x: F.pad(x, (1, 1, 1, 1)),
    "reflected": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "im2col": lambda x: F.unfold(x, 3),
    "triangle": lambda x: x.tril(),
    "expand": lambda x: x[:, :1].expand(x.shape).clone(memory_format=CONTIGUOUS),
    "part": lambda x: x[..., 1:].clone(memory_format=CONTIGUOUS),
    "upsampled": lambda x: torch.ops.aten.upsample_nearest2d.vec(x, None, [2.0, 2.0]),
    "upsampled, between elements": lambda x: torch.ops.aten.upsample_bilinear2d.vec(x, None, False, [2.0, 2.0]),
    "gated": lambda x: F.glu(x, 1),
    "write": lambda x: torch.slice_scatter(x, x[:, 1:], 1, 0, x.shape[1] - 1),
}
ALIKE: dict[str, Function] = {
    "clone": lambda x: x.clone(),
    "half": lambda x: x.half(),
    "relu": lambda x: x.relu(),
    "hardswish": lambda x: F.hardswish(x),
    "square": lambda x: x.pow(2),
    "triangle of a sum": torch.special.bessel_j0,
    "of two that lie alike": lambda x: torch.add(x, x, alpha=2),
    "with a number": lambda x: x * x[0, 0, 0, 0],
}
IN_ORDER: dict[str, Function] = {
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 1),
    "channel_shuffle": lambda x: F.channel_shuffle(x, 1),
    "roll": lambda x: x.roll(0, 0),
    "pad": lambda x: F.pad(x, (0, 0)),
    "cat": lambda x: torch.cat([x]),
}
"""Operators whose arguments make them copies in the order of memory."""

ON_A_GPU: dict[str, Function] = {
    "wider": lambda x: x.double(),
    "with a number for each channel": lambda x: x + x[0, :, :1, :1],
    "with a number for each row": lambda x: x * x[..., :1],
    "with a slope for each channel": lambda x: F.prelu(x, x[0, :, 0, 0]),
    "with a row for all": lambda x: torch.maximum(x, x[0, 0, 0]),
    "with a transpose": lambda x: x - x.mT,
    "each looked up": lambda x: x.gather(3, x.sort(-1).indices),
    "looked up": lambda x: x.index_select(2, x[0, 0, 0].argsort()),
    "rows looked up": lambda x: x[:, x[0, :, 0, 0].argsort()],
    "one of each row written": lambda x: x.scatter(3, x.argsort()[..., :1], x[..., 1:2]),
    "one of each row, a number": lambda x: x.scatter(3, x.argsort()[..., :1], 1.0),
    "what was padded by reflection": lambda x: torch.ops.aten.reflection_pad2d_backward(
        x, x[..., 1:-1, 1:-1], [1, 1, 1, 1]
    ),
    "masked": lambda x: x.masked_fill(torch.empty(x.shape, dtype=torch.bool), 0.0),
    "a power": lambda x: x.pow(2.5),
    "each with each": lambda x: x[0].flatten()[:4000, None] * x[1].flatten()[:2000],
}
"""What PyTorch's kernels on a GPU do at less than the memory's rate."""

ON_BOTH: dict[str, Function] = {"softplus": lambda x: F.softplus(x), "mish": lambda x: F.mish(x)}
"""The same, where those on a CPU do less well than a loop, too."""

ON_A_CPU: dict[str, Function] = {
    "gelu": lambda x: F.gelu(x),
    "silu": lambda x: F.silu(x),
    "tanh": lambda x: x.tanh(),
    "exp": lambda x: x.exp(),
    "sin": lambda x: x.sin(),
}
"""What memory moves as fast as a GPU's kernels compute it, and a CPU's are slower at than a loop."""

OF_HALVES: dict[str, Function] = {
    "selu": lambda x: F.selu(x),
    "sigmoid": lambda x: x.sigmoid(),
    "the gradient of silu": lambda x: torch.ops.aten.silu_backward(x, x),
}
"""What a GPU's do so where memory moves numbers of 16 bits."""

OF_HALVES_ON_BOTH: dict[str, Function] = {
    **ON_BOTH,
    "gelu": lambda x: F.gelu(x),
    "silu": lambda x: F.silu(x),
    "tanh": lambda x: x.tanh(),
    "logsigmoid": lambda x: F.logsigmoid(x),
}

LARGE, SMALL = (20, 64, 60, 60), (2, 4, 6, 6)


class Model(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def graph_of(
    function: Function, device: str, shape: tuple[int, ...] = LARGE, dtype: torch.dtype = torch.float32
) -> fx.GraphModule:
    """The captured function, as if its tensors were on `device`: a PyTorch without CUDA runs few operators there."""

    def there(value: Tensor) -> Tensor:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)

    with FakeTensorMode():
        graph = make_fx(function)(torch.empty(shape, dtype=dtype))
        for node in graph.graph.nodes:
            node.meta["val"] = tree_map_only(Tensor, there, node.meta.get("val"))
        return graph


def regions_of(
    function: Function, device: str, shape: tuple[int, ...] = LARGE, dtype: torch.dtype = torch.float32
) -> int:
    return len(partition(graph_of(function, device, shape, dtype)).regions)


@pytest.mark.parametrize("name", ACROSS)
def test_what_is_turned_is_a_region_on_a_gpu_alone(name: str) -> None:
    assert [regions_of(ACROSS[name], device) for device in ("cuda", "cpu")] == [1, 0]


@pytest.mark.parametrize("name", ALONG)
def test_what_goes_elsewhere_is_a_region(name: str) -> None:
    assert [regions_of(ALONG[name], device) for device in ("cuda", "cpu")] == [1, 1]
    assert regions_of(ALONG[name], "cuda", SMALL) == 0


@pytest.mark.parametrize("name", ALIKE)
def test_what_eager_does_at_the_rate_of_memory_is_none(name: str) -> None:
    assert [regions_of(ALIKE[name], device) for device in ("cuda", "cpu")] == [0, 0]


@pytest.mark.parametrize("name", ON_A_GPU)
def test_what_eager_does_more_slowly_is_a_region_on_a_gpu_alone(name: str) -> None:
    assert [regions_of(ON_A_GPU[name], device) for device in ("cuda", "cpu")] == [1, 0]


@pytest.mark.parametrize("name", ON_BOTH)
def test_what_takes_long_is_a_region_on_either(name: str) -> None:
    for device in ("cuda", "cpu"):
        assert [regions_of(ON_BOTH[name], device, shape) for shape in (LARGE, SMALL)] == [1, 0]


@pytest.mark.parametrize("name", ON_A_CPU)
def test_functions_that_a_cpu_takes_long_for_are_regions_there(name: str) -> None:
    assert [regions_of(ON_A_CPU[name], device) for device in ("cuda", "cpu")] == [0, 1]
    assert regions_of(ON_A_CPU[name], "cpu", SMALL) == 0


@pytest.mark.parametrize("name", [*OF_HALVES, *OF_HALVES_ON_BOTH])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_functions_of_halves_are_regions_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    function = OF_HALVES.get(name) or OF_HALVES_ON_BOTH[name]
    on_a_cpu = int(name in OF_HALVES_ON_BOTH)
    assert [regions_of(function, device, dtype=dtype) for device in ("cuda", "cpu")] == [1, on_a_cpu]
    assert regions_of(function, "cuda", SMALL, dtype) == 0
    assert regions_of(lambda x: x.relu(), "cuda", dtype=dtype) == 0


@pytest.mark.parametrize("name", IN_ORDER)
def test_copies_in_the_order_of_memory_are_left_to_eager(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "device_facts", lambda device: DeviceFacts.h200())
    graph = graph_of(IN_ORDER[name], "cuda")
    (found,) = partition(graph).regions
    work = Work(found, subgraph(graph, found), {})
    with override(tune="off", debug=True):
        generate_candidates(work, Forms())
    assert work.choice is not None
    assert work.choice.leaves_eager


def test_a_copy_that_eager_does_not_make_is_not_made() -> None:
    x = torch.randn(LARGE)
    fused = fusepass.optimize(Model(lambda x: x.contiguous()), x)
    assert fused(x) is x
    last = x.to(memory_format=torch.channels_last)
    fused = fusepass.optimize(Model(lambda x: x.to(memory_format=torch.channels_last)), x)
    assert fused(last) is last
    assert fused(x).stride() == last.stride()


def test_im2col() -> None:
    for shape, window in (((2, 3, 9, 7), 3), ((1, 2, 5, 11), (2, 3)), ((3, 8, 8), 1)):
        for dilation, padding, stride in ((1, 0, 1), (2, 1, 2), (1, (2, 0), (1, 3))):
            region(lambda x: F.unfold(x, window, dilation, padding, stride), torch.randn(shape)).check()  # noqa: B023


@pytest.mark.parametrize("size", [(8, 8), (9, 7), (5, 11)])
@pytest.mark.parametrize("window", [(2, 2), (2, 3), (3, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_col2im(size: tuple[int, int], window: tuple[int, int], dtype: torch.dtype) -> None:
    for stride in ((1, 1), (2, 2), (2, 3), (3, 3)):
        for padding in ((0, 0), (1, 0)):
            places = [(n + 2 * p - k) // s + 1 for n, p, k, s in zip(size, padding, window, stride, strict=True)]
            x = torch.randn(2, 3 * window[0] * window[1], places[0] * places[1]).to(dtype)
            region(lambda x: F.fold(x.relu(), size, window, 1, padding, stride) * 2, x).check()  # noqa: B023


def test_windows_that_do_not_overlap_are_put_back_by_one_kernel() -> None:
    made = region(lambda x: F.fold(x, (64, 64), 2, stride=2), torch.empty(64, 256, 1024, device="meta"))
    (kernel,) = made.passed(pass_options(DeviceFacts.h200())).kernels
    assert kernel.is_pointwise
    with pytest.raises(Unsupported, match="gaps"):
        region(lambda x: F.fold(x, (9, 9), 2, dilation=2), torch.empty(2, 12, 49))
