"""Regions of one graph that differ in nothing but names, as those of equal layers do: what becomes of one becomes of all of them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fusepass.autotune.work import Work
from fusepass.codegen.lowering.rounding import ROUNDED
from fusepass.runtime.meta import Meta


def note_alike(works: Sequence[Work]) -> None:
    """Tell each of `works` that is like an earlier one of them so."""
    known: dict[Hashable, Work] = {}
    for work in works:
        first = known.setdefault(_kind(work), work)
        work.like = None if first is work else first


def follow(work: Work) -> None:
    """Give `work` what was generated and built for the region that it is like."""
    first = work.like
    assert first is not None
    copies = {id(each): replace(each) for each in first.candidates}
    work.candidates = list(copies.values())
    work.candidate = None if first.candidate is None else copies[id(first.candidate)]
    work.offered, work.lost, work.choice, work.reason = first.offered, dict(first.lost), first.choice, first.reason


def _kind(work: Work) -> Hashable:
    return described(work.graph.graph, {node.name: repr(value.item()) for node, value in work.constants.items()})


def described(graph: fx.Graph, constants: Mapping[str, Hashable]) -> Hashable:
    """The operators of a graph, what they are called with, what all tensors look like, and the `constants` that nodes stand for, by name."""
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
