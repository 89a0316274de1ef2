"""The memory through which a team of blocks exchanges reduction states: where what stands, in bytes.

For each reduction, two turns of one state per block of each team, each 32 bits of it beside the number of their turn. A
state is written two turns after it was read at the earliest (see `fp_team.cuh`).
"""

from __future__ import annotations

from collections.abc import Iterator

from fusepass.codegen.ir.expr import ReduceOp
from fusepass.codegen.ir.program import Kernel, Reduction

_TURNS = 2
_TAGGED = 2  # times what a state takes: each word has the number of its turn beside it
_ALIGNMENT = 16


def state_bytes(reduction: Reduction) -> int:
    """The size of a reduction's state, at most."""
    if reduction.op in (ReduceOp.ARGMAX, ReduceOp.ARGMIN):
        return 16
    if reduction.op is ReduceOp.MERGE_MOMENTS:
        return 24  # whatever the type: merged in double
    numbers = {ReduceOp.MOMENTS: 3, ReduceOp.SOFTMAX: 2, ReduceOp.MERGE_SOFTMAX: 2}
    return numbers.get(reduction.op, 1) * max(reduction.dtype.nbytes, 4)


def exchange_offsets(kernel: Kernel, members: int, teams: int) -> dict[str, int]:
    """Where the states of each reduction of `kernel` begin; under the empty name, where all end."""
    return dict(_offsets(kernel, members, teams))


def _offsets(kernel: Kernel, members: int, teams: int) -> Iterator[tuple[str, int]]:
    at = 0
    for reduction in kernel.reductions:
        yield reduction.name, at
        room = _TURNS * _TAGGED * teams * members * state_bytes(reduction)
        at += -(-room // _ALIGNMENT) * _ALIGNMENT
    yield "", at
