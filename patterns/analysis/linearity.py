"""How a value depends linearly on others: a sum of terms, each a value times factors.

Additions, multiplications by what does not contain the value asked for, and batch normalisation by running statistics
are taken apart. What is not linear stays whole, as a value of its own.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fusepass.patterns.arguments import arguments

aten = torch.ops.aten

_EVALUATED = aten._native_batch_norm_legit_no_training.default
"""Batch normalisation by running statistics."""

MOST_TERMS = 16
MOST_DEPTH = 24
"""A value that is made of more terms, or in more steps, is not taken apart."""

Wanted = Callable[[fx.Node], bool]


@dataclass(frozen=True)
class Operand:
    """A tensor of the graph as it stands in a term.

    Attributes:
        node: the tensor.
        shape: what it is viewed as, so that it broadcasts with the value that is taken apart.
        eps: not None where ``1 / sqrt(node + eps)`` is meant.
    """

    node: fx.Node
    shape: tuple[int, ...]
    eps: float | None = None

    @staticmethod
    def of(node: fx.Node) -> Operand:
        """`node` as it is."""
        return Operand(node, tuple(node.meta["val"].shape))

    def varies(self, dim: int) -> bool:
        """Whether it differs along `dim`, counted from the right: -1 is the last."""
        return -dim <= len(self.shape) and self.shape[dim] != 1


@dataclass(frozen=True)
class Factor:
    """A tensor that a term is multiplied with, or divided by."""

    operand: Operand
    divides: bool = False


@dataclass(frozen=True)
class Term:
    """``number * value * factors``; without a value, the number times the factors."""

    value: Operand | None
    number: float = 1.0
    factors: tuple[Factor, ...] = ()

    def times(self, number: float) -> Term:
        """This term, multiplied by a number."""
        return Term(self.value, self.number * number, self.factors)

    def by(self, operand: Operand, divides: bool = False) -> Term:
        """This term, multiplied with or divided by a tensor."""
        return Term(self.value, self.number, (*self.factors, Factor(operand, divides)))


def terms(node: fx.Node, wanted: Wanted) -> tuple[Term, ...]:
    """Terms that add up to `node`, taken apart as far as it takes to reach the values that are `wanted`.

    A term whose value is not wanted contains no wanted value that linear operators alone lead to. Every tensor in a
    term has the type and the device of `node`.
    """
    try:
        found = _terms(node, wanted, MOST_DEPTH)
    except _TooMany:
        found = None
    return (Term(Operand.of(node)),) if found is None else found


class _TooMany(Exception):
    """There are more terms than anybody looks at."""


def _terms(node: Any, wanted: Wanted, depth: int) -> tuple[Term, ...] | None:
    """Terms of `node`, at least one of them with a wanted value; None if there are none, as of a number."""
    if not isinstance(node, fx.Node):
        return None
    if wanted(node):
        return (Term(Operand.of(node)),)
    step = _STEPS.get(node.target) if depth else None
    found = step(node, lambda inner: _terms(inner, wanted, depth - 1)) if step is not None else None
    return _usable(found, node)


def _usable(found: tuple[Term, ...] | None, node: fx.Node) -> tuple[Term, ...] | None:
    """`found`, if its numbers are ordinary ones of the type, and what `node` reads is of its kind; what that is made of has been seen to.

    Raises:
        _TooMany: nobody will take so many terms.
    """
    if found is None or not all(_is_ordinary(term.number, node.meta["val"].dtype) for term in found):
        return None
    found = _collected(found)
    if len(found) > MOST_TERMS:
        raise _TooMany
    sources = node.all_input_nodes
    read = sources[0].all_input_nodes if node.target is operator.getitem else sources
    return found if all(alike(source, node) for source in read) else None


def _is_ordinary(number: float, dtype: torch.dtype) -> bool:
    """Whether `dtype` has `number`, neither overflown nor, unless it is zero, vanished."""
    if not dtype.is_floating_point:
        return math.isfinite(number)
    return number == 0 or torch.finfo(dtype).tiny <= abs(number) <= torch.finfo(dtype).max


def _collected(found: tuple[Term, ...]) -> tuple[Term, ...]:
    """`found` with multiples of the same added up, so that nobody adds them up once they are rounded."""
    if len(found) < 2:
        return found
    numbers: dict[tuple[Operand | None, tuple[Factor, ...]], float] = {}
    for term in found:
        what = term.value, term.factors
        numbers[what] = numbers.get(what, 0.0) + term.number
    if len(numbers) == len(found) or 0.0 in numbers.values():
        return found  # what is zero for finite numbers stays NaN for others
    return tuple(Term(value, number, factors) for (value, factors), number in numbers.items())


def is_sum(node: fx.Node) -> bool:
    """Whether `node` adds or subtracts, so that there are several terms."""
    return _STEPS.get(node.target) in (_sum, _difference, _reverse_difference)


def is_linear_step(node: fx.Node) -> bool:
    """Whether `node` is an operator that is taken apart, where its arguments allow that."""
    return node.target in _STEPS or node.target is _EVALUATED


def summands(node: fx.Node) -> tuple[Term, ...]:
    """Terms that add up to `node`, taken apart as far as it goes; a value has its shape, other tensors broadcast to it."""
    try:
        found = _summands(node, tuple(node.meta["val"].shape), MOST_DEPTH)
    except _TooMany:
        found = None
    return (Term(Operand.of(node)),) if found is None else found


def _summands(node: Any, shape: tuple[int, ...], depth: int) -> tuple[Term, ...] | None:
    """Terms of `node`; None where it has another shape than the whole and none of its terms has it, and of a number."""
    if not isinstance(node, fx.Node):
        return None
    step = _STEPS.get(node.target)
    found = step(node, lambda inner: _summands(inner, shape, depth - 1)) if step is not None and depth else None
    found = _usable(found, node)
    return (Term(Operand.of(node)),) if found is None and tuple(node.meta["val"].shape) == shape else found


def alike(node: fx.Node, other: fx.Node) -> bool:
    """Whether both are tensors of one type on one device."""
    first, second = node.meta.get("val"), other.meta.get("val")
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        return False
    return first.dtype is second.dtype and first.device == second.device


Inner = Callable[[Any], "tuple[Term, ...] | None"]


def _scaled(found: Iterable[Term], number: float) -> tuple[Term, ...]:
    return tuple(term.times(number) for term in found)


def _sum(node: fx.Node, inner: Inner, sign: float = 1.0) -> tuple[Term, ...] | None:
    """``a + alpha * b``, where either may be a number."""
    given = arguments(node)
    first, second, alpha = given["self"], given["other"], given["alpha"]
    if not _is_number(alpha):
        return None
    parts = [(value, inner(value)) for value in (first, second)]
    if all(found is None for _, found in parts):
        return None
    left, right = (_whole(value) if found is None else found for value, found in parts)
    if left is None or right is None:
        return None
    return (*left, *_scaled(right, sign * float(alpha)))


def _difference(node: fx.Node, inner: Inner) -> tuple[Term, ...] | None:
    return _sum(node, inner, -1.0)


def _reverse_difference(node: fx.Node, inner: Inner) -> tuple[Term, ...] | None:
    """``b - alpha * a``."""
    given = arguments(node)
    found, alpha, rest = inner(given["self"]), given["alpha"], _whole(given["other"])
    if found is None or rest is None or not _is_number(alpha):
        return None
    return (*rest, *_scaled(found, -float(alpha)))


def _whole(value: Any) -> tuple[Term, ...] | None:
    """A value that is not taken apart."""
    if isinstance(value, fx.Node):
        return (Term(Operand.of(value)),)
    return (Term(None, float(value)),) if _is_number(value) else None


def _product(node: fx.Node, inner: Inner) -> tuple[Term, ...] | None:
    first, second = arguments(node)["self"], arguments(node)["other"]
    if not isinstance(first, fx.Node):  # `torch.mul(2, x)`
        first, second = second, first
    if not isinstance(second, fx.Node):
        found = inner(first)
        return _scaled(found, float(second)) if found is not None and _is_number(second) else None
    left, right = inner(first), inner(second)
    if (left is None) is (right is None):
        return None  # nothing wanted, or a product of two wanted values
    found, factor = (left, second) if left is not None else (right, first)
    assert found is not None
    return tuple(term.by(Operand.of(factor)) for term in found)


def _quotient(node: fx.Node, inner: Inner) -> tuple[Term, ...] | None:
    given = arguments(node)
    first, second = given["self"], given["other"]
    found = inner(first) if given.get("rounding_mode") is None else None
    if found is None:
        return None
    if isinstance(second, fx.Node):
        return tuple(term.by(Operand.of(second), divides=True) for term in found) if inner(second) is None else None
    usable = _is_number(second) and second != 0 and math.isfinite(1 / second)
    return _scaled(found, 1 / second) if usable else None


def _negation(node: fx.Node, inner: Inner) -> tuple[Term, ...] | None:
    found = inner(arguments(node)["self"])
    return None if found is None else _scaled(found, -1.0)


def _same(node: fx.Node, inner: Inner) -> tuple[Term, ...] | None:
    return inner(node.all_input_nodes[0])


def _by_running_statistics(node: fx.Node, inner: Inner) -> tuple[Term, ...] | None:
    """Batch normalisation in evaluation: ``(x - mean) / sqrt(variance + eps) * weight + bias`` per channel."""
    producer = node.all_input_nodes[0]
    if producer.target is not _EVALUATED or node.args[1] != 0:
        return None
    given = arguments(producer)
    found = inner(given["input"])
    if found is None:
        return None

    def channelwise(vector: fx.Node, eps: float | None = None) -> Operand:
        """A vector of channels in the shape in which it broadcasts with `node`."""
        return Operand(vector, (node.meta["val"].shape[1], *(1,) * (node.meta["val"].dim() - 2)), eps)

    normalised = (*found, Term(channelwise(given["running_mean"]), -1.0))
    factors = [channelwise(given["running_var"], float(given["eps"]))]
    factors += [] if given["weight"] is None else [channelwise(given["weight"])]
    for operand in factors:
        normalised = tuple(term.by(operand) for term in normalised)
    bias = () if given["bias"] is None else (Term(channelwise(given["bias"])),)
    return (*normalised, *bias)


def _is_number(value: object) -> bool:
    return type(value) in (int, float, bool) and math.isfinite(value)  # type: ignore[arg-type]


_STEPS: dict[Any, Callable[[fx.Node, Inner], tuple[Term, ...] | None]] = {
    aten.add.Tensor: _sum,
    aten.add.Scalar: _sum,
    aten.sub.Tensor: _difference,
    aten.sub.Scalar: _difference,
    aten.rsub.Tensor: _reverse_difference,
    aten.rsub.Scalar: _reverse_difference,
    aten.mul.Tensor: _product,
    aten.mul.Scalar: _product,
    aten.div.Tensor: _quotient,
    aten.div.Scalar: _quotient,
    aten.div.Tensor_mode: _quotient,
    aten.neg.default: _negation,
    aten.clone.default: _same,
    aten.detach.default: _same,
    aten.alias.default: _same,
    operator.getitem: _by_running_statistics,
}
"""How to take apart what an operator gives; `Inner` takes its arguments apart."""
