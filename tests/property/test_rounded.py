"""Random chains of halves: what decides by them is eager's to the bit, after every pass; with ``rounding="eager"`` all of it is."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fusepass.config import override
from tests.support.regions import NO_SPLIT, TINY, region

Step = Callable[[Tensor, Tensor], Tensor]
Model = Callable[[Tensor, Tensor], tuple[Tensor, ...]]

# Results of these in float64, which the interpreter computes in, round to halves as those in float32 do.
ARITHMETIC: tuple[Step, ...] = (
    torch.add,
    torch.sub,
    torch.mul,
    lambda x, w: x * w + x,
    lambda x, w: x * 1.25,
    lambda x, w: 3 - x,
    lambda x, w: x.relu(),
    lambda x, w: torch.maximum(x, w * x),
    lambda x, w: x.clamp(-1, 40),
    lambda x, w: -x.abs(),
    lambda x, w: torch.where(w > 0, x, w + x),
    lambda x, w: x.flip(0) + w,
    lambda x, w: torch.cat([x[:1] * w[:1], x[1:] - w[1:]]),
    lambda x, w: (x * w).amax(-1, keepdim=True) - x,
    lambda x, w: x.transpose(0, 1).contiguous().transpose(0, 1) * w,
)
DECISIONS: tuple[Step, ...] = (
    lambda x, w: x > w,
    lambda x, w: x == x.amax(-1, keepdim=True),
    lambda x, w: x.isfinite(),
    lambda x, w: x.floor(),
    lambda x, w: x.round() * w,
    lambda x, w: x.sign(),
    lambda x, w: x.clamp(-100, 100).to(torch.int32),
    lambda x, w: x.bool(),
    lambda x, w: x.argmax(-1),
    lambda x, w: x.min(0)[1],
    lambda x, w: torch.where(x.float() * 2 > 1, 1, 0),
    lambda x, w: (x != w).any(0),
)


@st.composite
def chains(draw: st.DrawFn, decides: bool) -> tuple[Model, tuple[Tensor, Tensor]]:
    steps = draw(st.lists(st.sampled_from(ARITHMETIC), min_size=1, max_size=5))
    last = draw(st.sampled_from(DECISIONS)) if decides else torch.add
    dtype = draw(st.sampled_from([torch.float16, torch.bfloat16]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    size = draw(st.sampled_from([1.0, 1.0, 150.0]))
    x, w = (torch.randn(6, 40, generator=generator).mul(size).to(dtype) for _ in range(2))

    def model(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        for step in steps:
            x = step(x, w)
        return last(x, w), x * 1  # the value is for others, too

    return model, (x, w)


def check(model: Model, inputs: tuple[Tensor, Tensor], results: int) -> None:
    made = region(model, *inputs)
    for program in (made.program, made.passed(NO_SPLIT), made.passed(TINY)):
        for actual, eager in list(zip(made.run(program), made.eager(), strict=True))[:results]:
            torch.testing.assert_close(actual, eager, rtol=0, atol=0, equal_nan=True)


@settings(max_examples=40)
@given(chains(decides=True))
def test_what_decides_is_eager_s(chain: tuple[Model, tuple[Tensor, Tensor]]) -> None:
    check(*chain, results=2)


@settings(max_examples=20)
@given(chains(decides=False))
def test_all_is_eager_s_where_that_is_asked_for(chain: tuple[Model, tuple[Tensor, Tensor]]) -> None:
    with override(rounding="eager"):
        check(*chain, results=2)
