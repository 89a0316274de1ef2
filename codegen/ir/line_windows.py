"""Windows over what lies channels last: the channels are vectors, and neighbouring results along another axis share what windows go over.

A thread with several results below each other reads each vector of that line once, and pushes it to all results that need it.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusepass.codegen.ir.expr import Expr, Gather, Load, Masked, Position, Window, walk
from fusepass.codegen.ir.index import Axis, Bound
from fusepass.codegen.ir.output_tiles import finds_pairs, is_plain, lone_windows, without_mask
from fusepass.codegen.ir.program import Kernel
from fusepass.codegen.ir.sliding import Line

_CLEARLY = 2  # times as many instructions, from which what neighbours share pays for the registers that it takes


@dataclass(frozen=True)
class LineWindow:
    """A window that goes along an axis of results.

    Attributes:
        tap: the window's axis along it.
        step: points from a result to the next one.
        others: the window's other axes.
        value: what is reduced, without its mask.
        along: the bounds that say which points along the axis are there.
        around: the bounds of the other axes.
        moving: the loads that go along the axis, vectors of channels.
        fixed: the loads that do not.
    """

    window: Window
    tap: Axis
    step: int
    others: tuple[Axis, ...]
    value: Expr
    along: tuple[Bound, ...]
    around: tuple[Bound, ...]
    moving: tuple[Load, ...]
    fixed: tuple[Load, ...]

    def span(self, results: int) -> int:
        """Points that so many neighbouring results need."""
        return (results - 1) * self.step + self.tap.size

    def shared(self, results: int) -> Line | None:
        """How results share what they need of the line, where a point comes to the same for all of them; None where that saves too little."""
        line = Line(results, self.step, 1, self.tap.size)
        alike = not self.fixed and line.together > 1
        return line if alike and _CLEARLY * (line.reductions + results) < results * self.tap.size else None

    @property
    def paired(self) -> bool:
        """Whether maxima of numbers of 16 bits are found, by one instruction for two."""
        return is_plain(self.value, self.moving) and finds_pairs(self.window, self.moving[0])


def line_windows(kernel: Kernel, line: Axis, channels: Axis) -> tuple[LineWindow, ...]:
    """The windows of a pointwise kernel that load, all of which go along `line`, where `channels` are neighbours in memory; else none."""
    found = [_line_window(window, line, channels) for window in lone_windows(kernel)]
    return tuple(each for each in found if each is not None) if found and all(found) else ()


def _line_window(window: Window, line: Axis, channels: Axis) -> LineWindow | None:
    parts = without_mask(window)
    if parts is None or not window.dtype.is_float:
        return None
    mask, value = parts
    if any(isinstance(node, Gather | Window | Masked | Position) for node in walk(value)):
        return None
    loads = tuple(node for node in walk(value) if isinstance(node, Load))
    moving = tuple(load for load in loads if line in load.index.axes)
    fixed = tuple(load for load in loads if load not in moving)
    if not moving or any(load.index.stride(channels) != 1 for load in moving):
        return None
    along = tuple(bound for bound in mask if line in bound.index.axes)
    around = tuple(bound for bound in mask if bound not in along)
    if any(channels in bound.index.axes for bound in mask):
        return None
    indices = [load.index for load in moving] + [bound.index for bound in along]
    for tap in window.axes:
        pairs = {(index.stride(line), index.stride(tap)) for index in indices}
        steps = {far // near if far and near and far % near == 0 else 0 for far, near in pairs}
        step = steps.pop() if len(steps) == 1 else 0
        if 0 < step < tap.size and not any(tap in bound.index.axes for bound in around):
            others = tuple(axis for axis in window.axes if axis is not tap)
            return LineWindow(window, tap, step, others, value, along, around, moving, fixed)
    return None
