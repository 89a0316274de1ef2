"""What somebody has put another function in the place of: PyTorch's own one.

A function mode is told of a call by the name that the function has in its module. Where somebody has put a function of
theirs there, which then calls PyTorch's, the mode gets theirs once more. To call it would do twice what it does.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch

_OF_C = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.GetSetDescriptorType,
    torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
)


def unpatched(func: Any) -> Any:
    """The function that runs, of which a mode was told that it is `func`."""
    if isinstance(func, _OF_C) or _home(func) == "torch":
        return func
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("fusepass."):
        frame = frame.f_back
    if frame is None or frame.f_code is not torch.overrides.handle_torch_function.__code__:
        return _method(func)
    runs = frame.f_back
    if runs is None or runs.f_code is getattr(func, "__code__", None) or runs.f_code.co_freevars:
        return func
    return types.FunctionType(runs.f_code, runs.f_globals, runs.f_code.co_name)


def _home(func: Any) -> str:
    """The package of a function; a decorated one's `__module__` is that of what it decorates."""
    entries = getattr(func, "__globals__", None)
    return str(entries.get("__name__") if entries else type(func).__module__).partition(".")[0]


def _method(func: Any) -> Any:
    """That of tensors in C whose place `func` has; `func` where it has none."""
    base = torch._C.TensorBase
    names = (name for name, value in vars(torch.Tensor).items() if value is func and hasattr(base, name))
    return next((getattr(base, name) for name in names), func)
