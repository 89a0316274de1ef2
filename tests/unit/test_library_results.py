"""Outputs in the memory of what the library made: which ones, that they are right, and what calls give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusepass
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import AnchorSource, generate
from fusepass.codegen.ir.expr import Builder
from fusepass.codegen.ir.program import VIEW_TARGET, Program, Role
from fusepass.codegen.ir.verify import verify
from fusepass.codegen.passes.library_results import _renamed, keep_library_results
from fusepass.errors import IRError
from fusepass.runtime import fast_path
from tests.support.aten import same_bits
from tests.support.emulate import emulate, needs_compiler
from tests.support.regions import Region, region

X = torch.randn(2, 3, 8, 8)
IMAGE = X, torch.randn(4, 3, 3, 3), torch.randn(4)
ROWS = torch.randn(2, 5, 6), torch.randn(7, 6), torch.randn(7)

conv, linear = F.conv2d, F.linear
Case = tuple[Callable[..., object], tuple[Tensor, ...]]


def _both(*image: Tensor) -> tuple[Tensor, Tensor]:
    made = conv(*image[:2])
    return made, made.relu()


def _parts(*image: Tensor) -> tuple[Tensor, Tensor]:
    made = conv(*image)
    return made.relu(), made.mean((2, 3))


def _again(*image: Tensor) -> tuple[Tensor, Tensor]:
    made = conv(*image)
    return made.relu(), made.flip(-1).sum(-1)


def _exponential(*image: Tensor) -> tuple[Tensor, Tensor]:
    made = conv(*image)
    return made.relu(), made.exp()


KEPT: dict[str, Case] = {
    "pointwise": (lambda *image: conv(*image).relu(), IMAGE),
    "norm": (lambda *image: F.group_norm(conv(*image), 2), IMAGE),
    "two passes": (lambda *image: F.instance_norm(conv(*image)).sigmoid(), IMAGE),
    "softmax": (lambda *rows: linear(*rows).softmax(-1), ROWS),
    "halves": (lambda *image: conv(*image).relu(), tuple(each.bfloat16() for each in IMAGE)),
    "another shape": (lambda *rows: F.gelu(linear(*rows)), ROWS),
    "with another operand": (lambda y, *image: conv(*image).relu() * y, (torch.randn(2, 4, 6, 6), *IMAGE)),
    "first of two": (_parts, IMAGE),
    "as it is": (_both, IMAGE),
}
"""Regions with one output in the library's memory."""

APART: dict[str, Case] = {
    "read elsewhere": (lambda *image: conv(*image).flip(-1).relu(), IMAGE),
    "another order": (lambda *image: conv(*image).transpose(1, 2).relu().contiguous(), IMAGE),
    "windows": (lambda *image: F.max_pool2d(conv(*image), 3, 1, 1), IMAGE),
    "fewer elements": (lambda *image: conv(*image).sum(-1), IMAGE),
    "another type": (lambda *image: conv(*image).relu().double(), IMAGE),
    "a part": (lambda *image: conv(*image)[:, :2].relu(), IMAGE),
    "read again": (_again, IMAGE),
    "two for each element": (_exponential, IMAGE),
}


def _made(case: Case) -> Region:
    return region(case[0], *case[1])


def _over(program: Program) -> list[str]:
    return [name for name in program.outputs if program.buffer(name).role is Role.ANCHOR]


@pytest.mark.parametrize("name", KEPT)
def test_results_that_take_the_library_s_memory(name: str) -> None:
    made = _made(KEPT[name])
    program = made.passed()
    assert len(_over(program)) == 1
    made.check(program, tolerance=1e-2 if name == "halves" else 1e-4)


@pytest.mark.parametrize("name", APART)
def test_results_that_do_not(name: str) -> None:
    made = _made(APART[name])
    program = made.passed()
    assert not _over(program)
    made.check(program, tolerance=1e-2 if name == "halves" else 1e-4)


def test_a_result_as_it_is_is_not_copied() -> None:
    program = _made(KEPT["as it is"]).passed()
    (kernel,) = program.kernels
    assert len(kernel.stores) == 1
    assert kernel.stores[0].buffer == program.outputs[1]


def test_a_copy_that_is_all_there_is_stays() -> None:
    """A region without kernels has no library to launch."""
    made = _made((lambda *image: conv(*image[:2]), IMAGE))
    assert made.passed().kernels


def test_another_shape_is_a_view_of_the_library_s_result() -> None:
    program = _made(KEPT["another shape"]).passed()
    *_, call = program.calls
    assert call.target == VIEW_TARGET
    assert program.buffer(call.result).shape == (2, 5, 7)


def test_what_the_library_reads_again_is_not_written_over() -> None:
    """Views share memory."""
    made = _made(KEPT["pointwise"])
    program = keep_library_results(made.program, Builder())
    assert _over(program)
    seen = _made(KEPT["another shape"]).passed()
    assert keep_library_results(seen, Builder()) is seen


def test_the_verifier_knows_what_is_overwritten() -> None:
    made = _made(APART["read elsewhere"])
    (output,) = made.program.outputs
    anchor = next(call.result for call in made.program.calls)
    broken = _renamed(made.program, made.program.buffer(anchor), made.program.buffer(output))
    with pytest.raises(IRError, match="over what it reads elsewhere"):
        verify(broken)


@needs_compiler
@pytest.mark.parametrize("name", KEPT)
def test_kernels_for_a_gpu(name: str) -> None:
    made = _made(KEPT[name])
    generated = generate(made.program, made.builder, DeviceFacts.h200(), AnchorSource.LIBRARY)
    assert _over(generated.program)
    memory = made.memory(generated.program)
    results = emulate(generated.program, generated.source, memory)
    for output, want in zip(generated.program.outputs, made.exact(), strict=True):
        if output in results:
            got = torch.from_numpy(results[output].copy())
            got = got.view(torch.bfloat16) if want.dtype is torch.bfloat16 else got
            torch.testing.assert_close(got.view(want.shape), want, rtol=2e-2, atol=2e-2)


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 4, 3), nn.Linear(6, 7)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        made = self.conv(x)
        return F.gelu(self.linear(made)), F.group_norm(made, 2), made * 2


@pytest.mark.parametrize("compiled", [False, True])
def test_calls_give_tensors_of_their_own(compiled: bool) -> None:
    """With and without the launcher in C: no views to autograd, none changed by the next call."""
    model = _Two()
    if compiled:
        fast_path.wait()
    with torch.no_grad():
        fused = fusepass.optimize(model, tune="off")
        first = fused(X)
        for _ in range(3):
            results = fused(X + 1)
        for got, want in zip((*first, *results), (*model(X), *model(X + 1)), strict=True):
            torch.testing.assert_close(got, want)
            assert (got.stride(), got.dtype, got._is_view()) == (want.stride(), want.dtype, False)
        assert len({each.data_ptr() for each in (*first, *results)}) == 6
    results[0].requires_grad_().mul(2).sum().backward()


@pytest.mark.parametrize("model", [nn.Conv2d(3, 4, 3), nn.Linear(8, 7)])
def test_no_memory_beside_the_library_s(model: nn.Module) -> None:
    with torch.no_grad():
        fused = fusepass.optimize(nn.Sequential(model, nn.GELU()), tune="off")
        fused(X)
        with torch.profiler.profile(profile_memory=True) as profile:
            result = fused(X)
    nbytes = result.numel() * result.element_size()
    made = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert sum(event.nbytes() == nbytes for event in made) == 1, [event.nbytes() for event in made]


def test_artifacts(tmp_path: Path) -> None:
    model = _Two()
    with torch.no_grad():
        fused = fusepass.optimize(model, tune="off")
        fused(X)
        fusepass.save(fused, tmp_path / "two.fused", [(X,)])
        for got, want in zip(fusepass.load(tmp_path / "two.fused")(X), fused(X), strict=True):
            assert same_bits(got, want)
