"""How a kernel is laid on a CPU: a frozen value from a pure function of kernel, buffers and device facts.

Every kernel's innermost loop runs along the axis that memory is contiguous in, so that it vectorises:

- `POINTWISE`: along the last row axis.
- `INNER`: along the columns; a row is reduced block by block.
- `OUTER`: along the last row axis; `width` rows are reduced side by side, in panels of a few columns.

The loops over rows (or over groups of `width` of them) are shared among threads where there is enough to do.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.conversions import converts_along
from fusepass.codegen.ir.dataflow import Dataflow, Kept, kept_values
from fusepass.codegen.ir.expr import Apply, Load, Masked, Op, Position
from fusepass.codegen.ir.index import Axis, FloorDiv, Mod
from fusepass.codegen.ir.program import Kernel, Program

# Elements reduced into one number before merging: few enough to be accurate in float32 and to stay in the first-level
# cache, enough to be fast. Where they are reduced as they lie in memory, longer blocks keep the memory busier.
_BLOCK = 1024
_LOADED_BLOCK = 4096
_PANEL = 16
_SHORT_ROW = 16
_WIDTH = 64  # rows side by side: eight vectors of eight floats, four cache lines of a column
_LEAST_WIDTH = 16
_WIDE = 256  # where rows are read once: longer pieces of memory
_CHUNK = 8192  # elements of a long axis that one thread takes at a time
_CONVERTED = 1024
_LEAST_CONVERTED = 64
LEAST_PARALLEL = 32768  # operations worth waking threads for; PyTorch's grain size, too
_KEPT_BYTES = 1 << 18  # of a row's values on the stack: half a second-level cache
_MOST_KEPT = 1 << 20  # of that, where it is tried
_LEAST_ROOM = 16
_LINE = 64  # bytes
_RATE = 4e9  # operations of a core in a second, in vectors
_KEEPING = 0.5  # operations that it takes to keep a value and to fetch it again
_CACHED = 0.2  # of memory's time takes what is still in the second-level cache
_MAX_INT = 2**31 - 2**20

_CHEAP = frozenset({Op.ADD, Op.SUB, Op.MUL, Op.WHERE, Op.CAST, Op.NEG, Op.ABS, Op.MAXIMUM, Op.MINIMUM})


class Walk(enum.Enum):
    """Which axis a kernel's innermost loop runs along."""

    POINTWISE = "pointwise"
    INNER = "inner"
    OUTER = "outer"


@dataclass(frozen=True)
class CpuSchedule:
    """The shape of one kernel's loops; the module's text says what the walks mean.

    Attributes:
        parallel: whether the loops over rows are shared among threads.
        chunk: points of the last row axis that make one unit of work; 0 for all of them (`POINTWISE` only).
        block: columns per block (`INNER`) or panel (`OUTER`).
        width: rows side by side; 1 unless `OUTER`.
        keep: whether values that several phases need stay on the stack in between.
        wide: whether indices are 64 bits wide; where they are computed with, narrow ones vectorise better.
        work: operations, at most a C++ int; from `LEAST_PARALLEL` on the rows are shared among threads.
        general: whether sizes come at run time as far as may be: what is chosen then depends on them little, and holds
            for all that make the same choices.
    """

    walk: Walk
    parallel: bool
    chunk: int = 0
    block: int = 1
    width: int = 1
    keep: bool = False
    wide: bool = True
    work: int = 0
    general: bool = False

    def __str__(self) -> str:
        threads = "threads share the rows" if self.parallel else "one thread"
        match self.walk:
            case Walk.POINTWISE:
                shape = f"pieces of {self.chunk}" if self.chunk else "simd along the last axis"
            case Walk.INNER:
                shape = f"rows in blocks of {self.block}"
            case Walk.OUTER:
                shape = f"{self.width} rows side by side in panels of {self.block}"
        return f"{self.walk.value}, {shape}, {threads}" + (", values kept on the stack" if self.keep else "")


def cpu_schedule(
    kernel: Kernel, program: Program, facts: DeviceFacts, *, general: bool = False, rank: int = 0
) -> CpuSchedule:
    """A schedule for `kernel` of `program` on a CPU with `facts.cores` cores; `general` as in `CpuSchedule`.

    Another one of `cpu_ranking` for a `rank`; where the kernel has none of it, the rules' one is meant.
    """
    if rank:
        ranked = cpu_ranking(kernel, program, facts)
        return ranked[rank if rank < len(ranked) else 0][0]
    work = min(_work(kernel), 2**31 - 1)
    wide = not _computes_with_indices(kernel) or _too_large(kernel, program)
    base = CpuSchedule(Walk.POINTWISE, work > LEAST_PARALLEL, wide=wide, work=work, general=general)
    if kernel.is_pointwise:
        return replace(base, chunk=_converted(kernel, program) or _chunk(kernel, facts))
    kept = () if kernel.scans else kept_on_cpu(kernel)
    cols = max(kernel.col_count, 1)
    row_bytes = (general_room(cols) if general else kernel.col_count) * sum(value.node.dtype.nbytes for value in kept)
    if not _prefers_rows(kernel, program):
        keep = 0 < row_bytes <= _KEPT_BYTES
        block = _LOADED_BLOCK if _reduces_memory(kernel) else _BLOCK
        return replace(base, walk=Walk.INNER, block=block if general else min(block, cols), keep=keep)
    width = _width(kernel, facts, _WIDTH, even=not general)
    while width > _LEAST_WIDTH and width * row_bytes > _KEPT_BYTES:
        width //= 2
    keep = 0 < width * row_bytes <= _KEPT_BYTES
    if not keep:
        width = _width(kernel, facts, _WIDE, even=not general)
    panel = _PANEL if width <= _WIDTH else _PANEL // 2
    return replace(base, walk=Walk.OUTER, block=panel if general else min(cols, panel), width=width, keep=keep)


def cpu_ranking(kernel: Kernel, program: Program, facts: DeviceFacts) -> tuple[tuple[CpuSchedule, float], ...]:
    """The schedules that `kernel` may have, with estimated seconds: the rules' one, then the others by these."""
    first = cpu_schedule(kernel, program, facts)
    others = [
        (each, _seconds(kernel, program, facts, each)) for each in dict.fromkeys(_alternatives(kernel, facts, first))
    ]
    ranked = sorted((each for each in others if each[0] != first), key=lambda each: each[1])
    return (first, _seconds(kernel, program, facts, first)), *ranked


def _alternatives(kernel: Kernel, facts: DeviceFacts, plan: CpuSchedule) -> Iterator[CpuSchedule]:
    """Schedules that do as `plan`: longer or shorter blocks, more or fewer rows side by side, values kept or computed again."""
    if kernel.scans:
        return
    cols = max(kernel.col_count, 1)
    row_bytes = kernel.col_count * sum(value.node.dtype.nbytes for value in kept_on_cpu(kernel))
    match plan.walk:
        case Walk.POINTWISE:
            axes = [axis.size for axis in kernel.rows if axis.size > 1]
            if plan.parallel and len(axes) > 1 and axes[-1] >= 2 * _CHUNK and plan.chunk in (0, _CHUNK):
                yield replace(plan, chunk=0)
                yield replace(plan, chunk=_CHUNK)
        case Walk.INNER:
            for block in (_BLOCK, _LOADED_BLOCK):
                for keep in (False, True):
                    if not keep or 0 < row_bytes <= _MOST_KEPT:
                        yield replace(plan, block=min(block, cols), keep=keep)
        case Walk.OUTER:
            for most in (_WIDTH // 2, _WIDTH, _WIDE):
                width = _width(kernel, facts, most, even=True)
                for keep in (False, True):
                    if not keep or 0 < width * row_bytes <= _MOST_KEPT:
                        panel = _PANEL if width <= _WIDTH else _PANEL // 2
                        yield replace(plan, width=width, block=min(cols, panel), keep=keep)
        case _:
            return


def _seconds(kernel: Kernel, program: Program, facts: DeviceFacts, plan: CpuSchedule) -> float:
    """About how long a kernel takes: what memory moves, what later phases find in the second-level cache, and what is computed."""
    points = kernel.row_count * max(kernel.col_count, 1)
    moved = sum(program.buffer(name).nbytes for name in kernel.reads | kernel.writes)
    read = sum(program.buffer(name).nbytes for name in kernel.reads)
    again = len(kernel.reduction_loops) + bool(kernel.stores) - 1 if kernel.reduction_loops else 0
    together = plan.width * read // max(kernel.row_count, 1)
    cached = _CACHED if together <= facts.l2_bytes else 1.0
    kept = _KEEPING * len(kept_on_cpu(kernel)) if plan.keep else 0.0
    computed = _work(kernel) / max(points, 1) * (1 if plan.keep else 1 + again) + kept
    piece = plan.width * 4 if plan.walk is Walk.OUTER else plan.block * 4 if plan.walk is Walk.INNER else _LINE * 16
    waste = 1 + _LINE / (4 * piece)
    memory = (moved + (0 if plan.keep else again * cached * read)) * waste / facts.bandwidth
    return memory + points * computed / (_RATE * facts.cores)


def general_room(size: int) -> int:
    """Elements of an array for `size` of them that serves other sizes, too: the next of 16, 64, 256 and so on."""
    room = _LEAST_ROOM
    while room < size:
        room *= 4
    return room


def kept_on_cpu(kernel: Kernel) -> tuple[Kept, ...]:
    """The values worth keeping between phases: computed ones, since what was only loaded is in the cache anyway."""
    return tuple(value for value in kept_values(kernel, Dataflow()) if not isinstance(value.node, Load))


def _work(kernel: Kernel) -> int:
    costly = sum(isinstance(node, Apply) and node.op not in _CHEAP for node in kernel.nodes)
    return kernel.row_count * max(kernel.col_count, 1) * (1 + costly)


def _chunk(kernel: Kernel, facts: DeviceFacts) -> int:
    """Pieces of the last axis where the others alone give too few units of work for all cores."""
    axes = [axis.size for axis in kernel.rows if axis.size > 1]
    if len(axes) < 2 or axes[-1] < 2 * _CHUNK or prod(axes[:-1]) >= 8 * facts.cores:
        return 0
    return _CHUNK


def _converted(kernel: Kernel, program: Program) -> int:
    """Pieces of the last axis, where halves lie along it, that fit in the first-level cache as floats."""
    axis = last_axis(kernel.rows)
    if axis is None or axis.size < _LEAST_CONVERTED or not converts_along(axis, kernel, program):
        return 0
    return _CONVERTED


def _prefers_rows(kernel: Kernel, program: Program) -> bool:
    """Whether more of the loaded bytes are contiguous along the rows than along the columns."""
    row, col = last_axis(kernel.rows), last_axis(kernel.cols)
    if row is None:
        return False
    if col is None:
        return True
    if kernel.col_count <= _SHORT_ROW and row.size >= _WIDTH:
        return True  # too short to vectorise along
    quarter = kernel.row_count * kernel.col_count // 4
    votes = 0
    for load in kernel.loads():
        buffer = program.buffer(load.buffer)
        if buffer.numel >= quarter:
            votes += buffer.dtype.nbytes * ((load.index.stride(row) == 1) - (load.index.stride(col) == 1))
    return votes > 0


def _reduces_memory(kernel: Kernel) -> bool:
    return all(
        isinstance(value, Load) and value.dtype is reduction.dtype
        for reduction in kernel.reductions
        for value in reduction.values
    )


def _width(kernel: Kernel, facts: DeviceFacts, most: int, *, even: bool) -> int:
    """Rows side by side, at most `most`: enough groups for all cores, as evenly as they go into whole vectors if `even`."""
    axis = last_axis(kernel.rows)
    assert axis is not None
    others = kernel.row_count // axis.size
    width = most
    while width > _LEAST_WIDTH and others * _ceil(axis.size, width) < 2 * facts.cores:
        width //= 2
    if not even:
        return width
    tiles = _ceil(axis.size, width)
    return min(width, 8 * _ceil(_ceil(axis.size, tiles), 8))


def last_axis(axes: tuple[Axis, ...]) -> Axis | None:
    """The innermost axis of more than one point."""
    return next((axis for axis in reversed(axes) if axis.size > 1), None)


def _computes_with_indices(kernel: Kernel) -> bool:
    if any(isinstance(node, Masked | Position) for node in kernel.nodes):
        return True
    indices = [load.index for load in kernel.loads()]
    indices += [store.index for store in (*kernel.row_stores, *kernel.stores)]
    return any(isinstance(atom, FloorDiv | Mod) for index in indices for atom, _ in index.terms)


def _too_large(kernel: Kernel, program: Program) -> bool:
    extents = (program.buffer(name).extent for name in kernel.reads | kernel.writes)
    return max((kernel.row_count * max(kernel.col_count, 1), *extents)) >= _MAX_INT


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
