"""Times ways to run one whole graph on a CPU beside each other, and keeps what was found on disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import fx

from fusepass import measure
from fusepass.codegen import choices, records
from fusepass.codegen.detect import device_facts
from fusepass.config import current
from fusepass.report.choice import Choice

_SECONDS = 0.3
_LEAST, _MOST = 5, 20
_LONGEST = {"fast": 0.5, "max": 10.0}
"""By `Config.tune`: seconds that one run of the slowest way may take."""
_MEMORY_SHARE = 0.5

Call = Callable[..., object]
Ways = Callable[[Sequence[torch.Tensor]], Mapping[str, Callable[[], object]]]
"""Makes the calls to time, by name, of inputs that are made up."""

CPU = torch.device("cpu")


def times_decide() -> bool:
    """Whether anything is to be timed at all."""
    return current().tune != "off" and not torch.are_deterministic_algorithms_enabled()


def seconds_of(what: str, graph: fx.GraphModule, ways: Ways, depends: Mapping[str, Any]) -> Mapping[str, float] | None:
    """Seconds of each of `ways`, the lower quartile of rounds in which they take turns; of an earlier process where one has measured them.

    Args:
        what: is decided, in words, for the record.
        graph: whose arguments `ways` take; it may be repeated (`fusepass.patterns.effects.may_be_repeated`).
        ways: is asked if anything is to be timed. What is raised there, or by a call, for numbers that are made up says that nothing can be.
        depends: what the times depend on besides `graph`, as plain values.

    Returns:
        None where nothing was measured: memory is short, one run takes too long, operators do not take numbers that are made up.
    """
    key = choices.key_of({what: str(graph.graph), **depends, **_surroundings(graph)})
    with choices.locked(key):
        seconds = _recalled(key)
        if seconds is None:
            rounds = measured(graph, ways)
            if rounds is None:
                choices.momentary()
                return None
            seconds = {name: measure.typical(taken) for name, taken in rounds.samples.items()}
            if rounds.disturbed:
                choices.momentary()
            else:
                choices.store(key, _record(what, seconds))
    return seconds


def measured(graph: fx.GraphModule, ways: Ways) -> measure.Rounds | None:
    """The times of each round; see `seconds_of`."""
    like = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    if sum(map(measure.nbytes, like)) > _MEMORY_SHARE * measure.free_bytes(CPU):
        return None
    inputs, clock = measure.made_up(like, CPU), measure.clock(CPU)
    with measure.as_compiled_code_runs(CPU):
        try:
            calls = ways(inputs)
            for call in calls.values():
                call()
        except (RuntimeError, IndexError, ValueError):
            return None
        if max(map(clock, calls.values())) > _LONGEST[current().tune]:
            return None
        return measure.in_turn(calls, clock, _SECONDS, least=_LEAST, most=_MOST)


def _recalled(key: str) -> dict[str, float] | None:
    record = choices.lookup(key)
    if record is None:
        return None
    try:
        return dict(Choice.from_json(dict(record.choice)).seconds) or None
    except (KeyError, TypeError, ValueError):  # written by another version
        return None


def _record(what: str, seconds: dict[str, float]) -> choices.Record:
    return choices.Record(
        region=what,
        device=_cpu(),
        effort=current().tune,
        created=records.now(),
        choice=asdict(Choice(min(seconds, key=seconds.__getitem__), seconds=tuple(seconds.items()))),
    )


def _surroundings(graph: fx.GraphModule) -> dict[str, Any]:
    values = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    return {
        "arguments": [f"{value.dtype}{list(value.shape)}{list(value.stride())}" for value in values],
        "cpu": [_cpu(), torch.backends.cpu.get_cpu_capability()],
        "threads": torch.get_num_threads(),
        "versions": torch.__version__,
    }


def _cpu() -> str:
    facts = device_facts(CPU)
    return f"{facts.name}, {facts.arch}"
