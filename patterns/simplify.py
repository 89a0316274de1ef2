"""Rewrites a graph by rules, to a bounded fixpoint, before it is partitioned."""

from __future__ import annotations

import operator
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch._ops import OpOverload

from fusepass.config import Algebra, current
from fusepass.patterns.agenda import Agenda, Agendas
from fusepass.patterns.aliasing import base, change_seen, written
from fusepass.patterns.arguments import key_of
from fusepass.patterns.cost import NOTHING, Cost, cost, dying
from fusepass.patterns.dataflow import remove_dead
from fusepass.patterns.legality import is_random
from fusepass.patterns.matcher import Declined, Match, is_called, matches
from fusepass.patterns.rule import Rule
from fusepass.patterns.rules import RULES

COMMON_SUBEXPRESSION = "common-subexpression"
"""Name of the pass that lets equal operators run once."""

MOST_ROUNDS = 10
"""Passes over the graph. Each rewrite makes the graph cheaper or is free, so that few are ever needed."""


MOST_EARLY = 3
"""Passes of the early rules in each of them; these rules bring what others look for into one form."""


@dataclass(frozen=True)
class Application:
    """One rewrite that took place.

    Attributes:
        rule: the name of the rule.
        node: the name of the node that was replaced.
        before: what the operators cost that went away.
        after: what those cost that came.
    """

    rule: str
    node: str
    before: Cost = NOTHING
    after: Cost = NOTHING


def simplify(graph_module: fx.GraphModule, rules: Sequence[Rule] = RULES) -> list[Application]:
    """Apply `rules` and common-subexpression elimination to the graph of `graph_module`, in place.

    Args:
        graph_module: flat functional ATen; every node has a fake tensor in ``meta["val"]``.
        rules: those that the options in force disable, or whose level they do not take in, are left out.

    Returns:
        The rewrites in the order in which they took place. Dead code is removed besides.
    """
    config = current()
    graph = graph_module.graph
    applications: list[Application] = []
    size = len(graph.nodes)
    remove_dead(graph)
    if config.algebra is not Algebra.OFF:
        allowed = [rule for rule in rules if config.allows(rule.name) and config.algebra.takes_in(rule.level)]
        early, late = (_Index([rule for rule in allowed if rule.early is first]) for first in (True, False))
        early_agenda, agenda = Agenda(), Agenda()
        agendas = Agendas(early_agenda, agenda)
        for _ in range(MOST_ROUNDS):
            for _ in range(MOST_EARLY):
                applications += _apply_rules(early, early_agenda, graph, agendas)
                if not early_agenda.end_pass():
                    break
            applications += _apply_rules(late, agenda, graph, agendas)
            remove_dead(graph)
            if config.allows(COMMON_SUBEXPRESSION):
                applications += _share_common(graph, agendas)
            if not agenda.end_pass():
                break
    if config.debug:
        graph.lint()
    if applications or len(graph.nodes) < size:
        graph_module.recompile()
    return applications


def replace_match(rule: Rule, found: Match, agendas: Agendas) -> Application | str:
    """Put the result of `rule` in the place of `found`, and remove what nobody needs any more.

    Args:
        rule: what is done.
        found: where.
        agendas: are told of what changes.

    Returns:
        What was done, or why the graph was left as it is.
    """
    for guard in rule.guards:
        reason = guard(found)
        if reason is not None:
            return reason
    root, graph = found.root, found.root.graph
    previous, replaced = root.prev, dict[fx.Node, fx.Node]()
    users = {old: len(old.users) for old in (root, *root.users)}
    try:
        replaced = _replaced(root, rule.rewrite(found))
        changes = (_metadata_change(*pair) or change_seen(*pair) for pair in replaced.items())
        reason = next(filter(None, changes), None)
        if any(len(old.users) > users[old] for old in replaced):
            reason = "the result reads what it is to replace"
    except Declined as declined:
        reason = str(declined)
    made = _made(root, previous, replaced.values())
    if reason is None:
        gone = dying(replaced)
        before, after = cost(gone), cost(made, replaced=replaced)
        # What is free, such as a view, needs no gain: it may let other rules apply.
        if after.seconds == 0 or (after.seconds, len(made)) < (before.seconds, len(gone)):
            for old, new in replaced.items():
                old.replace_all_uses_with(new)
            sources = {source for node in gone for source in node.all_input_nodes}
            for node in gone:
                graph.erase_node(node)
            agendas.changed((sources - set(gone)) | set(made) | set(replaced.values()))
            return Application(rule.name, root.name, before, after)
        reason = f"it would not pay: {after.seconds * 1e6:.2f} us instead of {before.seconds * 1e6:.2f} us"
    for node in made:
        graph.erase_node(node)
    return reason


def _replaced(root: fx.Node, result: fx.Node | Mapping[int, fx.Node]) -> dict[fx.Node, fx.Node]:
    """The nodes that give way, with what takes their places; of several results those that are used."""
    if isinstance(result, fx.Node):
        return {root: result}
    return {item: result[item.args[1]] for item in root.users}  # type: ignore[index]


def _made(root: fx.Node, previous: fx.Node, results: Collection[fx.Node]) -> list[fx.Node]:
    """The nodes between `previous` and `root`, last first, without those that neither others nor the `results` need."""
    made = []
    node = root.prev
    while node is not previous:
        earlier = node.prev
        if node.users or node in results:
            made.append(node)
        else:
            root.graph.erase_node(node)
        node = earlier
    return made


class _Index:
    """The rules that may apply to a call, by its operator, in their order."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = rules
        self._found: dict[tuple[int, bool], tuple[Rule, ...]] = {}

    def __getitem__(self, node: fx.Node) -> tuple[Rule, ...]:
        part = node.target is operator.getitem
        target = node.all_input_nodes[0].target if part else node.target
        key = id(target), part  # operators live as long as the process, and take longer to hash than to look up
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._fitting(target, part) if isinstance(target, OpOverload) else ()
        return found

    def _fitting(self, target: OpOverload, part: bool) -> tuple[Rule, ...]:
        rules = (rule for rule in self._rules if (rule.pattern.item is not None) == part)
        return tuple(rule for rule in rules if is_called(rule.pattern, target))


def _apply_rules(index: _Index, agenda: Agenda, graph: fx.Graph, agendas: Agendas) -> list[Application]:
    """Try each node of the agenda's pass over `graph` with each rule, until one applies."""
    applications: list[Application] = []
    for node in agenda.nodes(graph):
        for rule in () if node._erased else index[node]:
            done = _apply(rule, node, agenda.unwritten, agendas)
            if done is not None:
                applications.append(done)
                break
    return applications


def _apply(rule: Rule, node: fx.Node, unwritten: bool, agendas: Agendas) -> Application | None:
    """What `rule` does at `node`, if it applies there in any way."""
    for found in matches(rule.pattern, node, unwritten=unwritten):
        done = replace_match(rule, found, agendas)
        if isinstance(done, Application):
            return done
    return None


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


def _share_common(graph: fx.Graph, agendas: Agendas) -> list[Application]:
    """Let operators that are called with the same arguments run once.

    PyTorch has this pass too (`fx_graph_cse`), but it takes -0.0 for 0.0, knows some random operators only, and imports
    SymPy.
    """
    first: dict[Hashable, fx.Node] = {}
    applications = []
    for node in list(graph.nodes):
        if any(written(node)):
            first.clear()  # the same call may read something else from now on
        if node.op != "call_function" or not _may_share(node):
            continue
        twin = first.setdefault((id(node.target), key_of(node.args), key_of(node.kwargs)), node)
        if twin is not node and change_seen(node, twin) is None:
            applications.append(Application(COMMON_SUBEXPRESSION, node.name, cost([node])))
            node.replace_all_uses_with(twin)
            graph.erase_node(node)
            agendas.changed((twin,))
    return applications


def _may_share(node: fx.Node) -> bool:
    """Whether calling the operator once does for calling it twice."""
    if node.target is operator.getitem:
        return True
    target = node.target
    return isinstance(target, OpOverload) and not is_random(target) and not target._schema.is_mutable
