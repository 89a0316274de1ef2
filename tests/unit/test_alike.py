"""Equal layers are generated, built and tried once; each keeps its own parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusepass
from fusepass.codegen import build
from fusepass.compile import pipeline
from fusepass.config import override
from fusepass.numerics.check import check


def layers(count: int, width: int = 24, **changes: Any) -> nn.Sequential:
    """Blocks that are equal but for their parameters."""
    made = [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width, **changes)) for _ in range(count)]
    for module in (module for block in made for module in block if isinstance(module, nn.LayerNorm)):
        nn.init.normal_(module.weight)
        nn.init.normal_(module.bias)
    return nn.Sequential(*made)


def test_equal_layers_are_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    build_each = build.build_each
    monkeypatch.setattr(build, "build_each", lambda sources: (asked.append(len(sources)), build_each(sources))[1])
    model, x = layers(5), torch.randn(16, 24)
    fused = fusepass.optimize(model, tune="off")
    outcome = check(model, fused, (x,))
    assert outcome.ok, outcome.explain()
    first, *others = fused.report().regions
    assert asked == [1]
    assert first.like is None
    assert [region.like for region in others] == [first.name] * 4
    assert len({region.sources for region in fused.report().regions}) == 1
    assert f"kernels and choice: those of {first.name}" in str(fused.report())


def test_each_layer_reads_its_own_parameters() -> None:
    model, x = layers(3), torch.randn(16, 24)
    fused = fusepass.optimize(model)
    with torch.no_grad():
        fused(x)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    outcome = check(model, fused, (x,))
    assert outcome.ok, outcome.explain()


def test_what_was_chosen_for_one_is_chosen_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    choose = pipeline.choose
    monkeypatch.setattr(
        pipeline, "choose", lambda work, calls: (tried.append(work.region.name), choose(work, calls))[1]
    )
    fused = fusepass.optimize(layers(4, width=23), tune="fast")
    with torch.no_grad():
        fused(torch.randn(16, 23))
    regions = fused.report().regions
    assert tried == [regions[0].name]
    assert {region.choice for region in regions} == {regions[0].choice}
    assert regions[0].choice is not None


@pytest.mark.parametrize(
    "other",
    [
        lambda: nn.Sequential(nn.Linear(24, 24), nn.GELU(), nn.LayerNorm(24, eps=1e-3)),
        lambda: nn.Sequential(nn.Linear(24, 24), nn.GELU("tanh"), nn.LayerNorm(24)),
        lambda: nn.Sequential(nn.Linear(24, 24), nn.GELU(), nn.LayerNorm(24, bias=False)),
        lambda: nn.Sequential(nn.Linear(24, 24), nn.SiLU(), nn.LayerNorm(24)),
        lambda: nn.Sequential(nn.Linear(24, 24, bias=False), nn.GELU(), nn.LayerNorm(24)),
    ],
)
def test_layers_that_differ_have_kernels_of_their_own(other: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(layers(1), other(), layers(1))
    fused = fusepass.optimize(model, tune="off")
    outcome = check(model, fused, (torch.randn(16, 24),))
    assert outcome.ok, outcome.explain()
    assert [region.like for region in fused.report().regions] == [None, None, fused.report().regions[0].name]


class Numbers(nn.Module):
    """The same operators twice, with another number each time, and on another layout of the same shape."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        a, b = torch.tensor(0.5), torch.tensor(0.25)
        return (x + a).tanh().sum(0), (x + b).tanh().sum(0), (x.t() + a).tanh().sum(0), (x + a).tanh().sum(1)


def test_numbers_layouts_and_arguments_tell_regions_apart() -> None:
    model, x = Numbers(), torch.randn(12, 12)
    fused = fusepass.optimize(model, tune="off")
    outcome = check(model, fused, (x,))
    assert outcome.ok, outcome.explain()


def test_a_layer_whose_build_fails_leaves_all_of_them_to_their_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = fusepass.errors.BuildError("broken")
    monkeypatch.setattr(build, "build_each", lambda sources: enumerate([broken] * len(sources)))
    model, x = layers(3, width=22), torch.randn(16, 22)
    fused = fusepass.optimize(model)
    with override(debug=False), torch.no_grad(), pytest.warns(fusepass.FusepassWarning, match="broken"):
        fused(x)
    outcome = check(model, fused, (x,))
    assert outcome.ok, outcome.explain()
    assert [region.state for region in fused.report().regions] == ["fallback"] * 3


def test_further_sizes_are_shared_too() -> None:
    model = layers(3)
    fused = fusepass.optimize(model, tune="off")
    for rows in (16, 33, 7):
        outcome = check(model, fused, (torch.randn(rows, 24),))
        assert outcome.ok, outcome.explain()
    assert sum(region.like is None for region in fused.report().regions) == 3
