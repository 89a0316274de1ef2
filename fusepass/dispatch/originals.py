"""Calls that the original serves without Python: those that record gradients, and those in which nothing is gained otherwise.

A call that records gradients needs nothing of what a specialisation is compared with. A parameter that asks for gradients is
looked at, and whether the model still has it; without one, the inputs are. PyTorch's guard of that tensor tells of modes around
the call, too.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn

from fusepass.dispatch.signatures import Table
from fusepass.guards.edits import Code
from fusepass.guards.pystate import HELD
from fusepass.guards.surroundings import entries_of, is_constant
from fusepass.runtime import fast_path
from fusepass.runtime.fallbacks import FallbackCounter
from fusepass.runtime.fast_path import Form
from fusepass.runtime.memory import tensor_guards
from fusepass.structure import Template

_KINDS = (torch.Tensor, nn.Parameter)
_STRANGE = (torch.Tensor, fx.Proxy)
"""All others that are made of these are not left to the original for gradients alone."""

_METHODS = ("__call__", "_call_impl")
"""What a call of a module goes through before forward, which is PyTorch's."""

_Entry = tuple[dict[str, Any], str, Any]

_WORTH_A_BUILD = 16
"""Calls of the original before the library that serves them is built, where nothing else wanted it."""

_MOST_LEFT = 16
"""Kinds of calls in which nothing is gained that need no Python."""

NEEDS_GRADIENTS = "needs gradients"


class Originals:
    """Offers the original to the door of `table`; calls count as `fallbacks` of `name`."""

    __slots__ = ("_calls", "_fallbacks", "_kinds", "_lock", "_model", "_name", "_recording", "_table")

    def __init__(
        self, model: nn.Module, table: Table, fallbacks: FallbackCounter, name: str, lock: threading.RLock
    ) -> None:
        self._model = model
        self._table = table
        self._fallbacks = fallbacks
        self._name = name
        self._lock = lock
        self._calls = 0  # that Python found to be the original's
        self._kinds = 0  # of calls in which nothing is gained
        self._recording: Any = None

    def record(self) -> None:
        """A call in the modes that are active now records gradients: those like it need no Python."""
        with self._lock:
            made = self._library()
            if made is None:
                return
            if self._recording is None:
                self._recording = made.recording(self._model, torch.is_grad_enabled, _KINDS, _STRANGE)
                self._fallbacks.follow(self._name, NEEDS_GRADIENTS, self._recording.count)
            _follow(self._recording, self._model)
            self._table.record(self._recording)

    def leave(
        self,
        tensors: Sequence[torch.Tensor],
        inputs: Template,
        code: Code | None,
        reason: str | None,
        *,
        by_types: bool = False,
    ) -> None:
        """Nothing is gained in a call like this while it runs this `code`; where there is a `reason`, it counts as a fallback.

        Calls are alike whose tensors and modes are; or, `by_types`, those with tensors of the same Python types, one of them unusual.
        """
        with self._lock:
            made = self._library()
            form = None if made is None else Form.of(inputs, opaque=True)
            if made is None or form is None or self._kinds == _MOST_LEFT:
                return
            settings: tuple[Callable[[], object], ...] = ()
            if by_types:
                fits = _of_types(tensors)
            elif any(tensor.layout is not torch.strided for tensor in tensors):
                return
            else:
                fits = tensor_guards(tensors).check
                settings = torch.is_grad_enabled, functools.partial(getattr, self._model, "training", None)
            call = _left(made, self._model, form, fits, settings, code)
            self._kinds += 1
            self._table.leave(call)
            if reason is not None:
                self._fallbacks.follow(self._name, reason, call.count)

    def _library(self) -> fast_path.Types | None:
        """What serves calls without Python; None so far. It is built for many calls if nothing else wanted it."""
        self._calls += 1
        if self._calls == _WORTH_A_BUILD:
            fast_path.begin()
        return fast_path.types()


def _left(
    made: fast_path.Types,
    model: nn.Module,
    form: Form,
    fits: Callable[..., bool],
    settings: tuple[Callable[[], object], ...],
    code: Code | None,
) -> Any:
    """What calls the forward of `model` for calls that `fits`, in these settings.

    It is right for all calls: what is compared may make another way better.
    """
    call = made.call(
        (), fits, None, (), settings, tuple(read() for read in settings),
        model, ..., (), form.taken, tuple(range(form.tensors)), (), (), None if code is None else code.compare,
    )  # fmt: skip
    call.renew(call.moment(), ())
    return call


def _of_types(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """What compares nothing of tensors but their Python types."""
    types = tuple(map(type, tensors))
    return lambda *given: tuple(map(type, given)) == types


def _follow(made: Any, model: nn.Module) -> None:
    """A call of `model`, in the modes that are active now, records gradients: `made` serves those like it."""
    if isinstance(model, torch.jit.ScriptModule):
        return
    methods = tuple((name, _method(type(model), name)) for name in _METHODS)
    if not all(callable(method) and is_constant(method) for _, method in methods):
        return
    owned = next(_asking(model), None)
    entries = [(vars(model), name, vars(model)[name]) for name in HELD]
    if owned is None:
        tensor = torch.empty(0, requires_grad=True)
    else:
        path, tensor = owned
        entries += path
    made.renew(methods, tuple(entries), tensor_guards((tensor,)).check, (tensor,), owned is not None)


def _method(kind: type, name: str) -> Any:
    """What objects of `kind` have by that name, as the class has it."""
    owner = next((base for base in kind.__mro__ if name in vars(base)), None)
    return None if owner is None else entries_of(owner)[name]


def _asking(
    model: nn.Module, path: tuple[_Entry, ...] = (), depth: int = 8
) -> Iterator[tuple[tuple[_Entry, ...], nn.Parameter]]:
    """Parameters that ask for gradients, each behind the entries of dicts on the way to it; shallow ones come first."""
    for name, parameter in model._parameters.items():
        if parameter is not None and parameter.requires_grad and type(parameter) is nn.Parameter:
            yield (*path, (model._parameters, name, parameter)), parameter
    for name, module in model._modules.items():
        if module is not None and depth and not isinstance(module, torch.jit.ScriptModule):
            yield from _asking(module, (*path, (model._modules, name, module)), depth - 1)
