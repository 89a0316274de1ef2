"""Depthwise convolutions and pools of any geometry and what may stand before and behind them, beside PyTorch's, every thread run on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod
from unittest.mock import patch

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import pass_options
from fusepass.codegen.ir.expr import Window
from fusepass.codegen.ir.program import Kernel, Program, Role
from fusepass.codegen.passes.anchors import AnchorSource
from fusepass.codegen.render import render
from fusepass.codegen.schedule import ranking
from fusepass.codegen.schedule.overrides import NO_OVERRIDES, ScheduleOverrides
from tests.support.emulate import emulate, needs_compiler
from tests.support.regions import Region, computing_again, region, tensor_of

SMALL = replace(DeviceFacts.h200(), multiprocessors=1, l2_bytes=4096)
ROUNDING = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}
"""Of what is about one."""

Behind = Callable[[Tensor, Tensor, Tensor], Tensor | tuple[Tensor, Tensor]]


def _positions(y: Tensor) -> tuple[int, ...]:
    return tuple(range(2, y.dim()))


BEHIND: dict[str, Behind] = {
    "batch": lambda y, scale, shift: F.batch_norm(y, None, None, scale, shift, training=True),
    "samples": lambda y, scale, shift: F.group_norm(y, 1, scale, shift),
    "groups": lambda y, scale, shift: F.group_norm(y, y.shape[1] // 2 or 1, scale, shift),
    "planes": lambda y, *_: F.instance_norm(y) * 2,
    "means": lambda y, *_: y.mean(_positions(y)),
    "gate": lambda y, *_: (y, y.mean(_positions(y))),
    "several": lambda y, *_: (y.sum(_positions(y)), y.amax(_positions(y))),
    "nothing": lambda y, *_: y,
    "stored": lambda y, scale, shift: (y * 2, F.group_norm(y * 2, 1, scale, shift)),
}
BEFORE: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "nothing": lambda x, *_: x,
    "norm": lambda x, scale, shift: F.group_norm(x, 1, scale, shift),
    "channels": lambda x, scale, shift: torch.relu(x * _beside(scale, x) + _beside(shift, x)),
    "function": lambda x, *_: torch.tanh(x),
}


def _beside(numbers: Tensor, x: Tensor) -> Tensor:
    return numbers.view(-1, *[1] * (x.dim() - 2))


ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (lambda y: y, F.silu, torch.relu)


@dataclass(frozen=True)
class Case:
    """Windows, what is before and behind them, and how they are laid out.

    Attributes:
        pool: which pool it is; empty for a convolution.
        keeps: whether rows may stay on the chip.
        twice: whether the windows are computed again where they may be.
        rank: of the schedule of one kernel, among those that it may have.
        last: whether images lie channels last.
    """

    pool: str
    before: str
    source: tuple[int, ...]
    kernel: tuple[int, ...]
    padding: tuple[int, ...]
    stride: int
    dilation: int
    activation: int
    behind: str
    dtype: torch.dtype
    aligned: bool
    keeps: bool
    twice: bool
    rank: int
    last: bool
    seed: int = field(compare=False)

    @property
    def results(self) -> tuple[int, ...]:
        return tuple(
            (size + 2 * pad - self.dilation * (width - 1) - 1) // self.stride + 1
            for size, pad, width in zip(self.source[2:], self.padding, self.kernel, strict=True)
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    axes, channels = draw(st.integers(1, 2)), draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    longest = draw(st.sampled_from([12, 40, 70])) if axes == 2 else 300
    kernel = tuple(draw(st.sampled_from([1, 2, 3, 3, 5, 7, 9])) for _ in range(axes))
    pool = draw(st.sampled_from(["", "maximum", "average"]))
    case = Case(
        pool=pool,
        before=draw(st.sampled_from(sorted(BEFORE))) if pool else "nothing",
        source=(draw(st.integers(1, 3)), channels, *(draw(st.integers(1, longest)) for _ in range(axes))),
        kernel=kernel,
        padding=tuple(draw(st.integers(0, width // 2 if pool else width)) for width in kernel),
        stride=draw(st.sampled_from([1, 1, 1, 2])),
        dilation=1 if pool == "average" else draw(st.sampled_from([1, 1, 1, 2])),
        activation=draw(st.integers(0, len(ACTIVATIONS) - 1)),
        behind=draw(st.sampled_from(sorted(BEHIND))),
        dtype=draw(st.sampled_from([torch.float32, torch.float32, torch.float16, torch.bfloat16])),
        aligned=draw(st.booleans()),
        keeps=draw(st.booleans()),
        twice=draw(st.booleans()),
        rank=draw(st.integers(0, 5)),
        last=axes == 2 and draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )
    assume(min(case.results) > 0 and prod(case.results) > 1)
    return case


def _windows(case: Case, x: Tensor, weight: Tensor) -> Tensor:
    axes = len(case.kernel)
    if case.pool == "maximum":
        return (F.max_pool1d, F.max_pool2d)[axes - 1](x, case.kernel, case.stride, case.padding, case.dilation)
    if case.pool:
        return (F.avg_pool1d, F.avg_pool2d)[axes - 1](
            x, case.kernel, case.stride, case.padding, count_include_pad=False
        )
    convolution = (F.conv1d, F.conv2d)[axes - 1]
    return convolution(x, weight, None, case.stride, case.padding, case.dilation, x.shape[1])


def _made(case: Case) -> tuple[Region, Program]:
    def function(x: Tensor, weight: Tensor, *numbers: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        y = _windows(case, BEFORE[case.before](x, *numbers), weight)
        return BEHIND[case.behind](ACTIVATIONS[case.activation](y), *numbers)

    def seconds(program: Program, kernel: Kernel) -> float:
        windows = any(isinstance(node, Window) for node in kernel.nodes)
        temporaries = sum(program.buffer(name).role is Role.TEMP for name in kernel.reads)
        return windows * (9 if kernel.reduction_loops else 1) + (2 * temporaries if case.twice else 0)

    channels, random = case.source[1], torch.Generator().manual_seed(case.seed)
    sizes = case.source, (channels, 1, *case.kernel), (channels,), (channels,)
    x, *numbers = (torch.randn(size, generator=random).to(case.dtype) for size in sizes)
    x = x.to(memory_format=torch.channels_last) if case.last else x
    made = region(function, x, *numbers, cuda=True)
    options = pass_options(SMALL, AnchorSource.GENERATED)
    options = replace(computing_again(options, lambda program, first, second: case.twice), seconds=seconds)
    return made, made.passed(options if case.keeps else replace(options, longest_cached_row=1))


def _arrangement(case: Case, program: Program) -> ScheduleOverrides:
    """Of the first kernel that has so many schedules another one; what expects nothing of inputs has those of the rules."""
    for number, kernel in enumerate(program.kernels if case.rank and case.aligned else ()):
        if kernel.anchor is None and len(ranking(kernel, program, SMALL)) > case.rank:
            return ScheduleOverrides(number, case.rank)
    return NO_OVERRIDES


@needs_compiler
@given(case=cases())
@settings(max_examples=14, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@patch("fusepass.codegen.schedule.line_windows._BLOCKS", 0)
def test_values(case: Case) -> None:
    made, program = _made(case)
    assert not program.calls
    source = render(program, SMALL, aligned=case.aligned, overrides=_arrangement(case, program))
    results = emulate(program, source, made.memory(program), shift=0 if case.aligned else 1)
    for output, eager, exact in zip(program.outputs, made.eager(), made.exact(), strict=True):
        found, exact = tensor_of(results[output], program.buffer(output)).double(), exact.double()
        allowed = 2 * (eager.double() - exact).abs().max() + ROUNDING[case.dtype] * (1 + exact.abs().max())
        assert (found - exact).abs().max() <= allowed
