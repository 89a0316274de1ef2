"""What patches of windows reduce over positions: in how many pieces, and whether windows should be computed twice for it."""

from __future__ import annotations

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.schedule.deep import has_deep_windows
from fusepass.codegen.schedule.patch import patches, patches_of_image
from fusepass.codegen.schedule.plan import Schedule
from fusepass.codegen.schedule.shape import Shape

_LAUNCH = 3e-6  # seconds of a small kernel that merges what pieces gave
_CLEARLY = 0.9  # of a time by estimate that another one must be at most to be less


def pieces_of_windows(program: Program, kernel: Kernel, facts: DeviceFacts) -> int | None:
    """In how many pieces a kernel with windows reduces over positions of an image; None where it is not laid out in patches."""
    found = _patch(program, kernel, facts)
    return None if found is None else patches_of_image(found[0])


def windows_pay_twice(program: Program, first: Kernel, second: Kernel, facts: DeviceFacts) -> bool:
    """Whether windows take less time in two kernels, the `first` of which stores nothing but what it reduces over positions, than in one that
    stores its results, which another kernel reads and makes what the `second` stores of."""
    again = _patch(program, second, facts)
    if again is None:
        return False
    written = [program.buffer(name) for name in second.writes]
    results = max(each.dtype.nbytes for each in written) * first.row_count
    read = results if results > facts.l2_bytes // 2 else results / 2  # the cache gives it in half of the time
    stored = (results + read + sum(each.nbytes for each in written)) / facts.bandwidth
    return again[1] + _LAUNCH < _CLEARLY * stored


def _patch(program: Program, kernel: Kernel, facts: DeviceFacts) -> tuple[Schedule, float] | None:
    """The patches of `kernel`, and the seconds that they take."""
    if has_deep_windows(kernel):
        return None
    return next(iter(patches(Shape(kernel, program, facts, aligned=True))), None)
