"""Finds writes to tensors of which several elements lie in the same place of memory."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from fusepass.errors import CaptureError


class Overlaps:
    """Knows tensors that overlap themselves (expanded ones, windows made by ``as_strided``), and views of them.

    A write to one shows in several elements of another, which eager leaves to the order in which it goes through memory.
    Tracing makes writes functional: each element would be written by itself.
    """

    def __init__(self) -> None:
        self._views = WeakIdKeyDictionary()

    def decline(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """To be told of each call before it runs.

        Raises:
            CaptureError: it writes to one of them.
        """
        if any(map(self._knows, _written(func, args, kwargs))):
            raise CaptureError("forward writes to a tensor whose elements share memory", final=True)

    def follow(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """To be told of the `result` of each call."""
        found = [tensor for tensor in _tensors(result) if tensor.layout is torch.strided]
        if not found:
            return
        shared = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs)) if self._knows(tensor)}
        for tensor in found:
            if tensor.untyped_storage()._cdata in shared or _overlaps(tensor):
                self._views[tensor] = True

    def _knows(self, tensor: torch.Tensor) -> bool:
        return tensor.layout is torch.strided and (tensor in self._views or _overlaps(tensor))


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether two elements may share memory; where sizes and strides interlock without, it says so, too."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return tensor.numel() > 0
            reach += stride * (size - 1)
    return False


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[torch.Tensor]:
    """The tensors that `func` writes, by the conventions for names of functions and arguments."""
    name = getattr(func, "__name__", "")
    in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    if in_place or _flag(func, args, kwargs):
        yield from _tensors(args[0] if args else (kwargs.get("self"), kwargs.get("input")))
    yield from _tensors(kwargs.get("out"))


def _flag(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """The argument ``inplace`` of functions such as ``relu``."""
    if "inplace" not in kwargs and inspect.isfunction(func):
        names = func.__code__.co_varnames[: func.__code__.co_argcount]
        kwargs = dict(zip(names, args, strict=False))
    return kwargs.get("inplace") is True
