"""When a region's candidates are built, and who waits for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from fusepass.autotune.candidates import build_candidates
from fusepass.autotune.work import Work
from fusepass.codegen import build
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.source import Source
from fusepass.errors import BuildError
from tests.golden_sources import digests


def works(facts: DeviceFacts) -> list[Work]:
    """Two regions: one of several candidates, one of a single one."""
    group = "mission" if facts is digests.H200 else "cpu"
    workloads, kind, _ = digests.GROUPS[group]
    with digests._generating_for(facts):
        found = [work for workload in workloads[:4] for _, work in kind(workload, facts)]
    return sorted(found, key=lambda work: len(work.candidates))[:: len(found) - 1]


@pytest.mark.parametrize("facts", [digests.H200, digests.CPU], ids=["gpu", "cpu"])
def test_a_region_on_a_gpu_waits_for_its_own_libraries_alone(
    facts: DeviceFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU for all; and what could not be built is told either way."""
    few, many = works(facts)
    events: list[object] = []

    def build_each(sources: Sequence[Source]) -> Iterator[tuple[int, Path | BuildError]]:
        for number, source in reversed([*enumerate(sources)]):
            events.append("built")
            yield number, BuildError("no") if number == 0 else Path(source.entry)

    monkeypatch.setattr(build, "build_each", build_each)
    for work in build_candidates([many, few]):
        events.append(work)
    counts = [sum(len(candidate.sources) for candidate in work.candidates) for work in (few, many)]
    if facts is digests.H200:
        assert events == ["built"] * counts[0] + [few] + ["built"] * counts[1] + [many]
    else:
        assert events == ["built"] * sum(counts) + [many, few]
    assert many.lost == {many.candidates[0].name: "build failed: no"}
    for candidate in (*few.candidates, *many.candidates[1:]):
        assert candidate.library == Path(candidate.sources[0].entry)
        assert len(candidate.converters) == len(candidate.conversions)


def test_a_region_without_candidates_is_there_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = works(digests.H200)
    few.reason = "no code"
    few.candidates = []

    def full(sources: Sequence[Source]) -> Iterator[tuple[int, Path | BuildError]]:
        raise OSError("no space left")
        yield 0, Path()

    monkeypatch.setattr(build, "build_each", full)
    assert [*build_candidates([many, few])] == [few, many]
    assert set(many.lost.values()) == {"build failed: no space left"}
