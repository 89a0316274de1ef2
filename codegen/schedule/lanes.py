"""How many threads share a row whose values stay in their registers.

What counts is how many bytes a multiprocessor has under way: while one row is reduced, others are loaded. So as many rows as may be
stand on it at once, and threads have as many elements as their share of the registers holds. A row that fills more than that has a
multiprocessor to itself: others are busy with memory while it computes.
"""

from __future__ import annotations

from fusepass.codegen.device import WARP
from fusepass.codegen.schedule.plan import Keep
from fusepass.codegen.schedule.plan_rows import Rows
from fusepass.codegen.schedule.shape import Shape, ceil

_THREADS = 1024  # on a multiprocessor, of 64 registers each
_WORDS = 40  # of a row that such a thread holds; with more the compiler has too few for the rest
_PACKED = (32, 320), (72, 160)  # words of a packed row that a thread holds, in rows of up to so many threads
_TWO_ROWS_THREADS, _TWO_ROWS_WORDS = 256, 72  # of each of two rows on a multiprocessor, of 128 registers each
_TWO_WEIGHTED_ROWS_THREADS, _TWO_WEIGHTED_ROWS_WORDS = 320, 64  # of 96 registers each
_WEIGHTED_WORDS = 72  # beside weights, in a row that has a multiprocessor to itself
_FEW_THREADS = 512  # on a multiprocessor, of 128 registers each
_FEW_WORDS = 100
_MOST_AGAIN = 1  # long operators that packed rows compute anew for each number, as softmax does
_WORD = 4  # bytes
# Of which the compiler takes no more than their share by itself, where elements are no shorter than words and rows begin at vectors.
_EASY_WORDS = 32
_SHORT_EASY_WORDS = 16


def packs(shape: Shape, width: int) -> bool:
    """Whether numbers of a row, shorter than words, stay as they were loaded, several in a register: what is made of them is computed by
    each phase anew. Where that is much, what was computed stays, if threads hold a row of it.
    """
    if shape.again > _MOST_AGAIN and shape.cols * shape.kept_words <= _FEW_THREADS * _WORDS:
        return False
    return 0 < shape.kept_bytes < _WORD * shape.kept_words and width * shape.kept_bytes % _WORD == 0


def words_held(shape: Shape, elements: int, *, packed: bool) -> int:
    """Registers that so many elements of a row take."""
    return ceil(elements * shape.kept_bytes, _WORD) if packed else elements * max(shape.kept_words, 1)


def lanes_of_row(shape: Shape, vectors: int, width: int) -> int | None:
    """Threads, a multiple of a warp, that hold a row of so many vectors; None where it is too long."""
    words = words_held(shape, width, packed=False)
    most = _WORDS // words
    least = _warps(ceil(vectors, most)) if most else _THREADS
    if least <= _FEW_THREADS:
        room = _THREADS // (_THREADS // least)
        return _warps(ceil(vectors, ceil(vectors, room // WARP * WARP)))
    return _FEW_THREADS if ceil(vectors, _FEW_THREADS) * words <= _FEW_WORDS else None


def lanes_of_packed_row(shape: Shape, vectors: int, width: int) -> int | None:
    """The same where numbers stay packed: fewer threads with more of them each, so that at least two rows stand on a multiprocessor.

    Weights that come late, a few at a time, need registers of their own.
    """
    words = words_held(shape, width, packed=True)
    for most, threads in _PACKED:
        lanes = _warps(ceil(vectors, max(most // words, 1)))
        if lanes <= threads:
            return lanes
    two = _TWO_ROWS_THREADS, _TWO_ROWS_WORDS if shape.weighted else _FEW_WORDS
    longer = (_TWO_WEIGHTED_ROWS_THREADS, _TWO_WEIGHTED_ROWS_WORDS), (_FEW_THREADS, _WEIGHTED_WORDS)
    for threads, most in (two, *longer) if shape.weighted else (two,):
        if ceil(vectors, threads) * words <= most:
            return threads
    return None


def holds_row(shape: Shape, vectors: int, width: int, lanes: int, *, packed: bool) -> bool:
    """Whether so many threads have the registers for a row."""
    words = words_held(shape, ceil(vectors, lanes) * width, packed=packed)
    return words <= (_FEW_WORDS if lanes <= _FEW_THREADS else _WORDS)


def resident_blocks(shape: Shape, plan: Rows) -> int:
    """Blocks of rows in registers that a multiprocessor must have room for, so that the compiler takes no more than their share; 0 where it
    does so by itself.

    Smaller blocks are not bound: a block less on a multiprocessor costs less than values that do not fit registers any more
    (LayerNorm of 1024 bfloat16 numbers 132 us without a bound and 165 with one, LayerNorm and softmax of 1024 floats 72 and 98).
    """
    words = words_held(shape, plan.unroll * plan.width, packed=plan.keep is Keep.PACKED)
    if plan.keep is Keep.PACKED and words > _WORDS and plan.threads <= _TWO_WEIGHTED_ROWS_THREADS:
        return max(_FEW_THREADS // plan.threads, 2)
    if plan.threads < _FEW_THREADS:
        return 0
    easy = plan.start is None and min((access.nbytes for access in shape.main), default=_WORD) >= _WORD
    if words <= (_EASY_WORDS if easy else _SHORT_EASY_WORDS):
        return 0
    threads = _FEW_THREADS if words > _WORDS else _THREADS
    return max(threads // plan.threads, 1)


def _warps(threads: int) -> int:
    return ceil(threads, WARP) * WARP
