"""Tries many patterns at one node: quick looks spare most searches, and what patterns have in common is found once."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx
from torch._ops import OpOverload

from fusepass.patterns.language import Call, Const, Flat
from fusepass.patterns.matcher import Match, every, is_called


class Ways:
    """The ways in which `node` is an instance of patterns that are `possible`, while nothing changes.

    Args:
        node: a call of an operator.
        unwritten: for `Match`.
    """

    def __init__(self, node: fx.Node, *, unwritten: bool = False) -> None:
        self._node = node
        self._unwritten = unwritten
        self._known: dict[Flat, Sequence[Match] | None] = {}

    def of(self, pattern: Call) -> Iterable[Match]:
        """Every way in which the node is an instance of `pattern`."""
        flat = pattern.flat
        if flat is not None:
            if flat not in self._known:
                self._known[flat] = _flat(flat, self._node, self._unwritten)
            found = self._known[flat]
            if found is not None:
                return found
        return every(pattern, self._node, unwritten=self._unwritten) if _plausible(pattern, self._node) else ()


def may_be(pattern: Call, node: fx.Node) -> bool:
    """Whether `node` calls an operator of `pattern`, or is one of the results of such a call."""
    if pattern.item is None:
        return isinstance(node.target, OpOverload) and is_called(pattern, node.target)
    return node.target is operator.getitem and may_be(pattern.producer, node.all_input_nodes[0])


def possible(pattern: Call, call: fx.Node) -> bool:
    """Whether what `call` reads, which `may_be` an instance of `pattern`, are calls of operators that it asks for."""
    operands = (operand for operand in pattern.args if isinstance(operand, Call))
    return all(any(may_be(operand, source) for source in call.all_input_nodes) for operand in operands)


def _flat(flat: Flat, node: fx.Node, unwritten: bool) -> Sequence[Match] | None:
    """The matches of a call on any tensors; None where the arguments of `node` must be sorted out first."""
    given, count = node.args, len(flat.names)
    if not (flat.open and len(given) >= count) and (len(given) != count or node.kwargs):
        return None
    values = given[:count]
    if not all(isinstance(value, fx.Node) for value in values):
        return ()
    nodes, captures = frozenset((node,)), dict[str, Any](zip(flat.names, values, strict=True))
    if flat.name is not None:
        captures[flat.name] = node
    found = Match(node, nodes, captures, unwritten)
    if not flat.commutative:
        return (found,)
    first, second, *_ = flat.names
    return found, Match(node, nodes, {**captures, first: values[1], second: values[0]}, unwritten)


def _plausible(pattern: Call, node: fx.Node) -> bool:
    """Whether the numbers that `node` is given may be those of `pattern`."""
    if pattern.item is not None:
        (node,) = node.all_input_nodes
    for operand in pattern.args:
        if isinstance(operand, Const) and len(node.args) >= len(pattern.args):
            values = (value for value in node.args if not isinstance(value, fx.Node))
            if not any(operand.accepts(value) for value in values):
                return False
    return True
