"""How results leave an output tile: from each thread as it has them, or through shared memory as they lie in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod

from fusepass.codegen.ir.dataflow import Dataflow
from fusepass.codegen.ir.expr import Gather, Load
from fusepass.codegen.ir.index import Axis, Index
from fusepass.codegen.ir.output_tiles import behind_windows
from fusepass.codegen.ir.program import Kernel, Program, Reduction
from fusepass.codegen.ir.team import state_bytes
from fusepass.codegen.ir.vectors import is_vector, split_index
from fusepass.codegen.schedule.shape import ACCESS, ceil

_WHOLE_ROW = 16  # results that a thread may have of one, at most
_SINGLE = 4  # bytes of a result that is reduced


@dataclass(frozen=True)
class Leaving:
    """How the results of an output tile leave.

    Attributes:
        width: neighbouring results of a row that a thread has.
        together: of how many neighbouring images results lie together in memory, if a block's leave through shared memory, in whole vectors; a
            output tile then has whole rows, and its last threads may stand behind them in part. 0 where each thread stores its own.
    """

    width: int
    together: int = 0


def ways_to_leave(kernel: Kernel, program: Program, image: tuple[Axis, Axis]) -> list[Leaving]:
    """How results of output tiles of `image` may leave: through shared memory only where threads would store less than they may have."""
    x, most = image[1], _most_results(kernel, program)
    alone = vector_of_results(kernel, program, x)
    together = images_together(kernel, image) if alone < most else 0
    whole = (x.size,) if x.size <= _WHOLE_ROW else ()
    widths = dict.fromkeys((*whole, *(width for width in (4, 2) if width <= most)))
    return [*(Leaving(width, together) for width in widths if together), Leaving(alone)]


def vector_of_results(kernel: Kernel, program: Program, x: Axis) -> int:
    """Neighbouring results of a row that a thread stores at once."""
    width = _most_results(kernel, program)
    while width > 1:
        lane = Axis("lane", width)
        stored = (split_index(store.index, x, lane) for store in kernel.stores)
        if x.size % width == 0 and all(is_vector(index, x, lane) for index in stored):
            break
        width //= 2
    return width


def _most_results(kernel: Kernel, program: Program) -> int:
    """Neighbouring results of a row that a thread computes, at most."""
    largest = max((program.buffer(store.buffer).dtype.nbytes for store in kernel.stores), default=_SINGLE)
    return min(ACCESS // largest, 4)


def images_together(kernel: Kernel, image: tuple[Axis, Axis]) -> int:
    """Of how many neighbouring images all results lie together in memory, row after row; 0 where those of one do not. Of all, where none is stored.

    Likewise 0 where something is loaded for each result besides what windows reduce: a thread may stand on results that are not there.
    """
    (y, x), dataflow = image, Dataflow()
    loads = (node for node in behind_windows(kernel) if isinstance(node, Load | Gather))
    if (
        kernel.overflow_flag is not None
        or len({store.buffer for store in kernel.stores}) < len(kernel.stores)
        or any(x in dataflow.needs(each) for each in loads)
    ):
        return 0
    images = prod(axis.size for axis in kernel.rows if axis not in (y, x))
    return gcd(*(_together(store.index, kernel.rows, y, x) for store in kernel.stores)) if kernel.stores else images


def _together(index: Index, rows: Sequence[Axis], y: Axis, x: Axis) -> int:
    if not (_follows(index, x, 1) and _follows(index, y, x.size)):
        return 0
    images = 1
    for axis in reversed([each for each in rows if each not in (y, x)]):
        if not _follows(index, axis, images * y.size * x.size):
            break
        images *= axis.size
    return images


def _follows(index: Index, axis: Axis, step: int) -> bool:
    return axis.size == 1 or index.stride(axis) == step


def bytes_of_results(kernel: Kernel, program: Program, count: int) -> int:
    """Room in shared memory for so many results, each buffer's as they lie in its aligned vectors."""
    sizes = (program.buffer(store.buffer).dtype.nbytes for store in kernel.stores)
    return sum(room_of_results(count, nbytes) for nbytes in sizes)


def bytes_of_states(kernel: Kernel, threads: int) -> int:
    """Room in shared memory for what so many threads find of a kernel's `Partials`."""
    reductions = kernel.partials.reductions if kernel.partials else ()
    return sum(room_of_states(each, threads) for each in reductions)


def room_of_states(reduction: Reduction, threads: int) -> int:
    """The same for one reduction."""
    return ceil(threads * state_bytes(reduction), ACCESS) * ACCESS


def room_of_results(count: int, nbytes: int) -> int:
    """The same of one buffer, with elements of `nbytes`: as many vectors as may have a part of them."""
    vector = ACCESS // nbytes
    return ceil(count + vector - 1, vector) * ACCESS
