"""Regions grow from a seed, one legal step after another."""

from __future__ import annotations

import heapq

from fusepass.patterns.dataflow import Candidate, Dataflow, Unit
from fusepass.patterns.opclass import OpClass
from fusepass.patterns.pattern import Pattern
from fusepass.patterns.region_legality import step_reason


def grow(flow: Dataflow, seed: Unit, pattern: Pattern, free: int, reasons: dict[int, str]) -> Candidate:
    """The largest set of units that `pattern` reaches from `seed`, taking neighbours in graph order.

    A step that is illegal now is tried again when another neighbour of that unit has joined.

    Args:
        free: mask of the units that may be taken.
        reasons: gets, per unit that was reached and not taken, why its last try was illegal.
    """
    candidate = Candidate(flow).plus(seed)
    queue: list[tuple[int, int, bool]] = []

    def enqueue(unit: Unit) -> None:
        for neighbour, viewed in flow.neighbours(unit):
            bit = 1 << neighbour.index
            if bit & free and not bit & candidate.members:
                heapq.heappush(queue, (neighbour.index, unit.index, viewed))

    enqueue(seed)
    while queue:
        index, origin, viewed = heapq.heappop(queue)
        unit = flow.units[index]
        absorbed = pattern.downstream if index > origin else pattern.upstream
        if candidate.members >> index & 1 or unit.op_class not in absorbed or (viewed and OpClass.VIEW not in absorbed):
            continue
        larger = candidate.plus(unit)
        reason = step_reason(larger)
        if reason is not None:
            reasons[index] = reason
            continue
        candidate = larger
        enqueue(unit)
    return candidate
