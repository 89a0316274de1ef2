"""What rewrites that are exact in real numbers are tested with: float64 results, errors in float32, work counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import fx
from torch.utils.flop_counter import FlopCounterMode

from fusepass.numerics.check import compare
from fusepass.patterns.cost import NOTHING
from fusepass.patterns.simplify import simplify
from tests.support.aten import traced

Function = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Rewritten:
    """A function before and after.

    Attributes:
        rules: the names of the rules that applied, in order.
        before, after: its graphs.
    """

    rules: list[str]
    before: fx.GraphModule
    after: fx.GraphModule

    def flops(self, *inputs: torch.Tensor) -> tuple[int, int]:
        """Floating-point operations of convolutions and products, before and after."""
        return flops(self.before, *inputs), flops(self.after, *inputs)


def rewritten(function: Function, *inputs: torch.Tensor) -> Rewritten:
    """`function` for such inputs, rewritten by all rules in force, whether or not that pays for tensors so small."""
    before, after = traced(function, *inputs), traced(function, *inputs)
    with patch("fusepass.patterns.simplify.cost", return_value=NOTHING):
        rules = [application.rule for application in simplify(after)]
    return Rewritten(rules, before, after)


def same_value(function: Function, *inputs: torch.Tensor) -> Rewritten:
    """`rewritten`; for these float64 inputs both graphs give the same, but for rounding."""
    result = rewritten(function, *inputs)
    wanted, actual = result.before(*inputs), result.after(*inputs)
    assert actual.stride() == wanted.stride()
    torch.testing.assert_close(actual, wanted, rtol=1e-11, atol=1e-11 * float(wanted.abs().max() + 1))
    return result


def within_policy(function: Function, *inputs: torch.Tensor) -> None:
    """For these float64 inputs, rounded to float32, the rewritten function is about as exact as the original."""
    narrow = [value.float() if value.is_floating_point() else value for value in inputs]
    wide = [value.double() if value.is_floating_point() else value for value in narrow]
    result = rewritten(function, *narrow)
    assert result.rules
    comparison = compare(result.after(*narrow), result.before(*narrow), traced(function, *wide)(*wide))
    assert comparison.ok, comparison.explain()


def flops(graph: fx.GraphModule, *inputs: torch.Tensor) -> int:
    """Floating-point operations of the convolutions and matrix products that `graph` runs."""
    with FlopCounterMode(display=False) as counter:
        graph(*inputs)
    return int(counter.get_total_flops())
