"""All that a specialisation was made for, compared with a call in a microsecond or two.

PyTorch's own guards do most of it, in C++: `TensorGuards` compares type, dtype, device, shape, strides and dispatch
keys of tensors, and with them autocast, inference mode, functorch's transforms and tracing; `GlobalStateGuard`
grad mode, determinism, matrix product precision, default dtype and threads. `dict_version` gives a number that every
change of a dict moves on: the model's entries are looked at only where one of its dicts changed. Dicts without entries,
most of them, are asked for nothing else. That matters most where other code has run since the last call and nothing is in
the processor's caches: then each object looked at costs more than the comparison, and a version lies in a table beside
the dict.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from fusepass.capture.trace import Captured
from fusepass.guards.edits import Code
from fusepass.guards.pystate import PythonState
from fusepass.guards.surroundings import Surroundings
from fusepass.guards.tensors import LiveTensors
from fusepass.runtime import fast_path
from fusepass.runtime.fast_path import Form
from fusepass.runtime.memory import tensor_guards
from fusepass.runtime.modes import dispatch_modes, function_mode_stack, function_modes

Tensors = tuple[torch.Tensor, ...]

_guards: Any = torch._C._dynamo.guards
_dict_version: Callable[[dict[Any, Any]], int] = _guards.dict_version

_CUDNN: Callable[[], Any] = torch._C._get_cudnn_enabled
_CONVOLUTIONS: Callable[[], Any] = functools.partial(torch._C._get_fp32_precision_getter, "cuda", "conv")
_ATTENTION: tuple[Callable[[], Any], ...] = (
    torch._C._get_flash_sdp_enabled,
    torch._C._get_mem_efficient_sdp_enabled,
    torch._C._get_math_sdp_enabled,
    torch._C._get_cudnn_sdp_enabled,
)


SETTINGS = {"cpu": _ATTENTION, "cuda": (_CUDNN, _CONVOLUTIONS, *_ATTENTION)}
"""What reads those that may count on a device."""

_MAY_USE_CUDNN = ("conv", "norm", "rnn", "lstm", "gru", "grid", "ctc", "attention", "cudnn")
"""Of the names of operators that PyTorch implements by cuDNN where that is enabled."""


def settings(captured: Captured) -> tuple[Callable[[], Any], ...]:
    """What reads the settings that `GlobalStateGuard` does not know and that change what is generated for a simplified graph.

    What is gone from it does not ask for any: reading one takes up to eight microseconds where caches are empty. cuDNN serves CUDA only. Which attention was chosen shows in the graph: as an operator of that name, or as a softmax.
    """
    nodes = captured.graph.graph.nodes
    names = {str(node.target) for node in nodes if node.op == "call_function"}
    values = (node.meta.get("val") for node in nodes)
    found: list[Callable[[], Any]] = []
    if any(isinstance(value, torch.Tensor) and value.is_cuda for value in values):
        if any(part in name for name in names for part in _MAY_USE_CUDNN):
            found.append(_CUDNN)
        if any("conv" in name for name in names):
            found.append(_CONVOLUTIONS)
    if any("attention" in name or "softmax" in name for name in names):
        found += _ATTENTION
    return tuple(found)


class Signature:
    """What a specialisation of `model` is made for: the call with `tensors`, at the time of making.

    `forward` is what ran in place of the model's own, if anything did. `complete` has to follow, once the graph is there.
    """

    __slots__ = (
        "_all_states",
        "_around",
        "_code",
        "_devices",
        "_dicts",
        "_empty",
        "_globals_unchanged",
        "_indices",
        "_inputs_fit",
        "_known",
        "_live",
        "_pick_states",
        "_python",
        "_seen",
        "_set",
        "_settings",
        "_states_fit",
    )

    def __init__(self, model: nn.Module, tensors: Sequence[torch.Tensor], forward: object = None) -> None:
        around = Surroundings(model, forward)
        self._code = Code(model, around=around)
        self._live = LiveTensors(model)
        self._python = PythonState(model)
        dicts = {id(entries): entries for entries in (*self._live.dicts, *self._python.dicts)}.values()
        self._dicts = tuple(entries for entries in dicts if entries)
        self._empty = tuple(entries for entries in dicts if not entries)
        self._inputs_fit = tensor_guards(tensors).check
        self._states_fit = tensor_guards(self._live.tensors).check
        self._globals_unchanged = _guards.GlobalStateGuard().check
        self._around = {read: read() for read in around.readers.values()}
        self._known = {read: read() for read in SETTINGS["cuda"]}
        self._devices = default_devices()
        self._seen: tuple[int, Tensors] = (-1, ())  # the sum of the dicts' versions, and the model's tensors then

    def complete(self, captured: Captured) -> bool:
        """Take the graph's arguments and what its operators ask for; False where a setting is another by now than it was in the beginning."""
        asked = {read: self._known[read] for read in settings(captured)} | self._around
        self._settings, self._set = tuple(asked), list(asked.values())
        indices = captured.state_indices
        self._all_states = indices == tuple(range(len(self._live.slots)))
        self._pick_states = _getter(indices)
        self._indices = indices
        return list(map(operator.call, self._settings)) == self._set

    def bind(self, tensors: Sequence[torch.Tensor]) -> Tensors | None:
        """The arguments of the graph for a call with these input tensors; None where they do not match.

        There are as many tensors as there were when the signature was made, and no two are the same; one may be the model's.
        """
        version, states = self._seen
        # Versions only ever grow, so an equal sum stands for equal versions.
        same = not any(self._empty) and sum(map(_dict_version, self._dicts)) == version
        if not same or not self._python.others.unchanged():
            found = self._look()
            if found is None:
                return None
            states = found
        # A nested tensor has no sizes to compare: `TensorGuards` would end the process.
        if any(getattr(tensor, "is_nested", False) for tensor in tensors):
            return None
        if (
            not self._inputs_fit(*tensors)
            or not self._states_fit(*states)
            or not self._globals_unchanged()
            or dispatch_modes()
            or forward_ad._current_level >= 0
            or not self._code.unchanged()
            or (self._settings and list(map(operator.call, self._settings)) != self._set)
        ):
            return None
        if (function_modes() or self._devices) and default_devices() != self._devices:
            return None
        return (*states, *tensors) if self._all_states else (*self._pick_states(states), *tensors)

    @property
    def states(self) -> Tensors:
        """The model's tensors as `bind` found them last."""
        return self._seen[1]

    def quick(
        self,
        form: Form,
        run: Callable[..., Any],
        positions: Sequence[int],
        finish: Callable[..., Any] | None,
        written: tuple[int, ...],
        sizes: tuple[int, ...],
    ) -> Any:
        """What binds and calls `run` without Python, then `finish` on its results; None where that cannot be.

        It compares what `bind` compares, but that it gives up where a dict changed since `bind` looked at it.

        Args:
            form: of the call's arguments.
            run: the graph, or what does the same with some of its arguments.
            positions: of these.
            finish: makes the call's result of the graph's; None for the first of these.
            written: positions of the graph's arguments that it writes.
            sizes: bytes that each of the graph's arguments covers.
        """
        states, inputs = len(self._live.tensors), form.tensors
        # A dispatch mode is among the keys that tensors are compared with, if there are any.
        zeros = (function_modes,) if states + inputs else (function_modes, dispatch_modes)
        places = (*self._indices, *range(states, states + inputs))
        asked, expected = self._settings, self._set
        if self._python.unusual:
            asked, expected = (*asked, self._python.unusual.unchanged), [*expected, True]
        return self._call(
            self._inputs_fit, self._globals_unchanged, zeros, tuple(asked), tuple(expected),
            run, finish, self._live.tensors, form.taken, tuple(places[i] for i in positions), written, sizes,
        )  # fmt: skip

    def quick_forward(self, model: nn.Module, form: Form) -> Any:
        """What calls the forward of `model`, which is always right, without Python before it; None where that cannot be.

        It is for calls that gain nothing otherwise, and compares the inputs: others may gain something.
        """
        inputs = tuple(range(form.tensors))
        return self._call(self._inputs_fit, None, (), (), (), model, ..., (), form.taken, inputs, (), ())

    @property
    def lists(self) -> tuple[tuple[Any, ...], ...]:
        """What the lists of the model's Python state hold; `bind` compares it."""
        return tuple(map(tuple, self._python.lists))

    def _call(self, *rest: Any) -> Any:
        made = fast_path.types()
        if made is None or self._devices:
            return None
        try:
            dicts = (*self._dicts, *self._empty, vars(forward_ad))
            return made.call(dicts, *rest, self._code.compare, self._states_fit, self._python.lists)
        except (RuntimeError, ValueError):  # nobody more may watch dicts, or there are too many tensors
            return None

    def _look(self) -> Tensors | None:
        """The model's tensors, after all of its Python state was compared; None where that is another."""
        version = sum(map(_dict_version, self._dicts))  # first: what changes meanwhile is noticed at the next call
        states = self._live.now() if self._python.unchanged() else None
        if states is not None and any(state.is_nested for state in states):
            return None
        if states is not None:
            self._seen = version, states
        return states


def default_devices() -> tuple[object, ...]:
    """The devices of the `torch.device` blocks around; another mode stands for itself, which no other equals."""
    return tuple(mode.device if isinstance(mode, DeviceContext) else mode for mode in function_mode_stack())


def _getter(indices: tuple[int, ...]) -> Callable[[tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]:
    """A function that takes the values at `indices` out of a tuple."""
    if not indices:
        return lambda values: ()
    if len(indices) == 1:
        only = indices[0]
        return lambda values: (values[only],)
    return operator.itemgetter(*indices)
