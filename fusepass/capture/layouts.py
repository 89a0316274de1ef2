"""Has tracing lay tensors out as a real run does: fake tensors guess strides, by rules that are not all eager's.

Forward may ask for strides. And it depends on them whether `reshape` or `contiguous` give their input's memory, so that a
write to the result shows there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils import _pytree as pytree

from fusepass.capture.isolation import EagerWrites, Watched, memory_of
from fusepass.errors import CaptureError

_QUESTIONS = frozenset(
    {
        torch.Tensor._is_view, torch.Tensor.dim_order, torch.Tensor.is_contiguous, torch.Tensor.is_set_to,
        torch.Tensor.storage_offset, torch.Tensor.stride,
    }
)  # fmt: skip
_STORAGES = (torch.Tensor.storage, torch.Tensor.untyped_storage)
_CONVERSIONS = dict.fromkeys(
    (
        torch.Tensor.bfloat16, torch.Tensor.bool, torch.Tensor.byte, torch.Tensor.char, torch.Tensor.cpu,
        torch.Tensor.cuda, torch.Tensor.double, torch.Tensor.float, torch.Tensor.half, torch.Tensor.int,
        torch.Tensor.long,
    ),
    torch.Tensor.to,
)  # fmt: skip
"""What tracing calls for a function."""

Layout = tuple[tuple[int, ...], bool]
"""Strides, 0 where there is one element, and whether the memory is an argument's."""

Answer = list[Layout] | object
Note = tuple[Any, Answer]
"""A function of torch's that forward called, and the layouts of its results, or what it answered."""


class Noting(Watched):
    """Notes what functions give."""

    def __init__(self, notes: list[Note], given: frozenset[int]) -> None:
        super().__init__(given)
        self._notes = notes

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        if not _is_getter(func):
            func = _CONVERSIONS.get(func, func)
            self._notes.append((func, result if func in _QUESTIONS else _layouts(result, args, kwargs)))
        return result


class Following(EagerWrites):
    """Gives results the layouts that were noted, and declines where it cannot.

    Where another function is called than was noted, as one that remembered its result then, nothing is known from there on.
    """

    def __init__(self, notes: list[Note], given: frozenset[int]) -> None:
        super().__init__(given)
        self._notes, self._next = notes, 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        noted, wanted = self._notes[self._next] if self._next < len(self._notes) else (None, None)
        if noted == func:
            self._next += 1
            return _followed(func, result, wanted, args, kwargs)
        if not _is_tracing_s(func):
            self._next = len(self._notes)
        return result


def _followed(func: Any, result: Any, wanted: Answer, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    if func in _QUESTIONS:
        found: Answer = result
    else:
        layouts = found = _layouts(result, args, kwargs)
        if found != wanted and isinstance(wanted, list):
            result = _laid_out(result, layouts, wanted)
            found = _layouts(result, args, kwargs)
    if found != wanted or func in _STORAGES:
        raise CaptureError(f"tracing does not know what memory {func.__name__} meets in eager", final=True)
    return result


def _is_getter(func: Any) -> bool:
    """Whether `func` gives an attribute of a tensor; views among them are laid out as what they are views of."""
    return getattr(func, "__name__", "") == "__get__"


def _is_tracing_s(func: Any) -> bool:
    """Whether PyTorch's Python may call `func` where a real run does not."""
    return isinstance(func, OpOverload | OpOverloadPacket) or func in _QUESTIONS or _is_getter(func)


def _layouts(result: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> list[Layout]:
    """The layouts of the tensors in `result`; of none that forward had resized (``out=``), of which tracing knows little."""
    tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    if not tensors or (kwargs and kwargs.get("out") is not None):
        return []
    given = {memory_of(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
    return [_layout(tensor, given) for tensor in tensors]


def _layout(tensor: torch.Tensor, given: set[int]) -> Layout:
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return (), False
    strides = tuple(stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return strides, memory_of(tensor) in given


def _laid_out(result: Any, found: list[Layout], wanted: list[Layout]) -> Any:
    """`result` with copies for those tensors in it that have memory of their own, and others than the `wanted` strides."""
    layouts = iter(zip(found, wanted, strict=False))

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        (strides, shared), (others, _) = next(layouts, (((), True), ((), True)))
        if shared or strides == others:
            return tensor
        order = sorted(range(tensor.dim()), key=others.__getitem__, reverse=True)
        back = [order.index(dim) for dim in range(tensor.dim())]
        long = [dim for dim in order if tensor.shape[dim] > 1]
        return tensor.contiguous() if long == sorted(long) else tensor.permute(order).contiguous().permute(back)

    return pytree.tree_map_only(torch.Tensor, copied, result)
