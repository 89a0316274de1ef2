"""The families of CUDA kernels that ship, which of them a kernel has, and its plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.render.cuda.contraction.families import CONVOLUTIONS, PRODUCT
from fusepass.codegen.render.cuda.family import Family, Plan, registered
from fusepass.codegen.render.cuda.walk.families import WALKS
from fusepass.errors import ScheduleError

SHIPPED: tuple[Family[Any], ...] = (*CONVOLUTIONS, PRODUCT, *WALKS)
"""The first one that takes a kernel has it."""


@dataclass(frozen=True)
class Laid:
    """A kernel on a device: its family and plan, and the seconds that it takes by the family's estimate."""

    family: Family[Any]
    plan: Plan
    seconds: float


def taking(kernel: Kernel, program: Program) -> list[Family[Any]]:
    """The families that take `kernel`: the shipped one, then registered ones."""
    shipped = next(family for family in SHIPPED if family.takes(kernel, program))
    return [shipped, *(family for family in registered() if family.takes(kernel, program))]


def laid(
    kernel: Kernel, program: Program, facts: DeviceFacts, *, aligned: bool = True, rank: int = 0
) -> tuple[Family[Any], Plan]:
    """The family and the plan of `kernel`: the first, or another one, of its `ranking`. Of a `rank` that it does not have the first is meant.

    Raises `ScheduleError` where no plan fits the device.
    """
    families = taking(kernel, program)
    if len(families) == 1 and not rank:  # nothing to compare
        plan = families[0].plan(kernel, program, facts, aligned=aligned)
        found = [] if plan is None else [(families[0], plan)]
    else:
        found = [(each.family, each.plan) for each in ranking(kernel, program, facts, aligned=aligned)]
    if not found:
        raise ScheduleError(f"{kernel.name} does not fit the shared memory of {facts.name}")
    return found[rank if rank < len(found) else 0]


def ranking(kernel: Kernel, program: Program, facts: DeviceFacts, *, aligned: bool = True) -> Sequence[Laid]:
    """All that `kernel` may be laid out by: the first plan of the family that expects to take least time, then all others by their seconds."""
    rankings = [
        [Laid(family, each.plan, each.seconds) for each in family.ranking(kernel, program, facts, aligned=aligned)]
        for family in taking(kernel, program)
    ]
    if len(rankings) == 1:
        return rankings[0]
    first = min((each[0] for each in rankings if each), key=_seconds, default=None)
    others = [each for each in chain(*rankings) if each is not first]
    return [*([first] if first else []), *sorted(others, key=_seconds)]


def _seconds(each: Laid) -> float:
    return each.seconds


def serves(program: Program, kernel: Kernel, facts: DeviceFacts, *, preferred: bool = False) -> bool:
    """Whether a family can do what the library would do for `kernel`; with `preferred`, whether it should, without a measurement.

    Without an anchor, that is plain arithmetic, which any can do.
    """
    if kernel.anchor is None:
        return not preferred
    asked = [family.preferred if preferred else family.serves for family in taking(kernel, program)]
    return any(each(kernel, program, facts) for each in asked)


def headers(launches: Sequence[tuple[Family[Any], Kernel, Plan]]) -> Iterator[str]:
    """What kernels include of their families, an earlier header never behind one that needs it; some of them several times."""
    for needs in dict.fromkeys(family.headers for family in (*SHIPPED, *registered())):
        among = [(kernel, plan) for family, kernel, plan in launches if family.headers is needs]
        for needed, names in needs:
            yield from names if any(needed(kernel, plan) for kernel, plan in among) else ()


def all_headers() -> Iterator[str]:
    """What kernels of families that ship may include, in such an order."""
    for family in SHIPPED:
        for _, names in family.headers:
            yield from names
