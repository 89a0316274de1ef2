"""Values that are one of several pieces wherever they are computed, as those of a concatenation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fusepass.codegen.ir.expr import Apply, Expr, Load, Masked, walk
from fusepass.codegen.ir.index import Bound


@dataclass(frozen=True)
class Concatenation:
    """`whole` is the value of the piece whose bound holds: always one of them, and never two."""

    whole: Masked
    pieces: tuple[tuple[Bound, Expr], ...]


def concatenations(roots: Sequence[Expr]) -> Iterator[Concatenation]:
    """Those below `roots`, each as a whole."""
    nodes = [node for node in walk(*roots) if isinstance(node, Masked)]
    inner = {id(node.other) for node in nodes}
    for node in nodes:
        found = _concatenation(node) if id(node) not in inner else None
        if found is not None:
            yield found


def _concatenation(whole: Masked) -> Concatenation | None:
    """`whole` as a concatenation; None where it is a choice of another kind."""
    pieces: list[tuple[Bound, Expr]] = []
    node: Expr = whole
    while isinstance(node, Masked) and len(node.mask) == 1:
        pieces.append((node.mask[0], node.value))
        node = node.other
    pieces.sort(key=lambda piece: piece[0].low)
    bounds = [bound for bound, _ in pieces]
    low, high = bounds[0].index.bounds if bounds else (0, 0)
    follow = all(a.index == b.index and a.high == b.low for a, b in pairwise(bounds))
    if len(bounds) < 2 or not follow or bounds[0].low > low or bounds[-1].high <= high:
        return None
    return Concatenation(whole, tuple(pieces))


def alike(one: Expr, other: Expr) -> bool:
    """Whether two values are the same function of what each of them loads."""
    match one, other:
        case Load(), Load():
            return one.dtype is other.dtype
        case Apply(), Apply():
            same = one.op is other.op and one.dtype is other.dtype and len(one.args) == len(other.args)
            return same and all(map(alike, one.args, other.args))
        case _:
            return one is other
