"""Convolutions by scaled halves whose kernels reduce over channels or pool windows: every thread run on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import pass_options
from fusepass.codegen.ir.dtype import Precision
from fusepass.codegen.ir.product import Product
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.ir.text import program_text
from fusepass.codegen.ir.verify import verify
from fusepass.codegen.passes.anchors import AnchorSource
from fusepass.codegen.render import render
from fusepass.codegen.schedule_product import schedule_product
from fusepass.codegen.schedule_product.tiles import TILINGS
from fusepass.errors import IRError
from tests import compile_cuda
from tests.support.convolutions import HALVED, Case, Over, generated_reduction
from tests.support.emulate import emulate, needs_compiler
from tests.support.interpret import interpret
from tests.support.regions import Region, region
from tests.support.thinned import thinned
from tests.support.values import check_values
from tests.unit.test_render_cuda import inputs_of

H200 = DeviceFacts.h200()


def product_of(program: Program) -> Kernel:
    (kernel,) = [kernel for kernel in program.kernels if isinstance(kernel.anchor, Product)]
    return kernel


def over_channels(case: Case, over: Over) -> Program:
    return generated_reduction(replace(case, precision=Precision.TF32, halves=True), over)


def check(program: Program) -> None:
    check_values(program, H200, inputs_of(program), 2e-5)


@needs_compiler
@pytest.mark.parametrize(
    ("name", "over"),
    [
        ("2d, odd channels, one by one", Over.LOGSUMEXP),
        ("transposed 3d, by 2", Over.SOFTMAX),
        ("2d, neighbours", Over.SOFTMAX),
        *thinned([("transposed 1d", Over.ARGMAX), ("2d, strided and dilated", Over.NORMALISED)], 2),
    ],
)
def test_over_channels(name: str, over: Over) -> None:
    program = over_channels(HALVED[name], over)
    kernel = product_of(program)
    assert kernel.cols
    assert isinstance(kernel.anchor, Product)
    assert kernel.anchor.apart
    assert f"rows {kernel.anchor.apart} apart" in program_text(program)
    check(program)


@needs_compiler
def test_threads_that_share_the_channels_of_a_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 warps take 128 positions of each of two phases."""
    one = next(t for t in TILINGS if (t.rows, t.columns) == (256, 128) and t.is_plain)
    monkeypatch.setattr("fusepass.codegen.schedule_product.TILINGS", (one,))
    program = over_channels(HALVED["transposed 1d"], Over.ARGMAX)
    assert "fp::merge_across<16, 32>" in render(program, H200).text
    check(program)


def test_what_a_tile_cannot_hold_is_reduced_apart() -> None:
    def holds(case: Case) -> bool:
        program = over_channels(case, Over.SOFTMAX)
        return schedule_product(product_of(program), program, H200) is not None

    case = HALVED["2d"]
    assert holds(replace(case, out_channels=256))
    assert not holds(replace(case, out_channels=257))
    by_two = HALVED["transposed, by 2"]
    assert holds(replace(by_two, out_channels=32))
    assert not holds(replace(by_two, out_channels=9))


def of(model: Callable[[Tensor, Tensor], Tensor | tuple[Tensor, ...]], x: Tensor, w: Tensor) -> Region:
    """A region of `model`, whose convolution may be rounded to TF32."""
    made = region(model, x, w)
    calls = tuple(replace(call, tf32=True) for call in made.program.calls)
    return replace(made, program=replace(made.program, calls=calls))


def passed(made: Region) -> Program:
    return made.passed(pass_options(H200, AnchorSource.HALVES))


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


IMAGE, WEIGHT = numbers(2, 24, 9, 11), numbers(20, 24, 3, 3) / 10

POOLS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Tensor, Tensor, int]] = {
    "largest, between activations": (
        lambda x, w: F.mish(F.max_pool2d(F.hardswish(F.conv2d(x, w) - 0.5), 2)), IMAGE, WEIGHT, 4
    ),
    "average of four, strided": (
        lambda x, w: F.avg_pool1d(F.conv1d(x, w, stride=2), 4) + 1, numbers(2, 24, 300), numbers(70, 24, 3), 4
    ),
    "largest of eight": (
        lambda x, w: F.max_pool3d(F.conv3d(x, w, padding=1), 2), numbers(1, 24, 4, 7, 6), numbers(9, 24, 3, 3, 3), 8
    ),
    "with a residual": (
        lambda x, w: F.max_pool2d(F.conv2d(x, w, padding=1) + x[:, :20], (2, 1)), IMAGE, WEIGHT, 2
    ),
    "then over channels": (
        lambda x, w: torch.logsumexp(F.max_pool2d(F.conv2d(x, w), 2), 1, True).relu(), IMAGE, WEIGHT, 4
    ),
}  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("name", thinned(POOLS, 3))
def test_pooling(name: str) -> None:
    model, x, w, points = POOLS[name]
    made = of(model, x, w)
    program = passed(made)
    kernel = product_of(program)
    assert kernel.col_count == points
    assert not any(buffer.name == "convolution_out" for buffer in program.buffers)
    memory = made.memory(program)
    got, wanted = emulate(program, render(program, H200), memory), interpret(program, memory)
    (output,), (exact,) = program.outputs, made.exact()
    scale = np.abs(wanted[output]).max()
    np.testing.assert_allclose(got[output], wanted[output], rtol=1e-5, atol=1e-5 * scale)
    np.testing.assert_allclose(got[output], exact.numpy().ravel(), rtol=0, atol=2e-3 * scale)


STAY: dict[str, Callable[[Tensor, Tensor], Tensor | tuple[Tensor, ...]]] = {
    "averages that are normalised": lambda x, w: F.group_norm(F.avg_pool2d(F.conv2d(x, w), 2), 4),
    "overlapping": lambda x, w: F.max_pool2d(F.conv2d(x, w), 3, 2),
    "with a border": lambda x, w: F.max_pool2d(F.conv2d(x, w), 2, padding=1),
    "apart from each other": lambda x, w: F.max_pool2d(F.conv2d(x, w), 2, 3),
    "of nine": lambda x, w: F.max_pool2d(F.conv2d(x, w), 3),
    "of what is needed whole": lambda x, w: (lambda y: (y, F.max_pool2d(y, 2)))(F.conv2d(x, w)),
    "of what another kernel computes": lambda x, w: F.max_pool2d(F.conv2d(x, w) * w.sum(), 2),
}


def test_windows_over_phases_read_the_result() -> None:
    made = of(lambda x, w: F.max_pool2d(F.conv_transpose2d(x, w, stride=2), 2), IMAGE, numbers(24, 20, 2, 2))
    assert not product_of(passed(made)).cols


@pytest.mark.parametrize("name", STAY)
def test_other_windows_read_the_result(name: str) -> None:
    made = of(STAY[name], IMAGE, WEIGHT)
    program = passed(made)
    assert not product_of(program).cols
    made.check(program, tolerance=2e-2)


@needs_compiler
def test_what_is_not_finite_stands_where_it_does_in_eager() -> None:
    bad = IMAGE.clone()
    bad[0, 3, 4, 5], bad[1, 2, 0, 0] = torch.nan, torch.inf
    made = of(POOLS["largest, between activations"][0], bad, WEIGHT.abs())
    program = passed(made)
    got = emulate(program, render(program, H200), made.memory(program))[program.outputs[0]]
    wanted = made.eager()[0].numpy().ravel()
    np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted))
    np.testing.assert_array_equal(np.isposinf(got), np.isposinf(wanted))


def test_broken_rules_are_named() -> None:
    program = over_channels(HALVED["transposed 3d, by 2"], Over.SOFTMAX)
    kernel = product_of(program)
    assert isinstance(kernel.anchor, Product)
    broken = replace(kernel, anchor=replace(kernel.anchor, apart=3))
    with pytest.raises(IRError, match="rows 3 apart"):
        verify(replace(program, kernels=tuple(broken if each is kernel else each for each in program.kernels)))


def test_what_is_left_for_nvcc() -> None:
    compile_cuda.keep(render(passed(of(*POOLS["largest of eight"][:3])), H200))
