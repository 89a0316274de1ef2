"""Remembers what a function says of an operator."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar
from weakref import ref

T = TypeVar("T")


def remembered(function: Callable[[Any], T]) -> Callable[[Any], T]:
    """`function`, asked once for each operator; as `functools.cache`, which would hash operators, in Python, at each call.

    Targets of a graph may also be functions that were made for it alone: nothing here keeps a target alive, and what was said
    of one that is gone is forgotten. What has no weak references, such as the name of a placeholder, is asked each time.

    `forget` of the result is for tests that change what the function looks at.
    """
    known: dict[int, tuple[ref[Any], T]] = {}

    @wraps(function)
    def ask(target: Any) -> T:
        key = id(target)
        try:
            return known[key][1]
        except KeyError:
            said = function(target)
        try:
            # Called while the target is still there, so no other one has its identity yet.
            held = ref(target, lambda _: known.pop(key, None))
        except TypeError:
            return said
        known[key] = held, said
        return said

    ask.forget = known.clear  # type: ignore[attr-defined]
    return ask
