"""What the generator makes of graphs: a digest of each candidate of each region, for a device that need not be there."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import fx, nn

from benchmarks import training, workloads
from benchmarks.layers import Size, Workload
from fusepass.autotune import candidates, schedules
from fusepass.autotune.tune import remember
from fusepass.autotune.work import Work
from fusepass.codegen.detect import taken_for
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.forms import Forms
from fusepass.codegen.search import space
from fusepass.codegen.source import Source, Target
from fusepass.compile import pipeline
from fusepass.config import override
from fusepass.patterns.partition import partition
from fusepass.patterns.simplify import simplify
from fusepass.report.choice import Choice
from tests.golden_sources import graphs

Digests = dict[str, str]
"""By ``"region/candidate"``; a region that has no source has the reason in place of a digest."""


def _generates(workload: Workload) -> bool:
    """Whether a GPU runs more of it by generated code than by one operator of cuDNN, which tracing without a GPU takes apart step by step."""
    return not any(isinstance(each, nn.RNNBase) for each in workload.model(Size.FULL, graphs.META).modules())


H200, CPU = DeviceFacts.h200(), DeviceFacts.cpu(cores=2)


def _one_call(workload: Workload, facts: DeviceFacts) -> Iterator[tuple[str, Work]]:
    device = torch.device("cuda" if facts.target is Target.CUDA else "cpu")
    yield from _works("", graphs.inference(workload, device), Forms())


def _step(workload: Workload, facts: DeviceFacts) -> Iterator[tuple[str, Work]]:
    for name, graph in graphs.training(workload).items():
        yield from _works(f"{name}: ", graph, Forms())


def _sizes(workload: Workload, facts: DeviceFacts) -> Iterator[tuple[str, Work]]:
    """The second and the third size of a region that has kernels for one."""
    forms, most = Forms(), workload.takes(graphs.Size.FULL)[0].shape[0]
    for number in range(3):
        found = list(_works(f"size {number}: ", graphs.inference(workload, graphs.CUDA, most + number), forms))
        for _, work in found:
            work.choice = work.choice or Choice()
            remember(work, forms)
        yield from found if number else ()


Kind = Callable[[Workload, DeviceFacts], Iterator[tuple[str, Work]]]
GROUPS: Mapping[str, tuple[tuple[Workload, ...], Kind, DeviceFacts]] = {
    "mission": (workloads.MISSION, _one_call, H200),
    "visible": (workloads.VISIBLE, _one_call, H200),
    "extra": (workloads.EXTRA, _one_call, H200),
    "single": (tuple(workloads.SINGLE), _one_call, H200),
    "chains": ((*workloads.CHAINS, *workloads.FIRSTS), _one_call, H200),
    "networks": (tuple(filter(_generates, workloads.NETWORKS)), _one_call, H200),
    "training": ((*training.MODELS, *graphs.DROPPING), _step, H200),
    "sizes": ((*workloads.MISSION, *workloads.VISIBLE, *workloads.EXTRA), _sizes, H200),
    "cpu": ((*workloads.MISSION, *workloads.VISIBLE, *workloads.EXTRA), _one_call, CPU),
}
"""Workloads, what is generated of each, and the device."""


def digests(group: str, workload: Workload) -> Digests:
    """Of every candidate of every region."""
    return {name: _digest(found) if isinstance(found, list) else found for name, found in sources(group, workload)}


def sources(
    group: str, workload: Workload, facts: DeviceFacts | None = None
) -> Iterator[tuple[str, list[Source] | str]]:
    """The sources of each candidate, those for memory that is not aligned among them, or why there are none; for another device
    than the group's if there are `facts`."""
    _, kind, usual = GROUPS[group]
    facts = facts or usual
    with _generating_for(facts):
        for prefix, work in kind(workload, facts):
            name = prefix + work.region.name
            for candidate in work.candidates if work.like is None else ():
                yield f"{name}/{candidate.name}", [*candidate.sources, candidate.generated.unaligned()]
            for lost, reason in work.lost.items():
                yield f"{name}/{lost}", reason
            if work.reason is not None:
                yield name, work.reason


def _works(prefix: str, graph: fx.GraphModule, forms: Forms) -> Iterator[tuple[str, Work]]:
    simplify(graph)
    forms.next_round()
    works, _ = pipeline.generated(graph, partition(graph).regions, forms)
    return ((prefix, work) for work in works)


def _digest(made: list[Source]) -> str:
    text = "\0".join(source.text for source in made)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@contextmanager
def _generating_for(facts: DeviceFacts) -> Iterator[None]:
    """Nothing that was found on this machine, or is known of its device, counts."""
    nothing: dict[tuple[Any, str], Any] = {
        (candidates, "recall"): lambda work: None,
        (schedules, "times_are_taken"): lambda work: True,
        (space, "rounds_to_tf32"): lambda node: True,
    }
    with taken_for(facts), override(tune="max"), ExitStack() as patches:
        for (owner, name), value in nothing.items():
            patches.enter_context(mock.patch.object(owner, name, value))
        yield
