"""Kernels of large tensors of any sizes, as several devices would have them: there are more ways to lay them out than of those that can be run here.

That their text compiles is all that is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import pass_options
from fusepass.codegen.ir.program import Program
from fusepass.codegen.passes.anchors import AnchorSource
from fusepass.codegen.render import render
from fusepass.codegen.schedule import ranking
from fusepass.codegen.schedule.overrides import NO_OVERRIDES, ScheduleOverrides
from fusepass.codegen.source import Source
from tests.support.emulate import check_syntax, needs_compiler
from tests.support.regions import region

H200 = DeviceFacts.h200()
H100 = replace(H200, l2_bytes=50 << 20, bandwidth=2.92e12)
A100 = replace(
    H200, arch="sm_80", multiprocessors=108, l2_bytes=40 << 20, shared_bytes_per_block=163 << 10, bandwidth=1.8e12
)

Function = Callable[..., Tensor]
ACTIVATIONS: tuple[Function, ...] = (F.gelu, torch.relu, torch.tanh, lambda x: x * 2 + 1, lambda x: x)


WINDOWS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "maxima": lambda x, w, stride: F.max_pool2d(x, w.shape[-1], stride, w.shape[-1] // 2),
    "averages": lambda x, w, stride: F.avg_pool2d(x, w.shape[-1], stride, w.shape[-1] // 2),
    "depthwise": lambda x, w, stride: F.conv2d(x, w, None, stride, w.shape[-1] // 2, groups=x.shape[1]),
}


@dataclass(frozen=True)
class Case:
    """What becomes of a tensor (N, C, H, W), a window for each channel, and two numbers for each.

    Attributes:
        name: which activation, function and activation.
        window: along an axis.
        rank: of the schedule of one kernel, among those that it may have.
    """

    name: str
    function: Function = field(repr=False)
    shape: tuple[int, int, int, int]
    window: int
    dtype: torch.dtype
    facts: DeviceFacts
    aligned: bool
    rank: int


@st.composite
def _sizes(draw: st.DrawFn, least: int, most: int) -> int:
    """Each power of two as likely as another, and often what few of them divide."""
    size = draw(st.integers(least.bit_length() - 1, most.bit_length() - 1))
    found = draw(st.integers(1 << size, (2 << size) - 1))
    unit = draw(st.sampled_from([1, 1, 2, 4, 8, 32]))
    return min(max(found // unit * unit, least), most)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    n, c, h, w = (draw(_sizes(1, most)) for most in (256, 512, 4096, 4096))
    assume(2**16 <= n * c * h * w <= 2**29)
    dims = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True))
    groups = draw(st.sampled_from([count for count in range(1, c + 1) if c % count == 0]))
    window, stride = draw(st.sampled_from([(2, 2), (3, 1), (3, 2), (5, 1), (7, 1)]))
    own: dict[str, Function] = {
        f"group norm of {groups}": lambda x, *weights: F.group_norm(x, groups, *weights),
        "group norm of 1": lambda x, *weights: F.group_norm(x, 1, *weights),
        "batch norm": lambda x, *weights: F.batch_norm(x, None, None, *weights, training=True),
        # Of the function itself: the one of `F` refuses images of one element.
        "instance norm": lambda x, *weights: torch.instance_norm(x, *weights, None, None, True, 0.1, 1e-5, False),
        f"layer norm from {min(dims)}": lambda x, *_: F.layer_norm(x, x.shape[min(dims) + 1 :] or x.shape[3:]),
        f"RMS norm from {max(dims)}": lambda x, *_: F.rms_norm(x, x.shape[max(dims) :]),
        f"softmax along {dims[0]}": lambda x, *_: x.softmax(dims[0]),
        f"log of sums along {dims}": lambda x, *_: torch.logsumexp(x, dims),
        f"moments along {dims}": lambda x, *_: x.var(dims, correction=0) * x.mean(dims),
        f"maximum and sum along {dims}": lambda x, *_: x.amax(dims) - x.sum(dims),
        f"running sum along {dims[0]}": lambda x, *_: torch.cumsum(x.float(), dims[0]),
        f"lengths along {dims[0]}": lambda x, y, _: F.normalize(x, dim=dims[0]) + y.view(-1, 1, 1),
        "each by itself": lambda x, *_: x,
    }
    inner = draw(st.sampled_from(list(own)))
    where = draw(st.sampled_from(["", "", *WINDOWS])) if min(h, w) > window else ""
    assume(where != "depthwise" or not inner.startswith("running"))  # which is no region
    before, after = (draw(st.integers(0, len(ACTIVATIONS) - 1)) for _ in range(2))

    def function(x: Tensor, weight: Tensor, *each: Tensor) -> Tensor:
        x = x if where == "depthwise" else ACTIVATIONS[before](x)
        return ACTIVATIONS[after](own[inner](WINDOWS[where](x, weight, stride) if where else x, *each))

    return Case(
        f"{before}, {where} {inner}, {after}",
        function,
        (n, c, h, w),
        window,
        draw(st.sampled_from([torch.float32, torch.float32, torch.float16, torch.bfloat16])),
        draw(st.sampled_from([H200, H100, A100])),
        draw(st.booleans()),
        draw(st.integers(0, 5)),
    )


def _program(case: Case) -> Program:
    channels = case.shape[1]
    sizes = case.shape, (channels, 1, case.window, case.window), (channels,), (channels,)
    made = region(case.function, *(torch.empty(size, dtype=case.dtype, device="meta") for size in sizes))
    return made.passed(pass_options(case.facts, AnchorSource.GENERATED))


def _source(case: Case, program: Program) -> Source:
    """The rules' schedules, or of the first kernel that has another one this one, which expects aligned inputs."""
    for number, kernel in enumerate(program.kernels if case.rank else ()):
        if kernel.anchor is None and len(ranking(kernel, program, case.facts)) > case.rank:
            return render(program, case.facts, overrides=ScheduleOverrides(number, case.rank))
    return render(program, case.facts, aligned=case.aligned, overrides=NO_OVERRIDES)


@needs_compiler
@given(case=cases())
@settings(max_examples=14, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
def test_sources_compile(case: Case) -> None:
    check_syntax(_source(case, _program(case)))


@pytest.mark.slow
@needs_compiler
@given(case=cases())
@settings(max_examples=3000, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
def test_many_sources_compile(case: Case) -> None:
    check_syntax(_source(case, _program(case)))
