"""Windows that overlap, over the last two axes of a pointwise kernel: what a patch of results reads of each input.

The results of a patch of neighbouring rows need rows of the input that are neighbours, too: a *tile*.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, inf, prod

from fusepass.codegen.ir.expr import (
    Apply,
    Const,
    Expr,
    Gather,
    Load,
    Masked,
    Op,
    Position,
    ReduceOp,
    Window,
    children,
    walk,
)
from fusepass.codegen.ir.index import Axis, Bound, Index
from fusepass.codegen.ir.program import Kernel, Program

NEUTRAL = {ReduceOp.SUM: 0.0, ReduceOp.PROD: 1.0, ReduceOp.MAX: -inf, ReduceOp.MIN: inf}
"""What changes no result of a window."""


@dataclass(frozen=True)
class Below:
    """What a load of a window reads for many results: rows `pitch` elements apart, of neighbouring elements.

    Attributes:
        pitch: elements from a row of the input to the next.
        steps: rows and elements further on for the next result down and to the right.
        dilation: the same for the next point of the window.
    """

    load: Load
    pitch: int
    steps: tuple[int, int]
    dilation: tuple[int, int]

    def span(self, taps: tuple[Axis, Axis], results: tuple[int, int]) -> tuple[int, int]:
        """Rows and elements of a row below so many results."""
        down, right = (
            (count - 1) * step + (tap.size - 1) * dilation + 1
            for count, step, tap, dilation in zip(results, self.steps, taps, self.dilation, strict=True)
        )
        return down, right


@dataclass(frozen=True)
class PatchWindow:
    """A window that can be computed from tiles.

    One of more than two axes is *deep*: its first axes count tiles that are needed one after another, such as an image's channels.
    What is not there of these is zeros, which are pushed like anything else.

    Attributes:
        image: the axes of the results.
        value: what is reduced, without its mask.
        down, right: the bounds that say which rows and which elements of a row are there.
        around: the bounds that say which tiles of a deep window are there.
        taken: the bounds that say which points of a deep window are reduced, the same for all results.
        below: the loads of tiles.
        constants: the loads that are the same for all results of a patch, such as weights, of a deep window for all patches; those of
            points that are reduced may always be read.
    """

    window: Window
    image: tuple[Axis, Axis]
    value: Expr
    down: tuple[Bound, ...]
    right: tuple[Bound, ...]
    around: tuple[Bound, ...]
    taken: tuple[Bound, ...]
    below: tuple[Below, ...]
    constants: tuple[Load, ...]

    @property
    def deep(self) -> tuple[Axis, ...]:
        return self.window.axes[:-2]

    @property
    def taps(self) -> tuple[Axis, Axis]:
        """The axes over a tile."""
        down, across = self.window.axes[-2:]
        return down, across

    @property
    def separable(self) -> bool:
        """Whether what a row of its points gives is the same for all results that need the row."""
        moving = {id(each.load) for each in self.below}
        return not self.deep and not any(
            isinstance(node, Position) or (isinstance(node, Load) and id(node) not in moving)
            for node in walk(self.value)
        )

    @property
    def reuse(self) -> float:
        """How many points of windows need each element that is loaded."""
        return prod(axis.size for axis in self.taps) / prod(self.below[0].steps)


def patch_windows(kernel: Kernel, program: Program, image: tuple[Axis, Axis]) -> tuple[PatchWindow, ...]:
    """The windows of a pointwise kernel over its axes `image` that load; none where one of them needs more than tiles."""
    nodes = kernel.nodes
    windows = [
        node for node in nodes if isinstance(node, Window) and any(isinstance(b, Load | Gather) for b in walk(node))
    ]
    inside = {id(below) for window in windows for below in walk(window.value)}
    masked = {id(below) for node in nodes if isinstance(node, Masked) for below in walk(node.value)}
    if any(id(window) in inside | masked for window in windows):
        return ()  # inside of each other, or not always needed
    found = [_patch_window(window, program, image) for window in windows]
    return tuple(each for each in found if each is not None) if all(found) else ()


def deep_windows(kernel: Kernel, program: Program, image: tuple[Axis, Axis]) -> tuple[PatchWindow, ...]:
    """The windows of `patch_windows`, where all are deep and over the same tiles; else none."""
    found = patch_windows(kernel, program, image)
    if not found or not found[0].deep:
        return ()
    tiles = {(each.window.axes, id(each.below[0].load), each.down, each.right, each.around) for each in found}
    loads = {each.below[0].load for each in found} | {load for each in found for load in each.constants}
    steps = {(load.buffer, *(load.index.stride(axis) for axis in found[0].deep)) for load in loads}
    alike = len(steps) == len({load.buffer for load in loads}) and not any(None in each for each in steps)
    return found if len(tiles) == 1 and alike else ()


def _patch_window(window: Window, program: Program, image: tuple[Axis, Axis]) -> PatchWindow | None:
    value, mask = window.value, tuple[Bound, ...]()
    if isinstance(value, Masked):
        mask, other, value = value.mask, value.other, value.value
        if not (isinstance(other, Const) and other.value == NEUTRAL.get(window.op)):
            return None
    if len(window.axes) < 2 or not window.dtype.is_float:
        return None
    *deep, tap_y, tap_x = window.axes
    taps = tap_y, tap_x
    if any(isinstance(node, Gather | Window) for node in walk(value)):
        return None
    loads = [node for node in walk(value) if isinstance(node, Load)]
    moving = [load for load in loads if load.index.axes & frozenset(image)]
    below = [_below(load, image, taps) for load in moving]
    constants = tuple(load for load in loads if load not in moving)
    steps = {(each.steps, each.dilation) for each in below if each is not None}
    if None in below or len(steps) != 1:
        return None
    whole = tuple(each for each in below if each is not None)
    taken = tuple[Bound, ...]()
    if deep:
        taken, there = mask, _zeros_elsewhere(value, moving) if window.op is ReduceOp.SUM else None
        everywhere = bool(constants) and all(load.index.axes <= frozenset(window.axes) for load in constants)
        if there is None or not everywhere or any(not bound.index.axes <= frozenset(taps) for bound in taken):
            return None
        mask = there
    elif any(isinstance(node, Masked) for node in walk(value)) or not all(
        _always_there(load, program) for load in constants
    ):
        return None
    down = tuple(bound for bound in mask if _follows(bound.index, image, taps, whole[0], 0))
    right = tuple(bound for bound in mask if bound not in down and _follows(bound.index, image, taps, whole[0], 1))
    around = tuple(bound for bound in mask if bound not in (*down, *right))
    if around and (not deep or any(bound.index.axes & {*image, *taps} for bound in around)):
        return None
    return PatchWindow(window, image, value, down, right, around, taken, whole, constants)


def _zeros_elsewhere(value: Expr, moving: list[Load]) -> tuple[Bound, ...] | None:
    """The bounds where the one load is there, with zeros in its place elsewhere; None where something else is masked."""
    masked = [node for node in walk(value) if isinstance(node, Masked)]
    if len(moving) != 1 or any(node is not as_used(value, moving[0]) for node in masked):
        return None
    return masked[0].mask if masked else ()


def as_used(value: Expr, load: Load) -> Expr:
    """The load in `value`, or its cast where nothing else uses it, with zeros where it is not there if that is known.

    A cast for each point of a window would cost more than the point.
    """
    used: Expr = load
    for wanted in (_is_cast, _is_zero_elsewhere):
        users = [node for node in walk(value) if any(child is used for child in children(node))]
        used = users[0] if len(users) == 1 and wanted(users[0]) else used
    return used


def _is_cast(node: Expr) -> bool:
    return isinstance(node, Apply) and node.op is Op.CAST


def _is_zero_elsewhere(node: Expr) -> bool:
    return isinstance(node, Masked) and isinstance(node.other, Const) and node.other.value == 0.0


def _below(load: Load, image: tuple[Axis, ...], taps: tuple[Axis, ...]) -> Below | None:
    strides = [load.index.stride(axis) for axis in (*image, *taps)]
    known = [stride for stride in strides if stride is not None and stride >= 0]
    if len(known) != 4:
        return None
    y, x, tap_y, tap_x = known
    pitch = gcd(y, tap_y)
    if not y or not x or not pitch or gcd(x, tap_x) != 1:
        return None
    return Below(load, pitch, (y // pitch, x), (tap_y // pitch, tap_x))


def _always_there(load: Load, program: Program) -> bool:
    low, high = load.index.bounds
    return low >= 0 and high < program.buffer(load.buffer).extent


def _follows(index: Index, image: tuple[Axis, ...], taps: tuple[Axis, ...], below: Below, along: int) -> bool:
    """Whether `index` is the number of a row (`along` 0) or of an element of a row (1) of the input, from some place on."""
    wanted = [0, 0, 0, 0]
    wanted[along], wanted[2 + along] = below.steps[along], below.dilation[along]
    axes = (*image, *taps)
    return all(axis.size == 1 or index.stride(axis) == stride for axis, stride in zip(axes, wanted, strict=True))


def at_first(index: Index, *axes: Axis) -> Index:
    """`index` where all of `axes` are 0."""
    return index.substitute({axis: Index() for axis in axes})
