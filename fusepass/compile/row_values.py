"""Values that have a row for each row of a matrix product, and views that move such rows."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from fusepass.codegen.lowering.tracer import Spec
from fusepass.patterns.arguments import arguments
from fusepass.patterns.infer import contiguous_strides, infer

aten = torch.ops.aten

TOTALS = frozenset({aten.sum.default, aten.mean.default})
LOSS = aten.nll_loss_forward.default
_RESHAPES = frozenset({
    aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims,
})  # fmt: skip
COPIES = frozenset({aten.alias.default, aten.detach.default, aten.clone.default})
TURNS = frozenset({aten.permute.default, aten.transpose.int, aten.t.default})
_SLICES = {aten.slice.Tensor: aten.slice_backward.default, aten.select.int: aten.select_backward.default}
PADS = frozenset(_SLICES.values())
VIEWS = _RESHAPES | COPIES | TURNS | frozenset(_SLICES)
ZEROS = frozenset({aten.new_zeros.default, aten.zeros.default, aten.zeros_like.default})
SCATTERS = frozenset({
    aten.scatter_add.default, aten.scatter.src, aten.scatter.value, aten.index_put.default,
})  # fmt: skip


class NotByRows(Exception):
    """Says why values cannot be made row by row."""


@dataclass(frozen=True, eq=False)
class Value:
    """A value of a step.

    Attributes:
        node: in the step's graph; it has a row for each of the product's, and one column where `columns` is 1, or where all are alike. It may be of
            a wider type than in the original graph.
        rows: which row of the product each of its own is in the original graph, in the shape that they have there.
        columns: the size of the last dimension, which comes behind those of the rows; None where there is none.
        path: the views that chose and arranged these rows, the first one first.
        picked: the column of each row and the number there, where the value is zero in all other columns.
    """

    node: fx.Node
    rows: Tensor
    columns: int | None
    path: tuple[fx.Node, ...] = ()
    picked: tuple[fx.Node, fx.Node] | None = None


@dataclass(frozen=True, eq=False)
class Given:
    """An argument of a step besides the product.

    Attributes:
        node: in the original graph; None for ones.
        like: a value whose rows it has; None for an argument that all rows share.
        columns: as of a `Value`.
    """

    node: fx.Node | None
    like: Value | None
    columns: int | None


def described(step: fx.Graph, rows: int, *, writes: bool) -> fx.GraphModule:
    """A copy of a step's graph, its nodes described for another number of rows, that `writes` its last result over the product."""
    made = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in step.nodes:
        if node.op == "output":
            results = [copies[result] for result in node.args[0]]
            if writes:
                product = next(iter(copies.values()))
                write = made.call_function(aten.copy_.default, (product, results.pop()))
                write.meta["val"] = product.meta["val"]
            made.output(tuple(results))
            break
        copy = copies[node] = made.node_copy(node, copies.__getitem__)
        value = node.meta["val"]
        if node.op == "placeholder":
            shape = (rows, *value.shape[1:]) if node.meta["by_rows"] else tuple(value.shape)
            strides = contiguous_strides(shape) if len(copies) > 1 else (pitch(shape[1], value.dtype), 1)
            copy.meta["val"] = Spec.described(shape, strides, value.dtype, value.device)
        else:
            copy.meta["val"] = infer(copy.target, copy.args, copy.kwargs, value.device)  # type: ignore[arg-type]
    return fx.GraphModule({}, made)


def pitch(width: int, dtype: torch.dtype) -> int:
    """Elements from one row of a product to the next, so that each begins where libraries have their fast kernels for: at 16 bytes."""
    return -(-width * dtype.itemsize // 16) * 16 // dtype.itemsize


def moving(node: fx.Node, columns: int) -> tuple[Any, tuple[Any, ...]]:
    """The operator of a view, or of the gradient of a slice, and its further arguments for a tensor of so many columns instead of its own.

    Raises:
        NotByRows: it takes some of the columns.
    """
    source, *rest = _positional(node)
    before, after = source.meta["val"].shape, node.meta["val"].shape
    of_their_own = before[-1:] == (columns,)
    last = after[-1] if of_their_own and after else columns
    if node.target in (aten.view.default, aten._unsafe_view.default):
        return aten.view.default, ([*after[:-1], last],)
    if node.target in COPIES:
        return aten.alias.default, ()
    if node.target in PADS:
        rest[0] = [*after[:-1], last]
    if node.target in (*_SLICES, *PADS) and not of_their_own:
        dim = rest[1] if node.target in PADS else rest[0] if rest else 0
        if dim % max(len(before), len(after)) == max(len(before), len(after)) - 1:
            raise NotByRows(f"{node.target} takes some of the columns")
    return node.target, tuple(rest)


def moved(node: fx.Node, numbers: Tensor) -> Tensor:
    """What a view, or the gradient of a slice, makes of `numbers`, which have one column where what it moves has more."""
    target, rest = moving(node, numbers.shape[-1] if numbers.dim() else 1)
    made: Tensor = numbers.reshape(*rest) if target is aten.view.default else target(numbers, *rest)
    return made


def moved_back(node: fx.Node, columns: int) -> tuple[Any, tuple[Any, ...]]:
    """The operator, and its further arguments, that puts rows of so many columns where they were before the view `node`; zeros where no row was."""
    source, *rest = node.args
    shape = [*source.meta["val"].shape[:-1], columns]  # type: ignore[union-attr]
    if node.target in _SLICES:
        if node.target is aten.slice.Tensor:
            given = arguments(node)
            end = sys.maxsize if given["end"] is None else given["end"]
            rest = [given["dim"], given["start"] or 0, end, given["step"]]
        return _SLICES[node.target], (shape, *rest)
    if node.target is aten.permute.default:
        order: Any = rest[0]
        return aten.permute.default, ([order.index(dim) for dim in range(len(order))],)
    if node.target in TURNS:
        return node.target, tuple(rest)
    return aten.view.default, (shape,)


def wide_enough(dtype: torch.dtype) -> torch.dtype:
    """The type that values of this one are added up in."""
    return torch.promote_types(dtype, torch.float32)


def descendants(nodes: Sequence[fx.Node], but: fx.Node | None = None) -> set[fx.Node]:
    """`nodes` and all that are made of them in other ways than through `but`."""
    found = set(nodes)
    for node in nodes[0].graph.nodes if nodes else ():
        if node is not but and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def is_zero(value: Any) -> bool:
    """Whether a value is known to be zero."""
    if not isinstance(value, fx.Node):
        return isinstance(value, int | float) and value == 0
    numbers = (aten.full.default, aten.scalar_tensor.default)
    return value.target in ZEROS or (value.target in numbers and bool(value.args[-1] == 0))


def is_elementwise(target: Any) -> bool:
    """Whether an operator makes each element of one element of each operand, by itself and not at random."""
    if target is aten._to_copy.default:
        return True
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    return torch.Tag.pointwise in target.tags and target not in SCATTERS and len(target._schema.returns) == 1


def _positional(node: fx.Node) -> list[Any]:
    return [*node.args]


def narrow(value: Value, columns: int | None) -> Value:
    """A value of the same rows and another number of columns."""
    return Value(value.node, value.rows, columns, value.path)


def same_rows(first: Value | None, second: Value | None) -> bool:
    if first is None or second is None:
        return first is second
    return torch.equal(first.rows, second.rows)


def last_size(node: Any) -> int | None:
    """The size of a node's last dimension."""
    return node.meta["val"].shape[-1] if isinstance(node, fx.Node) and node.meta["val"].dim() else None
