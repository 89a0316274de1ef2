"""What a graph does with a matrix product: what it makes of each row, and what of all rows together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from fusepass.compile.chunked import Made
from fusepass.compile.row_values import LOSS, TOTALS, TURNS, NotByRows

aten = torch.ops.aten


@dataclass(frozen=True)
class Uses:
    """What a graph does with a product.

    Attributes:
        wide: the product and values of as many columns that are made of it.
        turned: those of `wide` that are transposed, by what is.
        sinks: products and sums over all rows.
        exits: all else that reads `wide`.
        reductions: those of `exits` that take a row together.
    """

    wide: set[fx.Node]
    turned: dict[fx.Node, fx.Node] = field(default_factory=dict)
    sinks: dict[fx.Node, tuple[Made, fx.Node, fx.Node | None]] = field(default_factory=dict)
    exits: list[fx.Node] = field(default_factory=list)
    reductions: list[fx.Node] = field(default_factory=list)

    @staticmethod
    def of(product: fx.Node) -> Uses:
        """What is found by following `product` through its users."""
        uses, seen, waiting = Uses({product}), {product}, [product]
        for source in waiting:  # which grows
            for node in source.users:
                if node in seen or node.op != "call_function":
                    continue
                seen.add(node)
                if uses._is_followed(node, source, product.meta["val"].shape[1]):
                    waiting.append(node)
        return uses

    def _is_followed(self, node: fx.Node, source: fx.Node, width: int) -> bool:
        """Note what `node` makes of `source`; whether that is as wide."""
        value, made_of = _first(node), _first(source)
        matrix = isinstance(value, Tensor) and value.dim() > 1
        if node.target in TURNS and source in self.wide and matrix and value.dim() == 2 and value.shape[0] == width:
            self.turned[node] = source
            return True
        sink = self._sink(node)
        if sink is not None:
            self.sinks[node] = sink
            return False
        if source in self.wide and matrix and value.shape[-1] == width:
            self.wide.add(node)
            return True
        self.exits.append(node)
        by_rows = isinstance(value, Tensor) and value.numel() * width == made_of.numel()
        if by_rows or node.target in (LOSS, *TOTALS):
            self.reductions.append(node)
        return False

    def _sink(self, node: fx.Node) -> tuple[Made, fx.Node, fx.Node | None] | None:
        given: list[Any] = [*node.args]
        if node.target is aten.mm.default:
            left, right = given
            if left in self.wide and right not in self.wide:
                return Made.ROWS, left, right
            if left in self.turned and right not in self.wide:
                return Made.LEFT, self.turned[left], right
            if right in self.wide and left not in self.wide:
                return Made.RIGHT, right, left
        if node.target is aten.sum.dim_IntList and not node.kwargs:
            source, dims = given[:2]
            rank = source.meta["val"].dim()
            if source in self.wide and sorted(dim % rank for dim in dims or ()) == [*range(rank - 1)]:
                return Made.SUM, source, None
        return None

    def needed(self, graph: fx.Graph) -> tuple[list[fx.Node], list[fx.Node]]:
        """The sinks and the exits that the results of `graph` need.

        Raises:
            NotByRows: they need a wide value.
        """
        sinks, exits = dict[fx.Node, None](), dict[fx.Node, None]()
        seen, stack = set[fx.Node](), [graph.output_node()]
        while stack:
            node = stack.pop()
            if node in self.sinks:
                sinks[node] = None
            elif node in self.exits:
                exits[node] = None
            else:
                for each in node.all_input_nodes:
                    if each in self.wide or each in self.turned:
                        raise NotByRows(f"{'a result' if node.op == 'output' else node.name} has as many numbers")
                    if each not in seen:
                        seen.add(each)
                        stack.append(each)
        return [*sinks], [*exits]


def _first(node: fx.Node) -> Any:
    """What a node's result looks like, or the first of several."""
    value = node.meta.get("val")
    return value[0] if isinstance(value, tuple | list) and value else value
