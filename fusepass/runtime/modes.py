"""What stands against giving a call's tensors to generated kernels, whatever their shapes: modes, transforms, subclasses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
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
    unusual = unusual_type(tensors)
    if unusual is None:
        return "an input is a nested tensor" if any(t.is_nested for t in tensors) else None
    return f"an input is a {unusual.__name__}"


def unusual_type(tensors: Sequence[torch.Tensor]) -> type | None:
    """The first type of Python's among `tensors` that may have operators of its own."""
    return next((type(t) for t in tensors if type(t) not in (torch.Tensor, nn.Parameter)), None)


_DEVICES = ("cpu", "cuda")


class ThreadModes:
    """The modes of the present thread that change what operators do, for another thread that works for it.

    `obstacle` says which others there must not be.
    """

    def __init__(self) -> None:
        self._gradients = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = [(each, torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in _DEVICES]
        self._cached = torch.is_autocast_cache_enabled()
        self._default_devices = [mode.device for mode in function_mode_stack() if isinstance(mode, DeviceContext)]
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """While open, this thread has them; what it launches on a GPU goes to a stream of its own, see `settle`.

        Autocast is set rather than entered: leaving it would empty the cache of casts, which all threads share.
        """
        before = ThreadModes()
        with ExitStack() as stack:
            stack.callback(before._set)
            stack.enter_context(torch.inference_mode(self._inference))
            self._set()
            for device in self._default_devices:
                stack.enter_context(torch.device(device))
            if self._device is not None:
                stack.enter_context(torch.cuda.device(self._device))
                stream = torch.cuda.Stream()
                stream.wait_stream(torch.cuda.default_stream())
                stack.enter_context(torch.cuda.stream(stream))
            yield

    def _set(self) -> None:
        torch.set_grad_enabled(self._gradients)
        for device, enabled, dtype in self._autocast:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(self._cached)


def settle() -> None:
    """Wait for what this thread has launched: what it made there may be used on other streams from then on."""
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()


@contextmanager
def without_cached_casts() -> Iterator[None]:
    """While open, autocast neither reads nor fills its cache in this thread.

    All threads share it, and a cast that was made here without gradients would have none where another thread records them.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
