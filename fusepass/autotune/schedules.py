"""Candidates that differ from a region's first one in how its kernels are laid out, where the cost model does not agree with the rules."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from math import inf

from fusepass.autotune.candidates import candidate_of
from fusepass.autotune.tune import times_are_taken
from fusepass.autotune.tune_budget import build_seconds
from fusepass.autotune.work import Work
from fusepass.codegen.generate import Generated
from fusepass.codegen.schedule.overrides import ScheduleOverrides
from fusepass.codegen.search.candidate import Candidate
from fusepass.codegen.search.others import Begin, told
from fusepass.codegen.search.schedules import ScheduleCandidate, schedule_candidates
from fusepass.config import current

_MOST = {"fast": 2, "max": 12}  # of a region, by `Config.tune`


def chosen_schedules(
    works: Sequence[Work], begin: Begin = lambda source: None, *, seconds_left: float = inf
) -> list[tuple[Work, ScheduleOverrides]]:
    """Candidates to add to those of `works` whose choice is open.

    At ``tune="fast"`` they are as many in all as there are compilers that have nothing else to do; where the model expects
    most, they come first. They take no more than the `seconds_left` of `Config.tune_budget`. `begin` is told of what is built besides, so
    that compilers start meanwhile.
    """
    config = current()
    effort = config.tune
    ready = [work for work in works if work.choice is None and work.reason is None and work.candidates]
    needed = sum(len(candidate.sources) for work in ready for candidate in work.candidates)
    room = {"off": 0, "fast": max(config.jobs - needed, 0)}.get(effort)
    if room == 0:
        return []
    found = [(each, work) for work in ready if times_are_taken(work) for each in _schedule_candidates(work, effort)]
    if effort == "fast":
        found.sort(key=lambda pair: pair[0].seconds)
    found = found[:room]
    totals = itertools.accumulate(build_seconds(work, work.candidates[0].spec.anchor, config) for _, work in found)
    found = [each for each, total in zip(found, totals, strict=True) if total <= seconds_left]
    for work in {id(work): work for _, work in found}.values():
        for source in work.candidates[0].sources:
            begin(source)
    return [(work, each.overrides) for each, work in found]


def _schedule_candidates(work: Work, effort: str) -> Sequence[ScheduleCandidate]:
    """The most promising ones of a region.

    What is laid out for other sizes has none; at ``tune="fast"`` neither has a region whose anchor is tried in several ways, as
    that matters more.
    """
    first = work.candidates[0].generated
    if first.general is not None or (effort == "fast" and len(work.candidates) > 1):
        return ()
    known = work.schedules
    return (schedule_candidates(first.program, first.facts, effort) if known is None else known)[: _MOST[effort]]


def add_schedule(work: Work, overrides: ScheduleOverrides) -> None:
    """Add the first candidate of `work` with `overrides`, unless that is a program that there is."""
    try:
        add_new(work, [with_overrides(work, overrides)])
    except Exception as bug:
        work.lost[replace(work.candidates[0].spec, overrides=overrides).name] = told(bug)


def add_new(work: Work, candidates: Sequence[Candidate]) -> None:
    """Add those of `candidates` that are other texts than those that `work` has."""
    for made in candidates:
        if all(_texts(made) != _texts(known) for known in work.candidates):
            work.candidates.append(made)


def _texts(candidate: Candidate) -> list[str]:
    return [source.text for source in candidate.sources]


def with_overrides(work: Work, overrides: ScheduleOverrides) -> Candidate:
    """The first candidate of `work` with other schedule overrides; where that changes no program, without the passes."""
    first = work.candidates[0]
    spec = replace(first.spec, overrides=overrides)
    if overrides.rank:
        return replace(first, spec=spec, generated=Generated(first.generated.program, first.generated.facts, overrides))
    return candidate_of(work, spec, first.generated.facts)
