"""How many threads share a row whose values stay in their registers.

What counts is how many bytes a multiprocessor has under way: while one row is reduced, others are loaded. So as many rows as may be
stand on it at once, and threads have as many elements as their share of the registers holds. A row that fills more than that has a
multiprocessor to itself: others are busy with memory while it computes.
"""

from __future__ import annotations

from fusepass.codegen.schedule.plan import Schedule
from fusepass.codegen.schedule.shape import Shape, ceil

_WARP = 32
_THREADS = 1024  # on a multiprocessor, of 64 registers each
_WORDS = 40  # of a row that such a thread holds; with more the compiler has too few for the rest
_FEW_THREADS = 512  # on a multiprocessor, of 128 registers each
_FEW_WORDS = 100
_WORD = 4  # bytes
# Of which the compiler takes no more than their share by itself, where elements are no shorter than words.
_EASY_WORDS = 32
_SHORT_EASY_WORDS = 16


def lanes_of_row(shape: Shape, vectors: int, width: int) -> int | None:
    """Threads, a multiple of a warp, that hold a row of so many vectors; None where it is too long."""
    words = max(shape.kept_words, 1) * width
    most = _WORDS // words
    least = _warps(ceil(vectors, most)) if most else _THREADS
    if least <= _FEW_THREADS:
        room = _THREADS // (_THREADS // least)
        return _warps(ceil(vectors, ceil(vectors, room // _WARP * _WARP)))
    return _FEW_THREADS if ceil(vectors, _FEW_THREADS) * words <= _FEW_WORDS else None


def holds_row(shape: Shape, vectors: int, width: int, lanes: int) -> bool:
    """Whether so many threads have the registers for a row."""
    words = ceil(vectors, lanes) * width * max(shape.kept_words, 1)
    return words <= (_FEW_WORDS if lanes <= _FEW_THREADS else _WORDS)


def resident_blocks(shape: Shape, plan: Schedule) -> int:
    """Blocks of rows in registers that a multiprocessor must have room for, so that the compiler takes no more than their share; 0 where it
    does so by itself.

    Smaller blocks are not bound: a block less on a multiprocessor costs less than values that do not fit registers any more
    (LayerNorm of 1024 bfloat16 numbers 132 us without a bound and 165 with one, LayerNorm and softmax of 1024 floats 72 and 98).
    """
    if plan.threads < _FEW_THREADS:
        return 0
    words = plan.unroll * plan.width * max(shape.kept_words, 1)
    shortest = min((access.nbytes for access in shape.main), default=_WORD)
    if words <= (_EASY_WORDS if shortest >= _WORD else _SHORT_EASY_WORDS):
        return 0
    threads = _FEW_THREADS if words > _WORDS else _THREADS
    return max(threads // plan.threads, 1)


def _warps(threads: int) -> int:
    return ceil(threads, _WARP) * _WARP
