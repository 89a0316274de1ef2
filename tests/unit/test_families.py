"""Families of CUDA kernels: the walk through adding one, as CONTRIBUTING.md has it, and who gets a kernel that several families take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import examples.small_products
from examples.small_products import SmallProducts
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import Generated, generate
from fusepass.codegen.ir.program import Program
from fusepass.codegen.passes.anchors import AnchorSource
from fusepass.codegen.render import describe, render
from fusepass.codegen.render.cuda.families import laid, ranking, taking
from fusepass.codegen.render.cuda.family import register, registered, unregister
from fusepass.codegen.schedule.overrides import ScheduleOverrides
from fusepass.codegen.search.schedules import schedule_candidates
from tests import compile_cuda
from tests.support.emulate import emulate, needs_compiler
from tests.support.interpret import interpret
from tests.support.products import BF16, CASES, F16, F32, H200, Case, assert_close, generated
from tests.support.regions import region, tensor_of
from tests.unit.test_render_cuda import inputs_of

DEVICES = {"H200": H200, "sm_80": DeviceFacts.described("sm_80")}
_MOST_LINES = 120


@pytest.fixture
def _registered() -> Iterator[None]:
    register(SmallProducts())
    yield
    unregister(SmallProducts.name)


def test_the_example_is_one_small_folder() -> None:
    folder = Path(examples.small_products.__file__).parent
    assert sum(len(path.read_text().splitlines()) for path in folder.glob("*.*")) <= _MOST_LINES


@needs_compiler
@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize("device", DEVICES)
def test_the_walk(device: str) -> None:
    """A model becomes the family's kernel, which is right beside float64, and which nvcc takes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(72, 80), nn.GELU()).bfloat16()
    linear = region(model, torch.randn(50, 72, dtype=torch.bfloat16), cuda=True)
    made = generate(linear.program, linear.builder, DEVICES[device], AnchorSource.GENERATED)
    assert not made.program.calls
    (kernel,) = made.kernels
    assert kernel.schedule == "small product, 4000 elements: 6 blocks, tiles of 32 x 32, 3 steps of 32 terms"
    assert "fp::multiply_tile<fp::bfloat16>" in made.source.text
    compile_cuda.keep(made.source)
    (name,) = made.program.outputs
    found = emulate(made.program, made.source, linear.memory(made.program))[name]
    (right,) = linear.exact()
    torch.testing.assert_close(tensor_of(found, made.program.buffer(name)), right, rtol=1.6e-2, atol=1.6e-2)


@needs_compiler
@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize(
    "case",
    [
        Case(1, 8, 8, dtype=F16),
        Case(33, 40, 104, dtype=F16, batch=2, spare=8),
        Case(64, 96, 32, batch=3, dtype=BF16, shared_right=True),
    ],
    ids=["one tile", "a batch with gaps", "one right operand"],
)
def test_values(case: Case) -> None:
    program = generated(case)
    source, inputs = render(program, H200), inputs_of(program)
    assert "small product" in source.text
    compile_cuda.keep(source)
    assert_close(case, program, emulate(program, source, inputs), interpret(program, inputs))


@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize(
    "case",
    [Case(64, 64, 64, dtype=F32), Case(64, 64, 39, dtype=F16, spare=1), Case(64, 64, 64, dtype=F16, right_across=True)],
    ids=["float32", "terms that end between", "neighbours across"],
)
def test_what_it_does_not_take_is_the_shipped_familys(case: Case) -> None:
    program = generated(case)
    family, _ = laid(program.kernels[0], program, H200)
    assert family.name == "matrix product"


@pytest.mark.usefixtures("_registered")
def test_inputs_that_begin_anywhere_are_the_shipped_familys() -> None:
    program = generated(CASES["bfloat16"])
    assert "small product" in render(program, H200).text
    assert "matrix product" in render(program, H200, aligned=False).text


@pytest.mark.usefixtures("_registered")
def test_the_family_with_the_least_estimate_goes_first_and_others_may_be_tried() -> None:
    small, large = generated(Case(64, 64, 64, dtype=BF16)), generated(Case(2048, 2048, 512, dtype=BF16))
    assert _names(small) == ["small product", "matrix product"]
    assert _names(large) == ["matrix product", "small product"]
    assert schedule_candidates(large, H200, "fast") == ()
    (other,) = schedule_candidates(large, H200, "max")
    assert other.overrides == ScheduleOverrides(kernel=0, rank=1)
    assert other.seconds > 0
    tried = Generated(large, H200, other.overrides)
    assert "small product" in tried.source.text
    assert tried.source.name == "mm_relu_mul_k0s1"
    assert describe(large, large.kernels[0], H200).startswith("matrix product")
    assert describe(large, large.kernels[0], H200, overrides=other.overrides).startswith("small product")


def _names(program: Program) -> list[str]:
    found = ranking(program.kernels[0], program, H200)
    assert [each.seconds for each in found] == sorted(each.seconds for each in found)
    return [each.family.name for each in found]


def test_registered_families_are_told_apart_by_name_and_gone_afterwards() -> None:
    program, family = generated(CASES["bfloat16"]), SmallProducts()
    before = render(program, H200).text
    register(family)
    try:
        register(family)  # once more is nothing new
        with pytest.raises(
            ValueError, match="a family called 'small product' is registered already: unregister it first"
        ):
            register(SmallProducts())
        assert registered() == (family,)
        assert render(program, H200).text != before
    finally:
        unregister("small product")
    assert (registered(), render(program, H200).text) == ((), before)
    with pytest.raises(KeyError):
        unregister("small product")


def test_each_kernel_has_one_shipped_family() -> None:
    program = generated(CASES["half"])
    (family,) = taking(program.kernels[0], program)
    assert family.name == "matrix product"
    assert not schedule_candidates(program, replace(H200, multiprocessors=1), "max")
