"""Which schedule overrides of a program's kernels, beside the rules' one, are worth a try: by the cost model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.schedule.overrides import ScheduleOverrides
from fusepass.codegen.source import Target

_WORTH = 0.99  # times the rules' estimate: what is expected to be faster than that is worth a try
_LEAST_SHARE = 0.1  # of the bytes that the program's largest kernel moves: what moves less, takes little of the time
# Seconds of memory traffic of a kernel from which a compiler run is worth it; on CUDA a launch is most of what takes less.
_LEAST_SECONDS = {Target.CUDA: 20e-6, Target.CPU: 1e-3}

_SHARED = (ScheduleOverrides(teams=False), ScheduleOverrides(pieces=0.5), ScheduleOverrides(pieces=2.0))
_APART = ScheduleOverrides(over_rows=False)


@dataclass(frozen=True)
class ScheduleCandidate:
    """A set of schedule overrides that may be worth a try; `seconds` is what it takes by the cost model, less what the rules' one takes."""

    overrides: ScheduleOverrides
    seconds: float


def schedule_candidates(program: Program, facts: DeviceFacts, effort: str) -> tuple[ScheduleCandidate, ...]:
    """Arrangements of `program`, which the rules laid out, the most promising ones first, behind those that the model says nothing of.

    `effort` is `Config.tune`: at ``"fast"`` the schedules of large kernels that the cost model expects to be faster than the rules'
    one; at ``"max"`` all schedules, and other ways to share or split rows.
    """
    found = sorted(_schedules(program, facts, effort), key=lambda each: each.seconds)
    structures = [*_SHARED] if any(kernel.reduction_loops for kernel in program.kernels) else []
    structures += [_APART] if any(kernel.reduces_over_rows for kernel in program.kernels) else []
    return (*(ScheduleCandidate(each, 0.0) for each in structures if effort == "max"), *found)


def _schedules(program: Program, facts: DeviceFacts, effort: str) -> Iterator[ScheduleCandidate]:
    every = [_moved(program, kernel) for kernel in program.kernels]
    most = max(every, default=0)
    for number, (kernel, moved) in enumerate(zip(program.kernels, every, strict=True)):
        if kernel.row_count * max(kernel.col_count, 1) == 0 or _is_settled(kernel, program, facts):
            continue
        if moved < _LEAST_SHARE * most or (effort != "max" and moved < _LEAST_SECONDS[facts.target] * facts.bandwidth):
            continue
        first, *others = _estimates(kernel, program, facts)
        for rank, seconds in enumerate(others, 1):
            if effort == "max" or seconds < _WORTH * first:
                yield ScheduleCandidate(ScheduleOverrides(number, rank), seconds - first)


def _is_settled(kernel: Kernel, program: Program, facts: DeviceFacts) -> bool:
    """Whether the search for an anchor has said all: no registered family competes for its kernel."""
    if kernel.anchor is None or facts.target is not Target.CUDA:
        return kernel.anchor is not None
    from fusepass.codegen.render.cuda.families import taking

    return len(taking(kernel, program)) == 1


def _estimates(kernel: Kernel, program: Program, facts: DeviceFacts) -> list[float]:
    """Seconds of the schedules that `kernel` may have, by the cost model, in the order of their ranks."""
    if facts.target is Target.CUDA:
        from fusepass.codegen.render.cuda.families import ranking

        return [each.seconds for each in ranking(kernel, program, facts)]
    from fusepass.codegen.schedule_cpu import cpu_ranking

    return [seconds for _, seconds in cpu_ranking(kernel, program, facts)]


def _moved(program: Program, kernel: Kernel) -> int:
    return sum(program.buffer(name).nbytes for name in kernel.reads | kernel.writes)
