"""The Python state of a model and around it at one moment, so that what tracing changes is noticed and put back."""

from __future__ import annotations

import array
import ast
import collections
import copy
import itertools
import sys
from collections.abc import Iterator, MutableMapping, MutableSequence, MutableSet
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn

from fusepass.guards.pystate import DERIVED, LARGE, Container, Kind, Place, View, places, places_in, same
from fusepass.guards.surroundings import MISSING, Surroundings

_ITERATORS: tuple[type, ...] = (itertools.count, *(type(iter(entries)) for entries in ((), [1], range(0))))
"""Iterators of which a copy goes on by itself."""

_CONTAINERS = (dict, list, set, bytearray, array.array, collections.deque)

_BUILT_IN = (collections.OrderedDict, *_CONTAINERS)

_Copy: TypeAlias = dict[Any, Any] | list[Any] | set[Any]


@dataclass(frozen=True)
class Change:
    """Python state that was changed.

    Attributes:
        label: which, such as ``self.step``.
        followed: whether Dynamo would make that change at each call. It ignores a deque's `maxlen` and the order of keys.
    """

    label: str
    followed: bool = True


class Snapshot:
    """The Python state of `model`, and around it, at one moment.

    Iterators that it holds give way to copies until `undo_changes`: none can be set back.
    """

    def __init__(self, model: nn.Module, *, around: bool = True) -> None:
        seen: set[int] = set()
        found = [*places(model, seen), *(_places_around(model, seen) if around else ())]
        self._iterators = [held for place in found for held in _stood_in(place)]
        self._copies = [(place, _copied(place.container)) for place in found]

    def undo_changes(self) -> Change | None:
        """Put everything back as it was; says what was changed, or None."""
        changes = []
        for place, before in self._copies:
            label = _difference(place, before)
            if label is not None:
                lost = isinstance(place.container, collections.deque) or not _in_order(place, before)
                changes.append(Change(label, not lost))
                _restore(place, before)
        for container, key, label, iterator, copied in self._iterators:
            _methods(container).__setitem__(container, key, iterator)
            if _state(iterator) != _state(copied):
                changes.append(Change(label))
        return min(changes, key=lambda change: change.followed, default=None)


def _stood_in(place: Place) -> Iterator[tuple[MutableMapping[Any, Any], Any, str, Any, Any]]:
    """Put copies of the iterators there in their places: container, key, label, iterator and copy of each."""
    container = place.container
    if isinstance(container, MutableMapping):
        methods = _methods(container)
        for key, entry in list(methods.items(container)):
            if isinstance(entry, _ITERATORS):
                copied = _continued(entry)
                methods.__setitem__(container, key, copied)
                yield container, key, place.label_of(key), entry, copied


def _continued(iterator: Any) -> Any:
    """Another iterator that goes on as this one does.

    Raises:
        TypeError: there is no telling how it goes on.
    """
    told = type(iterator) is itertools.count and sys.version_info >= (3, 14)  # which copies none
    return _count_as_told(repr(iterator)) if told else copy.copy(iterator)


def _count_as_told(text: str) -> itertools.count[Any]:
    """The count with this ``repr``.

    Raises:
        TypeError: it counts by other numbers than Python's own.
    """
    try:
        return itertools.count(*ast.literal_eval(f"({text[len('count(') : -1]},)"))
    except (ValueError, SyntaxError) as error:
        raise TypeError(f"{text} cannot be copied") from error


def _state(iterator: Any) -> object:
    """Equal for iterators that go on alike."""
    return repr(iterator) if type(iterator) is itertools.count else iterator.__reduce__()


def _places_around(model: nn.Module, seen: set[int]) -> Iterator[Place]:
    """Every container that forward of `model` names outside of it, and the variables there."""
    around = Surroundings(model)
    yield Place("", View({variable: variable for variable in around.variables.values()}), Kind.AROUND)
    held = [(str(variable), variable.get()) for variable in around.variables.values()]
    held += [(f"a default of {name}", default) for name, default in around.defaults.values()]
    for label, value in held:
        if isinstance(value, _CONTAINERS):
            yield from places_in(value, label, seen, 1 if len(value) > LARGE else 2)


def _methods(container: Container) -> Any:
    """The class whose methods read and write `container` and do nothing else: a subclass's may change keys, or take other arguments."""
    return next((kind for kind in _BUILT_IN if isinstance(container, kind)), type(container))


def _entries(container: MutableMapping[Any, Any]) -> dict[Any, Any]:
    return dict(_methods(container).items(container))


def _copied(container: Container) -> _Copy:
    if isinstance(container, MutableMapping):
        return _entries(container)
    return set(container) if isinstance(container, MutableSet) else list(container)


def _difference(place: Place, before: _Copy) -> str | None:
    now = place.container
    if isinstance(now, MutableSet):  # a copy may have another order
        return None if sorted(map(id, now)) == sorted(map(id, before)) else place.label
    if not isinstance(now, MutableMapping) or not isinstance(before, dict):
        return None if len(now) == len(before) and all(map(same, now, before)) else place.label
    found = _entries(now)
    for key in {**before, **found}.keys() - DERIVED:
        if not same(before.get(key, MISSING), found.get(key, MISSING)):
            return place.label_of(key)
    return None if _in_order(place, before) else place.label


def _in_order(place: Place, before: _Copy) -> bool:
    """Whether the keys of a user's dict, if it has those of `before`, are in the same order."""
    now = place.container
    if place.kind is not Kind.VALUE or not isinstance(now, MutableMapping) or not isinstance(before, dict):
        return True
    return now.keys() != before.keys() or list(now) == list(before)


def _restore(place: Place, before: _Copy) -> None:
    container: Any = place.container
    methods = _methods(container)
    if isinstance(container, MutableMapping) and isinstance(before, dict):
        for key in _entries(container).keys() - before.keys():
            methods.__delitem__(container, key)
        for key, value in before.items():
            if not same(methods.get(container, key, MISSING), value):
                methods.__setitem__(container, key, value)
        if not _in_order(place, before):
            methods.clear(container)
            methods.update(container, before)
    elif isinstance(container, list | bytearray):
        methods.__setitem__(container, slice(None), before)
    elif isinstance(container, MutableSequence):
        if isinstance(container, array.array):
            methods.__delitem__(container, slice(None))
        else:
            methods.clear(container)
        methods.extend(container, before)
    elif isinstance(container, MutableSet):
        for entry in _copied(container):
            if entry not in before:
                methods.discard(container, entry)
        for entry in before:
            methods.add(container, entry)
