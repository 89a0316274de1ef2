"""What forward reads from outside of its module, and tracing takes for constant: globals, closures, class attributes.

Found by the names in the bytecode of forward, of functions that modules hold as attributes, and of the Python functions and
methods that these name, in all bases of a class. Watched are plain values, lists and dicts of them, also as attributes of a
module or class that is named (`config.SCALE`), and which function a method of a module is. PyTorch's own modules and those
that come with Python are left out: theirs do not change.
"""

from __future__ import annotations

import enum
import functools
import operator
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from fusepass.structure import is_plain, plain_key

_DEPTH = 4
_LARGE = 64
"""Entries of a list or dict; larger ones are data rather than settings."""

_CONSTANT = sys.stdlib_module_names | {"torch", "numpy", "fusepass"}

_INSTALLED = {"site-packages", "dist-packages"}
"""Folders of packages."""

MISSING: Any = object()
"""Stands for what is not there."""

_INSIDE: dict[type, str] = {
    types.FunctionType: "__wrapped__",
    functools._lru_cache_wrapper: "__wrapped__",
    types.MethodType: "__func__",
    classmethod: "__func__",
    staticmethod: "__func__",
    property: "fget",
    functools.cached_property: "func",
    functools.partial: "func",
    functools.partialmethod: "func",
}
"""Where what runs a function has it."""

_LAYERS = 16
"""How many of these may be around a function."""

Reader = Callable[[], object]


@dataclass(frozen=True, eq=False)
class Variable:
    """A global, an attribute of a module or class, or what a closure's cell holds: there or not.

    Attributes:
        owner: a dict of globals, a module, a class or a cell.
        name: its own.
    """

    owner: Any
    name: str

    def __str__(self) -> str:
        owner = getattr(self.owner, "__name__", None)
        if owner is not None:
            return f"{owner}.{self.name}"
        return f"global {self.name}" if isinstance(self.owner, dict) else f"{self.name} of a closure"

    @property
    def get(self) -> Callable[[], Any]:
        """What reads it; `MISSING` where it is not there."""
        return _entry(self.owner, self.name)

    def put(self, value: object) -> None:
        """Give it this value."""
        if isinstance(self.owner, types.CellType):
            self.owner.cell_contents = value
        else:
            (operator.setitem if isinstance(self.owner, dict) else setattr)(self.owner, self.name, value)

    def drop(self) -> None:
        """Take it away."""
        if isinstance(self.owner, types.CellType):
            del self.owner.cell_contents
        else:
            (operator.delitem if isinstance(self.owner, dict) else delattr)(self.owner, self.name)


def _entry(owner: Any, name: str) -> Callable[[], Any]:
    """What reads a `Variable`."""
    if isinstance(owner, types.CellType):
        return functools.partial(_content, owner)
    entries = owner if isinstance(owner, dict) else vars(owner)
    return functools.partial(entries.get, name, MISSING)


def readers(model: nn.Module) -> tuple[Reader, ...]:
    """What reads each such value of `model` as it is, as a key that is equal for equal values."""
    return tuple(Surroundings(model).readers.values())


class Surroundings:
    """What forward of `model`, and what it calls, names outside of it.

    Attributes:
        variables: all of them, whatever they hold, but for those of installed packages: what these change there is what they remember.
        defaults: lists and dicts that are default values of parameters, and the functions' names, but for theirs.
        readers: what `readers` gives.
    """

    def __init__(self, model: nn.Module) -> None:
        self.variables: dict[tuple[int, str], Variable] = {}
        self.defaults: dict[int, tuple[str, list[Any] | dict[Any, Any]]] = {}
        self.readers: dict[tuple[int, str], Reader] = {}
        self._seen: set[tuple[types.FunctionType, type]] = set()
        for kind in dict.fromkeys(map(type, model.modules())):
            for name in ("__call__", "forward"):
                self._look_at_class(kind, name, _DEPTH + 1)
        for module in model.modules():
            for value in vars(module).values():  # an activation, say
                self._look_behind(value, type(module), _DEPTH)

    def _look_behind(self, value: object, kind: type, depth: int) -> None:
        """Look into the functions that `value` runs, if any; `self` is a `kind` there."""
        for function in _functions(value):
            if not _is_constant(function) and depth > 0 and (function, kind) not in self._seen:
                self._seen.add((function, kind))
                self._look_into(function, kind, depth)

    def _look_into(self, function: types.FunctionType, kind: type, depth: int) -> None:
        file = function.__globals__.get("__file__")
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            if isinstance(default, dict | list):
                if not _is_installed(file):
                    self.defaults[id(default)] = function.__name__, default
                if _is_setting(default):
                    self.readers.setdefault((id(default), ""), functools.partial(_key, default))
        names = dict.fromkeys(_names(function.__code__))
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        named = [self._look_at(cell, name, kind, depth, file) for name, cell in cells]
        named += [self._look_at(function.__globals__, name, kind, depth, file) for name in names]
        for space in _spaces(named, names):
            for name in names:
                self._look_at(space, name, space if isinstance(space, type) else kind, depth, _file(space))
        for name in names:
            self._look_at_class(kind, name, depth)

    def _look_at(self, owner: object, name: str, kind: type, depth: int, file: str | None) -> Any:
        """The entry `name` of `owner`, of a module in `file`; it becomes a variable, and a function in it is looked into."""
        variable = Variable(owner, name)
        if not _is_installed(file):
            variable = self.variables.setdefault((id(owner), name), variable)
        value = variable.get()
        if _is_setting(value):
            self.readers.setdefault((id(owner), name), functools.partial(_read_key, variable.get))
        else:
            self._look_behind(value, kind, depth - 1)
        return value

    def _look_at_class(self, kind: type, name: str, depth: int) -> None:
        """Look at attribute `name` in all bases of `kind`, which `super()` may lead to, and see what `kind` has for it."""
        bases = [base for base in kind.__mro__ if not _is_constant(base)]
        found = {base: self._look_at(base, name, kind, depth, _file(base)) for base in bases}
        owners = [base for base, value in found.items() if value is not MISSING]
        for base in owners:
            # What the class itself has is read as `self` finds it: a derived class may come to hide it.
            read = functools.partial(getattr, kind, name, None) if base is owners[0] else _entry(base, name)
            key = id(kind if base is owners[0] else base), name
            if _is_setting(found[base]):
                self.readers[key] = functools.partial(_read_key, read)
            elif isinstance(found[base], tuple(_INSIDE)) and read() == read():  # some are made anew each time
                self.readers[key] = read


def _functions(value: object) -> Iterator[types.FunctionType]:
    """Those that `value` runs, if it is a function, method, property or the like: what decorates another one, then that."""
    for _ in range(_LAYERS):
        if isinstance(value, types.FunctionType):
            yield value
        inside = next((name for kind, name in _INSIDE.items() if isinstance(value, kind)), None)
        if inside is None:
            return
        value = getattr(value, inside, None)


def _spaces(things: Iterable[object], names: Iterable[str]) -> Iterable[Any]:
    """The modules and classes among `things`, and those that are attributes of them by these names."""
    found: dict[int, Any] = {}
    pending = list(things)
    while pending:
        thing = pending.pop()
        if isinstance(thing, types.ModuleType | type) and not _is_constant(thing) and id(thing) not in found:
            found[id(thing)] = thing
            pending += [vars(thing)[name] for name in names if name in vars(thing)]
    return found.values()


def _file(thing: types.ModuleType | type) -> str | None:
    """Where the module is from that `thing` is, or is of."""
    return getattr(
        thing if isinstance(thing, types.ModuleType) else sys.modules.get(thing.__module__), "__file__", None
    )


def _is_installed(file: str | None) -> bool:
    """Whether it is of a package that was installed, rather than the user's own."""
    return file is not None and not _INSTALLED.isdisjoint(Path(file).parts)


def _is_constant(thing: types.ModuleType | type | types.FunctionType) -> bool:
    """Whether `thing` is PyTorch's or comes with Python, or is an enum."""
    if isinstance(thing, types.FunctionType):
        home = thing.__globals__.get("__name__")  # a decorated one's `__module__` is that of what it decorates
    else:
        home = thing.__name__ if isinstance(thing, types.ModuleType) else thing.__module__
    return str(home).partition(".")[0] in _CONSTANT or (isinstance(thing, type) and issubclass(thing, enum.Enum))


def _is_setting(value: object) -> bool:
    return is_plain(value) or (isinstance(value, dict | list) and len(value) <= _LARGE)


def _read_key(read: Reader) -> object:
    return _key(read())


def _key(value: Any) -> object:
    if isinstance(value, list):
        return tuple(map(plain_key, value))
    if isinstance(value, Mapping):
        return tuple((plain_key(name), plain_key(entry)) for name, entry in value.items())
    return plain_key(value)


def _content(cell: types.CellType) -> object:
    """What a closure's cell holds."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def _names(code: types.CodeType) -> Iterator[str]:
    """The names of globals and attributes in `code` and the functions defined in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
