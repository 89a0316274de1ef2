"""Attention that is written out, in a graph of Dynamo's that gradients will be taken of: it becomes the library's.

Behind AOTAutograd its gradients stand beside it and read its weights, which the library does not give. In Dynamo's graph they do not yet, and
the library's attention has gradients of its own. So each product whose left operand is made of one other product is traced with that one, to
operators that the rule for attention knows; what the rule makes of it takes its place. So is PyTorch's function for several heads where it makes
weights that nobody reads.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.amp.autocast_mode import _enter_autocast
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from fusepass.capture.functional import may_write
from fusepass.capture.threads import tracing_apart
from fusepass.compile.splice import subgraph
from fusepass.patterns.arguments import arguments
from fusepass.patterns.rules.attended import LIBRARY
from fusepass.patterns.simplify import Application, simplify

aten = torch.ops.aten

_PRODUCTS = frozenset({torch.matmul, torch.bmm, torch.einsum, operator.matmul, "matmul", "bmm", "__matmul__"})
_SOFTMAX = frozenset({F.softmax, torch.softmax, "softmax"})
_HALVES = (torch.float16, torch.bfloat16)


def with_attention(graph: fx.GraphModule) -> tuple[fx.GraphModule, list[Application]]:
    """`graph` with the library's attention where it is written out, and what was rewritten; `graph` itself is not changed.

    Only what has gradients is: of what has none, the graph that AOTAutograd makes is rewritten. On a GPU, in float16 and bfloat16: in float32
    the library's gradients take longer than products of large tiles. Not where results must be the same in each run, as its gradients are not.
    """
    if not torch.is_grad_enabled() or torch.are_deterministic_algorithms_enabled():
        return graph, []
    if graph.graph.find_nodes(op="call_function", target=_enter_autocast):
        return graph, []  # what stands within may have other types there
    made = {part.root: (part, rewritten) for part in _parts(graph.graph) if (rewritten := _rewritten(graph, part))}
    if not made:
        return graph, []
    inside = {node for part, _ in made.values() for node in part.nodes}
    whole, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.graph.nodes:
        if node in made:
            part, (library, _) = made[node]
            copies[node] = _inlined(whole, library, [copies[each] for each in part.inputs], node)
        elif node.op == "output":
            whole.output(fx.node.map_arg(node.args[0], copies.__getitem__))
        elif node not in inside:
            copies[node] = whole.node_copy(node, copies.__getitem__)
    return fx.GraphModule(graph, whole), [each for _, (_, applied) in made.values() for each in applied]


@dataclass(frozen=True)
class _Part:
    """Attention: two products and what stands between them, or PyTorch's function for all of it; of its nodes only the last is read by others.

    Attributes:
        nodes: in order.
        operands: inputs that the library has gradients for.
        weights: what the softmax gives.
    """

    nodes: tuple[fx.Node, ...]
    operands: frozenset[fx.Node]
    weights: Any

    @property
    def root(self) -> fx.Node:
        """What gives the result."""
        return self.nodes[-1]

    @property
    def outputs(self) -> tuple[fx.Node]:
        """The root alone."""
        return (self.root,)

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        """What the nodes read."""
        return tuple(
            dict.fromkeys(each for one in self.nodes for each in one.all_input_nodes if each not in self.nodes)
        )


def _parts(graph: fx.Graph) -> Iterator[_Part]:
    """All that have gradients, of what the library has gradients for."""
    order = {node: number for number, node in enumerate(graph.nodes)}
    for node in order:
        part = _written_out(node, order) if _is_product(node) else _of_function(node)
        if part is None or not isinstance(part.weights, Tensor) or not _is_served(part.weights):
            continue
        asked = {node for node in part.inputs if _asks(node)}
        if asked and asked <= part.operands and _is_plain(part) and not _is_written_beside(part, order):
            yield part


def _is_plain(part: _Part) -> bool:
    """Whether a part is of tensors of known sizes, outside of `torch.func` transforms, and gradients go through all of it."""
    for value in map(_value, (*part.inputs, *part.nodes)):
        if not isinstance(value, Tensor) or value._has_symbolic_sizes_strides or is_functorch_wrapped_tensor(value):
            return False
    return all(_asks(node) or not any(map(_asks, node.all_input_nodes)) for node in part.nodes)


def _asks(node: fx.Node) -> bool:
    """Whether a value asks for a gradient."""
    value = _value(node)
    return isinstance(value, Tensor) and value.requires_grad


def _value(node: fx.Node) -> Any:
    """What stands for the value of a node, or for the first of several."""
    value = node.meta.get("example_value")
    return value[0] if isinstance(value, tuple) and value else value


def _is_written_beside(part: _Part, order: Mapping[fx.Node, int]) -> bool:
    """Whether something else may write to what the part reads before its last node, where all is to be read."""
    first, last = order[part.nodes[0]], order[part.root]
    return any(may_write(node) for node, number in order.items() if first < number < last and node not in part.nodes)


def _is_product(node: fx.Node) -> bool:
    return node.op.startswith("call") and node.target in _PRODUCTS and len(node.all_input_nodes) == 2


def _written_out(root: fx.Node, order: Mapping[fx.Node, int]) -> _Part | None:
    """`root` and what only its left operand is made of, up to one product, a softmax among it; None where it is another thing."""
    left, right = root.all_input_nodes
    inside, products, ahead = {root}, [root], [(-order[left], left)]
    while ahead:
        _, node = heappop(ahead)  # behind all that reads it
        if node in inside or node is right or not node.op.startswith("call") or not inside.issuperset(node.users):
            continue
        inside.add(node)
        if _is_product(node):
            products.append(node)
        else:
            for each in node.all_input_nodes:
                heappush(ahead, (-order[each], each))
    if len(products) != 2 or not any(node.target in _SOFTMAX for node in inside):
        return None
    operands = frozenset(each for product in products for each in product.all_input_nodes)
    return _Part(tuple(sorted(inside, key=order.__getitem__)), operands, left.meta.get("example_value"))


def _of_function(node: fx.Node) -> _Part | None:
    """The call of ``multi_head_attention_forward`` whose result `node` is, where it makes weights and nobody reads them."""
    (call,) = node.all_input_nodes if node.target is operator.getitem and len(node.all_input_nodes) == 1 else (None,)
    if call is None or call.target is not F.multi_head_attention_forward or node.args[1] != 0 or len(call.users) != 1:
        return None
    given = signature(F.multi_head_attention_forward).bind(*call.args, **call.kwargs).arguments
    masks = {given.get("key_padding_mask"), given.get("attn_mask")}
    return _Part((call, node), frozenset(call.all_input_nodes) - masks, call.meta["example_value"][1])


def _is_served(weights: Tensor) -> bool:
    return weights.device.type == "cuda" and weights.dtype in _HALVES


def _rewritten(owner: fx.GraphModule, part: _Part) -> tuple[fx.GraphModule, list[Application]] | None:
    """A graph of the part's inputs that calls the library, and how it came about; None where the rule, or PyTorch, has none for it."""
    values = [node.meta["example_value"] for node in part.inputs]
    wanted = part.root.meta["example_value"]
    mode = FakeTensorMode()  # Dynamo's has seen all that it is to see
    try:
        with tracing_apart(), mode, torch.no_grad():
            plain = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in values]
            traced = make_fx(functionalize(subgraph(owner, part)))(*plain)
        applied = simplify(traced)
        if any(map(_is_beyond_it, traced.graph.nodes)) or not _call_the_library(traced.graph):
            return None
        traced.recompile()
        with mode, torch.enable_grad():
            (result,) = traced(
                *(one.requires_grad_(value.requires_grad) for one, value in zip(plain, values, strict=True))
            )
    except (RuntimeError, ValueError):  # PyTorch cannot trace it, or lays out in another way what it has gradients for
        return None
    alike = result.requires_grad and result.dtype is wanted.dtype and result.shape == wanted.shape
    return (traced, applied) if alike and result.stride() == wanted.stride() else None


def _is_beyond_it(node: fx.Node) -> bool:
    """Whether a node has a constant of its graph's module, or writes to an input."""
    return node.op == "get_attr" or node.target is aten.copy_.default


def _call_the_library(graph: fx.Graph) -> bool:
    """Let PyTorch choose among its kernels of attention by what they have gradients for; whether there is any."""
    calls = [node for node in graph.nodes if node.target in LIBRARY]
    for node in calls:
        given, (result,) = arguments(node), node.users
        bias = given.get("attn_bias", given.get("attn_mask"))
        options = {"attn_mask": bias, "is_causal": given["is_causal"], "scale": given["scale"]}
        with graph.inserting_before(node):
            call = graph.call_function(F.scaled_dot_product_attention, node.args[:3], options)
        result.replace_all_uses_with(call)
        graph.erase_node(result)
        graph.erase_node(node)
    for node in graph.nodes:
        if node.target in (aten.mul.Tensor, aten.mul.Scalar) and node.args[1] == 0:  # it tells what is not finite
            with graph.inserting_before(node):
                node.replace_input_with(node.args[0], graph.call_function(aten.detach.default, (node.args[0],)))
        elif node.target is aten.view.default:
            node.target = aten.reshape.default
    graph.eliminate_dead_code()
    return bool(calls)


def _inlined(graph: fx.Graph, made: fx.GraphModule, inputs: Sequence[fx.Node], root: fx.Node) -> fx.Node:
    """The result of `made` of `inputs`, its operators at the end of `graph`, as those of `root`."""
    copies: dict[fx.Node, fx.Node] = dict(zip(made.graph.find_nodes(op="placeholder"), inputs, strict=True))
    (result,) = made.graph.output_node().all_input_nodes
    for node in made.graph.nodes:
        if node.op == "call_function":
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta = {key: value for key, value in root.meta.items() if key != "example_value"}
    return copies[result]
