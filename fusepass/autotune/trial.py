"""Runs a region's candidates beside its own operators on made-up inputs: first for their results, then for their times."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fusepass import measure
from fusepass.autotune.ranking import LEAST_ROUNDS, Ratio, ranking
from fusepass.autotune.work import Work
from fusepass.config import current
from fusepass.numerics.agreement import Agreement, Reference, Tolerance, Verdict, as_tuple, in_float64
from fusepass.report.choice import EAGER, Choice

_ROUNDS = 100
_FEW_RUNS = 3
_CLEARLY = 2.0  # times the fastest one's least time of these: too slow to win any round

Call = Callable[..., Any]


@dataclass(frozen=True)
class Budget:
    """Seconds on the device for the rounds of one region; `most` for the fewest rounds where these take longer."""

    seconds: float
    most: float


BUDGETS = {"fast": Budget(0.03, 0.5), "max": Budget(1.0, 10.0)}
"""By `Config.tune`."""


class OperatorsFail(Exception):
    """The region's own operators do not take numbers such as these."""


def checked(work: Work, calls: Mapping[str, Call], memory_share: float) -> dict[str, Agreement]:
    """Whether candidates give what the operators of `work` give.

    Inputs of both signs are tried first, because sums of them differ most; where that says nothing, positive ones. One that
    fails where the operators do not counts as different.

    Args:
        work: the region.
        calls: the candidates.
        memory_share: of the free memory that the operators in float64 may take.

    Raises:
        OperatorsFail: the operators raise, for positive numbers, too.
    """
    like = [node.meta["val"] for node in work.arguments]
    eager, tolerances, wide = work.original(), Tolerance.of(work.graph), _in_float64(work, memory_share)
    found: dict[str, Agreement] = {}
    for signed in (True, False):
        rest = [name for name in calls if name not in found or found[name].verdict is Verdict.UNCLEAR]
        if not rest:
            break
        inputs = measure.made_up(like, work.device, signed=signed)
        try:
            reference = Reference(eager, wide, inputs, tolerances)
        except (
            RuntimeError,
            IndexError,
            ValueError,
            ZeroDivisionError,
        ) as error:  # what operators raise for such numbers
            if not signed:
                raise OperatorsFail(f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}") from error
            continue  # some operators take positive numbers only
        found |= _against(reference, {name: calls[name] for name in rest}, inputs)
    return found


def _against(reference: Reference, calls: Mapping[str, Call], inputs: Sequence[torch.Tensor]) -> dict[str, Agreement]:
    """The verdict on each of `calls`; none of them finds right results in the memory that it is given for its own."""
    found: dict[str, Agreement] = {}
    doubtful: dict[str, tuple[torch.Tensor, ...]] = {}
    places = _places(reference.expected)
    for name, call in calls.items():
        _spoil([torch.empty_like(place) for place in places])
        try:
            results = as_tuple(call(*inputs))
        except (MemoryError, torch.OutOfMemoryError):
            raise  # which says nothing about the candidate
        except Exception as error:
            if current().debug:
                raise
            found[name] = Agreement(Verdict.DIFFERENT, f"its first run failed: {error}")
            continue
        outcome = reference.judge(results)
        if outcome is None:
            doubtful[name] = results
            continue
        found[name] = _explained(outcome)
        _spoil(results)
    # Once all have run, because float64 leaves right results behind.
    return found | {name: _explained(reference.by_policy(results)) for name, results in doubtful.items()}


def _explained(outcome: Agreement) -> Agreement:
    if outcome.verdict is Verdict.DIFFERENT:
        return replace(outcome, detail=f"its results are not those of the operators: {outcome.detail}")
    return outcome


_SMALL = 2**16  # bytes of a result
_SEVERAL = 256  # pieces of memory of its size that may lie about, one of which an earlier one was in, where it is small


def _places(results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A tensor of `results` for each piece of memory that is spoiled, as it may have held one like it."""
    small = {(each.nbytes, each.dtype): each for each in results if each.nbytes <= _SMALL}
    return [
        *(each for each in results if each.nbytes > _SMALL),
        *(each for each in small.values() for _ in range(_SEVERAL)),
    ]


def _spoil(tensors: Sequence[torch.Tensor]) -> None:
    """Fill memory with what no kernel gives, so that one that writes nothing does not look right."""
    for tensor in tensors:
        floating = tensor.is_floating_point() or tensor.is_complex()
        tensor.fill_(math.nan if floating else 1 if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).max)


def _in_float64(work: Work, memory_share: float) -> Call | None:
    """The operators of `work` in float64; None where that would take too much memory."""
    nodes = work.graph.graph.nodes
    values = [node.meta.get("val") for node in nodes]
    numbers = sum(value.numel() for value in values if isinstance(value, torch.Tensor))
    if numbers * torch.float64.itemsize > memory_share * measure.free_bytes(work.device):
        return None
    return lambda *inputs: work.run_on(in_float64(work.graph))(*inputs)


def fastest(
    eager: Call,
    generated: Mapping[str, Call],
    like: Sequence[torch.Tensor],
    device: torch.device,
    budget: Budget,
    alternatives: Collection[str] = (),
) -> Choice:
    """The choice by times: all run in turn on made-up inputs; `generated` holds the candidates in order of preference.

    `alternatives` names those of them that differ from the first one in schedules alone; see `ranking`. Where the fewest rounds do not fit `budget`, those take part that a few runs each leave near the fastest.
    """
    inputs = measure.made_up(like, device)
    clock = measure.clock(device, launches=False)
    calls = {name: _bound(call, inputs) for name, call in {**generated, EAGER: eager}.items()}
    clock(calls[EAGER])  # warms up
    watch = measure.Watch(clock)
    first = clock(calls[EAGER])
    if first > budget.most:
        return Choice(next(iter(generated)), reason=f"one run takes {first:.2g} s")
    for name in generated:
        clock(calls[name])
    once = {name: clock(calls[name]) for name in generated} | {EAGER: first}
    running = dict(calls)
    if LEAST_ROUNDS * sum(once.values()) > budget.most:
        for _ in range(_FEW_RUNS - 1):  # neighbours on the machine only ever add to a time
            once = {name: min(seconds, clock(calls[name])) for name, seconds in once.items()}
        clearly_slower = _CLEARLY * min(once.values())
        running = {name: call for name, call in calls.items() if once[name] <= clearly_slower}
    samples: Mapping[str, Sequence[float]] = {name: [once[name]] for name in running}
    disturbed = watch.disturbed(_FEW_RUNS * sum(once.values()))
    if len(running) > 1 and LEAST_ROUNDS * sum(once[name] for name in running) <= budget.most:
        rounds = measure.in_turn(
            running,
            clock,
            budget.seconds,
            least=LEAST_ROUNDS,
            most=_ROUNDS,
            settled=lambda taken: ranking(taken, alternatives).decided,
        )
        samples = rounds.samples
        disturbed = rounds.disturbed > 0 or (disturbed and len(running) < len(calls))
    return replace(_decided(samples, once, alternatives), disturbed=disturbed)


def _decided(
    samples: Mapping[str, Sequence[float]], once: Mapping[str, float], alternatives: Collection[str]
) -> Choice:
    """The choice for these seconds of each candidate, round by round, and the least ones of all, `once`, the operators last."""
    times = {**once, **{name: measure.typical(values) for name, values in samples.items()}}
    rank = ranking(samples, alternatives)
    generated = [name for name in once if name != EAGER]
    best = rank.winner if rank.winner != EAGER else min(generated, key=times.__getitem__)
    rounds = len(samples[rank.winner])
    ratio = Ratio.of(*(samples.get(name, [times[name]] * rounds) for name in (EAGER, best)))
    overlap = f"times of {f'{rounds} rounds' if rounds > 1 else f'{_FEW_RUNS} runs each'} overlap"
    return Choice(
        chosen=rank.winner,
        seconds=((EAGER, times.pop(EAGER)), *times.items()),
        speedup=ratio.median,
        interval=(ratio.low, ratio.high) if rounds >= LEAST_ROUNDS else (0.0, 0.0),
        reason=None if rank.decided or rank.near else overlap,
    )


def _bound(call: Call, inputs: Sequence[torch.Tensor]) -> Callable[[], object]:
    return lambda: call(*inputs)
