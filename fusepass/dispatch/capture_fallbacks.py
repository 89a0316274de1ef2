"""Finds, and keeps, what serves the calls of a model that cannot be traced."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

import torch
from torch import nn

from fusepass.capture.trace import CaptureFailure
from fusepass.config import Config, override
from fusepass.dispatch.capture_fallback import (
    IDLE_CALLS,
    MOST_IDLE,
    Children,
    Dynamo,
    Optimised,
    Route,
    Untouched,
)
from fusepass.dispatch.through_dynamo import Forward
from fusepass.errors import warn
from fusepass.guards.edits import Code
from fusepass.report.records import RefusalReport
from fusepass.runtime.fallbacks import FallbackCounter

_GUARDS = 1.2e-4
"""Seconds that graphs on a CPU must save, by the trials of their regions, to be worth Dynamo's guards. These take 37 us with two layers on
a Xeon, 100 us with 128, and the trials of small regions, each alone, show three times what a call saves. A device that works beside the
host hides them."""


class CaptureFallbacks:
    """The routes of one model, by the kind of call. The caller holds the lock, but for `run`.

    Args:
        model, name, options: of the model, as its specialiser has them.
        forward: what to run where nothing is specialised; ``model.forward`` where that is None.
        fallbacks: counts what runs as the original operators.
        specialiser: makes the specialiser of a child. It is no specialiser's own method: a circle of references would keep
            the model until the garbage collector runs.
        dynamo: whether Dynamo may serve.
        lock: the specialiser's.
    """

    __slots__ = (
        "_children",
        "_code",
        "_dynamo",
        "_dynamo_allowed",
        "_fallbacks",
        "_forward",
        "_gains",
        "_idle",
        "_lock",
        "_model",
        "_name",
        "_options",
        "_refusals",
        "_routes",
        "_specialiser",
    )

    def __init__(
        self,
        model: nn.Module,
        name: str,
        options: Mapping[str, Any],
        forward: Forward | None,
        fallbacks: FallbackCounter,
        specialiser: Callable[..., Optimised],
        *,
        dynamo: bool,
        lock: threading.RLock,
    ) -> None:
        self._model = model
        self._name = name
        self._options = options
        self._forward = forward
        self._fallbacks = fallbacks
        self._specialiser = specialiser
        self._dynamo_allowed = dynamo
        self._lock = lock
        self._code: Code | None = None  # what routes were found for
        self._routes: dict[object, Route] = {}
        self._idle: Counter[object] = Counter()
        self._gains: dict[object, float] = {}  # seconds of a call that Dynamo saves, by the kind of its tensors
        self._dynamo: Dynamo | None = None
        self._children: Children | None = None
        self._refusals: dict[str, RefusalReport] = {}

    @property
    def routes(self) -> list[Route]:
        """Every route that was taken, once."""
        return list(dict.fromkeys(self._routes.values()))

    @property
    def refusals(self) -> Mapping[str, RefusalReport]:
        """Why ways of capturing failed, by what was said of it."""
        return self._refusals

    @property
    def code(self) -> Code | None:
        """What a call ran when routes were found; None where it does not count."""
        return self._code

    def is_idle(self, key: object, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether Dynamo found nothing worth its guards in calls with such tensors."""
        return self._idle[_kind(key, tensors)] >= IDLE_CALLS

    @property
    def _original(self) -> Forward:
        return self._forward or self._model.forward

    @property
    def _run_original(self) -> Forward:
        """Runs forward as it is by then."""
        model, forward = self._model, self._forward
        return forward or (lambda *args, **kwargs: model.forward(*args, **kwargs))

    def get(self, key: object) -> Route | None:
        """The route of calls of that kind, if they take one; where a call would run other Python by now, all are found anew."""
        if self._code is not None and not self._code.unchanged():
            self._routes.clear()
            self._idle.clear()
            self._gains.clear()
            self._code = self._dynamo = self._children = None
        return self._routes.get(key)

    def settled(self, key: object, tensors: Sequence[torch.Tensor]) -> Dynamo | None:
        """Dynamo, where it is worth its guards in calls with such tensors, and these run what they ran; it compares all else."""
        route, code = self._routes.get(key), self._code
        if isinstance(route, Dynamo) and self._pays(_kind(key, tensors)) and (code is None or code.unchanged()):
            return route
        return None

    def _pays(self, kind: object) -> bool:
        return self._gains.get(kind, 0.0 if len(self._gains) < MOST_IDLE else inf) > 0.0

    def conclude(self, key: object, failure: CaptureFailure, config: Config) -> Route | None:
        """What serves calls of that kind from now on; None where tracing is to be tried again."""
        self.refuse("trace", failure.reason)
        if self._code is None and not failure.final:
            self._code = Code(self._model, self._forward, dynamo=True)
        if not failure.final:
            self._routes[key] = self._found(failure, config)
        elif failure.lasting:
            self._routes[key] = Untouched(self._run_original, self._name, failure.reason, self._fallbacks)
        return self._routes.get(key)

    def give_up(self, key: object, failure: CaptureFailure) -> None:
        """As `conclude`, for a call that was captured beside others."""
        with override(**self._options) as config:
            self.conclude(key, failure, config)

    def run(
        self, key: object, route: Route, tensors: Sequence[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The model's result; where Dynamo found nothing, later calls take another route, or, with nothing to fuse, none."""
        if not isinstance(route, Dynamo):
            return route(args, kwargs)
        kind = _kind(key, tensors)
        if self._idle[kind] >= IDLE_CALLS:
            return self._original(*args, **kwargs)
        known = len(route.saved)
        result = route(args, kwargs)
        if any(not job.over for job in route.jobs()):  # it is not known yet what there is to fuse
            return result
        with self._lock:
            if not route.saved:
                self.refuse("Dynamo", "finds no graph in forward")
                self._routes[key] = self._by_children("neither traced nor compiled by Dynamo")
            elif kind in self._gains or len(self._gains) < MOST_IDLE:
                if kind not in self._gains:
                    guards = _GUARDS if all(tensor.is_cpu for tensor in tensors) else 0.0
                    earlier = known if known == len(route.saved) else 0  # which serve these tensors, too
                    self._gains[kind] = sum(route.saved[:earlier]) - guards
                self._gains[kind] += sum(route.saved[known:])
                self._idle[kind] += not self._pays(kind)
                if self._idle[kind] == IDLE_CALLS and any(route.saved):
                    self.refuse("Dynamo", "its graphs save less than its guards take")
        return result

    def refuse(self, step: str, reason: str) -> None:
        """Keep for the report why a way of capturing failed; said once."""
        text = f"{step}: {reason}"
        if text in self._refusals:
            return
        self._refusals[text] = RefusalReport(self._name, step, reason)
        warn(f"{self._name} is not captured whole ({text})")

    def _found(self, failure: CaptureFailure, config: Config) -> Route:
        if failure.only_children or not self._dynamo_allowed or (self._code and self._code.calls_patched):
            return self._by_children(failure.reason)
        if self._dynamo is None:
            limit = config.max_signatures
            self._dynamo = Dynamo(self._original, self._name, self._options, self._fallbacks, limit=limit)
        return self._dynamo

    def _by_children(self, reason: str) -> Route:
        if self._children is None:
            self._children = Children(self._model, self._original, self._of_child)
        if self._children.empty:
            return Untouched(self._run_original, self._name, reason, self._fallbacks)
        return self._children

    def _of_child(self, path: str, child: nn.Module) -> Optimised:
        name = f"{self._name}.{path}"
        return self._specialiser(child, self._options, name=name, forward=child.forward, dynamo=False)


def _kind(key: object, tensors: Sequence[torch.Tensor]) -> object:
    return key, tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in tensors)
