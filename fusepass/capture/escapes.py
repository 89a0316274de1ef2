"""What forward may call while its operators are recorded, and what is recorded in another way than PyTorch would."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fusepass.capture.isolation import Watched, called_as_in_eager
from fusepass.capture.patched import unpatched
from fusepass.capture.recurrent import is_whole, run_whole
from fusepass.errors import CaptureError
from fusepass.patterns.analysis.layout import looks_channels_last


class Declined(Exception):
    """The recorder cannot express what forward does; AOTAutograd may."""


class NoEscape(Watched):
    """Declines what reads a tensor's values or address without running an operator, and keeps eager's strides."""

    _ESCAPES = frozenset(
        {
            torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.data_ptr, torch.Tensor.__array__,
            torch.Tensor.untyped_storage, torch.Tensor.storage, torch.Tensor.__dlpack__, torch.Tensor.__reduce_ex__,
            torch.Tensor.__deepcopy__, torch.Tensor.apply_, torch.Tensor.map_,
        }
    )  # fmt: skip

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        func = unpatched(func)
        self.watch(func, args, kwargs)
        if func in self._ESCAPES or getattr(func, "__name__", "") in ("__format__", "__repr__"):
            raise Declined(f"forward reads the values or the address of a tensor ({func.__name__})")
        if func is torch._nested_tensor_from_mask_left_aligned:
            raise CaptureError(
                "nn.TransformerEncoder makes a padded batch a nested tensor, but for enable_nested_tensor=False",
                only_children=True,
            )
        if func in _POOLS_1D and args:
            args = (_unambiguous(args[0]), *args[1:])
        if is_whole(func, args):
            return run_whole(func, args)
        return called_as_in_eager(func, args, kwargs or {})


_POOLS_1D = (nn.functional.max_pool1d, torch.max_pool1d)


def _unambiguous(x: torch.Tensor) -> torch.Tensor:
    """`x`, laid out such that max pooling it gives eager's strides.

    On a CPU eager has a kernel of its own, whose result is always contiguous. While operators are recorded PyTorch takes the
    two-dimensional one, which may see channels last in dimensions of size 1.
    """
    ambiguous = x.device.type == "cpu" and x.dim() == 3 and looks_channels_last(x.unsqueeze(-2))
    return x.reshape(-1).view(x.shape) if ambiguous else x
