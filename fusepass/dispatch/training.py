"""What serves calls that need gradients: graphs that Dynamo finds, forward and backward compiled by this package's backend."""

from __future__ import annotations

import itertools
import threading
import types
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import call
from typing import Any

import torch
from torch import nn

from fusepass.capture.trace import capturing
from fusepass.config import override
from fusepass.dispatch.capture_fallback import IDLE_CALLS, MOST_IDLE, MOST_RECOMPILATIONS, Children, Forward, Optimised
from fusepass.dispatch.signature import SETTINGS, default_devices
from fusepass.guards.edits import Code
from fusepass.guards.tensors import LiveTensors
from fusepass.report.records import CaptureRoute, RefusalReport, RegionState
from fusepass.report.report import Report
from fusepass.runtime.fallbacks import FallbackCounter
from fusepass.runtime.modes import obstacle
from fusepass.structure import Template

_MOST_SETTINGS = 8  # of attention and cuDNN, each with graphs of its own
_NOT_TRACED = "Dynamo finds no graph in forward"
_UNTRACEABLE = (nn.RNNBase,)
"""Modules whose forward Dynamo does not trace and that are a library's call."""

_PLAIN = frozenset({torch.Tensor, nn.Parameter, int, float, bool, str, type(None), torch.dtype, torch.device})

_numbers = itertools.count()
_read_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
_is_tracing: Callable[[], bool] = torch.fx._symbolic_trace.is_fx_symbolic_tracing


class Training:
    """Runs a model where gradients are recorded. Any call is right: Dynamo compares what its graphs depend on.

    Python that it does not look at again, and settings that it does not know, are compared here: as for calls without gradients.

    Args:
        model, name, options: as the specialiser has them.
        forward: what to run in place of the model's own.
        fallbacks: counts what runs as the original operators.
        specialiser: makes the specialiser of a child; no specialiser's own method, as that would be a circle of references.
        limit: graphs of one frame.
    """

    __slots__ = (
        "_code",
        "_fallbacks",
        "_forward",
        "_limit",
        "_lock",
        "_made",
        "_model",
        "_name",
        "_options",
        "_settings",
        "_specialiser",
        "_witness",
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
        limit: int,
    ) -> None:
        self._model = model
        self._name = name
        self._options = options
        self._forward = forward
        self._fallbacks = fallbacks
        self._specialiser = specialiser
        self._limit = min(limit, MOST_RECOMPILATIONS)
        self._lock = threading.RLock()
        self._code: Code | None = None  # what the graphs were made for
        self._made: dict[object, _Graphs] = {}
        self._settings = SETTINGS["cpu"]
        self._witness: torch.Tensor | None = None  # a parameter that needed a gradient at the last look

    def is_for(self, values: tuple[Any, ...]) -> bool:
        """Whether a call with these arguments surely needs gradients and nothing stands against it; False where it takes a longer look to tell."""
        witness = self._witness
        if witness is None or not (torch.is_grad_enabled() and witness.requires_grad and not capturing()):
            return False
        if not _PLAIN.issuperset(map(type, values)):
            return False
        return obstacle([value for value in values if isinstance(value, torch.Tensor)]) is None

    def obstacle(self) -> str | None:
        """Why the model is not compiled for gradients; None where it may be."""
        for module in self._model.modules():
            if isinstance(module, torch.jit.ScriptModule):
                return "needs gradients, and a part of it is TorchScript"
            if getattr(module, "_is_fsdp_managed_module", False):
                return "needs gradients, and its parameters are sharded (FSDP)"
        for tensor in itertools.chain(self._model.parameters(), self._model.buffers()):
            if type(tensor) not in (torch.Tensor, nn.Parameter):
                return f"needs gradients, and a tensor of it is a {type(tensor).__name__}"
            if tensor.device.type not in ("cpu", "cuda"):
                return f"needs gradients, and device {tensor.device.type} is not supported"
        return None

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's result, with gradients recorded."""
        code = self._code
        if code is None or not code.unchanged() or "_is_fsdp_managed_module" in vars(self._model):
            reason = self._renew()
            if reason is not None:
                self._fallbacks.count(self._name, reason)
                return self._original(*args, **kwargs)
        key: object = tuple(map(call, self._settings))
        if _read_function_modes():
            key = key, default_devices()
        made = self._made.get(key) or self._new(key)
        if made is not None:
            return made(args, kwargs)
        self._fallbacks.count(self._name, f"needs gradients, under more than {_MOST_SETTINGS} settings of PyTorch")
        return self._original(*args, **kwargs)

    @property
    def route(self) -> CaptureRoute | None:
        """The least complete way that serves; None where nothing does so far."""
        routes = [made.route for made in tuple(self._made.values())]
        return max((route for route in routes if route is not None), key=list(CaptureRoute).index, default=None)

    @property
    def reports(self) -> list[Report]:
        """What was fused so far."""
        return [report for made in tuple(self._made.values()) for report in made.reports]

    @property
    def refusals(self) -> list[RefusalReport]:
        """Why graphs are not compiled."""
        return [refusal for made in tuple(self._made.values()) for refusal in made.refusals]

    @property
    def _original(self) -> Forward:
        return self._forward or self._model.forward

    def _renew(self) -> str | None:
        """Look at the model again, after other Python or other tensors may have come; gives what stands against it."""
        with self._lock:
            reason = self.obstacle()
            if reason is None and (self._code is None or not self._code.unchanged()):
                self._made.clear()
                self._code = Code(self._model, self._forward, dynamo=True)
            code = self._code
            if reason is None and code is not None and code.calls_patched:
                self._code, reason = None, "needs gradients, and functions of PyTorch are replaced"
            tensors = LiveTensors(self._model).tensors
            # Without tensors of its own a model is wherever its inputs are.
            self._settings = SETTINGS["cpu" if tensors and all(tensor.is_cpu for tensor in tensors) else "cuda"]
            needing = (tensor for tensor in tensors if tensor.requires_grad)
            self._witness = next(needing, None) if reason is None else None
        return reason

    def _new(self, key: object) -> _Graphs | None:
        """Graphs for settings that were not seen before; None where there are too many."""
        with self._lock:
            if key not in self._made and len(self._made) < _MOST_SETTINGS:
                self._made[key] = _Graphs(
                    self._original, self._name, self._options, self._fallbacks, self._limit, self._children
                )
            return self._made.get(key)

    def _children(self) -> Children:
        """The children, each trained by graphs of its own."""

        def optimise(path: str, child: nn.Module) -> Optimised:
            return self._specialiser(child, self._options, name=f"{self._name}.{path}", forward=child.forward)

        return Children(self._model, self._original, optimise, left=_UNTRACEABLE)


class _Graphs:
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
        self._limit = limit
        self._make_children = children
        self._children: Children | None = None
        self._fused = False
        self._idle: Counter[object] = Counter()
        self._here = threading.local()
        import torch._dynamo  # takes seconds

        from fusepass.training.backend import Backend

        self._backend = Backend(
            name,
            options,
            fallbacks=fallbacks,
            observe=_weakly(self._observe),
            observe_backward=_weakly(self._observe_backward),
        )
        self._options = options
        context: Any = torch._dynamo.optimize(_weakly(self._compile))
        if hasattr(context, "callback"):  # not where Dynamo is switched off
            context.callback = _Configured(context.callback, limit)
        self._compiled = context(_apart(forward))

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
        if _is_tracing():  # says so of the process: it may be another thread's
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
            self._fallbacks.count(self._name, f"needs gradients, and Dynamo made {self._limit} graphs already")
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
    def refusals(self) -> list[RefusalReport]:
        """Graphs that could not be compiled."""
        return list(self._refusals)

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
        from torch._dynamo.exc import TorchDynamoException
        from torch.utils._python_dispatch import is_traceable_wrapper_subclass

        from fusepass.training.again import Differentiable

        other = next((each for each in example_inputs if is_traceable_wrapper_subclass(each)), None)
        compiled: Forward | None = None
        if other is not None:
            reason = f"needs gradients, and a tensor is a {type(other).__name__}"
        else:
            try:
                compiled = self._backend(graph, example_inputs)
            except TorchDynamoException:  # to Dynamo, which traces again or leaves the frame as it is
                raise
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


class _Configured:
    """What Dynamo calls where no graph fits, with the settings of PyTorch that this needs; setting them at each call would take longer."""

    def __init__(self, callback: Any, limit: int) -> None:
        self._torchdynamo_orig_backend = callback  # by which Dynamo finds the backend
        self._asked = {"suppress_errors": True, "recompile_limit": limit, "use_numpy_random_stream": True}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch._dynamo.config.patch(self._asked):
            return self._torchdynamo_orig_backend(*args, **kwargs)


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A bound method that does not keep its object: PyTorch holds on to what it was given to compile with."""
    found = weakref.WeakMethod(method)

    def run(*args: Any) -> Any:
        alive = found()
        return None if alive is None else alive(*args)

    return run


def _apart(forward: Forward) -> Forward:
    """What calls `forward` and has code of its own: Dynamo keeps graphs, counts them and remembers sizes by code, which instances share."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    code = run.__code__.replace(co_name=f"forward_{next(_numbers)}")
    return types.FunctionType(code, run.__globals__, code.co_name, None, run.__closure__)
