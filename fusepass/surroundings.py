"""What forward reads from outside of its module, and tracing takes for constant: globals, closures, class attributes.

Found by the names in the bytecode of forward, of functions that modules hold as attributes, and of the Python functions and
methods that these name. Watched are plain values,
lists and dicts of them, also as attributes of a module that a global stands for (`config.SCALE`). PyTorch's own modules and
those that come with Python are left out: theirs do not change.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from fusepass.structure import is_plain, plain_key

_DEPTH = 4
_LARGE = 64
"""Entries of a list or dict; larger ones are data rather than settings."""

_CONSTANT = sys.stdlib_module_names | {"torch", "numpy"}

Reader = Callable[[], object]


def readers(model: nn.Module) -> tuple[Reader, ...]:
    """What reads each such value of `model` as it is, as a key that is equal for equal values."""
    found: dict[tuple[int, str], Reader] = {}
    for kind in {type(module) for module in model.modules()}:
        if not _is_pytorch_s(kind):
            _look_into(kind.forward, kind, found, _DEPTH)
    for module in model.modules():
        for value in vars(module).values():  # an activation, say
            if isinstance(value, types.FunctionType):
                _look_into(value, type(module), found, _DEPTH)
    return tuple(read for read in found.values() if read is not _nothing)


def _is_pytorch_s(thing: type | types.FunctionType) -> bool:
    return str(thing.__module__).startswith("torch.")  # what `exec` makes may have none


def _nothing() -> None:
    """Stands for a function that was looked into."""


def _look_into(function: object, kind: type[nn.Module], found: dict[tuple[int, str], Reader], depth: int) -> None:
    """Add to `found` what `function`, perhaps a method of `kind`, reads."""
    function = inspect.unwrap(function) if callable(function) else function
    if not isinstance(function, types.FunctionType) or _is_pytorch_s(function) or depth == 0:
        return
    if (id(function), "") in found:
        return
    found[id(function), ""] = _nothing
    for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        if isinstance(default, dict | list) and _is_setting(default):
            found.setdefault((id(default), ""), functools.partial(_key, default))
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        _look_at(cell, name, functools.partial(_content, cell), kind, found, depth)
    names = dict.fromkeys(_names(function.__code__))
    for name in names:
        if name in function.__globals__:
            _look_at(function.__globals__, name, functools.partial(function.__globals__.get, name), kind, found, depth)
            _look_at_attributes(function.__globals__[name], names, found)
        owner = next((base for base in kind.__mro__ if name in vars(base)), nn.Module)
        if not _is_pytorch_s(owner) and owner is not object:
            _look_at(owner, name, functools.partial(getattr, kind, name, None), kind, found, depth)


def _look_at(
    owner: object, name: str, read: Reader, kind: type[nn.Module], found: dict[tuple[int, str], Reader], depth: int
) -> None:
    """Add to `found` what `read` gives, the entry `name` of `owner`, if it can be watched; a function is looked into."""
    value = read()
    if _is_setting(value):
        found.setdefault((id(owner), name), functools.partial(_read_key, read))
    else:
        _look_into(value, kind, found, depth - 1)


def _look_at_attributes(thing: object, names: Iterable[str], found: dict[tuple[int, str], Reader]) -> None:
    """Add to `found` those attributes of `thing`, if it is a module, that are among `names` and can be watched."""
    if not isinstance(thing, types.ModuleType) or thing.__name__.partition(".")[0] in _CONSTANT:
        return
    entries = vars(thing)
    for name in names:
        if name in entries and _is_setting(entries[name]):
            read = functools.partial(entries.get, name)
            found.setdefault((id(entries), name), functools.partial(_read_key, read))


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
    """What a closure's cell holds; None where it holds nothing yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _names(code: types.CodeType) -> Iterator[str]:
    """The names of globals and attributes in `code` and the functions defined in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
