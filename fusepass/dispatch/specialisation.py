"""One graph of a model, compiled for one signature, and how a call runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fusepass.capture.trace import Captured
from fusepass.compile.pipeline import CompiledGraph
from fusepass.dispatch.inline import Inline
from fusepass.dispatch.signature import Signature
from fusepass.measure import extent
from fusepass.report.report import RegionState, Report
from fusepass.runtime.cuda_graphs import CudaGraphs
from fusepass.runtime.fast_path import MISSED, Form, types
from fusepass.runtime.memory import overlaps_written
from fusepass.runtime.replay import Replay
from fusepass.runtime.replay_trial import ReplayTrial
from fusepass.runtime.replayable import obstacle, unasked_obstacle
from fusepass.structure import KeyPath, Template

_WORTH = 5e-6
"""Seconds a call that rewrites alone have to save, by the model of costs, for the graph to run instead of the original: what its guards
take, or a launch. Attention of one query, written out, is two launches less."""


class Specialisation:
    """A compiled graph of `model` for the `signature` of the call with `tensors`.

    `alone` says that where nothing pays the model's own method `forward` is to serve.

    Attributes:
        captured, compiled, signature: what it consists of. The captured graph itself has given way to the one that was compiled:
            signatures are many, and graphs are most of what they take.
        arity: how many positional tensors the call has; -1 where it is not just positional tensors.
        bind: gives the graph's arguments for the input tensors of a call, as `Signature.bind`; None where it is for others.
        written: positions of the arguments that the graph writes: inputs or tensors of the model.
        writes: whether there are any.
        pays: whether anything was fused, or rewritten to advantage, or is replayed as a CUDA graph; else the original is as good.
        idle: how many calls looked it up in vain, as the original is as good.
        quick: serves without Python, where nothing changed since `fitting` said that a call fits; None where there is none
            so far.
        replay: the CUDA graph that serves calls; text that says why there is none, None where it is not to be or nobody
            wants to know.
        inline: the form that `torch.compile` and `torch.export` trace; None where they trace the original instead.
    """

    __slots__ = (
        "_alone",
        "_apart",
        "_call",
        "_finish",
        "_form",
        "_may_be_quick",
        "_model",
        "_plain",
        "_sizes",
        "_without_python",
        "arity",
        "bind",
        "captured",
        "compiled",
        "idle",
        "inline",
        "pays",
        "quick",
        "replay",
        "signature",
        "writes",
        "written",
    )

    def __init__(
        self,
        model: nn.Module,
        captured: Captured,
        compiled: CompiledGraph,
        signature: Signature,
        tensors: Sequence[torch.Tensor],
        *,
        cuda_graphs: bool | str = False,
        traceable: bool = True,
        alone: bool = False,
    ) -> None:
        self.captured = replace(captured, graph=compiled.graph)
        self.compiled = compiled
        self.signature = signature
        self.arity = _arity(captured)
        self.bind = self._bind_under_conditions if captured.conditions else self.signature.bind
        self._call = _without_autocast(compiled.call) if torch._C._is_any_autocast_enabled() else compiled.call
        self._finish = _finisher(captured.outputs)
        first_input = len(captured.states)
        self.written = frozenset(
            [captured.state_indices.index(i) for i in captured.mutated_states]
            + [first_input + i for i in captured.mutated_inputs]
        )
        self.writes = bool(self.written)
        self._sizes = [
            extent(node.meta["val"]) * node.meta["val"].dtype.itemsize
            for node in compiled.graph.graph.find_nodes(op="placeholder")
        ]
        self._apart: list[int] = []  # where arguments lay that share nothing that is written
        self._plain = self._call
        self._without_python: tuple[Callable[..., Any], Sequence[int]] | None = None
        self.replay = self._replay(tensors, asked=cuda_graphs is True) if cuda_graphs else None
        if isinstance(self.replay, Replay):
            self._call = self.replay
        self.pays = self._pays()
        self.quick: Any = None
        self.idle = 0
        self._model = model if alone else None
        self._alone = self._model if not self.pays else None
        self._form = None if captured.conditions else Form.of(captured.inputs)
        self._may_be_quick = self._form is not None and (self.pays or alone)
        self.inline = Inline.of(model, captured, compiled, tuple(tensors)) if traceable else None

    @property
    def report(self) -> Report:
        """That of the compiled graph, with what became of its CUDA graph."""
        replay = self.replay.status if isinstance(self.replay, Replay) else self.replay
        return replace(self.compiled.report, cuda_graphs=(replay,) if replay else ())

    def _replay(self, tensors: Sequence[torch.Tensor], *, asked: bool) -> Replay | str | None:
        """Calls through a CUDA graph, or why there is none."""
        arguments = self.signature.bind(tensors) or tuple(tensors)
        if not asked and not any(argument.is_cuda for argument in arguments):
            return None
        reason = (obstacle if asked else unasked_obstacle)(self.compiled.graph.graph, arguments)
        if reason is not None:
            return f"not used: {reason}"
        trial = None if asked else ReplayTrial.of(self.compiled.calls)
        return Replay(
            self._plain, len(self.captured.states), self.written, CudaGraphs(arguments[0].device),
            self.compiled.report.model, trial, self._launch,
        )  # fmt: skip

    def _launch(self, *arguments: torch.Tensor) -> Any:
        """As `_plain`, with as little Python as calls take once nothing is tried any more."""
        if types() is None or self._plain is not self.compiled.call:
            return self._plain(*arguments)
        run, positions = self._launches()
        return run(*[arguments[position] for position in positions])

    def _launches(self) -> tuple[Callable[..., Any], Sequence[int]]:
        """The graph without Python, and which arguments it takes; made once."""
        if self._without_python is None:
            self._without_python = self.compiled.without_python()
        return self._without_python

    def _pays(self) -> bool:
        fused = any(region.state is RegionState.FUSED for region in self.compiled.report.regions)
        replayed = isinstance(self.replay, Replay) and self.replay.used
        return fused or replayed or self.compiled.saved >= _WORTH

    def _settled(self) -> bool:
        """Whether calls will be served as they are now; a CUDA graph that proved of no use is gone from then on."""
        if isinstance(self.replay, Replay):
            if not self.replay.settled:
                return False
            if not self.replay.used and self._call is self.replay:
                self._call, self.pays = self._plain, self._pays()
                self._alone = self._model if not self.pays else None
        return True

    def _quick(self) -> Any:
        if self._form is None:
            return None
        if self._alone is not None:
            return self.signature.quick_forward(self._alone, self._form)
        run: Callable[..., Any] = self._call
        positions: Sequence[int] = range(len(self._sizes))
        if run is self.compiled.call:
            run, positions = self._launches()
        finish = None if self._finish is _first else self._finish
        return self.signature.quick(self._form, run, positions, finish, tuple(sorted(self.written)), tuple(self._sizes))

    def serve(self, tensors: tuple[Any, ...]) -> Any:
        """The model's result for a call with these positional arguments, or `MISSED`."""
        arguments = self.fitting(tensors) if self.pays else None
        if arguments is None:
            return MISSED
        values = self._call(*arguments)
        return values[0] if self._finish is _first else self._finish(values)

    def fitting(self, tensors: tuple[Any, ...]) -> Sequence[torch.Tensor] | None:
        """The graph's arguments for a call with these positional arguments that it is right for, else None."""
        if len(tensors) != self.arity:
            return None
        arguments = self.bound(tensors)
        if arguments is None or (self.writes and self.written_memory_is_shared(arguments)):
            return None
        return arguments

    def bound(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...] | None:
        """As `bind`; calls that it gives arguments for need no Python from then on, until something changes."""
        if self._may_be_quick and types() is not None and self._settled():
            self.quick, self._may_be_quick = self._quick(), False
        quick = self.quick
        # Before anything is looked at:
        moment, lists = (0, ()) if quick is None else (quick.moment(), self.signature.lists)
        arguments = self.bind(tensors)
        if quick is not None and arguments is not None:
            quick.renew(moment, self.signature.states if self.pays else (), lists)
        return arguments

    def ask_no_more(self) -> None:
        """Let the original serve such calls whatever branches forward takes: nothing was gained in any that came."""
        self._form = Form.of(self.captured.inputs)
        self._may_be_quick = self._form is not None and self._alone is not None

    def run(self, arguments: Sequence[torch.Tensor]) -> Any:
        """The model's result, from what `Signature.bind` gave."""
        return self._finish(self._call(*arguments))

    def _bind_under_conditions(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...] | None:
        """As `Signature.bind`; None, too, where forward would take other branches."""
        bound = self.signature.bind(tensors)
        if bound is None:
            return None
        with torch._C._DisableAutocast():  # as for the graph, which holds the casts
            return bound if all(condition.holds(bound) for condition in self.captured.conditions) else None

    def written_memory_is_shared(self, arguments: Sequence[torch.Tensor]) -> bool:
        """Whether something that the graph writes shares memory with another argument.

        The graph reads everything before it writes anything, so then it would not do what the model does.
        """
        starts = [argument.data_ptr() for argument in arguments]
        if starts == self._apart:
            return False
        if overlaps_written(starts, self._sizes, self.written):
            return True
        self._apart = starts
        return False


def _arity(captured: Captured) -> int:
    count = len(captured.inputs.holes)  # where a tensor is passed twice, there are more paths
    positional: tuple[KeyPath, ...] = tuple((pytree.SequenceKey(0), pytree.SequenceKey(i)) for i in range(count))
    return count if captured.paths == positional else -1


def _finisher(outputs: Template) -> Callable[[Any], Any]:
    """`outputs.fill`, quick for one tensor and for a tuple of tensors."""
    if len(outputs.holes) < len(outputs.leaves):  # a number that is given as it is looks like the place of a tensor
        return outputs.fill
    sample = outputs.fill(range(len(outputs.holes)))
    if sample == 0:
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
