"""The class of an operator, which is all that patterns know of it."""

from __future__ import annotations

import enum
import operator
from collections.abc import Hashable
from typing import Protocol

import torch
from torch import fx
from torch._ops import OpOverload

from fusepass.codegen.lowering import lower as lower  # registers the vocabulary
from fusepass.codegen.lowering import registry
from fusepass.codegen.lowering.parts import call_key, parts_of
from fusepass.codegen.lowering.tracer import results_of
from fusepass.patterns.aliasing import is_view
from fusepass.patterns.effects import is_random
from fusepass.patterns.legality import Refusal, node_refusal
from fusepass.patterns.memo import remembered


class OpClass(enum.Enum):
    """What an operator does, as far as fusion is concerned."""

    POINTWISE = "pointwise"  # each element of the result needs one element of each input, wherever that lies
    VIEW = "view"  # the same memory under another shape
    REDUCTION = "reduction"
    NORMALISATION = "normalisation"  # statistics of its input, and a result of the input's shape
    POOLING = "pooling"
    SCAN = "scan"  # each element of the result needs those up to its own along one dimension
    ANCHOR = "anchor"  # a convolution or a matrix product
    OTHER = "other"


class Vocabulary(Protocol):
    """What code generation can express; `fusepass.codegen.lowering.registry` is one."""

    def supports(self, target: OpOverload) -> bool:
        """Whether `target` has generated code without being decomposed further."""
        ...


_CLASS_OF_MODULE = {
    "activations": OpClass.POINTWISE,
    "anchors": OpClass.ANCHOR,
    "creation": OpClass.POINTWISE,
    "dropout": OpClass.POINTWISE,
    "gathers": OpClass.POINTWISE,
    "losses": OpClass.REDUCTION,
    "normalisations": OpClass.NORMALISATION,
    "padding": OpClass.POINTWISE,
    "pairs": OpClass.REDUCTION,
    "pointwise": OpClass.POINTWISE,
    "pool_gradients": OpClass.POOLING,
    "pooling": OpClass.POOLING,
    "reductions": OpClass.REDUCTION,
    "resampling": OpClass.POINTWISE,
    "rounding": OpClass.POINTWISE,
    "scans": OpClass.SCAN,
    "views": OpClass.POINTWISE,  # concatenation, say; what moves no memory is told apart by its schema
    "writes": OpClass.POINTWISE,
}
"""The class of an operator by the module of `fusepass.codegen.lowering` that expresses it."""


BY_RUNNING_STATISTICS = torch.ops.aten._native_batch_norm_legit_no_training.default
"""The normalisation that computes no statistics: a function of elements."""


def classify(node: fx.Node, vocabulary: Vocabulary) -> OpClass | Refusal:
    """The class of `node`, or why it may not fuse.

    An operator outside the vocabulary is decomposed with PyTorch's own tables, for the arguments at hand, and
    classified by what it is made of. A ``getitem`` has the class of the operator whose result it takes.

    Args:
        node: a call of an ATen operator; it and its arguments carry fake tensors in ``meta["val"]``.
        vocabulary: what code generation can express.
    """
    if node.target is operator.getitem:
        (producer,) = node.all_input_nodes
        return classify(producer, vocabulary)
    refusal = node_refusal(node)
    if refusal is not None:
        return refusal
    target = node.target
    assert isinstance(target, OpOverload)  # node_refusal has seen to it
    found = direct_class(target) if vocabulary.supports(target) else _composite_class(node, vocabulary)
    if isinstance(found, OpClass) and found is not OpClass.OTHER:
        return found
    reason = found if isinstance(found, str) else "no generated code for it"
    return Refusal(reason, node.name, str(target.overloadpacket))


def is_elementwise(target: OpOverload) -> bool:
    """Whether each result is a function of the elements at its own place, and the function is the same everywhere.

    Not all that is POINTWISE to code generation is: a triangle's elements depend on where they stand.
    """
    return torch.Tag.pointwise in target.tags and not is_random(target)


@remembered
def direct_class(target: OpOverload) -> OpClass:
    """The class of an operator that code generation expresses as it is."""
    if is_view(target):
        return OpClass.VIEW
    if target is BY_RUNNING_STATISTICS:
        return OpClass.POINTWISE
    module = module_of(target)
    return OpClass.OTHER if module is None else _CLASS_OF_MODULE[module]


def module_of(target: OpOverload) -> str | None:
    """The module of `fusepass.codegen.lowering` that expresses an operator as it is, if one does."""
    handler = registry.handler_of(target)
    return None if handler is None else handler.__module__.rpartition(".")[2]


_composites: dict[Hashable, OpClass | str] = {}


def _composite_class(node: fx.Node, vocabulary: Vocabulary) -> OpClass | str:
    """`_decomposed_class`, remembered for each operator and kind of arguments."""
    key = (vocabulary, *call_key(node))
    if key not in _composites:
        _composites[key] = _decomposed_class(node, vocabulary)
    return _composites[key]


def _decomposed_class(node: fx.Node, vocabulary: Vocabulary) -> OpClass | str:
    """The class of what `node` is made of, or why it has none."""
    assert isinstance(node.target, OpOverload)
    try:
        made = made_of(node)
    except Exception as error:  # PyTorch's decompositions raise what they like for arguments that they do not expect
        return f"its decomposition fails with {type(error).__name__}"
    unknown = [str(primitive) for primitive in made if not vocabulary.supports(primitive)]
    if unknown:
        return "no generated code for it" if unknown == [str(node.target)] else f"no generated code for {unknown[0]}"
    classes = set(map(direct_class, made))
    if OpClass.ANCHOR in classes or OpClass.OTHER in classes or not classes:
        return OpClass.OTHER
    if OpClass.SCAN in classes:
        return OpClass.SCAN
    if OpClass.POOLING in classes:
        return OpClass.POOLING
    if OpClass.NORMALISATION in classes:
        return OpClass.NORMALISATION
    if OpClass.REDUCTION in classes:
        return OpClass.NORMALISATION if _keeps_shape(node) else OpClass.REDUCTION
    return OpClass.VIEW if is_view(node.target) and classes == {OpClass.VIEW} else OpClass.POINTWISE


def _keeps_shape(node: fx.Node) -> bool:
    return bool(results_of(node)[0].shape == node.all_input_nodes[0].meta["val"].shape)


_made: dict[Hashable, list[OpOverload]] = {}


def made_of(node: fx.Node) -> list[OpOverload]:
    """The operators of the vocabulary that do what `node` does: itself, or its `_primitives`, remembered for each operator and kind of
    arguments.
    """
    assert isinstance(node.target, OpOverload)
    if registry.supports(node.target):
        return [node.target]
    key = call_key(node)
    if key not in _made:
        _made[key] = _primitives(node)
    return _made[key]


def _primitives(node: fx.Node) -> list[OpOverload]:
    """The operators of `parts_of`."""
    made = (n for n in parts_of(node).graph.nodes if isinstance(n.target, OpOverload))
    return [n.target for n in made if any(value.numel() for value in results_of(n))]
