"""A tensor seen through views: its dimensions taken apart, in another order, some of them together."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import fx

aten = torch.ops.aten

RESHAPES = frozenset(
    {aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims}
)
ORDERS = frozenset({aten.permute.default, aten.transpose.int, aten.t.default})


def order_of(node: fx.Node) -> list[int]:
    """The dimensions of the input of a permutation in the order in which `node` shows them."""
    rank = node.meta["val"].dim()
    if node.target is aten.permute.default:
        return [dim % rank for dim in node.args[1]]  # type: ignore[union-attr]
    order = list(range(rank))
    first, second = node.args[1:] if node.target is aten.transpose.int else (0, 1)
    if rank > 1:
        order[first], order[second] = order[second], order[first]  # type: ignore[index]
    return order


@dataclass(frozen=True)
class Reordered:
    """How a node shows all elements of `source`.

    Attributes:
        source: a tensor that no view makes, or one of those that show a part of another.
        sizes: those that the dimensions of `source` come apart into, in its order; none is 1.
        groups: for each dimension of the node the places in `sizes` that it takes together, outermost first.
    """

    source: fx.Node
    sizes: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(node: fx.Node) -> Reordered:
        """`node`, as far as views lead that show all elements and come apart into the same sizes."""
        between = list[fx.Node]()
        source = node
        while source.target in RESHAPES | ORDERS:
            between.append(source)
            source = source.all_input_nodes[0]
        found = Reordered.of_itself(source)
        for view in reversed(between):
            if view.target in ORDERS:
                found = Reordered(source, found.sizes, tuple(found.groups[dim] for dim in order_of(view)))
                continue
            reshaped = found.reshaped(tuple(view.meta["val"].shape))
            if reshaped is None:
                return Reordered.of_itself(node)
            found = reshaped
        return found

    @staticmethod
    def of_itself(node: fx.Node) -> Reordered:
        """`node` as it is."""
        shape = tuple(node.meta["val"].shape)
        places = itertools.count()
        groups = tuple((next(places),) if size != 1 else () for size in shape)
        return Reordered(node, tuple(size for size in shape if size != 1), groups)

    @property
    def order(self) -> tuple[int, ...]:
        """All places in `sizes`, in the order in which the node shows them."""
        return tuple(place for group in self.groups for place in group)

    def reshaped(self, shape: Sequence[int]) -> Reordered | None:
        """The elements in the order in which they are shown, as this shape; None where a dimension does not come apart so."""
        if 0 in shape or 0 in self.sizes:
            return None
        found, rest, groups = self, list(self.order), list[tuple[int, ...]]()
        for wanted in shape:
            group = list[int]()
            while prod(found.sizes[place] for place in group) != wanted:
                if not rest:
                    return None
                left = wanted // prod(found.sizes[place] for place in group)
                if found.sizes[rest[0]] > left:
                    if left < 2 or found.sizes[rest[0]] % left:
                        return None
                    found, rest, group, groups = _split(found, rest, group, groups, left)
                group.append(rest.pop(0))
            groups.append(tuple(group))
        return Reordered(found.source, found.sizes, tuple(groups)) if not rest else None


def _split(
    found: Reordered, rest: list[int], group: list[int], groups: list[tuple[int, ...]], outer: int
) -> tuple[Reordered, list[int], list[int], list[tuple[int, ...]]]:
    """All of these with the first place of `rest` as two, of which `outer` is the size of the first."""
    at = rest[0]

    def moved(places: Sequence[int]) -> tuple[int, ...]:
        return tuple(new for place in places for new in ((at, at + 1) if place == at else (place + (place > at),)))

    sizes = (*found.sizes[:at], outer, found.sizes[at] // outer, *found.sizes[at + 1 :])
    split = Reordered(found.source, sizes, tuple(map(moved, found.groups)))
    return split, list(moved(rest)), list(moved(group)), [moved(each) for each in groups]
