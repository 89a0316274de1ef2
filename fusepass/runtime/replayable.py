"""Which graphs may be captured in a CUDA graph: asked for, or by itself, which takes more to be safe."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils._pytree import tree_leaves

from fusepass.measure import extent
from fusepass.patterns.aliasing import base, written
from fusepass.patterns.effects import draws, waits_for_host
from fusepass.runtime.ops import NAMESPACE

ON_CPU = "everything lies on the CPU"
_KNOWN = ("aten", "prims", NAMESPACE)
_COLLECTIVES = ("c10d", "_c10d", "_dtensor")
_MOST_BYTES = 256 << 20
aten = torch.ops.aten
_INDEXED = {
    aten.index,
    aten._unsafe_index,
    aten.index_put,
    aten.index_put_,
    aten._unsafe_index_put,
    aten._index_put_impl_,
}


def obstacle(graph: fx.Graph, arguments: Sequence[torch.Tensor], *, step: bool = False) -> str | None:
    """Why a graph over these arguments is not captured at all; None where it may be. One of a training `step` may draw random numbers, and
    who captures it knows which arguments are copied.
    """
    devices = {tensor.device for tensor in (*arguments, *_values(graph))}
    if not any(device.type == "cuda" for device in devices):
        return ON_CPU
    if len(devices) > 1:
        return "tensors lie on several devices"
    for node in graph.nodes:
        if draws(node) and not step:
            return f"{node.target.overloadpacket} draws random numbers"
        if _waits(node):
            return f"{node.target.overloadpacket} waits for the device"
    if not step and any(map(overlaps, arguments)):
        return "an input or a tensor of the model overlaps itself"
    return None


def unasked_obstacle(graph: fx.Graph, arguments: Sequence[torch.Tensor]) -> str | None:
    """As `obstacle`, for a capture that nobody asked for.

    Operators of others may do on the host what a replay leaves out, and the memory of a captured graph is not given back.
    """
    reason = _foreign(graph)
    if reason is not None:
        return reason
    if _held(graph) > _MOST_BYTES:
        return f"its values take more than {_MOST_BYTES >> 20} MiB at once"
    return obstacle(graph, arguments)


def step_obstacle(graph: fx.Graph, described: Sequence[object], static: Collection[int], *, asked: bool) -> str | None:
    """As `obstacle`, for a graph of a training step, whose memory is another matter, and which may draw random numbers.

    Args:
        graph: of forward or backward.
        described: its arguments, fake ones.
        static: positions of those that lie in the same memory at each call.
        asked: whether somebody asked for it.
    """
    tensors = [value for value in described if isinstance(value, torch.Tensor)]
    if len(tensors) < len(described):
        return "an argument is no tensor"
    nodes = graph.find_nodes(op="placeholder")
    for node in graph.nodes:
        if getattr(node.target, "namespace", "").startswith(_COLLECTIVES):
            return f"{node.target} waits for other processes"
        if any(target.op == "placeholder" and nodes.index(target) not in static for target in written(node)):
            return "an input is written"
    return (None if asked else _foreign(graph)) or obstacle(graph, tensors, step=True)


def _held(graph: fx.Graph) -> int:
    """Bytes of what its calls give that are held at once, at the most: each from its call to its last reader."""
    ends: dict[fx.Node, int] = {}
    for place, node in enumerate(graph.nodes):
        ends |= dict.fromkeys(map(_owner, [node, *node.all_input_nodes]), place)
    freed: dict[int, int] = defaultdict(int)
    held = most = 0
    for place, node in enumerate(graph.nodes):
        if _owner(node) is node:
            nbytes = sum(extent(value) * value.dtype.itemsize for value in _results(node))
            held, freed[ends[node]] = held + nbytes, freed[ends[node]] + nbytes
        most = max(most, held)
        held -= freed[place]
    return most


def _owner(node: fx.Node) -> fx.Node:
    """The call that made the memory of a node's value."""
    node = base(node)
    return base(node.all_input_nodes[0]) if node.target is operator.getitem else node


def _waits(node: fx.Node) -> bool:
    """Whether the host waits for the device in a call: for a number, for how many elements there are, or for where a mask is true."""
    target = aten.index.Tensor if getattr(node.target, "overloadpacket", None) in _INDEXED else node.target
    given = [leaf.meta.get("val") for leaf in tree_leaves(node.args[:2]) if isinstance(leaf, fx.Node)]
    return waits_for_host(target, given)


def _foreign(graph: fx.Graph) -> str | None:
    """What operator of others is in a graph, in words."""
    for node in graph.nodes:
        known = not isinstance(node.target, OpOverload) or node.target.namespace in _KNOWN
        if not known or isinstance(node.target, HigherOrderOperator):
            return f"{node.target} is an operator of others"
    return None


def overlaps(tensor: torch.Tensor) -> bool:
    """Whether two of its elements are known to share memory."""
    return bool(torch._debug_has_internal_overlap(tensor) == 1)  # 2 stands for "not known", which copies bear


def _values(graph: fx.Graph) -> Iterator[torch.Tensor]:
    """What its calls give, but for constants, which lie on the CPU until they are moved."""
    for node in graph.nodes:
        yield from _results(node)


def _results(node: fx.Node) -> Iterator[torch.Tensor]:
    if node.op == "call_function" and node.target is not aten.lift_fresh_copy.default:
        results = node.meta.get("val")
        for value in results if isinstance(results, list | tuple) else (results,):
            if isinstance(value, torch.Tensor):
                yield value
