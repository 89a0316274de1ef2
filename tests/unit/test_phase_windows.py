"""Windows over a transposed convolution that pool the phases of a position: every thread run on the host."""

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
from fusepass.codegen.ir.convolution import Convolution, Pooling
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.ir.text import program_text
from fusepass.codegen.ir.verify import verify
from fusepass.codegen.passes.anchors import AnchorSource
from fusepass.codegen.render import describe, render
from fusepass.errors import IRError
from tests import compile_cuda
from tests.support.emulate import emulate, needs_compiler
from tests.support.interpret import interpret
from tests.support.regions import Region, region
from tests.support.thinned import thinned
from tests.unit.test_render_cuda import inputs_of

H200 = DeviceFacts.h200()
DEVICES = {"4 warps together": replace(H200, multiprocessors=1), "warps alone": replace(H200, arch="sm_80")}


Model = Callable[[Tensor, Tensor, Tensor], Tensor]


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def softmax(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    pooled = F.max_pool3d(F.conv_transpose3d(x, w, b, stride=2, padding=1, output_padding=1), 2)
    y = torch.softmax(pooled, 1) - b.view(1, -1, 1, 1, 1)
    return (torch.sigmoid(y) * y).amax(1)


def mirrored(y: Tensor) -> Tensor:
    """Every second element along both axes, moved by one, which is read at computed places."""
    return F.pad(y, [1, 1, 1, 1], mode="reflect")[:, :, :-2:2, :-2:2]


MODELS: dict[str, tuple[Model, Tensor, Tensor, Tensor]] = {
    "softmax over channels": (softmax, numbers(2, 3, 3, 4, 9), numbers(3, 16, 3, 3, 3) / 4, numbers(16)),
    "moments of planes": (
        lambda x, w, b: torch.var_mean(F.max_pool2d(F.conv_transpose2d(x, w, b, stride=2), 2), (2, 3))[0],
        numbers(2, 5, 7, 11), numbers(5, 33, 2, 4), numbers(33),
    ),
    "the result itself": (
        lambda x, w, b: F.max_pool2d(F.conv_transpose2d(x, w, stride=(3, 2), output_padding=(2, 0)), (3, 2)) * 2,
        numbers(1, 4, 5, 6), numbers(4, 9, 2, 3), numbers(9),
    ),
    "what no window reaches": (
        lambda x, w, b: F.max_pool2d(F.conv_transpose2d(x, w, b, stride=2), 2).tanh(),
        numbers(2, 3, 4, 5), numbers(3, 70, 3, 3), numbers(70),
    ),
    "a bias elsewhere": (
        lambda x, w, b: F.max_pool2d(F.conv_transpose2d(x, w, stride=2) + b.sum(), 2),
        numbers(1, 3, 4, 4), numbers(3, 5, 2, 2), numbers(5),
    ),
}  # fmt: skip


def passed(made: Region, facts: DeviceFacts) -> Program:
    return made.passed(pass_options(facts, AnchorSource.GENERATED))


def convolution_of(program: Program) -> tuple[Kernel, Convolution]:
    (kernel,) = [kernel for kernel in program.kernels if kernel.anchor is not None]
    assert isinstance(kernel.anchor, Convolution)
    return kernel, kernel.anchor


@needs_compiler
@pytest.mark.parametrize(
    ("name", "device"),
    thinned([(name, device) for name in MODELS if name != "a bias elsewhere" for device in DEVICES], 2),
)
def test_values(name: str, device: str) -> None:
    made, facts = region(*MODELS[name]), DEVICES[device]
    program = passed(made, facts)
    kernel, anchor = convolution_of(program)
    assert anchor.pooled is not None
    assert anchor.warps == (4 if device == "4 warps together" else 1)
    assert "largest of all phases" in program_text(program)
    assert f"{np.prod(anchor.stride)} phases" in describe(program, kernel, facts)
    made.check(program, tolerance=1e-5)
    inputs = inputs_of(program)
    got, wanted = emulate(program, render(program, facts), inputs), interpret(program, inputs)
    for output in program.outputs:
        scale = np.abs(wanted[output]).max()
        np.testing.assert_allclose(got[output], wanted[output], rtol=1e-5, atol=1e-5 * scale)


@pytest.mark.parametrize("source", [AnchorSource.PREFERRED, AnchorSource.GENERATED])
def test_everything_behind_the_windows_is_in_the_kernel(source: AnchorSource) -> None:
    program = region(*MODELS["softmax over channels"]).passed(pass_options(H200, source))
    assert len(program.kernels) == 1
    assert not [buffer for buffer in program.buffers if "pooled" in buffer.name]


@pytest.mark.parametrize(
    "model",
    [
        MODELS["a bias elsewhere"][0],
        lambda x, w, b: F.max_pool2d(F.conv_transpose2d(x, w, b, stride=2), 4),
        lambda x, w, b: F.max_pool2d(F.conv_transpose2d(x, w, b, stride=2), 2, padding=1),
        lambda x, w, b: F.max_pool2d(F.conv_transpose2d(x, w, b, stride=2), 2, stride=1),
        lambda x, w, b: F.avg_pool2d(F.conv_transpose2d(x, w, b, stride=2), 2),
        lambda x, w, b: F.max_pool2d(y := F.conv_transpose2d(x, w, b, stride=2), 2) + y[:, :, ::2, ::2],
        lambda x, w, b: F.max_pool2d(y := F.conv_transpose2d(x, w, b, stride=2), 2) + mirrored(y),
        lambda x, w, b: F.max_pool2d(-F.conv_transpose2d(x, w, b, stride=2), 2),
    ],
)
def test_other_windows_read_the_result(model: Model) -> None:
    made = region(model, numbers(1, 3, 4, 4), numbers(3, 5, 2, 2), numbers(5))
    program = passed(made, H200)
    assert all(kernel.anchor is None or convolution_of(program)[1].pooled is None for kernel in program.kernels)
    made.check(program, tolerance=1e-5)


@needs_compiler
@pytest.mark.parametrize("device", thinned(DEVICES, 2))
def test_numbers_that_are_not_finite(device: str) -> None:
    """An infinite bias makes NaN of a result that is lost among larger ones."""
    made, facts = region(*MODELS["what no window reaches"]), DEVICES[device]
    program = passed(made, facts)
    inputs = inputs_of(program)
    x, _, b = (inputs[name] for name in program.inputs)
    x[5], x[11] = np.inf, -np.inf
    b[3], b[60], b[61] = np.inf, -np.inf, np.nan
    with np.errstate(all="ignore"):
        got, wanted = emulate(program, render(program, facts), inputs), interpret(program, inputs)
    (name,) = program.outputs
    assert np.isnan(wanted[name]).any()
    np.testing.assert_array_equal(np.isnan(got[name]), np.isnan(wanted[name]))


def test_the_verifier_wants_phases_and_a_number_for_each_channel() -> None:
    program = passed(region(*MODELS["what no window reaches"]), H200)
    kernel, anchor = convolution_of(program)

    def verify_with(**changed: object) -> None:
        made = replace(kernel, anchor=replace(anchor, **changed))  # type: ignore[arg-type]
        verify(replace(program, kernels=tuple(made if each is kernel else each for each in program.kernels)))

    with pytest.raises(IRError, match="a number for each channel"):
        verify_with(pooled=Pooling(anchor.weight))
    with pytest.raises(IRError, match="only a transposed convolution"):
        verify_with(transposed=False)
    with pytest.raises(IRError, match="packed operands"):
        verify_with(packed=anchor.weight)


@pytest.mark.parametrize("facts", thinned([H200, replace(H200, arch="sm_80")], 2))
def test_what_is_left_for_nvcc(facts: DeviceFacts) -> None:
    compile_cuda.keep(render(passed(region(*MODELS["softmax over channels"]), facts), facts))
