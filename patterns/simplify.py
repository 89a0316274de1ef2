"""Rewrites a graph by rules, to a bounded fixpoint, before it is partitioned."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils import _pytree as pytree

from fusepass.config import current
from fusepass.patterns.aliasing import base, change_seen, written
from fusepass.patterns.dataflow import remove_dead
from fusepass.patterns.legality import is_random
from fusepass.patterns.matcher import Declined, Match, Mismatch, match
from fusepass.patterns.rule import Rule
from fusepass.patterns.rules import RULES

COMMON_SUBEXPRESSION = "common-subexpression"
"""Name of the pass that lets equal operators run once."""

MOST_ROUNDS = 10
"""Passes over the graph. Rules make a graph smaller or leave its size, so that few are ever needed."""


@dataclass(frozen=True)
class Application:
    """One rewrite that took place.

    Attributes:
        rule: the name of the rule.
        node: the name of the node that was replaced.
    """

    rule: str
    node: str


def simplify(graph_module: fx.GraphModule, rules: Sequence[Rule] = RULES) -> list[Application]:
    """Apply `rules` and common-subexpression elimination to the graph of `graph_module`, in place.

    Args:
        graph_module: flat functional ATen; every node has a fake tensor in ``meta["val"]``.
        rules: those that the options in force disable are left out.

    Returns:
        The rewrites in the order in which they took place. Dead code is removed besides.
    """
    config = current()
    allowed = [rule for rule in rules if config.allows(rule.name)]
    applications: list[Application] = []
    for _ in range(MOST_ROUNDS):
        before = len(applications)
        applications += _apply_rules(graph_module.graph, allowed)
        remove_dead(graph_module.graph)
        if config.allows(COMMON_SUBEXPRESSION):
            applications += _share_common(graph_module)
        if len(applications) == before:
            break
    graph_module.graph.lint()
    graph_module.recompile()
    return applications


def replace_match(rule: Rule, found: Match) -> str | None:
    """Put the result of `rule` in the place of `found`.

    Returns:
        None, or why the graph was left as it is.
    """
    root, graph = found.root, found.root.graph
    reason = next((reason for guard in rule.guards if (reason := guard(found)) is not None), None)
    if reason is not None:
        return reason
    previous, users = root.prev, len(root.users)
    try:
        result = rule.rewrite(found)
        reason = _metadata_change(root, result) or change_seen(root, result)
        if len(root.users) > users:
            reason = "the result reads what it is to replace"
    except Declined as declined:
        reason = str(declined)
    if reason is None:
        root.replace_all_uses_with(result)
        graph.erase_node(root)
        return None
    while root.prev is not previous:
        graph.erase_node(root.prev)
    return reason


def _apply_rules(graph: fx.Graph, rules: Iterable[Rule]) -> list[Application]:
    """One pass over the graph: each node is tried with each rule, until one applies."""
    by_packet: dict[OpOverloadPacket, list[Rule]] = defaultdict(list)
    by_class = [rule for rule in rules if not rule.pattern.packets]
    for rule in rules:
        for packet in rule.pattern.packets:
            by_packet[packet].append(rule)
    applications = []
    for node in list(graph.nodes):
        if not isinstance(node.target, OpOverload):
            continue
        for rule in (*by_packet.get(node.target.overloadpacket, ()), *by_class):
            found = match(rule.pattern, node)
            if not isinstance(found, Mismatch) and replace_match(rule, found) is None:
                applications.append(Application(rule.name, node.name))
                break
    return applications


def _metadata_change(old: fx.Node, new: fx.Node) -> str | None:
    """How the fake results of the two differ besides in value, if they do."""
    before, after = _metadata(old), _metadata(new)
    changed = (name for name in before if name not in after or before[name] != after[name])
    return next((f"{name} {before[name]} would become {after.get(name, 'one tensor')}" for name in changed), None)


def _metadata(node: fx.Node) -> dict[str, object]:
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        return {"result": node}  # several tensors: no two operators give the same
    return {
        "shape": tuple(value.shape),
        "strides": value.stride(),
        "offset": value.storage_offset() if base(node) is not node else 0,
        "type": value.dtype,
        "device": value.device,
        "layout": value.layout,
        "lazy conjugation or negation": (value.is_conj(), value.is_neg()),
    }


def _share_common(graph_module: fx.GraphModule) -> list[Application]:
    """Let operators that are called with the same arguments run once.

    PyTorch has this pass too (`fx_graph_cse`), but it takes -0.0 for 0.0, knows some random operators only, and imports
    SymPy.
    """
    graph = graph_module.graph
    first: dict[Hashable, fx.Node] = {}
    applications = []
    for node in list(graph.nodes):
        if any(written(node)):
            first.clear()  # the same call may read something else from now on
        if node.op != "call_function" or not _may_share(node):
            continue
        leaves, form = pytree.tree_flatten((node.args, node.kwargs))
        key = (node.target, str(form), tuple((type(leaf), leaf, repr(leaf)) for leaf in leaves))
        twin = first.setdefault(key, node)
        if twin is not node and change_seen(node, twin) is None:
            node.replace_all_uses_with(twin)
            graph.erase_node(node)
            applications.append(Application(COMMON_SUBEXPRESSION, node.name))
    return applications


def _may_share(node: fx.Node) -> bool:
    """Whether calling the operator once does for calling it twice."""
    if node.target is operator.getitem:
        return True
    target = node.target
    return isinstance(target, OpOverload) and not is_random(target) and not target._schema.is_mutable
