"""AOTAutograd's joint graph, made ready and cut into forward and backward.

On a GPU, where memory takes longer than functions, PyTorch's minimum cut saves what takes the fewest bytes, where operators that kernels fuse
cost nothing to compute again in backward. Two kinds of operators hide that from it. A ``detach`` is none that it knows, though it does nothing
here. A normalisation is not computed again, as its statistics would be found again; but its result is a function of elements once these are
known, and they are small: so that function stands in the place of a result that only fused operators read.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._functorch import config
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition

from fusepass.codegen.lowering import registry
from fusepass.patterns.arguments import arguments
from fusepass.patterns.opclass import OpClass, classify

aten = torch.ops.aten

_FUSED = (OpClass.POINTWISE, OpClass.REDUCTION, OpClass.NORMALISATION)


def partition_joint(
    joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **options: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and the backward graph of a joint one, as is best on its device; a `partition_fn` of AOTAutograd."""
    values = (node.meta.get("val") for node in joint.graph.find_nodes(op="placeholder"))
    on_gpu = any(isinstance(value, torch.Tensor) and value.device.type == "cuda" for value in values)
    cut = minimum_cut if on_gpu else default_partition
    return cut(joint, inputs, num_fwd_outputs=num_fwd_outputs, **options)


def minimum_cut(
    joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **options: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The two graphs such that as few bytes as may be are saved, and backward computes the rest again."""
    skip_detached(joint.graph)
    normalise_again(joint.graph)
    # What reads a value behind a normalisation of it would count as far away, though one kernel does both.
    with config.patch(ban_recompute_used_far_apart=False):
        return min_cut_rematerialization_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **options)


def skip_detached(graph: fx.Graph) -> None:
    """Let operators read what a ``detach`` is given: in a joint graph nothing is written, and gradients are operators already."""
    for node in graph.find_nodes(op="call_function", target=aten.detach.default):
        for reader in [user for user in node.users if user.op != "output"]:
            reader.replace_input_with(node, node.args[0])


def normalise_again(graph: fx.Graph) -> None:
    """Write a normalised value that only fused operators read as a function of the value before it and its statistics."""
    for node in list(graph.nodes):
        if node.target not in _SHAPES:
            continue
        results = [user for user in node.users if user.target is operator.getitem and user.args[1] == 0]
        readers = [(result, user) for result in results for user in result.users]
        given = arguments(node)
        x = given["input"].meta["val"]
        shapes = _SHAPES[node.target](x, given) if all(isinstance(size, int) for size in x.shape) else None
        if shapes is None or not all(_is_fused(reader) for _, reader in readers):
            continue
        again = _Writer(graph, node).normalised(shapes)
        for result, reader in readers:
            reader.replace_input_with(result, again)


def _is_fused(reader: fx.Node) -> bool:
    """Whether kernels make what `reader` makes of an element, perhaps behind views."""
    if reader.op != "call_function":
        return False
    found = classify(reader, registry)
    if found is OpClass.VIEW:
        return all(_is_fused(user) for user in reader.users)
    return found in _FUSED


@dataclass(frozen=True)
class _Shapes:
    """In which shapes a normalised value, its statistics and its weights are seen, so that they broadcast; None as they are."""

    value: list[int] | None = None
    statistics: list[int] | None = None
    weights: list[int] | None = None


def _of_layers(x: torch.Tensor, given: dict[str, Any]) -> _Shapes:
    return _Shapes()


def _of_batches(x: torch.Tensor, given: dict[str, Any]) -> _Shapes | None:
    channels = [1, x.shape[1], *[1] * (x.dim() - 2)]
    return _Shapes(None, channels, channels) if given["training"] else None


def _of_groups(x: torch.Tensor, given: dict[str, Any]) -> _Shapes | None:
    if not x.is_contiguous():
        return None
    samples, channels, *image = x.shape
    groups, ones = given["group"], [1] * len(image)
    each = channels // groups
    return _Shapes([samples, groups, each, *image], [samples, groups, 1, *ones], [groups, each, *ones])


_SHAPES: dict[Any, Callable[[torch.Tensor, dict[str, Any]], _Shapes | None]] = {
    aten.native_layer_norm.default: _of_layers,
    aten.native_group_norm.default: _of_groups,
    aten._native_batch_norm_legit_functional.default: _of_batches,
    aten._native_batch_norm_legit.no_stats: _of_batches,
}
"""Normalisations that give the result, the mean and the inverse of the standard deviation."""


class _Writer:
    """Adds operators behind a normalisation to its graph."""

    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        self._graph, self._node, self._last = graph, node, node

    def normalised(self, shapes: _Shapes) -> fx.Node:
        """``(x - mean) * scale * weight + bias``, in float32 at least, in the type of the normalisation's result."""
        given = arguments(self._node)
        x, (result, *_) = given["input"], self._node.meta["val"]
        value = self._seen(x, shapes.value)
        if result.dtype.itemsize < 4:
            value = self._call(aten._to_copy.default, value, dtype=torch.float32)
        for number, target in ((1, aten.sub.Tensor), (2, aten.mul.Tensor)):
            statistic = self._call(operator.getitem, self._node, number)
            value = self._call(target, value, self._seen(statistic, shapes.statistics))
        for name, target in (("weight", aten.mul.Tensor), ("bias", aten.add.Tensor)):
            if given.get(name) is not None:
                value = self._call(target, value, self._seen(given[name], shapes.weights))
        if value.meta["val"].dtype is not result.dtype:
            value = self._call(aten._to_copy.default, value, dtype=result.dtype)
        return self._seen(value, None if shapes.value is None else list(result.shape))

    def _seen(self, node: fx.Node, shape: list[int] | None) -> fx.Node:
        return node if shape is None else self._call(aten.view.default, node, shape)

    def _call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        with self._graph.inserting_after(self._last):
            self._last = self._graph.call_function(target, args, kwargs)
        values = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args]
        self._last.meta = {**self._node.meta, "val": target(*values, **kwargs)}
        return self._last
