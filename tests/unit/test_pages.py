"""Large results on a CPU get large pages where the kernel has them."""

from __future__ import annotations

import mmap
import resource
from pathlib import Path

import pytest
import torch
from torch import nn

import fusepass
from fusepass.runtime import pages

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MIB = 1 << 20


class Double(nn.Module):
    """One kernel with one result."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + x).abs()


def test_only_whole_pages_inside_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int, int]] = []
    monkeypatch.setattr(pages, "_advise", lambda *call: calls.append(call))
    monkeypatch.setattr(pages, "_HUGE", 14)
    pages.prefer_large(10 * MIB - 64, 5 * MIB)
    pages.prefer_large(10 * MIB, 4 * MIB)
    pages.prefer_large(10 * MIB + 1, 3 * MIB)
    assert calls == [(10 * MIB, 4 * MIB, 14), (10 * MIB, 4 * MIB, 14)]


@pytest.mark.parametrize("missing", ["_advise", "_HUGE"])
def test_nothing_happens_where_there_are_none(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, missing, None)
    pages.prefer_large(0, 64 * MIB)


def test_small_results_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr("fusepass.runtime.call_text.prefer_large", lambda *call: calls.append(call))
    with torch.no_grad():
        for size in (MIB - 1, MIB):
            model = fusepass.optimize(Double())
            result = model(torch.ones(size))
    assert calls == [(result.data_ptr(), 4 * MIB)]


@pytest.mark.skipif(
    not hasattr(mmap, "MADV_HUGEPAGE") or not SETTING.exists() or "[never]" in SETTING.read_text(),
    reason="this kernel has no large pages",
)
def test_a_large_result_takes_few_page_faults() -> None:
    model, x = fusepass.optimize(Double()), torch.rand(16 * MIB)
    with torch.no_grad():
        model(x)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        result = model(x)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert torch.equal(result, (x + x).abs())
    assert faults < 64 * MIB / 4096 / 4
