"""Schedules of pointwise kernels: a flat walk, or tiles where operands are contiguous along different axes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from math import gcd, inf, prod

from fusepass.codegen.ir.expr import Apply, Builder, Expr, Gather, Load, Masked, Window, walk
from fusepass.codegen.ir.index import Axis, Index
from fusepass.codegen.ir.neighbours import points, stretches
from fusepass.codegen.ir.ops import LONG
from fusepass.codegen.ir.program import Kernel
from fusepass.codegen.ir.tile import fitting_width, power_above
from fusepass.codegen.ir.transpose import COLUMNS, near_step, neighbours, reused, transposes
from fusepass.codegen.ir.updates import read_in_place
from fusepass.codegen.ir.vectors import alignment, is_vector, split, split_index
from fusepass.codegen.schedule.plan_flat import Pointwise, Transposed
from fusepass.codegen.schedule.shape import ACCESS, LINE, SECTOR, Access, Shape, ceil, power_below
from fusepass.codegen.schedule.transpose import exchanged

_POINTWISE_BYTES = 16  # read per thread of a pointwise kernel
_LOOKED_UP = 4  # vectors of a thread, where data says where they lie, at least
_WHOLE = 4  # points of a row whose numbers are functions of each other, such as the corners of a box
_APART = 4  # elements that a thread loads for each of its results, and that lie apart
_LOADED = 32  # elements that a thread of a pointwise kernel loads before it computes, at most
_REPEATED_BYTES = 96  # of two vectors at most, where some of them are the same for the next of a thread's vectors
_OWN_BYTES = 256  # of a thread's vectors then, that is of registers; what is the same for all of them not counted
_POINTS = 32  # of windows that a thread loads at once, at most
_MOSTLY_WRITTEN, _WRITTEN_BYTES = 3, 32  # times as many bytes as are read; bytes that a thread writes then, at least
_LEAST_WRITTEN = 8  # bytes that a thread writes, where it has vectors
_PARTED = 1024  # elements of a row, up to which a warp's vectors often lie in several parts of it
_IN_PARTS = 4  # single elements of a thread then
_NEIGHBOURS = 16  # points of a window, from which it is slower that a warp reads them a vector's width apart
_STATIC_SHARED = 48 << 10  # bytes
_TRANSPOSE_BYTES = 8 << 10  # of a tile, for each buffer
_TRANSPOSE_TILE = 2, 64  # cache lines along the rows, and columns, where the rows are not few
_RAGGED_TILE = 4, 32  # the same, where tiles share the first and the last of these lines with others
_ANYWHERE_TILE = 2, 32  # the same, where rows begin at any element
_WORD = 4  # bytes: elements of so many are stored well one by one, as warps have whole lines of them
_LONGEST = 256  # rows of a tile of few columns, where threads have single elements
_TRANSPOSE_VECTORS = 2  # of a thread
_FEW_TILES = 16  # along the columns: all of them before the next rows
_SECTORS = 8, 16  # of a tile's rows, at least and at most, where tiles overlap by one
_LONG_RUN = 4  # times as many rows as a tile has must lie together then
_MOST_TILES = 1024  # along the rows, before the next columns


def pointwise(shape: Shape) -> Pointwise:
    axis = shape.row_axis
    if axis and _branches(shape, axis):
        return _pointwise(shape, 1, _IN_PARTS)
    width = _shared_width(shape, axis) if axis else 1
    if axis and width == 1 and not _walks_over_neighbours(shape, axis):
        width = shape.width(axis)
        if any(isinstance(node, Gather) for node in shape.kernel.nodes):
            width = _width_of_rows(shape, width)
    ragged = shape.ragged_width() if width == 1 else 1
    if ragged > 1:
        return replace(_pointwise(shape, ragged), ragged=True)
    gathers = sum(isinstance(node, Gather) for node in shape.kernel.nodes)
    if width == 1 and axis and gathers < _APART and _stores_pairs(shape, axis):
        width = 4 if shape.axes[-1].size == _WHOLE and _stores_pairs(shape, axis, _WHOLE) else 2
    elif axis and _reads_parts(shape, axis):
        return _pointwise(shape, 1, _IN_PARTS)
    elif width > 1 and axis:
        width = 1 if _reads_apart(shape, axis) else _width_without_ends(shape, axis, width)
    return _pointwise(shape, width)


def _branches(shape: Shape, axis: Axis) -> bool:
    """Whether several parts of short rows have long functions of their own, for which all threads of a warp wait that has these parts.

    Parts that take turns within a vector are no branches.
    """
    lane = Axis("lane", shape.width(axis))
    masked = (node for node in shape.kernel.nodes if isinstance(node, Masked))
    parts = [
        node.value for node in masked if any(axis in split_index(bound.index, axis, lane).axes for bound in node.mask)
    ]
    return shape.axes[-1].size <= _PARTED and sum(has_long_functions(walk(part)) for part in parts) > 1


def _reads_parts(shape: Shape, axis: Axis) -> bool:
    """Whether rows are made of parts of several tensors of words, none of which lies so that pairs of neighbours are one access."""
    loads, lane = [*shape.kernel.loads()], Axis("lane", 2)
    parts = {id(node) for each in shape.kernel.nodes if isinstance(each, Masked) for node in walk(each.value)}
    several = len({load.buffer for load in loads}) > 1 and all(shape.is_large(load.buffer) for load in loads)
    if not several or not all(id(load) in parts for load in loads):
        return False
    short = min(load.dtype.nbytes for load in loads) < _WORD
    if short or any(isinstance(node, Gather | Window) for node in shape.kernel.nodes):
        return False
    return not any(is_vector(split_index(load.index, axis, lane), axis, lane) for load in loads)


def _stores_pairs(shape: Shape, axis: Axis, width: int = 2) -> bool:
    """Whether pairs are stored whole, of which single elements are loaded: half as many threads then find the places."""
    windows = any(access.window for access in shape.accesses)
    return axis.size % width == 0 and not windows and _stores_whole(shape, axis, Axis("lane", width))


def _stores_whole(shape: Shape, axis: Axis, lane: Axis) -> bool:
    """Whether all that is stored goes in whole vectors along `axis`."""
    return all(is_vector(split_index(store.index, axis, lane), axis, lane) for store in shape.kernel.stores)


def _reads_apart(shape: Shape, axis: Axis) -> bool:
    """Whether a thread of several neighbours loads many elements that lie apart: each load of a warp would touch as many lines more."""
    apart = [a for a in shape.accesses if a not in shape.main and not a.window and 1 < near_step(a.index, axis) < inf]
    return len(apart) >= _APART


def _width_without_ends(shape: Shape, axis: Axis, width: int) -> int:
    """`width`, or that of shorter vectors none of which has the end of a row in it, if then all is loaded in whole accesses, or once."""

    def is_whole(width: int) -> bool:
        lane = Axis("lane", width)
        split = [split_index(access.index, axis, lane) for access in shape.accesses]
        return all(lane not in index.axes or is_vector(index, axis, lane) for index in split)

    if is_whole(width) or any(isinstance(node, Gather | Window) for node in shape.kernel.nodes):
        return width
    short = fitting_width(width, lambda width: shape.axes[-1].size % width == 0)
    return short if short > 1 and is_whole(short) else width


def _shared_width(shape: Shape, axis: Axis) -> int:
    """The vector of results whose windows, some elements apart, are loaded in whole accesses; 1 where there is none.

    A warp then reads neighbouring memory, and points that windows share are loaded once. Where these share none, and what a thread has of
    each of several rows is more than an access, each of a warp's would touch as many cache lines as those of a thread for each result.
    """
    windows = [node for node in shape.kernel.nodes if isinstance(node, Window)]
    loads = [load for node in windows for load in _loads_along(node, axis)]
    steps = {near_step(load.index, axis) * load.dtype.nbytes for load in loads}
    step = steps.pop() if len(steps) == 1 else inf
    width = ACCESS // gcd(int(step), ACCESS) if step < inf else 1
    if width == 1 or axis.size % width or any(near_step(load.index, axis) == 1 for load in loads):
        return 1
    if width * step > ACCESS and all(_are_rows_apart(node, axis) for node in windows):
        return 1
    if any(width * shape.program.buffer(store.buffer).dtype.nbytes > 2 * ACCESS for store in shape.kernel.stores):
        return 1
    lane, builder = Axis("lane", width), Builder()
    aligned = {access.buffer for access in shape.accesses if access.aligned}
    if not _stores_whole(shape, axis, lane):
        return 1
    kernel = split(shape.kernel, axis, lane, builder)
    for window in (node for node in kernel.nodes if isinstance(node, Window) and _loads_along(node, axis)):
        every = stretches(points(window, axis, lane, builder), axis, width, shape.program)
        if not any(each.buffer in aligned for each in every):
            return 1
    return width if shape.fills(shape.rows // width) else 1


def _width_of_rows(shape: Shape, width: int) -> int:
    """`width`, or that of fewer results that never lie in two rows, if there are several: places are found once for all of a row."""
    short = fitting_width(width, lambda width: shape.axes[-1].size % width == 0)
    return short if short > 1 else width


def _walks_over_neighbours(shape: Shape, axis: Axis) -> bool:
    """Whether windows load single elements, next to each other for neighbours along `axis`.

    Threads with a vector each stand its width apart there: they share more loads, but each touches as many cache lines more.
    """
    lane = Axis("lane", 2)
    for node in walk(*shape.kernel.roots):
        if isinstance(node, Window) and prod(each.size for each in node.axes) >= _NEIGHBOURS:
            near = [load.index for load in _loads_along(node, axis) if near_step(load.index, axis) == 1]
            if any(not is_vector(split_index(index, axis, lane), axis, lane) for index in near):
                return True
    return False


def _are_rows_apart(window: Window, axis: Axis) -> bool:
    """Whether `window` has several rows, and each element that it loads lies in the windows of one place along `axis` alone."""
    *above, along = window.axes

    def reach(load: Load) -> float:
        return near_step(load.index, along) * (along.size - 1) if along.size > 1 else 0

    alone = all(reach(load) < near_step(load.index, axis) for load in _loads_along(window, axis))
    return alone and prod(each.size for each in above) > 1


def _loads_along(window: Window, axis: Axis) -> list[Load]:
    return [node for node in walk(window) if isinstance(node, Load) and axis in node.index.axes]


def _pointwise(shape: Shape, width: int, asked: int | None = None) -> Pointwise:
    """The same with vectors of `width` elements, so many of a thread as are `asked` for, if that is known."""
    vectors = ceil(shape.rows, width)
    loads = [each for each in shape.main if each.window is False and each.buffer not in shape.kernel.writes]
    # What lies some elements before or behind is in the cache: memory moves it once.
    moved = {(each.buffer, each.index - each.index.constant): each.nbytes for each in loads}
    bytes_per_step = max(sum(moved.values()), 1) * width
    unroll = min(max(power_below(_POINTWISE_BYTES // bytes_per_step), 1), 4)
    while unroll > 1 and unroll * width * len(loads) > _LOADED:
        unroll //= 2
    unroll = asked or _other_unroll(shape, width, unroll)
    windows = any(access.window for access in shape.accesses)
    if windows:
        unroll = _windows_at_once(shape.kernel) if width == 1 else 1
    threads = 256
    if shape.repeated and 2 * bytes_per_step <= _REPEATED_BYTES and not windows:
        most = _OWN_BYTES // (shape.repeated * width)
        together = next((count for count in range(most, 1, -1) if shape.axes[0].size % count == 0), 1)
        apart = vectors // shape.axes[0].size
        if together > 1 and apart * shape.axes[0].size == vectors and shape.fills(vectors // together):
            blocks = ceil(vectors // together, threads)
            return Pointwise(width, together, threads, 1, blocks, apart=apart)
    while unroll > 1 and not shape.fills(vectors // unroll):
        unroll //= 2
    while threads > 64 and ceil(vectors, threads * unroll) < shape.facts.multiprocessors:
        threads //= 2
    return Pointwise(width, unroll, threads, 1, ceil(vectors, threads * unroll))


def _other_unroll(shape: Shape, width: int, unroll: int) -> int:
    """Vectors of a thread, where it waits for something else than the bytes of its operands, of which there should be `unroll`.

    Where data says what is looked up, loads wait for loads, and several must be under way. What lies at other places among more elements
    than there are results has its own lines for each vector. Long functions fill the instruction cache. What is mostly written waits for
    little.
    """
    if has_long_functions(shape.kernel.nodes):
        return 1
    gathers = [node for node in shape.kernel.nodes if isinstance(node, Gather)]
    below = (inner for node in gathers for place in node.places for inner in walk(place.value))
    if any(isinstance(node, Load | Gather) for node in below):
        return max(_LOOKED_UP, unroll)
    if gathers:
        return 1 if any(shape.program.buffer(node.buffer).numel > shape.rows for node in gathers) else unroll
    kernel, buffer = shape.kernel, shape.program.buffer
    read, written = (sum(buffer(name).nbytes for name in names) for names in (kernel.reads, kernel.writes))
    each = sum(buffer(store.buffer).dtype.nbytes for store in kernel.stores) * width
    if written >= _MOSTLY_WRITTEN * read:
        return min(unroll, max(_WRITTEN_BYTES // each, 1))
    return max(unroll, 2) if each * unroll < _LEAST_WRITTEN and width > 1 else unroll


def has_long_functions(nodes: Iterable[Expr]) -> bool:
    return any(isinstance(node, Apply) and node.op in LONG for node in nodes)


def _windows_at_once(kernel: Kernel) -> int:
    """Results of a thread that has single elements, so that enough of what their windows load is under way."""
    sizes = [prod(axis.size for axis in node.axes) for node in kernel.nodes if isinstance(node, Window)]
    return min(max(power_below(_POINTS // max(sizes)), 1), 4)


def transposing(
    shape: Shape, columns: tuple[Axis, ...], together: int, asked: tuple[int, int] | None = None
) -> Transposed:
    """Tiles whose rows fill cache lines; as many bytes for each buffer as keep enough loads in flight.

    `together`: see `rows_together`. `asked`: the cache lines along the rows, and columns, of a tile where rows are not few, if
    not those that the rule wants.
    """
    assert shape.row_axis is not None
    assert shape.col_axis is not None
    found = transposes(shape.kernel, shape.program, shape.row_axis, shape.col_axis)
    crossed = frozenset(each.index for each in found)
    width = shape.width(shape.row_axis, but=crossed)
    element = max(access.nbytes for access in shape.main)
    stores = [access for access in shape.main if access.buffer in shape.kernel.writes]
    # Rows that only follow each other in short pieces do not share lines with more of them.
    ragged = together * element >= _RAGGED_TILE[0] * LINE and any(_is_ragged(each, shape.row_axis) for each in stores)
    leaves = ragged and _leaves_from_tiles(shape, crossed)
    usual = _TRANSPOSE_TILE
    if ragged and not (leaves and _parts_of_sectors(shape)):
        usual = _ANYWHERE_TILE if width == 1 else _RAGGED_TILE
    if width == 1 and found and (leaves if ragged else _has_few(shape, element)):
        width = fitting_width(ACCESS // element, lambda width: shape.rows % width == 0)
    if _TRANSPOSE_TILE[1] < shape.cols <= COLUMNS and any(each.store is not None for each in found):
        usual = 1, COLUMNS  # all of them: what a tile stores then lies together
    lines, most = asked or usual
    wanted = max(min(lines * LINE // element, power_below(together)), LINE // element), most

    def taken(rows: int, cols: int) -> int:
        return exchanged(found, shape.program, rows, cols)

    rows, cols = _tile(shape, width, element, wanted, taken)
    # 8-byte elements have few rows in a line: more threads would stand too close along the columns for the banks.
    threads = min(max(rows * cols // (_TRANSPOSE_VECTORS * width), 32), 256 if element < 8 else 128)
    lanes = rows // width
    groups = max(threads // lanes, 1)
    unroll = max(cols // groups, 1)
    cols = groups * unroll
    plan = Transposed(width, unroll, lanes, groups, 1)
    lined = frozenset(each.buffer for each in stores if ragged and _is_realigned(each, shape.row_axis, plan))
    own = lined - reused(found, lined, shape.program).keys()
    if exchanged(found, shape.program, rows, cols, own) > _STATIC_SHARED:
        lined = frozenset()
    plan = replace(plan, overlap=_overlap(shape, plan, lined) if ragged else 0)
    tall, wide = ceil(shape.rows, plan.own_rows), ceil(shape.cols, cols)
    panel = _panel(tall, wide, ceil(together, plan.own_rows))
    return replace(plan, columns=columns, blocks=tall * wide, panel=panel, realigned=lined)


def _overlap(shape: Shape, plan: Transposed, realigned: frozenset[str]) -> int:
    """Rows by which tiles overlap: a sector's, where they would store parts of sectors at both ends of each column; else 0.

    A sector that two blocks write at different times takes the memory several times as long as one that is written whole. Where a result is
    written over what it is made of, no block may compute it again.
    """
    axis, (rows, _), sector = shape.row_axis, plan.tile, _parts_of_sectors(shape)
    if not sector or axis is None or shape.kernel.writes & (read_in_place(shape.program) | shape.kernel.reads):
        return 0
    stores, lane = _stores_along(shape), Axis("lane", plan.width)
    vectors = all(
        plan.width == 1 or each.buffer in realigned or is_vector(split_index(each.index, axis, lane), axis, lane)
        for each in stores
    )
    long = min(neighbours(each.index, axis) for each in stores) >= _LONG_RUN * rows
    least, most = (sectors * sector for sectors in _SECTORS)
    return sector if long and vectors and least <= rows <= most and sector % plan.width == 0 else 0


def _parts_of_sectors(shape: Shape) -> int:
    """Elements of a sector, where what is stored along the rows, all of one size, does not always begin with one; else 0."""
    axis, stores = shape.row_axis, _stores_along(shape)
    sizes = {each.nbytes for each in stores}
    if axis is None or len(sizes) != 1:
        return 0
    sector = SECTOR // sizes.pop()
    return 0 if all(alignment(each.index, axis, sector) % sector == 0 for each in stores) else sector


def _stores_along(shape: Shape) -> list[Access]:
    stores = (each for each in shape.main if each.buffer in shape.kernel.writes)
    return [each for each in stores if shape.row_axis is not None and near_step(each.index, shape.row_axis) == 1]


def _leaves_from_tiles(shape: Shape, crossed: frozenset[Index]) -> bool:
    """Whether all that lies along the rows is stored and begins anywhere: row by row from tiles, while threads have vectors."""
    along = [each for each in shape.main if each.index not in crossed]
    assert shape.row_axis is not None
    return all(each.buffer in shape.kernel.writes and _is_ragged(each, shape.row_axis) for each in along)


def _has_few(shape: Shape, element: int) -> bool:
    """Whether the columns are so few that a block of threads with single elements would have too little to load."""
    return shape.cols * _LONGEST * element < _TRANSPOSE_BYTES


def _is_ragged(access: Access, axis: Axis) -> bool:
    """Whether what is contiguous along `axis` does not begin at a cache line wherever `axis` is at a multiple of one."""
    line = LINE // access.nbytes
    return near_step(access.index, axis) == 1 and alignment(access.index, axis, line) % line != 0


def _is_realigned(store: Access, axis: Axis, plan: Transposed) -> bool:
    """Whether a store of single elements had better go in whole accesses; a tile then has the end of one row at most."""
    rows, _ = plan.tile
    lane = Axis("lane", plan.width)
    narrow = plan.width == 1 or not is_vector(split_index(store.index, axis, lane), axis, lane)
    piece = store.nbytes < ACCESS <= rows * store.nbytes and neighbours(store.index, axis) >= rows
    return narrow and piece and _is_ragged(store, axis)


def _tile(
    shape: Shape, width: int, element: int, wanted: tuple[int, int], taken: Callable[[int, int], int]
) -> tuple[int, int]:
    """Rows and columns of a tile, powers of two: `wanted` of each, if there are as many. `taken` says for both how many bytes of
    shared memory they take."""
    all_rows, all_cols = power_above(shape.rows), power_above(shape.cols)
    rows, cols = max(min(all_rows, wanted[0]), width), min(all_cols, wanted[1])
    while rows * cols * element < _TRANSPOSE_BYTES and rows < min(all_rows, max(_LONGEST, LINE * width)):
        rows *= 2
    while rows * cols * element < _TRANSPOSE_BYTES and cols < all_cols:
        cols *= 2

    def blocks() -> int:
        return ceil(shape.rows, rows) * ceil(shape.cols, cols)

    while cols > 16 and (blocks() < 2 * shape.facts.multiprocessors or taken(rows, cols) > _STATIC_SHARED):
        cols //= 2
    return rows, cols


def _panel(tall: int, wide: int, together: int) -> int:
    """How many of `tall` tiles along the rows come one after another, of `wide` along the columns.

    `together` tiles along the rows are neighbours in memory. Blocks that run at the same time should have long pieces of
    memory on both sides, so few columns come first, else the rows that are neighbours.
    """
    most = 1 if wide < _FEW_TILES else min(together, _MOST_TILES)
    return next(panel for panel in range(most, 0, -1) if tall % panel == 0)
