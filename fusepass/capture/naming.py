"""Readable, unique identifiers for the placeholders of a graph: from module paths and forward's parameters."""

from __future__ import annotations

import inspect
import keyword
import re
from collections.abc import Callable, Iterable
from typing import Any

from torch.utils import _pytree as pytree

from fusepass.structure import KeyPath


def identifiers(texts: Iterable[str]) -> list[str]:
    """`texts` as Python identifiers, no two the same: ``conv.weight`` is ``conv_weight``, ``0.bias`` ``m0_bias``."""
    taken: set[str] = set()
    names = []
    for text in texts:
        base = re.sub(r"\W", "_", text) or "value"
        base = f"m{base}" if base[0].isdigit() else base
        base = f"{base}_" if keyword.iskeyword(base) or base == "self" else base
        name, count = base, 1
        while name in taken:
            name, count = f"{base}_{count}", count + 1
        taken.add(name)
        names.append(name)
    return names


def positional_names(forward: Callable[..., Any], count: int) -> list[str]:
    """What `forward` calls its first `count` positional arguments; ``args_2`` where it takes any number."""
    named: list[str] = []
    variadic = "args"
    for parameter in inspect.signature(forward).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            variadic = parameter.name
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            named.append(parameter.name)
    named += [f"{variadic}_{index}" for index in range(len(named), count)]
    return named[:count]


def input_text(path: KeyPath, positional: list[str]) -> str:
    """A text that names the input at `path` of ``(args, kwargs)``: ``inputs.hidden.0``."""
    side, argument, *rest = path
    first = positional[key(argument)] if key(side) == 0 else key(argument)
    return ".".join([str(first), *(str(key(entry)) for entry in rest)])


def key(entry: pytree.KeyEntry) -> Any:
    """The index, mapping key or attribute name that `entry` of a path is."""
    match entry:
        case pytree.SequenceKey(idx=index):
            return index
        case pytree.MappingKey(key=value):
            return value
        case pytree.GetAttrKey(name=name):
            return name
    return str(entry)
