"""What an operator does besides giving results: writes, random numbers, waits of the host; and what it holds as a constant."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice, zip_longest

import torch
from torch import fx
from torch._ops import OpOverload

from fusepass.patterns.memo import remembered

aten = torch.ops.aten

_MASKS = (torch.bool, torch.uint8)


_STATES = {"rng_state", "philox_seed", "philox_offset"}


@remembered
def is_random(target: object) -> bool:
    """Whether `target` draws random numbers: not where it takes the state of the generator that forward drew from."""
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    return _STATES.isdisjoint(argument.name for argument in target._schema.arguments)


def drawn_before(graph: fx.Graph) -> set[fx.Node]:
    """What calls of `graph` are given of the state that the generator had when somebody drew."""
    return {
        given
        for node in graph.nodes
        if isinstance(node.target, OpOverload)
        for argument, given in zip(node.target._schema.arguments, node.args, strict=False)
        if argument.name in _STATES and isinstance(given, fx.Node)
    }


def draws(node: fx.Node) -> bool:
    """Whether this call draws random numbers: attention without dropout does not, though its operator may."""
    if not is_random(node.target):
        return False
    for argument, given in zip_longest(node.target._schema.arguments, node.args):  # type: ignore[union-attr]
        if argument.name == "dropout_p":
            value = node.kwargs.get("dropout_p", argument.default_value) if given is None else given
            return bool(value != 0)
    return True


@remembered
def writes(target: object) -> bool:
    """Whether `target` writes to an argument."""
    return isinstance(target, OpOverload) and target._schema.is_mutable


def may_be_repeated(graph: fx.Graph) -> bool:
    """Whether `graph` may be run again to no effect: none of its operators is one that draws random numbers or writes."""
    return not any(draws(node) or writes(node.target) for node in graph.nodes if node.op == "call_function")


def waits_for_host(target: object, tensors: Iterable[object]) -> bool:
    """Whether the host needs the result of `target`, or its size, to go on, given the `tensors` that it reads.

    An index takes as many elements as it has numbers; where it is a mask, as many as hold.
    """
    if target is aten.index.Tensor:
        return any(isinstance(each, torch.Tensor) and each.dtype in _MASKS for each in islice(tensors, 1, None))
    return _depends_on_values(target)


@remembered
def _depends_on_values(target: object) -> bool:
    tags = target.tags if isinstance(target, OpOverload) else ()
    return torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags


def is_constant_number(node: fx.Node) -> bool:
    """Whether `node` is a 0-dim CPU constant, such as ``torch.tensor(0.5)`` in forward: to kernels a number."""
    source = node
    while source.target is aten.lift_fresh_copy.default:
        (source,) = source.all_input_nodes
    value = node.meta.get("val")
    return source.op == "get_attr" and isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_cpu
