"""Values whose bits decide: what a joint graph compares with one another is saved for backward, and not computed again."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils.checkpoint import CheckpointPolicy

from fusepass.codegen.lowering import registry
from fusepass.patterns.aliasing import base, call_of
from fusepass.patterns.ancestors import ancestors
from fusepass.patterns.opclass import OpClass, classify

aten = torch.ops.aten

_COMPARISONS = frozenset({aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge})
_SIGNS = frozenset({aten.sgn, aten.sign})

_STEPS = frozenset({
    aten.floor, aten.ceil, aten.round, aten.trunc, aten.frac, aten.fmod, aten.remainder, aten.floor_divide, aten.div,
})  # fmt: skip
"""Functions that jump; a division where it rounds its result."""

_PICKS = frozenset({
    aten.amax, aten.amin, aten.aminmax, aten.max, aten.min, aten.cummax, aten.cummin, aten.sort, aten.topk, aten.kthvalue, aten.median,
    aten.nanmedian, aten.mode, aten.gather, aten.index, aten.index_select, aten.take,
})  # fmt: skip
"""Operators whose results are elements of their first argument, to the bit."""


def save_compared(graph: fx.Graph, num_fwd_outputs: int) -> None:
    """Let the cut save what two values are compared in, or where only backward compares them, the values. Of several results of a call that
    is said of the call: the cut heeds nothing that is said of the results.

    Forward may be the region's own operators, whichever is faster, and backward kernels: these agree but for the last bits, and a value is equal
    to its maximum by all of them. A comparison with a number, such as a threshold, or a sign, may be made again: nothing is equal to it by what
    it is, but the difference of a value from its maximum, say.
    """
    (output,) = graph.find_nodes(op="output")
    forward = ancestors([value for value in output.args[0][:num_fwd_outputs] if isinstance(value, fx.Node)])
    picks = any(_is_any(node, _PICKS) for node in graph.nodes)
    for node in graph.nodes:
        if not _is_any(node, _COMPARISONS | _SIGNS):
            continue
        alone = len(node.all_input_nodes) < 2 or any(map(_is_number, node.all_input_nodes))
        if alone and not (picks and any(map(_meets_itself, node.all_input_nodes))):
            continue
        for value in [node] if node in forward else _of_forward(node.all_input_nodes, forward):
            value.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def save_chosen(graph: fx.Graph, recomputable: Collection[OpOverloadPacket]) -> None:
    """Let the cut save what else hangs on the last bits of computed values, of what is `recomputable`: indices, integers, numbers behind steps.

    Forward may have taken another element for the largest, say, than backward would find, whose gradient would go elsewhere.
    """
    for node in graph.nodes:
        call = call_of(node)
        if not _is_any(call, recomputable) or not _is_chosen(node, call):
            continue
        operands = [base(each) for each in call.all_input_nodes if _is_real(each)]
        if any(each.op == "call_function" and not _is_number(each) for each in operands):
            call.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _is_chosen(node: fx.Node, call: fx.Node) -> bool:
    """Whether `node`, a result of `call`, is made of integers, or of floating-point numbers behind a step."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dtype is torch.bool:
        return False
    if not _is_real(node):
        return True
    return _is_any(call, _STEPS) and (call.kwargs.get("rounding_mode") is not None or not _is_any(call, {aten.div}))


def _is_real(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def is_saved(node: fx.Node) -> bool:
    """Whether `node` may not be computed again."""
    return node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE


def _of_forward(nodes: list[fx.Node], forward: set[fx.Node]) -> list[fx.Node]:
    """The calls of forward that give what `nodes`, which are not of it, or views, are made of."""
    found, seen, stack = list[fx.Node](), set[fx.Node](), [*nodes]
    while stack:
        node = stack.pop()
        if node in seen or node.op == "placeholder":
            continue
        seen.add(node)
        source = call_of(node)
        if node in forward and classify(source, registry) is not OpClass.VIEW:
            found.append(source)
        else:
            stack += node.all_input_nodes
    return found


def _meets_itself(value: fx.Node) -> bool:
    """Whether `value` is made, element by element, of something and of elements that were picked of that."""
    made, picked, stack = set[fx.Node](), list[fx.Node](), [value]
    while stack:
        node = stack.pop()
        if node in made:
            continue
        source = call_of(node)
        if _is_any(source, _PICKS):
            picked.append(base(source.all_input_nodes[0]))
        elif node.op == "call_function" and classify(node, registry) in (OpClass.POINTWISE, OpClass.VIEW):
            made.add(node)
            stack += node.all_input_nodes
    return not made.isdisjoint(picked)


def _is_any(node: fx.Node, packets: Collection[OpOverloadPacket]) -> bool:
    return isinstance(node.target, OpOverload) and node.target.overloadpacket in packets


def _is_number(node: fx.Node) -> bool:
    """Whether `node` is made of no tensor."""
    return all(each.op == "call_function" for each in ancestors([node]))
