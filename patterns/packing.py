"""What a graph on a CPU may keep from call to call: weights as the library wants them, and all else that is made of parameters alone.

The library of a CPU multiplies by weights in blocks of its own. Given plain ones it lays them out at each call, which takes longer than
the convolution where images are small: 5 of 6.3 ms for 512 channels of 7 x 7 on two cores of a Zen 4. It also adds a residual and applies
simple functions to what it has summed before that leaves the registers.

What is made of parameters alone, such as a folded BatchNorm, a weight times a scale of its layer or a table of positions, is computed once, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fusepass.config import Algebra, current
from fusepass.patterns.aliasing import base, escapes, written
from fusepass.patterns.arguments import arguments
from fusepass.patterns.channels_last import on_cpu
from fusepass.patterns.effects import may_be_repeated
from fusepass.patterns.legality import PACKED
from fusepass.patterns.once import ONCE, made_of, note_once, widen
from fusepass.patterns.rules.folding import OF_PARAMETERS
from fusepass.patterns.simplify import Application, simplify

aten = torch.ops.aten

PACKED_WEIGHTS = "packed-weights"
"""The name by which it is reported and disabled."""

_PRODUCTS = (aten.addmm.default, aten.mm.default)
_ADD = aten.add.Tensor
_FUNCTIONS = {
    aten.relu.default: "relu",
    aten.hardswish.default: "hardswish",
    aten.hardsigmoid.default: "hardsigmoid",
    aten.silu.default: "swish",
    aten.sigmoid.default: "sigmoid",
}
_WITH_NUMBERS = (aten.hardtanh.default, aten.leaky_relu.default)
_NO_NAN = (aten.relu.default, aten.hardsigmoid.default, aten.hardtanh.default)
"""Of NaN the library makes a number here."""
_MADE_ONCE, _READ = -1, -2
"""In place of the number of a call: made of parameters alone; and besides read by what each call computes."""


@dataclass(frozen=True)
class Function:
    """A function of the library's for what is summed: its name there, and its numbers."""

    name: str = "none"
    scalars: tuple[float, ...] = ()


NOTHING = Function()


@dataclass(frozen=True)
class Call:
    """One call of the library, as nodes of a graph.

    Attributes:
        anchor: the convolution or product.
        weight: its weight: of a convolution as PyTorch has it, of a product ``[K, N]``.
        bias: one number per feature, or None.
        other: what is added, and lies as the result does; None where nothing is.
        function: what is applied last.
        result: the node whose value the library gives.
    """

    anchor: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    other: fx.Node | None
    function: Function
    result: fx.Node

    @staticmethod
    def of(parts: Sequence[fx.Node]) -> Call:
        """What `parts`, an anchor and what is done to its result, are."""
        anchor, *behind = parts
        added = [source for node in behind if node.target is _ADD for source in node.args if source not in parts]
        functions = [function for node in behind if (function := _function(node)) is not None]
        given = arguments(anchor)
        if anchor.target is aten.convolution.default:
            weight, bias = given["weight"], given["bias"]
        else:
            weight = given["mat2"]
            bias = given["self"] if anchor.target is aten.addmm.default else None
        return Call(anchor, weight, bias, next(iter(added), None), next(iter(functions), NOTHING), parts[-1])  # type: ignore[arg-type]


def pack(graph_module: fx.GraphModule, parameters: Collection[int]) -> list[Application]:
    """Fold what is affine behind convolutions and products into their weights, and say in ``meta`` what the library computes and what is made once;
    in place.

    Args:
        graph_module: flat, simplified, on a CPU.
        parameters: the positions of placeholders that are parameters or buffers.

    Returns:
        What was folded.
    """
    graph = graph_module.graph
    given = {node for number, node in enumerate(graph.find_nodes(op="placeholder")) if number in parameters}
    note_once(graph, {node for node in given if not any(node in written(user) for user in node.users)})
    applied = simplify(graph_module, OF_PARAMETERS)
    number = 0
    for node in graph.nodes:
        if PACKED not in node.meta and _is_packable(node):
            for part in _parts(node):
                part.meta[PACKED] = number
            number += 1
    values = [value for call in packed_calls(graph) for value in (call.weight, call.bias) if value is not None]
    for old, new in widen(graph, values):
        old.replace_all_uses_with(new, lambda user: PACKED in user.meta)
    read = [node for node in graph.nodes if _is_read(node)]
    values = [value for call in packed_calls(graph) for value in (call.weight, call.bias) if value is not None]
    for node in made_of([*values, *read]):
        node.meta.setdefault(PACKED, _READ if node in read else _MADE_ONCE)
    return applied


def packable(graph: fx.Graph, parameters: Collection[int]) -> bool:
    """Whether `graph`, of which these placeholders are parameters or buffers, is one on a CPU whose weights may be packed."""
    return bool(parameters) and torch._C._get_mkldnn_enabled() and on_cpu(graph) and may_be_repeated(graph)


def packed_calls(graph: fx.Graph) -> Iterator[Call]:
    """The calls of the library that `pack` has found, in this graph or in one that has its nodes; each as the graph is when it is asked for."""
    parts: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.meta.get(PACKED, _MADE_ONCE) >= 0:
            parts.setdefault(node.meta[PACKED], []).append(node)
    return map(Call.of, parts.values())


def kept_values(graph: fx.Graph) -> Iterator[fx.Node]:
    """What `pack` has found besides to be made once, in this graph or in one that has its nodes."""
    return (node for node in graph.nodes if node.meta.get(PACKED) == _READ)


def _is_read(node: fx.Node) -> bool:
    """Whether `node` is computed of parameters alone, read by what is not, other than by the library's calls, and seen by no caller."""
    if node.op != "call_function" or ONCE not in node.meta or not isinstance(node.meta["val"], torch.Tensor):
        return False
    memory = base(node)
    read = any(ONCE not in user.meta and PACKED not in user.meta for user in node.users)
    return read and memory.op == "call_function" and not escapes(memory)


def _is_packable(node: fx.Node) -> bool:
    """Whether the library may compute `node`, a convolution of images that are channels last or a product, by a weight made once."""
    if node.target not in (aten.convolution.default, *_PRODUCTS):
        return False
    value = node.meta["val"]
    if value.dtype not in _types() or not value.numel():
        return False
    call, given = Call.of([node]), arguments(node)
    if ONCE not in call.weight.meta or (call.bias is not None and ONCE not in call.bias.meta):
        return False
    if node.target is aten.convolution.default:
        source = given["input"].meta["val"]
        return value.dim() == 4 and not given["transposed"] and source.is_contiguous(memory_format=torch.channels_last)
    source = given["mat1" if "mat1" in given else "self"]
    plain = source.meta["val"].is_contiguous() and ONCE not in source.meta
    return (
        plain
        and given.get("beta", 1) == given.get("alpha", 1) == 1
        and (call.bias is None or call.bias.meta["val"].dim() == 1)
    )


def _types() -> tuple[torch.dtype, ...]:
    halves = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return (torch.float32, torch.bfloat16) if halves else (torch.float32,)


def _parts(anchor: fx.Node) -> list[fx.Node]:
    """`anchor` and what the library does to its result: adds one more, then applies a function."""
    parts = [anchor]
    if anchor.target is aten.convolution.default and (sum_ := _only_user(anchor)) is not None and _adds(sum_, anchor):
        parts.append(sum_)
    last = _only_user(parts[-1])
    function = None if last is None else _function(last)
    if last is not None and function is not None and (len(parts) == 1 or function.name == "relu"):
        parts.append(last)
    return parts


def _only_user(node: fx.Node) -> fx.Node | None:
    users = [*node.users]
    if len(users) != 1 or PACKED in users[0].meta or not isinstance(users[0].meta.get("val"), torch.Tensor):
        return None
    same = (users[0].meta["val"].shape, users[0].meta["val"].stride(), users[0].meta["val"].dtype)
    return users[0] if same == (node.meta["val"].shape, node.meta["val"].stride(), node.meta["val"].dtype) else None


def _adds(node: fx.Node, anchor: fx.Node) -> bool:
    """Whether `node` adds to the result of `anchor` something else that lies as it does."""
    if node.target is not _ADD or node.kwargs or not all(isinstance(source, fx.Node) for source in node.args):
        return False
    others: list[Any] = [source for source in node.args if source is not anchor]
    if len(others) != 1:
        return False
    other, value = others[0].meta["val"], anchor.meta["val"]
    return bool((other.shape, other.stride(), other.dtype) == (value.shape, value.stride(), value.dtype))


def _function(node: fx.Node) -> Function | None:
    """What `node` applies to its first argument, if the library has that."""
    if node.target in _NO_NAN and current().algebra is not Algebra.FINITE:
        return None
    if node.target in _FUNCTIONS:
        return Function(_FUNCTIONS[node.target])
    given = arguments(node) if node.target in _WITH_NUMBERS else {}
    if node.target is aten.hardtanh.default:
        return Function("hardtanh", (float(given["min_val"]), float(given["max_val"])))
    if node.target is aten.leaky_relu.default:
        return Function("leaky_relu", (float(given["negative_slope"]),))
    return None
