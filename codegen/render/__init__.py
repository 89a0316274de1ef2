"""From a program to source, and to the words that reports use for its schedules.

What renders for a device is imported where it is first asked for: few processes ask for two kinds.
"""

from __future__ import annotations

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.schedule.overrides import NO_OVERRIDES, ScheduleOverrides
from fusepass.codegen.schedule_general import Generality
from fusepass.codegen.source import Source, Target


def render(
    program: Program, facts: DeviceFacts, *, aligned: bool = True, overrides: ScheduleOverrides = NO_OVERRIDES
) -> Source:
    """`program` as source for the device of `facts`.

    `aligned` says that every input buffer starts at a multiple of 16 bytes at run time; all others always do.
    Raises `ScheduleError` or `RenderError`, which are bugs.
    """
    if facts.target is Target.CUDA:
        from fusepass.codegen.render.cuda.library import render_cuda

        return render_cuda(program, facts, aligned=aligned, overrides=overrides)
    from fusepass.codegen.render.cpu.library import render_cpu

    return render_cpu(program, facts, overrides=overrides)


def render_general(
    program: Program, facts: DeviceFacts, general: Generality = Generality.FINE, *, aligned: bool = True
) -> Source:
    """The same with marks around numbers that may come at run time, laid out to depend on sizes as little as may be.

    `program` has no kernel with an anchor, and none with a team.
    """
    if facts.target is Target.CUDA:
        from fusepass.codegen.render.cuda.library import render_cuda

        return render_cuda(program, facts, aligned=aligned, general=general)
    from fusepass.codegen.render.cpu.library import render_cpu

    return render_cpu(program, facts, general=True)


def describe(
    program: Program,
    kernel: Kernel,
    facts: DeviceFacts,
    general: Generality = Generality.NONE,
    overrides: ScheduleOverrides = NO_OVERRIDES,
) -> str:
    """One line on how `kernel` is laid on the device of `facts`."""
    rank = overrides.rank_of(program.kernels.index(kernel))
    if facts.target is Target.CUDA:
        from fusepass.codegen.render.cuda.library import describe_cuda

        return describe_cuda(program, kernel, facts, general, rank)
    from fusepass.codegen.render.cpu.library import describe_cpu
    from fusepass.codegen.schedule_cpu import cpu_schedule

    return describe_cpu(kernel, cpu_schedule(kernel, program, facts, general=general > 0, rank=rank))
