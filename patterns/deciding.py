"""Which values something decides by: a comparison, the place of an extreme, a rounding to whole numbers.

There the last bits of a value count, as another result hangs on them: infinite or not, above or not, this index or another. So every
16-bit value that such an operand is made of is rounded where eager rounds it, for all that read it (`fusepass.codegen.lowering.rounding`);
other halves stay in float32 from operator to operator.

Whatever takes floating-point numbers and gives integers or truth values decides. Of what gives floating-point numbers the vocabulary says
so: functions with steps. Other operators decide by what they are made of.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Iterator, Sequence

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from fusepass.codegen.lowering import registry
from fusepass.codegen.lowering.parts import call_key, parts_of
from fusepass.codegen.lowering.rounding import ROUNDED, is_half
from fusepass.config import Rounding, current
from fusepass.patterns.aliasing import is_view
from fusepass.patterns.ancestors import ancestors
from fusepass.patterns.effects import is_random
from fusepass.patterns.memo import remembered
from fusepass.patterns.opclass import OpClass, classify

aten = torch.ops.aten

_DRAWN_BY = frozenset({aten.bernoulli, aten.multinomial})
"""Random choices that hang on the values that they are given."""

_STEPS = frozenset({
    aten.histc, aten.fake_quantize_per_tensor_affine, aten.fake_quantize_per_channel_affine, aten.grid_sampler_2d, aten.grid_sampler_3d,
})  # fmt: skip
"""Operators without generated code that give floating-point numbers, and jump."""

_BESIDE = ("empty", "zeros", "ones", "full", "new_", "embedding_bag", "_embedding_bag", "_scaled_dot_product", "_flash", "_efficient")  # fmt: skip
_OF_MEMORY = ("batch_norm", "rnn", "dropout")
"""In names: operators whose integers say nothing of the floating-point numbers that they read: fills, states of generators, workspaces."""


def note_rounded(graph: fx.Graph) -> None:
    """Say in ``meta`` of each operator whose result is a 16-bit tensor whether it is to be rounded as eager rounds it.

    What is noted before stays: where a graph was cut in two, one of them may decide by what the other one has computed.
    """
    halves = [node for node in graph.nodes if is_half(node.meta.get("val"))]
    if not halves:
        return
    note_operands(halves if current().rounding is Rounding.EAGER else _made_of(graph))


def note_operands(nodes: Iterable[fx.Node]) -> None:
    """Say so of those of `nodes` that something decides by."""
    for node in nodes:
        if node.op == "call_function" and is_half(node.meta.get("val")) and not _is_view(node):
            node.meta[ROUNDED] = True


def _is_view(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and is_view(node.target)


def _made_of(graph: fx.Graph) -> set[fx.Node]:
    """All that the operands are made of by which something in `graph` decides."""
    return ancestors(operand for node in graph.nodes for operand in deciding(node))


def deciding(node: fx.Node) -> Sequence[fx.Node]:
    """The operands of `node` that it decides by."""
    target = node.target
    if not isinstance(target, OpOverload):
        return ()
    operands = [source for source in node.all_input_nodes if _is_float(source.meta.get("val"))]
    if not operands or is_view(target):
        return ()
    if _gives_others(node):
        return operands if _looks_at_values(target) else ()
    if target.overloadpacket in _STEPS or target.overloadpacket in _DRAWN_BY:
        return operands
    if registry.supports(target):
        return _those(node, registry.jumps_in(node))
    return _of_parts(node)


def _those(node: fx.Node, numbers: Sequence[int] | None) -> list[fx.Node]:
    """The tensors among the arguments of `node` by number, all of them for None."""
    if numbers is None:
        return node.all_input_nodes
    return [arg for number in numbers if number < len(node.args) and isinstance(arg := node.args[number], fx.Node)]


_parts: dict[Hashable, tuple[int, ...]] = {}


def _of_parts(node: fx.Node) -> list[fx.Node]:
    """The operands by which something decides that `node`, an operator outside the vocabulary, is made of."""
    if any(isinstance(size, torch.SymInt) for source in node.all_input_nodes for size in _shape(source)):
        return []
    sources = list(dict.fromkeys(node.all_input_nodes))
    key = call_key(node)
    if key not in _parts:
        fuses = isinstance(classify(node, registry), OpClass)
        _parts[key] = tuple(_placeholders(parts_of(node).graph)) if fuses else ()
    return [sources[number] for number in _parts[key]]


def _placeholders(graph: fx.Graph) -> Iterator[int]:
    found = _made_of(graph)
    return (number for number, node in enumerate(graph.find_nodes(op="placeholder")) if node in found)


def _shape(node: fx.Node) -> Sequence[object]:
    value = node.meta.get("val")
    return value.shape if isinstance(value, torch.Tensor) else ()


def _is_float(value: object) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _gives_others(node: fx.Node) -> bool:
    """Whether some result that is used is no floating-point tensor: integers, truth values or a Python number."""
    value = node.meta.get("val")
    if isinstance(value, tuple | list):
        used = [user.args[1] for user in node.users if user.target is operator.getitem and user.users]
        return any(not _is_float(value[number]) for number in used if value[number] is not None)  # type: ignore[index]
    return any(not _is_float(result) for result in pytree.tree_leaves(value) if result is not None)


@remembered
def _looks_at_values(target: OpOverload) -> bool:
    """Whether the integers that an operator gives hang on the floating-point numbers that it reads."""
    name = target._schema.name.split("::")[-1]
    if is_random(target):
        return target.overloadpacket in _DRAWN_BY
    return not name.startswith(_BESIDE) and not any(part in name for part in _OF_MEMORY)
