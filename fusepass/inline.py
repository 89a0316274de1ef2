"""A specialisation in terms that Dynamo and export can trace: loops, attributes, comparisons of plain values."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fusepass.capture import Captured
from fusepass.compile import CompiledGraph
from fusepass.naming import key
from fusepass.structure import is_plain


class Inline:
    """Chooses and runs `compiled` inside another tracer, which then sees one call per region.

    Only graphs that write nothing are offered, as memory cannot be compared while tracing.
    """

    def __init__(
        self, model: nn.Module, captured: Captured, compiled: CompiledGraph, tensors: tuple[torch.Tensor, ...]
    ) -> None:
        self._graph = compiled.graph_module
        self._outputs = captured.outputs
        modules = dict(model.named_modules())
        self._states = tuple((modules[slot.path], slot.name) for slot in captured.states)
        self._state_facts = tuple(_facts(getattr(module, name)) for module, name in self._states)
        leaves = list(captured.inputs.leaves)
        for hole, tensor in zip(captured.inputs.holes, tensors, strict=True):
            leaves[hole] = _facts(tensor)
        places = [key(path[1]) for path in captured.paths]
        self._tensors = tuple((places[i], leaves[i]) for i in captured.inputs.holes)
        self._constants = tuple(
            (place, leaf)
            for i, (place, leaf) in enumerate(zip(places, leaves, strict=True))
            if i not in captured.inputs.holes
        )
        self._attributes = tuple(
            (module, name, value)
            for module in modules.values()
            for name, value in vars(module).items()
            if not name.startswith("_") and is_plain(value)
        )

    @classmethod
    def of(
        cls, model: nn.Module, captured: Captured, compiled: CompiledGraph, tensors: tuple[torch.Tensor, ...]
    ) -> Inline | None:
        """None where a tracer has to see the original model: nested inputs, writes, branches, autocast."""
        nested = any(len(path) != 2 for path in captured.paths)
        if (
            nested
            or captured.conditions
            or captured.mutated_states
            or captured.mutated_inputs
            or torch._C._is_any_autocast_enabled()
        ):
            return None
        return cls(model, captured, compiled, tensors)

    def matches(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this is the specialisation for a call."""
        if len(args) + len(kwargs) != len(self._tensors) + len(self._constants):
            return False
        for place, constant in self._constants:
            given = _argument(args, kwargs, place)
            if type(given) is not type(constant) or given != constant:
                return False
        for place, facts in self._tensors:
            given = _argument(args, kwargs, place)
            if not isinstance(given, torch.Tensor) or not _fits(given, facts):
                return False
        for module, name, value in self._attributes:
            if getattr(module, name) != value:
                return False
        for (module, name), facts in zip(self._states, self._state_facts):  # noqa: B905  # Dynamo
            if not _fits(getattr(module, name), facts):
                return False
        return True

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's result."""
        states = [getattr(module, name) for module, name in self._states]
        tensors = [_argument(args, kwargs, place) for place, _ in self._tensors]
        return self._outputs.fill(self._graph(*states, *tensors))


Facts = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]


def _facts(tensor: torch.Tensor) -> Facts:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


def _fits(tensor: torch.Tensor, facts: Facts) -> bool:
    shape, stride, dtype, device = facts
    return (
        tuple(tensor.shape) == shape
        and tensor.stride() == stride
        and tensor.dtype == dtype
        and tensor.device == device
        and not (torch.is_grad_enabled() and tensor.requires_grad)
        and not torch.is_autocast_enabled(device.type)
    )


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], place: int | str) -> Any:
    if isinstance(place, str):
        return kwargs.get(place)
    return args[place] if place < len(args) else None
