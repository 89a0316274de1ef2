"""Generates the candidates of a graph's regions: in this process, and side by side in others where that pays."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from functools import partial

import torch

from fusepass import background
from fusepass.autotune.candidates import (
    candidate_of,
    generate_anew,
    has_candidates,
    is_first,
    lower_for,
    offer,
    settle_unmeasured,
    within_budget,
)
from fusepass.autotune.recorded import coded_candidate, take
from fusepass.autotune.schedules import add_new, add_schedule, chosen_schedules
from fusepass.autotune.tune import adopt, named, recall
from fusepass.autotune.work import Work
from fusepass.codegen import cache_folders as folders
from fusepass.codegen import records
from fusepass.codegen.detect import device_facts
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.forms import Forms
from fusepass.codegen.render.cuda.family import registered
from fusepass.codegen.schedule.overrides import ScheduleOverrides
from fusepass.codegen.search.apart import GENERATION, Answer, Order, packed, unpacked
from fusepass.codegen.search.candidate import CandidateSpec
from fusepass.codegen.search.others import Begin
from fusepass.codegen.search.space import anchor_cost, is_precise, search_space
from fusepass.codegen.search.worth import AnchorCost
from fusepass.codegen.workers import PATIENCE, Lost, can_start, workers
from fusepass.config import Config, current
from fusepass.progress import tell

_LEAST_CORES = 4
_MOST = 4  # workers, unless more are asked for
_LEAST = 16  # regions that are generated in the time that workers take to start
_OPERATORS = 4  # at least, of a region that no other one is like
_LOOK = 0.2  # seconds
Space = tuple[list[CandidateSpec], AnchorCost | None]
"""Candidates, and what their comparison needs to know; see `Order`."""

_OF_TORCH = (torch.memory_format, torch.dtype, torch.layout, torch.device, torch.Size)
"""What the arguments of library calls may be."""


def prepare(operators: int) -> None:
    """Start other processes for a graph of so many operators, or modules, that is about to be captured, where nothing was ever generated: all of it
    will be."""
    most = _most(current(), operators // _OPERATORS)
    if most and not records.any_in(folders.REGIONS):
        workers(GENERATION).start(most)


def generate_all(works: Sequence[Work], forms: Forms, begin: Begin, *, seconds_left: float) -> None:
    """Give each of `works` its candidates, see `fusepass.autotune.candidates`.

    Args:
        forms: the libraries for other sizes.
        begin: is told of sources that are going to be built, as soon as they are there.
        seconds_left: of `Config.tune_budget`, for other schedules.
    """
    waiting = [work for work in works if not has_candidates(work, forms, begin)]
    beside = _Beside(_most(current(), len(waiting)))
    try:
        in_turn = beside.in_turn(waiting, partial(_space, forms))
        for number, work in enumerate(in_turn, len(works) - len(waiting)):
            tell("generate", number, len(works), work.region.name)
            generate_anew(work, forms, begin, lambda work, facts: _take(work, beside.answer(work), facts, forms))
        _add_schedules(chosen_schedules(works, begin, seconds_left=seconds_left), beside)
    finally:
        beside.close(works)


def _space(forms: Forms, work: Work) -> Space | None:
    """What others may generate of `work`; None where that depends on other sizes."""
    if forms.several or not is_first(work, forms):
        return None
    effort, facts = current().tune, device_facts(work.device)
    first, *others = search_space(work.graph, facts, effort)
    precise = (spec for spec in within_budget(work, others) if is_precise(spec, work.graph, facts))
    return [first, *precise], None if effort == "max" else anchor_cost(work.region.anchor, facts)


def _take(work: Work, answer: Answer | None, facts: DeviceFacts, forms: Forms) -> bool:
    """Give `work` what another process generated, as if it had been generated here; whether it has it."""
    if answer is None or not take(work, answer.candidates, facts, forms, candidate_of):
        return False
    beyond = work.beyond_budget
    offer(work, within_budget(work, search_space(work.graph, facts, current().tune)[1:]))
    record = recall(work)
    if record is None:
        work.ruled_out, work.schedules = answer.ruled_out, answer.schedules
        work.lost.update(answer.lost)
    else:
        first, *others = work.candidates
        work.candidates = [first, *(each for each in others if each.name in named(record))]
        if not adopt(work, record):
            work.candidates, work.candidate, work.beyond_budget = [], None, beyond
            return False
    settle_unmeasured(work, copies=answer.copies)
    return True


def _add_schedules(chosen: Sequence[tuple[Work, ScheduleOverrides]], beside: _Beside) -> None:
    """Add other schedules of first candidates; of those that another process generated, they are generated there."""
    wanted: dict[int, list[ScheduleOverrides]] = {}
    for work, overrides in chosen:
        wanted.setdefault(id(work), []).append(overrides)
    works = {id(work): work for work, _ in chosen}

    def space(work: Work) -> Space | None:
        specs = [replace(work.candidates[0].spec, overrides=each) for each in wanted[id(work)]]
        return None if work.schedules is None else (specs, None)

    for work in beside.in_turn(list(works.values()), space):
        answer = beside.answer(work)
        if answer is None:
            for overrides in wanted[id(work)]:
                add_schedule(work, overrides)
            continue
        work.lost.update(answer.lost)
        facts = device_facts(work.device)
        add_new(work, [coded_candidate(work, each, facts, candidate_of) for each in answer.candidates])


class _Beside:
    """What other processes generate.

    Args:
        most: how many there may be.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._given: dict[int, tuple[Future[bytes], list[object]]] = {}

    def in_turn(self, works: Sequence[Work], space: Callable[[Work], Space | None]) -> Iterator[Work]:
        """`works` one by one: what others have done as soon as it is there, meanwhile what nobody has begun, for this process to do.

        They are given what `space` says.
        """
        waiting: list[Work] = []
        for work in works:
            self._give(work, space)
            waiting.append(work)
            while (number := self._done(waiting)) is not None:
                yield waiting.pop(number)
        while waiting:
            yield waiting.pop(self._next(waiting))

    def _give(self, work: Work, space: Callable[[Work], Space | None]) -> None:
        """Have `work` generated by others, if there may be others; it is lowered here."""
        if not self._most or work.anew is None:
            return
        try:
            wanted, facts = space(work), device_facts(work.device)
            if wanted is None:
                return
            lower_for(work, wanted[0], facts)
            order, kept = packed(Order(work.common, wanted[0], facts, wanted[1], vars(current())), _OF_TORCH)
        except Exception:  # which this process meets where it generates the region, and tells
            return
        self._given[id(work)] = workers(GENERATION).submit(order, self._most), kept

    def _done(self, waiting: Sequence[Work]) -> int | None:
        """The number of one of `waiting` that others have done."""
        given = ((number, self._given.get(id(work))) for number, work in enumerate(waiting))
        return next((number for number, each in given if each is not None and each[0].done()), None)

    def _next(self, waiting: Sequence[Work]) -> int:
        until = time.monotonic() + PATIENCE
        while (number := self._done(waiting)) is None and time.monotonic() < until:
            given = [self._given.get(id(work)) for work in waiting]
            for number, each in enumerate(given):
                if each is None or each[0].cancel():
                    return number
            wait([each[0] for each in given if each is not None], _LOOK, FIRST_COMPLETED)
            background.checkpoint()
        return number or 0

    def answer(self, work: Work) -> Answer | None:
        """What others have generated of `work`; None where that is for this process to do."""
        future, kept = self._given.pop(id(work), (None, []))
        if future is None or future.cancelled():
            return None
        try:
            return unpacked(future.result(timeout=0), kept)
        except TimeoutError:
            work.alone = f"a worker takes more than {PATIENCE:g} s"
        except Exception as error:  # this process needs nobody
            work.alone = f"{error}" if isinstance(error, Lost) else f"{type(error).__name__} in a worker: {error}"
        return None

    def close(self, works: Sequence[Work]) -> None:
        """Leave nothing to others any more; if none could be started, the first of `works` says so."""
        for future, _ in self._given.values():
            future.cancel()
        if self._most and works and (trouble := workers(GENERATION).told_trouble()) is not None:
            works[0].alone = works[0].alone or trouble


def _most(config: Config, regions: int) -> int:
    """How many other processes may take a part in generating so many regions."""
    if config.debug or config.dump is not None or registered() or not regions or not can_start():
        return 0
    if config.workers is not None:
        return min(config.workers, regions)
    cores = min(config.jobs, len(os.sched_getaffinity(0)))
    return min(cores // 2, _MOST) if cores >= _LEAST_CORES and regions >= _LEAST else 0
