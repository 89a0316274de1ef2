"""What stands against giving a call's tensors to generated kernels, whatever their shapes: modes, transforms, subclasses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

dispatch_modes = torch._C._len_torch_dispatch_stack
function_modes = torch._C._len_torch_function_stack
function_mode_stack: Callable[[], list[Any]] = torch.overrides._get_current_function_mode_stack


def obstacle(tensors: Sequence[torch.Tensor]) -> str | None:
    """Why a call with `tensors` must run the original operators whatever its shapes; None where it need not."""
    if dispatch_modes():
        return "a torch dispatch mode is active"
    if function_modes() and any(not isinstance(mode, DeviceContext) for mode in function_mode_stack()):
        return "a torch function mode is active"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a torch.func transform is active"
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation is active"
    if torch._C._get_tracing_state() is not None:
        return "torch.jit is tracing"
    other = next((t for t in tensors if type(t) not in (torch.Tensor, nn.Parameter)), None)
    if other is None:
        return "an input is a nested tensor" if any(t.is_nested for t in tensors) else None
    return f"an input is a {type(other).__name__}"
