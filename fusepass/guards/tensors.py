"""The tensors that a module owns (parameters, buffers, plain attributes) and where they live."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import nn

_Value: TypeAlias = Any  # Tensor or None; what is None is told by the tie pattern


@dataclass(frozen=True)
class Slot:
    """Where a tensor lives: attribute `name` of the submodule `path`, which is "" for the model itself.

    A path may have any name in it, even none: which submodule is meant is told by `index`, its place among ``model.modules()``.
    """

    path: str
    name: str
    index: int = 0

    @property
    def dotted(self) -> str:
        """Path and name, as in a state dict."""
        return f"{self.path}.{self.name}" if self.path else self.name


def _entries_with(module: nn.Module, name: str) -> dict[str, Any]:
    spaces = (module._parameters, module._buffers, vars(module))
    return next(space for space in spaces if isinstance(space.get(name), torch.Tensor))


def tensor_of(module: nn.Module, name: str) -> torch.Tensor:
    """The tensor that `module` has by that name, whatever hides it as an attribute."""
    tensor: torch.Tensor = _entries_with(module, name)[name]
    return tensor


def put_tensor(module: nn.Module, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Put `tensor` in the place of the one that `module` has by that name, which is given back."""
    entries = _entries_with(module, name)
    before: torch.Tensor = entries[name]
    entries[name] = tensor
    return before


def _holders(model: nn.Module) -> Iterator[tuple[str, int, dict[str, Any], list[str]]]:
    """Each dict that may hold tensors, with its submodule's path and place and the keys that count.

    Keys without a tensor count among parameters and buffers, where a bias may appear later.
    """
    for index, (path, module) in enumerate(model.named_modules()):
        for entries in (module._parameters, module._buffers):
            if entries:
                yield path, index, entries, list(entries.keys())  # TorchScript's mapping is no iterable
        plain = [key for key, value in vars(module).items() if isinstance(value, torch.Tensor)]
        if plain:
            yield path, index, vars(module), plain


class LiveTensors:
    """The tensors of `model` as they are now, each once, whatever was assigned since.

    Attributes:
        slots: where each of them lives; of tied ones the first place.
        ties: for each further place of a tensor, the place and the index of the tensor.
        dicts: what holds them.
    """

    def __init__(self, model: nn.Module) -> None:
        places = [(Slot(path, key, index), entries) for path, index, entries, keys in _holders(model) for key in keys]
        # With one key, itemgetter gives the bare value, so the first key comes twice.
        self._readers = [
            functools.partial(operator.itemgetter(*keys, keys[0]), entries) for _, _, entries, keys in _holders(model)
        ]
        self.dicts = tuple(entries for _, _, entries, _ in _holders(model))
        values = tuple(self._read())
        self._pattern = _tie_pattern(values)
        self._unique = [i for i, first in enumerate(self._pattern) if first == i]
        self._bound = values, tuple(values[i] for i in self._unique)
        slot_of = {id(entries[slot.name]): slot for slot, entries in reversed(places)}
        self.slots = tuple(slot_of[id(tensor)] for tensor in self._bound[1])
        order = {id(tensor): index for index, tensor in enumerate(self._bound[1])}
        self.ties = tuple(
            (slot, order[id(entries[slot.name])])
            for slot, entries in places
            if entries[slot.name] is not None and slot_of[id(entries[slot.name])] != slot
        )

    def _read(self) -> Iterator[_Value]:
        return chain.from_iterable(map(operator.call, self._readers))

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors as they were when last looked at, in the order of `slots`."""
        return self._bound[1]

    def now(self) -> tuple[torch.Tensor, ...] | None:
        """The tensors in the order of `slots`; None where places are gone or are tied differently.

        Places that came are not noticed here but by `fusepass.guards.pystate.PythonState`.
        """
        values, tensors = self._bound
        try:
            if all(map(operator.is_, self._read(), values)):
                return tensors
            return self._rebind()
        except KeyError:
            return None

    def _rebind(self) -> tuple[torch.Tensor, ...] | None:
        values = tuple(self._read())
        if _tie_pattern(values) != self._pattern:
            return None
        tensors = tuple(values[i] for i in self._unique)
        if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
            return None
        self._bound = values, tensors
        return tensors


def _tie_pattern(values: tuple[_Value, ...]) -> list[int]:
    """For each value the position where it occurs first; -1 for None."""
    first: dict[int, int] = {}
    return [-1 if value is None else first.setdefault(id(value), i) for i, value in enumerate(values)]
