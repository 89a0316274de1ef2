"""The Python state of a module: attributes, and the containers and objects they hold, but no tensor's values.

Tracing runs Python once. What the traced code read must be the same at a later call (`PythonState`), and what it
changed would not be changed again, so a model that changes anything is not traced (`Snapshot`).

Seen are the attributes of every submodule, and what they hold: lists, dicts, sets and plain objects, to a few
levels. Globals, closures and class attributes are found by reading bytecode (`fusepass.surroundings`).
"""

from __future__ import annotations

import enum
import functools
import logging
import operator
import types
from collections.abc import Callable, Iterator, MutableMapping, MutableSequence, MutableSet, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn

from fusepass.structure import is_plain, plain_key

_DEPTH = 4
_LARGE = 1000
"""Containers with more entries (a vocabulary) are compared by length, not by entry."""

_SKIPPED = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    functools.partial,
    logging.Logger,
    torch.Tensor,
)
_FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_GLOBAL_FORWARD_HOOKS: tuple[dict[int, Any], ...] = (
    nn.modules.module._global_forward_hooks,
    nn.modules.module._global_forward_pre_hooks,
)
_INFRASTRUCTURE = frozenset(vars(nn.Module())) - {"training"}
_DERIVED = frozenset({"_flat_weights", "_flat_weight_refs"})
"""What ``nn.RNNBase`` derives from its parameters, anew whenever it finds others."""

Container = MutableMapping[Any, Any] | MutableSequence[Any] | MutableSet[Any]


class _Kind(enum.Enum):
    MODULE = enum.auto()  # the attributes of a submodule
    INFRASTRUCTURE = enum.auto()  # what nn.Module keeps there: parameters, hooks
    VALUE = enum.auto()  # what the user keeps there


@dataclass(frozen=True)
class _Place:
    """A container and how it is reached, such as ``self.conv`` for that submodule's attributes."""

    label: str
    container: Container
    kind: _Kind = _Kind.VALUE


def _places(model: nn.Module) -> Iterator[_Place]:
    """Every container that holds Python state of `model`, each once."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        label = f"self.{name}" if name else "self"
        yield _Place(label, vars(module), _Kind.MODULE)
        for attribute, value in vars(module).items():
            if attribute not in _INFRASTRUCTURE | _DERIVED:
                yield from _places_in(value, f"{label}.{attribute}", seen, _DEPTH)
            elif isinstance(value, MutableMapping | MutableSet):
                yield _Place(label, value, _Kind.INFRASTRUCTURE)


def _places_in(value: object, label: str, seen: set[int], depth: int) -> Iterator[_Place]:
    if depth <= 0 or id(value) in seen or isinstance(value, (nn.Module, *_SKIPPED)) or is_plain(value):
        return
    seen.add(id(value))
    entries: Iterator[tuple[str, object]]
    if isinstance(value, MutableMapping):
        yield _Place(label, value)
        entries = ((f"{label}[{key!r}]", entry) for key, entry in list(value.items()))
    elif isinstance(value, MutableSequence | tuple):
        if not isinstance(value, tuple):
            yield _Place(label, value)
        entries = ((f"{label}[{index}]", entry) for index, entry in enumerate(value))
    elif isinstance(value, MutableSet):
        yield _Place(label, value)
        return
    elif hasattr(value, "__dict__"):
        yield _Place(label, vars(value))
        entries = ((f"{label}.{key}", entry) for key, entry in list(vars(value).items()))
        depth -= 1  # objects lead to other objects, and those soon to the whole program
    else:
        return
    for inner, entry in entries:
        yield from _places_in(entry, inner, seen, depth - 1)


class Snapshot:
    """The Python state of `model` at one moment."""

    def __init__(self, model: nn.Module) -> None:
        self._copies = [(place, _copied(place.container)) for place in _places(model)]

    def undo_changes(self) -> str | None:
        """Put everything back as it was; says what was changed, such as ``self.step``, or None."""
        changed = None
        for place, copy in self._copies:
            changed = changed or _difference(place, copy)
            _restore(place.container, copy)
        return changed


def _copied(container: Container) -> dict[Any, Any] | list[Any] | set[Any]:
    if isinstance(container, MutableMapping):
        return dict(container)
    return set(container) if isinstance(container, MutableSet) else list(container)


def _difference(place: _Place, copy: dict[Any, Any] | list[Any] | set[Any]) -> str | None:
    now = place.container
    if isinstance(now, MutableSet):  # a copy may have another order
        return None if sorted(map(id, now)) == sorted(map(id, copy)) else place.label
    if not isinstance(now, MutableMapping) or not isinstance(copy, dict):
        same = len(now) == len(copy) and all(map(operator.is_, now, copy))
        return None if same else place.label
    missing = object()
    for key in {**copy, **now}.keys() - _DERIVED:
        if now.get(key, missing) is not copy.get(key, missing):
            return f"{place.label}[{key!r}]" if place.kind is _Kind.VALUE else f"{place.label}.{key}"
    return None


def _restore(container: Container, copy: dict[Any, Any] | list[Any] | set[Any]) -> None:
    if isinstance(container, MutableMapping) and isinstance(copy, dict):
        for key in [key for key in container if key not in copy]:
            del container[key]
        container.update(copy)
    elif isinstance(container, MutableSequence):
        container[:] = copy
    elif isinstance(container, MutableSet):
        for entry in [entry for entry in container if entry not in copy]:
            container.discard(entry)
        for entry in copy:
            container.add(entry)


def hooked_module(model: nn.Module) -> str | None:
    """A submodule of `model` with forward hooks, or "every module" for global ones; None without any.

    Hooks of `model` itself do not count: they are called with it, whatever it does inside.
    """
    if any(_GLOBAL_FORWARD_HOOKS):
        return "every module"
    hooks = (
        name
        for name, module in model.named_modules()
        if name and any(vars(module)[attribute] for attribute in _FORWARD_HOOKS)
    )
    return next(hooks, None)


class PythonState:
    """The Python state of `model`, recorded once and compared at each call in a microsecond or two.

    A value that was replaced by an equal plain value counts as unchanged; every other replacement as a change.
    Of tensors, here only their number counts; `fusepass.tensors` follows them.

    Attributes:
        dicts: those dicts whose entries count.
        others: what is in no dict, as a state of its own; false where there is nothing.
    """

    def __init__(self, model: nn.Module) -> None:
        containers = [place.container for place in _places(model) if place.kind is not _Kind.INFRASTRUCTURE]
        containers += [entries for m in model.modules() for entries in (m._modules, m._parameters, m._buffers)]
        hooks = [vars(m)[name] for m in model.modules() if m is not model for name in _FORWARD_HOOKS]
        hooks += _GLOBAL_FORWARD_HOOKS
        self._all = _Recorded(containers, hooks)
        self.dicts = tuple(entries for entries in (*containers, *hooks) if isinstance(entries, dict))
        self.others = _Recorded([entries for entries in containers if not isinstance(entries, dict)])

    def unchanged(self) -> bool:
        """Whether everything is as recorded."""
        return self._all.unchanged()


class _Recorded:
    """The entries of some containers at one moment, and that others, `empty` ones, have none."""

    def __init__(self, containers: Sequence[Container], empty: Sequence[Container] = ()) -> None:
        self._empty = [entries for entries in containers if not entries] + list(empty)
        self._filled = [entries for entries in containers if entries]
        self._lengths = list(map(len, self._filled))
        readers = (_reader(entries) for entries in self._filled if len(entries) <= _LARGE)
        self._readers = [reader for reader in readers if reader is not None]
        self._values = tuple(self._read())

    def __bool__(self) -> bool:
        """Whether there are any containers."""
        return bool(self._empty or self._filled)

    def _read(self) -> Iterator[Any]:
        return chain.from_iterable(map(operator.call, self._readers))

    def unchanged(self) -> bool:
        """Whether everything is as recorded."""
        if any(self._empty) or list(map(len, self._filled)) != self._lengths:
            return False
        try:
            return all(map(operator.is_, self._read(), self._values)) or self._equal()
        except KeyError:
            return False

    def _equal(self) -> bool:
        """The slow comparison, after which the present values are the recorded ones."""
        now = tuple(self._read())
        for old, new in zip(self._values, now, strict=True):
            if old is not new and not (is_plain(old) and is_plain(new) and plain_key(old) == plain_key(new)):
                return False
        self._values = now
        return True


def _reader(container: Container) -> Callable[[], tuple[Any, ...]] | None:
    """A quick way to get the entries of `container` that are to stay as they are; None where there are none."""
    if not isinstance(container, MutableMapping):
        return functools.partial(tuple, container)
    keys = [
        key
        for key, value in container.items()
        if key not in _INFRASTRUCTURE | _DERIVED and not isinstance(value, torch.Tensor)
    ]
    if not keys:
        return None
    # With one key, itemgetter gives the bare value.
    return functools.partial(operator.itemgetter(*keys, keys[0]), container)
