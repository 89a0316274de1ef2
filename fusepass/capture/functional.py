"""Functional forms of operators that write to their first argument."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from fusepass.codegen.lowering.modes import without_modes

aten = torch.ops.aten

_RENAMED = {aten.bernoulli_.float: aten.bernoulli.p, aten.normal_.default: aten.normal_functional.default}
"""In-place operators whose functional form has another name."""


_IN_PLACE = frozenset(
    {
        operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod,
        operator.ipow, operator.iand, operator.ior, operator.ixor, operator.ilshift, operator.irshift,
    }
)  # fmt: skip
"""Functions of Python that write to their first argument."""

_ELEMENTWISE = frozenset(
    {
        aten.bernoulli_.float, aten.normal_.default, aten.uniform_.default, aten.exponential_.default,
        aten.copy_.default, aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.masked_fill_.Scalar,
        aten.masked_fill_.Tensor, aten.abs_.default, aten.copysign_.Tensor, aten.gelu_.default, aten.hardswish_.default,
        aten.mish_.default, aten.threshold_.default,
    }
)  # fmt: skip
"""In-place operators that write every element where it stands, beside those that PyTorch tags as pointwise."""


def functional_form(func: OpOverload) -> OpOverload | None:
    """The operator that computes what the in-place `func` writes to its first argument, if there is one."""
    namespace, name = func._schema.name.split("::")
    written = [argument.name for argument in func._schema.arguments if argument.is_write]
    if namespace != "aten" or not name.endswith("_") or written != [func._schema.arguments[0].name]:
        return None
    packet = getattr(aten, name[:-1], None)
    found = _RENAMED.get(func) or getattr(packet, func._overloadname, None)
    if found is None or found._schema.is_mutable:
        return None
    if torch.Tag.pointwise not in func.tags and func not in _ELEMENTWISE:
        return None
    same = [argument.name for argument in found._schema.arguments] == [a.name for a in func._schema.arguments]
    return found if same else None


def with_defaults(func: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """All positional arguments, those that the dispatcher leaves out included."""
    left_out = func._schema.arguments[len(args) :]
    return (*args, *(argument.default_value for argument in left_out if not argument.kwarg_only))


def memory_order(tensor: torch.Tensor) -> tuple[list[int], list[int]]:
    """The dimensions in the order of memory, and in which order of these they are as they were.

    Where elements share memory, in that of a tensor which is made like it (`torch.empty_like`): PyTorch's ties are its own.
    """
    with without_modes():
        dense = torch.empty_like(torch.empty_strided(tensor.shape, tensor.stride(), device="meta"))
    order = sorted(range(tensor.dim()), key=dense.stride, reverse=True)
    return order, [order.index(dim) for dim in range(tensor.dim())]


def may_write(node: fx.Node) -> bool:
    """Whether a call, as Dynamo traced it, may write to a tensor that it is given."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return node.op.startswith("call") and (in_place or node.target in _IN_PLACE or "out" in node.kwargs)


def forgets_gaps(graph: fx.Graph) -> bool:
    """Whether a functional `graph` that computes no gradients has zeros where a write to ``unfold`` leaves elements as they are.

    PyTorch puts written windows back by the gradient of ``unfold``, which knows nothing of what lies in no window.
    """
    return any(_has_gaps(*node.args[1:]) for node in graph.find_nodes(op="call_function", target=_WINDOWS_BACK))


def keeps_dimensions(graph: fx.Graph) -> bool:
    """Whether a norm along a dimension of size 1, counted from the end, still has it in a traced `graph`.

    PyTorch's Python (2.11), which says what shape it has, forgets to leave such a dimension out; its kernels do leave it out.
    """
    return any(map(_keeps_one, graph.find_nodes(op="call_function", target=_NORM)))


def _keeps_one(norm: fx.Node) -> bool:
    source, _, dims, keeps, *_ = with_defaults(_NORM, norm.args)
    rank = source.meta["val"].dim()
    return bool(norm.meta["val"].dim() != (rank if keeps else rank - len(dims or range(rank))))


WRONG_SHAPE = "PyTorch's tracing gives a norm along a dimension of size 1 another shape"
_NORM = aten.linalg_vector_norm.default
LOST_WRITE = "PyTorch's tracing loses what lies between windows (unfold) that forward writes to"
_WINDOWS_BACK = aten.unfold_backward.default


def _has_gaps(shape: list[int], dim: int, size: int, step: int) -> bool:
    return bool(shape) and (step > size or (shape[dim] - size) % step != 0)
