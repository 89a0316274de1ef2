"""PyTorch's profiler sees regions by their names, and costs nothing where none runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import fusepass
from fusepass.runtime import fast_path, region


def model() -> nn.Module:
    return nn.Sequential(nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 8), nn.Softmax(1)).eval()


def names_of(call: object, *inputs: torch.Tensor) -> dict[str, int]:
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU]) as profiled:
        call(*inputs)  # type: ignore[operator]
    return {event.key: event.count for event in profiled.key_averages()}


@pytest.mark.parametrize("without_python", [False, True])
def test_each_region_is_seen_once_by_its_name(without_python: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.rand(4, 8)
    fast_path.wait()
    assert fast_path.types() is not None
    if not without_python:
        monkeypatch.setattr(fast_path, "_types", None)
        monkeypatch.setattr(fast_path, "_given_up", True)
    optimised = fusepass.optimize(model(), tune="off")
    with torch.no_grad():
        for _ in range(3):
            optimised(x)
    regions = {each.name for each in optimised.report().regions}
    assert len(regions) == 2
    found = names_of(optimised, x)
    assert {name: found.get(name) for name in regions} == dict.fromkeys(regions, 1)
    calls: list[str] = []
    monkeypatch.setitem(vars(region), "_RecordFunction", lambda name: calls.append(name))
    with torch.no_grad():
        optimised(x)
    assert calls == []


def test_regions_of_a_compiled_step_are_seen() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(model().train(), backend="fusepass", options={"tune": "off"})
    x = torch.rand(4, 8, requires_grad=True)
    compiled(x).sum().backward()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        compiled(x).sum().backward()
    names = [event.key for event in profiled.key_averages()]
    assert any("gelu" in name and "layer_norm" in name and "backward" not in name for name in names)
    assert any("backward" in name and "gelu" in name and "::" not in name for name in names)
