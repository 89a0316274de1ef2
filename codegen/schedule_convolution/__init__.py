"""How a convolution kernel is laid on a GPU with tensor cores, and whether it should be one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.convolution import Convolution
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.schedule_convolution.chunks import ChunkSchedule, keeps_sums
from fusepass.codegen.schedule_convolution.chunks_search import chunk_schedule, estimated_seconds, fits
from fusepass.codegen.schedule_convolution.multistage import MultistageSchedule, multistage_schedule
from fusepass.codegen.schedule_convolution.register_stationary import RegisterStationarySchedule
from fusepass.codegen.schedule_convolution.register_stationary_search import fits_held, register_stationary_schedule
from fusepass.codegen.schedule_convolution.shared_stationary import SharedStationarySchedule, shared_stationary_schedule
from fusepass.codegen.schedule_convolution.tiles import anchor_of, dimensions, phases_of

ConvolutionSchedule = SharedStationarySchedule | MultistageSchedule | ChunkSchedule | RegisterStationarySchedule


@dataclass(frozen=True)
class Way:
    """How convolutions of one kind are laid out.

    Attributes:
        name: unique.
        takes: whether an anchor is of that kind, if no way before says so.
        best: the schedule with the least work that fits a multiprocessor; None where none fits.
    """

    name: str
    takes: Callable[[Convolution], bool]
    best: Callable[[Kernel, Program, DeviceFacts], ConvolutionSchedule | None]

    def plan(
        self, kernel: Kernel, program: Program, facts: DeviceFacts, *, aligned: bool = True
    ) -> ConvolutionSchedule | None:
        """See `schedule_convolution`."""
        if not any(phase.taps for phase in phases_of(kernel, program)):
            return None
        plan = self.best(kernel, program, facts)
        return plan if aligned or plan is None else plan.unaligned(kernel, program)


REGISTER_STATIONARY = Way("register-stationary", lambda anchor: anchor.held, register_stationary_schedule)
CHUNKS = Way("chunks", lambda anchor: anchor.halves is not None, chunk_schedule)
SHARED_STATIONARY = Way("shared-stationary", lambda anchor: anchor.packed is None, shared_stationary_schedule)
MULTISTAGE = Way("multistage", lambda anchor: True, multistage_schedule)

WAYS = (REGISTER_STATIONARY, CHUNKS, SHARED_STATIONARY, MULTISTAGE)
"""The first one that takes an anchor lays its kernel out."""


def schedule_convolution(
    kernel: Kernel, program: Program, facts: DeviceFacts, *, aligned: bool = True
) -> ConvolutionSchedule | None:
    """The schedule with the least work that fits a multiprocessor; None where none fits, or no element has a tap.

    `aligned` says that inputs start at a multiple of 16 bytes; it changes nothing but how they are copied.
    """
    way = next(way for way in WAYS if way.takes(anchor_of(kernel)))
    return way.plan(kernel, program, facts, aligned=aligned)


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
    if anchor_of(kernel).halves is not None:
        fitting = fits_held if anchor_of(kernel).held else fits
        return any(phase.taps for phase in phases_of(kernel, program)) and fitting(kernel, program, facts)
    return schedule_convolution(kernel, program, facts) is not None


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
    return estimated_seconds(second, program, behind, facts) / 2 < moved / facts.bandwidth
