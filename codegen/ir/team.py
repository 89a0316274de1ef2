"""The memory through which a team of blocks exchanges reduction states: where what stands, in bytes.

For each reduction, two iterations of one state per block of each team, each 32 bits of it beside the number of their iteration; a state
of two words or more takes a multiple of 16 bytes, so that two words go in one access. A state is written two iterations after it was
read at the earliest (see `fp_team.cuh`). Of strips of rows, four iterations of such states for each row (see `fp_strips.cuh`).
"""

from __future__ import annotations

from collections.abc import Iterator

from fusepass.codegen.ir.expr import ReduceOp
from fusepass.codegen.ir.program import Kernel, Reduction

_ITERATIONS = 2
_ITERATIONS_OF_STRIPS = 4
_WORD = 4
_TAGGED = 2 * _WORD  # a word of a state, and the number of its turn beside it
_ALIGNMENT = 16


def state_bytes(reduction: Reduction) -> int:
    """The size of a reduction's state, at most."""
    if reduction.op.finds_place:
        return 16
    if reduction.op is ReduceOp.MERGE_MOMENTS:
        return 24  # whatever the type: merged in double
    numbers = {ReduceOp.MOMENTS: 3, ReduceOp.SOFTMAX: 2, ReduceOp.MERGE_SOFTMAX: 2}
    return numbers.get(reduction.op, 1) * max(reduction.dtype.nbytes, 4)


def exchange_offsets(kernel: Kernel, members: int, teams: int, strip: int = 1) -> dict[str, int]:
    """Where the states of each reduction of `kernel` begin; under the empty name, where all end."""
    iterations = _ITERATIONS if strip == 1 else _ITERATIONS_OF_STRIPS
    return dict(_offsets(kernel, iterations * teams * members * strip))


def _offsets(kernel: Kernel, states: int) -> Iterator[tuple[str, int]]:
    at = 0
    for reduction in kernel.reductions:
        yield reduction.name, at
        room = _TAGGED * -(-state_bytes(reduction) // _WORD)
        room = _aligned(room) if room > _TAGGED else room
        at += _aligned(states * room)
    yield "", at


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
