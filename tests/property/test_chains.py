"""Random chains of operators over random shapes mean the same after lowering and after every pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fusepass.codegen.ir.program import Program
from fusepass.codegen.passes.pipeline import PassOptions, run_passes
from tests.support.regions import NO_SPLIT, TINY, region

Tensor = torch.Tensor
Step = Callable[[Tensor], Tensor]

POINTWISE: tuple[Step, ...] = (
    torch.relu,
    F.gelu,
    F.silu,
    torch.tanh,
    lambda x: x * 2 + 1,
    lambda x: x * x,
    lambda x: torch.where(x > 0, x, 0.1 * x),
    lambda x: x.clamp(-0.5, 1.5),
)
ALONG: tuple[Callable[[Tensor, tuple[int, ...]], Tensor], ...] = (
    lambda x, d: x - x.mean(d, keepdim=True),
    lambda x, d: x / (1 + x.abs().amax(d, keepdim=True)),
    lambda x, d: x.softmax(d[0]),
    lambda x, d: x.log_softmax(d[-1]),
    lambda x, d: (x - x.mean(d, True)) * torch.rsqrt(x.var(d, correction=0, keepdim=True) + 1e-2),
    lambda x, d: x * torch.rsqrt((x * x).mean(d, keepdim=True) + 1e-2),
    lambda x, d: x + x.sum(d, keepdim=True) - x.amin(d, keepdim=True),
    lambda x, d: F.normalize(x, dim=d[0]) + x.mean(d, True),
)
REDUCE: tuple[Callable[[Tensor, tuple[int, ...]], Tensor], ...] = (
    lambda x, d: x.sum(d),
    lambda x, d: x.mean(d),
    lambda x, d: x.amax(d),
    lambda x, d: torch.logsumexp(x, d),
    lambda x, d: x.std(d, correction=0),
    lambda x, d: torch.linalg.vector_norm(x, 2, d),
)
VIEWS: tuple[Step, ...] = (
    lambda x: x.transpose(0, -1),
    lambda x: x.flip(-1),
    lambda x: x.reshape(x.shape[0], -1),
    lambda x: x.flatten(),
    lambda x: x[:, : (x.shape[1] + 1) // 2] if x.dim() > 1 else x,
    lambda x: x[..., ::2],
    lambda x: F.pad(x, (1, 2), value=0.5),
    lambda x: torch.cat([x, 2 * x[:1]]),
    lambda x: torch.roll(x, 1, -1),
    lambda x: x.chunk(2, -1)[0] * x.chunk(2, -1)[1].sigmoid() if x.shape[-1] % 2 == 0 else x,
    lambda x: x.unsqueeze(0).expand(2, *x.shape) if x.dim() < 4 else x,
)
POOLS: tuple[Step, ...] = (
    lambda x: F.max_pool2d(x, 2, ceil_mode=True),
    lambda x: F.max_pool2d(x, 3, 1, 1),
    lambda x: F.avg_pool2d(x, 3, 2, 1),
    lambda x: F.adaptive_avg_pool2d(x, (2, 3)),
    lambda x: F.adaptive_avg_pool2d(x, 1),
)
NORMS: tuple[Step, ...] = (
    lambda x: F.layer_norm(x, x.shape[-1:], _ramp(x.shape[-1:]), _ramp(x.shape[-1:])),
    lambda x: F.layer_norm(x, x.shape[1:]),
    lambda x: F.batch_norm(x, None, None, _ramp(x.shape[1:2]), _ramp(x.shape[1:2]), training=True, eps=1e-2),
    lambda x: F.group_norm(x, 1, _ramp(x.shape[1:2]), _ramp(x.shape[1:2])),
    lambda x: F.group_norm(x, 2 if x.shape[1] % 2 == 0 else x.shape[1]),
    lambda x: F.group_norm(x, x.shape[1], _ramp(x.shape[1:2]), _ramp(x.shape[1:2])),
)


def _ramp(shape: torch.Size) -> Tensor:
    """Weights that tell channels apart."""
    return torch.arange(1, 1 + shape.numel(), dtype=torch.float64).reshape(shape) / 4


@dataclass
class Chain:
    """A function drawn step by step; `kept` are the steps whose results are used again or given out."""

    steps: list[Step] = field(default_factory=list)
    residuals: set[int] = field(default_factory=set)
    outputs: set[int] = field(default_factory=set)

    def __call__(self, x: Tensor) -> list[Tensor]:
        seen, results = [x], []
        for number, step in enumerate(self.steps):
            x = step(x)
            if number in self.residuals:
                x = x + next(earlier for earlier in seen if earlier.shape == x.shape)
            seen.append(x)
            if number in self.outputs:
                results.append(x * 1)
        return [*results, x * 1]


@st.composite
def chains(draw: st.DrawFn) -> tuple[Chain, Tensor]:
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 4, 5, 8, 12]), min_size=2, max_size=4))
    order = draw(st.permutations(range(len(shape))))
    x = torch.randn([shape[d] for d in order], dtype=torch.float64)
    x = x.permute([order.index(d) for d in range(len(shape))])
    chain, value, shapes = Chain(), x, {x.shape}
    for number in range(draw(st.integers(1, 5))):
        step = draw(_steps(value))
        value = step(value)
        chain.steps.append(step)
        if value.shape in shapes and draw(st.booleans()):
            chain.residuals.add(number)
        if draw(st.integers(0, 4)) == 0:
            chain.outputs.add(number)
        shapes.add(value.shape)
    return chain, x


def _steps(x: Tensor) -> st.SearchStrategy[Step]:
    kinds = [st.sampled_from(POINTWISE)]
    if x.dim():
        dims = st.lists(st.integers(0, x.dim() - 1), min_size=1, max_size=x.dim(), unique=True).map(tuple)
        kinds += [st.sampled_from(VIEWS), st.builds(_along, st.sampled_from(ALONG), dims)]
        kinds += [st.builds(_along, st.sampled_from(ALONG), dims)]
        kinds += [st.builds(_along, st.sampled_from(REDUCE), dims)]
    if x.dim() > 1 and x.shape[1:].numel() > 1 and x.numel() // x.shape[1] > 1:
        kinds += [st.sampled_from(NORMS)]
    if x.dim() == 4 and min(x.shape[2:]) > 1:
        kinds += [st.sampled_from(POOLS)]
    return st.one_of(kinds)


def _along(function: Callable[[Tensor, tuple[int, ...]], Tensor], dims: tuple[int, ...]) -> Step:
    return lambda x: function(x, dims)


@pytest.mark.parametrize("options", [NO_SPLIT, TINY], ids=["no_split", "tiny"])
@given(drawn=chains())
@settings(max_examples=25)
@pytest.mark.invariant(13)
def test_chain(options: PassOptions, drawn: tuple[Chain, Tensor]) -> None:
    chain, x = drawn
    made = region(chain, x)
    made.check(tolerance=1e-7)
    seen: list[Program] = []
    run_passes(made.program, made.builder, options, check=True, observe=lambda _, program: seen.append(program))
    for program in dict.fromkeys(seen):
        made.check(program, tolerance=1e-7)
