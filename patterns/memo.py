"""Remembers what a function says of an operator."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

T = TypeVar("T")


def remembered(function: Callable[[Any], T]) -> Callable[[Any], T]:
    """`function`, asked once for each operator; as `functools.cache`, which would hash operators, in Python, at each call.

    `forget` of the result is for tests that change what the function looks at.
    """
    known: dict[int, tuple[Any, T]] = {}  # with the operator, so that no other one gets its identity

    @wraps(function)
    def ask(target: Any) -> T:
        try:
            return known[id(target)][1]
        except KeyError:
            known[id(target)] = target, function(target)
            return known[id(target)][1]

    ask.forget = known.clear  # type: ignore[attr-defined]
    return ask
