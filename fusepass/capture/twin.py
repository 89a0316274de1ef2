"""A model's modules once more, with the same tensors: tracing puts others in their places while threads call the model."""

from __future__ import annotations

import logging
import types
from typing import Any

import torch
from torch import nn

from fusepass.guards.pystate import INFRASTRUCTURE
from fusepass.structure import is_plain

_OWN = ("_parameters", "_buffers", "_modules")
_SHARED = (type, types.ModuleType, types.BuiltinFunctionType, logging.Logger)
_DEPTH = 4


def twin(model: nn.Module) -> nn.Module | None:
    """Modules like those of `model`, with its tensors and attributes, and dictionaries of tensors and modules of their own.

    None where a module may reach another one, or a tensor, by another way than these dictionaries: that would lead out of
    the twin.
    """
    modules = list(model.modules())
    if not all(map(_is_closed, modules)):
        return None
    made: dict[int, nn.Module] = {id(module): object.__new__(type(module)) for module in modules}
    for module in modules:
        own = {name: dict(vars(module)[name]) for name in _OWN}
        own["_modules"] = {name: child if child is None else made[id(child)] for name, child in own["_modules"].items()}
        vars(made[id(module)]).update(vars(module) | own)
    return made[id(model)]


def _is_closed(module: nn.Module) -> bool:
    slots = any(vars(kind).get("__slots__") for kind in type(module).__mro__)
    attributes = (value for name, value in vars(module).items() if name not in INFRASTRUCTURE)
    return not slots and all(_leads_nowhere(value, _DEPTH) for value in attributes)


def _leads_nowhere(value: Any, depth: int) -> bool:
    """Whether no module and no tensor can be reached from `value`."""
    if is_plain(value) or isinstance(value, (*_SHARED, torch.finfo, torch.iinfo)):
        return True
    if isinstance(value, types.FunctionType):
        return not (value.__closure__ or value.__defaults__ or value.__kwdefaults__)
    if not depth or type(value) not in (list, tuple, set, frozenset, dict):
        return False
    entries = [*value, *value.values()] if isinstance(value, dict) else value
    return all(_leads_nowhere(entry, depth - 1) for entry in entries)
