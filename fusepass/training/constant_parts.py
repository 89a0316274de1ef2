"""A graph with sizes that only a call knows: its parts of constant sizes are fused, once for all sizes; what is left runs as its operators.

A cache that grows by a token with each call has another size in each, but little reads it: a concatenation, attention, a mask. All else
of a step (norms, products, activations, rotations) has the same sizes every time. So the graph is cut where sizes vary. Operators of
constant sizes between two cuts are one part; parts that are alike, as those of equal layers are, are compiled once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx._lazy_graph_module import _LazyGraphModule

from fusepass.autotune.kind import kind_of
from fusepass.compile.in_place import IN_PLACE, write_rows_in_place
from fusepass.compile.pipeline import CompiledGraph
from fusepass.compile.splice import empty_arguments, keep_code, subgraph, with_targets
from fusepass.compile.writes import trailing
from fusepass.patterns.aliasing import base, is_view, readers
from fusepass.patterns.dataflow import has_effect
from fusepass.patterns.effects import draws, is_random, writes
from fusepass.patterns.opclass import OpClass, direct_class
from fusepass.runtime.fast_path import types
from fusepass.runtime.meta import laid
from fusepass.runtime.operators import shorten

Call = Callable[..., Any]

_LEAST_KEPT = 4
"""How many times the bytes that fusion may save in parts of constant sizes must exceed those that it might save elsewhere: less, and
the graph is better compiled for each set of sizes."""


@dataclass(frozen=True, eq=False)
class Part:
    """Operators of constant sizes that run together.

    Attributes:
        nodes: of a graph, in order, behind the constants that they read.
    """

    nodes: tuple[fx.Node, ...]

    @cached_property
    def inputs(self) -> tuple[fx.Node, ...]:
        """What they read of others."""
        inside = {*self.nodes}
        read = (each for node in self.nodes for each in node.all_input_nodes)
        return tuple(dict.fromkeys(each for each in read if each not in inside))

    @cached_property
    def outputs(self) -> tuple[fx.Node, ...]:
        """Those that others read."""
        inside = {*self.nodes}
        return tuple(node for node in self.nodes if node.op != "get_attr" and not inside.issuperset(node.users))


def constant_parts(graph: fx.Graph, *, alone: bool = False) -> dict[int, Part]:
    """The parts of a graph with symbolic sizes, by their stage (`_stages`); none where it is better compiled for each set of sizes.

    Args:
        graph: ATen operators; every node that stands for a value has it in ``meta["val"]``.
        alone: whether it cannot be compiled for a set of sizes, as some depend on data.
    """
    constant = _constant(graph)
    stages = _stages(graph, constant)
    if stages is None or not _pays(graph, constant, alone=alone):
        return {}
    found: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        if node in constant:
            found.setdefault(stages[node], []).append(node)
    return {stage: Part((*_attributes(nodes), *nodes)) for stage, nodes in found.items()}


def _constant(graph: fx.Graph) -> set[fx.Node]:
    """The operators that neither read nor give anything of a size that varies, and do nothing else.

    None writes rows of an input, nor is it a view of what is written: who else reads that is to be seen (`write_rows_in_place`).
    """
    written = {write.args[0] for write in trailing(graph)}
    found = set[fx.Node]()
    for node in graph.nodes:
        if node.target is operator.getitem:
            own = node.all_input_nodes[0] in found
        else:
            owner = base(node)
            own = _has_constant_sizes(node) and not (owner in written and is_view(node.target))
            own = own and owner.target not in IN_PLACE
        if own:
            found.add(node)
    return found


def _has_constant_sizes(node: fx.Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, OpOverload) or _does_more(node):
        return False
    values = [node.meta.get("val"), *(read.meta.get("val") for read in node.all_input_nodes)]
    parts = [each for value in values for each in (value if isinstance(value, tuple | list) else (value,))]
    return all(isinstance(each, torch.Tensor) and not each._has_symbolic_sizes_strides for each in parts)


def _does_more(node: fx.Node) -> bool:
    """Whether `node` does more than give a result; attention without dropout does not."""
    return draws(node) or (has_effect(node) and not is_random(node.target))


def _stages(graph: fx.Graph, constant: set[fx.Node]) -> dict[fx.Node, int] | None:
    """When each node runs: in a stage come the `constant` ones first, then the others, each in their order.

    Those that are constant run as late as what reads them allows, so that a value that many layers read, or the view of a weight, is
    beside its first reader. None where the order of nodes counts: random numbers are drawn, or something is written before the end.
    """
    stages: dict[fx.Node, int] = {}
    ended = False
    for node in graph.nodes:
        if draws(node) or (ended and node.op != "output" and not writes(node.target)):
            return None
        ended |= writes(node.target)
        behind = node in constant  # what is not constant comes in an earlier stage
        found = [
            stages[each] + (behind and each.op == "call_function" and each not in constant)
            for each in node.all_input_nodes
        ]
        stages[node] = max(stages.values(), default=0) if ended else max(found, default=0)
    for node in reversed(graph.nodes):
        if node in constant and node.target is not operator.getitem:
            results = [user for user in node.users if user.target is operator.getitem]
            stages[node] = min((stages[user] for user in node.users if user.op != "output"), default=stages[node])
            stages.update(dict.fromkeys(results, stages[node]))
    return stages


def _pays(graph: fx.Graph, constant: set[fx.Node], *, alone: bool) -> bool:
    """Whether the values that fusion may keep on the chip are mostly of constant sizes: those that two operators of generated code pass on.
    Others do not count where fusion may keep these `alone`."""
    saved = {True: 0, False: 0}
    for node in filter(_may_fuse, graph.nodes):
        own = node in constant
        if alone and not own:
            continue
        if any(_may_fuse(reader) and (reader in constant) is own for reader in readers(node)):
            saved[own] += _bytes(node.meta["val"])
    return saved[True] > _LEAST_KEPT * saved[False]


def _may_fuse(node: fx.Node) -> bool:
    """Whether there is generated code for an operator that moves memory."""
    return isinstance(node.target, OpOverload) and direct_class(node.target) not in (OpClass.VIEW, OpClass.OTHER)


def _bytes(value: Any) -> int:
    """Bytes of a tensor, as many as it had in the call that was traced; 0 for others."""
    if not isinstance(value, torch.Tensor):
        return 0
    count = value.element_size()
    for size in value.shape:
        count *= (size.node.hint or 1) if isinstance(size, torch.SymInt) else size
    return count


def _attributes(nodes: Sequence[fx.Node]) -> dict[fx.Node, None]:
    """The constants that `nodes` read."""
    return {each: None for node in nodes for each in node.all_input_nodes if each.op == "get_attr"}


class ConstantParts:
    """A graph of which parts are fused, for calls of any sizes. Each empties the list that it takes.

    Args:
        graph: as `constant_parts` took it.
        parts: what that gave.
        compile_part: compiles a graph of constant sizes.
    """

    def __init__(
        self, graph: fx.GraphModule, parts: Mapping[int, Part], compile_part: Callable[[fx.GraphModule], CompiledGraph]
    ) -> None:
        known: dict[Hashable, CompiledGraph] = {}
        self._parts: dict[int, CompiledGraph] | None = {}
        for stage, part in parts.items():
            inner = subgraph(graph, part)
            constants = inner.graph.find_nodes(op="get_attr")
            kind = kind_of(inner.graph, {node.name: id(getattr(inner, str(node.target))) for node in constants})
            if kind not in known:
                known[kind] = compile_part(inner)
            self._parts[stage] = known[kind]
        self._runs = {stage: _own(compiled.call) for stage, compiled in self._parts.items()}
        self._whole = _around(graph, parts, self._runs)
        self._call: Call = self._whole.forward

    def best(self) -> tuple[Call, bool]:
        """The call, and whether it stays the best one: without Python for regions, once the library is there that calls them so."""
        parts = self._parts
        if parts is not None and types() is not None:
            others = {self._runs[stage]: _of_all(*made.without_python()) for stage, made in parts.items()}
            self._call, self._parts = with_targets(self._whole, others), None
        return self._call, self._parts is None


def _own(call: Call) -> Call:
    """A function that does as `call` and is no other's."""

    def part(*arguments: torch.Tensor) -> Any:
        return call(*arguments)

    return part


def _of_all(run: Call, positions: Sequence[int]) -> Call:
    """`run`, which takes those at `positions` of what is given, of all."""
    if isinstance(positions, range):
        return run
    return lambda *arguments: run(*[arguments[position] for position in positions])


def _around(graph: fx.GraphModule, parts: Mapping[int, Part], runs: Mapping[int, Call]) -> _LazyGraphModule:
    """`graph` with calls of `runs` in place of its parts, which get their arguments in the strides in which they are described."""
    inside = {node for part in parts.values() for node in part.nodes if node.op != "get_attr"}
    stages = _stages(graph.graph, _constant(graph.graph))
    assert stages is not None, "it has parts"
    others = [node for node in graph.graph.nodes if node not in inside and node.op != "output"]
    items: list[tuple[int, int, fx.Node | Part]] = [(stage, 0, part) for stage, part in parts.items()]
    items += [(stages[node] if node.op == "call_function" else -1, 1, node) for node in others]
    whole, copies = fx.Graph(), dict[fx.Node, fx.Node]()  # placeholders come before all stages
    for stage, _, item in sorted(items, key=lambda each: each[:2]):
        if isinstance(item, fx.Node):
            copies[item] = whole.node_copy(item, copies.__getitem__)
            continue
        for node in item.inputs:
            if node.op == "call_function" and node not in inside and copies[node].target is not laid:
                value = node.meta["val"]  # what it describes may be a guess
                copies[node] = whole.call_function(laid, (copies[node], tuple(value.shape), value.stride()))
                copies[node].meta = dict(node.meta)
        given = [copies[node] for node in item.inputs]
        results = whole.call_function(runs[stage], tuple(given))
        for number, node in enumerate(item.outputs):
            copies[node] = whole.call_function(operator.getitem, (results, number))
            copies[node].meta = dict(node.meta)
    whole.output(fx.node.map_arg(graph.graph.output_node().args[0], copies.__getitem__))
    made = _LazyGraphModule(graph, whole)
    write_rows_in_place(made)
    shorten(made)
    empty_arguments(whole)
    made.real_recompile()
    keep_code(made)
    return made
