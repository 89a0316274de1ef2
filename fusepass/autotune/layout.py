"""Whether a graph on a CPU is quicker channels last: a trial of its operators in both layouts, kept on disk."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from typing import Any

import torch
from torch import fx

from fusepass import measure
from fusepass.codegen import choices
from fusepass.codegen.detect import device_facts
from fusepass.config import current
from fusepass.patterns.channels_last import CHANNELS_LAST, Followed, laid_out, wanted
from fusepass.patterns.cost import Cost
from fusepass.patterns.simplify import Application
from fusepass.report.choice import Choice

_SECONDS = 0.3
_LEAST, _MOST = 3, 20
_WORTH = 0.95
"""Of the time of the plain layout, what channels last may take at most: fused kernels are measured in the one that is chosen."""
_PLAIN = "as captured"
_MEMORY_SHARE = 0.5


def chosen_layout(graph: fx.GraphModule) -> tuple[fx.GraphModule, list[Application]]:
    """`graph`, or one that computes the same with images channels last inside, if that was measured to be quicker.

    Nothing is tried where ``Config.tune`` is ``"off"``, where ``"channels-last"`` is disabled, or where times are not to decide.
    """
    config = current()
    if config.tune == "off" or not config.allows(CHANNELS_LAST) or torch.are_deterministic_algorithms_enabled():
        return graph, []
    if not wanted(graph.graph):
        return graph, []
    other = laid_out(graph)
    if other is None:
        return graph, []
    key = choices.key_of(_depends_on(graph))
    with choices.locked(key):
        seconds = _recalled(key)
        if seconds is None:
            rounds = _measured(graph, other)
            if rounds is None:
                return graph, []
            seconds = {name: measure.typical(taken) for name, taken in rounds.samples.items()}
            if not rounds.disturbed:  # else it serves this process alone
                choices.store(key, _record(seconds, config.tune))
    if seconds[CHANNELS_LAST] > _WORTH * seconds[_PLAIN]:
        return graph, []
    first = next(node for node in graph.graph.nodes if node.target is torch.ops.aten.convolution.default)
    before, after = (Cost(seconds=seconds[name]) for name in (_PLAIN, CHANNELS_LAST))
    return other, [Application(CHANNELS_LAST, first.name, before, after)]


def _measured(graph: fx.GraphModule, other: fx.GraphModule) -> measure.Rounds | None:
    """Times of calls in both layouts; None where operators do not do what they are described to, or memory is short."""
    like = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    device = torch.device("cpu")
    if sum(map(measure.nbytes, like)) > _MEMORY_SHARE * measure.free_bytes(device):
        return None
    inputs = measure.made_up(like, device)
    plain = fx.GraphModule(graph, graph.graph)
    calls = {_PLAIN: lambda: plain(*inputs), CHANNELS_LAST: lambda: other(*inputs)}
    with measure.as_compiled_code_runs(device):
        try:
            Followed(other).run(*inputs)
            plain(*inputs)
        except (RuntimeError, IndexError, ValueError):
            return None
        return measure.in_turn(calls, measure.clock(device), _SECONDS, least=_LEAST, most=_MOST)


def _recalled(key: str) -> dict[str, float] | None:
    record = choices.lookup(key)
    if record is None:
        return None
    try:
        seconds = dict(Choice.from_json(dict(record.choice)).seconds)
    except (KeyError, TypeError, ValueError):  # written by another version
        return None
    return seconds if {_PLAIN, CHANNELS_LAST} <= seconds.keys() else None


def _record(seconds: dict[str, float], effort: str) -> choices.Record:
    chosen = CHANNELS_LAST if seconds[CHANNELS_LAST] <= _WORTH * seconds[_PLAIN] else _PLAIN
    return choices.Record(
        region="layout of the whole graph",
        device=_cpu(),
        effort=effort,
        created=datetime.now().astimezone().isoformat(timespec="seconds"),
        choice=asdict(Choice(chosen, seconds=tuple(seconds.items()))),
    )


def _depends_on(graph: fx.GraphModule) -> dict[str, Any]:
    """What the times depend on, as plain values."""
    values = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    return {
        "layout": str(graph.graph),
        "arguments": [f"{value.dtype}{list(value.shape)}{list(value.stride())}" for value in values],
        "cpu": [_cpu(), torch.backends.cpu.get_cpu_capability()],
        "threads": torch.get_num_threads(),
        "versions": torch.__version__,
    }


def _cpu() -> str:
    facts = device_facts(torch.device("cpu"))
    return f"{facts.name}, {facts.arch}"
