"""Calls whose first operand is a number: what asks operands where they come from must not ask a number."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fusepass
from tests.support.regions import Functional

CHAINS: dict[str, Callable[[Tensor], Tensor]] = {
    "div": lambda x: torch.div(42, x) * 2,
    "div of a sum": lambda x: torch.div(1, x + 1).sum(-1) * 2,
    "div, rounded": lambda x: torch.div(42, x, rounding_mode="floor") * 2,
    "mul": lambda x: torch.mul(3, x) + torch.mul(True, x),
    "mul of a product": lambda x: torch.mul(0.5, x @ x) * 2 + 1,
    "sub": lambda x: torch.sub(1, x) * 2,
    "add": lambda x: torch.add(1, x, alpha=2) * x,
    "into a mean": lambda x: torch.mul(2, x).mean(-1) * 2,
    "pow and remainder": lambda x: torch.pow(2, x) * torch.remainder(5, x),
    "where": lambda x: torch.where(x > 1, 1, x * 2) + torch.rsub(x, 4),
    "scores": lambda x: torch.add(1, x[None] @ x[None]).softmax(-1) @ x[None],
    "scaled scores": lambda x: torch.mul(0.125, x[None] @ x[None]).softmax(-1) @ x[None],
}


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.filterwarnings("error::fusepass.FusepassWarning")
def test_a_number_may_be_the_first_operand(name: str) -> None:
    chain = CHAINS[name]
    x = torch.rand(8, 8) + 0.5
    with fusepass.override(tune="off", debug=True):
        for fused in (fusepass.optimize(Functional(chain)), torch.compile(chain, backend="fusepass")):
            torch.testing.assert_close(fused(x), chain(x))
