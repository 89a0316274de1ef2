"""Wide matrix products of which a graph keeps a few numbers a row, such as the logits of a loss, are made some rows at a time.

In a joint graph the gradient of such a product is a known tensor times one number, the gradient of the loss. So forward makes it, with one in the
place of that number, while a chunk of the product is there; backward multiplies what was made of it. Nothing is computed twice.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode
from torch.utils.checkpoint import CheckpointPolicy

from fusepass.codegen.lowering.modes import without_modes
from fusepass.codegen.lowering.tracer import Spec
from fusepass.compile.chunked import Chunked, Classes, Gradient, Made, Scaled
from fusepass.compile.factors import common_factor
from fusepass.compile.row_steps import Step
from fusepass.compile.row_uses import Uses
from fusepass.compile.row_values import (
    LOSS,
    TOTALS,
    VIEWS,
    Given,
    NotByRows,
    Value,
    descendants,
    moved_back,
    moving,
    wide_enough,
)
from fusepass.config import Algebra, Rounding, current
from fusepass.patterns.arguments import arguments
from fusepass.patterns.dataflow import remove_dead
from fusepass.patterns.infer import contiguous_strides, infer
from fusepass.patterns.simplify import Application

aten = torch.ops.aten

CHUNKS = "chunks"
"""The name of this rewrite."""

KEPT_WHOLE = "kept_whole"
"""In a node's ``meta``: why a product from which rows are reduced is not made in chunks."""

LEAST_ROWS = 2048
"""Of a chunk: each reads and writes the gradient of the weight once more. At 4 TB/s and 750 TFLOP/s, which an H200 reaches in 16 bits, that takes
6 % of the time of the products of so many rows, where nothing else runs meanwhile."""

CHUNK_BYTES = 2**28
"""Of a chunk of the product, at least, where the memory budget is 1: beside that, launches and the gradient of the weight are little."""

WORTH_BYTES = 2**30
"""Of the whole product, from which on it is made in chunks where the memory budget is 1; smaller ones take little memory. No time was compared yet."""

TILE = 128
"""Rows that a kernel of the library computes together."""

_UNIT = {torch.float16: 256.0}
"""What takes the place of the common factor, if not 1: without it small gradients would be zero in a type of few exponents."""


def chunk_products(graph: fx.Graph, tangents: Sequence[fx.Node] = ()) -> list[Application]:
    """Rewrite, in place, every product of `graph` that pays; a product that is reduced by rows and stays whole says why in its ``meta``.

    Args:
        graph: flat; every node has a tensor in ``meta["val"]``. A joint graph of AOTAutograd, or one without gradients.
        tangents: the inputs of a joint graph that stand for gradients of its results.
    """
    config = current()
    done: list[Application] = []
    if config.algebra is Algebra.OFF or config.rounding is Rounding.EAGER or not config.allows(CHUNKS):
        return done
    for product in [node for node in graph.nodes if node.target in (aten.mm.default, aten.addmm.default)]:
        if KEPT_WHOLE in product.meta or not _is_wide(product):
            continue
        uses = Uses.of(product)
        if not uses.reductions:
            continue
        try:
            rows = _rows(product)
            with without_modes():  # AOTAutograd's would make fakes of the numbers of rows
                _Rewrite(product, uses, tangents, rows).apply()
        except NotByRows as reason:
            product.meta[KEPT_WHOLE] = f"it is not made in chunks: {reason}"
            continue
        done.append(Application(CHUNKS, product.name))
    remove_dead(graph)
    return done


def _is_wide(product: fx.Node) -> bool:
    """Whether a product is of known sizes and larger than its operands."""
    operands: Any = product.args[-2:]
    left, right, value = (node.meta["val"] for node in (*operands, product))
    known = all(isinstance(size, int) for each in (left, right, value) for size in (*each.shape, *each.stride()))
    of_columns = all(bias.meta["val"].shape == value.shape[1:] for bias in (*product.args[:-2],))  # type: ignore[union-attr]
    if not known or not of_columns or not value.is_floating_point() or product.kwargs:
        return False
    return bool(value.shape[1] >= 2 * left.shape[1] and min(value.shape) > 1)


def _rows(product: fx.Node) -> int:
    """Rows of a chunk: as few as pay, chunks of equal size, or where that cannot be, of whole tiles but for the last one.

    Raises:
        NotByRows: all rows are one chunk, or are not worth more.
    """
    x: Any = product.args[-2]
    count, width = map(int, product.meta["val"].shape)
    depth = int(x.meta["val"].shape[1])
    budget, itemsize = current().memory_budget, int(product.meta["val"].dtype.itemsize)
    if count * width * itemsize < WORTH_BYTES * budget:
        raise NotByRows(f"its {count * width * itemsize >> 20} MiB are not worth chunks")
    least = max(LEAST_ROWS, depth // 2, int(CHUNK_BYTES * budget) // (width * itemsize))
    chunks = round(count / least)
    if chunks < 2:
        raise NotByRows(f"its {count} rows are one chunk, as each has about {least} or more")
    return count // chunks if count % chunks == 0 else -(-count // (chunks * TILE)) * TILE


class _Rewrite:
    """A product and what is made of it, found to be made in chunks.

    Raises:
        NotByRows: it cannot be.
    """

    def __init__(self, product: fx.Node, uses: Uses, tangents: Sequence[fx.Node], rows: int) -> None:
        self._product, self._uses, self._rows = product, uses, rows
        self._graph = product.graph
        self._last = product
        self._like: dict[str, Any] = {key: value for key, value in product.meta.items() if key != "partitioner_tag"}
        self._copies: dict[fx.Node, fx.Node] = {}
        self._sinks, self._exits = uses.needed(self._graph)
        self._factor = common_factor(tangents, self._sinks) if self._sinks and tangents else None
        self._later = descendants(tangents)
        operands = {operand for node in self._sinks if (operand := uses.sinks[node][2]) is not None}
        if not operands.isdisjoint(descendants([product])):
            raise NotByRows("its gradient is multiplied by what is made of it")
        if not self._later.isdisjoint((*self._exits, *operands)):
            raise NotByRows("backward reads it for something else than gradients of its operands")
        self._weights = {loss: self._weight(loss) for loss in uses.exits if loss.target is LOSS}
        self._instead = {item: weight for loss, weight in self._weights.items() for item in _items(loss, 1)}
        self._step = step = Step(product, self._factor, self._instead)
        self._results = [step.reduced(node) for node in self._exits]
        gradients = {step.gradient(uses.sinks[node][1]) for node in self._sinks}
        if len(gradients) > 1:
            raise NotByRows("it has several gradients")
        self._outputs = tuple(map(step.single, self._results))
        for gradient in gradients:
            if gradient.meta["val"].dtype is not product.meta["val"].dtype:
                raise NotByRows("its gradient has another type")
        step.graph.output((*self._outputs, *gradients))

    def apply(self) -> None:
        """Put the call in chunks, and what backward makes of it, in the place of what reads the product."""
        step = self._step
        *bias, x, weight = self._product.args
        call_arguments = [x, weight, bias[0] if bias else None, *map(self._argument, step.given)]
        gradients = []
        for node in self._sinks:
            made, _, operand = self._uses.sinks[node]
            if operand is not None:
                operand = self._known(operand)
                operand = self._call(aten.t.default, operand) if made is Made.RIGHT else operand
                call_arguments += [] if operand in call_arguments else [operand]
            gradients.append(Gradient(made, None if operand is None else call_arguments.index(operand)))
        classes = [Classes(3 + step.arguments.index(node), *allowed) for node, allowed in step.classes.items()]
        by_rows = tuple(given.like is not None for given in step.given)
        chunked = Chunked(fx.GraphModule({}, step.graph), self._rows, by_rows, tuple(gradients), tuple(classes))
        rows = [self._described((step.count,), node.meta["val"].dtype) for node in self._outputs]
        sums = [self._sum(node, gradient) for node, gradient in zip(self._sinks, gradients, strict=True)]
        results = self._several(chunked, call_arguments, [*rows, *sums])
        for node, value in zip(self._exits, self._results, strict=True):
            result = self._as_in_graph(next(results), value, node)
            if node.target is LOSS:
                self._replace_loss(node, result)
            elif node.target in TOTALS:
                node.replace_all_uses_with(self._total(node, result))
            else:
                node.replace_all_uses_with(self._cast(result, node.meta["val"].dtype))
        for node, gradient in zip(self._sinks, gradients, strict=True):
            node.replace_all_uses_with(self._multiplied(next(results), node, gradient))
        _sort(self._graph)

    def _argument(self, given: Given) -> fx.Node:
        """What the step takes, ``[rows, columns]``, ``[rows]``, ``[columns]`` or a number."""
        last = [] if given.columns is None else [given.columns]
        if given.like is None:
            assert given.node is not None
            return self._seen(self._known(given.node), last)
        shape = [*given.like.rows.shape, *last]
        if given.node is None:
            made = self._call(aten.full.default, shape, 1, dtype=torch.int64, device=self._product.meta["val"].device)
        else:
            made = self._known(given.node)
            made = made if [*made.meta["val"].shape] == shape else self._call(aten.expand.default, made, shape)
        path = () if self._step.is_whole(given.like) else given.like.path
        if path:
            made = self._seen(made, [*path[-1].meta["val"].shape[:-1], given.columns or 1])
        for node in reversed(path):
            target, rest = moved_back(node, given.columns or 1)
            made = self._seen(made, *rest) if target is aten.view.default else self._call(target, made, *rest)
        return self._seen(made, [self._step.count, *last])

    def _as_in_graph(self, result: fx.Node, value: Value, node: fx.Node) -> fx.Node:
        """``[rows]`` as `value` is in the graph, in the place of `node`."""
        path = () if self._step.is_whole(value) else value.path
        if path:
            result = self._seen(result, [self._step.count, 1])
        for view in path:
            target, rest = moving(view, 1)
            result = self._seen(result, *rest) if target is aten.view.default else self._call(target, result, *rest)
        shape = value.rows.shape if node.target in (LOSS, *TOTALS) else node.meta["val"].shape
        return self._seen(result, [*shape])

    def _weight(self, loss: fx.Node) -> fx.Node:
        """The weight of all rows that are not ignored, at least in float32: a half has no room for many."""
        given = arguments(loss)
        target, weight = given["target"], given["weight"]
        wide = wide_enough(given["self"].meta["val"].dtype)
        counted = self._call(aten.ne.Scalar, target, given["ignore_index"])
        if weight is not None:
            classes = self._call(aten.mul.Tensor, target, counted)
            weight = self._call(aten.gather.default, weight, 0, classes)
            zero = self._call(
                aten.full.default, [], 0, dtype=weight.meta["val"].dtype, device=weight.meta["val"].device
            )
            counted = self._call(aten.where.self, counted, weight, zero)
        return self._call(aten.sum.default, self._cast(counted, wide))

    def _total(self, node: fx.Node, result: fx.Node) -> fx.Node:
        """One of `TOTALS` by its rows."""
        total = self._call(aten.sum.default, result)
        if node.target is aten.mean.default:
            total = self._call(aten.div.Tensor, total, node.args[0].meta["val"].numel())  # type: ignore[union-attr]
        return self._cast(total, node.meta["val"].dtype)

    def _replace_loss(self, loss: fx.Node, result: fx.Node) -> None:
        """The items of a loss by its rows."""
        given = arguments(loss)
        reduction, dtype = given["reduction"], given["self"].meta["val"].dtype
        weight = self._weights[loss]
        if reduction != 0:
            result = self._call(aten.sum.default, self._cast(result, weight.meta["val"].dtype))
        if reduction == 1:
            result = self._call(aten.div.Tensor, result, weight)
        for item in _items(loss, 1):
            item.replace_all_uses_with(self._cast(weight, dtype))
        for item in _items(loss, 0):
            item.replace_all_uses_with(self._cast(result, dtype))

    def _sum(self, node: fx.Node, gradient: Gradient) -> Tensor:
        """What the call gives for `node`: numbers that may be large before they are multiplied are in a type that has room for them."""
        value = node.meta["val"]
        shape = (self._step.width,) if gradient.operand is None else tuple(value.shape)
        narrow = value.dtype is torch.float16 and not gradient.made.by_rows
        return self._described(shape, torch.float32 if narrow else value.dtype)

    def _multiplied(self, result: fx.Node, node: fx.Node, gradient: Gradient) -> fx.Node:
        """`result` times the common factor, in the place of `node`."""
        value, factor = node.meta["val"], self._factor
        self._like, self._last = dict(node.meta), node
        if factor is not None:
            factor = self._seen(factor, [])
            unit = _UNIT.get(self._product.meta["val"].dtype)
            factor = (
                factor if unit is None else self._call(aten.mul.Tensor, self._cast(factor, torch.float32), 1 / unit)
            )
            large = gradient.made in (Made.LEFT, Made.RIGHT) and result.meta["val"].dtype is value.dtype
            if large and _is_returned(node):
                result = self._graph.call_function(Scaled(), (result, factor))
                result.meta = dict(node.meta)
                self._last.append(result)
            else:
                wide = wide_enough(value.dtype)
                result = self._call(aten.mul.Tensor, self._cast(result, wide), self._cast(factor, wide))
        return self._seen(self._cast(result, value.dtype), [*value.shape])

    def _known(self, node: fx.Node) -> fx.Node:
        """`node` with one in the place of the common factor, made of what forward has."""
        node = self._instead.get(node, node)
        if node in self._copies:
            return self._copies[node]
        made = node
        if node is self._factor:
            value = node.meta["val"]
            unit = _UNIT.get(self._product.meta["val"].dtype, 1.0)
            made = self._call(aten.full.default, [*value.shape], unit, dtype=value.dtype, device=value.device)
        elif node in self._later or node.meta.get("partitioner_tag") == "is_backward":
            sources = {each: self._known(each) for each in node.all_input_nodes}
            with self._graph.inserting_after(self._last):
                made = self._graph.node_copy(node, sources.__getitem__)
            made.meta = {**node.meta, "partitioner_tag": self._like.get("partitioner_tag")}
            self._last = made
        self._copies[node] = made
        return made

    def _several(self, target: Any, args: Sequence[Any], values: Sequence[Tensor]) -> Iterator[fx.Node]:
        """The results of a call that gives these. It is not done again, whatever the memory budget: what it gives is small beside the product."""
        with self._graph.inserting_after(self._last):
            call = self._last = self._graph.call_function(target, tuple(args))
        call.meta = {**self._like, "val": tuple(values), "recompute": CheckpointPolicy.MUST_SAVE}
        made = []
        for number, value in enumerate(values):
            with self._graph.inserting_after(self._last):
                item = self._last = self._graph.call_function(operator.getitem, (call, number))
            item.meta = {**call.meta, "val": value}
            made.append(item)
        return iter(made)

    def _seen(self, node: fx.Node, shape: Sequence[int]) -> fx.Node:
        """The elements of `node` in another shape, contiguous."""
        if not node.meta["val"].is_contiguous():
            node = self._call(aten.clone.default, node, memory_format=torch.contiguous_format)
        return node if [*node.meta["val"].shape] == [*shape] else self._call(aten.view.default, node, [*shape])

    def _cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        return node if node.meta["val"].dtype is dtype else self._call(aten._to_copy.default, node, dtype=dtype)

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with self._graph.inserting_after(self._last):
            self._last = self._graph.call_function(target, args, kwargs)
        like = self._product.meta["val"]
        mode = detect_fake_mode(like)
        if mode is None:
            value = infer(target, args, kwargs, like.device)
        else:
            values = fx.map_arg((args, kwargs), lambda node: node.meta["val"])
            with mode:
                value = target(*values[0], **values[1])
        self._last.meta = {**self._like, "val": value}
        return self._last

    def _described(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """What a new tensor beside the product looks like."""
        like = self._product.meta["val"]
        mode = detect_fake_mode(like)
        if mode is None:
            return Spec.described(shape, contiguous_strides(shape), dtype, like.device)
        with mode:
            return torch.empty(shape, dtype=dtype, device=like.device)


def _items(call: fx.Node, number: int) -> list[fx.Node]:
    """The nodes that take result `number` of a call."""
    return [user for user in call.users if user.target is operator.getitem and user.args[1] == number]


def _is_returned(node: fx.Node) -> bool:
    """Whether nothing but views of `node` read it, and results."""
    return all(user.op == "output" or (user.target in VIEWS and _is_returned(user)) for user in node.users)


def _sort(graph: fx.Graph) -> None:
    """Move what nodes read before them, in place."""
    seen = set[fx.Node]()
    for node in list(graph.nodes):
        stack = [node]
        while stack:
            missing = [each for each in stack[-1].all_input_nodes if each not in seen]
            if missing:
                stack += missing
                continue
            ready = stack.pop()
            if ready not in seen:
                seen.add(ready)
                if ready is not node:
                    node.prepend(ready)
