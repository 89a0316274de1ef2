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
from fusepass.codegen.ir.program import Kernel, Program, Role
from fusepass.codegen.ir.vectors import alignment

ACCESS = 16  # bytes of the widest copy
_ASYNCHRONOUS = 4  # bytes of the smallest copy that goes on by itself
_GAPS = 2  # times what is needed of a row, from which the rest of it is not copied

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


@dataclass(frozen=True)
class TileShape:
    """A tile of shared memory for a block's patch.

    Attributes:
        rows: of the input.
        cols: of each row, a multiple of `vector`.
        vector: elements that one thread copies at once; all of them are there or none.
        shift: elements of a row before the first that is needed.
        needed: elements of a row, those among them; vectors behind them are not copied, as nothing may be there.
        near: elements that a thread reads from the tile at once.
        reach: elements of a row that a thread reads.
        nbytes: a multiple of 16.
        run: elements from a row to the next where all rows are copied as they lie, by the aligned vectors that cover them; 0 where each row
            is copied by itself.
    """

    rows: int
    cols: int
    vector: int
    shift: int
    needed: int
    near: int
    reach: int
    nbytes: int
    run: int = 0

    @property
    def vectors(self) -> int:
        """That threads copy of it."""
        return self.rows * (self.cols // self.vector) if not self.run else self.nbytes // ACCESS

    def elements(self, nbytes: int) -> int:
        """From an image's tile to the next one's; of `nbytes` each."""
        return self.rows * self.cols if not self.run else self.nbytes // nbytes


def tile_shape(
    program: Program, window: PatchWindow, below: Below, patch: tuple[int, int], lane: Axis, *, aligned: bool
) -> TileShape:
    """The tile under a `patch` of rows and columns, threads having neighbouring results of a row, one for each `lane`.

    `aligned`: whether inputs start at a multiple of 16 bytes.
    """
    load, nbytes = below.load, below.load.dtype.nbytes
    buffer, width, moving = program.buffer(load.buffer), lane.size, (window.image[1], lane, window.taps[1])
    usable, start = aligned or buffer.role is not Role.INPUT, at_first(load.index, *moving)
    shift, vector = 0, ACCESS // nbytes
    across = window.image[1].size
    apart = below.steps[1] * gcd(patch[1], across - patch[1]) if patch[1] < across else 0  # of patches side by side
    while vector > 1:
        offsets = [at for at in range(vector) if alignment(start - at, _NOWHERE, 1) % vector == 0]
        whole = buffer.extent % vector == 0 and apart % vector == 0
        if usable and whole and offsets and _whole(window, moving, offsets[0], vector):
            shift = offsets[0]
            break
        vector //= 2
    rows, cols = below.span(window.taps, patch)
    _, reach = below.span(window.taps, (1, width))
    near = gcd(width * below.steps[1], ACCESS // nbytes)
    lie_together = across <= patch[1] and below.pitch <= _GAPS * cols and not window.deep
    if vector == 1 and usable and lie_together and (near == 1 or nbytes < _ASYNCHRONOUS):
        vector = ACCESS // nbytes
        covered = _up((rows - 1) * below.pitch + cols + vector - 1, vector) * nbytes
        return TileShape(rows, cols, vector, 0, cols, 1, reach, covered, below.pitch)
    needed = cols + shift
    cols = _up(needed, max(vector, near))
    return TileShape(
        rows, cols, vector, shift, needed, near, _up(reach + shift, near), _up(rows * cols * nbytes, ACCESS)
    )


_NOWHERE = Axis("", 1)


def _whole(window: PatchWindow, moving: tuple[Axis, ...], shift: int, vector: int) -> bool:
    """Whether vectors from `shift` elements before the first on are all there or not at all."""
    return all(
        alignment(at_first(bound.index, *moving) - shift, _NOWHERE, 1) % vector == 0
        and bound.low % vector == 0
        and bound.high % vector == 0
        for bound in window.right
    )


def _up(count: int, unit: int) -> int:
    return -(-count // unit) * unit
