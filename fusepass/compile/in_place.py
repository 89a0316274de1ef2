"""Rows of an input that a graph writes, as of a cache: they are written where they lie, not into a copy that is then copied back.

Tracing makes ``cache.index_copy_(2, place, keys)`` a new cache, and a write of all of it over the old one at the graph's end. Where nothing
reads the old one behind the operator, that one writes there itself, as in eager mode.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from fusepass.compile.writes import trailing
from fusepass.patterns.aliasing import base, escapes, readers
from fusepass.runtime.meta import Meta

aten = torch.ops.aten

IN_PLACE = {
    aten.index_copy.default: aten.index_copy_.default,
    aten.index_put.default: aten.index_put_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.index_fill.int_Scalar: aten.index_fill_.int_Scalar,
    aten.index_fill.int_Tensor: aten.index_fill_.int_Tensor,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.masked_scatter.default: aten.masked_scatter_.default,
}
"""Operators that copy their first argument and write some elements of the copy, with those that write to the argument itself."""


def write_rows_in_place(graph_module: fx.GraphModule) -> None:
    """Let operators that change some elements of an input of the graph do so in place, where the result is copied there at its end.

    Args:
        graph_module: flat; every node that stands for a tensor has it in ``meta["val"]``.
    """
    graph = graph_module.graph
    last = list(trailing(graph))
    if len({write.args[0] for write in last}) < len(last):
        return
    order = {node: number for number, node in enumerate(graph.nodes)}
    changed = False
    for write in last:
        target, value = write.args
        if not isinstance(value, fx.Node) or not isinstance(target, fx.Node):
            continue
        chain = list(_steps(value, target))
        if not chain or not _is_alone(write, chain, order):
            continue
        changed = True
        graph.erase_node(write)
        for node in chain:
            node.target = IN_PLACE[node.target]  # type: ignore[index]
    if changed:
        graph.lint()
        graph_module.recompile()


def _steps(value: fx.Node, target: fx.Node) -> Iterator[fx.Node]:
    """The operators that make `value` of `target`, the last one first; nothing where others do."""
    chain = []
    while value is not target:
        if value.target not in IN_PLACE or Meta.of(value.meta["val"]) != Meta.of(target.meta["val"]):
            return
        chain.append(value)
        value = value.args[0]  # type: ignore[assignment]
    yield from chain


def _is_alone(write: fx.Node, chain: list[fx.Node], order: dict[fx.Node, int]) -> bool:
    """Whether each step is behind all that reads what it changes, reads that nowhere else, and the last one's result is no result of the graph."""
    if escapes(chain[0], beside=write):
        return False
    for node in chain:
        source, *others = node.all_input_nodes
        if source is not node.args[0] or any(base(other) is base(source) for other in others):
            return False
        if any(order[reader] > order[node] for reader in readers(source, beside=node) if reader is not write):
            return False
    return True
