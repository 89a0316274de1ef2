"""The rewritten graph of a specialisation as a module of its own, for reading, running and saving."""

from __future__ import annotations

import io
import keyword
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from fusepass.artifact import operators
from fusepass.capture.naming import identifiers, key, positional_names
from fusepass.capture.trace import Captured
from fusepass.guards.tensors import tensor_of
from fusepass.structure import KeyPath, Template

_OF_MODULES = frozenset(vars(nn.Module()))


class FusedGraph(fx.GraphModule):
    """A graph that calls fused operators, and takes them with it where it is pickled: another process has not registered them."""

    def __reduce__(self) -> tuple[Callable[..., fx.GraphModule], tuple[Any, ...]]:
        return restored, (operators.packed_of(self.graph), *super().__reduce__())


def restored(content: bytes, rebuild: Callable[..., fx.GraphModule], arguments: tuple[Any, ...]) -> fx.GraphModule:
    """The graph module that was pickled, after its operators, which `content` holds, were registered."""
    operators.load(io.BytesIO(content))
    return rebuild(*arguments)


def graph_view(
    model: nn.Module, forward: Callable[..., Any], captured: Captured, rewritten: fx.GraphModule
) -> fx.GraphModule:
    """`rewritten`, a flat graph made from `captured`, as a module that is called as `model` is.

    Its parameters and buffers are the model's own, under the same names. It is right for one signature, which it
    does not compare.
    """
    graph = fx.Graph()
    inputs = _input_nodes(graph, forward, captured)
    targets = _targets(captured)
    states = [graph.get_attr(target) for target in targets]
    placeholders = rewritten.graph.find_nodes(op="placeholder")
    copied: dict[fx.Node, fx.Node] = {}
    for placeholder, node in zip(placeholders, [*states, *inputs], strict=True):
        node.meta = dict(placeholder.meta)
        copied[placeholder] = node
    for node in rewritten.graph.nodes:
        if node.op not in ("placeholder", "output"):
            copied[node] = graph.node_copy(node, copied.__getitem__)
    flat: Sequence[fx.Node] = rewritten.graph.output_node().args[0]  # type: ignore[assignment]
    results = [copied[node] for node in flat]
    graph.output(_nested(graph, captured.outputs, results))
    root = _attributes(model, captured, rewritten, targets)
    view = FusedGraph(root, graph, class_name=type(model).__name__)
    for slot, target in zip(captured.states, targets, strict=True):
        if target != slot.dotted:  # no part of the state dict
            vars(view)[target] = (view._parameters if target in view._parameters else view._buffers).pop(target)
            view._non_persistent_buffers_set.discard(target)
    _share_tensors(model, view)
    return view


def _input_nodes(graph: fx.Graph, forward: Callable[..., Any], captured: Captured) -> list[fx.Node]:
    """A placeholder for each argument, and a node for each tensor in them."""
    args, kwargs = captured.inputs.structure.unflatten(captured.inputs.leaves)
    names = identifiers([*positional_names(forward, len(args)), *kwargs])
    roots: list[KeyPath] = [(pytree.SequenceKey(0), pytree.SequenceKey(i)) for i in range(len(args))]
    roots += [(pytree.SequenceKey(1), pytree.MappingKey(name)) for name in kwargs]
    nodes: dict[KeyPath, fx.Node] = {path: graph.placeholder(name) for path, name in zip(roots, names, strict=True)}

    def reach(path: KeyPath) -> fx.Node:
        if path not in nodes:
            take = getattr if isinstance(path[-1], pytree.GetAttrKey) else operator.getitem
            nodes[path] = graph.call_function(take, (reach(path[:-1]), key(path[-1])))
        return nodes[path]

    return [reach(captured.paths[hole]) for hole in captured.inputs.holes]


def _nested(graph: fx.Graph, outputs: Template, results: list[fx.Node]) -> Any:
    """The model's result as an argument of the output node."""
    value = outputs.fill(results)
    if _is_basic(value):
        return value

    def nested_result(*tensors: torch.Tensor) -> Any:
        return outputs.fill(tensors)

    return graph.call_function(nested_result, tuple(results))


def _is_basic(value: object) -> bool:
    """Whether an fx graph can hold `value`: nodes and constants in tuples, lists and dicts."""
    if type(value) is dict:
        return all(isinstance(name, str) for name in value) and all(map(_is_basic, value.values()))
    if type(value) in (tuple, list):
        return all(map(_is_basic, value))  # type: ignore[call-overload]
    return isinstance(value, fx.Node | fx.node.BaseArgumentTypes | None)


def _targets(captured: Captured) -> list[str]:
    """An attribute for each tensor of the model: by its name there, if that can be written in Python, else one of its own."""
    return [
        slot.dotted if all(map(_can_be_written, slot.dotted.split("."))) else f"_state_{index}"
        for index, slot in enumerate(captured.states)
    ]


def _can_be_written(name: str) -> bool:
    plain = name.isdecimal() or (name.isidentifier() and not keyword.iskeyword(name))
    return plain and name.isascii() and not hasattr(fx.GraphModule, name)


def _attributes(model: nn.Module, captured: Captured, rewritten: fx.GraphModule, targets: Sequence[str]) -> nn.Module:
    """A module that has every attribute that the nodes name."""
    root = nn.Module()
    modules = list(model.modules())
    for slot, target in zip(captured.states, targets, strict=True):
        _put(root, target, tensor_of(modules[slot.index], slot.name))
    for node in rewritten.graph.nodes:
        if node.op in ("get_attr", "call_module"):
            _put(root, node.target, operator.attrgetter(node.target)(rewritten))
    return root


def _share_tensors(model: nn.Module, view: fx.GraphModule) -> None:
    """Give `view` the state dict of `model`: all of its parameters and buffers, and nothing else."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        _put(view, name, parameter)
    saved = set()
    for name, buffer, persistent in _buffers(model):
        _put(view, name, buffer)
        if persistent:
            saved.add(name)
    for name, _, _ in list(_buffers(view)):
        path, _, attribute = name.rpartition(".")
        owner = _reach(view, path)
        owner._non_persistent_buffers_set.discard(attribute)
        if name not in saved:
            owner._non_persistent_buffers_set.add(attribute)


def _buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Name, tensor and persistence of each buffer."""
    for path, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None:
                dotted = f"{path}.{name}" if path else name
                yield dotted, buffer, name not in module._non_persistent_buffers_set


def _reach(root: nn.Module, path: str) -> nn.Module:
    for part in path.split(".") if path else ():
        root = root._modules[part]  # type: ignore[assignment]
    return root


def _put(root: nn.Module, dotted: str, value: Any) -> None:
    """Set the attribute `dotted` of `root`, with modules on the way."""
    *path, name = dotted.split(".")
    module = root
    for part in path:
        module = module._modules.setdefault(part, nn.Module())  # type: ignore[assignment]
    if isinstance(value, torch.Tensor):  # not by setattr, as a name may be that of a method
        if name in vars(module) and name not in _OF_MODULES:
            del vars(module)[name]
        entries: dict[str, Any] = module._parameters if isinstance(value, nn.Parameter) else module._buffers
        entries[name] = value
    else:
        setattr(module, name, value)
