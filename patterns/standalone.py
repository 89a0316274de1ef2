"""Operators that are regions with nothing beside them: those which generated code does better than PyTorch."""

from __future__ import annotations

import torch
from torch import fx

from fusepass.codegen.lowering.gathers import SCATTERS
from fusepass.patterns.anchor_work import HALVES, is_large
from fusepass.patterns.copies import broadcasts, lies_across, lies_alike, moves, resamples, widens
from fusepass.patterns.dataflow import Unit
from fusepass.patterns.opclass import BY_RUNNING_STATISTICS, OpClass
from fusepass.patterns.traffic import nbytes

aten = torch.ops.aten

_LARGE = 2**20
"""Bytes of the input from which on a reduction is worth a kernel of its own; of the result, for a copy."""

_LOOKING_UP = frozenset({aten.gather.default, aten.take.default, aten.index_select.default, aten.index.Tensor})
"""Operators of which each element, or row, has a place of its own, which comes from data."""

_TWICE = frozenset({aten.masked_fill.Scalar, aten.masked_fill.Tensor, *SCATTERS})
"""Operators that copy what they change."""

_ADDED_UP = frozenset(
    getattr(aten, f"{kind}_pad{rank}d_backward").default for kind in ("reflection", "replication") for rank in (1, 2, 3)
)
"""Gradients that PyTorch adds up in memory, where several meet."""

_LONG = frozenset({aten.softplus.default, aten.mish.default})
"""Functions that PyTorch computes more slowly than memory moves floats."""

_LONG_OF_HALVES = _LONG | {
    aten.gelu.default, aten.silu.default, aten.elu.default, aten.sigmoid.default, aten.tanh.default, aten.log_sigmoid_forward.default,
    aten.log1p.default, aten.expm1.default, aten.erf.default, aten.sin.default, aten.cos.default, aten.atan.default,
    aten.gelu_backward.default, aten.silu_backward.default, aten.mish_backward.default, aten.elu_backward.default,
}  # fmt: skip
"""The same of numbers of 16 bits, of which memory moves twice as many."""

_LONG_ON_A_CPU = _LONG | {
    aten.gelu.default, aten.silu.default, aten.tanh.default, aten.log_sigmoid_forward.default, aten.exp.default, aten.log.default,
    aten.log2.default, aten.log1p.default, aten.expm1.default, aten.erf.default, aten.sin.default, aten.cos.default, aten.atan.default,
    aten.sinh.default, aten.asinh.default,
}  # fmt: skip
"""Functions that PyTorch computes on a CPU by calls of a library, or one at a time: of float32, generated loops take 1.3 to 20 times less."""

_LARGE_ON_A_CPU = 2**18
"""Bytes of the result from which on they are worth a loop of their own."""

_EASY_POWERS = (-2, -1, -0.5, 0, 0.5, 1, 2, 3)
"""Exponents for which PyTorch computes products and roots."""


def pays(unit: Unit) -> bool:
    """Whether generated code does better what `unit` does, with nothing beside it, if that is large."""
    if unit.node.target is BY_RUNNING_STATISTICS:
        return True
    match unit.op_class:
        case OpClass.NORMALISATION | OpClass.POOLING:
            return True
        case OpClass.REDUCTION | OpClass.SCAN:
            return nbytes(unit.node.all_input_nodes[0].meta["val"]) >= _LARGE
        case OpClass.POINTWISE:
            made = sum(nbytes(value.meta["val"]) for value in unit.values)
            if _device_of(unit.node) == "cpu" and unit.node.target in _LONG_ON_A_CPU:
                return made >= _LARGE_ON_A_CPU
            return made >= _LARGE and (_is_better_copy(unit.node) or _is_better_function(unit.node))
        case OpClass.ANCHOR:
            # On CUDA, where the library does not use tensor cores, or converts layouts.
            return unit.values[0].meta["val"].device.type == "cuda" and is_large(unit.node)
    return False


def _is_better_copy(node: fx.Node) -> bool:
    """Whether `node` puts elements elsewhere, and generated code does so in fewer accesses to memory."""
    if not (moves(node) or resamples(node)):
        return False
    if node.meta["val"].device.type == "cuda":
        return not lies_alike(node) or widens(node)
    # Loops for a CPU have no tiles for what is read along one axis and written along another.
    return not lies_alike(node) and not lies_across(node)


def _is_better_function(node: fx.Node) -> bool:
    """Whether `node` is a function of elements that generated code computes in fewer instructions, or for which it finds the places of the
    operands in fewer, or waits less for them."""
    better = broadcasts(node) or _looks_up(node) or _computes_much(node) or node.target in _ADDED_UP
    return better and _device_of(node) == "cuda"


def _device_of(node: fx.Node) -> str:
    """The kind of device on which `node` computes."""
    return str(node.all_input_nodes[0].meta["val"].device.type)


def _looks_up(node: fx.Node) -> bool:
    """Whether elements of `node` stand where data says: threads of PyTorch's kernels wait for one at a time."""
    return node.target in _LOOKING_UP


def _computes_much(node: fx.Node) -> bool:
    """Whether `node` is a function of elements for which PyTorch's kernels take longer than memory."""
    source = node.all_input_nodes[0].meta["val"]
    if node.target is aten.pow.Tensor_Scalar:
        return bool(source.is_floating_point()) and node.args[1] not in _EASY_POWERS
    halves = source.dtype in HALVES
    return node.target in _TWICE or node.target in (_LONG_OF_HALVES if halves else _LONG)
