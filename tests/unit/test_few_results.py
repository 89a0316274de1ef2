"""Convolutions to few channels as plain arithmetic: what the kernels compute on a GPU (every thread run on the host), and who is one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fusepass.capture.trace import Captured, capture
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.verify import verify
from fusepass.codegen.passes.few_results import few_results_of
from fusepass.codegen.render import describe, render
from fusepass.codegen.schedule import schedule
from fusepass.codegen.search.space import search_space
from fusepass.patterns.anchor_work import gives_few_results
from tests.support.convolutions import FEW_RESULTS, Case, generated, program_of
from tests.support.emulate import emulate, needs_compiler
from tests.unit.test_depthwise import assert_rounded_once
from tests.unit.test_render_cuda import inputs_of

H200 = DeviceFacts.h200()
SMALL = replace(H200, multiprocessors=1)


@needs_compiler
@pytest.mark.parametrize("facts", [SMALL, H200], ids=["small", "h200"])
@pytest.mark.parametrize("name", FEW_RESULTS)
@pytest.mark.thinned(5)
def test_few_results(name: str, facts: DeviceFacts) -> None:
    case = FEW_RESULTS[name]
    program = generated(case)
    verify(program)
    assert not program.calls
    assert describe(program, program.kernels[0], facts).startswith("patch")
    inputs = inputs_of(program)
    got = emulate(program, render(program, facts), inputs)["y"]
    x, w, bias = (torch.from_numpy(inputs[name]) for name in ("x", "w", "bias"))
    exact = torch.convolution(x.view(case.source).double(), w.view(case.weight).double(), bias.double(), *case.geometry)
    wanted = (exact.relu() * 2).numpy().reshape(-1)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


@needs_compiler
@pytest.mark.parametrize("name", ["to 3", "to 1, odd rows", "transposed to 3, by 2"])
def test_inputs_may_start_anywhere(name: str) -> None:
    program = generated(FEW_RESULTS[name])
    inputs = inputs_of(program)
    aligned = emulate(program, render(program, SMALL), inputs)["y"]
    anywhere = render(program, SMALL, aligned=False)
    np.testing.assert_allclose(emulate(program, anywhere, inputs, shift=1)["y"], aligned, rtol=1e-5, atol=1e-5)


@needs_compiler
@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16])
@pytest.mark.parametrize("name", ["to 3", "to 1, odd rows", "transposed to 3, by 2"])
@pytest.mark.thinned(3)
def test_halves_round_once(name: str, dtype: DType) -> None:
    assert_rounded_once(replace(FEW_RESULTS[name], dtype=dtype))


@needs_compiler
def test_what_is_not_finite_stays_where_it_is() -> None:
    case = FEW_RESULTS["to 3"]
    program = generated(case)
    inputs = inputs_of(program)
    source = inputs["x"].reshape(case.source)
    source[0, 3, 5, 7], source[1, 4, 0, 0] = np.nan, np.inf
    got = emulate(program, render(program, SMALL), inputs)["y"]
    x, w, bias = (torch.from_numpy(inputs[name]) for name in ("x", "w", "bias"))
    wanted = (torch.convolution(x.view(case.source), w.view(case.weight), bias, *case.geometry).relu() * 2).numpy()
    np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted.reshape(-1)))
    np.testing.assert_array_equal(np.isinf(got), np.isinf(wanted.reshape(-1)))


def test_parts_of_a_block_share_channels_where_positions_are_few() -> None:
    program = generated(Case((1, 256, 14, 14), 2, (3, 3), (1, 1), (1, 1), (1, 1), plain=True))
    assert "8 parts of" in describe(program, program.kernels[0], H200)
    (plan,) = [schedule(kernel, program, H200) for kernel in program.kernels]
    assert 256 % plan.parts == 0


def test_all_results_of_a_position_are_one_threads() -> None:
    program = generated(FEW_RESULTS["transposed to 3, by 2"])
    (kernel,) = program.kernels
    assert [axis.size for axis in kernel.rows] == [2, 9, 20]
    assert len(kernel.stores) == 3 * 2 * 2
    assert len({load.index for load in kernel.loads() if load.buffer == "x"}) == 1


def test_who_tries_it() -> None:
    """Convolutions to few channels are tried on a GPU, of halves also where nothing is beside them."""

    def found(layer: nn.Module, x: torch.Tensor) -> list[str]:
        captured = capture(layer.requires_grad_(False), (x,), {})
        assert isinstance(captured, Captured)
        (node,) = captured.graph.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default)
        assert gives_few_results(node) is (layer.out_channels <= 4)
        return [spec.name for spec in search_space(captured.graph, H200, "fast")]

    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(2, 16, 24, 24, dtype=dtype)
        assert "plain arithmetic anchor" in found(nn.Conv2d(16, 3, 3, dtype=dtype), x)
        assert "plain arithmetic anchor" in found(nn.ConvTranspose2d(16, 4, 2, 2, dtype=dtype), x)
        assert "plain arithmetic anchor" not in found(nn.Conv2d(16, 9, 3, dtype=dtype), x)


@pytest.mark.parametrize(
    "case",
    [
        Case((2, 8, 9, 9), 9, (3, 3), (1, 1), (1, 1), (1, 1)),
        Case((2, 8, 9, 9), 4, (9, 9), (1, 1), (4, 4), (1, 1)),
        Case((2, 8, 9, 9), 4, (3, 3), (1, 1), (1, 1), (1, 1), groups=2),
        Case((2, 8, 9, 9), 4, (3, 3), (1, 1), (1, 1), (1, 1), channels_last=True),
        Case((2, 8, 1, 9), 2, (1, 3), (2, 2), (0, 1), (1, 1), True),  # no position has two results along an axis
        Case((2, 8, 9, 9), 2, (3, 3), (1, 1), (1, 1), (2, 2), True),
        Case((2, 8, 9, 9), 2, (3, 3), (1, 1), (1, 1), (1, 1), dtype=DType.F64),
    ],
)
def test_what_is_none(case: Case) -> None:
    program = program_of(case)
    assert few_results_of(program, program.calls[0]) is None
