"""The tiles in shared memory that windows over patches read from: how they lie there, and how they come there."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from fusepass.codegen.ir.index import Axis, Index
from fusepass.codegen.ir.patches import Below, PatchWindow, at_first
from fusepass.codegen.ir.program import Program, Role
from fusepass.codegen.ir.vectors import alignment

ASYNCHRONOUS = 4
"""Bytes of the smallest copy that goes on by itself."""

_ACCESS = 16  # bytes of the widest copy
_FEW = 2  # elements of a copy of each row by itself, up to which rows copied together cost less, with conditions at their ends
_GAPS = 2  # times what is needed of a row, from which the rest of it is not copied


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
        return self.rows * (self.cols // self.vector) if not self.run else self.nbytes // _ACCESS

    def elements(self, nbytes: int) -> int:
        """From an image's tile to the next one's; of `nbytes` each."""
        return self.rows * self.cols if not self.run else self.nbytes // nbytes


def tile_shape(
    program: Program, window: PatchWindow, below: Below, patch: tuple[int, int], lane: Axis, *, aligned: bool
) -> TileShape:
    """The tile under a `patch` of rows and columns, threads having neighbouring results of a row, one for each `lane`.

    A patch may have more columns than the image: threads read what is behind it, and use it for nothing.
    `aligned`: whether inputs start at a multiple of 16 bytes.
    """
    load, nbytes = below.load, below.load.dtype.nbytes
    buffer, width, moving = program.buffer(load.buffer), lane.size, (window.image[1], lane, window.taps[1])
    usable, start = aligned or buffer.role is not Role.INPUT, at_first(load.index, *moving)
    shift, vector = 0, _ACCESS // nbytes
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
    near = gcd(width * below.steps[1], _ACCESS // nbytes)
    needed = cols - max(patch[1] - across, 0) * below.steps[1] + shift
    room = _up(cols + shift, max(vector, near))
    nearby = _up(reach + shift, near)
    alone = TileShape(rows, room, vector, shift, needed, near, nearby, _up(rows * room * nbytes, _ACCESS))
    if not usable or across > patch[1] or below.pitch > _GAPS * cols or window.deep:
        return alone
    together = _together(window, below, start, (rows, cols, reach), near)
    return together if vector <= _FEW else alone


def _together(window: PatchWindow, below: Below, start: Index, needed: tuple[int, int, int], near: int) -> TileShape:
    """The tile whose rows are copied as they lie. `needed`: rows, elements of each, and what a thread needs of these; it reads up to `near` at
    once, if rows allow it."""
    rows, cols, reach = needed
    nbytes = below.load.dtype.nbytes
    while near > 1:
        shift = next((at for at in range(near) if alignment(start - at, _NOWHERE, 1) % near == 0), None)
        if shift is not None and below.plane % near == 0:
            break
        near //= 2
    else:
        shift = 0
    vector = _ACCESS // nbytes
    covered = _up((rows - 1) * below.pitch + _up(cols + shift, near) + vector - 1, vector) * nbytes
    return TileShape(rows, cols, vector, shift, cols, near, _up(reach + shift, near), covered, below.pitch)


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
