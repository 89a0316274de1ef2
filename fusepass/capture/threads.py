"""PyTorch's tracing, such that other threads do not notice it; and functions of PyTorch that are others for one thread alone.

``make_fx`` changes `nn.Module` for the whole process while it runs, and says that the process traces: whoever calls a function that
`torch.compile` made then gets an error, in any thread (until PyTorch 2.15). None of that is needed where nothing is symbolic.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import fx, nn
from torch._ops import OpOverload

from fusepass.codegen.lowering.modes import exports
from fusepass.codegen.lowering.tracer import Tracer

_lock = threading.Lock()
_here = threading.local()


@contextmanager
def replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """`function` in the place of the one called `name` in `owner`, a module or class, for this thread.

    Other threads call what was there. What asks which it is stays in place: putting it back could undo what somebody else has
    put there meanwhile.
    """
    with _lock:
        found = getattr(owner, name)
        key = getattr(found, "fusepass_key", None)
        if key is None:
            key = owner, name
            setattr(owner, name, _by_thread(key, found))
    chosen: dict[Any, list[Callable[..., Any]]] = vars(_here).setdefault("chosen", {})
    chosen.setdefault(key, []).append(function)
    try:
        yield
    finally:
        chosen[key].pop()


def unreplaced(owner: Any, name: str) -> Callable[..., Any]:
    """The function called `name` in `owner` that threads call which have not `replaced` it."""
    found: Callable[..., Any] = getattr(owner, name)
    return getattr(found, "__wrapped__", found) if hasattr(found, "fusepass_key") else found


def _by_thread(key: tuple[Any, str], original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        chosen = vars(_here).get("chosen", {}).get(key)
        return (chosen[-1] if chosen else original)(*args, **kwargs)

    call.fusepass_key = key  # type: ignore[attr-defined]
    return call


@contextmanager
def tracing_apart() -> Iterator[None]:
    """While open, ``make_fx`` of this thread changes nothing that others see, and nobody else traces.

    It keeps what it does in global variables, so Dynamo's lock, under which PyTorch traces what it compiles, is taken.
    """
    from torch._dynamo.convert_frame import compile_lock  # Dynamo takes seconds to import
    from torch.fx.experimental.proxy_tensor import PythonKeyTracer

    with compile_lock, replaced(PythonKeyTracer, "trace", _trace), modes_apart():
        yield


@contextmanager
def modes_apart() -> Iterator[None]:
    """While open, PyTorch sees no modes of an export in another thread, and takes none away.

    `torch.export` keeps its modes in one stack for all threads. This thread has one of its own, unless it is the one that exports.
    """
    if exports():
        yield
        return
    stack = torch._ops._ModeStackStateForPreDispatch()
    with replaced(torch._ops, "mode_stack_state_for_pre_dispatch", lambda: stack):
        yield


def _trace(tracer: fx.Tracer, root: Any, concrete_args: Any = None) -> fx.Graph:
    """As `fx.Tracer.trace`, which replaces calls of modules so that a tracer is told of them: ``make_fx`` does nothing with that."""
    if isinstance(root, nn.Module):
        return fx.Tracer.trace(tracer, root, concrete_args)
    tracer.root = nn.Module()
    tracer.graph = fx.Graph(tracer_cls=type(tracer))
    tracer.tensor_attrs = {}
    function, arguments = tracer.create_args_for_root(root, False, concrete_args)
    tracer.create_node("output", "output", (tracer.create_arg(function(*arguments)),), {})
    tracer.submodule_paths = None
    return tracer.graph


def made_concrete(
    graph: fx.GraphModule,
    flat: Callable[..., Sequence[torch.Tensor]],
    fakes: Sequence[torch.Tensor],
    decompositions: dict[OpOverload, Callable[..., Any]],
) -> fx.GraphModule:
    """The operators that `flat`, which calls `graph`, runs on `fakes`, under their mode, taken apart by `decompositions`."""
    if any(isinstance(node.target, torch._ops.HigherOrderOperator) for node in graph.graph.nodes):
        from torch.fx.experimental.proxy_tensor import make_fx  # what holds graphs itself is known to it alone

        with tracing_apart():
            made: fx.GraphModule = make_fx(flat, decompositions)(*fakes)
        return made
    tracer = Tracer(decompose=lambda func: decompositions.get(func) or _composite(func))
    for number, fake in enumerate(fakes):
        tracer.placeholder(f"arg{number}", fake)
    with tracer:
        results = flat(*fakes)
    tracer.graph.output(tuple(map(tracer.node_of, results)))
    return tracer.module()


def _composite(func: OpOverload) -> Callable[..., Any] | None:
    """What `func` is made of, if it has no kernels of its own."""
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    if func.namespace == "prim":  # what asks for the device of a fake tensor
        return None
    return func.decompose if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), composite) else None
