"""How a convolution kernel is laid on a GPU with tensor cores, and whether it should be one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.convolution import Convolution
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.schedule_convolution import (
    chunks_search,
    multistage,
    register_stationary_search,
    shared_stationary,
)
from fusepass.codegen.schedule_convolution.chunks import ChunkSchedule, keeps_sums
from fusepass.codegen.schedule_convolution.multistage import MultistageSchedule
from fusepass.codegen.schedule_convolution.register_stationary import RegisterStationarySchedule
from fusepass.codegen.schedule_convolution.shared_stationary import SharedStationarySchedule
from fusepass.codegen.schedule_convolution.tiles import anchor_of, dimensions, phases_of

ConvolutionSchedule = SharedStationarySchedule | MultistageSchedule | ChunkSchedule | RegisterStationarySchedule


@dataclass(frozen=True)
class Way:
    """How convolutions of one kind are laid out.

    Attributes:
        name: unique.
        takes: whether an anchor is of that kind, if no way before says so.
        fitting: the schedules that fit a multiprocessor.
        costs: estimates how long each of these takes, in one unit for all.
    """

    name: str
    takes: Callable[[Convolution], bool]
    fitting: Callable[[Kernel, Program, DeviceFacts], Iterator[ConvolutionSchedule]]
    costs: Callable[[Kernel, Program, DeviceFacts], Callable[[Any], float]]

    def plan(
        self, kernel: Kernel, program: Program, facts: DeviceFacts, *, aligned: bool = True
    ) -> ConvolutionSchedule | None:
        """See `schedule_convolution`."""
        candidates = self._candidates(kernel, program, facts)
        plan = min(candidates, key=self.costs(kernel, program, facts), default=None)
        return plan if aligned or plan is None else plan.unaligned(kernel, program)

    def fits(self, kernel: Kernel, program: Program, facts: DeviceFacts) -> bool:
        """Whether there is a plan; sooner than to find the best one."""
        return next(self._candidates(kernel, program, facts), None) is not None

    def _candidates(self, kernel: Kernel, program: Program, facts: DeviceFacts) -> Iterator[ConvolutionSchedule]:
        some = any(phase.taps for phase in phases_of(kernel, program))
        return self.fitting(kernel, program, facts) if some else iter(())


REGISTER_STATIONARY = Way(
    "register-stationary",
    lambda anchor: anchor.held,
    register_stationary_search.fitting,
    register_stationary_search.costs,
)
CHUNKS = Way("chunks", lambda anchor: anchor.halves is not None, chunks_search.fitting, chunks_search.costs)
SHARED_STATIONARY = Way(
    "shared-stationary", lambda anchor: anchor.packed is None, shared_stationary.fitting, shared_stationary.costs
)
MULTISTAGE = Way("multistage", lambda anchor: True, multistage.fitting, multistage.costs)

WAYS = (REGISTER_STATIONARY, CHUNKS, SHARED_STATIONARY, MULTISTAGE)
"""The first one that takes an anchor lays its kernel out."""


def schedule_convolution(
    kernel: Kernel, program: Program, facts: DeviceFacts, *, aligned: bool = True
) -> ConvolutionSchedule | None:
    """The schedule with the least work that fits a multiprocessor; None where none fits, or no element has a tap.

    `aligned` says that inputs start at a multiple of 16 bytes; it changes nothing but how they are copied.
    """
    return _way_of(kernel).plan(kernel, program, facts, aligned=aligned)


def _way_of(kernel: Kernel) -> Way:
    return next(way for way in WAYS if way.takes(anchor_of(kernel)))


def warps_together(facts: DeviceFacts) -> int:
    """How many warps of a device multiply together; see `Convolution.warps`."""
    return 4 if facts.warp_groups else 1


def piece_count(kernel: Kernel, plan: ConvolutionSchedule) -> int:
    """In how many pieces `kernel` reduces over positions: what a block has of a sample, or of all.

    Blocks, or teams of warps, take every so-manieth tile. Where there are more of them than tiles of a sample, each tile is a piece.
    """
    assert kernel.partials is not None
    return min(plan.takers, prod(plan.on.tiles)) if kernel.partials.per_sample else plan.takers


def pieces_on(program: Program, kernel: Kernel, facts: DeviceFacts) -> int | None:
    """The same on a device; None where the kernel cannot be laid out for it."""
    plan = schedule_convolution(kernel, program, facts) if facts.tensor_cores else None
    return None if plan is None else piece_count(kernel, plan)


def serves(program: Program, kernel: Kernel, facts: DeviceFacts) -> bool:
    """Whether generated code can do the convolution of `kernel` on a device; without an anchor, it is plain arithmetic."""
    if kernel.anchor is None:
        return True
    if anchor_of(kernel).warps not in (1, warps_together(facts)) or not facts.tensor_cores:
        return False
    return _way_of(kernel).fits(kernel, program, facts)


def preferred(program: Program, kernel: Kernel, facts: DeviceFacts) -> bool:
    """Whether generated code is chosen for the convolution of `kernel` without being measured: where input channels are few.

    Libraries lay convolutions out for many channels. With few they convert the layout before and after, or fall back to
    plain float32 arithmetic. What reduces over channels in the same kernel has not been measured, but for one that pools its phases,
    whose results are few; what reduces over positions there costs little, and saves a reading of the result. Scaled halves and groups are
    chosen by measurement alone.
    """
    anchor = kernel.anchor
    if (
        not isinstance(anchor, Convolution)
        or anchor.packed is not None
        or anchor.halves is not None
        or anchor.groups > 1
    ):
        return False
    return (kernel.is_pointwise or anchor.pooled is not None) and serves(program, kernel, facts)


def pays_twice(program: Program, first: Kernel, second: Kernel, facts: DeviceFacts) -> bool:
    """Whether a convolution takes less time in two kernels, the `first` of which stores nothing but what it reduces over positions, than
    in one that stores its results, which another kernel reads and makes what the `second` stores of.

    A kernel that only reduces does so in registers, if it `keeps_sums`. Beside one that stores what it reduces, both together take half
    of an estimated time more, as two convolutions on an H200 did: 212 and 266 us instead of some 350.
    """
    if not facts.tensor_cores:
        return False
    before, behind = (schedule_convolution(kernel, program, facts) for kernel in (first, second))
    if not isinstance(before, ChunkSchedule) or not isinstance(behind, ChunkSchedule) or not keeps_sums(first, before):
        return False
    result = program.buffer(anchor_of(first).source).dtype.nbytes * prod(axis.size for axis in dimensions(first))
    moved = result + sum(program.buffer(name).nbytes for name in second.writes)
    return chunks_search.estimated_seconds(second, program, behind, facts) / 2 < moved / facts.bandwidth
