"""Random numbers for a run that only finds out what forward does: from a generator of its own, so that nobody misses them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from fusepass.patterns.memo import remembered


def drawn(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], devices: Sequence[int]) -> Any:
    """What `func` gives, with other random numbers than the next ones of PyTorch's generators, which other threads may draw meanwhile.

    An operator that cannot be given a generator draws from PyTorch's, which is then put back, with those of the CUDA `devices`; not one
    that drops nothing out.
    """
    if _drops_nothing(func, args, kwargs):
        return func(*args, **kwargs)
    form = _given_a_generator(func)
    if form is None or kwargs.get("generator") is not None:
        with torch.random.fork_rng(devices):
            return func(*args, **kwargs)
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    device = tensors[0].device if tensors else torch.device(kwargs.get("device") or "cpu")
    return form(*args, **kwargs | {"generator": torch.Generator(device)})


_DROPPING = ("dropout", "dropout_p", "train")
"""Arguments without whose share, or while they are off, an operator such as attention or a recurrent layer draws nothing."""


def _drops_nothing(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    arguments = func._schema.arguments
    given = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
    asked = [given.get(each.name, each.default_value) for each in arguments if each.name in _DROPPING]
    return any(value is False or value == 0 for value in asked)


@remembered
def _given_a_generator(func: OpOverload) -> OpOverload | None:
    """The overload of `func` that takes a generator beside its arguments; None where there is none."""
    wanted = _types(func)
    packet = func.overloadpacket
    every: list[OpOverload] = [getattr(packet, name) for name in packet.overloads()]
    for form in (func, *every):
        if any(argument.name == "generator" for argument in form._schema.arguments) and _types(form) == wanted:
            return form
    return None


def _types(func: OpOverload) -> list[tuple[str, str]]:
    arguments = func._schema.arguments
    return [(argument.name, str(argument.type)) for argument in arguments if argument.name != "generator"]
