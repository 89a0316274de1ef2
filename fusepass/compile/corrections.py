"""What kernels give where PyTorch's fake kernels say otherwise: types and strides of normalisations, most of them on a CPU."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from fusepass.codegen.lowering.tracer import Spec, results_of
from fusepass.patterns.analysis.layout import BATCH_NORMALISATIONS, looks_channels_last, packed
from fusepass.patterns.arguments import arguments
from fusepass.patterns.infer import infer

aten = torch.ops.aten

_KEEPING_STATISTICS = frozenset({aten.native_layer_norm.default, aten.native_group_norm.default}) | BATCH_NORMALISATIONS
"""They give the normalised values, two statistics of the batch, and perhaps the running statistics after it."""

_LIKE_THE_INPUT = BATCH_NORMALISATIONS | {aten.native_batch_norm_backward.default}
_CONTIGUOUS = frozenset({aten.native_layer_norm_backward.default, aten.native_group_norm_backward.default})
"""Operators whose first result is channels last where the input is, and contiguous otherwise; and those where it is contiguous."""

_OF_WEIGHTS = aten._weight_norm_interface.default
"""It gives weights and their norms."""

_OPERANDS = ("weight", "bias", "running_mean", "running_var")


def correct(graph: fx.Graph) -> None:
    """Say in ``meta["val"]`` what `graph` gives: AOTAutograd says what fake kernels give.

    - Norms of weights are float32 where these have 16 bits, on each device.
    - On a CPU a normalisation of float16 or bfloat16 keeps statistics in float32 where one of its other operands has that type (as under autocast), and
      running statistics in the type that they have.
    - On a CPU normalised values are contiguous or channels last, and what follows lies as operators lay it out for that.
    """
    corrected: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function" or not (found := results_of(node)):
            continue
        on_cpu, follows = found[0].device.type == "cpu", not corrected.isdisjoint(node.all_input_nodes)
        if not (on_cpu or follows or node.target is _OF_WEIGHTS):
            continue
        before = node.meta["val"]
        if node.target is operator.getitem:
            node.meta["val"] = node.args[0].meta["val"][node.args[1]]
        elif isinstance(node.target, OpOverload) and follows:
            node.meta["val"] = _inferred(node, found[0].device)
        if node.target is _OF_WEIGHTS:
            node.meta["val"] = _typed(
                node.meta["val"], (found[0].dtype, torch.promote_types(found[1].dtype, torch.float32))
            )
        if on_cpu and node.target in _KEEPING_STATISTICS:
            node.meta["val"] = _typed(node.meta["val"], _dtypes(node))
        if on_cpu and node.target in _LIKE_THE_INPUT | _CONTIGUOUS:
            node.meta["val"] = _laid_out(node)
        if _looks(before) == _looks(node.meta["val"]):
            node.meta["val"] = before
        else:
            corrected.add(node)


def _inferred(node: fx.Node, device: torch.device) -> Any:
    """What `node` gives. Where a library decides how that is laid out, as a convolution's, it is what PyTorch's fake kernels say, as AOTAutograd has
    it from these for the whole graph."""
    try:
        return infer(node.target, node.args, node.kwargs, device)  # type: ignore[arg-type]
    except RuntimeError:
        from torch._subclasses.fake_tensor import FakeTensorMode  # loads SymPy

        with FakeTensorMode():
            args, kwargs = fx.map_arg((node.args, node.kwargs), _fake)
            results = node.target(*args, **kwargs)  # type: ignore[operator]
        return pytree.tree_map_only(torch.Tensor, Spec.of, results)


def _fake(node: fx.Node) -> Any:
    def fake(value: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)

    return pytree.tree_map_only(torch.Tensor, fake, node.meta["val"])


def _dtypes(node: fx.Node) -> Iterator[torch.dtype]:
    given, results = arguments(node), node.meta["val"]
    operands = [given[name].meta["val"] for name in _OPERANDS if given.get(name) is not None]
    if results[0].dtype not in (torch.float16, torch.bfloat16):
        return (result.dtype for result in results)
    wide = any(operand.dtype is torch.float32 for operand in operands)
    saved = torch.float32 if wide else results[0].dtype
    return iter((results[0].dtype, saved, saved, *(operand.dtype for operand in operands[-2:])))


def _typed(results: Sequence[torch.Tensor], dtypes: Iterable[torch.dtype]) -> tuple[torch.Tensor, ...]:
    """`results`, described with these types; there may be more types than results."""
    return tuple(
        result if result.dtype is dtype else Spec.described(tuple(result.shape), result.stride(), dtype, result.device)
        for result, dtype in zip(results, dtypes, strict=False)
    )


def _laid_out(node: fx.Node) -> tuple[torch.Tensor | None, ...]:
    """The results, the first of them contiguous or in the memory format of the input."""
    first, *others = node.meta["val"]
    if first is None or not all(isinstance(size, int) for size in first.shape):
        return (first, *others)
    like = arguments(node)["input"].meta["val"]
    last = node.target in _LIKE_THE_INPUT and not like.is_contiguous() and looks_channels_last(like)
    strides = _contiguous(first, last=last)
    if strides != first.stride():
        first = Spec.described(tuple(first.shape), strides, first.dtype, first.device)
    return (first, *others)


def _contiguous(tensor: torch.Tensor, *, last: bool) -> tuple[int, ...]:
    """The strides of `tensor` without gaps, channels last if so asked."""
    dims = [*range(tensor.dim())]
    return packed(tuple(tensor.shape), [0, *dims[2:], 1] if last else dims)


def _looks(value: object) -> list[object]:
    every = value if isinstance(value, tuple | list) else (value,)
    return [(each.stride(), each.dtype) for each in every if isinstance(each, torch.Tensor)]
