"""Which sets of operators may not become a region, and why.

A check returns a reason, or None where it has no objection. `REGION_CHECKS` look at a region after a step of its growth (a
step that is refused now may be legal later), `FINAL_CHECKS` at a grown region.
"""

from __future__ import annotations

from collections.abc import Callable

from fusepass.patterns.dataflow import Candidate, bits
from fusepass.patterns.traffic import nbytes

MOST_OPS = 200
"""Operators in one region: compile time of the generated source grows with it."""
MOST_ARGUMENTS = 64
"""Inputs and outputs of one region: a kernel's parameters are limited."""
MOST_HELD = 64 << 20
"""Bytes that an anchor's operands may take beyond its result while the region waits for others."""
MANY_OPS = 16
"""Operators behind an anchor from which on it is long to wait for them."""


def step_reason(candidate: Candidate) -> str | None:
    """Why a region may not grow to `candidate`, if so."""
    return next((reason for check in REGION_CHECKS if (reason := check(candidate)) is not None), None)


def final_reason(candidate: Candidate) -> str | None:
    """Why the grown `candidate` may not become a region, if so."""
    return next((reason for check in FINAL_CHECKS if (reason := check(candidate)) is not None), None)


def no_cycle(candidate: Candidate) -> str | None:
    between = candidate.before & candidate.after & ~candidate.members
    return "would wait for itself: a value leaves the region and comes back" if between else None


def one_anchor(candidate: Candidate) -> str | None:
    return "a region has one convolution or matrix product" if candidate.anchors.bit_count() > 1 else None


def anchor_first(candidate: Candidate) -> str | None:
    return "would run before the region's convolution or matrix product" if candidate.before_anchor else None


def anchor_soon(candidate: Candidate) -> str | None:
    """A region waits for all that it reads. As a product for the gradient of tied weights would, until the other one is there, with the logits' gradient."""
    flow, waits = candidate.flow, candidate.before & ~candidate.members
    for index in bits(candidate.anchors):
        latest, anchor = waits.bit_length() - 1, flow.units[index]
        if (waits >> index).bit_count() < MANY_OPS:
            continue
        last = {base: (flow.readers[base] & ~candidate.members).bit_length() - 1 for base in anchor.bases}
        held = sum(nbytes(base.meta["val"]) for base, reader in last.items() if reader < latest)
        if held - sum(nbytes(value.meta["val"]) for value in anchor.values) >= MOST_HELD:
            return "would keep in memory what its convolution or matrix product reads until a later operand is there"
    return None


def not_too_many_ops(candidate: Candidate) -> str | None:
    return f"the region would have more than {MOST_OPS} operators" if candidate.size > MOST_OPS else None


def not_too_many_arguments(candidate: Candidate) -> str | None:
    count = candidate.input_count + candidate.output_count
    return f"the region would have more than {MOST_ARGUMENTS} inputs and outputs" if count > MOST_ARGUMENTS else None


def room_beside(candidate: Candidate) -> tuple[int, int]:
    """How many operators, and how many inputs and outputs that last, another set may have beside `candidate` at most."""
    return MOST_OPS - candidate.size, MOST_ARGUMENTS - candidate.lasting_outputs


def room_taken(candidate: Candidate) -> tuple[int, int]:
    """How many operators, and how many inputs and outputs that last, `candidate` has."""
    return candidate.size, candidate.lasting_inputs + candidate.lasting_outputs


def reads_a_tensor(candidate: Candidate) -> str | None:
    return None if candidate.reads_tensors else "the region would read no tensor"


REGION_CHECKS: tuple[Callable[[Candidate], str | None], ...] = (
    no_cycle,
    one_anchor,
    anchor_first,
    anchor_soon,
    not_too_many_ops,
    not_too_many_arguments,
)
FINAL_CHECKS: tuple[Callable[[Candidate], str | None], ...] = (reads_a_tensor,)
