"""What a graph makes of each row of a matrix product, as a graph of its own that takes some of the rows.

Operators are followed from the values that are asked for back to the product. Each is either a function of rows, such as a softmax, or a view
that moves whole rows, such as a shift by one token; views are followed by applying them to the numbers of the rows. The step computes all rows of
the product, also those that a slice leaves out: their results are not used and their gradients are zeros, as in the original.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from fusepass.codegen.lowering.tracer import Spec
from fusepass.compile.row_values import (
    COPIES,
    LOSS,
    PADS,
    SCATTERS,
    TOTALS,
    VIEWS,
    ZEROS,
    Given,
    NotByRows,
    Value,
    descendants,
    is_elementwise,
    is_zero,
    last_size,
    moved,
    narrow,
    same_rows,
    wide_enough,
)
from fusepass.patterns.arguments import arguments
from fusepass.patterns.infer import called, contiguous_strides

aten = torch.ops.aten

_OF_LOSS = aten.nll_loss_backward.default
_PLACES = frozenset({aten.argmax.default, aten.argmin.default})
_REDUCTIONS = _PLACES | {
    aten.amax.default,
    aten.amin.default,
    aten.sum.dim_IntList,
    aten.mean.dim,
    aten.logsumexp.default,
}
_OF_SOFTMAX = frozenset({aten._softmax_backward_data.default, aten._log_softmax_backward_data.default})


class Step:
    """The graph of a step, which grows as values are asked for.

    Args:
        product: a matrix product of the original graph, ``[rows, columns]``.
        factor: what is taken as given, and what is made of it as well where that needs nothing else of the product.
        instead: nodes of the original graph that are made of the product, and others that give the same and are not.

    Attributes:
        graph: for any number of rows; its nodes are described for all.
        given: what it takes besides the product.
        classes: arguments that hold columns of the product: what is allowed there, and one number more.
    """

    def __init__(self, product: fx.Node, factor: fx.Node | None, instead: dict[fx.Node, fx.Node]) -> None:
        value = product.meta["val"]
        self.count, self.width = value.shape
        self.graph = fx.Graph()
        self.given: list[Given] = []
        self.classes: dict[fx.Node, tuple[range, int | None]] = {}
        self._instead = instead
        self._device = value.device
        self._order = torch.arange(self.count)
        self._inside = descendants([product], but=factor)
        self._arguments: list[fx.Node] = []
        self.product = self._argument("product", (self.count, self.width), value.dtype, by_rows=True)
        self._values = {product: Value(self.product, self._order, self.width)}
        self._positions: fx.Node | None = None
        self._picked: dict[tuple[fx.Node, fx.Node], fx.Node] = {}
        self._casts: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
        self._powers: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}  # of a log_softmax: the exponentials and their sum

    @property
    def arguments(self) -> tuple[fx.Node, ...]:
        """The placeholders of what is `given`."""
        return tuple(self._arguments[1:])

    def of(self, node: fx.Node, like: Value | None = None) -> Value:
        """The value of a node; one that is not made of the product has the rows of `like`.

        Raises:
            NotByRows: a row of it is not made of one row of the product.
        """
        if node not in self._values:
            self._values[node] = self._made(node, like)
        return self._values[node]

    def gradient(self, node: fx.Node) -> fx.Node:
        """The value of a node, all rows of the product in their order.

        Raises:
            NotByRows: as `of`.
        """
        value = self.of(node)
        if value.columns != self.width or not self.is_whole(value):
            raise NotByRows(f"{node.name} has not the rows of the product")
        return self._cast(self._widened(value), node.meta["val"].dtype)

    def is_whole(self, value: Value) -> bool:
        """Whether a value has all rows of the product, in their order."""
        return torch.equal(value.rows.flatten(), self._order)

    def single(self, value: Value) -> fx.Node:
        """A value of one column, or none, as ``[rows]``."""
        return value.node if value.columns is None else self._call(aten.squeeze.dim, value.node, 1)

    def reduced(self, node: fx.Node) -> Value:
        """What a reduction makes of each row; of `TOTALS` and `LOSS`, what they add up.

        Raises:
            NotByRows: as `of`.
        """
        if node.target is LOSS:
            return self._losses(node)
        if node.target not in TOTALS:
            return self.of(node)
        x = self.of(node.args[0])  # type: ignore[arg-type]
        if x.columns != self.width:
            raise NotByRows(f"{node.target} joins rows")
        made = self._sum(replace(x, node=self._cast(x.node, wide_enough(node.meta["val"].dtype))))
        return Value(self._call(aten.squeeze.dim, made, 1), x.rows, None, x.path)

    def _losses(self, loss: fx.Node) -> Value:
        """The loss of each row, zero where it is ignored."""
        given = arguments(loss)
        x = self.of(given["self"])
        if x.rows.dim() != 1:
            raise NotByRows("it has a loss of a single row")
        at, weight = self._at(given, x)
        made = self._call(aten.neg.default, self._pick(x.node, at))
        if weight is not None:
            made = self._call(aten.mul.Tensor, made, weight)
        made = self._call(aten.where.self, self._call(aten.ge.Scalar, at, 0), made, self._number(0, made))
        return Value(self._call(aten.squeeze.dim, made, 1), x.rows, None, x.path)

    def _made(self, node: fx.Node, like: Value | None) -> Value:
        target = node.target
        if node.op != "call_function":
            raise NotByRows(f"{node.name} is no operator")
        if target is operator.getitem and node.args[0].target is LOSS and node.args[1] == 0:  # type: ignore[union-attr]
            loss: Any = node.args[0]
            if arguments(loss)["reduction"] != 0:
                raise NotByRows("a gradient depends on the sum of all losses")
            return self._losses(loss)
        if not isinstance(target, OpOverload):
            call = node.args[0].target if target is operator.getitem else target  # type: ignore[union-attr]
            raise NotByRows(f"{call} is not computed row by row")
        given = arguments(node)
        if target in VIEWS:
            return self._viewed(node)
        if target in PADS:
            return self._padded(node)
        if target in ZEROS and like is not None:
            return Value(self._number(0, node), like.rows, like.columns, like.path)
        if target in _REDUCTIONS:
            return self._reduced(node, given)
        if target is aten._log_softmax.default:
            x = self._along(node, given["self"], given["dim"])
            return Value(self._log_softmax(x.node), x.rows, x.columns, x.path)
        if target is aten._softmax.default:
            x = self._along(node, given["self"], given["dim"])
            return Value(self._call(target, x.node, 1, given["half_to_float"]), x.rows, x.columns, x.path)
        if target in _OF_SOFTMAX:
            return self._of_softmax(node, given)
        if target is _OF_LOSS:
            return self._of_losses(given)
        if target is aten.gather.default:
            x = self._along(node, given["self"], given["dim"])
            return Value(self._pick(x.node, self._column(given["index"], x)), x.rows, 1, x.path)
        if target is aten.index.Tensor:
            x = self.of(given["self"])
            picked = self._pick(x.node, self._column_of_row(given["indices"], x))
            return Value(self._call(aten.squeeze.dim, picked, 1), x.rows, None, x.path)
        if target in SCATTERS:
            return self._scattered(node, given, like)
        if is_elementwise(target):
            return self._elementwise(node, like)
        raise NotByRows(f"{target} is not computed row by row")

    def _viewed(self, node: fx.Node) -> Value:
        source = self.of(node.args[0])  # type: ignore[arg-type]
        if source.columns == self.width:
            rows = moved(node, source.rows.unsqueeze(-1))
            if rows.shape[-1:] != (1,) or node.meta["val"].shape[-1] != self.width:
                raise NotByRows(f"{node.target} moves columns")
            path = source.path if node.target in COPIES else (*source.path, node)
            return Value(source.node, rows.squeeze(-1), self.width, path, source.picked)
        rows = moved(node, source.rows if source.columns is None else source.rows.unsqueeze(-1))
        if not torch.equal(rows.flatten(), source.rows.flatten()):
            raise NotByRows(f"{node.target} moves rows behind a reduction")
        single = self.single(source)
        if rows.dim() > 1 and rows.shape[-1] == 1:
            return Value(self._call(aten.unsqueeze.default, single, 1), rows.squeeze(-1), 1, source.path)
        return Value(single, rows, None, source.path)

    def _padded(self, node: fx.Node) -> Value:
        """Zeros in the rows that a slice left out."""
        source = self.of(node.args[0])  # type: ignore[arg-type]
        if source.columns != self.width or node.meta["val"].shape[-1] != self.width:
            raise NotByRows(f"{node.target} pads something else than rows")
        rows = (moved(node, source.rows.unsqueeze(-1) + 1) - 1).squeeze(-1)
        here = self._order.view(rows.shape) if rows.numel() == self.count else rows
        if not torch.equal(torch.where(rows < 0, here, rows), here):
            raise NotByRows(f"{node.target} puts rows where they were not")
        used = self._call(aten.ne.Scalar, self._input(Given(None, source, 1)), 0)
        made = self._call(aten.where.self, used, source.node, self._number(0, source.node))
        return Value(made, here, source.columns)

    def _along(self, node: fx.Node, source: fx.Node, dims: int | Sequence[int] | None) -> Value:
        """The value of `source`, of which `node` makes something along `dims`, which must be its columns."""
        value, rank = self.of(source), source.meta["val"].dim()
        asked = [dims] if isinstance(dims, int) else dims
        if value.columns != self.width or not asked or [dim % rank for dim in asked] != [rank - 1]:
            raise NotByRows(f"{node.target} joins rows")
        return replace(value, node=self._widened(value))

    def _widened(self, value: Value) -> fx.Node:
        """A value with all of its columns, where it was made of values of one."""
        rows, columns = value.node.meta["val"].shape
        if rows != self.count:
            raise NotByRows("it is the same in all rows")
        return value.node if columns == self.width else self._call(aten.expand.default, value.node, [-1, self.width])

    def _reduced(self, node: fx.Node, given: dict[str, Any]) -> Value:
        x = self._along(node, given["self"], given["dim"])
        options = {"dtype": given["dtype"]} if given.get("dtype") is not None else {}
        if node.target is aten.sum.dim_IntList and not options:
            made = self._sum(x)
        else:
            made = self._call(node.target, x.node, 1 if node.target in _PLACES else [1], True, **options)
        if given["keepdim"]:
            return Value(made, x.rows, 1, x.path)
        return Value(self._call(aten.squeeze.dim, made, 1), x.rows, None, x.path)

    def _sum(self, x: Value) -> fx.Node:
        """The sum of each row, ``[rows, 1]``."""
        if x.picked is None:
            return self._call(aten.sum.dim_IntList, self._widened(x), [1], True)
        at, number = x.picked
        return self._call(aten.where.self, self._call(aten.ge.Scalar, at, 0), number, self._number(0, number))

    def _of_softmax(self, node: fx.Node, given: dict[str, Any]) -> Value:
        y = self._along(node, given["output"], given["dim"])
        gradient = self._operand(given["grad_output"], y)
        x = self._values.get(given["grad_output"]) or Value(gradient, y.rows, y.columns)
        if node.target is aten._softmax_backward_data.default:
            weighted = self._call(aten.mul.Tensor, self._widened(x), y.node)
            total = self._call(aten.sum.dim_IntList, weighted, [1], True)
            made = self._call(aten.sub.Tensor, weighted, self._call(aten.mul.Tensor, y.node, total))
        else:
            made = self._of_log_softmax(x, y.node)
        return Value(made, y.rows, y.columns, y.path)

    def _of_log_softmax(self, x: Value, y: fx.Node) -> fx.Node:
        """``x - exp(y) * sum(x)``.

        Where `x` has one number a row, the difference is taken there alone: an exponential that is only multiplied needs few digits.
        """
        power, total = self._powers.get(y, (None, None))
        share = self._sum(x)
        if power is None:
            power = self._call(aten.exp.default, y)
        else:
            share = self._call(aten.div.Tensor, share, total)
        if x.picked is None:
            return self._call(aten.sub.Tensor, self._widened(x), self._call(aten.mul.Tensor, power, share))
        at, number = x.picked
        there = self._call(aten.sub.Tensor, number, self._call(aten.mul.Tensor, self._pick(power, at), share))
        elsewhere = self._call(aten.mul.Tensor, power, self._call(aten.neg.default, share))
        return self._call(aten.where.self, self._call(aten.eq.Tensor, self._columns(), at), there, elsewhere)

    def _of_losses(self, given: dict[str, Any]) -> Value:
        x = self.of(given["self"])
        at, weight = self._at(given, x)
        if given["reduction"] == 0:
            gradient = self._call(aten.unsqueeze.default, self._operand(given["grad_output"], narrow(x, None)), 1)
        else:
            gradient = self._operand(given["grad_output"], narrow(x, 1))
        if given["reduction"] == 1:
            gradient = self._call(aten.div.Tensor, gradient, self._operand(given["total_weight"], narrow(x, 1)))
        if weight is not None:
            gradient = self._call(aten.mul.Tensor, gradient, weight)
        return self._one_hot(at, self._call(aten.neg.default, gradient), x)

    def _at(self, given: dict[str, Any], x: Value) -> tuple[fx.Node, fx.Node | None]:
        """The class of each row, less than zero where it is ignored, and its weight, both ``[rows, 1]``."""
        target, ignored = self._operand(given["target"], narrow(x, None)), given["ignore_index"]
        self.classes[target] = range(self.width), ignored
        column = self._call(aten.unsqueeze.default, target, 1)
        no = self._call(aten.eq.Scalar, column, ignored)
        at = self._cast(self._call(aten.where.self, no, self._number(-1, column), column), torch.int32)
        if given["weight"] is None:
            return at, None
        return at, self._pick(self._operand(given["weight"], x), at)

    def _log_softmax(self, x: fx.Node) -> fx.Node:
        """Written out, so that what it has in one column of a row is that of `x` there and statistics of the row."""
        x = self._cast(x, wide_enough(x.meta["val"].dtype))
        below = self._call(aten.sub.Tensor, x, self._call(aten.amax.default, x, [1], True))
        power = self._call(aten.exp.default, below)
        total = self._call(aten.sum.dim_IntList, power, [1], True)
        made = self._call(aten.sub.Tensor, below, self._call(aten.log.default, total))
        self._powers[made] = power, total
        return made

    def _pick(self, table: Any, at: fx.Node) -> Any:
        """What a value has in the column `at` of each row; zero, or a function of zeros, where that is less than zero.

        Functions of elements are applied to what is picked. That is a sum, in which each element is read once and in order: so a kernel may
        write over the row.
        """
        if not isinstance(table, fx.Node) or table.meta["val"].shape[-1:] != (self.width,):
            return table
        if table is self._positions:
            return at
        if table.target is aten.expand.default:
            return table.args[0]
        if (table, at) not in self._picked:
            if is_elementwise(table.target):
                args, kwargs = fx.map_arg((table.args, table.kwargs), lambda each: self._pick(each, at))
                picked = self._call(table.target, *args, **kwargs)
            else:
                here = self._call(aten.eq.Tensor, self._columns(), at)
                chosen = self._call(aten.where.self, here, table, self._number(0, table))
                picked = self._call(aten.sum.dim_IntList, chosen, [1], True)
            self._picked[table, at] = picked
        return self._picked[table, at]

    def _one_hot(self, at: fx.Node, number: fx.Node, like: Value) -> Value:
        here = self._call(aten.eq.Tensor, self._columns(), at)
        made = self._call(aten.where.self, here, number, self._number(0, number))
        return Value(made, like.rows, like.columns, like.path, (at, number))

    def _column(self, index: fx.Node, x: Value) -> fx.Node:
        """The one column of each row that a gather takes, ``[rows, 1]``."""
        if index.meta["val"].shape != (*x.rows.shape, 1):
            raise NotByRows("several columns of a row are chosen")
        at = self._operand(index, narrow(x, 1))
        self.classes[at] = range(self.width), None
        return self._cast(at, torch.int32)

    def _column_of_row(self, indices: Sequence[fx.Node | None], x: Value) -> fx.Node:
        """As `_column` of ``x[arange(rows), index]``, where an index may count from the end."""
        first, index = indices if len(indices) == 2 else (None, None)
        rows = first is not None and first.target is aten.arange.default and first.args[0] == len(x.rows)
        if not rows or index is None or x.rows.dim() != 1 or index.meta["val"].shape != x.rows.shape:
            raise NotByRows("rows are chosen by an index")
        given = self._operand(index, narrow(x, None))
        self.classes[given] = range(-self.width, self.width), None
        column = self._call(aten.unsqueeze.default, given, 1)
        from_end = self._call(aten.add.Tensor, column, self.width)
        return self._cast(
            self._call(aten.where.self, self._call(aten.lt.Scalar, column, 0), from_end, column), torch.int32
        )

    def _scattered(self, node: fx.Node, given: dict[str, Any], like: Value | None) -> Value:
        """One number a row among zeros."""
        rank = node.meta["val"].dim()
        if like is None or not is_zero(given["self"]) or given.get("dim", -1) % rank != rank - 1:
            raise NotByRows(f"{node.target} moves rows")
        if node.target is aten.index_put.default:
            at = self._column_of_row(given["indices"], like)
            number = self._operand(given["values"], narrow(like, None))
            shape = number.meta["val"].shape
            return self._one_hot(at, self._call(aten.unsqueeze.default, number, 1) if len(shape) else number, like)
        at = self._column(given["index"], like)
        source = given["src"] if "src" in given else given["value"]
        number = self._operand(source, narrow(like, 1)) if isinstance(source, fx.Node) else self._number(source, node)
        return self._one_hot(at, number, like)

    def _elementwise(self, node: fx.Node, like: Value | None) -> Value:
        shape = tuple(node.meta["val"].shape)
        made = [self.of(each) for each in node.all_input_nodes if each in self._inside and each not in self._instead]
        like = next((value for value in made if value.columns == self.width), made[0] if made else like)
        if like is None:
            raise NotByRows(f"{node.name} is made of no row")
        like = like if like.columns is None else narrow(like, shape[-1])
        if shape != (*like.rows.shape, *([] if like.columns is None else [like.columns])):
            raise NotByRows(f"{node.target} joins rows")
        operands: Any = fx.map_arg((node.args, node.kwargs), lambda each: self._operand(each, like))
        args, kwargs = operands
        copies = node.target is aten._to_copy.default
        result = args[0] if copies else self._call(node.target, *args, **kwargs)
        found, wanted = result.meta["val"].dtype, node.meta["val"].dtype
        if copies or torch.promote_types(found, wanted) is not found:  # else it has more digits
            result = self._cast(result, wanted)
        return Value(result, like.rows, like.columns, like.path)

    def _operand(self, node: fx.Node, like: Value) -> fx.Node:
        """What stands for `node` beside a value like this."""
        node = self._instead.get(node, node)
        known = self.of(node) if node in self._inside else self._values.get(node)
        if known is not None:
            if (known.columns is None) != (like.columns is None) or not torch.equal(known.rows, like.rows):
                raise NotByRows("it joins different rows")
            return known.node
        wide = like.columns == self.width
        while wide and node.target is aten.expand.default and last_size(node.args[0]) == 1:
            node = node.args[0]  # type: ignore[assignment]
        shape = tuple(node.meta["val"].shape)
        if node.meta["val"].numel() == 1:
            return self._input(Given(node, None, 1 if shape else None))  # types of no dimension give way to others
        if like.columns is None:
            return self._input(Given(node, like, None))
        if node.meta["val"].numel() == shape[-1]:
            return self._input(Given(node, None, shape[-1]))
        if wide and shape[-1] == self.width and (node.target in ZEROS | SCATTERS or is_elementwise(node.target)):
            return self.of(node, like).node
        return self._input(Given(node, like, shape[-1]))

    def _input(self, given: Given) -> fx.Node:
        for other, argument in zip(self.given, self.arguments, strict=True):
            if (other.node, other.columns) == (given.node, given.columns) and same_rows(other.like, given.like):
                return argument
        dtype = torch.int64 if given.node is None else given.node.meta["val"].dtype
        last = () if given.columns is None else (given.columns,)
        by_rows = given.like is not None
        self.given.append(given)
        return self._argument(
            f"given_{len(self.given)}", (self.count, *last) if by_rows else last, dtype, by_rows=by_rows
        )

    def _argument(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, by_rows: bool) -> fx.Node:
        with self.graph.inserting_after(self._arguments[-1]) if self._arguments else self.graph.inserting_before():
            made = self.graph.placeholder(name)
        made.meta.update(val=Spec.described(shape, contiguous_strides(shape), dtype, self._device), by_rows=by_rows)
        self._arguments.append(made)
        return made

    def _columns(self) -> fx.Node:
        if self._positions is None:
            self._positions = self._call(aten.arange.default, self.width, dtype=torch.int32, device=self._device)
        return self._positions

    def _number(self, number: float, like: fx.Node) -> fx.Node:
        """A number of the type of `like`."""
        return self._call(aten.full.default, [1, 1], number, dtype=like.meta["val"].dtype, device=self._device)

    def _cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        if node.meta["val"].dtype is dtype:
            return node
        if (node, dtype) not in self._casts:
            self._casts[node, dtype] = self._call(aten._to_copy.default, node, dtype=dtype)
        return self._casts[node, dtype]

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return called(self.graph, target, args, kwargs, self._device)
