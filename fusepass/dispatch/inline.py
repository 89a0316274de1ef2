"""A specialisation in terms that Dynamo and export can trace: loops, dicts, comparisons of plain values."""

from __future__ import annotations

import copy
import enum
import math
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._device as default
from torch import fx, nn

from fusepass.capture.naming import key
from fusepass.capture.trace import Captured
from fusepass.compile.pipeline import CompiledGraph
from fusepass.guards.surroundings import Surroundings

_LARGE = 64
"""Entries of a list or dict; of larger ones each entry would become a guard."""

_EXACT = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout)
_NAMED = (type, types.FunctionType, types.BuiltinFunctionType)
_GLOBAL_HOOKS: tuple[dict[int, Any], ...] = (
    nn.modules.module._global_forward_hooks,
    nn.modules.module._global_forward_pre_hooks,
)
_COMPILED = {"_compiled_call_impl", "_is_torch_compile"}
_ELSEWHERE = frozenset({*vars(nn.Module()), *_COMPILED, "_flat_weights", "_flat_weight_refs"} - {"training"})
"""Attributes of modules that are compared entry by entry, that PyTorch derives from others, and that torch.compile sets."""


class Inline:
    """Chooses and runs `compiled` inside another tracer, which then sees one call per region.

    Only graphs that write nothing are offered, as memory cannot be compared while tracing.
    """

    def __init__(
        self,
        model: nn.Module,
        captured: Captured,
        compiled: CompiledGraph,
        tensors: tuple[torch.Tensor, ...],
        state: _State,
    ) -> None:
        self._state = state
        self._traced, self._prepared = _traced_later(compiled)
        self._outputs = captured.outputs
        modules = list(model.modules())
        self._states = tuple((modules[slot.index], slot.name) for slot in captured.states)
        leaves = list(captured.inputs.leaves)
        for hole, tensor in zip(captured.inputs.holes, tensors, strict=True):
            leaves[hole] = _facts(tensor)
        places = [key(path[1]) for path in captured.paths]
        self._tensors = tuple((places[i], leaves[i]) for i in captured.inputs.holes)
        self._constants = tuple(
            (place, leaf)
            for i, (place, leaf) in enumerate(zip(places, leaves, strict=True))
            if i not in captured.inputs.holes and i not in dict(captured.inputs.again)
        )
        self._again = tuple((places[i], self._tensors[number][0]) for i, number in captured.inputs.again)

    @classmethod
    def of(
        cls, model: nn.Module, captured: Captured, compiled: CompiledGraph, tensors: tuple[torch.Tensor, ...]
    ) -> Inline | None:
        """None where a tracer has to see the original model: nested inputs, writes, branches, autocast, what cannot be compared."""
        nested = any(len(path) != 2 for path in captured.paths)
        if (
            nested
            or captured.conditions
            or captured.mutated_states
            or any(hasattr(nn.Module, slot.name) for slot in captured.states)
            or captured.mutated_inputs
            or torch._C._is_any_autocast_enabled()
            or not all(map(_is_exact, captured.inputs.leaves))
        ):
            return None
        state = _State.of(model)
        return None if state is None else cls(model, captured, compiled, tensors, state)

    def matches(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this is the specialisation for a call."""
        if len(args) + len(kwargs) != len(self._tensors) + len(self._constants) + len(self._again):
            return False
        for place, first in self._again:
            if _argument(args, kwargs, place) is not _argument(args, kwargs, first):
                return False
        for place, constant in self._constants:
            if not _same(_argument(args, kwargs, place), constant):
                return False
        for place, facts in self._tensors:
            if not _fits(_argument(args, kwargs, place), facts):
                return False
        return self._state.unchanged()

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's result."""
        states = [getattr(module, name) for module, name in self._states]
        tensors = [_argument(args, kwargs, place) for place, _ in self._tensors]
        self._prepared()
        assert self._traced.graph is not None
        return self._outputs.fill(self._traced.graph(*states, *tensors))


class _Traced:
    """The graph that tracers see, once it is there."""

    graph: fx.GraphModule | None = None


def _traced_later(compiled: CompiledGraph) -> tuple[_Traced, Callable[[], bool]]:
    """Where the graph of `compiled` will be, and what makes it."""
    traced = _Traced()

    def prepared() -> bool:
        if traced.graph is None:
            traced.graph = compiled.graph_module
        return True

    # As torch.compiler.assume_constant_result, which imports Dynamo: that calls it, and traces the graph which is there then.
    prepared._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return traced, prepared


class _State:
    """What forward may read besides its inputs, at one moment.

    It is read from the very dicts that hold it: Dynamo guards their keys, and whether there are hooks, but not those of
    a module that it is asked for. Classes are compared by `id`, as Dynamo has no guard for `is`.
    """

    def __init__(self) -> None:
        self.keys: list[tuple[dict[str, Any], list[str]]] = []
        self.values: list[tuple[dict[str, Any], str, Any]] = []
        self.objects: list[tuple[dict[str, Any], str, object]] = []
        self.tensors: list[tuple[dict[str, Any], str, Facts]] = []
        self.ties: list[tuple[dict[str, Any], str, dict[str, Any], str]] = []
        self.methods: list[tuple[type, str, object]] = []
        self.hooks = list(_GLOBAL_HOOKS)
        self.defaults = torch.get_default_dtype(), default.CURRENT_DEVICE

    @classmethod
    def of(cls, model: nn.Module) -> _State | None:
        """That of `model`; None where there is something that cannot be compared."""
        state = cls()
        around = Surroundings(model)
        for (kind, name), read in around.methods.items():
            method = read()
            if not isinstance(method, types.FunctionType) or getattr(kind, name, None) is not method:
                return None
            state.methods.append((kind, name, method))  # Dynamo traces no look into the dict of a class
        if around.settings:
            return None  # a global, say: Dynamo does not trace what makes its key
        first: dict[int, tuple[dict[str, Any], str]] = {}
        for module in model.modules():
            if module is not model:  # the model's own run around its forward
                state.hooks += module._forward_hooks, module._forward_pre_hooks
            for entries in (vars(module), module._parameters, module._buffers, module._modules):
                state.keys.append((entries, _names(entries)))
                for name in _names(entries):
                    value = entries[name]
                    if isinstance(value, torch.Tensor):
                        if id(value) in first:
                            state.ties.append((entries, name, *first[id(value)]))
                        else:
                            first[id(value)] = entries, name
                            state.tensors.append((entries, name, _facts(value)))
                    elif isinstance(value, _NAMED) or entries is module._modules:
                        state.objects.append((entries, name, value))
                    elif _is_comparable(value):
                        state.values.append((entries, name, copy.deepcopy(value)))
                    else:
                        return None
        return state

    def unchanged(self) -> bool:
        """Whether all is as it was."""
        if self.defaults[0] != torch.get_default_dtype() or self.defaults[1] != default.CURRENT_DEVICE:
            return False
        for hooks in self.hooks:
            if len(hooks) > 0:
                return False
        for entries, keys in self.keys:
            if _names(entries) != keys:
                return False
        for entries, name, thing in self.objects:
            if id(entries[name]) != id(thing):
                return False
        for kind, name, method in self.methods:
            if id(getattr(kind, name, None)) != id(method):
                return False
        for entries, name, value in self.values:
            if not _same(entries[name], value):
                return False
        for entries, name, facts in self.tensors:
            if not _fits(entries[name], facts):
                return False
        return all(entries[name] is others[other] for entries, name, others, other in self.ties)


def _names(entries: dict[str, Any]) -> list[str]:
    return [name for name in entries if name not in _ELSEWHERE]


def _is_exact(value: object) -> bool:
    """Whether `_same` and Dynamo's guards tell `value` from all others: a guard takes 0.0 for -0.0."""
    if isinstance(value, tuple) and type(value) in (tuple, torch.Size):
        return all(map(_is_exact, value))
    return _is_comparable(value) and not (type(value) is float and value == 0)


def _is_comparable(value: object) -> bool:
    """Whether `_same` knows values like this."""
    if isinstance(value, dict) and type(value) is dict:
        return len(value) <= _LARGE and all(map(_is_comparable, (*value, *value.values())))
    if isinstance(value, list | tuple) and type(value) in (list, tuple, torch.Size):
        return len(value) <= _LARGE and all(map(_is_comparable, value))
    return type(value) in _EXACT or isinstance(value, enum.Enum)


def _same(given: Any, value: Any) -> bool:
    """Whether `given` behaves as `value` does: 1, 1.0 and True differ, as do 0.0 and -0.0; NaN is no other's like."""
    if type(given) is not type(value):
        return False
    if isinstance(value, dict):
        return _same(list(given), list(value)) and _same(list(given.values()), list(value.values()))
    if isinstance(value, list | tuple):
        if len(given) != len(value):
            return False
        return all(_same(one, other) for one, other in zip(given, value))  # noqa: B905  # Dynamo
    if isinstance(value, float) and value == 0:
        return given == 0 and math.copysign(1.0, given) == math.copysign(1.0, value)
    return bool(given == value)


Facts = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]


def _facts(tensor: torch.Tensor) -> Facts:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


def _fits(tensor: Any, facts: Facts) -> bool:
    shape, stride, dtype, device = facts
    return (
        isinstance(tensor, torch.Tensor)
        and tuple(tensor.shape) == shape
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
