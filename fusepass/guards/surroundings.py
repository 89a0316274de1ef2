"""What forward reads from outside of its module, and tracing takes for constant: globals, closures, class attributes.

Found by the names in the bytecode of forward, of functions that modules hold as attributes, and of the Python functions and
methods that these name, in all bases of a class. Watched are plain values, lists and dicts of them, also as attributes of a
module or class that is named (`config.SCALE`), and which function a method of a module is. PyTorch's own modules and those
that come with Python are left out: theirs do not change.
"""

from __future__ import annotations

import dis
import enum
import functools
import gc
import logging
import operator
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
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

_RUNNING = tuple(_INSIDE)

_LAYERS = 16
"""How many of these may be around a function."""

Reader = Callable[[], object]

_CALLING = ("_call_impl", "_wrapped_call_impl", "__getattr__", "__getattribute__")
"""What a call of a module, or a look at its attributes, goes through beside `__call__`."""

_DEPTH_IN_TORCH = 2
"""Of calls that are followed from a module of PyTorch's: to `nn.functional`, and to what that calls."""

_MUTABLE = 1 << 9
"""Among the flags of a class: its attributes may be set."""

_EXTENDED = dis.opmap["EXTENDED_ARG"]
_OF_GLOBALS = {dis.opmap["LOAD_GLOBAL"]: 1, dis.opmap["STORE_GLOBAL"]: 0, dis.opmap["DELETE_GLOBAL"]: 0}
"""Instructions on globals, and by how much what gives the name is shifted."""


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
    """What reads each list and dict of settings that forward of `model` names, as a key that is equal for equal ones."""
    return tuple(Surroundings(model).readers.values())


class Surroundings:
    """What forward of `model`, and what it calls, names outside of it.

    Args:
        model: the model.
        forward: what runs in place of its forward, if anything does.

    Attributes:
        variables: all of them, whatever they hold, but for those of installed packages: what these change there is what they remember.
        defaults: lists and dicts that are default values of parameters, and the functions' names, but for theirs.
        readers: what `readers` gives.
        spaces: dicts of globals, modules and classes, PyTorch's among them, each with the names that are read there.
        functions: those that run, but for PyTorch's.
        cells: those of closures.
        methods: what reads those that modules have of their classes, as `self` or `super()` finds them.
        settings: whether there are plain values.
    """

    def __init__(self, model: nn.Module, forward: object = None) -> None:
        self.variables: dict[tuple[int, str], Variable] = {}
        self.defaults: dict[int, tuple[str, list[Any] | dict[Any, Any]]] = {}
        self.readers: dict[tuple[int, str], Reader] = {}
        self.spaces: dict[int, tuple[dict[str, Any], dict[str, None]]] = {}
        self.functions: dict[types.FunctionType, None] = {}
        self.cells: dict[int, types.CellType] = {}
        self.methods: dict[tuple[type, str], Reader] = {}
        self.settings = False
        self._attributes: dict[str, None] = {}
        self._seen: set[tuple[types.FunctionType, type]] = set()
        for kind in dict.fromkeys(map(type, model.modules())):
            for name in ("__call__", "forward"):
                self._look_at_class(kind, name, _DEPTH + 1)
            for name in _CALLING:
                self._note_in_class(kind, name)
        for module in model.modules():
            for value in vars(module).values():  # an activation, say
                self._look_behind(value, type(module), _DEPTH)
        self._look_behind(forward, type(model), _DEPTH + 1)
        for name in self._attributes:
            if hasattr(torch.Tensor, name):
                self._note(entries_of(torch.Tensor), name)

    @property
    def writable(self) -> str | None:
        """Something out there that forward may change: an object that is not plain, or a variable that it sets; None where there is nothing."""
        for variable in self.variables.values():
            if not _stays(variable.get()):
                return str(variable)
        for name, _ in self.defaults.values():
            return f"a default of {name}"
        shared = {variable.name for variable in self.variables.values() if variable.get() is not MISSING}
        for function in self.functions:
            for name in _stored(function.__code__, shared):
                return f"{name}, which {function.__name__} sets"
        return None

    def _note(self, entries: dict[str, Any], name: str) -> None:
        self.spaces.setdefault(id(entries), (entries, {}))[1][name] = None

    def _note_in_class(self, kind: type, name: str) -> None:
        """All bases count: `super()` leads to any of them, and a class may get what it lacks."""
        for base in kind.__mro__:
            if base.__flags__ & _MUTABLE:
                self._note(entries_of(base), name)

    def _look_behind(self, value: object, kind: type, depth: int) -> None:
        """Look into the functions that `value` runs, if any; `self` is a `kind` there."""
        for function in _functions(value):
            if depth > 0 and (function, kind) not in self._seen and _leads_on(function):
                self._seen.add((function, kind))
                self._look_into(function, kind, min(depth, _DEPTH_IN_TORCH) if is_constant(function) else depth)

    def _look_into(self, function: types.FunctionType, kind: type, depth: int) -> None:
        constant, file = is_constant(function), function.__globals__.get("__file__")
        if not constant:
            self.functions[function] = None
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            if isinstance(default, dict | list) and not constant:
                if not _is_installed(file):
                    self.defaults[id(default)] = function.__name__, default
                if is_setting(default):
                    self.readers.setdefault((id(default), ""), functools.partial(_key, default))
        loaded, names = _names(function.__code__)
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        named = [self._look_at(cell, name, kind, depth, file, constant) for name, cell in cells]
        named += [self._look_at(function.__globals__, name, kind, depth, file, constant) for name in loaded]
        for space in _spaces(named, names):
            apart = constant or is_constant(space)
            for name in names:
                if not apart or name in vars(space):
                    of = space if isinstance(space, type) else kind
                    self._look_at(space, name, of, depth, _file(space), apart)
        self._attributes.update(dict.fromkeys(names))
        for name in names:
            self._look_at_class(kind, name, depth)

    def _look_at(self, owner: Any, name: str, kind: type, depth: int, file: str | None, constant: bool) -> Any:
        """The entry `name` of `owner`, of a module in `file`; a function in it is looked into.

        It becomes a variable, unless `owner` is PyTorch's or comes with Python.
        """
        variable = Variable(owner, name)
        if isinstance(owner, types.CellType):
            self.cells[id(owner)] = owner
        elif not isinstance(owner, type) or owner.__flags__ & _MUTABLE:
            self._note(owner if isinstance(owner, dict) else entries_of(owner), name)
        if not constant and not _is_installed(file):
            variable = self.variables.setdefault((id(owner), name), variable)
        value = variable.get()
        if not is_setting(value):
            self._look_behind(value, kind, depth - 1)
        elif not constant:
            self.settings = True
            if isinstance(value, dict | list):
                self.readers.setdefault((id(owner), name), functools.partial(_read_key, variable.get))
        return value

    def _look_at_class(self, kind: type, name: str, depth: int) -> None:
        """Look at attribute `name` in all bases of `kind`, which `super()` may lead to."""
        self._note_in_class(kind, name)
        for base in kind.__mro__:
            if not is_constant(base):
                value = self._look_at(base, name, kind, depth, _file(base), False)
            elif name in vars(base) and base is not nn.Module and base.__flags__ & _MUTABLE:
                value = self._look_at(base, name, kind, depth, None, True)
            else:
                continue
            if isinstance(value, _RUNNING):
                hidden = (kind, name) in self.methods
                read = _entry(base, name) if hidden else functools.partial(getattr, kind, name, None)
                self.methods.setdefault((base if hidden else kind, name), read)


_FIXED = (type, types.ModuleType, types.BuiltinFunctionType, logging.Logger, *_INSIDE)


def _stays(value: object) -> bool:
    """Whether nothing can be written in `value`, but attributes of modules, classes and functions."""
    return (
        value is MISSING
        or is_plain(value)
        or isinstance(value, _FIXED)
        or (
            type(value).__module__.partition(".")[0] in ("torch", "typing", "types", "builtins")
            and not isinstance(value, (list, dict, set, bytearray, torch.Tensor, nn.Module))
        )
    )


def _stored(code: types.CodeType, shared: Collection[str]) -> Iterator[str]:
    """The globals, variables of closures around it, and of the attributes called as those `shared`, that `code` sets."""
    for step in dis.get_instructions(code):
        kind, name = step.opname.partition("_")[::2], str(step.argval)
        if kind[0] not in ("STORE", "DELETE"):
            continue
        if (
            kind[1] == "GLOBAL"
            or (kind[1] == "DEREF" and name in code.co_freevars)
            or (kind[1] == "ATTR" and name in shared)
        ):
            yield name
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from (name for name in _stored(constant, shared) if name not in code.co_cellvars)


def _functions(value: object) -> Iterator[types.FunctionType]:
    """Those that `value` runs, if it is a function, method, property or the like: what decorates another one, then that."""
    if not isinstance(value, _RUNNING):  # as most are
        return
    for _ in range(_LAYERS):
        if isinstance(value, types.FunctionType):
            yield value
        inside = next((name for kind, name in _INSIDE.items() if isinstance(value, kind)), None)
        if inside is None:
            return
        value = getattr(value, inside, None)


def _leads_on(function: types.FunctionType) -> bool:
    """Whether what `function` names may count: not where it comes with Python, say, nor in what calls every module."""
    home = str(function.__globals__.get("__name__"))
    return home.partition(".")[0] not in _CONSTANT or (home.startswith("torch.nn.") and home != nn.Module.__module__)


def entries_of(thing: types.ModuleType | type) -> dict[str, Any]:
    """The dict of attributes of a module or class itself; of a class, Python shows a view of it alone."""
    entries = vars(thing)
    return entries if isinstance(entries, dict) else gc.get_referents(entries)[0]


def _spaces(things: Iterable[object], names: Iterable[str]) -> Iterable[Any]:
    """The modules and classes among `things`, and those that are attributes of them by these names."""
    found: dict[int, Any] = {}
    pending = list(things)
    while pending:
        thing = pending.pop()
        if isinstance(thing, types.ModuleType | type) and id(thing) not in found:
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


def is_constant(thing: types.ModuleType | type | types.FunctionType) -> bool:
    """Whether `thing` is PyTorch's or comes with Python, or is an enum."""
    if isinstance(thing, types.FunctionType):
        home = thing.__globals__.get("__name__")  # a decorated one's `__module__` is that of what it decorates
    else:
        home = thing.__name__ if isinstance(thing, types.ModuleType) else thing.__module__
    return str(home).partition(".")[0] in _CONSTANT or (isinstance(thing, type) and issubclass(thing, enum.Enum))


def is_setting(value: object) -> bool:
    """Whether `value` is plain, or a small list or dict."""
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


@functools.lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of globals, and those of globals and attributes, in `code` and the functions defined in it."""
    loaded: dict[str, None] = {}
    names = dict.fromkeys(code.co_names)
    high = 0
    for operation, low in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        argument = high | low
        high = argument << 8 if operation == _EXTENDED else 0
        if operation in _OF_GLOBALS:
            loaded[code.co_names[argument >> _OF_GLOBALS[operation]]] = None
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = _names(constant)
            loaded.update(dict.fromkeys(inner[0]))
            names.update(dict.fromkeys(inner[1]))
    return tuple(loaded), tuple(names)
