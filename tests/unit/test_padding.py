"""Temporaries with room for all columns of a product in runs, and what is stored there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import pass_options
from fusepass.codegen.ir.expr import Load
from fusepass.codegen.ir.ops import Op
from fusepass.codegen.ir.product import Product
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.ir.verify import verify
from fusepass.codegen.lowering.lower import lower
from fusepass.codegen.passes.anchors import AnchorSource
from fusepass.codegen.passes.pipeline import run_passes
from fusepass.codegen.render import render
from tests.support.emulate import needs_compiler
from tests.support.regions import trace
from tests.support.values import check_values
from tests.unit.test_render_cuda import inputs_of

ONE = replace(DeviceFacts.h200(), multiprocessors=1)  # so that small maps are worth it


class Normalised(nn.Module):
    """A convolution, GELU, GroupNorm: its result is reduced, and read again for the result."""

    def __init__(self, size: int = 12, *, bias: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(32, 64, 3, bias=bias)
        self.norm = nn.GroupNorm(4, 64)
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(F.gelu(self.conv(x)))


class Mirrored(Normalised):
    """A normalisation whose second part is computed at the places that a border mirrors."""

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(F.instance_norm(self.conv(x)), [1, 1, 1, 1], mode="reflect")


def made(model: nn.Module, *shape: int, kept: int = 64) -> Program:
    """What `model` becomes where rows of `kept` elements stay on the chip."""
    torch.manual_seed(0)
    graph, _ = trace(model, torch.randn(shape))
    names = [node.name for node in graph.graph.find_nodes(op="placeholder")]
    program, builder = lower(graph, "region", names, tf32=True)
    options = replace(pass_options(ONE, AnchorSource.HALVES), longest_cached_row=kept)
    return run_passes(program, builder, options, check=True)


def of_product(program: Program) -> Kernel:
    (kernel,) = [kernel for kernel in program.kernels if isinstance(kernel.anchor, Product)]
    return kernel


def test_all_columns_have_places() -> None:
    program = made(Normalised(), 2, 32, 14, 34)
    kernel = of_product(program)
    (store,) = kernel.stores
    _, _, rows, columns = kernel.rows
    assert kernel.within
    assert store.index.stride(columns) == 1
    assert (store.index.stride(rows) or 0) >= columns.size
    assert program.buffer(store.buffer).shape[-1] % 8 == 0
    text = render(program, ONE).text
    assert "fp::push_strip" in text
    assert "Tile::lay_out" not in text


@pytest.mark.parametrize("width", [33, 35])
def test_rows_of_an_odd_length_stay_together(width: int) -> None:
    """Who reads them would else read single elements."""
    kernel = of_product(made(Normalised(), 2, 32, 14, width))
    (store,) = kernel.stores
    assert store.index.stride(kernel.rows[3]) is None


def test_what_is_reduced_from_memory_stays_together() -> None:
    """Rows that stay on the chip would else lie in pieces."""
    model = nn.Sequential(nn.Conv2d(32, 64, 3), nn.InstanceNorm2d(64))
    kernel = of_product(made(model, 2, 32, 14, 34, kept=1024))
    assert kernel.partials is None
    assert kernel.stores[0].index.stride(kernel.rows[3]) is None


def test_bias_is_added_before_results_are_stored() -> None:
    program = made(Normalised(), 2, 32, 14, 34)
    (store,) = of_product(program).stores
    assert getattr(store.value, "op", None) is Op.ADD
    (bias,) = [b.name for b in program.buffers if b.shape == (64,) and b.name in of_product(program).reads][:1]
    readers = [kernel for kernel in program.kernels if store.buffer in kernel.reads]
    assert not any(isinstance(node, Load) and node.buffer == bias for kernel in readers for node in kernel.nodes)


@needs_compiler
@pytest.mark.parametrize(
    ("shape", "model"),
    [
        ((2, 32, 14, 34), Normalised()),
        ((3, 32, 9, 36), Normalised(bias=False)),
        ((2, 32, 14, 33), Normalised()),
        ((2, 32, 14, 34), Mirrored()),
    ],
)
def test_values(shape: tuple[int, ...], model: nn.Module) -> None:
    program = made(model, *shape)
    verify(program)
    check_values(program, ONE, inputs_of(program), 2e-5)


class Padded(nn.Module):
    """A convolution's result, read at places that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(self.conv(x), [1, 2, 2, 1], mode="replicate")


def test_what_is_read_at_computed_places_is_stored_as_it_is() -> None:
    graph, _ = trace(Padded(), torch.randn(2, 1, 9, 9))
    names = [node.name for node in graph.graph.find_nodes(op="placeholder")]
    program, builder = lower(graph, "region", names)
    options = pass_options(ONE, AnchorSource.GENERATED)
    check_values(run_passes(program, builder, options, check=True), ONE, inputs_of(program), 2e-5)
