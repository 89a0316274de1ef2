"""The types in which normalisations on a CPU save their statistics; PyTorch's fake kernels take them for narrower ones."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from fusepass.codegen.lowering.tracer import Spec
from fusepass.patterns.arguments import arguments

aten = torch.ops.aten

_NORMALISATIONS = frozenset(
    {
        aten.native_layer_norm.default,
        aten.native_group_norm.default,
        aten._native_batch_norm_legit_functional.default,
        aten._native_batch_norm_legit_no_training.default,
        aten._native_batch_norm_legit.no_stats,
    }
)
"""They give the normalised values, two statistics of the batch, and perhaps the running statistics after it."""

_OPERANDS = ("weight", "bias", "running_mean", "running_var")


def correct_types(graph: fx.Graph) -> None:
    """Say in ``meta["val"]`` what `graph` gives: AOTAutograd says what fake kernels give.

    A normalisation of float16 or bfloat16 on a CPU keeps statistics in float32 where one of its other operands has that type
    (as under autocast), and running statistics in the type that they have.
    """
    for node in graph.nodes:
        if node.target not in _NORMALISATIONS:
            continue
        given, results = arguments(node), node.meta["val"]
        x = results[0]
        if x.device.type != "cpu" or x.dtype not in (torch.float16, torch.bfloat16):
            continue
        operands = [given[name].meta["val"] for name in _OPERANDS if given.get(name) is not None]
        wide = any(operand.dtype is torch.float32 for operand in operands)
        saved = torch.float32 if wide else x.dtype
        node.meta["val"] = _typed(results, [x.dtype, saved, saved, *(operand.dtype for operand in operands[-2:])])
        for item in node.users:
            if item.target is operator.getitem:
                item.meta["val"] = node.meta["val"][item.args[1]]


def _typed(results: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> tuple[torch.Tensor, ...]:
    """`results`, described with these types; there may be more types than results."""
    return tuple(
        result if result.dtype is dtype else Spec.described(tuple(result.shape), result.stride(), dtype, result.device)
        for result, dtype in zip(results, dtypes, strict=False)
    )
