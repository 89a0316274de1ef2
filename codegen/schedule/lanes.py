"""How many threads share a row whose values stay in their registers.

What counts is how many bytes a multiprocessor has under way: while one row is reduced, others are loaded. So as many rows as may be
stand on it at once, and threads have as many elements as their share of the registers holds.
"""

from __future__ import annotations

from fusepass.codegen.schedule.plan import Schedule
from fusepass.codegen.schedule.shape import Shape, ceil

_WARP = 32
_THREADS = 1024  # on a multiprocessor, of 64 registers each
_WORDS = 40  # of a row that such a thread holds; with more the compiler has too few for the rest
_ONE_BLOCK_WORDS = 32  # where they are all in one block: nothing else is loaded while that computes
_FEW_THREADS = 512  # on a multiprocessor, of 128 registers each
_FEW_WORDS = 100
_FEW_WORDS_EACH = 16  # of which the compiler takes no more than their share by itself


def lanes_of_row(shape: Shape, vectors: int, width: int) -> int | None:
    """Threads, a multiple of a warp, that hold a row of so many vectors; None where it is too long."""
    words = max(shape.kept_words, 1) * width
    most = _WORDS // words
    least = _warps(ceil(vectors, most)) if most else _THREADS
    if least <= _FEW_THREADS:
        room = _THREADS // (_THREADS // least)
        return _warps(ceil(vectors, ceil(vectors, room // _WARP * _WARP)))
    if ceil(vectors, _THREADS) * words <= _ONE_BLOCK_WORDS:
        return _THREADS
    return _FEW_THREADS if ceil(vectors, _FEW_THREADS) * words <= _FEW_WORDS else None


def resident_blocks(shape: Shape, plan: Schedule) -> int:
    """Blocks of rows in registers that a multiprocessor must have room for, so that the compiler takes no more than their share; 0 where it
    does so by itself."""
    words = plan.unroll * plan.width * max(shape.kept_words, 1)
    if words <= _FEW_WORDS_EACH:
        return 0
    threads = _FEW_THREADS if words > _WORDS else _THREADS
    return max(threads // plan.threads, 1)


def _warps(threads: int) -> int:
    return ceil(threads, _WARP) * _WARP
