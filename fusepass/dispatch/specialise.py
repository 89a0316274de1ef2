"""Finds, for each call of a model, the compiled graph that serves it, or makes one, or runs the original."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fusepass.background import Job
from fusepass.capture.trace import CaptureFailure, capturing
from fusepass.config import Config, override
from fusepass.dispatch.beside import Beside, kind_of, numpy_state
from fusepass.dispatch.capture_fallback import IDLE_CALLS, Route, Untouched
from fusepass.dispatch.capture_fallbacks import CaptureFallbacks
from fusepass.dispatch.making import Begun, Maker
from fusepass.dispatch.originals import NEEDS_GRADIENTS, Originals
from fusepass.dispatch.signatures import Table
from fusepass.dispatch.specialisation import Specialisation
from fusepass.dispatch.training import Training
from fusepass.report.report import CaptureRoute, Report
from fusepass.runtime.fallbacks import FallbackCounter
from fusepass.runtime.fast_path import MISSED
from fusepass.runtime.modes import obstacle, unusual_type
from fusepass.structure import Template

if TYPE_CHECKING:
    from fusepass.profiling.profile import Profile
_UNTRACED = "every call so far ran as the original operators"
_ROUTE_WORDS = {CaptureRoute.DYNAMO: "captured by Dynamo", CaptureRoute.UNTOUCHED: "not captured"}
_Found = tuple[Specialisation, tuple[torch.Tensor, ...]]


class Specialiser:
    """Runs a model by specialisations of it. Threads may share one; they specialise one after another.

    Args:
        model: the model, which stays as it is.
        options: options of `fusepass.config.Config`, by name.
        name: what reports and warnings call the model; its class by default.
        forward: what to run where nothing is specialised; ``model.forward`` by default.
        dynamo: whether Dynamo may serve what cannot be traced.

    Attributes:
        table: the specialisations.
        training: what serves calls that need gradients; None before the first.
    """

    # Slots, so that `fusepass.guards.pystate` does not take what happens here for the state of a model around it.
    __slots__ = (
        "_beside",
        "_capture_fallbacks",
        "_fallbacks",
        "_forward",
        "_left",
        "_lock",
        "_maker",
        "_model",
        "_name",
        "_options",
        "_originals",
        "_trains",
        "_waiting",
        "table",
        "training",
    )

    def __init__(
        self,
        model: nn.Module,
        options: Mapping[str, Any],
        *,
        name: str | None = None,
        forward: Callable[..., Any] | None = None,
        dynamo: bool = True,
    ) -> None:
        self._model = model
        self._options = dict(options)
        self._name = name or type(model).__name__
        self._forward = forward
        self._lock = threading.RLock()
        self.table = Table()
        self._fallbacks = FallbackCounter()
        self._maker = Maker(model, self._options, self._name, forward, self._fallbacks, self.table)
        alone = forward is None  # else nobody asks the table's door
        self._originals = Originals(model, self.table, self._fallbacks, self._name, self._lock) if alone else None
        self._trains = dynamo  # a child of a model that is captured child by child does not: the model does
        self.training: Training | None = None
        self._left: tuple[object, Untouched] | None = None  # what serves calls like the last one that was left as it is
        self._waiting: tuple[object, Job] | None = None  # the last job, and the calls that it is for
        self._capture_fallbacks = CaptureFallbacks(
            model,
            self._name,
            self._options,
            forward,
            self._fallbacks,
            Specialiser,
            dynamo=dynamo,
            lock=self._lock,
        )
        self._beside = Beside(self._maker, self._lock, self._capture_fallbacks.give_up)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's result for ``forward(*args, **kwargs)``."""
        training = self.training
        if training is not None and training.is_for((*args, *kwargs.values())):
            return training(args, kwargs)
        if self._forward is not None:  # a child, for which nobody asks the table's door
            for made in self.table.recent:
                result = MISSED if made.quick is None else made.quick(*args, **kwargs)
                if result is not MISSED:
                    return result
        if not kwargs:
            for made in self.table.recent:
                if made.pays:
                    result = made.serve(args)
                    if result is not MISSED:
                        self.table.served(made)
                        return result
                elif made.fitting(args) is not None:
                    self.table.served(made)
                    return self._run_checked(made, (), args, kwargs)
            waiting = self._waiting
            if waiting is not None and waiting[0] == _shapes(args):
                if not waiting[1].over:
                    return self.original(*args)
                self._waiting = None
            left = self._left
            if left is not None and left[0] == self._kind(args):
                return left[1](args, kwargs)
        return self._look_up(args, kwargs)

    def _kind(self, args: tuple[Any, ...]) -> object | None:
        """What decides about the route of a call with tensors alone that records no gradients; None for other calls."""
        if torch.is_grad_enabled() or any(type(arg) is not torch.Tensor for arg in args):
            return None
        return self._training, *(arg.dim() for arg in args)

    @property
    def _training(self) -> bool | None:
        """The model's mode; None of what has none, such as frozen TorchScript."""
        return getattr(self._model, "training", None)

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The same inside of torch.compile or torch.export; specialises nothing. An exported program has the original's operators,
        whatever was called before: others load it who do not have fused ones.
        """
        if torch.compiler.is_exporting():
            return self.original(*args, **kwargs)
        for made in self._maker.traceable:
            if made.inline is not None and made.inline.matches(args, kwargs):
                return made.inline(args, kwargs)
        return self.original(*args, **kwargs)

    @property
    def original(self) -> Callable[..., Any]:
        """The model's own forward."""
        return self._forward or self._model.forward

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Specialisation | CaptureFailure:
        """Specialise for a call without making it; where the call would need gradients, for one without."""
        tensors, inputs = Template.of_call(args, kwargs)
        reason = obstacle(tensors)
        if reason is not None:
            return CaptureFailure(reason, final=True)
        self.wait()
        with self._lock, torch.set_grad_enabled(torch.is_grad_enabled() and not self._needs_gradients(tensors)):
            found = self._find(tensors, inputs)
            return found[0] if found else self._maker.make(args, kwargs, tensors)

    def profile(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Profile | CaptureFailure:
        """Times of the steps of a call, which is not made; where it would need gradients, of one without."""
        made = self.prepare(args, kwargs)
        if isinstance(made, CaptureFailure):
            return made
        from fusepass.profiling.profiler import profile  # seldom wanted

        tensors, _ = Template.of_call(args, kwargs)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self._needs_gradients(tensors)):
            bound = made.signature.bind(tensors)
        assert bound is not None  # it was made for these
        return profile(made.compiled, bound, made.written)

    @property
    def jobs(self) -> list[Job]:
        """What is compiled beside the calls, of the children, too: what is under way, and what failed."""
        inner = [job for route in self._capture_fallbacks.routes for job in route.jobs()]
        every = [*self._beside.jobs, *inner, *(self.training.jobs if self.training is not None else ())]
        return [job for job in every if job.error or not job.over]

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is compiled beside the calls, at most `timeout` seconds; says whether that is so."""
        until = None if timeout is None else time.monotonic() + timeout
        return all(job.wait(None if until is None else max(0.0, until - time.monotonic())) for job in self.jobs)

    def report(self) -> Report:
        """What was fused so far, and what was not."""
        routes, refusals = self._capture_fallbacks.routes, self._capture_fallbacks.refusals
        reports = [made.report for made in self.table]
        kinds = [route.kind for route in routes] + [CaptureRoute.TRACED] * bool(reports)
        trained = self.training.reports if self.training is not None else []
        if not kinds and self.training is not None and self.training.route is not None:
            kinds = [self.training.route]
        reports += [report for route in routes for report in route.reports()] + trained
        own = Report(
            model=self._name,
            device=reports[0].device if reports else _device(self._model),
            capture=max(kinds, key=list(CaptureRoute).index, default=CaptureRoute.UNTOUCHED),
            refusals=(*refusals.values(), *(self.training.refusals if self.training is not None else ())),
            fallbacks=self._fallbacks.records(),
            reason="; ".join(refusals)
            or (None if kinds else _UNTRACED if self._fallbacks.records() or self.jobs else "not called yet"),
            cuda_graphs=(
                *self._without_graphs(routes),
                *(self.training.cuda_graphs if self.training is not None else ()),
            ),
            background=tuple(map(str, self.jobs)),
        )
        return replace(Report.merge([own, *reports]), model=self._name, capture=own.capture, reason=own.reason)

    def _without_graphs(self, routes: Sequence[Route]) -> tuple[str, ...]:
        """Why CUDA graphs that were asked for do not serve calls that take a route; children tell for themselves."""
        with override(**self._options) as config:
            if config.cuda_graphs is not True:
                return ()
        kinds = {route.kind for route in routes} - {CaptureRoute.CHILDREN}
        return tuple(f"not used: {_ROUTE_WORDS[kind]}" for kind in sorted(kinds))

    def _look_up(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call in full: nested inputs, what stands against it, gradients, a new signature."""
        if capturing():
            return self.original(*args, **kwargs)  # a model around this one is traced, and takes it in
        tensors, inputs = Template.of_call(args, kwargs)
        reason = obstacle(tensors)
        if reason is None and not torch.is_grad_enabled() and not self.table.candidates(tensors):
            route = self._capture_fallbacks.settled(self._key(tensors, inputs), tensors)
            if route is not None:
                return route(args, kwargs)
        if reason is None and any(map(is_lazy, self._model.parameters())):
            reason = "has parameters that its first call is to initialise"
        if reason is None and self._needs_gradients(tensors):
            if self._trains:
                return self._train(args, kwargs)
            reason = self._left_to_original(NEEDS_GRADIENTS)
        if reason is not None:
            if self._originals is not None and unusual_type(tensors) is not None and obstacle(()) is None:
                self._originals.leave(tensors, inputs, None, reason, by_types=True)
            return self._run_original(args, kwargs, reason)
        found = self._find(tensors, inputs)
        if found is None:
            return self._run_new(args, kwargs, tensors, inputs)
        return self._run_checked(*found, args, kwargs)

    def _train(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that needs gradients."""
        if self.training is None:
            with override(**self._options) as config:
                if not config.fuses:
                    return self.original(*args, **kwargs)
                if config.training == "eager":
                    return self._run_original(args, kwargs, self._left_to_original(NEEDS_GRADIENTS))
                if config.compile == "background" and not self._beside.dynamo_is_there():
                    return self.original(*args, **kwargs)
            with self._lock:
                self.training = self.training or Training(
                    self._model,
                    self._name,
                    self._options,
                    self._forward,
                    self._fallbacks,
                    Specialiser,
                    limit=config.max_signatures,
                )
        return self.training(args, kwargs)

    def _left_to_original(self, reason: str) -> str:
        """`reason`; calls that record gradients need no Python from now on."""
        if self._originals is not None:
            self._originals.record()
        return reason

    def _run_checked(
        self, made: Specialisation, bound: Sequence[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not made.pays:
            made.idle += 1
            if made.idle == IDLE_CALLS and made.captured.conditions and not any(other.pays for other in self.table):
                made.ask_no_more()
            return self.original(*args, **kwargs)
        if made.writes and made.written_memory_is_shared(bound):
            return self._run_original(args, kwargs, "memory that forward writes is shared by two of its inputs")
        return made.run(bound)

    def _run_original(self, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str) -> Any:
        self._fallbacks.count(self._name, reason)
        return self.original(*args, **kwargs)

    def leave(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str) -> Any:
        """A call of the model itself, for a reason that counts as a fallback."""
        self._fallbacks.count(self._name, reason)
        return model(*args, **kwargs)

    def _needs_gradients(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether autograd would record the call."""
        if not torch.is_grad_enabled():
            return False
        return any(t.requires_grad for t in tensors) or any(p.requires_grad for p in self._model.parameters())

    def _find(self, tensors: Sequence[torch.Tensor], inputs: Template) -> _Found | None:
        for made in self.table.candidates(tensors):
            if made.captured.inputs.same_form(inputs):
                bound = made.bound(tensors)
                if bound is not None:
                    self.table.used(made, tensors)
                    return made, bound
        return None

    def _run_new(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor], inputs: Template
    ) -> Any:
        """A call of a signature that was not seen before, or that is not traced."""
        with override(**self._options) as config:
            if not config.fuses:
                return self.original(*args, **kwargs)
        key = self._key(tensors, inputs)
        kind = kind_of(key, tensors) if config.compile == "background" else None
        if kind is not None and self._is_for_beside(key, kind):
            return self._run_beside(key, kind, args, kwargs, tensors, inputs, config)
        with self._lock:
            route = self._capture_fallbacks.get(key)
            found = None if route else self._find(tensors, inputs)
            reason = None if route or found else self.table.obstacle(tensors, config.max_signatures)
            failure, beside = None, False
            if route is None and found is None and reason is None:
                begun = self._maker.begin(args, kwargs, tensors)
                beside = kind is not None and isinstance(begun, Begun)
                made = self._maker.finish(begun) if isinstance(begun, Begun) and not beside else begun
                if isinstance(made, Begun):
                    self._beside.compile(key, kind, made)
                elif isinstance(made, CaptureFailure):
                    if made.needs_gradients and self._trains:
                        return self._train(args, kwargs)
                    failure, reason = made, made.reason
                    route = None if failure.error else self._capture_fallbacks.conclude(key, failure, config)
                else:
                    bound = made.bound(tensors)
                    found = None if bound is None else (made, bound)
        if beside:
            return self.original(*args, **kwargs)
        if failure is not None and failure.error is not None:
            # The call itself may be at fault: then the original says so, and nothing follows for other calls.
            result = self._run_original(args, kwargs, failure.reason)
            with self._lock:
                self._capture_fallbacks.conclude(key, failure, config)
            return result
        if route is not None:
            if isinstance(route, Untouched) and not kwargs and next(iter(self.table), None) is None:
                kind = self._kind(args)
                self._left = self._left if kind is None else (kind, route)
            reason = route.reason if isinstance(route, Untouched) else None
            if self._originals is not None and (reason is not None or self._capture_fallbacks.is_idle(key, tensors)):
                self._originals.leave(tensors, inputs, self._capture_fallbacks.code, reason)
            return self._capture_fallbacks.run(key, route, tensors, args, kwargs)
        if found is not None:
            return self._run_checked(*found, args, kwargs)
        return self._run_original(args, kwargs, reason or "what was made for the call does not fit it")

    def _is_for_beside(self, key: object, kind: object) -> bool:
        """Whether such a call runs the original, as it is captured or compiled beside, or can be."""
        with self._lock:
            if self._beside.under_way(kind):
                return True
            return self._capture_fallbacks.get(key) is None and not self._beside.is_left(kind)

    def _run_beside(
        self,
        key: object,
        kind: object,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: Sequence[torch.Tensor],
        inputs: Template,
        config: Config,
    ) -> Any:
        """A call of a signature that was not seen before: the original's result, and behind it a job that specialises for later ones."""
        if self._beside.under_way(kind):
            return self.original(*args, **kwargs)
        before = numpy_state()
        result = self.original(*args, **kwargs)
        with self._lock:
            if self._beside.under_way(kind) or self._find(tensors, inputs) is not None:
                return result
            reason = self.table.obstacle(tensors, config.max_signatures)
            if reason is not None:
                self._fallbacks.count(self._name, reason)
            elif before and numpy_state() != before:
                self._beside.leave(kind, "forward draws from NumPy's generator")
            else:
                job = self._beside.capture(key, kind, args, kwargs, tensors)
                self._waiting = None if kwargs or job is None else (_shapes(args), job)
        return result

    def _key(self, tensors: Sequence[torch.Tensor], inputs: Template) -> object:
        """The kind of a call that cannot be traced: what may decide about its route."""
        return inputs.key, self._training, torch.is_grad_enabled(), tuple(tensor.dim() for tensor in tensors)

    def refuse(self, step: str, reason: str) -> None:
        """Keep for the report why a way of capturing failed; said once."""
        self._capture_fallbacks.refuse(step, reason)


def _shapes(args: tuple[Any, ...]) -> object:
    """What calls alike are told by at a glance; a call that is mistaken for another one waits for its job."""
    return torch.is_grad_enabled(), *(arg.shape if isinstance(arg, torch.Tensor) else type(arg) for arg in args)


def _device(model: nn.Module) -> str:
    return next((str(tensor.device) for tensors in (model.parameters(), model.buffers()) for tensor in tensors), "cpu")
