"""Sizes of tensors that are left open: how they follow from one another, and for which ones a program is right."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from fusepass.errors import ArtifactError

_LEAST = 2
"""torch.export takes open sizes to be at least this: of tensors of one element or none other things are true."""

_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "Add": lambda *terms: sum(terms),
    "Mul": lambda *factors: prod(factors),
    "Pow": pow,
    "PowByNatural": pow,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "Max": max,
    "Min": min,
    "Equality": operator.eq,
    "Unequality": operator.ne,
    "LessThan": operator.le,
    "StrictLessThan": operator.lt,
    "GreaterThan": operator.ge,
    "StrictGreaterThan": operator.gt,
    "And": lambda *parts: all(parts),
    "Or": lambda *parts: any(parts),
    "Not": operator.not_,
}
"""What expressions of SymPy, and PyTorch's own, are called, and what they are of numbers."""

Term = int | str | list[Any]
"""A number, the name of an open size, or the name of a function and its terms."""


def term_of(expression: Any) -> Term:
    """An expression of SymPy as JSON holds it.

    Raises:
        ArtifactError: there is a function in it that is not known here.
    """
    if expression.is_Integer:
        return int(expression)
    if expression.is_Symbol:
        return str(expression)
    kind = type(expression).__name__
    if kind in ("BooleanTrue", "BooleanFalse"):
        return int(bool(expression))
    if kind not in _FUNCTIONS:
        raise ArtifactError(f"sizes depend on one another by {kind}, which an artifact has no form for: {expression}")
    return [kind, *map(term_of, expression.args)]


def value_of(term: Term, sizes: Mapping[str, int]) -> Any:
    """What `term` is where open sizes are these."""
    if isinstance(term, list):
        name, *terms = term
        return _FUNCTIONS[name](*(value_of(each, sizes) for each in terms))
    return sizes[term] if isinstance(term, str) else term


def names_in(term: Term) -> set[str]:
    """The open sizes in `term`."""
    if isinstance(term, list):
        return set().union(*map(names_in, term[1:]))
    return {term} if isinstance(term, str) else set()


@dataclass(frozen=True)
class OpenSizes:
    """The sizes of the tensors of a call, some of them open.

    Attributes:
        shapes: of each tensor.
        ranges: the least and the largest of each open size; None where it has no end.
        conditions: what must hold of them.
    """

    shapes: Sequence[Sequence[Term]]
    ranges: Mapping[str, Sequence[int | None]]
    conditions: Sequence[Term]

    def shapes_at(self, sizes: Mapping[str, int]) -> list[tuple[int, ...]]:
        """The shapes of the tensors where open sizes are these."""
        return [tuple(value_of(term, sizes) for term in terms) for terms in self.shapes]

    def problem(self, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> str | None:
        """Why tensors with these names and `shapes` do not fit; None where they do."""
        given = [
            (f"size {dim} of {name}", term, number)
            for name, terms, shape in zip(names, self.shapes, shapes, strict=True)
            for dim, (term, number) in enumerate(zip(terms, shape, strict=True))
        ]
        sizes: dict[str, int] = {}
        for _, term, number in given:
            if isinstance(term, str):
                sizes.setdefault(term, number)
        for where, term, number in given:
            if isinstance(term, str) and sizes[term] == number:
                low, high = self.ranges.get(term, (None, None))
                low = max(low or 0, _LEAST)
                if number < low or (high is not None and number > high):
                    return f"{where} is {number}, not {f'{low} or more' if high is None else f'from {low} to {high}'}"
            elif (wanted := value_of(term, sizes)) != number:
                return f"{where} is {number}, not {wanted}"
        broken = next((each for each in self.conditions if not value_of(each, sizes)), None)
        return None if broken is None else f"its sizes {sizes} are such that the model may do something else ({broken})"
