"""The Python that a call of a model runs: found once, and compared at each call in less time than it takes to look at a tensor.

A graph, and what Dynamo compiled, were made of certain functions of certain classes. Somebody may put others in their
places: on a module (``m.forward = f``), a class (``nn.Linear.forward = f``) or in a module of Python
(``nn.functional.relu = f``). Each dict that may be edited so has a version, and its entries are looked at only where
that is another. What is in no dict is compared by itself: the classes of modules, the code of functions, and cells.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from fusepass.guards.pystate import HELD, same
from fusepass.guards.surroundings import MISSING, Surroundings, entries_of, is_constant, is_setting
from fusepass.runtime import fast_path

dict_version: Callable[[dict[Any, Any]], int] = torch._C._dynamo.guards.dict_version

_METHODS = entries_of(torch.Tensor)
_OF_FUNCTIONS = ("__code__", "__defaults__", "__kwdefaults__")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_GLOBAL_HOOKS: tuple[dict[int, Any], ...] = tuple(getattr(nn.modules.module, f"_global{name}") for name in _HOOKS)
_FOR_A_WHILE = ("torch.fx.", "fusepass.dispatch.capture_fallback")
"""Homes of what replaces methods of modules while another thread traces, or runs a model child by child."""


class _Kind(enum.Enum):
    AROUND = enum.auto()  # a dict around the model, of which some keys count
    OWN = enum.auto()  # the attributes of a module, of which some count
    WHOLE = enum.auto()  # all keys count, and no other may come


_Space = tuple[dict[Any, Any], tuple[Any, ...], _Kind]
"""A dict, and the keys that count."""

_Pin = tuple[object, str]
"""An object, and the attribute of it that counts."""


class Code:
    """What a call of a model runs, at one moment.

    Args:
        model: the model.
        forward: what runs in place of its forward, if anything does.
        around: what is around both; found by itself if it is not given.
        dynamo: whether this is what Dynamo does not compare: beside what is around the model, methods that its modules have
            of their own, submodules, hooks. Plain values do not count then, which Dynamo compares and forward may change.
    """

    __slots__ = ("_compare", "_dynamo", "_pinned", "_pins", "_spaces", "_values", "_versions")

    def __init__(
        self, model: nn.Module, forward: object = None, *, around: Surroundings | None = None, dynamo: bool = False
    ) -> None:
        around = around or Surroundings(model, forward)
        self._dynamo = dynamo
        spaces = (self._counting(entries, tuple(names)) for entries, names in around.spaces.values())
        self._spaces: tuple[_Space, ...] = tuple(space for space in spaces if space[1])
        if dynamo:
            self._spaces += tuple(_spaces_of(model))
        self._pins = tuple(pin for pin in _pins(model, around) if self._counts(_pinned(pin)))
        self._versions = self._versions_now()  # first: a later change is noticed
        self._values = tuple(tuple(map(_lasting, values)) for values in self._values_now())
        self._pinned = tuple(map(_pinned, self._pins))
        self._compare: Callable[[], bool] | None = None

    def _counting(self, entries: dict[Any, Any], names: tuple[Any, ...]) -> _Space:
        return entries, tuple(name for name in names if self._counts(entries.get(name, MISSING))), _Kind.AROUND

    def _counts(self, value: object) -> bool:
        # A tensor that forward reads elsewhere than in inputs and modules is declined by tracing, and compared by Dynamo.
        return not isinstance(value, torch.Tensor) and (not self._dynamo or value is MISSING or _runs(value))

    def _versions_now(self) -> list[int]:
        return [dict_version(entries) for entries, _, _ in self._spaces]

    def _values_now(self) -> tuple[tuple[Any, ...], ...]:
        return tuple(tuple(entries.get(name, MISSING) for name in names) for entries, names, _ in self._spaces)

    @property
    def calls_patched(self) -> bool:
        """Whether functions stand in the place of PyTorch's in its modules, which code that Dynamo makes calls twice."""
        return any(
            isinstance(value, types.FunctionType) and not is_constant(value)
            for (entries, _, _), values in zip(self._spaces, self._values, strict=True)
            if entries is _METHODS or str(entries.get("__name__")).partition(".")[0] == "torch"
            for value in values
        )

    @property
    def compare(self) -> Any:
        """What compares without Python, and may take for changed what is not; None where it cannot be."""
        made = fast_path.types()
        if self._compare is None and made is not None:
            spaces = tuple((entries, names, kind is _Kind.WHOLE) for entries, names, kind in self._spaces)
            self._compare = made.code(spaces, self._pins, MISSING, self._values, self._pinned)
        return self._compare

    def unchanged(self) -> bool:
        """Whether a call runs what it ran."""
        compare = self._compare or self.compare
        if compare is not None:
            return compare() or self._equal()
        pinned = all(_pinned(pin) is value for pin, value in zip(self._pins, self._pinned, strict=True))
        return (pinned and self._versions_now() == self._versions) or self._equal()

    def _equal(self) -> bool:
        """The slow comparison, after which the present values are the recorded ones."""
        versions, values, pinned = self._versions_now(), self._values_now(), tuple(map(_pinned, self._pins))
        for (entries, names, kind), before, now in zip(self._spaces, self._values, values, strict=True):
            alike = self._alike if kind is _Kind.AROUND else _same
            if (kind is _Kind.WHOLE and len(entries) != len(names)) or not all(map(alike, before, now)):
                return False
        if not all(map(self._alike, self._pinned, pinned)):
            return False
        if not any(_is_temporary(value) for now in values for value in now):
            self._versions, self._values, self._pinned = versions, values, pinned
            if self._compare is not None:
                self._compare.renew(values, pinned)  # type: ignore[attr-defined]
        return True

    def _alike(self, old: object, new: object) -> bool:
        if _same(old, new):
            return True
        if self._dynamo:
            return not _runs(old) and not _runs(new)
        return type(old) is type(new) and isinstance(old, list | dict) and is_setting(old) and is_setting(new)


def _spaces_of(model: nn.Module) -> Iterator[_Space]:
    """What modules have: a forward of their own, and whatever hides a submodule or parameter."""
    for module in _in_python(model):
        hidden = (name for entries in (module._parameters, module._buffers, module._modules) for name in entries)
        yield vars(module), tuple(dict.fromkeys(("forward", "_call_impl", *HELD, *hidden))), _Kind.OWN
        hooks = () if module is model else (module._forward_hooks, module._forward_pre_hooks)
        for entries in (module._modules, *hooks):
            yield entries, tuple(entries), _Kind.WHOLE
    yield from ((hooks, tuple(hooks), _Kind.WHOLE) for hooks in _GLOBAL_HOOKS)


def _in_python(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of `model` that are no TorchScript, which has nothing to edit."""
    return (module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule))


def _pins(model: nn.Module, around: Surroundings) -> Iterator[_Pin]:
    for module in _in_python(model):
        yield module, "__class__"
        yield module, "__dict__"
    for function in around.functions:
        yield from ((function, name) for name in _OF_FUNCTIONS)
    yield from ((cell, "cell_contents") for cell in around.cells.values())


def _pinned(pin: _Pin) -> object:
    owner, name = pin
    try:
        return type(owner) if name == "__class__" else getattr(owner, name)
    except ValueError:  # an empty cell
        return MISSING


def _runs(value: object) -> bool:
    """Whether `value` is Python that a call may run, or leads to some."""
    return callable(value) or isinstance(value, types.ModuleType | classmethod | staticmethod | property)


def _same(old: object, new: object) -> bool:
    return same(old, new) or _is_temporary(new)


def _is_temporary(value: object) -> bool:
    return isinstance(value, types.FunctionType) and str(value.__globals__.get("__name__")).startswith(_FOR_A_WHILE)


def _lasting(value: Any) -> Any:
    """`value`, or what it stands in the place of for a while: that will be back when the other thread is done."""
    while _is_temporary(value) and hasattr(value, "__wrapped__"):
        value = value.__wrapped__
    return value
