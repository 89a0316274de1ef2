"""All that a specialisation was made for, compared with a call in a few microseconds.

PyTorch's own guards do most of it, in C++: `TensorGuards` compares type, dtype, device, shape, strides and dispatch
keys of tensors, and with them autocast, inference mode, functorch's transforms and tracing; `GlobalStateGuard`
grad mode, determinism, matrix product precision, default dtype and threads.
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

from fusepass.capture import Captured
from fusepass.pystate import PythonState
from fusepass.tensors import LiveTensors

_guards: Any = torch._C._dynamo.guards
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_function_mode_stack: Callable[[], list[Any]] = torch.overrides._get_current_function_mode_stack


_FLAGS: tuple[Callable[[], Any], ...] = (
    functools.partial(torch._C._get_fp32_precision_getter, "cuda", "conv"),
    torch._C._get_cudnn_enabled,
    torch._C._get_flash_sdp_enabled,
    torch._C._get_mem_efficient_sdp_enabled,
    torch._C._get_math_sdp_enabled,
    torch._C._get_cudnn_sdp_enabled,
)
"""Settings that change what is traced or generated and that `GlobalStateGuard` does not know."""


def obstacle(tensors: Sequence[torch.Tensor]) -> str | None:
    """Why a call with `tensors` must run the original operators whatever its shapes; None where it need not."""
    if _dispatch_modes():
        return "a torch dispatch mode is active"
    if any(not isinstance(mode, DeviceContext) for mode in _function_mode_stack()):
        return "a torch function mode is active"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a torch.func transform is active"
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation is active"
    if torch._C._get_tracing_state() is not None:
        return "torch.jit is tracing"
    other = next((t for t in tensors if type(t) not in (torch.Tensor, nn.Parameter)), None)
    return None if other is None else f"an input is a {type(other).__name__}"


def distinct(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """`tensors`, with an alias for each that occurred before: `TensorGuards` refuses the same one twice."""
    seen: set[int] = set()
    result = []
    for tensor in tensors:
        with torch.no_grad():
            result.append(tensor.view_as(tensor) if id(tensor) in seen else tensor)
        seen.add(id(tensor))
    return result


class Signature:
    """What the specialisation `captured` of `model` was made for: the call with `tensors`, at the time of making."""

    __slots__ = (
        "_all_states",
        "_devices",
        "_flags",
        "_globals",
        "_inputs_guard",
        "_live",
        "_pick_states",
        "_python",
        "_states_guard",
    )

    def __init__(self, model: nn.Module, captured: Captured, tensors: Sequence[torch.Tensor]) -> None:
        self._live = LiveTensors(model)
        self._python = PythonState(model)
        self._inputs_guard = _tensor_guards(distinct(tensors))
        self._states_guard = _tensor_guards(self._live.tensors)
        self._globals = _guards.GlobalStateGuard()
        self._flags = _read_flags()
        self._devices = _default_devices()
        indices = captured.state_indices
        self._all_states = indices == tuple(range(len(self._live.slots)))
        self._pick_states = _getter(indices)

    def bind(
        self, tensors: Sequence[torch.Tensor], stand_ins: Sequence[torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, ...] | None:
        """The arguments of the graph for a call with these input tensors; None where they do not match.

        There are as many tensors as there were when the signature was made. `distinct` makes stand-ins, without
        which a call that has a tensor twice does not match.
        """
        if (
            not self._inputs_guard.check(*(stand_ins or tensors))
            or not self._globals.check()
            or _dispatch_modes()
            or forward_ad._current_level >= 0
            or _read_flags() != self._flags
            or not self._python.unchanged()
        ):
            return None
        if (_function_modes() or self._devices) and _default_devices() != self._devices:
            return None
        states = self._live.now()
        if states is None or not self._states_guard.check(*states):
            return None
        return (*(states if self._all_states else self._pick_states(states)), *tensors)


def _tensor_guards(tensors: Sequence[torch.Tensor]) -> Any:
    return _guards.TensorGuards(
        *tensors,
        dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
        dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
    )


def _read_flags() -> list[Any]:
    return list(map(operator.call, _FLAGS))


def _default_devices() -> tuple[object, ...]:
    """The devices of the `torch.device` blocks around; another mode stands for itself, which no other equals."""
    return tuple(mode.device if isinstance(mode, DeviceContext) else mode for mode in _function_mode_stack())


def _getter(indices: tuple[int, ...]) -> Callable[[tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]:
    """A function that takes the values at `indices` out of a tuple."""
    if not indices:
        return lambda values: ()
    if len(indices) == 1:
        only = indices[0]
        return lambda values: (values[only],)
    return operator.itemgetter(*indices)
