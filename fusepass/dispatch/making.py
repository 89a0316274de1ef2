"""Makes the specialisations of one model: captures a call, compiles its graph, and puts the result where calls find it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fusepass import background
from fusepass.autotune.generation import prepare
from fusepass.capture.branches import MOST_BRANCHES
from fusepass.capture.trace import Captured, CaptureFailure, capture, capture_beside
from fusepass.codegen.forms import Forms
from fusepass.compile.pipeline import compile_graph
from fusepass.config import current, override
from fusepass.dispatch.signature import Signature
from fusepass.dispatch.signatures import Table
from fusepass.dispatch.specialisation import Specialisation
from fusepass.garbage import collector_paused
from fusepass.progress import shown, tell
from fusepass.runtime.fallbacks import FallbackCounter
from fusepass.runtime.meta import Meta
from fusepass.runtime.modes import settle

_log = logging.getLogger(__name__)
_MOST_CONDITIONAL = 4
"""Specialisations that are right for some branches of forward. One that takes ever new ones is better left to Dynamo."""

_MOST_TRACEABLE = 16
"""Specialisations that torch.compile and torch.export may trace: each has operators of its own, registered for good."""


@dataclass(frozen=True)
class Begun:
    """A call that is captured.

    Attributes:
        captured, signature, tensors: its graph, what that is right for, and its inputs.
        seconds: that this took.
    """

    captured: Captured
    signature: Signature
    tensors: Sequence[torch.Tensor]
    seconds: float


class Maker:
    """Threads may share one; they compile one after another.

    Args:
        model, options, name, forward: as the specialiser has them.
        fallbacks: counts what runs as the original operators.
        table: gets the specialisations.

    Attributes:
        traceable: the specialisations that tracers may see.
    """

    __slots__ = ("_compiling", "_fallbacks", "_forms", "_forward", "_model", "_options", "_table", "name", "traceable")

    def __init__(
        self,
        model: nn.Module,
        options: Mapping[str, Any],
        name: str,
        forward: Callable[..., Any] | None,
        fallbacks: FallbackCounter,
        table: Table,
    ) -> None:
        self._model = model
        self._options = options
        self.name = name
        self._forward = forward
        self._fallbacks = fallbacks
        self._table = table
        self._forms = Forms()
        self._compiling = threading.RLock()  # who holds it waits for no other lock of the model
        self.traceable: tuple[Specialisation, ...] = ()

    def make(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]
    ) -> Specialisation | CaptureFailure:
        """The specialisation for a call with these arguments, which have these `tensors`."""
        begun = self.begin(args, kwargs, tensors)
        return begun if isinstance(begun, CaptureFailure) else self.finish(begun)

    def begin(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]
    ) -> Begun | CaptureFailure:
        """Capture such a call, in a thread that makes it."""
        start = time.perf_counter()
        with collector_paused(), override(**self._options):
            prepare(sum(1 for _ in self._model.modules()))
            captured = capture(self._model, args, kwargs, forward=self._forward, branches=self._branches)
            if isinstance(captured, CaptureFailure):
                _log.info("%s: not captured: %s", self.name, captured.reason)
                return captured
            try:
                signature = Signature(self._model, tensors, self._forward)
                signature.complete(captured)
            except Exception as bug:
                return _failure(bug)
        return Begun(captured, signature, tensors, time.perf_counter() - start)

    def begin_beside(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]
    ) -> Begun | None:
        """The same while other threads call the model, train it and change it; None if it was changed meanwhile.

        Raises:
            NotBeside: only a thread that calls the model can capture it.
        """
        start = time.perf_counter()
        tell("capture")
        with override(**self._options):
            prepare(sum(1 for _ in self._model.modules()))
            signature = Signature(self._model, tensors, self._forward)
            captured = capture_beside(self._model, args, kwargs, forward=self._forward, branches=self._branches)
        if not _describes(captured, signature, tensors):
            _log.info("%s: changed while it was captured", self.name)
            return None
        return Begun(captured, signature, tensors, time.perf_counter() - start)

    def finish(self, begun: Begun) -> Specialisation | CaptureFailure:
        """The specialisation of what was captured, for all calls to find."""
        captured, signature, tensors = begun.captured, begun.signature, begun.tensors
        _log.info("%s: captured for %s in %.2f s", self.name, kinds(tensors), begun.seconds)
        with override(**self._options) as config:
            try:
                with self._compiling, shown(self.name):
                    compiled = compile_graph(
                        captured.graph,
                        name=self.name,
                        fallbacks=self._fallbacks,
                        forms=self._forms,
                        exact_inputs=True,
                        parameters=range(len(captured.states)),
                    )
                report = replace(compiled.report, seconds=(("capture", begun.seconds), *compiled.report.seconds))
                compiled = replace(compiled, report=report)
                if not signature.complete(replace(captured, graph=compiled.graph)):
                    return CaptureFailure("a setting of PyTorch changed while it was compiled", final=True)
                # What tracers see is compared with the model as it is by now.
                traceable = len(self.traceable) < _MOST_TRACEABLE and signature.bind(tensors) is not None
                made = Specialisation(
                    self._model, captured, compiled, signature, tensors, cuda_graphs=config.cuda_graphs,
                    traceable=traceable, alone=self._forward is None,
                )  # fmt: skip
            except Exception as bug:
                return _failure(bug)
        if made.inline is not None and signature.bind(tensors) is not None:
            self.traceable = (*self.traceable, made)
        if background.active():
            settle()
        self._table.add(made, tensors, config.max_signatures)
        return made

    @property
    def _branches(self) -> int:
        """Branches on values that one more specialisation may take."""
        conditional = sum(bool(made.captured.conditions) for made in self._table)
        return MOST_BRANCHES if conditional < _MOST_CONDITIONAL else 0


def _failure(bug: Exception) -> CaptureFailure:
    """What a bug of ours is to the user's model, which runs all the same; when debugging it is raised."""
    if current().debug:
        raise bug
    return CaptureFailure(f"internal error: {type(bug).__name__}: {bug}", final=True, lasting=True)


def kinds(tensors: Sequence[torch.Tensor]) -> str:
    """Types and shapes in words."""
    return ", ".join(f"{str(each.dtype).removeprefix('torch.')}{list(each.shape)}" for each in tensors)


def _describes(captured: Captured, signature: Signature, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the model still is as it was when `signature` was begun, and the graph was `captured` for that."""
    bound = signature.bind(tensors) if signature.complete(captured) else None
    if bound is None:
        return False
    values = [node.meta["val"] for node in captured.graph.graph.find_nodes(op="placeholder")]
    return [(Meta.of(each), each.device) for each in values] == [(Meta.of(each), each.device) for each in bound]
