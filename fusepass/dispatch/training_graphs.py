"""The graphs that Dynamo finds in a forward, under one set of PyTorch's settings, compiled for calls that need gradients."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from fusepass.background import Job
from fusepass.config import override
from fusepass.dispatch.capture_fallback import IDLE_CALLS, MOST_IDLE, Children, is_tracing
from fusepass.dispatch.through_dynamo import Forward, through_dynamo
from fusepass.garbage import collector_paused
from fusepass.report.records import CaptureRoute, RefusalReport, RegionState
from fusepass.report.report import Report
from fusepass.runtime.fallbacks import FallbackCounter
from fusepass.structure import Template

_NOT_TRACED = "Dynamo finds no graph in forward"


class Graphs:
    """`forward` through Dynamo, graph breaks allowed; frames that it cannot trace run as they are.

    Where it finds no graph at all, the children serve one by one, whose hooks then run around their graphs.
    """

    def __init__(
        self,
        forward: Forward,
        name: str,
        options: Mapping[str, Any],
        fallbacks: FallbackCounter,
        limit: int,
        children: Callable[[], Children],
    ) -> None:
        self._forward = forward
        self._name = name
        self._fallbacks = fallbacks
        self._reports: list[Report] = []
        self._refusals: list[RefusalReport] = []
        self._steps: list[weakref.ref[Any]] = []  # each lives, with its memory, as long as a graph that calls it
        self._limit = limit
        self._make_children = children
        self._children: Children | None = None
        self._fused = False
        self._idle: Counter[object] = Counter()
        self._here = threading.local()
        with collector_paused():
            from fusepass.training.backend import Backend  # imports Dynamo, which takes seconds

        self._backend = Backend(
            name,
            options,
            fallbacks=fallbacks,
            observe=_weakly(self._observe),
            observe_backward=_weakly(self._observe_backward),
            observe_step=_weakly(self._observe_step),
        )
        self._options = options
        self._compiled = through_dynamo(forward, _weakly(self._compile), limit)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._children is not None and not self._children.empty:
            return self._children(args, kwargs)
        if not self._fused and self._reports:
            tensors, _ = Template.of((args, kwargs))
            kind = tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in tensors)
            if self._idle[kind] >= IDLE_CALLS:
                return self._forward(*args, **kwargs)
            if kind in self._idle or len(self._idle) < MOST_IDLE:
                self._idle[kind] += 1
        if is_tracing():
            with torch._dynamo.config.patch(error_on_nested_fx_trace=False):
                return self._compiled(*args, **kwargs)
        here = self._here
        here.ran = False
        result = self._compiled(*args, **kwargs)
        if not here.ran:
            self._explain()
        return result

    def _explain(self) -> None:
        """Say why no graph served a call, and have the children serve later ones where Dynamo never finds any."""
        if self._reports:
            most = sum(report.backward is None for report in self._reports) >= self._limit
            reason = f"Dynamo made {self._limit} graphs already" if most else "Dynamo traces no graph for such a call"
            self._fallbacks.count(self._name, f"needs gradients, and {reason}")
            return
        if self._children is None:
            self._children = self._make_children()
            self._refusals.append(RefusalReport(self._name, "training", _NOT_TRACED))
        if self._children.empty:
            self._fallbacks.count(self._name, f"needs gradients, and {_NOT_TRACED}")

    @property
    def route(self) -> CaptureRoute | None:
        """How calls are served."""
        if self._children is not None:
            return CaptureRoute.UNTOUCHED if self._children.empty else CaptureRoute.CHILDREN
        return CaptureRoute.DYNAMO if self._reports else None

    @property
    def reports(self) -> list[Report]:
        """Of the graphs so far, those of backward as parts of such."""
        return [*self._reports, *(self._children.reports() if self._children is not None else ())]

    @property
    def jobs(self) -> list[Job]:
        """What is compiled beside the calls now."""
        return [*self._backend.jobs, *(self._children.jobs() if self._children is not None else ())]

    @property
    def refusals(self) -> list[RefusalReport]:
        """Graphs that could not be compiled."""
        return list(self._refusals)

    @property
    def cuda_graphs(self) -> list[str]:
        """What became of the option of that name, for each graph of forward."""
        steps = [step for each in self._steps if (step := each()) is not None]
        return [status for step in steps if (status := step.status)]

    def _observe_step(self, step: Any) -> None:
        self._steps.append(weakref.ref(step))

    def _observe(self, compiled: Any) -> None:
        self._note(compiled.report, compiled.report)

    def _observe_backward(self, compiled: Any) -> None:
        report: Report = compiled.report
        self._note(report, Report(report.model, report.device, report.capture, backward=report))

    def _note(self, made: Report, kept: Report) -> None:
        self._fused |= any(region.state is RegionState.FUSED for region in made.regions) or bool(made.rewrites)
        self._reports.append(kept)

    def _compile(self, graph: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Forward:
        """What Dynamo calls with each graph."""
        from torch._dynamo.exc import TorchDynamoException, exceptions_allowed_to_be_fallback
        from torch.utils._python_dispatch import is_traceable_wrapper_subclass

        from fusepass.training.again import Differentiable

        other = next((each for each in example_inputs if is_traceable_wrapper_subclass(each)), None)
        compiled: Forward | None = None
        if other is not None:
            reason = f"needs gradients, and a tensor is a {type(other).__name__}"
        else:
            try:
                compiled = self._backend(graph, example_inputs)
            except (TorchDynamoException, *exceptions_allowed_to_be_fallback):
                raise  # to Dynamo, which traces again, ends the graph earlier or leaves the frame as it is
            except Exception as bug:  # ours or PyTorch's, but not a reason for the user's model not to run
                with override(**self._options) as config:
                    if config.debug:
                        raise
                reason = f"internal error: {type(bug).__name__}: {bug}"
                self._refusals.append(RefusalReport(self._name, "AOTAutograd", reason))
        here = self._here
        count = partial(self._fallbacks.count, self._name)
        serve = None if compiled is None else Differentiable(graph, compiled, count)

        def run(*arguments: Any) -> Any:
            here.ran = True
            if serve is None:
                count(reason)
                return graph(*arguments)
            return serve(*arguments)

        return run


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A bound method that does not keep its object: PyTorch holds on to what it was given to compile with."""
    found = weakref.WeakMethod(method)

    def run(*args: Any) -> Any:
        alive = found()
        return None if alive is None else alive(*args)

    return run
