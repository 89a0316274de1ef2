"""Windows that overlap, over one to three axes of a pointwise kernel: what an output tile of results reads of each input.

The results of an output tile of neighbouring rows need rows of the input that are neighbours, too: a *tile*. Windows over three axes need
tiles of several *planes*, those over one axis a row of the tile for each row of results.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd, inf, prod

from fusepass.codegen.ir.dtype import DType
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
    descend,
    own_indices,
    walk,
)
from fusepass.codegen.ir.index import Axis, Bound, Index
from fusepass.codegen.ir.planes import Planes
from fusepass.codegen.ir.program import Kernel, Program

NEUTRAL = {ReduceOp.SUM: 0.0, ReduceOp.PROD: 1.0, ReduceOp.MAX: -inf, ReduceOp.MIN: inf}
"""What changes no result of a window."""


ONE_ROW = Axis("only_row", 1)
"""Of an image whose rows are images by themselves."""

_ROW_OF_WINDOW = Axis("row_of_window", 1)


@dataclass(frozen=True)
class Below:
    """What a load of a window reads for many results: rows `pitch` elements apart, of neighbouring elements.

    Attributes:
        pitch: elements from a row of the input to the next.
        steps: rows and elements further on for the next result down and to the right.
        dilation: the same for the next point of the window.
        plane: elements from a plane of the input to the next; 0 where the window has none.
    """

    load: Load
    pitch: int
    steps: tuple[int, int]
    dilation: tuple[int, int]
    plane: int = 0

    def span(self, taps: tuple[Axis, Axis], results: tuple[int, int]) -> tuple[int, int]:
        """Rows and elements of a row below so many results."""
        down, right = (
            (count - 1) * step + (tap.size - 1) * dilation + 1
            for count, step, tap, dilation in zip(results, self.steps, taps, self.dilation, strict=True)
        )
        return down, right


@dataclass(frozen=True)
class TileWindow:
    """A window that can be computed from tiles.

    One of more than two axes may be *deep*: its first axes count tiles that are needed one after another, such as an image's channels.
    What is not there of these is zeros, which are pushed like anything else. Or it has *planes*, and results go along with them.

    Attributes:
        image: the axes of a plane of results.
        value: what is reduced, without its mask.
        down, right: the bounds that say which rows and which elements of a row are there.
        around: the bounds that say which tiles of a deep window, or planes, are there.
        taken: the bounds that say which points of a deep window are reduced, the same for all results.
        below: the loads of tiles.
        constants: the loads that are the same for all results of an output tile, such as weights, of a deep window for all output tiles; those of
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
    planes: Planes | None = None

    @property
    def deep(self) -> tuple[Axis, ...]:
        return self.window.axes[:-2] if self.planes is None else ()

    @property
    def taps(self) -> tuple[Axis, Axis]:
        """The axes over a tile."""
        return _taps(self.window)

    @cached_property
    def separable(self) -> bool:
        """Whether what a row of its points gives is the same for all results that need the row."""
        differs = any(load.index.axes & {*self.window.axes} for load in self.constants)
        return not (self.deep or differs or any(isinstance(node, Position) for node in walk(self.value)))

    @cached_property
    def plain(self) -> bool:
        """Whether what is reduced is what one load gives, or its cast."""
        return is_plain(self.value, [each.load for each in self.below])

    @property
    def work(self) -> Iterator[Apply]:
        """What is computed of each element before it is reduced."""
        moving = {id(each.load) for each in self.below}
        for node in walk(self.value):
            if any(id(child) in moving for child in children(node)):
                moving.add(id(node))
                if isinstance(node, Apply) and node.op is not Op.CAST:
                    yield node

    @property
    def reuse(self) -> float:
        """How many points of windows need each element that is loaded. Points that are further apart than all results need others."""
        below = self.below[0]
        ways = zip(self.image, self.taps, below.steps, below.dilation, strict=True)
        of_plane = prod(tap.size / step if reach < axis.size * step else 1 for axis, tap, step, reach in ways)
        return of_plane if self.planes is None else of_plane * self.planes.tap.size / self.planes.step


def behind_windows(kernel: Kernel) -> Iterator[Expr]:
    """The nodes that make results of windows, each once; the windows and what is in them are none of these."""
    roots = [*(store.value for store in kernel.stores), *([kernel.partials.value] if kernel.partials else [])]
    nodes = descend(roots, lambda node: () if isinstance(node, Window) else children(node))
    return (node for node in nodes if not isinstance(node, Window))


def output_tile_windows(kernel: Kernel, program: Program, image: tuple[Axis, ...]) -> tuple[TileWindow, ...]:
    """The windows of a pointwise kernel over its axes `image` that load; none where one of them needs more than tiles.

    Of three axes the first one goes through planes, which all windows then have.
    """
    windows = lone_windows(kernel)
    found = [_patch_window(window, program, image) for window in windows]
    return tuple(each for each in found if each is not None) if all(found) else ()


def lone_windows(kernel: Kernel) -> list[Window]:
    """The windows of a kernel that load; none where one is inside of another one, or not always needed."""
    nodes = kernel.nodes
    windows = [
        node for node in nodes if isinstance(node, Window) and any(isinstance(b, Load | Gather) for b in walk(node))
    ]
    inside = {id(below) for window in windows for below in walk(window.value)}
    masked = {id(below) for node in nodes if isinstance(node, Masked) for below in walk(node.value)}
    return [] if any(id(window) in inside | masked for window in windows) else windows


def without_mask(window: Window) -> tuple[tuple[Bound, ...], Expr] | None:
    """The mask of what a window reduces, and the value under it; None where something else stands elsewhere than what changes nothing."""
    value = window.value
    if not isinstance(value, Masked):
        return (), value
    neutral = isinstance(value.other, Const) and value.other.value == NEUTRAL.get(window.op)
    return (value.mask, value.value) if neutral else None


def deep_windows(kernel: Kernel, program: Program, image: tuple[Axis, Axis]) -> tuple[TileWindow, ...]:
    """The windows of `patch_windows`, where all are deep and over the same tiles; else none."""
    found = output_tile_windows(kernel, program, image)
    if not found or not found[0].deep:
        return ()
    tiles = {(each.window.axes, id(each.below[0].load), each.down, each.right, each.around) for each in found}
    loads = {each.below[0].load for each in found} | {load for each in found for load in each.constants}
    steps = {(load.buffer, *(load.index.stride(axis) for axis in found[0].deep)) for load in loads}
    alike = len(steps) == len({load.buffer for load in loads}) and not any(None in each for each in steps)
    return found if len(tiles) == 1 and alike else ()


def plane_windows(kernel: Kernel, program: Program) -> tuple[TileWindow, ...]:
    """The windows of `patch_windows` over the last three axes, where all go through planes alike; else none."""
    image = kernel.rows[-3:]
    found = output_tile_windows(kernel, program, image) if len(image) == 3 else ()
    ways = {(each.planes.step, each.planes.dilation, each.planes.tap.size) for each in found if each.planes is not None}
    return found if len(ways) == 1 else ()


def _patch_window(window: Window, program: Program, image: tuple[Axis, ...]) -> TileWindow | None:
    parts = without_mask(window)
    if parts is None or not window.dtype.is_float:
        return None
    mask, value = parts
    deep, taps, (*above, y, x) = window.axes[:-2], _taps(window), image
    through = (*above, *deep) if above else ()
    if above and len(through) != 2:
        return None
    if any(isinstance(node, Gather | Window) for node in walk(value)):
        return None
    loads = [node for node in walk(value) if isinstance(node, Load)]
    moving = [load for load in loads if load.index.axes & frozenset(image)]
    below = [_below(load, (y, x), taps, through) for load in moving]
    constants = tuple(load for load in loads if load not in moving)
    steps = {(each.steps, each.dilation) for each in below if each is not None}
    if None in below or len(steps) != 1:
        return None
    whole = tuple(each for each in below if each is not None)
    planes = _planes(through, whole)
    if above and (planes is None or any(index.axes & {*through} for index in _computed(value))):
        return None  # a plane serves several results
    taken = tuple[Bound, ...]()
    if deep and not planes:
        taken, there = mask, _zeros_elsewhere(value, moving) if window.op is ReduceOp.SUM else None
        everywhere = bool(constants) and all(load.index.axes <= frozenset(window.axes) for load in constants)
        if there is None or not everywhere or any(not bound.index.axes <= frozenset(taps) for bound in taken):
            return None
        mask = there
    elif any(isinstance(node, Masked) for node in walk(value)) or not all(
        always_there(load, program) for load in constants
    ):
        return None
    flat = [bound for bound in mask if not bound.index.axes & {*through}]
    down = tuple(bound for bound in flat if _follows(bound.index, (y, x), taps, whole[0], 0))
    right = tuple(bound for bound in flat if bound not in down and _follows(bound.index, (y, x), taps, whole[0], 1))
    around = tuple(bound for bound in mask if bound not in (*down, *right))
    if around and (not deep or any(bound.index.axes & {y, x, *taps} for bound in around)):
        return None
    if planes and not all(_goes_through(bound.index, planes) for bound in around):
        return None
    return TileWindow(window, (y, x), value, down, right, around, taken, whole, constants, planes)


def _computed(value: Expr) -> Iterator[Index]:
    """The indices of which `value` is a function, besides what they load."""
    return (index for node in walk(value) if not isinstance(node, Load) for index in own_indices(node))


def _taps(window: Window) -> tuple[Axis, Axis]:
    """The axes over a tile."""
    down, across = window.axes[-2:] if len(window.axes) > 1 else (_ROW_OF_WINDOW, *window.axes)
    return down, across


def _planes(through: tuple[Axis, ...], below: Sequence[Below]) -> Planes | None:
    """How loads go along the axes of results and window in `through`; None where they do not, or each in its own way."""
    ways = {tuple((each.load.index.stride(axis) or 0) // max(each.plane, 1) for axis in through) for each in below}
    if not through or len(ways) != 1:
        return None
    (axis, tap), (step, dilation) = through, ways.pop()
    return Planes(axis, tap, step, dilation) if step > 0 and dilation > 0 else None


def _goes_through(index: Index, planes: Planes) -> bool:
    """Whether `index` is the number of a plane, from some place on."""
    wanted = (planes.axis, planes.step), (planes.tap, planes.dilation)
    return all(axis.size == 1 or index.stride(axis) == stride for axis, stride in wanted)


def _zeros_elsewhere(value: Expr, moving: list[Load]) -> tuple[Bound, ...] | None:
    """The bounds where the one load is there, with zeros in its place elsewhere; None where something else is masked."""
    masked = [node for node in walk(value) if isinstance(node, Masked)]
    if len(moving) != 1 or any(node is not as_used(value, moving[0]) for node in masked):
        return None
    return masked[0].mask if masked else ()


def is_plain(value: Expr, loads: Sequence[Load]) -> bool:
    """Whether `value` is what the one of `loads` gives, or its cast."""
    return len(loads) == 1 and as_used(value, loads[0]) is value


def finds_pairs(window: Window, load: Load) -> bool:
    """Whether a window finds the maximum of numbers of 16 bits, so that one instruction serves two of them."""
    return window.op is ReduceOp.MAX and window.dtype is DType.F32 and load.dtype.is_half


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


def _below(load: Load, image: tuple[Axis, Axis], taps: tuple[Axis, Axis], through: tuple[Axis, ...]) -> Below | None:
    strides = [load.index.stride(axis) for axis in (*image, *taps)]
    known = [stride for stride in strides if stride is not None and stride >= 0]
    if len(known) != 4:
        return None
    y, x, tap_y, tap_x = known
    y = 1 if image[0] is ONE_ROW else y
    pitch = gcd(y, tap_y)
    if not y or not x or not pitch or gcd(x, tap_x) != 1:
        return None
    plane = gcd(*(max(load.index.stride(axis) or 0, 0) for axis in through))
    return Below(load, pitch, (y // pitch, x), (tap_y // pitch, tap_x), plane)


def always_there(load: Load, program: Program) -> bool:
    """Whether a load may be done wherever its axes are."""
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
