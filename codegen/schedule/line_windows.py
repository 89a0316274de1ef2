"""Schedules of pointwise kernels whose windows go over what lies channels last: threads have neighbouring results along a line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from fusepass.codegen.ir.index import Axis
from fusepass.codegen.ir.line_windows import LineWindow, line_windows
from fusepass.codegen.ir.output_tiles import always_there
from fusepass.codegen.ir.vectors import is_vector, split_index
from fusepass.codegen.schedule.plan_output_tile import LineTile
from fusepass.codegen.schedule.shape import ACCESS, Shape, ceil, divisors

_THREADS = 256  # of a block
_LANES = 64  # along the channels, at most
# Results of a thread, by up to how many points windows have of the line. More share more, but fewer threads then wait for memory.
_ALONG = (4, 2), (8, 4), (math.inf, 8)
_REUSE = 2  # windows that need a point, of which there must be more
_POINTS = 32  # of a line, at most: they are written out
_SUMS = 128  # registers of a thread that hold results, and half as many for those that more numbers than these are fixed for
_FIXED = 32
_BLOCKS = 2  # on a multiprocessor


def along_lines(shape: Shape) -> LineTile | None:
    """The schedule; None where windows do not go along such a line, or share nothing, or where there are too few results for it."""
    kernel, program = shape.whole, shape.program
    if not shape.facts.copies or kernel.partials is not None or len(kernel.rows) < 2:
        return None
    beside = [axis for axis in kernel.rows if all(store.index.stride(axis) == 1 for store in kernel.stores)]
    for channels, line in product(beside, kernel.rows):
        if line is channels:
            continue
        windows = line_windows(kernel, line, channels)
        if not all(always_there(load, program) for window in windows for load in window.fixed):
            continue
        width = _width(shape, windows, channels) if windows else 1
        found = _along(shape, windows, line, channels, width) if width > 1 else None
        if found is not None:
            return found
    return None


def _width(shape: Shape, windows: Sequence[LineWindow], channels: Axis) -> int:
    """Channels of a vector: whole accesses of the largest elements that are stored or go along, all at multiples of these."""
    stores = [(store.buffer, store.index) for store in shape.whole.stores]
    moving = [(load.buffer, load.index) for window in windows for load in window.moving]
    sizes = [shape.program.buffer(buffer).dtype.nbytes for buffer, _ in (*stores, *moving)]
    width = ACCESS // max(sizes)
    lane = Axis("lane", width)
    aligned = {access.buffer for access in shape.accesses if access.aligned}
    whole = all(is_vector(split_index(index, channels, lane), channels, lane) for _, index in (*stores, *moving))
    return width if whole and channels.size % width == 0 and all(buffer in aligned for buffer, _ in moving) else 1


def _along(shape: Shape, windows: Sequence[LineWindow], line: Axis, channels: Axis, width: int) -> LineTile | None:
    if any(window.tap.size <= _REUSE * window.step or window.tap.size > _POINTS for window in windows):
        return None
    fixed = max(window.tap.size * len(window.fixed) * width for window in windows)
    words = sum(1 if window.paired else 2 * max(window.window.dtype.nbytes // 4, 1) for window in windows)
    most = _SUMS // (width * words) // (1 if fixed <= _FIXED else 2)
    wanted = min(next(many for points, many in _ALONG if max(window.tap.size for window in windows) <= points), most)
    unroll = min(
        (wanted, wanted + 1, wanted - 1), key=lambda many: ceil(line.size, many) * many if many > 1 else math.inf
    )
    vectors, facts = channels.size // width, shape.facts
    few = shape.rows // (width * unroll) < facts.multiprocessors * _BLOCKS * _THREADS
    if not 1 < unroll <= line.size or few:
        return None
    lanes = ceil(vectors, ceil(vectors, _LANES))
    images = shape.rows // (line.size * channels.size)
    planes = max(divisors(images, max(_THREADS // lanes, 1)))
    groups = max(min(_THREADS // (lanes * planes), ceil(line.size, unroll)), 1)
    tile_height = min(unroll * groups, line.size)
    blocks = images // planes * ceil(line.size, tile_height) * ceil(vectors, lanes)
    plan = LineTile(width, unroll, lanes, groups * planes, blocks, image=(line, channels))
    return replace(plan, planes=planes, tile_height=tile_height)
