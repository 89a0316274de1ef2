"""What serves calls that need gradients: graphs that Dynamo finds, forward and backward compiled by this package's backend."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping
from operator import call
from typing import Any

import torch
from torch import nn

from fusepass.background import Job
from fusepass.capture.trace import capturing
from fusepass.dispatch.capture_fallback import MOST_RECOMPILATIONS, Children, Optimised
from fusepass.dispatch.signature import SETTINGS, default_devices
from fusepass.dispatch.through_dynamo import Forward
from fusepass.dispatch.training_graphs import Graphs
from fusepass.guards.edits import Code
from fusepass.guards.tensors import LiveTensors
from fusepass.report.records import CaptureRoute, RefusalReport
from fusepass.report.report import Report
from fusepass.runtime.fallbacks import FallbackCounter
from fusepass.runtime.modes import obstacle

_MOST_SETTINGS = 8  # of attention and cuDNN, each with graphs of its own
_UNTRACEABLE = (nn.RNNBase,)
"""Modules whose forward Dynamo does not trace and that are a library's call."""

_PLAIN = frozenset({torch.Tensor, nn.Parameter, int, float, bool, str, type(None), torch.dtype, torch.device})

_read_function_modes: Callable[[], int] = torch._C._len_torch_function_stack


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
        self._made: dict[object, Graphs] = {}
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
        if isinstance(self._model, torch.jit.ScriptModule):
            return "needs gradients, and is TorchScript, which has no Python to trace"
        for module in self._model.modules():
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
    def jobs(self) -> list[Job]:
        """What is compiled beside the calls now."""
        return [job for made in tuple(self._made.values()) for job in made.jobs]

    @property
    def refusals(self) -> list[RefusalReport]:
        """Why graphs are not compiled."""
        return [refusal for made in tuple(self._made.values()) for refusal in made.refusals]

    @property
    def cuda_graphs(self) -> list[str]:
        """What became of the option of that name."""
        return [text for made in tuple(self._made.values()) for text in made.cuda_graphs]

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

    def _new(self, key: object) -> Graphs | None:
        """Graphs for settings that were not seen before; None where there are too many."""
        with self._lock:
            if key not in self._made and len(self._made) < _MOST_SETTINGS:
                self._made[key] = Graphs(
                    self._original, self._name, self._options, self._fallbacks, self._limit, self._children
                )
            return self._made.get(key)

    def _children(self) -> Children:
        """The children, each trained by graphs of its own."""

        def optimise(path: str, child: nn.Module) -> Optimised:
            return self._specialiser(child, self._options, name=f"{self._name}.{path}", forward=child.forward)

        return Children(self._model, self._original, optimise, left=_UNTRACEABLE)
