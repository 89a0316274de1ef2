"""The tiles in shared memory that windows over output tiles read from: how they lie there, and how they come there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd

from fusepass.codegen.ir.index import Axis, Index
from fusepass.codegen.ir.output_tiles import Below, TileWindow, at_first
from fusepass.codegen.ir.program import Program, Role
from fusepass.codegen.ir.vectors import ACCESS, alignment

ASYNCHRONOUS = 4
"""Bytes of the smallest copy that goes on by itself."""

_FEW = 2  # elements of a copy of each row by itself, up to which rows copied together cost less, with conditions at their ends
_GAPS = 2  # times what is needed of a row, from which the rest of it is not copied


@dataclass(frozen=True)
class TileShape:
    """A tile of shared memory for a block's output tile.

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
        images: neighbouring images whose rows come together, as they lie; an output tile has all of each then, and the tile no rows that are not there.
        image: elements from one of these to the next.
        top: with more than one of these or `image`, rows that the first result needs before the first one that is there.
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
    images: int = 1
    image: int = 0
    top: int = 0

    @property
    def pitch(self) -> int:
        """From a row to the next one."""
        return self.run or self.cols

    @property
    def vectors(self) -> int:
        """That threads copy of it."""
        return self.rows * (self.cols // self.vector) if not self.run else self.nbytes // ACCESS

    def elements(self, nbytes: int) -> int:
        """From an image's rows to the next one's; of `nbytes` each."""
        if self.image:
            return self.image
        return self.rows * self.cols if not self.run else self.nbytes // nbytes


def tile_shape(
    program: Program,
    window: TileWindow,
    below: Below,
    output_tile: tuple[int, int],
    lane: Axis,
    *,
    aligned: bool,
    along: int = 0,
) -> TileShape:
    """The tile under a `patch` of rows and columns, threads having neighbouring results of a row, one for each `lane`; those that read it have
    what is the same for `along` of them, if that is given.

    An output tile may have more columns than the image: threads read what is behind it, and use it for nothing.
    `aligned`: whether inputs start at a multiple of 16 bytes.
    """
    load, nbytes = below.load, below.load.dtype.nbytes
    buffer, width, moving = program.buffer(load.buffer), along or lane.size, (window.image[1], lane, window.taps[1])
    usable, start = aligned or buffer.role is not Role.INPUT, at_first(load.index, *moving)
    shift, vector = 0, ACCESS // nbytes
    across = window.image[1].size
    apart = (
        below.steps[1] * gcd(output_tile[1], across - output_tile[1]) if output_tile[1] < across else 0
    )  # of output tiles side by side
    while vector > 1:
        offsets = [at for at in range(vector) if alignment(start - at, _NOWHERE, 1) % vector == 0]
        whole = buffer.extent % vector == 0 and apart % vector == 0
        if usable and whole and offsets and _whole(window, moving, offsets[0], vector):
            shift = offsets[0]
            break
        vector //= 2
    rows, cols = below.span(window.taps, output_tile)
    _, reach = below.span(window.taps, (1, width))
    near = gcd(width * below.steps[1], ACCESS // nbytes)
    needed = cols - max(output_tile[1] - across, 0) * below.steps[1] + shift
    room = _up(cols + shift, max(vector, near))
    nearby = _up(reach + shift, near)
    alone = TileShape(rows, room, vector, shift, needed, near, nearby, _up(rows * room * nbytes, ACCESS))
    if not usable or across > output_tile[1] or below.pitch > _GAPS * cols or window.deep:
        return alone
    return _together(below, start, Images(), (rows, cols, reach), near) if vector <= _FEW else alone


@dataclass(frozen=True)
class Images:
    """`count` neighbouring images, the first elements of which lie `pitch` apart; of each, rows from number `top` on of those that are needed."""

    count: int = 1
    pitch: int = 0
    top: int = 0


def tile_of_images(
    program: Program,
    window: TileWindow,
    below: Below,
    others: Sequence[Axis],
    images: int,
    output_tile: tuple[int, int],
    lane: Axis,
    *,
    aligned: bool,
    along: int,
) -> TileShape | None:
    """The tile under so many whole images, as they lie: of each the rows that are there, once, and what lies between images.

    `others`: the axes of results that count images. None where images or their rows do not lie together, or begin anywhere. See `tile_shape`
    for what is left.
    """
    load, nbytes = below.load, below.load.dtype.nbytes
    if not (aligned or program.buffer(load.buffer).role is not Role.INPUT) or window.planes is not None or window.deep:
        return None
    rows, cols = below.span(window.taps, output_tile)
    _, reach = below.span(window.taps, (1, along))
    top, end = rows_there(window, rows)
    pitch, neighbours = _neighbours(load.index, others)
    if end <= top or neighbours % images or (rows > 1 and below.pitch > _GAPS * cols):
        return None
    least = (end - top - 1) * below.pitch + (min(below.pitch, cols) if rows > 1 else cols)
    pitch = pitch if images > 1 else least
    if pitch <= 0 or pitch > _GAPS * least:
        return None
    start = at_first(load.index, window.image[1], lane, window.taps[1]) + top * below.pitch
    near = gcd(along * below.steps[1], ACCESS // nbytes)
    return _together(below, start, Images(images, pitch, top), (end - top, cols, reach), near)


def rows_there(window: TileWindow, rows: int) -> tuple[int, int]:
    """Of so many rows that a whole image needs the first one that is there, and one past the last."""
    first, end = 0, rows
    for bound in window.down:
        (at, _) = at_first(bound.index, window.image[0], *window.taps).bounds
        first, end = max(first, bound.low - at), min(end, bound.high - at)
    return first, end


def _neighbours(index: Index, others: Sequence[Axis]) -> tuple[int, int]:
    """How far apart images lie that `others` count, and how many do so: all, or each is one by itself."""
    pitch, count = 0, 1
    for axis in reversed([axis for axis in others if axis.size > 1]):
        stride = index.stride(axis)
        if stride is None or (count > 1 and stride != pitch * count):
            return 0, 1
        pitch, count = stride if count == 1 else pitch, count * axis.size
    return pitch, count


def _together(below: Below, start: Index, images: Images, needed: tuple[int, int, int], near: int) -> TileShape:
    """The tile whose rows are copied as they lie. `needed`: rows of an image, elements of each, and what a thread needs of these; it reads up
    to `near` at once, if rows allow it."""
    rows, cols, reach = needed
    nbytes = below.load.dtype.nbytes
    while near > 1:
        shift = next((at for at in range(near) if alignment(start - at, _NOWHERE, 1) % near == 0), None)
        if shift is not None and below.plane % near == 0:
            break
        near //= 2
    else:
        shift = 0
    vector = ACCESS // nbytes
    last = (images.count - 1) * images.pitch + (rows - 1) * below.pitch
    covered = _up(last + _up(cols + shift, near) + vector - 1, vector) * nbytes
    room = TileShape(rows, cols, vector, shift, cols, near, _up(reach + shift, near), covered, below.pitch)
    return replace(room, images=images.count, image=images.pitch, top=images.top)


_NOWHERE = Axis("", 1)


def _whole(window: TileWindow, moving: tuple[Axis, ...], shift: int, vector: int) -> bool:
    """Whether vectors from `shift` elements before the first on are all there or not at all."""
    return all(
        alignment(at_first(bound.index, *moving) - shift, _NOWHERE, 1) % vector == 0
        and bound.low % vector == 0
        and bound.high % vector == 0
        for bound in window.right
    )


def _up(count: int, unit: int) -> int:
    return -(-count // unit) * unit
