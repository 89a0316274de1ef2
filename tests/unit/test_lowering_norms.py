"""Normalisations in training and evaluation, with and without weights and running statistics, in every layout."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher

import fusepass
from fusepass.codegen.lowering.registry import decomposed, supports
from fusepass.codegen.passes.pipeline import PassOptions
from fusepass.numerics.check import check
from tests.support.emulate import needs_compiler
from tests.support.regions import NO_SPLIT, TINY, operator_region, region

BATCH = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
INSTANCE = {3: nn.InstanceNorm1d, 4: nn.InstanceNorm2d, 5: nn.InstanceNorm3d}
SHAPES = ((3, 4), (2, 4, 5), (2, 6, 3, 5))
NORMS_OF_IMAGES = 22


def _layouts(shape: tuple[int, ...]) -> dict[str, Tensor]:
    rank = len(shape)
    layouts = {
        "contiguous": torch.randn(shape),
        "reversed": torch.randn(shape[::-1]).permute(*range(rank - 1, -1, -1)),
        "every second": torch.randn(shape[0], 2 * shape[1], *shape[2:])[:, ::2],
    }
    if rank > 3:
        layouts["channels_last"] = torch.randn(shape).to(
            memory_format=torch.channels_last if rank == 4 else torch.channels_last_3d
        )
    return {name: x.double() for name, x in layouts.items()}


def _norms(shape: tuple[int, ...]) -> Iterator[nn.Module]:
    channels, rank = shape[1], len(shape)
    for affine in (False, True):
        for tracked in (False, True):
            yield BATCH[rank](channels, affine=affine, track_running_stats=tracked, momentum=0.3)
            if rank in INSTANCE:
                yield INSTANCE[rank](channels, affine=affine, track_running_stats=tracked)
        for groups in {1, 2, channels}:
            yield nn.GroupNorm(groups, channels, affine=affine)
        for first in range(1, rank):
            yield nn.LayerNorm(shape[first:], elementwise_affine=affine)
        yield nn.RMSNorm(shape[-1:], elementwise_affine=affine)


def _filled(norm: nn.Module, *, training: bool) -> nn.Module:
    for name, tensor in (*norm.named_parameters(), *norm.named_buffers()):
        if tensor.is_floating_point():
            nn.init.uniform_(tensor, 0.5, 2.0) if "var" in name else nn.init.normal_(tensor)
    return norm.double().train(training)


class Every(nn.Module):
    """Many modules on one input."""

    def __init__(self, modules: list[nn.Module]) -> None:
        super().__init__()
        self.all = nn.ModuleList(modules)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [module(x) for module in self.all]


CASES = [(shape, layout) for shape in SHAPES for layout in ("contiguous", "reversed")]


@pytest.mark.parametrize(("shape", "layout"), [*CASES, (SHAPES[-1], "channels_last"), (SHAPES[-1], "every second")])
@pytest.mark.thinned(3)
def test_training(shape: tuple[int, ...], layout: str) -> None:
    region(Every([_filled(norm, training=True) for norm in _norms(shape)]), _layouts(shape)[layout]).check()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_evaluation(shape: tuple[int, ...]) -> None:
    region(Every([_filled(norm, training=False) for norm in _norms(shape)]), _layouts(shape)["contiguous"]).check()


@pytest.mark.parametrize("options", [NO_SPLIT, TINY], ids=["no_split", "tiny"])
@pytest.mark.parametrize("number", range(NORMS_OF_IMAGES))
def test_passes(number: int, options: PassOptions) -> None:
    shape = SHAPES[-1]
    made = region(_filled(list(_norms(shape))[number], training=True), _layouts(shape)["channels_last"])
    made.check(made.passed(options))


def test_passes_see_every_norm() -> None:
    assert len(list(_norms(SHAPES[-1]))) == NORMS_OF_IMAGES


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "norm",
    [
        lambda: nn.LayerNorm(24),
        lambda: nn.GroupNorm(2, 4),
        lambda: nn.BatchNorm1d(4),
        lambda: nn.RMSNorm(24),
        lambda: nn.InstanceNorm1d(4, affine=True),
    ],
)
def test_halves_are_normalised_in_float32(norm: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    x = torch.randn(3, 4, 24).to(dtype)
    made = region(norm().to(dtype), x)
    made.check()
    made.check(made.passed(NO_SPLIT))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("weighted", [False, True])
def test_rms_norm_that_tracing_leaves_whole(dtype: torch.dtype, weighted: bool) -> None:
    """As AOTAutograd does on a GPU. PyTorch's C++ adds epsilon in place."""
    x, weight = torch.randn(5, 3, 8).to(dtype), torch.randn(3, 8).to(dtype) if weighted else None
    operator_region(torch.ops.aten._fused_rms_norm.default, x, [3, 8], weight, 1e-2).check()


@pytest.mark.parametrize("dispatcher", [contextlib.nullcontext, enable_python_dispatcher])
def test_rms_norm_is_made_of_the_same_operators_whoever_asks(
    dispatcher: Callable[[], contextlib.AbstractContextManager[None]],
) -> None:
    """While AOTAutograd compiles, PyTorch's Python is what takes operators apart."""
    normalised = lambda x: torch.ops.aten._fused_rms_norm.default(x, [8], None, 1e-2)  # noqa: E731
    with dispatcher():
        graph = decomposed(normalised, [torch.randn(5, 8)], ["x"]).graph
    targets = [node.target for node in graph.nodes if node.op == "call_function"]
    assert torch.ops.aten.copy.default in targets
    assert all(map(supports, targets))


def _writes_a_part(x: Tensor) -> tuple[Tensor]:
    y = x * 2
    y[0].copy_(x[1])
    return (y,)


def _writes_its_input(x: Tensor) -> tuple[Tensor]:
    return (x.copy_(x * 2),)


@pytest.mark.parametrize("function", [_writes_a_part, _writes_its_input])
def test_a_write_that_another_tensor_sees_stays_one(function: Callable[[Tensor], tuple[Tensor]]) -> None:
    graph = decomposed(function, [torch.randn(5, 8)], ["x"]).graph
    assert any(node.target is torch.ops.aten.copy_.default for node in graph.nodes)


@needs_compiler
def test_running_statistics_of_halves_keep_their_type_beside_what_is_decomposed(tmp_path: Path) -> None:
    """PyTorch's decomposition gives float32. What was chosen before is not asked."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(), nn.ChannelShuffle(2)).half()
    x = torch.rand(2, 8, 64, 64).half()
    fused = fusepass.optimize(model, cache_dir=tmp_path, tune="fast")
    with warnings.catch_warnings():
        warnings.simplefilter("error", fusepass.FusepassWarning)
        comparison = check(model, fused, (x,))
    assert comparison.ok, comparison.explain()
    assert not fused.report().fallbacks
