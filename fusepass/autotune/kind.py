"""What a region is but for names: its operators, what they are called with, and what all tensors look like."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import fx

from fusepass.codegen.lowering.rounding import ROUNDED
from fusepass.runtime.meta import Meta


def kind_of(graph: fx.Graph, constants: Mapping[str, Hashable]) -> Hashable:
    """Equal for graphs that differ in nothing but names; its text is the same in every process, if that of the `constants` is.

    Args:
        graph: its nodes carry ``meta["val"]``.
        constants: by the names of nodes, what those stand for that are fixed at capture.
    """
    numbers = {node: number for number, node in enumerate(graph.nodes)}
    return tuple(
        (
            node.op,
            node.target if node.op == "call_function" else constants.get(node.name),
            _described((node.args, node.kwargs), numbers),
            _described(node.meta.get("val"), numbers),
            ROUNDED in node.meta,
        )
        for node in graph.nodes
    )


def _described(value: Any, numbers: dict[fx.Node, int]) -> Hashable:
    """An argument, or what a node gives: of tensors all but their values, of nodes their place."""
    match value:
        case fx.Node():
            return ("node", numbers[value])
        case torch.Tensor():
            return Meta.of(value), value.device
        case tuple() | list():
            return tuple(_described(each, numbers) for each in value)
        case dict():
            return tuple((key, _described(each, numbers)) for key, each in value.items())
        case _:
            return (type(value), repr(value))
