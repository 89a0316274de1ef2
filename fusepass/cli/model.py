"""The model and the inputs that a command line names: ``module:attribute`` and ``mask=2,3,8,8:float32``."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

_T = TypeVar("_T")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


class UsageError(Exception):
    """What the user asked for cannot be done; the text is one line that says what to change."""


@dataclass(frozen=True)
class InputSpec:
    """Shape and type of one input tensor; the type is None where none is named, the name empty where it is passed by position."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    name: str = ""

    @classmethod
    def parse(cls, text: str) -> InputSpec:
        """The spec that `text` describes: optionally ``name=``, then sizes, then optionally ``:dtype``; no sizes make a 0-dim tensor.

        Raises:
            UsageError: a size is not a whole number of at least 0, or the type is not one of torch's.
        """
        before, equals, rest = text.rpartition("=")
        if equals and not before.isidentifier():
            raise UsageError(f"input {text!r}: {before!r} is not the name of an argument")
        sizes, _, name = rest.partition(":")
        numbers = [size.strip() for size in sizes.split(",")] if sizes else []
        if not all(number.isdecimal() for number in numbers):
            raise UsageError(f"input {text!r} is not [NAME=]SIZE,SIZE,...[:DTYPE], such as 2,3,8,8:float32")
        try:
            dtype = dtype_of(name) if name else None
        except UsageError as error:
            raise UsageError(f"input {text!r}: {error}") from None
        return cls(tuple(map(int, numbers)), dtype, before)

    @classmethod
    def parse_sizes(cls, text: str) -> list[InputSpec]:
        """A spec for each size of a range in `text`, such as ``1..8,3,4``; one where there is none. Several ranges go together.

        Raises:
            UsageError: as `parse`, or the ranges are empty or not equally long.
        """
        ranges = [range(int(first), int(last) + 1) for first, last in _RANGE.findall(text)]
        if not ranges:
            return [cls.parse(text)]
        if len({*map(len, ranges)}) > 1 or not ranges[0]:
            raise UsageError(
                f"input {text!r}: ranges such as 1..8 are of equal length, and the last size is not below the first"
            )
        template = _RANGE.sub("%d", text.replace("%", "%%"))
        return [cls.parse(template % sizes) for sizes in zip(*ranges, strict=True)]

    def tensor(self, device: torch.device, default: torch.dtype = torch.float32) -> torch.Tensor:
        """The same values each time: uniform in [0, 1) for float types, else zeros (valid indices)."""
        dtype = self.dtype or default
        if not (dtype.is_floating_point or dtype.is_complex):
            return torch.zeros(self.shape, dtype=dtype, device=device)
        return torch.rand(self.shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)


def dtype_of(name: str) -> torch.dtype:
    """The type of that name.

    Raises:
        UsageError: torch has none.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"{name!r} is not a torch dtype such as float32")
    return dtype


@dataclass(frozen=True)
class Call:
    """A model, and the arguments to call it with."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def to(self, device: torch.device | None, dtype: torch.dtype | None) -> Call:
        """The same with every tensor on `device`, and those of floating point with `dtype`; the model itself is changed."""

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device, dtype if tensor.is_floating_point() else None)

        args, kwargs = pytree.tree_map_only(torch.Tensor, moved, (self.args, self.kwargs))
        return Call(self.model.to(device, dtype), args, kwargs)

    def given(self, specs: Sequence[InputSpec], device: torch.device | None, dtype: torch.dtype | None) -> Call:
        """The same model with inputs made as `specs` say, where there are any."""
        if not specs:
            return self
        where, default = device or self.device, dtype or torch.float32
        inputs = attempt("making the inputs", lambda: [spec.tensor(where, default) for spec in specs])
        named = {spec.name: value for spec, value in zip(specs, inputs, strict=True) if spec.name}
        return Call(self.model, tuple(v for s, v in zip(specs, inputs, strict=True) if not s.name), named)

    @property
    def device(self) -> torch.device:
        """Where the model lies; the CPU where it holds no tensor."""
        tensors = (*self.model.parameters(), *self.model.buffers())
        return tensors[0].device if tensors else torch.device("cpu")


def load_call(
    target: str, specs: Sequence[InputSpec], device: torch.device | None, dtype: torch.dtype | None = None
) -> Call:
    """The model that `target` names with its inputs, on `device` and in floating-point type `dtype` where these are given.

    `target` is ``module:attribute``: a module, a module class without arguments, or a function without
    arguments that gives a model or a (model, inputs) pair, its inputs as `fusepass.optimize` takes them: a tuple
    (or list) of positional arguments, a dict of keyword arguments, or one tensor. `specs`, where there are any,
    replace them.

    Raises:
        UsageError: there is no such attribute, it gives no model, or the inputs do not fit ``forward``.
    """
    call = _call(target, _find(target))
    if device is not None or dtype is not None:
        where = " as ".join(str(each) for each in (device, dtype) if each is not None)
        call = attempt(f"moving {target} to {where}", lambda: call.to(device, dtype))
    call = call.given(specs, device, dtype)
    _check(target, call)
    return call


def attempt(what: str, action: Callable[[], _T]) -> _T:
    """The result of `action`, which runs the user's code, with anything that it raises told in one line.

    Raises:
        UsageError: `action` raised; the cause is the original exception.
    """
    try:
        return action()
    except Exception as error:
        text = next((line for line in str(error).splitlines() if line.strip()), "")
        raise UsageError(f"{what}: {type(error).__name__}: {text.strip()}".rstrip(": ")) from error


def _find(target: str) -> object:
    """The object that ``module:attribute`` names; the current directory counts, as with ``python -m``."""
    name, _, path = target.partition(":")
    if not name or not path:
        raise UsageError(f"{target!r} is not module:attribute, such as net:make_model")
    here = os.getcwd()
    if not sys.flags.safe_path and here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    module = attempt(f"importing {name}", lambda: importlib.import_module(name))
    return attempt(f"looking up {target}", lambda: reduce(getattr, path.split("."), module))


def _call(target: str, found: object) -> Call:
    if not isinstance(found, nn.Module) and callable(found):
        found = attempt(f"calling {target}", found)
    if isinstance(found, nn.Module):
        return Call(found)
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], nn.Module)):
        kind = type(found).__name__
        raise UsageError(f"{target} gives {kind}, but must give an nn.Module or a (model, inputs) pair")
    model, inputs = found
    if isinstance(inputs, dict):
        return Call(model, kwargs=inputs)
    return Call(model, tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,))


def _check(target: str, call: Call) -> None:
    try:
        inspect.signature(call.model.forward).bind(*call.args, **call.kwargs)
    except TypeError as error:
        count = len(call.args) + len(call.kwargs)
        given = "1 input" if count == 1 else f"{count} inputs"
        raise UsageError(
            f"forward() of {target} does not take {given}: {error}; give them with --input [NAME=]SIZE,...[:DTYPE]"
        ) from error
