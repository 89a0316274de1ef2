"""What serves a model that cannot be traced as one graph: Dynamo, its children by themselves, or nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from fusepass.background import Job
from fusepass.compile.pipeline import CompiledGraph
from fusepass.dispatch.through_dynamo import Forward, through_dynamo
from fusepass.report.report import CaptureRoute, Report
from fusepass.runtime.fallbacks import FallbackCounter

_FORCED = "force_compile_during_fx_trace"
"""An option of Dynamo's: that a trace is under way is said of the process, but here it is another thread's."""
is_tracing: Callable[[], bool] = torch.fx._symbolic_trace.is_fx_symbolic_tracing
"""Says so of the process: it may be another thread that traces."""
IDLE_CALLS = 8  # of tensors alike, after which Dynamo is left out if its graphs save less than its guards take
MOST_IDLE = 64  # kinds of tensors
MOST_RECOMPILATIONS = 16  # by Dynamo, which makes sizes that change symbolic on its own


class Route(Protocol):
    """A way to run a model that guards itself, so that any call may take it."""

    kind: CaptureRoute

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's result."""

    def reports(self) -> list[Report]:
        """What was fused on this way so far."""

    def jobs(self) -> list[Job]:
        """What is compiled beside its calls now."""


class Optimised(Protocol):
    """A child module that is optimised on its own."""

    @property
    def original(self) -> Forward:
        """Its own forward."""

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Its result."""

    def report(self) -> Report:
        """What was fused so far."""

    @property
    def jobs(self) -> list[Job]:
        """What is compiled beside its calls now."""


class Untouched:
    """The original forward, counted as a fallback."""

    kind = CaptureRoute.UNTOUCHED

    def __init__(self, forward: Forward, name: str, reason: str, fallbacks: FallbackCounter) -> None:
        self._forward = forward
        self._name = name
        self.reason = reason
        self._fallbacks = fallbacks

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._fallbacks.count(self._name, self.reason)
        return self._forward(*args, **kwargs)

    def reports(self) -> list[Report]:
        return []

    def jobs(self) -> list[Job]:
        return []


class Dynamo:
    """Dynamo with this package's backend, graph breaks allowed; frames it cannot trace run as they are.

    What forward draws from NumPy comes from NumPy: unless told, Dynamo takes it from PyTorch's generator.

    Attributes:
        saved: what each graph so far saves a call, in seconds; see `CompiledGraph.seconds_saved`.
    """

    kind = CaptureRoute.DYNAMO

    def __init__(
        self, forward: Forward, name: str, options: Mapping[str, Any], fallbacks: FallbackCounter, limit: int
    ) -> None:
        self._reports: list[Report] = []
        self.saved: list[float] = []
        from fusepass.training.backend import Backend  # Dynamo takes seconds to import

        options = {**options, "cuda_graphs": False}
        self._backend = Backend(name, options, fallbacks=fallbacks, observe=self._note)
        self._compiled = through_dynamo(forward, self._backend, min(limit, MOST_RECOMPILATIONS))

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not is_tracing():
            return self._compiled(*args, **kwargs)
        asked = {"error_on_nested_fx_trace": False}
        if hasattr(torch._dynamo.config, _FORCED):  # not in PyTorch 2.11
            asked[_FORCED] = True
        with torch._dynamo.config.patch(asked):
            return self._compiled(*args, **kwargs)

    def _note(self, made: CompiledGraph) -> None:
        self._reports.append(made.report)
        self.saved.append(made.seconds_saved)

    def reports(self) -> list[Report]:
        return list(self._reports)

    def jobs(self) -> list[Job]:
        return self._backend.jobs


class Children:
    """Each child module optimised on its own, while the parent's Python runs as it is.

    The children are shared with the original model, so they are changed only while a call is in progress: their
    ``forward`` is then an attribute of the instance, which runs the child's own in other threads.
    """

    kind = CaptureRoute.CHILDREN

    def __init__(
        self,
        model: nn.Module,
        forward: Forward,
        optimise: Callable[[str, nn.Module], Optimised],
        *,
        left: tuple[type[nn.Module], ...] = (),
    ) -> None:
        """Children that are `left` stay as they are."""
        self._forward = forward
        self._lock = threading.Lock()
        self._calls = 0
        self._saved: dict[nn.Module, Forward | None] = {}
        children = [(name, child) for name, child in _callable_children(model) if not isinstance(child, left)]
        self._optimised = {child: optimise(name, child) for name, child in children}
        self._inside = threading.local()  # how many calls of this thread are under way
        self._forwards = {child: _forward_of(made, self._inside) for child, made in self._optimised.items()}

    @property
    def empty(self) -> bool:
        """Whether there is no child to optimise."""
        return not self._forwards

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        depth = getattr(self._inside, "depth", 0)
        self._inside.depth = depth + 1
        try:
            with self._children_replaced():
                return self._forward(*args, **kwargs)
        finally:
            self._inside.depth = depth

    def reports(self) -> list[Report]:
        return [made.report() for made in self._optimised.values()]

    def jobs(self) -> list[Job]:
        return [job for made in self._optimised.values() for job in made.jobs]

    @contextmanager
    def _children_replaced(self) -> Iterator[None]:
        """The first of several simultaneous calls replaces, the last one puts back."""
        with self._lock:
            self._calls += 1
            if self._calls == 1:
                for child, forward in self._forwards.items():
                    self._saved[child] = vars(child).get("forward")
                    vars(child)["forward"] = forward
        try:
            yield
        finally:
            with self._lock:
                self._calls -= 1
                if self._calls == 0:
                    self._put_back()

    def _put_back(self) -> None:
        for child, forward in self._saved.items():
            if forward is None:
                vars(child).pop("forward", None)
            else:
                vars(child)["forward"] = forward
        self._saved.clear()


def _callable_children(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The nearest submodules that can be called; containers such as ModuleList are looked into."""
    for name, child in model.named_children():
        if isinstance(child, torch.jit.ScriptModule):
            continue
        if type(child).forward is not nn.Module.forward:
            yield prefix + name, child
        else:
            yield from _callable_children(child, f"{prefix}{name}.")


def _forward_of(child: Optimised, inside: threading.local) -> Forward:
    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or not getattr(inside, "depth", 0):
            return child.original(*args, **kwargs)
        return child(args, kwargs)

    return forward
