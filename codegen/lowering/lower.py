"""A region's subgraph becomes a naive `Program`: library calls, then one kernel per reduction and per output.

The subgraph is decomposed with PyTorch's own tables first, so that only the vocabulary in `registry` has to be expressed by hand.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx._lazy_graph_module import _LazyGraphModule

from fusepass.codegen.ir.anchor_format import AnchorFormat
from fusepass.codegen.ir.expr import Builder
from fusepass.codegen.ir.program import Program, Role
from fusepass.codegen.lowering import (  # noqa: F401 - imported for what they register
    activations,
    anchors,
    creation,
    dropout,
    gathers,
    losses,
    normalisations,
    padding,
    pairs,
    pointwise,
    pool_gradients,
    pooling,
    reductions,
    resampling,
    rounding,
    scans,
    views,
    writes,
)
from fusepass.codegen.lowering.parts import parts_of
from fusepass.codegen.lowering.registry import Call, handler_of, has_own_decompositions, snapshot
from fusepass.codegen.lowering.tensor import Context, Tensor, Unsupported, dtype_of

__all__ = ["Unsupported", "decompose", "is_as_shipped", "lower"]

_SHIPPED = snapshot()
_VIEWS = frozenset({"t", "transpose", "permute", "view", "expand", "_unsafe_view", "unsqueeze", "squeeze"})


def decompose(graph: fx.GraphModule) -> fx.GraphModule:
    """`graph` (nodes described by ``meta["val"]``) in terms of the lowering vocabulary: other operators are replaced by their parts.

    Raises:
        Unsupported: a decomposition does not apply, such as one that wants strides which this graph does not have.
    """
    made, constants = fx.Graph(), dict[str, torch.Tensor]()

    def add(node: fx.Node, owner: fx.GraphModule, values: Mapping[fx.Node, Any]) -> fx.Node:
        if node.op == "get_attr":
            name = f"_tensor_constant{len(constants)}"
            constants[name] = getattr(owner, str(node.target))
            fresh = made.get_attr(name)
        else:
            fresh = made.node_copy(node, values.__getitem__)
        fresh.meta = {"val": node.meta["val"]}
        return fresh

    def parts(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        """The results of `node`, by the operators that it is made of."""
        owner = _parts_of(node)
        given = iter(dict.fromkeys(node.all_input_nodes))
        own: dict[fx.Node, Any] = {}
        for part in owner.graph.nodes:
            if part.op == "placeholder":
                own[part] = values[next(given)]
            elif part.op != "output":
                own[part] = add(part, owner, own)
        return fx.map_arg(owner.graph.output_node().args[0], own.__getitem__)

    values: dict[fx.Node, Any] = {}
    for node in graph.graph.nodes:
        if node.op == "output":
            made.output(fx.map_arg(node.args[0], values.__getitem__))
        elif node.target is operator.getitem and not isinstance(values[node.args[0]], fx.Node):
            values[node] = values[node.args[0]][node.args[1]]
        else:
            values[node] = add(node, graph, values) if _is_known(node) else parts(node, values)
    return _LazyGraphModule(constants, made)


def _parts_of(node: fx.Node) -> fx.GraphModule:
    try:
        return parts_of(node)
    except Exception as error:  # whatever PyTorch's Python raises
        raise Unsupported(f"PyTorch's decomposition raised {type(error).__name__}: {error}") from error


def lower(
    graph: fx.GraphModule,
    name: str,
    names: Sequence[str],
    constants: Mapping[str, float | int | bool] | None = None,
    anchor_format: AnchorFormat = AnchorFormat.CALLER,
    *,
    tf32: bool = False,
    wide: bool = False,
    updates: Mapping[int, str] | None = None,
    builder: Builder | None = None,
) -> tuple[Program, Builder]:
    """The program of a region.

    Args:
        graph: the region's subgraph; its placeholders carry fake tensors, its outputs are tensors.
        name: the region's name, an identifier.
        names: a readable name per placeholder, used for buffers.
        constants: values of placeholders that are known numbers (by index into `names`' name); they get no buffer.
        anchor_format: the format that the region's convolution runs in, one of `formats.anchor_formats`.
        tf32: whether the library rounds the operands of that convolution to TF32.
        wide: whether variances are kept in double, as eager's are on a CPU; only C++ kernels take no longer for that.
        updates: for outputs that are to be written over placeholders, by number, the names of these.
        builder: interns the expressions; a new one by default.

    Returns:
        The program and the builder that interned its expressions (passes must use the same one).

    Raises:
        Unsupported: the IR cannot express the region; the text says what stopped it.
    """
    constants = constants or {}
    graph = rounding.with_roundings(graph)
    lowered = graph if _in_vocabulary(graph) else decompose(graph)
    lowered.graph.eliminate_dead_code()
    placeholders = lowered.graph.find_nodes(op="placeholder")
    # Decompositions describe tensors without their device.
    cuda = any(node.meta["val"].device.type == "cuda" for node in graph.graph.find_nodes(op="placeholder"))
    context = Context(anchor_format=anchor_format, tf32=tf32, cuda=cuda, wide=wide, builder=builder or Builder())
    values: dict[fx.Node, Any] = {}
    inputs: list[str] = []
    read_from: dict[str, str] = {}
    for node, label in zip(placeholders, names, strict=True):
        fake = node.meta["val"]
        if label in constants:
            values[node] = context.constant(constants[label], fake.shape, dtype_of(fake.dtype))
            continue
        buffer = context.add_buffer(label, dtype_of(fake.dtype), fake.shape, fake.stride(), Role.INPUT)
        values[node] = context.read(buffer)
        context.stored[values[node]] = buffer.name
        inputs.append(buffer.name)
        read_from[label] = buffer.name
    for node in lowered.graph.nodes:
        if node.op == "call_function":
            values[node] = _lower_node(context, node, values)
        elif node.op == "get_attr":
            values[node] = _constant(context, lowered, node)
    outputs = _store_outputs(context, _outputs(graph), _outputs(lowered), values, updates or {})
    if context.calls and any(kernel.scans for kernel in context.kernels):
        raise Unsupported("a scan of what a convolution or matrix product gives")
    order = {role: number for number, role in enumerate(Role)}
    buffers = sorted(context.buffers, key=lambda buffer: order[buffer.role])
    over = tuple((outputs[number], read_from[label]) for number, label in (updates or {}).items())
    kernels = tuple(context.kernels)
    program = Program(name, tuple(buffers), tuple(inputs), outputs, tuple(context.calls), kernels, over)
    return program, context.builder


def is_as_shipped(targets: Collection[object]) -> bool:
    """Whether nothing that users have registered has a say in what these operators are lowered to."""
    if snapshot() != _SHIPPED:
        return False
    others = [target for target in targets if handler_of(target) is None]
    namespaces = {target.namespace for target in others if isinstance(target, OpOverload)}
    return namespaces <= {"aten", "prims"} and not (others and has_own_decompositions())


def _in_vocabulary(graph: fx.GraphModule) -> bool:
    """Whether nothing needs decomposing, which takes PyTorch seconds the first time."""
    return all(map(_is_known, graph.graph.nodes))


def _is_known(node: fx.Node) -> bool:
    """Whether `node` needs no decomposing."""
    return node.op != "call_function" or node.target is operator.getitem or handler_of(node.target) is not None


def _lower_node(context: Context, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    target = node.target
    args: Any
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda arg: values[arg])
    if not isinstance(target, OpOverload):  # operator.getitem
        return args[0][args[1]]
    handler = handler_of(target)
    if handler is None:
        raise Unsupported(f"no lowering for {target}")
    call = Call(context, node)
    result = handler(call, *args, **kwargs)
    base = context.stored.get(args[0]) if args and isinstance(args[0], Tensor) else None
    if (
        base is not None
        and isinstance(result, Tensor)
        and call.origin in _VIEWS
        and any(user.target in anchors.PRODUCTS for user in node.users)
    ):
        context.stored[result] = anchors.library_view(call, base)
    return result


def _constant(context: Context, graph: fx.GraphModule, node: fx.Node) -> Tensor:
    value = getattr(graph, str(node.target))
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or value.device.type != "cpu":
        raise Unsupported("a tensor constant with more than one element")
    return context.constant(value.item(), value.shape, dtype_of(value.dtype))


def _outputs(graph: fx.GraphModule) -> Sequence[fx.Node]:
    results: Any = graph.graph.output_node().args[0]
    return results if isinstance(results, Sequence) else (results,)


def _store_outputs(
    context: Context,
    captured: Sequence[fx.Node],
    lowered: Sequence[fx.Node],
    values: Mapping[fx.Node, Any],
    updates: Collection[int],
) -> tuple[str, ...]:
    """Give every output memory with the type and strides that PyTorch gave it.

    Decompositions may give others: float32 for running statistics of halves.
    """
    names = []
    for number, (node, was) in enumerate(zip(lowered, captured, strict=True)):
        if values[node] is None:
            raise Unsupported(f"{node.args[0]}: a result that only its backward pass would use")
        fake = was.meta["val"]
        buffer = context.add_buffer(f"out{number}", dtype_of(fake.dtype), fake.shape, fake.stride(), Role.OUTPUT)
        if buffer.extent > buffer.numel and number not in updates:
            raise Unsupported("an output whose memory has gaps")
        if buffer.extent < buffer.numel:
            raise Unsupported("an output that overlaps itself")
        source = rounding.unrounded(node)
        source = source.all_input_nodes[0] if source.target is operator.getitem else source
        value = values[node]
        if value.dtype is not buffer.dtype:  # a store rounds by itself what is a half already
            value = context.cast(value, buffer.dtype)
            value = context.rounded(value) if buffer.dtype.is_half else value
        context.store(value, buffer, Call(context, source).origin)
        names.append(buffer.name)
    return tuple(names)
