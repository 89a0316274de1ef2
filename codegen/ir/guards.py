"""The conditions under which an expression's loads are reached."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from fusepass.codegen.ir.expr import Expr, Load, Masked, Window, children
from fusepass.codegen.ir.index import Bound

Guard = tuple[Bound, ...]


def guarded_loads(roots: Sequence[Expr], known: Collection[Expr] = ()) -> Iterator[tuple[Load, Guard | None]]:
    """Each load outside of windows with what must hold for it; None where that is no conjunction. What is below `known` is not needed."""
    found: dict[int, tuple[Load, dict[Guard, None]]] = {}
    stop = {id(node) for node in known}
    seen: set[tuple[int, Guard]] = set()
    stack: list[tuple[Expr, Guard]] = [(root, ()) for root in reversed(roots)]
    while stack:
        node, guard = stack.pop()
        if id(node) in stop or (id(node), guard) in seen or isinstance(node, Window):
            continue
        seen.add((id(node), guard))
        match node:
            case Load():
                found.setdefault(id(node), (node, {}))[1][guard] = None
            case Masked(mask, value, other, _):
                stack += [(other, guard), (value, _both(guard, mask))]
            case _:
                stack += [(child, guard) for child in reversed(children(node))]
    return ((load, either([*guards])) for load, guards in found.values())


def _both(guard: Guard, mask: Guard) -> Guard:
    """What holds where both do: one bound for each index."""
    found = {bound.index: bound for bound in guard}
    for bound in mask:
        known = found.get(bound.index, bound)
        found[bound.index] = Bound(bound.index, max(known.low, bound.low), min(known.high, bound.high))
    return tuple(found.values())


def either(guards: Sequence[Guard]) -> Guard | None:
    """What holds where one of `guards` does; None where no conjunction says so.

    An element lies in one of the pieces of a concatenation: what all of them load at one place is always loaded.
    """
    first, *others = guards
    shared = tuple(bound for bound in first if all(bound in other for other in others))
    rest = [tuple(bound for bound in guard if bound not in shared) for guard in guards]
    if () in rest:
        return shared
    if any(len(each) != 1 for each in rest) or len({each[0].index for each in rest}) != 1:
        return None
    merged, *pieces = sorted((bound for (bound,) in rest), key=lambda bound: bound.low)
    for piece in pieces:
        if piece.low > merged.high:
            return None
        merged = Bound(merged.index, merged.low, max(merged.high, piece.high))
    return shared if merged.always else (*shared, merged)
