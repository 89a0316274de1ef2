"""What a graph on a CPU makes of nothing but numbers is computed once, when the graph is compiled: masks of windows, places of tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx
from torch._ops import OpOverload

from fusepass import measure
from fusepass.codegen.lowering.modes import without_modes
from fusepass.config import current
from fusepass.patterns.aliasing import is_view, written
from fusepass.patterns.ancestors import ancestors
from fusepass.patterns.cost import cost
from fusepass.patterns.dataflow import remove_dead
from fusepass.patterns.effects import is_constant_number, is_random, writes
from fusepass.patterns.simplify import Application

aten = torch.ops.aten

CONSTANTS = "constants"
"""The name by which it is reported and disabled."""

_MOST = 2**20
"""Elements of a constant: what is kept takes little memory."""
_FEWEST = 4
"""Operators, views aside, from which on a constant is worth reading: a kernel computes fewer of them as quickly."""
_OF_SHAPES = frozenset({aten.new_zeros, aten.new_ones, aten.new_full, aten.zeros_like, aten.ones_like, aten.full_like})
"""Operators that take of a tensor its shape, type and device alone."""


def compute_constants(graph_module: fx.GraphModule) -> list[Application]:
    """Replace what is computed of nothing by attributes of `graph_module`, in place. What a caller may see, or what somebody writes to, stays."""
    if not current().allows(CONSTANTS):
        return []
    graph, applied = graph_module.graph, list[Application]()
    made = _made_of_nothing(graph)
    for node in made:
        if not _is_worth_it(node, made) or not all(user in made or _reads(user) for user in node.users):
            continue
        value = _value(graph_module, node, made)
        if value.stride() != node.meta["val"].stride():
            continue
        applied.append(Application(CONSTANTS, node.name, cost([*_below(node, made)])))
        name = _unused(graph_module)
        graph_module.register_buffer(name, value, persistent=False)
        with graph.inserting_before(node):
            constant = graph.get_attr(name)
        constant.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(constant, lambda user: user not in made)
    if applied:
        remove_dead(graph)
    return applied


def _made_of_nothing(graph: fx.Graph) -> dict[fx.Node, int]:
    """The nodes that read nothing but numbers, in order, each with how many operators make it at most, views aside."""
    made: dict[fx.Node, int] = {}
    for node in graph.nodes:
        sources = [] if getattr(node.target, "overloadpacket", None) in _OF_SHAPES else node.all_input_nodes
        if node.op == "get_attr" and is_constant_number(node):
            made[node] = 0
        elif _is_pure(node) and all(source in made for source in sources):
            made[node] = sum(made[source] for source in sources) + (not is_view(node.target))
    return made


def _is_pure(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(node.target, OpOverload) or not isinstance(value, torch.Tensor):
        return False
    if value.device.type != "cpu" or not all(isinstance(size, int) for size in value.shape) or value.numel() > _MOST:
        return False
    effects = is_random(node.target) or writes(node.target)
    return not effects and not any(node in written(user) for user in node.users)


def _is_worth_it(node: fx.Node, made: dict[fx.Node, int]) -> bool:
    return made[node] >= _FEWEST and any(user not in made for user in node.users)


def _reads(user: fx.Node) -> bool:
    """Whether `user` makes memory of its own of what it reads."""
    return user.op == "call_function" and isinstance(user.target, OpOverload) and not is_view(user.target)


def _value(owner: fx.GraphModule, node: fx.Node, made: dict[fx.Node, int]) -> torch.Tensor:
    values: dict[fx.Node, torch.Tensor] = {}

    def known(source: fx.Node) -> torch.Tensor:
        return values[source] if source in values else _of_shape(source.meta["val"])

    with without_modes(), measure.as_compiled_code_runs(torch.device("cpu")):
        for each in _below(node, made):
            if each.op == "get_attr":
                values[each] = getattr(owner, str(each.target))
            else:
                args, kwargs = fx.map_arg((each.args, each.kwargs), known)
                values[each] = each.target(*args, **kwargs)  # type: ignore[operator]
    return values[node]


def _of_shape(value: torch.Tensor) -> torch.Tensor:
    """A tensor of the shape and type of `value`, of whose elements nothing is read."""
    return torch.empty((), dtype=value.dtype).expand(value.shape)


def _below(node: fx.Node, made: dict[fx.Node, int]) -> Iterator[fx.Node]:
    """`node` and all that it is made of, in order."""
    needed = ancestors([node], made)
    return (each for each in made if each in needed)


def _unused(graph_module: fx.GraphModule) -> str:
    number = 0
    while hasattr(graph_module, f"constant_{number}"):
        number += 1
    return f"constant_{number}"
