"""Which tensors have memory that generated kernels understand: plain strided elements that are there.

PyTorch tells by dispatch keys what else a tensor is: zeros that were never written, a lazy sign, a wrapper around another
tensor, a quantised or sparse one. The keys that are understood are listed, and any other one, known or not, is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fusepass.measure import extent

_KEYS = ("CPU", "CUDA", "ADInplaceOrView", "AutogradCPU", "AutogradCUDA", "AutocastCPU", "AutocastCUDA")
"""Keys of a tensor that is nothing but elements in memory."""

_TRACED = ("Python", "PythonTLSSnapshot", "Meta", "AutogradMeta", "AutogradOther", "Conjugate", "Negative")
"""Further keys of the fake tensors that PyTorch traces rightly, and operators on which are told from others (`fusepass.patterns.legality`)."""

_TRACED_LAYOUTS = ("Sparse", "SparseCsr", "Quantized")
"""The same, of each kind of device."""


def _raw(keys: Iterable[str]) -> int:
    return reduce(or_, (torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key)).raw_repr() for key in keys))


_UNDERSTOOD = _raw(_KEYS)
_UNDERSTOOD_TRACED = _UNDERSTOOD | _raw(_TRACED)
_UNDERSTOOD_TRACED |= _raw(f"{layout}{device}" for layout in _TRACED_LAYOUTS for device in ("CPU", "CUDA"))
_keys_of = torch._C._dispatch_keys


def unusual(tensor: torch.Tensor) -> str | None:
    """Why no kernel may be given `tensor`, with its elements where they are now; None where one may."""
    reason = unusual_kind(tensor)
    if reason is not None or not tensor.numel():
        return reason
    needed = (tensor.storage_offset() + extent(tensor)) * tensor.dtype.itemsize
    return "a tensor has less memory than elements" if tensor.untyped_storage().nbytes() < needed else None


def unusual_kind(tensor: torch.Tensor) -> str | None:
    """Why `tensor` is no plain elements in memory, whether or not that is there yet; None where it is."""
    keys = _keys_of(tensor)
    return _told(keys) if keys.raw_repr() & ~_UNDERSTOOD else None


def untraceable(fake: torch.Tensor) -> str | None:
    """Why nothing may be traced with `fake`, of which the graph would not tell what it is; None where it may."""
    if is_traceable_wrapper_subclass(fake):  # traced by what is in it
        return None
    keys = _keys_of(fake)
    return _told(keys) if keys.raw_repr() & ~_UNDERSTOOD_TRACED else None


def _told(keys: torch._C.DispatchKeySet) -> str:
    named = str(keys)[len("DispatchKeySet(") : -1].split(", ")
    return f"a tensor is unusual to PyTorch's dispatcher ({', '.join(key for key in named if key not in _KEYS)})"


def has_elements_nowhere(tensor: torch.Tensor) -> bool:
    """Whether the memory of a plain tensor was released under it: an operator that reads it ends the process.

    The address is missing, too, of zeros that were never written and of what wraps another tensor, which operators know.
    """
    return unusual_kind(tensor) is None and tensor.numel() > 0 and not tensor.data_ptr()


def overlaps_written(starts: Sequence[int], sizes: Sequence[int], written: Collection[int]) -> bool:
    """Whether what is at a `written` position shares memory with what is at another one.

    Args:
        starts: addresses of tensors.
        sizes: bytes that each of them covers.
        written: positions of those that are written.
    """
    places = sorted((start, start + size, i) for i, (start, size) in enumerate(zip(starts, sizes, strict=True)) if size)
    end = end_of_written = 0
    for start, stop, i in places:
        if start < end_of_written or (i in written and start < end):
            return True
        end = max(end, stop)
        end_of_written = max(end_of_written, stop) if i in written else end_of_written
    return False


def tensor_guards(tensors: Sequence[torch.Tensor]) -> Any:
    """Compares tensors with these, and the modes around with those that are active now."""
    guards: Any = torch._C._dynamo.guards
    return guards.TensorGuards(
        *tensors,
        dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
        dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
    )
