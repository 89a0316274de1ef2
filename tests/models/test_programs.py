"""Training programs of thirty steps go as eager's: losses, parameters, buffers and random numbers, in float64."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusepass
from fusepass.config import override
from fusepass.training.backend import Backend
from tests.models.programs import PROGRAMS
from tests.support.interpreted import interpreted
from tests.support.on_a_gpu import trained_on_a_gpu
from tests.sweep.steps import as_on_a_gpu

pytestmark = pytest.mark.models

STEPS = 30
WAYS: dict[str, Callable[[nn.Module], Callable[..., Any]]] = {
    "optimize": lambda model: fusepass.optimize(model, training="fused"),
    "compile": lambda model: torch.compile(model, backend=Backend("graph", {})),
    "gpu": lambda model: trained_on_a_gpu(model, random.Random(1)),
}
"""The last one as on a GPU, interpreted."""
USUAL = {("policy", "optimize"), ("contrastive", "compile"), ("moe", "gpu"), ("vae", "gpu")}


@pytest.fixture(autouse=True)
def _wide() -> Iterator[None]:
    """Rounding errors do not add up to anything in float64."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def _train(
    name: str, wrap: Callable[[nn.Module], Callable[..., Any]]
) -> tuple[list[Tensor], dict[str, Tensor], Tensor]:
    torch.manual_seed(0)
    program = PROGRAMS[name](wrap)
    torch.manual_seed(1)
    losses = [program.step(number) for number in range(STEPS)]
    return losses, dict(program.state()), torch.get_rng_state()


def _names() -> list[Any]:
    return [
        (name, way) if (name, way) in USUAL else pytest.param(name, way, marks=pytest.mark.slow)
        for name in PROGRAMS
        for way in WAYS
    ]


@pytest.mark.parametrize(("name", "way"), _names())
def test_thirty_steps(name: str, way: str) -> None:
    torch._dynamo.reset()
    wanted, end, drawn = _train(name, lambda model: model)
    with override(debug=True, tune="off"), warnings.catch_warnings(), interpreted(), as_on_a_gpu():
        warnings.simplefilter("ignore")
        found, state, generator = _train(name, WAYS[way])
    assert torch.equal(generator, drawn)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9)
    assert state.keys() == end.keys()
    for key, value in end.items():
        torch.testing.assert_close(state[key], value, rtol=1e-5, atol=1e-8, msg=lambda text, key=key: f"{key}: {text}")
