"""A model's modules once more, with the same tensors: tracing puts others in their places while threads call the model."""

from __future__ import annotations

import functools
import logging
import types
import weakref
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload, OpOverloadPacket

from fusepass.guards.pystate import INFRASTRUCTURE
from fusepass.structure import is_plain

_OWN = ("_parameters", "_buffers", "_modules")
_SHARED = (type, types.ModuleType, types.BuiltinFunctionType, logging.Logger, OpOverload, OpOverloadPacket)
_DEPTH = 4


def twin(model: nn.Module, *, apart: bool = False) -> nn.Module | None:
    """Modules like those of `model`, with its tensors and attributes, and dictionaries of tensors and modules of their own.

    None where a module may reach another one, or a tensor, by another way than these dictionaries: that would lead out of
    the twin. One that is `apart` has copies of lists, dicts and plain objects, too: what its forward writes there nobody else sees.
    """
    modules = list(model.modules())
    if any(vars(kind).get("__slots__") for module in modules for kind in type(module).__mro__):
        return None
    made: dict[int, nn.Module] = {id(module): object.__new__(type(module)) for module in modules}
    copies: dict[int, Any] = {id(each): each for each in model.parameters()}  # lists of them are as good as they are
    for module in modules:
        own = {name: dict(vars(module)[name]) for name in _OWN}
        own["_modules"] = {name: child if child is None else made[id(child)] for name, child in own["_modules"].items()}
        for name, value in vars(module).items():
            if name in INFRASTRUCTURE:
                continue
            if not apart and not _leads_nowhere(value, _DEPTH):
                return None
            if apart:
                own[name] = copied = _copy(value, copies, _DEPTH)
                if copied is _NONE:
                    return None
        vars(made[id(module)]).update(vars(module) | own)
    return made[id(model)]


_NONE: Any = object()
"""Stands for a copy that cannot be made."""


def _copy(value: Any, copies: dict[int, Any], depth: int) -> Any:
    """`value`, or where something can be written in it, a copy; of what `copies` has, that. `_NONE` where it leads to modules or tensors."""
    if id(value) in copies:
        return copies[id(value)]
    if isinstance(value, weakref.ReferenceType) and id(value()) in copies:
        return value
    if not isinstance(value, list | tuple | set | frozenset | dict) and _leads_nowhere(value, depth):
        return value
    if not depth:
        return _NONE
    kind, made = type(value), _NONE
    if kind in (list, tuple, set, frozenset):
        entries = [_copy(entry, copies, depth - 1) for entry in value]
        made = _NONE if _NONE in map(_known, entries) else kind(entries)
    elif kind is dict or _is_plain_object(value):
        held = value if kind is dict else vars(value)
        named = {name: _copy(entry, copies, depth - 1) for name, entry in held.items()}
        if all(map(is_plain, named)) and _NONE not in map(_known, named.values()):
            made = named if kind is dict else object.__new__(kind)
            if made is not named:
                vars(made).update(named)
    copies[id(value)] = made
    return made


def _known(entry: Any) -> Any:
    """What can be compared with `_NONE`: arrays compare element by element."""
    return entry if entry is _NONE else None


def _is_plain_object(value: Any) -> bool:
    """Whether `value` is what its `__dict__` holds, such as a model's configuration, and nothing else."""
    kind = type(value)
    plain = kind.__flags__ & _HEAP_TYPE and kind.__basicsize__ == _Empty.__basicsize__ and hasattr(value, "__dict__")
    return bool(plain) and not isinstance(value, nn.Module | torch.Tensor | BaseException)


class _Empty:
    """An object with attributes alone."""


_HEAP_TYPE = 1 << 9


def _leads_nowhere(value: Any, depth: int) -> bool:
    """Whether no module and no tensor can be reached from `value`."""
    if is_plain(value) or isinstance(value, (*_SHARED, torch.finfo, torch.iinfo)):
        return True
    if isinstance(value, types.FunctionType):
        return not value.__closure__ and is_plain((*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()))
    if isinstance(value, functools.partial):
        return depth > 0 and _leads_nowhere([value.func, *value.args, *value.keywords.values()], depth)
    if not depth or type(value) not in (list, tuple, set, frozenset, dict):
        return False
    entries = [*value, *value.values()] if isinstance(value, dict) else value
    return all(_leads_nowhere(entry, depth - 1) for entry in entries)
