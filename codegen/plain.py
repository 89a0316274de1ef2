"""Plain values as JSON and back: numbers, text, types, devices, and tuples, lists and dicts of them; nothing that could be code."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from fusepass.errors import ArtifactError

_NAMED = {"dtype": torch.dtype, "memory_format": torch.memory_format, "layout": torch.layout}
_MADE: dict[str, Callable[..., Any]] = {
    "complex": complex,
    "size": lambda *sizes: torch.Size(sizes),
    "slice": slice,
    "tuple": lambda *parts: parts,
}
UNKNOWN: Any = object()
"""What a hook gives for a value that it does not know."""

Hook = Callable[[Any], Any]


def encode(value: Any, other: Hook = lambda value: UNKNOWN) -> Any:
    """`value` as what JSON holds. A value of another type than JSON's becomes an object of one entry, its kind.

    Args:
        other: is asked first for what is not plain, such as a node of a graph; gives a JSON value.

    Raises:
        ArtifactError: there is something in it that is not plain.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind is complex:
        return {"complex": [encode(value.real), encode(value.imag)]}
    if kind is list:
        return [encode(each, other) for each in value]
    if kind is tuple or kind is torch.Size:
        return {"tuple" if kind is tuple else "size": [encode(each, other) for each in value]}
    if kind is dict:
        return {"dict": [[encode(key, other), encode(each, other)] for key, each in value.items()]}
    if kind is slice:
        return {"slice": [encode(each, other) for each in (value.start, value.stop, value.step)]}
    if kind is bytes:
        return {"bytes": value.hex()}
    if kind is torch.device:
        return {"device": str(value)}
    for name, named in _NAMED.items():
        if kind is named:
            return {name: str(value).removeprefix("torch.")}
    found = other(value)
    if found is UNKNOWN:
        raise ArtifactError(f"a {kind.__name__} cannot be written to an artifact: {value!r:.80}")
    return found


def decode(data: Any, other: Hook = lambda data: UNKNOWN, device: Callable[[str], torch.device] = torch.device) -> Any:
    """The value of which `encode` made `data`.

    Args:
        other: is asked first for objects, such as those that its counterpart made.
        device: gives the device to use in place of one by name.

    Raises:
        ArtifactError: `data` is nothing that `encode` gives.
    """
    if isinstance(data, list):
        return [decode(each, other, device) for each in data]
    if not isinstance(data, dict):
        return data
    found = other(data)
    if found is not UNKNOWN:
        return found
    try:
        ((kind, content),) = data.items()
        if kind == "float":
            return float(content)
        if kind == "bytes":
            return bytes.fromhex(content)
        if kind == "device":
            return device(content)
        if kind in _NAMED:
            value = getattr(torch, content)
            if type(value) is _NAMED[kind]:
                return value
        elif kind == "dict":
            return {decode(key, other, device): decode(each, other, device) for key, each in content}
        else:
            return _MADE[kind](*(decode(each, other, device) for each in content))
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError) as error:
        raise ArtifactError(f"a value cannot be read: {data!r:.80} ({error})") from error
    raise ArtifactError(f"a value cannot be read: {data!r:.80}")
