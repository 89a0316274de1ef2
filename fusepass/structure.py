"""Nested values as a flat list of leaves and back: what pytree knows, and dataclasses it does not know."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

PLAIN = (int, float, complex, bool, str, bytes, type(None), enum.Enum, torch.dtype, torch.device)
"""Types whose values are compared by value; with `torch.memory_format` and tuples of them."""

KeyPath = tuple[pytree.KeyEntry, ...]
"""How a leaf is reached: sequence indices, mapping keys and attribute names, from the outside in."""


def is_plain(value: object) -> bool:
    """Whether `value` is a plain constant: a number, text, None, a dtype or the like, or a tuple of them."""
    if type(value) is tuple:
        return all(map(is_plain, value))
    return isinstance(value, PLAIN) or type(value) in (torch.memory_format, torch.layout, torch.Size)


def plain_key(value: Any) -> object:
    """A key that is equal for plain values that behave alike: 1, 1.0 and True differ, as do 0.0 and -0.0.

    A value that is not plain is known by its type alone.
    """
    if type(value) is tuple:
        return tuple(map(plain_key, value))
    if type(value) is float:
        return float, math.copysign(1.0, value), value if value == value else "nan"
    return (type(value), value) if is_plain(value) else type(value)


@dataclass(frozen=True)
class _Record:
    """A dataclass instance that pytree takes for a leaf."""

    position: int
    type: type
    names: tuple[str, ...]
    inner: Structure

    def make(self, leaves: Sequence[Any]) -> Any:
        """An instance with these fields; ``__init__`` and ``__post_init__`` do not run, as in `copy.copy`."""
        instance: Any = object.__new__(self.type)
        for name, value in zip(self.names, self.inner.unflatten(leaves), strict=True):
            object.__setattr__(instance, name, value)
        return instance


@dataclass(frozen=True)
class Structure:
    """What remains of a nested value when its leaves are taken out; equal for values of the same form."""

    spec: pytree.TreeSpec
    records: tuple[_Record, ...] = ()

    @property
    def num_leaves(self) -> int:
        """How many leaves `unflatten` takes."""
        return self.spec.num_leaves + sum(record.inner.num_leaves - 1 for record in self.records)

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """The nested value that has these leaves."""
        if not self.records:
            return pytree.tree_unflatten(leaves, self.spec)
        remaining = iter(leaves)
        records = {record.position: record for record in self.records}
        outer = []
        for position in range(self.spec.num_leaves):
            record = records.get(position)
            if record is None:
                outer.append(next(remaining))
            else:
                outer.append(record.make([next(remaining) for _ in range(record.inner.num_leaves)]))
        return pytree.tree_unflatten(outer, self.spec)


def flatten(value: Any) -> tuple[list[Any], Structure]:
    """The leaves of a nested value, in order, and its structure."""
    outer, spec = pytree.tree_flatten(value, is_leaf=_is_shape)
    leaves: list[Any] = []
    records = []
    for position, leaf in enumerate(outer):
        names = _field_names(leaf)
        if names is None:
            leaves.append(leaf)
            continue
        fields, inner = flatten([getattr(leaf, name) for name in names])
        records.append(_Record(position, type(leaf), names, inner))
        leaves += fields
    return leaves, Structure(spec, tuple(records))


def key_paths(value: Any) -> list[KeyPath]:
    """How each leaf of `flatten` is reached, in the same order."""
    paths: list[KeyPath] = []
    for path, leaf in pytree.tree_flatten_with_path(value, is_leaf=_is_shape)[0]:
        names = _field_names(leaf)
        if names is None:
            paths.append(path)
            continue
        for name in names:
            inner = key_paths(getattr(leaf, name))
            paths += [(*path, pytree.GetAttrKey(name), *rest) for rest in inner]
    return paths


def _is_shape(value: object) -> bool:
    """Whether `value` is a `torch.Size`, of which pytree would make a plain tuple."""
    return type(value) is torch.Size


def is_record(value: object) -> bool:
    """Whether `value` is an instance of a dataclass whose fields, and nothing else, are in its dict."""
    names = _field_names(value)
    return names is not None and hasattr(value, "__dict__") and tuple(vars(value)) == names


def _field_names(leaf: object) -> tuple[str, ...] | None:
    """The fields of a dataclass instance that has nothing else to it; None for anything else."""
    if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type | torch.nn.Module):
        return None
    if type(leaf).__new__ is not object.__new__:  # a dict or a list as well, or one that checks what it is made of
        return None
    names = tuple(field.name for field in dataclasses.fields(leaf))
    if set(getattr(leaf, "__dict__", names)) != set(names):
        return None
    return names


@dataclass(frozen=True)
class Template:
    """A nested value with holes where its tensors were.

    Attributes:
        structure: the nesting.
        leaves: what is not a tensor; None in the holes.
        holes: positions of the tensors among the leaves.
        key: equal for templates with the same nesting and constants (`plain_key`).
        again: positions of further holes, each with the number of the tensor that is there once more.
    """

    structure: Structure
    leaves: tuple[Any, ...]
    holes: tuple[int, ...]
    key: object
    again: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, value: Any) -> tuple[list[torch.Tensor], Template]:
        """The tensors of `value`, in order, and the rest as a template."""
        leaves, structure = flatten(value)
        holes = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
        tensors = [leaves[i] for i in holes]
        constants = tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        return tensors, cls(structure, constants, holes, (holes, tuple(map(plain_key, constants))))

    @classmethod
    def of_call(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[torch.Tensor], Template]:
        """The tensors of a call, each once: where one is passed at several places, forward may ask whether it is, or write it."""
        found, form = cls.of((args, kwargs))
        numbers: dict[int, int] = {}
        for tensor in found:
            numbers.setdefault(id(tensor), len(numbers))
        if len(numbers) == len(found):
            return found, form
        tensors = list({id(tensor): tensor for tensor in found}.values())
        places = [(position, numbers[id(tensor)]) for position, tensor in zip(form.holes, found, strict=True)]
        first = {number: position for position, number in reversed(places)}
        again = tuple((position, number) for position, number in places if first[number] != position)
        holes = tuple(first[number] for number in range(len(tensors)))
        return tensors, cls(form.structure, form.leaves, holes, (form.key, again), again)

    def fill(self, tensors: Sequence[Any]) -> Any:
        """The nested value with `tensors` in the holes."""
        leaves = list(self.leaves)
        for position, tensor in zip(self.holes, tensors, strict=True):
            leaves[position] = tensor
        for position, number in self.again:
            leaves[position] = tensors[number]
        return self.structure.unflatten(leaves)

    def same_form(self, other: Template) -> bool:
        """Whether nesting, holes and constants are the same."""
        return self.key == other.key and self.structure == other.structure

    @property
    def opaque(self) -> object | None:
        """A constant that cannot be compared by value, such as a cache or a callable, if there is one."""
        return next((leaf for leaf in self.leaves if not is_plain(leaf)), None)
