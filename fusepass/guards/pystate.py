"""The Python state of a module: attributes, and the containers and objects they hold, but no tensor's values.

Tracing runs Python once. What the traced code read must be the same at a later call (`PythonState`), and what it
changed would not be changed again, so a model that changes anything is not traced (`fusepass.capture.snapshot`).

Seen are the attributes of every submodule, and what they hold: lists, dicts, sets, plain objects and small arrays, to a
few levels. Globals, closures and class attributes are found by reading bytecode (`fusepass.guards.surroundings`).
"""

from __future__ import annotations

import collections
import enum
import functools
import logging
import operator
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence, MutableSet, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import numpy
import torch
from torch import nn

from fusepass.guards.surroundings import MISSING
from fusepass.structure import is_plain, plain_key

_DEPTH = 4
LARGE = 1000
"""Containers with more entries (a vocabulary) are compared by length, not by entry."""

_LARGE_ARRAY = 4096
"""Bytes; larger arrays of NumPy are data."""

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
INFRASTRUCTURE = frozenset(vars(nn.Module())) - {"training"}
"""Attributes that PyTorch gives every module."""
HELD = (
    "_parameters",
    "_buffers",
    "_modules",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
"""Those that must stay the same dicts: their entries are followed."""
DERIVED = frozenset({"_flat_weights", "_flat_weight_refs"})
"""What ``nn.RNNBase`` derives from its parameters, anew whenever it finds others."""

Container = MutableMapping[Any, Any] | MutableSequence[Any] | MutableSet[Any]


class _Entry(Protocol):
    """What a `View` has under a key."""

    @property
    def get(self) -> Callable[[], Any]:
        """What reads it; `MISSING` where it is not there."""

    def put(self, value: Any) -> None:
        """Give it this value."""

    def drop(self) -> None:
        """Take it away."""


@dataclass(frozen=True)
class _Slot:
    """What an object has in a slot."""

    owner: object
    name: str

    @property
    def get(self) -> Callable[[], Any]:
        return functools.partial(getattr, self.owner, self.name, MISSING)

    def put(self, value: Any) -> None:
        object.__setattr__(self.owner, self.name, value)  # it may be frozen

    def drop(self) -> None:
        object.__delattr__(self.owner, self.name)


@dataclass(frozen=True)
class _Elements:
    """What an array of NumPy holds, as a plain value."""

    array: numpy.ndarray[Any, Any]

    @property
    def get(self) -> Callable[[], Any]:
        return lambda: (str(self.array.dtype), self.array.shape, self.array.tobytes())

    def put(self, value: Any) -> None:
        _, shape, memory = value
        self.array[...] = numpy.frombuffer(memory, self.array.dtype).reshape(shape)

    def drop(self) -> None:
        raise TypeError("an array has elements")


class View(MutableMapping[Any, Any]):
    """What is in no dict, as if it were: those of `entries` that are there."""

    def __init__(self, entries: Mapping[Any, _Entry]) -> None:
        self._entries = entries

    def __getitem__(self, key: Any) -> Any:
        value = self._entries[key].get()
        if value is MISSING:
            raise KeyError(key)
        return value

    def __setitem__(self, key: Any, value: Any) -> None:
        self._entries[key].put(value)

    def __delitem__(self, key: Any) -> None:
        self._entries[key].drop()

    def __iter__(self) -> Iterator[Any]:
        return (key for key, entry in self._entries.items() if entry.get() is not MISSING)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Kind(enum.Enum):
    MODULE = enum.auto()  # the attributes of a submodule
    INFRASTRUCTURE = enum.auto()  # what nn.Module keeps there: parameters, hooks
    VALUE = enum.auto()  # what the user keeps there
    AROUND = enum.auto()  # variables outside of the model


@dataclass(frozen=True)
class Place:
    """A container and how it is reached, such as ``self.conv`` for that submodule's attributes."""

    label: str
    container: Container
    kind: Kind = Kind.VALUE

    def label_of(self, key: Any) -> str:
        """How the entry `key` is reached."""
        if self.kind is Kind.AROUND:
            return str(key)
        return f"{self.label}[{key!r}]" if self.kind is Kind.VALUE else f"{self.label}.{key}"


def places(model: nn.Module, seen: set[int]) -> Iterator[Place]:
    """Every container that holds Python state of `model`, each once."""
    for name, module in model.named_modules():
        label = f"self.{name}" if name else "self"
        yield Place(label, vars(module), Kind.MODULE)
        for attribute, value in vars(module).items():
            if attribute not in INFRASTRUCTURE | DERIVED:
                yield from places_in(value, f"{label}.{attribute}", seen, _DEPTH)
            elif isinstance(value, MutableMapping | MutableSet):
                yield Place(label, value, Kind.INFRASTRUCTURE)


def places_in(value: object, label: str, seen: set[int], depth: int) -> Iterator[Place]:
    if depth <= 0 or id(value) in seen or isinstance(value, (nn.Module, *_SKIPPED)) or is_plain(value):
        return
    seen.add(id(value))
    entries: Iterator[tuple[str, object]]
    if isinstance(value, MutableMapping):
        yield Place(label, value)
        entries = ((f"{label}[{key!r}]", entry) for key, entry in list(value.items()))
    elif isinstance(value, MutableSequence | tuple):
        if not isinstance(value, tuple):
            yield Place(label, value)
        entries = ((f"{label}[{index}]", entry) for index, entry in enumerate(value))
    elif isinstance(value, MutableSet):
        yield Place(label, value)
        return
    elif isinstance(value, numpy.ndarray):
        if value.nbytes <= _LARGE_ARRAY and not value.dtype.hasobject:
            yield Place(label, View({"elements": _Elements(value)}))
        return
    else:  # an object
        spaces: list[MutableMapping[str, Any]] = [vars(value)] if hasattr(value, "__dict__") else []
        slots = {name: _Slot(value, name) for name in _slots(type(value))}
        spaces += [View(slots)] if slots else []
        yield from (Place(label, space) for space in spaces)
        entries = ((f"{label}.{key}", entry) for space in spaces for key, entry in list(space.items()))
    for inner, entry in entries:
        yield from places_in(entry, inner, seen, depth - 1)


def _slots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        if "__slots__" in vars(base) and not base.__module__.startswith("fusepass."):  # those keep what is no state
            members = vars(base).items()
            yield from (name for name, member in members if isinstance(member, types.MemberDescriptorType))


def same(old: object, new: object) -> bool:
    """Whether what was `old` is unchanged."""
    return old is new or (is_plain(old) and is_plain(new) and plain_key(old) == plain_key(new))


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
    Of tensors, here only their number counts; `fusepass.guards.tensors` follows them.

    Attributes:
        dicts: those dicts whose entries count.
        others: what is in no dict, as a state of its own.
        lists: those of these that are lists.
        unusual: the rest of them, as a state of its own; false where there is nothing.
    """

    def __init__(self, model: nn.Module) -> None:
        containers = [place.container for place in places(model, set()) if place.kind is not Kind.INFRASTRUCTURE]
        others = [entries for entries in containers if not isinstance(entries, dict) or _is_ordered(entries)]
        self.lists = tuple(entries for entries in others if type(entries) is list and len(entries) <= LARGE)
        containers += [entries for m in model.modules() for entries in (m._modules, m._parameters, m._buffers)]
        hooks = [vars(m)[name] for m in model.modules() if m is not model for name in _FORWARD_HOOKS]
        hooks += _GLOBAL_FORWARD_HOOKS
        self._all = _Recorded(containers, hooks)
        self.dicts = tuple(entries for entries in (*containers, *hooks) if isinstance(entries, dict))
        self.others = _Recorded(others)
        listed = set(map(id, self.lists))
        self.unusual = _Recorded([entries for entries in others if id(entries) not in listed])

    def unchanged(self) -> bool:
        """Whether everything is as recorded."""
        return self._all.unchanged()


def _is_ordered(container: Container) -> bool:
    """Whether it is a dict whose version says nothing of the order of its keys."""
    return isinstance(container, collections.OrderedDict)


class _Recorded:
    """The entries of some containers at one moment, and that others, `empty` ones, have none."""

    def __init__(self, containers: Sequence[Container], empty: Sequence[Container] = ()) -> None:
        self._empty = [entries for entries in containers if not entries] + list(empty)
        self._filled = [entries for entries in containers if entries]
        self._lengths = list(map(len, self._filled))
        readers = (_reader(entries) for entries in self._filled if len(entries) <= LARGE)
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
            if not same(old, new):
                return False
        self._values = now
        return True


def _reader(container: Container) -> Callable[[], tuple[Any, ...]] | None:
    """A quick way to get the entries of `container` that are to stay as they are; None where there are none."""
    if not isinstance(container, MutableMapping):
        return functools.partial(tuple, container)
    if _is_ordered(container):
        return lambda: (*container, *(value for value in container.values() if not isinstance(value, torch.Tensor)))
    keys = [
        key
        for key, value in container.items()
        if key not in (INFRASTRUCTURE - set(HELD)) | DERIVED and not isinstance(value, torch.Tensor)
    ]
    if not keys:
        return None
    # With one key, itemgetter gives the bare value.
    return functools.partial(operator.itemgetter(*keys, keys[0]), container)
