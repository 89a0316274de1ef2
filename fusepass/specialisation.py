"""One graph of a model, compiled for one signature, and how a call runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fusepass.capture import Captured
from fusepass.compile import CompiledGraph
from fusepass.inline import Inline
from fusepass.report import RegionState
from fusepass.signature import Signature
from fusepass.structure import KeyPath, Template


class Specialisation:
    """A compiled graph of `model` for the signature of the call with `tensors`, as things are now.

    Attributes:
        captured, compiled, signature: what it consists of.
        arity: how many positional tensors the call has; -1 where it is not just positional tensors.
        bind: gives the graph's arguments for the input tensors of a call, as `Signature.bind`; None where it is for others.
        writes: whether the graph writes inputs or tensors of the model.
        pays: whether anything was fused; else the original is as good.
        direct: whether nothing is left to check or to choose once the signature matches.
        inline: the form that `torch.compile` and `torch.export` trace; None where they trace the original instead.
    """

    __slots__ = (
        "_call",
        "_finish",
        "_written",
        "arity",
        "bind",
        "captured",
        "compiled",
        "direct",
        "inline",
        "pays",
        "signature",
        "writes",
    )

    def __init__(
        self, model: nn.Module, captured: Captured, compiled: CompiledGraph, tensors: Sequence[torch.Tensor]
    ) -> None:
        self.captured = captured
        self.compiled = compiled
        self.signature = Signature(model, captured, tensors)
        self.arity = _arity(captured)
        self.bind = self._bind_under_conditions if captured.conditions else self.signature.bind
        self._call = _without_autocast(compiled.call) if torch._C._is_any_autocast_enabled() else compiled.call
        self._finish = _finisher(captured.outputs)
        first_input = len(captured.states)
        self._written = frozenset(
            [captured.state_indices.index(i) for i in captured.mutated_states]
            + [first_input + i for i in captured.mutated_inputs]
        )
        self.writes = bool(self._written)
        self.pays = any(region.state is RegionState.FUSED for region in compiled.report.regions)
        self.direct = self.pays and not self.writes
        self.inline = Inline.of(model, captured, compiled, tuple(tensors))

    def run(self, arguments: Sequence[torch.Tensor]) -> Any:
        """The model's result, from what `Signature.bind` gave."""
        return self._finish(self._call(*arguments))

    def _bind_under_conditions(
        self, tensors: Sequence[torch.Tensor], stand_ins: Sequence[torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, ...] | None:
        """As `Signature.bind`; None, too, where forward would take other branches."""
        bound = self.signature.bind(tensors, stand_ins)
        if bound is None:
            return None
        with torch._C._DisableAutocast():  # as for the graph, which holds the casts
            return bound if all(condition.holds(bound) for condition in self.captured.conditions) else None

    def written_memory_is_shared(self, arguments: Sequence[torch.Tensor]) -> bool:
        """Whether something that the graph writes shares memory with another argument.

        The graph reads everything before it writes anything, so then it would not do what the model does.
        """
        memory = [argument.untyped_storage()._cdata for argument in arguments]
        written = {memory[i] for i in self._written}
        others = {place for i, place in enumerate(memory) if i not in self._written}
        return len(written) < len(self._written) or not written.isdisjoint(others)


def _arity(captured: Captured) -> int:
    count = len(captured.inputs.holes)
    positional: tuple[KeyPath, ...] = tuple((pytree.SequenceKey(0), pytree.SequenceKey(i)) for i in range(count))
    return count if captured.paths == positional else -1


def _finisher(outputs: Template) -> Callable[[Any], Any]:
    """`outputs.fill`, quick for one tensor and for a tuple of tensors."""
    sample = outputs.fill(range(len(outputs.holes)))
    if sample == 0 and len(outputs.leaves) == 1:
        return _first
    if type(sample) is tuple and sample == tuple(range(len(outputs.leaves))):
        return tuple
    return outputs.fill


def _first(values: Sequence[Any]) -> Any:
    return values[0]


def _without_autocast(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call` with autocast off: the graph holds the casts, and running it must not cast once more."""

    def run(*arguments: torch.Tensor) -> Any:
        with torch._C._DisableAutocast():
            return call(*arguments)

    return run
