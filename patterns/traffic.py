"""Memory traffic of operators run one by one and of regions, in bytes: what candidates compete by."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from math import prod
from typing import Any

import torch
from torch import fx

from fusepass.patterns.dataflow import Unit
from fusepass.patterns.opclass import OpClass

_BIASED = frozenset({torch.ops.aten.addmm.default, torch.ops.aten.baddbmm.default})


def nbytes(tensor: torch.Tensor) -> int:
    """Bytes of memory that the elements of `tensor` occupy; a broadcast element counts once."""
    strides = tensor.stride()
    if 0 not in strides:
        return tensor.numel() * tensor.element_size()
    sizes = zip(tensor.shape, strides, strict=True)
    return tensor.element_size() * prod(size for size, stride in sizes if stride != 0)


def bytes_alone(unit: Unit) -> int:
    """Bytes that the unit moves when PyTorch runs it by itself.

    Inputs are read once, by a normalisation its first input twice (statistics, then result); results are written once.
    """
    read = [nbytes(source.meta["val"]) for source in unit.node.all_input_nodes]
    again = read[0] if unit.op_class is OpClass.NORMALISATION else 0
    return sum(read) + again + _bytes_written(unit.values)


def bytes_fused(
    nodes: Collection[fx.Node], inputs: Iterable[fx.Node], outputs: Iterable[fx.Node], views: Collection[fx.Node]
) -> int:
    """Bytes that a region of `nodes`, some of them `views`, moves at least: inputs read once, outputs written once."""
    return sum(_bytes_read(source, nodes, views) for source in inputs) + _bytes_written(outputs)


def bytes_of_bias(anchors: Iterable[fx.Node], outputs: Collection[fx.Node]) -> int:
    """Bytes that a kernel moves to give the result of biased matrix products that are read outside of their region, too.

    It reads what the library has computed and writes it once more, with the bias; in halves the library has added that. By
    itself the library writes the result at once.
    """
    biased = [node for node in anchors if node.target in _BIASED and node in outputs]
    return 2 * _bytes_written(biased)


def users_among(source: fx.Node, nodes: Collection[fx.Node]) -> list[fx.Node]:
    """Those of `nodes`, a set, that read `source`; found from the fewer of the two, as a value may have very many readers."""
    if len(nodes) < len(source.users):
        return [node for node in nodes if node in source.users]
    return [user for user in source.users if user in nodes]


def _bytes_read(source: fx.Node, nodes: Collection[fx.Node], views: Collection[fx.Node]) -> int:
    """Bytes of `source` that `nodes` read: of a tensor that they only slice, no more than the slices."""
    users = users_among(source, nodes)
    value: Any = source.meta["val"]
    sliced = sum(_bytes_read(user, nodes, views) for user in users if user in views)
    if not isinstance(value, torch.Tensor):
        return sliced
    return min(nbytes(value), sliced) if all(user in views for user in users) else nbytes(value)


def _bytes_written(values: Iterable[fx.Node]) -> int:
    return sum(nbytes(value.meta["val"]) for value in values)
