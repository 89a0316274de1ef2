"""What output tiles of windows reduce over positions: in how many pieces, and whether windows should be computed apart from it, or twice."""

from __future__ import annotations

from math import prod

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.expr import Apply, Load, Op, Window, walk
from fusepass.codegen.ir.program import Kernel, Program
from fusepass.codegen.schedule import schedule
from fusepass.codegen.schedule.deep import has_deep_windows
from fusepass.codegen.schedule.output_tile import LEAST_REUSE, output_tiles, patches_of_image
from fusepass.codegen.schedule.output_tile_work import SHARP, instructions
from fusepass.codegen.schedule.plan import Keep
from fusepass.codegen.schedule.plan_output_tile import WindowTile
from fusepass.codegen.schedule.shape import shape_of

_LAUNCH = 3e-6  # seconds of a small kernel that merges what pieces gave
_CLEARLY = 0.9  # of a time by estimate that another one must be at most to be less
_POINT, _SHARED_POINT = 16, 10  # instructions of a thread for a point of a window where rows are reduced


def windows_overlap(program: Program, kernel: Kernel, facts: DeviceFacts) -> bool:
    """Whether each element that windows of `kernel` read is needed so often that output tiles pay."""
    windows = [node for node in kernel.nodes if facts.copies and isinstance(node, Window)]
    loads = ((window, node) for window in windows for node in walk(window.value) if isinstance(node, Load))
    points = kernel.row_count * kernel.col_count
    return any(
        prod(axis.size for axis in window.axes) * points >= LEAST_REUSE * program.buffer(load.buffer).numel
        for window, load in loads
        if not load.index.axes.isdisjoint(window.axes)
    )


def pieces_of_windows(program: Program, kernel: Kernel, facts: DeviceFacts) -> int | None:
    """In how many pieces a kernel with windows reduces over positions of an image; None where it is not laid out in output tiles."""
    found = _output_tile(program, kernel, facts)
    return None if found is None else patches_of_image(found[0])


def windows_pay_twice(program: Program, first: Kernel, second: Kernel, facts: DeviceFacts) -> bool:
    """Whether windows take less time in two kernels, the `first` of which stores nothing but what it reduces over positions, than in one that
    stores its results, which another kernel reads and makes what the `second` stores of."""
    again = _output_tile(program, second, facts)
    if again is None:
        return False
    written = [program.buffer(name) for name in second.writes]
    results = max(each.dtype.nbytes for each in written) * first.row_count
    read = results if results > facts.l2_bytes // 2 else results / 2  # the cache gives it in half of the time
    stored = (results + read + sum(each.nbytes for each in written)) / facts.bandwidth
    return again[1] + _LAUNCH < _CLEARLY * stored


def seconds_with_windows(program: Program, kernel: Kernel, facts: DeviceFacts) -> float:
    """About how long a finished kernel takes that may have windows: by output tiles, or each time that it goes over its rows."""
    output_tile = _output_tile(program, kernel, facts) if kernel.is_pointwise else None
    if output_tile is not None:
        return _LAUNCH + output_tile[1]
    values = [store.value for store in kernel.stores]
    reduction_loops = [
        [value for each in reduction_loop for value in each.values] for reduction_loop in kernel.reduction_loops
    ]
    plan = schedule(kernel, program, facts) if reduction_loops else None
    stays = plan is not None and plan.keep is not Keep.NOTHING
    iterations = [sum(reduction_loops, values)] if stays else [each for each in (*reduction_loops, values) if each]
    seconds = _LAUNCH
    for number, iteration in enumerate(iterations):
        nodes = list(walk(*iteration))
        buffers = {node.buffer for node in nodes if isinstance(node, Load)}
        if number == len(iterations) - 1:
            buffers |= {store.buffer for store in kernel.stores}
        moving = sum(program.buffer(name).nbytes for name in buffers) / facts.bandwidth
        issued = sum(_of_window(node, stays=stays) for node in nodes if isinstance(node, Window))
        rate = facts.multiprocessors * facts.machine.rates.lanes * facts.machine.rates.window_clock
        computing = kernel.row_count * kernel.col_count * issued / rate
        seconds += (computing**SHARP + moving**SHARP) ** (1 / SHARP)
    return seconds


def _of_window(window: Window, *, stays: bool) -> int:
    """Instructions of a thread that finds what a window comes to, point by point; of floats in rows that stay on the chip, neighbours share loads."""
    nodes = list(walk(window.value))
    work = instructions(node for node in nodes if isinstance(node, Apply) and node.op is not Op.CAST)
    shares = stays and all(node.dtype.nbytes >= 4 for node in nodes if isinstance(node, Load))
    return prod(axis.size for axis in window.axes) * ((_SHARED_POINT if shares else _POINT) + work)


def _output_tile(program: Program, kernel: Kernel, facts: DeviceFacts) -> tuple[WindowTile, float] | None:
    """The output tiles of `kernel`, and the seconds that they take."""
    if has_deep_windows(kernel) or not any(isinstance(node, Window) for node in kernel.nodes):
        return None
    return next(iter(output_tiles(shape_of(kernel, program, facts, aligned=True))), None)
