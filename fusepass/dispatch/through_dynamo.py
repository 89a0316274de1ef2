"""A forward through Dynamo, under the settings of PyTorch that this package needs: what cannot be traced costs as little else as it can."""

from __future__ import annotations

import importlib
import itertools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fusepass.capture.known_shapes import known_shapes
from fusepass.capture.threads import modes_apart
from fusepass.garbage import collector_paused

Forward = Callable[..., Any]

_numbers = itertools.count()
_RECURRENT = (nn.RNN, nn.GRU, nn.LSTM)
_RECURRENT_CODE = frozenset(kind.forward.__code__ for kind in _RECURRENT)
_FAILED = "error was suppressed"
"""In what Dynamo says of a frame in which tracing failed."""
_DISABLED = "_torchdynamo_disable"
"""An attribute of functions that Dynamo calls but does not look into."""


def through_dynamo(forward: Forward, backend: Forward, limit: int) -> Forward:
    """`forward` with graphs by `backend`, graph breaks allowed, at most `limit` graphs for each frame.

    A frame that cannot be traced for one call keeps the graphs that it has for others. What Dynamo made of a call in which `forward` raises, as for
    an argument of a wrong shape, is forgotten. Recurrent layers of the library are called between graphs.
    """
    import torch._dynamo  # takes seconds

    context: Any = torch._dynamo.optimize(backend)
    if not hasattr(context, "callback"):  # Dynamo is switched off
        return context(_apart(forward))  # type: ignore[no-any-return]
    outermost: Any = _apart(forward)
    configured = context.callback = _Configured(context.callback, limit, outermost.__code__)
    compiled = context(outermost)

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            result = compiled(*args, **kwargs)
        except Exception:
            configured.forget()
            raise
        if configured.traced:
            configured.keep()
        return result

    return call


class _Configured:
    """What Dynamo calls where no graph fits, with the settings of PyTorch that this needs; setting them at each call would take longer.

    Args:
        callback: Dynamo's own.
        limit: graphs of a frame.
        outermost: the code of the frame that calls forward and does nothing else.

    Attributes:
        traced: what came of it in a call that is under way.
    """

    def __init__(self, callback: Any, limit: int, outermost: types.CodeType) -> None:
        self._torchdynamo_orig_backend = callback  # by which Dynamo finds the backend
        self._asked = {
            "suppress_errors": True,
            "recompile_limit": limit,
            "use_numpy_random_stream": True,
        }
        if hasattr(torch._dynamo.config, "allow_rnn"):  # not in PyTorch 2.15
            # Else Dynamo stops where it reads the attribute, from where it cannot go on, and the rest of the frame has no graph.
            self._asked["allow_rnn"] = True
        self._outermost = outermost
        self.traced: list[_Traced] = []

    def __call__(self, frame: Any, cache_entry: Any, *args: Any, **kwargs: Any) -> Any:
        from torch._dynamo.types import ConvertFrameReturn

        if frame.f_code in _RECURRENT_CODE:
            return ConvertFrameReturn(frame_exec_strategy=_strategy("SKIP", "SKIP"), apply_to_code=False)
        with (
            collector_paused(),
            known_shapes(),
            _recurrent_layers_whole(),
            modes_apart(),
            torch._dynamo.config.patch(self._asked),
        ):
            made = self._torchdynamo_orig_backend(frame, cache_entry, *args, **kwargs)
        if made.guarded_code is not None:
            self.traced.append(_Traced(frame.f_code, cache_entry is not None, made.guarded_code.guard_manager))
        elif _FAILED in (getattr(made, "skip_reason", None) or _FAILED):  # PyTorch 2.11 gives no reason
            self.traced.append(_Traced(frame.f_code, cache_entry is not None, None))
            if cache_entry is not None and made.frame_exec_strategy.cur_action == _strategy("SKIP").cur_action:
                made = replace(made, frame_exec_strategy=_strategy("RUN_ONLY"))
        return made

    def keep(self) -> None:
        """A call has ended. Where nothing of forward could be traced, the outermost frame keeps its graphs for other calls, and makes no more."""
        first, *others = self.traced
        if first.code is self._outermost and first.before and others and all(each.guards is None for each in others):
            first.forget(graphs_alone=True)
        self.traced.clear()

    def forget(self) -> None:
        """Have Dynamo trace once more, at the next call, what it traced in this one: graphs that end before what raised may serve any call."""
        while self.traced:
            self.traced.pop().forget()


@dataclass(frozen=True)
class _Traced:
    """A frame that Dynamo traced: its code, whether that had graphs before, and the guards of the new ones; None where tracing failed."""

    code: types.CodeType
    before: bool
    guards: Any

    def forget(self, *, graphs_alone: bool = False) -> None:
        """Undo it; with `graphs_alone`, Dynamo makes no further graphs of the code."""
        from torch._C._dynamo.eval_frame import set_code_exec_strategy
        from torch._dynamo.guards import DeletedGuardManagerWrapper

        if self.guards is not None and self.guards.extra_state is not None:
            self.guards.extra_state.invalidate(self.guards.cache_entry, DeletedGuardManagerWrapper("of no use"))
        set_code_exec_strategy(self.code, _strategy("RUN_ONLY" if graphs_alone else "DEFAULT"))


def _strategy(frame: str, callees: str = "DEFAULT") -> Any:
    """What Dynamo does with a frame, and with those that it calls: trace (``DEFAULT``), leave alone, or run the graphs that are there."""
    dynamo: Any = importlib.import_module("torch._dynamo.types")
    return dynamo.FrameExecStrategy(getattr(dynamo.FrameAction, frame), getattr(dynamo.FrameAction, callees))


@contextmanager
def _recurrent_layers_whole() -> Iterator[None]:
    """While open, Dynamo ends a graph at the call of a recurrent layer: taken apart it is some ten operators for each step."""
    from torch._dynamo.convert_frame import compile_lock

    with compile_lock:  # under which alone the attribute means anything
        functions = [kind.forward for kind in _RECURRENT if not hasattr(kind.forward, _DISABLED)]
        for function in functions:
            setattr(function, _DISABLED, True)
        try:
            yield
        finally:
            for function in functions:
                delattr(function, _DISABLED)


def _apart(forward: Forward) -> Forward:
    """What calls `forward` and has code of its own: Dynamo keeps graphs, counts them and remembers sizes by code, which instances share."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    code = run.__code__.replace(co_name=f"forward_{next(_numbers)}")
    return types.FunctionType(code, run.__globals__, code.co_name, None, run.__closure__)
