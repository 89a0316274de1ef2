"""Reductions over the positions of generated convolutions: which move into the kernel, and what it computes (every thread on the host)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import generate, pass_options
from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Builder, ReduceOp
from fusepass.codegen.ir.index import axis_index
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.ir.text import program_text
from fusepass.codegen.ir.verify import verify
from fusepass.codegen.passes.anchors import AnchorSource
from fusepass.codegen.passes.split import SplitPolicy
from fusepass.codegen.render import describe, render
from fusepass.errors import IRError, ScheduleError
from tests import compile_cuda
from tests.support.convolutions import CASES, POOLED, Across, Case, generated_pooling, pooled
from tests.support.emulate import emulate, needs_compiler
from tests.support.interpret import interpret
from tests.support.regions import Region, region
from tests.support.thinned import thinned
from tests.support.values import check_values
from tests.unit.test_render_cuda import inputs_of

H200 = DeviceFacts.h200()
SMALL = replace(H200, multiprocessors=1)  # its blocks take several tiles of a sample one after another

WIDE = Case((2, 3, 20, 70), 7, (3, 3), (1, 1), (0, 0), (1, 1))  # several tiles of each sample


def convolution_of(program: Program) -> Kernel:
    (kernel,) = [kernel for kernel in program.kernels if kernel.anchor is not None]
    return kernel


def check(program: Program, facts: DeviceFacts) -> None:
    check_values(program, facts, inputs_of(program), 5e-6)


@needs_compiler
@pytest.mark.parametrize("name", POOLED)
@pytest.mark.parametrize(
    ("across", "facts"), thinned([(Across.EACH, SMALL), (Across.EACH, H200), (Across.BATCH, SMALL)], 2)
)
@pytest.mark.thinned(5)
def test_values(name: str, across: Across, facts: DeviceFacts) -> None:
    program = generated_pooling(CASES[name], across, facts)
    assert convolution_of(program).partials is not None
    check(program, facts)


@needs_compiler
@pytest.mark.parametrize("warps", [1, 4])
@pytest.mark.parametrize("across", Across)
@pytest.mark.parametrize(
    "case",
    thinned([WIDE, replace(WIDE, source=(2, 12, 20, 70)), replace(WIDE, source=(2, 12, 9, 40), out_channels=40)], 2),
    ids=["few", "many", "many side by side"],
)
@pytest.mark.thinned(5)
def test_a_block_takes_several_tiles(case: Case, across: Across, warps: int) -> None:
    program = generated_pooling(replace(case, warps=warps), across, SMALL)
    partials = convolution_of(program).partials
    assert partials is not None
    assert 1 < partials.pieces.size <= 3
    check(program, SMALL)


_AXIS = st.tuples(st.integers(1, 13), st.integers(1, 3), st.integers(1, 3), st.integers(0, 1), st.integers(1, 2))


@needs_compiler
@settings(max_examples=6, deadline=None)
@given(
    st.lists(_AXIS, min_size=1, max_size=3),
    st.sampled_from([1, 3, 8, 20]),
    st.integers(1, 70),
    st.booleans(),
    st.sampled_from([1, 3]),
    st.sampled_from(Across),
    st.sampled_from([1, 4]),
    st.sampled_from([1, 2, 3]),
)
def test_any_geometry(
    axes: list[tuple[int, ...]],
    channels: int,
    out: int,
    transposed: bool,
    processors: int,
    across: Across,
    warps: int,
    groups: int,
) -> None:
    sizes, kernel, stride, padding, dilation = zip(*axes, strict=True)
    source, out = (2, channels * groups, *sizes), -(-out // groups) * groups
    case = replace(Case(source, out, kernel, stride, padding, dilation, transposed), warps=warps, groups=groups)
    try:
        assume(all(case.result))
    except RuntimeError:  # the kernel is larger than what it should cover
        assume(False)
    facts = replace(H200, multiprocessors=processors)
    check(generated_pooling(case, across, facts), facts)


# ---- from models

BIAS, WEIGHT = torch.linspace(-1, 1, 20), torch.linspace(0.5, 2, 20)


def of(model: Callable[[Tensor, Tensor, Tensor], Any]) -> Region:
    """A region of `model`, which gets a convolution's result, a weight and a bias for each of its channels."""
    generator = torch.Generator().manual_seed(3)
    x, kernel = torch.randn(3, 3, 19, 23, generator=generator), torch.randn(20, 3, 3, 3, generator=generator)
    return region(lambda x, k, w, b: model(F.conv2d(x, k, b), w, b), x, kernel, WEIGHT, BIAS)


def passed(made: Region, facts: DeviceFacts = H200) -> Program:
    return made.passed(pass_options(facts, AnchorSource.GENERATED))


MODELS: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Any], list[list[ReduceOp]]]] = {
    "average pool": (lambda x, w, b: F.adaptive_avg_pool2d(F.gelu(x), 1), [[], [ReduceOp.SUM]]),
    "largest": (lambda x, w, b: F.relu(x).amax((2, 3)), [[], [ReduceOp.MAX]]),
    "batch norm": (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, True).relu(),
        [[], [ReduceOp.MERGE_MOMENTS], []],
    ),
    "group norm, then mean": (
        lambda x, w, b: F.group_norm(F.hardswish(x), 4, w, b).mean((2, 3)),
        [[], [ReduceOp.MERGE_MOMENTS], [ReduceOp.MERGE_MOMENTS]],
    ),
    "instance norm": (lambda x, w, b: F.instance_norm(x, weight=w), [[], [ReduceOp.MERGE_MOMENTS], []]),
    "layer norm": (lambda x, w, b: F.layer_norm(x, x.shape[1:]), [[], [ReduceOp.MERGE_MOMENTS], []]),
    "softmax of planes": (lambda x, w, b: x.flatten(2).softmax(2), [[], [ReduceOp.MAX], [ReduceOp.SUM]]),
    "variance of everything": (lambda x, w, b: torch.var_mean(x), [[], [ReduceOp.MERGE_MOMENTS]]),
    "sum of halves": (
        lambda x, w, b: x.half().sum((2, 3), dtype=torch.float32) / 100,
        [[], [ReduceOp.SUM]],
    ),
    "chain and its mean": (lambda x, w, b: (x.tanh(), x.tanh().mean((2, 3))), [[], [ReduceOp.SUM]]),
    "batch norm less its mean": (
        lambda x, w, b: (lambda y: y - y.mean((2, 3), True))(F.batch_norm(x, None, None, w, b, True)),
        [[], [ReduceOp.MERGE_MOMENTS], [ReduceOp.SUM]],
    ),
    "activation of a norm, its mean": (
        lambda x, w, b: F.relu(F.instance_norm(x)).mean((2, 3)),
        [[], [ReduceOp.MERGE_MOMENTS], [ReduceOp.SUM]],
    ),
    "norm, then mean of a sample": (
        lambda x, w, b: F.group_norm(x, 4, w, b).mean((1, 2, 3)),
        [[], [ReduceOp.MERGE_MOMENTS], [ReduceOp.SUM]],
    ),
    "norm, then mean of squares": (
        lambda x, w, b: (F.group_norm(x, 4, w, b) * x).mean((2, 3)),
        [[], [ReduceOp.MERGE_MOMENTS], [ReduceOp.SUM]],
    ),
    "less the mean of another plane": (
        lambda x, w, b: (x - torch.var_mean(x, (2, 3), keepdim=True)[1].flip(0)).mean((2, 3)),
        [[], [ReduceOp.MERGE_MOMENTS], [ReduceOp.SUM]],
    ),
    "by a bound of the variance": (
        lambda x, w, b: (x * (x.var((2, 3), keepdim=True) > 1)).sum((2, 3)),
        [[], [ReduceOp.MERGE_MOMENTS], [ReduceOp.SUM]],
    ),
}


@needs_compiler
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.thinned(5)
def test_models(name: str) -> None:
    model, kernels = MODELS[name]
    made = of(model)
    for facts in (SMALL, H200):
        program = passed(made, facts)
        assert convolution_of(program).partials is not None
        assert [[each.op for each in kernel.reductions] for kernel in program.kernels] == kernels
        made.check(program, tolerance=2e-5)
    got = emulate(program, render(program, H200), made.memory(program))
    for output, want in zip(program.outputs, made.exact(), strict=True):
        np.testing.assert_allclose(got[output], want.numpy().ravel(), rtol=2e-5, atol=2e-5)


@needs_compiler
@pytest.mark.parametrize("far", thinned([0.0, 100.0, 1e4], 2))
@pytest.mark.parametrize("name", ["group norm, then mean", "batch norm", "instance norm", "batch norm less its mean"])
@pytest.mark.thinned(5)
def test_large_means_cost_no_more_digits_than_in_eager(name: str, far: float) -> None:
    made = of(lambda x, w, b: MODELS[name][0](x + far, w, b))
    program = passed(made)
    (eager,), (output,) = made.eager(), program.outputs
    exact = made.graph(*(argument.double() for argument in made.arguments))[0].reshape(-1)
    got = torch.from_numpy(emulate(program, render(program, H200), made.memory(program))[output]).double()
    error, allowed = (got - exact).norm(), (eager.reshape(-1).double() - exact).norm()
    assert error <= 2 * allowed + 1e-6 * exact.norm()


@needs_compiler
def test_softmax_in_one_sweep() -> None:
    made = of(lambda x, w, b: x.flatten(2).softmax(2))
    program = made.passed(replace(pass_options(SMALL, AnchorSource.GENERATED), longest_cached_row=1))
    partials = convolution_of(program).partials
    assert partials is not None
    assert [each.op for each in partials.reductions] == [ReduceOp.SOFTMAX]
    (want,) = made.exact()
    got = emulate(program, render(program, SMALL), made.memory(program))[program.outputs[0]]
    np.testing.assert_allclose(got, want.numpy().ravel(), rtol=1e-4, atol=1e-7)


@needs_compiler
def test_many_pieces_are_merged_in_pieces() -> None:
    made = of(lambda x, w, b: F.layer_norm(x, x.shape[1:]))
    options = replace(pass_options(H200, AnchorSource.GENERATED), split=SplitPolicy(workers=12, least_piece=4, lanes=1))
    program = made.passed(options)
    merging = [ReduceOp.MERGE_MOMENTS]
    assert [[each.op for each in kernel.reductions] for kernel in program.kernels] == [[], merging, merging, []]
    made.check(program, tolerance=2e-5)
    (want,) = made.exact()
    got = emulate(program, render(program, H200), made.memory(program))[program.outputs[0]]
    np.testing.assert_allclose(got, want.numpy().ravel(), rtol=2e-5, atol=2e-5)


def test_a_result_that_is_only_reduced_is_not_written() -> None:
    program = passed(of(MODELS["average pool"][0]))
    assert not convolution_of(program).stores
    assert sum(buffer.nbytes for buffer in program.buffers if buffer.name in convolution_of(program).writes) < 4096


def test_equal_reductions_of_two_readers_are_one() -> None:
    program = passed(of(lambda x, w, b: (F.instance_norm(x), F.batch_norm(x, None, None, w, b, True))))
    partials = convolution_of(program).partials
    assert partials is not None
    assert partials.per_sample
    assert len(partials.reductions) == 1


STAY: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "over one axis": lambda x, w, b: x.sum(3),
    "of two values": lambda x, w, b: (x.mean((2, 3)), x.exp().mean((2, 3))),
    "over channels": lambda x, w, b: x.sum(1),
    "in float64": lambda x, w, b: x.sum((2, 3), dtype=torch.float64),
    "places": lambda x, w, b: x.flatten(2).argmax(2),
    "of a pool": lambda x, w, b: F.max_pool2d(x, 2).mean((2, 3)),
    "of a transposed product": lambda x, w, b: (x[:, :, :17, :17] * x[:, :, :17, :17].transpose(2, 3)).sum((2, 3)),
    "of what another kernel computes": lambda x, w, b: (x * w.sum()).sum((2, 3)),
}


@pytest.mark.parametrize("name", STAY)
def test_others_read_the_result(name: str) -> None:
    made = of(STAY[name])
    program = passed(made)
    assert convolution_of(program).partials is None
    made.check(program, tolerance=2e-5)


def test_few_channels_need_no_measurement() -> None:
    case = Case((128, 8, 64, 64), 64, (3, 3), (1, 1), (0, 0), (1, 1))
    b = Builder()
    program = generate(pooled(case, Across.EACH, b), b, H200).program
    assert convolution_of(program).partials is not None
    more = replace(case, source=(128, 32, 64, 64))
    assert generate(pooled(more, Across.EACH, b), b, H200).program.calls


# ---- values that are not numbers


@needs_compiler
@pytest.mark.parametrize("name", ["2d", "many channels"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stands_where_it_does_in_plain_arithmetic(name: str, bad: float) -> None:
    program = generated_pooling(CASES[name], Across.EACH, SMALL)
    inputs = inputs_of(program)
    inputs["x"][37] = bad
    with np.errstate(all="ignore"):
        wanted = interpret(program, inputs)
    got = emulate(program, render(program, SMALL), inputs)
    for output in program.outputs:
        if output == "mean":
            # A mean beside a variance is NaN where a value is infinite, as everywhere in generated code.
            wanted[output] = np.where(np.isinf(wanted[output]), np.nan, wanted[output])
        np.testing.assert_array_equal(np.isnan(got[output]), np.isnan(wanted[output]), err_msg=output)
        np.testing.assert_array_equal(np.isposinf(got[output]), np.isposinf(wanted[output]), err_msg=output)
        np.testing.assert_array_equal(np.isneginf(got[output]), np.isneginf(wanted[output]), err_msg=output)


@needs_compiler
def test_moments_of_equal_numbers_are_exact() -> None:
    """All results of a channel are the same number; a normalisation would magnify what is off."""
    program = generated_pooling(Case((2, 1, 21, 45), 7, (1, 1), (1, 1), (0, 0), (1, 1)), Across.EACH, SMALL)
    inputs = inputs_of(program)
    inputs["x"][:] = 1.0
    inputs["bias"] += 1000.3
    got = emulate(program, render(program, SMALL), inputs)
    assert np.abs(got["squares"]).max() <= 1e-7
    np.testing.assert_array_equal(got["mean"], got["top"])


# ---- what holds of every such kernel


def test_a_piece_more_is_refused() -> None:
    program = generated_pooling(WIDE, Across.BATCH, SMALL)
    with pytest.raises(ScheduleError, match="pieces"):
        render(program, H200)


def test_text_and_description() -> None:
    program = generated_pooling(WIDE, Across.EACH, SMALL)
    assert "pieces of each sample" in program_text(program)
    assert "reduced over positions in 3 pieces" in describe(program, convolution_of(program), SMALL)
    assert "pieces of all samples" in program_text(generated_pooling(WIDE, Across.ALL, SMALL))


@pytest.mark.parametrize("fault", ["reduction_loops", "value", "double", "part", "axis"])
def test_broken_rules_are_named(fault: str) -> None:
    program = generated_pooling(CASES["2d"], Across.EACH, SMALL)
    kernel = convolution_of(program)
    partials = kernel.partials
    assert partials is not None
    first, *rest = partials.reductions
    store = partials.stores[0]
    b = Builder()
    kernel, message = {
        "reduction_loops": (
            replace(kernel, cols=kernel.rows[-1:], rows=kernel.rows[:-1]),
            "neither an anchor nor windows per element",
        ),
        "value": (_with(kernel, (replace(first, values=(b.const(1.0, DType.F32),)), *rest)), "not of the one float32"),
        "double": (_with(kernel, (replace(first, op=ReduceOp.ARGMAX), *rest)), "not of the one float32"),
        "part": (_with(kernel, (replace(first, op=ReduceOp.SUM), *rest)), "has no part"),
        "axis": (
            replace(kernel, partials=replace(partials, stores=(replace(store, index=axis_index(kernel.rows[-1])),))),
            "out of scope",
        ),
    }[fault]
    with pytest.raises(IRError, match=message):
        verify(replace(program, kernels=(kernel, *program.kernels[1:])))


def _with(kernel: Kernel, reductions: tuple[Any, ...]) -> Kernel:
    assert kernel.partials is not None
    return replace(kernel, partials=replace(kernel.partials, reductions=reductions))


@pytest.mark.parametrize("name", ["2d", "transposed 3d", "many channels"])
def test_what_is_left_for_nvcc(name: str) -> None:
    compile_cuda.keep(render(generated_pooling(CASES[name], Across.EACH), H200))
