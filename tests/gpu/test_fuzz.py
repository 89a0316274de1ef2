"""Random models on a device; `python -m tests.fuzz --device cuda` tries thousands."""

from __future__ import annotations

import pytest

pytest.importorskip("hypothesis")

from tests.fuzz.chunk import draw, run

pytestmark = [pytest.mark.gpu, pytest.mark.models]


@pytest.mark.parametrize("seed", range(2))
def test_random_models_like_eager(seed: int) -> None:
    wrong = [failure for failure in run(draw(1_000_000 + seed, 40), "cuda") if not failure.noise]
    assert not wrong, "\n".join(f"{failure.problem}\n{failure.example.model.text}" for failure in wrong)
