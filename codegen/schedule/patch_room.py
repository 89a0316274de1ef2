"""What a block of a patch takes of a multiprocessor, and how many of them it then has."""

from __future__ import annotations

from dataclasses import replace

from fusepass.codegen.device import RESERVED, WARP
from fusepass.codegen.schedule.patch_results import bytes_of_results, bytes_of_states
from fusepass.codegen.schedule.patch_work import PatchWork
from fusepass.codegen.schedule.plan import Schedule
from fusepass.codegen.schedule.shape import ceil

BLOCKS = 5
"""On a multiprocessor, so that some compute while others wait."""

MOST_READ = 2048
"""Elements of tiles that a thread with several rows, or with a strip of one, reads: they are written out, and compiled for long."""


def room_of_block(work: PatchWork, blocks: int) -> int:
    """Bytes of shared memory for each of so many blocks on a multiprocessor."""
    return (work.facts.shared_bytes_per_block + RESERVED) // blocks - RESERVED


def with_room(work: PatchWork, plan: Schedule, nbytes: int, registers: int) -> Schedule:
    """`plan` with room in shared memory for `nbytes`, or for what its threads lay down when these have been read; a thread has so many `registers`
    or more."""
    if plan.exchanges:
        results = plan.planes * plan.band * work.image[1].size
        nbytes = max(nbytes, bytes_of_results(work.kernel, work.program, results))
    of_block = ceil(plan.threads, WARP) * WARP * registers
    resident = max(min(BLOCKS, work.facts.registers // of_block), 1)
    return replace(plan, shared_bytes=max(nbytes, bytes_of_states(work.kernel, plan.threads)), resident=resident)
