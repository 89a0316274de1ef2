"""Rewrites a graph by rules, to a bounded fixpoint, before it is partitioned."""

from __future__ import annotations

import operator
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch._ops import OpOverload

from fusepass.codegen.lowering.rounding import ROUNDED
from fusepass.config import Algebra, current
from fusepass.patterns.aliasing import BATCH_NORMS, base, call_of, change_seen, written
from fusepass.patterns.arguments import key_of
from fusepass.patterns.cost import NOTHING, Cost, cost, dying
from fusepass.patterns.dataflow import remove_dead
from fusepass.patterns.deciding import note_rounded
from fusepass.patterns.effects import is_random, writes
from fusepass.patterns.matcher import Declined, Match
from fusepass.patterns.memo import remembered
from fusepass.patterns.once import each_call
from fusepass.patterns.rule import Rule
from fusepass.patterns.rules import RULES
from fusepass.patterns.search import Ways, may_be, possible
from fusepass.patterns.worklist import Worklist, Worklists

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
    note_rounded(graph)
    if config.algebra is not Algebra.OFF:
        allowed = [rule for rule in rules if config.allows(rule.name) and config.algebra.takes_in(rule.level)]
        early, late = (_Index([rule for rule in allowed if rule.early is first]) for first in (True, False))
        early_worklist, worklist = Worklist(), Worklist()
        worklists = Worklists(early_worklist, worklist)
        if config.allows(COMMON_SUBEXPRESSION):
            applications += _share_common(
                graph, worklists
            )  # what is written twice has two readers, which rules ask for
        settled = -1
        for _ in range(MOST_ROUNDS):
            for _ in range(MOST_EARLY):
                applications += _apply_rules(early, early_worklist, graph, worklists)
                if not early_worklist.end_pass():
                    break
            applications += _apply_rules(late, worklist, graph, worklists)
            if len(applications) > settled:
                remove_dead(graph)
                if config.allows(COMMON_SUBEXPRESSION):
                    applications += _share_common(graph, worklists)
                settled = len(applications)
            if not worklist.end_pass():
                break
    if config.debug:
        graph.lint()
    if applications or len(graph.nodes) < size:
        graph_module.recompile()
    return applications


def replace_match(rule: Rule, found: Match, worklists: Worklists) -> Application | str:
    """Put the result of `rule` in the place of `found`, and remove what nobody needs any more.

    Args:
        rule: what is done.
        found: where.
        worklists: are told of what changes.

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
        rounded = any(ROUNDED in node.meta for node in (*replaced, *gone))
        if rounded and not rule.exact:
            reason = "it would not be rounded as in eager, which counts here"
    if reason is None:
        before, after = cost(each_call(gone)), cost(each_call(made), replaced=replaced)
        # What is free, such as a view, needs no gain: it may let other rules apply.
        if after.seconds == 0 or (after.seconds, len(made)) < (before.seconds, len(gone)):
            for old, new in replaced.items():
                old.replace_all_uses_with(new)
            sources = {source for node in gone for source in node.all_input_nodes}
            for node in made if rounded else ():
                node.meta[ROUNDED] = True
            for node in gone:
                graph.erase_node(node)
            worklists.changed((sources - set(gone)) | set(made) | set(replaced.values()))
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


_CALL = "call_function"


class _Index:
    """The rules that may apply to a call, by its operator and those that make what it reads, in their order."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = rules
        self._called: dict[tuple[int, int], list[Rule]] = {}
        self._found: dict[tuple[int, ...], list[Rule]] = {}

    def __getitem__(self, node: fx.Node) -> Sequence[Rule]:
        call = call_of(node)
        # Operators live as long as the graph, and take longer to hash than to look up.
        called = id(node.target), id(call.target)
        if called not in self._called:
            self._called[called] = [rule for rule in self._rules if may_be(rule.pattern, node)]
        rules = self._called[called]
        if not rules:
            return rules
        key = (*called, *[id(source.target) if source.op == _CALL else 0 for source in call.all_input_nodes])
        if key not in self._found:
            self._found[key] = [rule for rule in rules if possible(rule.pattern, call)]
        return self._found[key]


def _apply_rules(index: _Index, worklist: Worklist, graph: fx.Graph, worklists: Worklists) -> list[Application]:
    """Try each node of the worklist's pass over `graph` with each rule, until one applies."""
    applications: list[Application] = []
    for node in worklist.nodes(graph):
        rules = () if node._erased else index[node]
        if rules:
            done = _first(rules, Ways(node, unwritten=worklist.unwritten), worklists)
            applications += [] if done is None else [done]
    return applications


def _first(rules: Sequence[Rule], ways: Ways, worklists: Worklists) -> Application | None:
    """What the first of `rules` does that applies in any way."""
    for rule in rules:
        for found in ways.of(rule.pattern):
            done = replace_match(rule, found, worklists)
            if isinstance(done, Application):
                return done
    return None


_METADATA = ("shape", "strides", "type", "device", "layout", "lazy conjugation", "lazy negation", "offset")


def _metadata_change(old: fx.Node, new: fx.Node) -> str | None:
    """How the fake results of the two differ besides in value, if they do."""
    if not all(isinstance(node.meta["val"], torch.Tensor) for node in (old, new)):
        return "it gives several tensors"  # and no two operators give the same
    before, after = _metadata(old), _metadata(new)
    if before == after:
        return None
    changed = zip(_METADATA, before, after, strict=True)
    return next(f"{name} {first} would become {second}" for name, first, second in changed if first != second)


def _metadata(node: fx.Node) -> tuple[object, ...]:
    value = node.meta["val"]
    offset = value.storage_offset() if base(node) is not node else 0
    lazy = value.is_conj(), value.is_neg()
    return (tuple(value.shape), value.stride(), value.dtype, value.device, value.layout, *lazy, offset)


def _share_common(graph: fx.Graph, worklists: Worklists) -> list[Application]:
    """Let operators that are called with the same arguments run once."""
    applications = []
    for node, twin in _twins(graph):
        applications.append(Application(COMMON_SUBEXPRESSION, node.name, cost([node])))
        _merge(node, twin)
        worklists.changed((twin,))
    return applications


def share_common(graph: fx.Graph) -> None:
    """Let operators that are called with the same arguments run once.

    PyTorch has this pass too (`fx_graph_cse`), but it takes -0.0 for 0.0, knows some random operators only, and imports
    SymPy and TorchInductor's patterns, which takes more than a second.
    """
    for node, twin in _twins(graph):
        _merge(node, twin)


def _merge(node: fx.Node, twin: fx.Node) -> None:
    node.replace_all_uses_with(twin)
    node.graph.erase_node(node)


def _twins(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Operators with an earlier one in whose place nobody can tell them from it, which the caller is to merge at once."""
    similar: dict[Hashable, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != _CALL:
            continue
        if writes(node.target) and any(written(node)):
            similar.clear()  # the same call may read something else from now on
        if not _may_share(node.target):
            continue
        twin = similar.setdefault((id(node.target), key_of(node.args), key_of(node.kwargs)), node)
        if twin is not node and change_seen(node, twin) is None:
            yield node, twin


@remembered
def _may_share(target: object) -> bool:
    """Whether calling the operator once does for calling it twice."""
    if target is operator.getitem:
        return True
    return isinstance(target, OpOverload) and not (is_random(target) or writes(target) or target in BATCH_NORMS)
