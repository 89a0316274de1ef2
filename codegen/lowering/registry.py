"""The vocabulary: which ATen and prims operators lowering expresses directly, and how; everything else is decomposed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._decomp import decomposition_table
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from fusepass.codegen.lowering.decompositions import CORRECTED
from fusepass.codegen.lowering.tensor import Context, Tensor
from fusepass.codegen.lowering.tracer import Tracer, meta_like, results_of

_WRITE = torch.ops.aten.copy_.default
"""What the decompositions of all operators in place end in."""

Result = Tensor | tuple[Tensor | None, ...]
Handler = Callable[..., Result]

_HANDLERS: dict[OpOverload, Handler] = {}
Jumps = Sequence[int] | Callable[[fx.Node], bool] | None
_JUMPS: dict[OpOverload, Jumps] = {}

ALL = None
"""In `lowers`: an operator jumps in all of its operands."""


def lowers(*targets: OpOverload, jumps_in: Jumps = ()) -> Callable[[Handler], Handler]:
    """Register the decorated ``handler(call, *args, **kwargs)`` for `targets`; tensor arguments arrive as `Tensor`.

    `jumps_in` has the numbers of the arguments in which a function that gives floating-point numbers has steps: where the last bit of an
    operand may change the result by much; or says of a call whether it has any.
    """

    def register(handler: Handler) -> Handler:
        for target in targets:
            _HANDLERS[target] = handler
            _JUMPS[target] = jumps_in
        return handler

    return register


def handler_of(target: object) -> Handler | None:
    """The handler of `target`, if it is in the vocabulary."""
    return _HANDLERS.get(target) if isinstance(target, OpOverload) else None


def jumps_in(call: fx.Node) -> Sequence[int] | None:
    """The numbers of the arguments in which `call`, of an operator of the vocabulary, has steps; `ALL` of them."""
    assert isinstance(call.target, OpOverload)
    found = _JUMPS[call.target]
    return (ALL if found(call) else ()) if callable(found) else found


def snapshot() -> dict[OpOverload, Handler]:
    """All handlers that there are now."""
    return dict(_HANDLERS)


def size() -> int:
    """How many operators have handlers: more than before where users have registered some."""
    return len(_HANDLERS)


def supports(target: object) -> bool:
    """Whether lowering expresses `target` without decomposing it."""
    return handler_of(target) is not None


def decomposition(target: OpOverload) -> Callable[..., Any] | None:
    """How an operator outside the vocabulary is computed from simpler ones, which PyTorch says except where it is wrong; None for some others."""
    if supports(target) or target.namespace == "prim":
        return None
    found: Callable[..., Any] = CORRECTED.get(target) or decomposition_table.get(target, target.decompose)
    return found


def has_own_decompositions() -> bool:
    """Whether somebody but PyTorch says how operators are computed from simpler ones."""
    return any(not found.__module__.startswith("torch.") for found in decomposition_table.values())


class _MetaTracer(Tracer):
    """Computes on the meta device whatever device is asked for: only layouts matter here.

    Some decompositions write to what they made themselves (PyTorch's RMSNorm adds epsilon in place). What is written is a
    new value of that tensor, unless another one shares its memory.
    """

    def run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is not _WRITE or not self._is_own(args[0]):
            return super().run(func, args, _on_meta(kwargs))
        written = func(*args, **kwargs)
        self.record(torch.ops.aten.copy.default, args, kwargs, written)
        return written

    def _is_own(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` was computed here and no other known one lies in its memory."""
        storage = tensor.untyped_storage()._cdata
        others = (other for other in self._nodes if other is not tensor)
        return self.node_of(tensor).op != "placeholder" and all(
            other.untyped_storage()._cdata != storage for other in others
        )


def _on_meta(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "device": torch.device("meta")} if kwargs.get("device") is not None else kwargs


def _decomposition_on_meta(target: OpOverload) -> Callable[..., Any] | None:
    """`decomposition`, which allocates nothing where it is told a device."""
    found = decomposition(target)
    return None if found is None else lambda *args, **kwargs: found(*args, **_on_meta(kwargs))


def decomposed(function: Callable[..., Any], inputs: Sequence[torch.Tensor], names: Sequence[str]) -> fx.GraphModule:
    """``function(*inputs)`` as a graph in terms of the vocabulary as far as possible; its output is nested as what the function returns.

    It is the same graph whoever asks: while AOTAutograd compiles, PyTorch takes some operators apart in Python, and else in C++.

    Args:
        function: calls ATen operators.
        inputs: real, fake or described; only their layout matters.
        names: of the graph's placeholders, one per input.
    """
    tracer = _MetaTracer(_decomposition_on_meta)
    arguments = [meta_like(tensor) for tensor in inputs]
    for name, argument in zip(names, arguments, strict=True):
        tracer.placeholder(name, argument)
    with torch._C._DisablePythonDispatcher(), torch.no_grad(), tracer:
        results = function(*arguments)
    tracer.graph.output(pytree.tree_map_only(torch.Tensor, tracer.node_of, results))
    tracer.graph.eliminate_dead_code()
    return tracer.module()


class Call:
    """What a handler is given besides its arguments: the context, and the node being lowered."""

    def __init__(self, context: Context, node: torch.fx.Node) -> None:
        self.context = context
        self.node = node

    @property
    def origin(self) -> str:
        """The operator's short name, for kernel comments and buffer names."""
        target = self.node.target
        return target._schema.name.split("::")[-1] if isinstance(target, OpOverload) else str(target)

    @property
    def value(self) -> torch.Tensor:
        """The fake tensor of the result, or of the first of several that there is."""
        return results_of(self.node)[0]

    def uses(self, result: int) -> bool:
        """Whether anybody reads this one of several results."""
        return any(user.args[1] == result and user.users for user in self.node.users)
