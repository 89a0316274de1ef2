"""Reductions over the columns of matrix products, convolutions by scaled halves among them: every thread run on the host."""

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
from fusepass.codegen.ir.expr import ReduceOp
from fusepass.codegen.ir.product import Product
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.ir.verify import verify
from fusepass.codegen.passes.anchors import AnchorSource
from fusepass.codegen.render import describe, render
from fusepass.codegen.render.cuda.contraction.product.direct import Direct
from fusepass.codegen.schedule_product import schedule_product
from fusepass.codegen.schedule_product.tiles import TILINGS
from fusepass.errors import IRError, ScheduleError
from tests.support.convolutions import HALVED, Across, generated_pooling
from tests.support.emulate import emulate, needs_compiler
from tests.support.interpret import interpret
from tests.support.regions import Region, region
from tests.support.thinned import thinned
from tests.support.values import check_values
from tests.unit.test_render_cuda import inputs_of

H200 = DeviceFacts.h200()


def halved(name: str, across: Across = Across.EACH) -> Program:
    return generated_pooling(replace(HALVED[name], precision=Precision.TF32, halves=True), across, H200)


def product_of(program: Program) -> Kernel:
    (kernel,) = [kernel for kernel in program.kernels if isinstance(kernel.anchor, Product)]
    return kernel


def check(program: Program) -> None:
    assert product_of(program).partials is not None
    check_values(program, H200, inputs_of(program), 5e-6)


def with_tiles(monkeypatch: pytest.MonkeyPatch, *, groups: bool) -> None:
    chosen = tuple(tiling for tiling in TILINGS if tiling.groups is groups)
    monkeypatch.setattr("fusepass.codegen.schedule_product.TILINGS", chosen)


@needs_compiler
@pytest.mark.parametrize(
    ("name", "groups", "direct"),
    thinned(
        [
            ("transposed, by 2", True, False),
            ("2d, a border of whole vectors", False, False),
            ("transposed, by 2 and 3, odd", True, True),
            ("2d, odd channels, one by one", True, False),
            ("2d", True, True),
            ("transposed 3d, by 2", True, False),
            ("2d, neighbours", True, False),
        ],
        2,
    ),
)
def test_convolutions(name: str, groups: bool, direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with_tiles(monkeypatch, groups=groups)
    program = halved(name)
    if direct:
        monkeypatch.setattr(Direct, "_rows_between", lambda self: 1)
        assert "fp::OwnRow" in render(program, H200).text
    else:
        monkeypatch.setattr(Direct, "serves", False)
    check(program)


@needs_compiler
@pytest.mark.parametrize("across", thinned([Across.LAYER, Across.BATCH, Across.ALL], 3))
def test_pieces_of_many_channels_and_samples(across: Across) -> None:
    check(halved("transposed 1d", across))


MODELS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], list[ReduceOp]]] = {
    "variance": (lambda x, b: F.gelu(x + b).var(1), [ReduceOp.MOMENTS]),
    "mean": (lambda x, b: F.silu(x * b).mean(1), [ReduceOp.SUM]),
    "layer norm": (lambda x, b: F.layer_norm(F.gelu(x + b), x.shape[1:]), [ReduceOp.MOMENTS]),
    "logsumexp": (lambda x, b: (x + b).logsumexp(1), [ReduceOp.SOFTMAX]),
}


def of_matrix(name: str) -> tuple[Region, list[ReduceOp]]:
    model, ops = MODELS[name]
    generator = torch.Generator().manual_seed(3)
    x, w, b = (torch.randn(*size, generator=generator) for size in ((70, 40), (150, 40), (150,)))
    return region(lambda x, w, b: model(x @ w.t(), b), x, w, b), ops


@needs_compiler
@pytest.mark.parametrize("name", thinned(MODELS, 4))
def test_rows_of_a_matrix(name: str) -> None:
    made, ops = of_matrix(name)
    options = replace(pass_options(H200, AnchorSource.GENERATED), longest_cached_row=100)
    program = made.passed(options)
    partials = product_of(program).partials
    assert partials is not None
    assert [each.op for each in partials.reductions] == ops
    made.check(program, tolerance=2e-5)
    (want,), got = made.exact(), emulate(program, render(program, H200), made.memory(program))
    np.testing.assert_allclose(got[program.outputs[0]], want.numpy().ravel(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", MODELS)
def test_rows_that_stay_on_the_chip_are_read_once_anyway(name: str) -> None:
    made, _ = of_matrix(name)
    partials = product_of(made.passed(pass_options(H200, AnchorSource.GENERATED))).partials
    assert (partials is None) is (name in ("layer norm", "logsumexp"))


@needs_compiler
@pytest.mark.parametrize("bad", thinned([np.inf, np.nan], 2))
def test_what_is_not_finite_stands_where_it_does_in_plain_arithmetic(bad: float) -> None:
    program = halved("2d")
    inputs = inputs_of(program)
    inputs["x"][37] = bad
    with np.errstate(all="ignore"):
        wanted = interpret(program, inputs)
    got = emulate(program, render(program, H200), inputs)
    for output in set(program.outputs) - {"mean"}:
        np.testing.assert_array_equal(np.isnan(got[output]), np.isnan(wanted[output]), err_msg=output)
        np.testing.assert_array_equal(np.isposinf(got[output]), np.isposinf(wanted[output]), err_msg=output)


def test_sums_in_pieces_are_reduced_from_memory() -> None:
    x, w = torch.randn(16, 20_000), torch.randn(24, 20_000)
    program = region(lambda x, w: (x @ w.t()).mean(1), x, w).passed(pass_options(H200, AnchorSource.GENERATED))
    kernel = product_of(program)
    assert kernel.partials is None
    assert kernel.rows[0].size > 1


def test_a_product_of_what_begins_anywhere_keeps_to_its_pieces() -> None:
    """Else another tile would be the best."""
    facts = DeviceFacts.described("sm_120")
    x, w = torch.randn(4096, 128), torch.randn(1024, 128)
    options = replace(pass_options(facts, AnchorSource.GENERATED), longest_cached_row=100)
    program = region(lambda x, w: (x @ w.t()).softmax(1), x, w).passed(options)
    kernel = product_of(program)
    assert kernel.partials is not None
    plans = [schedule_product(kernel, program, facts, aligned=aligned) for aligned in (True, False)]
    assert [plan.pieces for plan in plans if plan] == 2 * [kernel.partials.pieces.size]
    assert "reduced in 16 pieces" in describe(program, kernel, facts)
    render(program, facts, aligned=False)


def test_another_tile_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    program = halved("2d, a border of whole vectors")
    kernel = product_of(program)
    assert "reduced in " in describe(program, kernel, H200)
    assert kernel.partials is not None
    for tiling in TILINGS:
        monkeypatch.setattr("fusepass.codegen.schedule_product.TILINGS", (tiling,))
        plan = schedule_product(kernel, program, H200)
        if plan is not None and plan.pieces != kernel.partials.pieces.size:
            break
    with pytest.raises(ScheduleError, match="pieces"):
        render(program, H200)


def test_pieces_of_all_samples_are_refused() -> None:
    program = halved("2d")
    kernel = product_of(program)
    assert kernel.partials is not None
    partials = replace(kernel.partials, per_sample=False)
    with pytest.raises(IRError, match="several matrices"):
        verify(
            replace(
                program, kernels=tuple(replace(k, partials=partials) if k is kernel else k for k in program.kernels)
            )
        )
