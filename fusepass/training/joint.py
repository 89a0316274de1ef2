"""AOTAutograd's joint graph, made ready and cut into forward and backward.

On a GPU, where memory takes longer than functions, PyTorch's minimum cut saves what takes the fewest bytes, where operators that kernels fuse
cost nothing to compute again in backward. Three kinds of operators hide that from it. A ``detach`` is none that it knows, though it does nothing
here. Losses and gradients of functions are operators of their own, which it takes for calls of a library: it is told which are fused. A
normalisation, a softmax or its logarithm, is not computed again, as its statistics would be found again; but its result is a function of
elements once these are known, and they are small: so that function stands in the place of a result that only fused operators read. Places of
maxima of pools are saved as those in their windows, which are small numbers. What is compared with another value is saved, too (`compared`). What is stored anyway costs nothing to save, but to read: where
backward has at hand what it is made of, it makes it again. And of some values, such as what was pooled, backward asks for the shape alone: these
are not saved for that.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import fx
from torch._functorch import config, partitioners
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils import _pytree as pytree

from fusepass.capture.threads import replaced
from fusepass.codegen.lowering import registry
from fusepass.codegen.lowering.tracer import Spec
from fusepass.compile.chunks import chunk_products
from fusepass.compile.corrections import correct
from fusepass.compile.dropout import split_dropout
from fusepass.patterns.arguments import arguments
from fusepass.patterns.deciding import note_rounded
from fusepass.patterns.opclass import OpClass, classify
from fusepass.patterns.simplify import Application, share_common
from fusepass.patterns.traffic import nbytes
from fusepass.runtime.meta import Meta
from fusepass.training.budget import budget, within_budget
from fusepass.training.compared import is_saved, save_chosen, save_compared

aten = torch.ops.aten

_FUSED = (OpClass.POINTWISE, OpClass.REDUCTION, OpClass.NORMALISATION)
_QUICK = frozenset({
    aten.add, aten.sub, aten.mul, aten.neg, aten.abs, aten.relu, aten.threshold, aten.leaky_relu, aten.hardtanh, aten.clamp,
    aten.clamp_min, aten.maximum, aten.minimum, aten.where, aten._to_copy,
})  # fmt: skip
"""Functions that take less time than reading what they give."""

_SMALL = 8  # times as many bytes as are read instead

_OF_A_SHAPE = frozenset({
    aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default,
    aten._adaptive_avg_pool2d_backward.default, aten._adaptive_avg_pool3d_backward.default,
    aten.max_pool2d_with_indices_backward.default,
    aten.reflection_pad1d_backward.default, aten.reflection_pad2d_backward.default, aten.reflection_pad3d_backward.default,
    aten.replication_pad1d_backward.default, aten.replication_pad2d_backward.default, aten.replication_pad3d_backward.default,
})  # fmt: skip
"""Gradients that read the shape of their second argument, and no number of it."""


def partition_joint(
    joint: fx.GraphModule,
    inputs: Any,
    *,
    num_fwd_outputs: int,
    applied: list[Application] | None = None,
    **options: Any,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and the backward graph of a joint one, as is best on its device; a `partition_fn` of AOTAutograd.

    Args:
        applied: takes in the rewrites.
    """
    values = (node.meta.get("val") for node in joint.graph.find_nodes(op="placeholder"))
    on_gpu = any(isinstance(value, torch.Tensor) and value.device.type == "cuda" for value in values)
    if on_gpu or budget() < 1:
        return minimum_cut(joint, inputs, num_fwd_outputs=num_fwd_outputs, applied=applied, **options)
    _chunk(joint, applied)
    skip_detached(joint.graph)
    joint.graph.eliminate_dead_code()
    note_rounded(joint.graph)
    return default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **options)


def minimum_cut(
    joint: fx.GraphModule,
    inputs: Any,
    *,
    num_fwd_outputs: int,
    applied: list[Application] | None = None,
    **options: Any,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The two graphs such that as few bytes as may be are saved, and no more than the budget allows, and backward computes the rest again."""
    correct(joint.graph)
    _chunk(joint, applied)
    describe_by_fakes(joint.graph)
    skip_detached(joint.graph)
    forget_numbers(joint.graph)
    normalise_again(joint.graph)
    shorten_places(joint.graph)
    joint.graph.eliminate_dead_code()
    share_common(joint.graph)  # not later: what is made again is made twice
    split_dropout(joint.graph)  # not earlier: equal draws are two
    kinds = _kinds(joint.graph)
    save_compared(joint.graph, num_fwd_outputs)
    save_chosen(joint.graph, kinds.recomputable_ops)
    make_again(joint.graph)
    note_rounded(joint.graph)  # of both halves: backward decides by what forward computes
    # What reads a value behind a normalisation of it would count as far away, though one kernel does both.
    with (
        config.patch(ban_recompute_used_far_apart=False, cse=False),
        replaced(partitioners, "get_default_op_list", lambda: kinds),
        replaced(partitioners, "_size_of", _moved),
        replaced(fx.GraphModule, "recompile", lambda module: None),
        within_budget(joint.graph),
    ):
        halves = min_cut_rematerialization_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **options)
    forward, backward = map(_LazyGraphModule.from_graphmodule, halves)
    return forward, backward


def describe_by_fakes(graph: fx.Graph) -> None:
    """What was described anew, described as AOTAutograd does it: it counts what is saved by its fake tensors."""
    mode = detect_fake_mode([node.meta.get("val") for node in graph.find_nodes(op="placeholder")])

    def fake(spec: Spec) -> torch.Tensor:
        with mode or nullcontext():
            return torch.empty_strided(spec.shape, spec.stride(), dtype=spec.dtype, device=spec.device)

    for node in graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = pytree.tree_map_only(Spec, fake, node.meta["val"])


def _chunk(joint: fx.GraphModule, applied: list[Application] | None) -> None:
    """Make wide products in chunks, which takes backward's part of them to forward."""
    tangents = [node for node in joint.graph.find_nodes(op="placeholder") if "tangents" in node.name]
    found = chunk_products(joint.graph, tangents)
    if applied is not None:
        applied += found


_size_of = partitioners._size_of


def _moved(node: fx.Node) -> int:
    """Bytes, half of them once more where elements have one: as many elements at a time are less of an access."""
    size, value = _size_of(node), node.meta["val"]
    return size * 3 // 2 if isinstance(value, torch.Tensor) and value.dtype.itemsize == 1 else size


def _kinds(graph: fx.Graph) -> Any:
    """PyTorch's lists of what is fused and what may be computed again, with the operators of `graph` that generated kernels do."""
    known = partitioners.get_default_op_list()
    calls = [node for node in graph.nodes if isinstance(node.target, OpOverload)]
    found = [(node.target.overloadpacket, classify(node, registry)) for node in calls]
    fused = {packet for packet, kind in found if kind in _FUSED}.difference(known.compute_intensive_ops)
    pointwise = {packet for packet, kind in found if kind is OpClass.POINTWISE}
    return replace(
        known,
        fusible_ops=known.fusible_ops | fused,
        recomputable_ops=known.recomputable_ops | (fused & pointwise),
    )


def skip_detached(graph: fx.Graph) -> None:
    """Let operators read what a ``detach`` is given: in a joint graph nothing is written, and gradients are operators already."""
    for node in graph.find_nodes(op="call_function", target=aten.detach.default):
        for reader in [user for user in node.users if user.op != "output"]:
            reader.replace_input_with(node, node.args[0])


def forget_numbers(graph: fx.Graph) -> None:
    """Let gradients that ask for the shape of a value take a view of that shape of the gradient that they are given, or, as their results have
    the memory format of what they read and such a view has none, another value of that shape and format, which backward reads anyway."""
    backward = _backward(graph)
    for node in [node for node in graph.nodes if node.target in _OF_A_SHAPE]:
        gradient, like = node.args[:2]
        given, value = gradient.meta["val"], like.meta["val"]
        if not _is_constant(given) or not _is_constant(value):
            continue
        if given.numel() and given.dtype is value.dtype and value.is_contiguous():
            node.replace_input_with(like, _Writer(graph, gradient).shape_of(like))
        elif (other := next(_read_as_well(like, backward), None)) is not None:
            node.replace_input_with(like, other)


def _read_as_well(like: fx.Node, backward: set[fx.Node]) -> Iterator[fx.Node]:
    """Values that `like` is made of, element by element, the nearest first, which look like it and whose elements `backward` reads."""
    look, seen, made = Meta.of(like.meta["val"]), {like}, deque([like])
    while made:
        for node in made.popleft().all_input_nodes:
            value = node.meta.get("val")
            first = value[0] if isinstance(value, tuple | list) else value  # of a normalisation
            if node in seen or not isinstance(first, torch.Tensor) or not _is_constant(first):
                continue
            if first.shape != look.shape:
                continue
            seen.add(node)
            made.append(node)
            read = any(user in backward and user.target not in _OF_A_SHAPE for user in node.users)
            if read and Meta.of(first) == look and first is value:
                yield node


def _is_constant(value: torch.Tensor) -> bool:
    """Whether sizes and strides are numbers."""
    return all(isinstance(number, int) for number in (*value.shape, *value.stride()))


def normalise_again(graph: fx.Graph) -> None:
    """Write a normalised value, or a softmax or its logarithm, that only fused operators read as a function of the value before it and its
    statistics."""
    for node in [node for node in graph.nodes if node.target in (aten._log_softmax.default, aten._softmax.default)]:
        if node.users and all(map(_is_fused, node.users)):
            writer = _Writer(graph, node)
            again = writer.softmax() if node.target is aten._softmax.default else writer.log_softmax()
            node.replace_all_uses_with(writer.laid_out(again, node.meta["val"]))
            graph.erase_node(node)
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
        writer = _Writer(graph, node)
        again = writer.laid_out(writer.normalised(shapes), node.meta["val"][0])
        for result, reader in readers:
            reader.replace_input_with(result, again)


def shorten_places(graph: fx.Graph) -> None:
    """Let the gradient of a maximum pool take places in the windows, of a byte each, for those in the image, of eight.

    So PyTorch's own backend does (``prims._low_memory_max_pool_with_offsets``).
    """
    for node in graph.find_nodes(op="call_function", target=aten.max_pool2d_with_indices.default):
        places = [user for user in node.users if user.target is operator.getitem and user.args[1] == 1]
        readers = [(place, user) for place in places for user in place.users]
        if not readers or any(user.target is not aten.max_pool2d_with_indices_backward.default for _, user in readers):
            continue
        given = arguments(node)
        image = given["self"].meta["val"].shape
        # A byte has room for the places of 256, and 32 bits for those of the image.
        if not all(isinstance(size, int) for size in image) or prod(_pair(given["kernel_size"])) > 1 << 8:
            continue
        if image[-2:].numel() < 1 << 31:
            writer = _Writer(graph, places[0])
            again = writer.laid_out(writer.places_of_windows(node), places[0].meta["val"])
            for place, reader in readers:
                reader.replace_input_with(place, again)


def make_again(graph: fx.Graph) -> None:
    """Let backward make a value that is stored anyway, for the caller say or for a product, of what it reads beside it, if that is all that it
    needs: a rectified value of what was normalised."""
    backward = _backward(graph)
    order = {node: number for number, node in enumerate(graph.nodes)}
    later = {node for node in backward if node.op != "output"}
    for node in reversed(order):  # what only backward asks for, such as a sign, is made there
        if node.op == "call_function" and node.users and later.issuperset(node.users):
            later.add(node)
    for node in [node for node in order if _is_quick(node) and node not in backward and not is_saved(node)]:
        readers = [user for user in node.users if user in later and _is_fused(user)]
        if not readers or all(map(_is_fused, node.users)):
            continue
        beside = [
            value for value in _made_of(node) if not any(user in backward and _is_fused(user) for user in value.users)
        ]
        if sum(map(_nbytes, beside)) * _SMALL > _nbytes(node):
            continue
        with graph.inserting_before(min(readers, key=order.__getitem__)):
            again = graph.node_copy(node)
        for reader in readers:
            reader.replace_input_with(node, again)


def _backward(graph: fx.Graph) -> set[fx.Node]:
    """Gradients, and all that is made of them."""
    backward = set[fx.Node]()
    for node in graph.nodes:
        if "tangents" in node.name if node.op == "placeholder" else backward.intersection(node.all_input_nodes):
            backward.add(node)
    return backward


def _made_of(node: fx.Node) -> set[fx.Node]:
    """What `node` is a quick function of, element by element."""
    seen, stack = set[fx.Node](), [*node.all_input_nodes]
    found: set[fx.Node] = set()
    while stack:
        value = stack.pop()
        if value in seen:
            continue
        seen.add(value)
        if _is_quick(value) or (value.op == "call_function" and classify(value, registry) is OpClass.VIEW):
            stack += value.all_input_nodes
        else:
            found.add(value)
    return found


def _is_quick(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.overloadpacket in _QUICK


def _nbytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    return nbytes(value) if isinstance(value, torch.Tensor) else 0


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
    """Adds operators behind one of a graph."""

    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        self._graph, self._node, self._last = graph, node, node

    def normalised(self, shapes: _Shapes) -> fx.Node:
        """``(x - mean) * scale * weight + bias``, in float32 at least, in the type of the normalisation's result."""
        given = arguments(self._node)
        x, (result, *_) = given["input"], self._node.meta["val"]
        value = self._seen(x, shapes.value)
        if result.dtype.itemsize < 4:
            value = self._cast(value, torch.float32)
        for number, target in ((1, aten.sub.Tensor), (2, aten.mul.Tensor)):
            statistic = self._call(operator.getitem, self._node, number)
            value = self._call(target, value, self._seen(statistic, shapes.statistics))
        for name, target in (("weight", aten.mul.Tensor), ("bias", aten.add.Tensor)):
            if given.get(name) is not None:
                value = self._call(target, value, self._seen(given[name], shapes.weights))
        return self._seen(self._cast(value, result.dtype), None if shapes.value is None else list(result.shape))

    def softmax(self) -> fx.Node:
        """``exp(x - max) / sum(exp(x - max))``, in float32 at least, in the type of the result."""
        _, exponential, total = self._exponentials()
        return self._cast(self._call(aten.div.Tensor, exponential, total), self._node.meta["val"].dtype)

    def log_softmax(self) -> fx.Node:
        """``(x - max) - log(sum(exp(x - max)))``, in float32 at least, in the type of the result."""
        below, _, total = self._exponentials()
        below = self._call(aten.sub.Tensor, below, self._call(aten.log.default, total))
        return self._cast(below, self._node.meta["val"].dtype)

    def _exponentials(self) -> tuple[fx.Node, fx.Node, fx.Node]:
        """``x - max``, its exponential, and the sum of that along the dimension of the softmax."""
        x, dim, _ = self._node.args
        assert isinstance(x, fx.Node)
        if x.meta["val"].dtype.itemsize < 4:
            x = self._cast(x, torch.float32)
        below = self._call(aten.sub.Tensor, x, self._call(aten.amax.default, x, [dim], True))
        exponential = self._call(aten.exp.default, below)
        return below, exponential, self._call(aten.sum.dim_IntList, exponential, [dim], True)

    def laid_out(self, made: fx.Node, value: torch.Tensor) -> fx.Node:
        """`made`, which takes the place of `value`, with its strides: readers view it, and results are promised, as it is laid out."""
        given = made.meta["val"]
        assert given.shape == value.shape
        assert given.dtype is value.dtype
        if given.stride() == value.stride():
            return made
        strides = value.stride()
        order = sorted(range(value.dim()), key=lambda dim: (-strides[dim], dim))
        back = [order.index(dim) for dim in range(len(order))]
        turned = self._call(aten.permute.default, made, order)
        copied = self._call(aten.clone.default, turned, memory_format=torch.contiguous_format)
        return self._call(aten.permute.default, copied, back)

    def shape_of(self, like: fx.Node) -> fx.Node:
        """The first numbers along dimensions that `like` has in another size, seen in the shape of `like`."""
        value, shape = self._node, like.meta["val"].shape
        for dim, (size, other) in enumerate(zip(value.meta["val"].shape, shape, strict=True)):
            value = value if size == other else self._call(aten.slice.Tensor, value, dim, 0, 1)
        return self._call(aten.expand.default, value, [*shape])

    def places_of_windows(self, pool: fx.Node) -> fx.Node:
        """The places in the image, made of those in the windows, as bytes, of which the last dimension counts fastest."""
        given = arguments(pool)
        image = given["self"].meta["val"]
        outputs, width = self._node.meta["val"].shape[-2:], image.shape[-1]
        size, steps, pads, holes = (_pair(given[name]) for name in ("kernel_size", "stride", "padding", "dilation"))
        steps = steps or size
        first = []
        for count, step, pad, shape in zip(outputs, steps, pads, ([-1, 1], [-1]), strict=True):
            end = count * step - pad
            at = self._call(aten.arange.start_step, -pad, end, step, dtype=torch.int32, device=image.device)
            first.append(self._seen(at, shape))
        place = self._cast(self._node, torch.int32)
        y = self._call(aten.floor_divide.default, place, width)
        x = self._call(aten.sub.Tensor, place, self._call(aten.mul.Tensor, y, width))
        taps = []
        for at, start, hole in zip((y, x), first, holes, strict=True):
            tap = self._call(aten.sub.Tensor, at, start)
            taps.append(tap if hole == 1 else self._call(aten.floor_divide.default, tap, hole))
        tap = self._call(aten.add.Tensor, self._call(aten.mul.Tensor, taps[0], size[1]), taps[1])
        tap = self._cast(self._cast(tap, torch.uint8), torch.int32)
        y = self._call(aten.floor_divide.default, tap, size[1])
        x = self._call(aten.sub.Tensor, tap, self._call(aten.mul.Tensor, y, size[1]))
        y, x = (
            self._call(aten.add.Tensor, at if hole == 1 else self._call(aten.mul.Tensor, at, hole), start)
            for at, start, hole in zip((y, x), first, holes, strict=True)
        )
        place = self._call(aten.add.Tensor, self._call(aten.mul.Tensor, y, width), x)
        return self._cast(place, torch.int64)

    def _cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        if node.meta["val"].dtype is dtype:
            return node
        return self._call(aten._to_copy.default, node, dtype=dtype)

    def _seen(self, node: fx.Node, shape: list[int] | None) -> fx.Node:
        return node if shape is None else self._call(aten.view.default, node, shape)

    def _call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        with self._graph.inserting_after(self._last):
            self._last = self._graph.call_function(target, args, kwargs)
        values = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args]
        with detect_fake_mode(self._node.meta["val"]) or nullcontext():
            self._last.meta = {**self._node.meta, "val": target(*values, **kwargs)}
        return self._last


def _pair(numbers: Sequence[int]) -> Sequence[int]:
    """What PyTorch takes for both dimensions of an image, for each."""
    return [*numbers] * 2 if len(numbers) == 1 else numbers
