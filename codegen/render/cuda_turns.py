"""Pieces of a concatenation that a thread of a CUDA kernel loads into one variable, as an element lies in one piece alone.

Each piece has a variable of its own as long as all of them fit a thread's registers. A compiler takes minutes to find out of more, such as
the fifty that a layer of a DenseNet reads, that a thread never needs two of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusepass.codegen.ir.concatenation import Concatenation, alike, concatenations
from fusepass.codegen.ir.expr import Expr, Load, walk
from fusepass.codegen.render.cuda_frame import Frame
from fusepass.codegen.render.cuda_loads import Ahead

_REGISTERS = 255  # of a thread, at most
_WORD = 4  # bytes of one


def in_turns(frame: Frame, roots: Sequence[Expr], ahead: Sequence[Ahead]) -> list[Ahead]:
    """`ahead`, with one variable for the pieces of each concatenation below `roots` that take more registers than a thread has."""
    ahead = list(ahead)
    if _registers(frame, ahead) <= _REGISTERS:
        return ahead
    for found in concatenations(roots):
        turns = _turns(found, ahead)
        if _registers(frame, turns) > _REGISTERS:
            there, taken = ahead.index(turns[0]), {id(each) for each in turns}
            before, after = (
                [each for each in part if id(each) not in taken] for part in (ahead[:there], ahead[there:])
            )
            ahead = [*before, *_in_one_variable(found, turns), *after]
    return ahead


def _turns(found: Concatenation, ahead: Sequence[Ahead]) -> list[Ahead]:
    """The loads that are all that their pieces load, and of one kind."""
    bounds = {id(load): bound for bound, value in found.pieces for load in walk(value) if isinstance(load, Load)}
    own = [each for each in ahead if each.guard and each.guard == (bounds.get(id(each.load)),)]
    own = [each for each in own if not (each.turn or each.whole or each.late or each.staged or each.under_way)]
    guards, kinds = [each.guard for each in own], [(each.load.dtype, each.lanes) for each in own]
    pairs = zip(own, kinds, strict=True)
    return [each for each, kind in pairs if kind == kinds[0] and guards.count(each.guard) == 1]


def _in_one_variable(found: Concatenation, turns: Sequence[Ahead]) -> list[Ahead]:
    first, *others = (value for _, value in found.pieces)
    same = len(turns) == len(found.pieces) and all(alike(first, value) for value in others)
    shared = [replace(each, name=turns[0].name, turn=turn) for turn, each in enumerate(turns)]
    return [replace(shared[0], whole=(found.whole, first) if same else None), *shared[1:]]


def _registers(frame: Frame, ahead: Sequence[Ahead]) -> int:
    """Of a thread that has all of `ahead` that it may do without."""
    elements = [(frame.schedule.width if each.lanes else 1) * each.load.dtype.nbytes for each in ahead if each.guard]
    return frame.unroll * sum(-(-nbytes // _WORD) for nbytes in elements)
