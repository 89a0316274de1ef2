"""A flat graph of operators as data and back: no pickle and no Python text, so that reading it runs nothing.

`torch.export`'s serialiser writes whole exported programs, reads tensors by `torch.load`, and imports SymPy, which alone takes most of
the second that an artifact may take to load. A flat graph of static sizes needs little of it: names of operators, and plain arguments.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

import fusepass.runtime.masks  # noqa: F401, which registers an operator that graphs may call
from fusepass.codegen.plain import UNKNOWN, decode, encode
from fusepass.errors import ArtifactError
from fusepass.runtime.meta import laid
from fusepass.runtime.operators import cast_all, plain_cast, reinterpret, shorter

_OF_SIZES = ("add", "floordiv", "ge", "le", "mod", "mul", "neg", "sub")
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "getitem": operator.getitem,
    "cast_all": cast_all,
    "laid": laid,
    "reinterpret": reinterpret,
    "to": torch.Tensor.to,
    **{name: getattr(operator, name) for name in _OF_SIZES},
}
"""What graphs call beside registered operators, by name."""

_NAMES = {function: name for name, function in _FUNCTIONS.items()}


class Constants:
    """The tensors that graphs hold, each under a name of its own.

    Attributes:
        tensors: by name.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[int, str] = {}

    def name(self, tensor: torch.Tensor) -> str:
        """The name of `tensor`."""
        name = self._names.setdefault(id(tensor), f"constant_{len(self._names)}")
        self.tensors[name] = tensor
        return name


def graph_data(owner: fx.GraphModule, calls: Mapping[Any, int], constants: Constants) -> list[Any]:
    """The nodes of `owner` in order, as JSON holds them.

    Args:
        owner: takes tensors, gives a tuple of tensors; calls operators of `torch.ops` and keys of `calls`.
        calls: the number of each further function that it calls.
        constants: receives the tensors that it holds.

    Raises:
        ArtifactError: it holds something else.
    """
    numbers = {node: number for number, node in enumerate(owner.graph.nodes)}

    def reference(value: Any) -> Any:
        return {"node": numbers[value]} if isinstance(value, fx.Node) else UNKNOWN

    return [_node(owner, node, calls, constants, reference) for node in owner.graph.nodes]


def _node(
    owner: fx.GraphModule,
    node: fx.Node,
    calls: Mapping[Any, int],
    constants: Constants,
    reference: Callable[[Any], Any],
) -> dict[str, Any]:
    if node.op == "placeholder":
        return {"op": "input", "name": node.name}
    if node.op == "output":
        return {"op": "output", "args": _sequence(node.args[0], reference)}
    if node.op == "get_attr":
        value = getattr(owner, str(node.target), None)
        if isinstance(value, torch.Tensor):
            return {"op": "constant", "name": node.name, "tensor": constants.name(value)}
    elif node.op == "call_function":
        called, args, kwargs = plain_cast(node) or (node.target, node.args, node.kwargs)
        target = calls.get(called, _name(called))
        if target is not None:
            data = {"op": "call", "name": node.name, "target": target, "args": _sequence(args, reference)}
            kwargs = {name: encode(_plain(value), reference) for name, value in kwargs.items()}
            return data | ({"kwargs": kwargs} if kwargs else {})
    raise ArtifactError(f"{node.op} {node.target} cannot be written to an artifact")


def _sequence(values: Any, reference: Callable[[Any], Any]) -> list[Any]:
    return [encode(_plain(value), reference) for value in values]


def _plain(value: Any) -> Any:
    """`value` without torch.fx's own kinds of lists and dicts."""
    if isinstance(value, list):
        return list(map(_plain, value))
    if isinstance(value, tuple) and type(value) is not torch.Size:
        return tuple(map(_plain, value))
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return value


def _name(target: Any) -> str | None:
    return target.name() if isinstance(target, torch._ops.OpOverload) else _NAMES.get(target)


def graph_of(
    data: Sequence[Any],
    calls: Sequence[Callable[..., Any]],
    constants: Mapping[str, torch.Tensor],
    device: Callable[[str], torch.device],
) -> fx.GraphModule:
    """The graph of which `graph_data` made `data`; operators are called the shorter way.

    Args:
        calls: the functions that it calls by number.
        constants: by name.
        device: gives the device to use in place of one by name.

    Raises:
        ArtifactError: it is no such graph, or an operator is not registered in this process.
    """
    graph = fx.Graph()
    nodes: list[fx.Node] = []
    root = torch.nn.Module()

    def reference(value: Any) -> Any:
        return nodes[value["node"]] if "node" in value else UNKNOWN

    def read(value: Any) -> Any:
        return decode(value, reference, device)

    for each in data:
        kind = each["op"]
        if kind == "input":
            node = graph.placeholder(each["name"])
        elif kind == "output":
            node = graph.output(tuple(map(read, each["args"])))
        elif kind == "constant":
            name = each["tensor"]
            setattr(root, name, constants[name])
            node = graph.get_attr(name)
        elif kind == "call":
            target = each["target"]
            called = calls[target] if isinstance(target, int) else shorter(_operator(target))
            kwargs = {name: read(value) for name, value in each.get("kwargs", {}).items()}
            node = graph.call_function(called, tuple(map(read, each["args"])), kwargs)
        else:
            raise ArtifactError(f"a graph has a node of unknown kind {kind!r}")
        nodes.append(node)
    return fx.GraphModule(root, graph)


def _operator(name: str) -> Any:
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    try:
        found = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    except (AttributeError, RuntimeError) as error:
        raise ArtifactError(
            f"the operator {name} is not registered; import the library that defines it first"
        ) from error
    if not isinstance(found, torch._ops.OpOverload):
        raise ArtifactError(f"{name} is no operator")
    return found
