"""A matrix product and what is made of its rows, some rows at a time: the product is never whole in memory.

Of each chunk the library makes the product, a compiled step what rows give, and over the product its gradient; then the library adds that to what
is made of the gradients of all rows. So a chunk has one buffer, of which each element is read once and written once by the step's kernel. Where
no step is compiled, as where somebody traces the call, all rows are one chunk, and nothing is written.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from fusepass.compile.row_values import described, pitch

aten = torch.ops.aten

Run = Callable[..., tuple[Tensor, ...]]
FEW = 4
"""Chunks whose sums may be rounded to 16 bits each time that one is added: twice the error of one rounding at most, beside that of the gradients
themselves. More are added up in float32."""


class Made(enum.Enum):
    """What is made of the gradient of the product."""

    ROWS = "gradient @ operand"  # [rows, n], a part in each chunk
    LEFT = "gradient.T @ operand"  # [columns, n], a sum over chunks, as the others
    RIGHT = "operand.T @ gradient"  # [n, columns]
    SUM = "gradient.sum(0)"  # [columns]

    @property
    def by_rows(self) -> bool:
        """Whether a row of the result is made of one row of the gradient."""
        return self is Made.ROWS


@dataclass(frozen=True)
class Gradient:
    """What is made of the gradient and, but for a sum, of the argument `operand` of the call."""

    made: Made
    operand: int | None


@dataclass(frozen=True)
class Classes:
    """An argument of the call that holds columns of the product: each must be `allowed`, or `ignored`."""

    argument: int
    allowed: range
    ignored: int | None

    def check(self, columns: Tensor) -> None:
        """Raise on a CPU, and on a GPU end the context, as eager does, where one is not."""
        inside = (columns >= self.allowed.start) & (columns < self.allowed.stop)
        if self.ignored is not None:
            inside |= columns == self.ignored
        torch._assert_async(inside.all(), f"a class is out of bounds: there are {self.allowed.stop}")


@dataclass(frozen=True, eq=False)
class Chunked:
    """Called with ``x``, ``weight``, a bias or None, what the step takes beside their product, and further operands of `gradients`; gives the
    step's results for all rows, then what is made of gradients.

    Attributes:
        step: takes the product and gives what rows give, then the gradient, if anything is made of it.
        rows: of a chunk; the last may have fewer.
        by_rows: for each argument of the step besides the product, whether it has a row for each of the product's.
        gradients: what is made of what the step writes over the product.
        classes: arguments that are checked.
        runs: what computes the step, by the number of rows; it writes the gradient over the product.
    """

    step: fx.GraphModule
    rows: int
    by_rows: tuple[bool, ...]
    gradients: tuple[Gradient, ...]
    classes: tuple[Classes, ...]
    runs: tuple[tuple[int, Run], ...] = ()

    __name__ = "in_chunks"

    def __str__(self) -> str:
        return self.__name__

    def sizes(self, count: int) -> list[int]:
        """The different sizes of the chunks of so many rows."""
        return sorted({self.rows, count % self.rows or self.rows}, reverse=True)

    def compiled(self, count: int, compile_step: Callable[[fx.GraphModule], Run]) -> Chunked:
        """This for so many rows, with compiled steps."""
        writes = bool(self.gradients)
        steps = [(size, described(self.step.graph, size, writes=writes)) for size in self.sizes(count)]
        return replace(self, runs=tuple((size, compile_step(step)) for size, step in steps))

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, *others: Tensor) -> tuple[Tensor, ...]:
        arguments: tuple[Any, ...] = (x, weight, bias, *others)
        for each in self.classes:
            each.check(arguments[each.argument])
        if not self.runs:
            return self._whole(*arguments)
        count, width = x.shape[0], weight.shape[1]
        buffer = x.new_empty((min(self.rows, count), pitch(width, x.dtype)))[:, :width]
        runs, results, sums = dict(self.runs), list[Tensor](), list[Tensor]()
        for start in range(0, count, self.rows):
            part = slice(start, min(start + self.rows, count))
            given = [other[part] if by_rows else other for other, by_rows in zip(others, self.by_rows, strict=False)]
            product = buffer[: part.stop - start]
            if bias is None:
                torch.mm(x[part], weight, out=product)
            else:
                torch.addmm(bias, x[part], weight, out=product)
            made = runs[len(product)](product, *given)
            if not start:
                results = [each.new_empty((count, *each.shape[1:])) for each in made]
                sums = [self._room(each, product, arguments, count) for each in self.gradients]
            for whole, rows in zip(results, made, strict=True):
                whole[part] = rows
            for whole, gradient in zip(sums, self.gradients, strict=True):
                operand = None if gradient.operand is None else arguments[gradient.operand]
                _add(whole, gradient.made, product, operand, part)
        del buffer, product
        return (*results, *(each if x.dtype is torch.float16 else each.to(x.dtype) for each in sums))

    def _whole(self, *arguments: Any) -> tuple[Tensor, ...]:
        x, weight, bias, *others = arguments
        product = x @ weight if bias is None else torch.addmm(bias, x, weight)
        results = [*self.step(product, *others[: len(self.by_rows)])]
        if not self.gradients:
            return tuple(results)
        gradient, sums = results.pop(), []
        for each in self.gradients:
            narrow = x.dtype is torch.float16 and not each.made.by_rows
            dtype = torch.float32 if narrow else x.dtype
            if each.operand is None:
                sums.append(gradient.sum(0, dtype=torch.promote_types(dtype, torch.float32)).to(dtype))
            else:
                left, right = _factors(each.made, gradient, arguments[each.operand])
                sums.append(left.to(dtype) @ right.to(dtype))
        return (*results, *sums)

    def _room(self, gradient: Gradient, product: Tensor, arguments: Sequence[Tensor | None], count: int) -> Tensor:
        width, operand = product.shape[1], None if gradient.operand is None else arguments[gradient.operand]
        wide = torch.promote_types(product.dtype, torch.float32)
        if operand is None:
            return product.new_empty(width, dtype=wide)
        if gradient.made.by_rows:
            return product.new_empty((count, operand.shape[1]))
        shape = (width, operand.shape[1]) if gradient.made is Made.LEFT else (operand.shape[1], width)
        few = product.dtype is torch.bfloat16 and -(-count // self.rows) <= FEW
        return product.new_empty(shape, dtype=product.dtype if few else wide)


def _add(whole: Tensor, made: Made, gradient: Tensor, operand: Tensor | None, part: slice) -> None:
    """Add to `whole` what is made of one chunk's `gradient`, or put it there where it is the first."""
    if operand is None:
        total = gradient.sum(0, dtype=whole.dtype)
        if part.start:
            whole.add_(total)
        else:
            whole.copy_(total)
    elif made.by_rows:
        torch.mm(gradient, operand, out=whole[part])
    else:
        _add_product(whole, *_factors(made, gradient, operand[part]), first=not part.start)


def _factors(made: Made, gradient: Tensor, operand: Tensor) -> tuple[Tensor, Tensor]:
    """What is multiplied."""
    if made is Made.RIGHT:
        return operand.t(), gradient
    return gradient.t() if made is Made.LEFT else gradient, operand


def _add_product(whole: Tensor, left: Tensor, right: Tensor, *, first: bool) -> None:
    if whole.dtype is left.dtype:
        if first:
            torch.mm(left, right, out=whole)
        else:
            whole.addmm_(left, right)
    elif whole.is_cuda:
        if first:
            aten.mm.dtype_out(left, right, whole.dtype, out=whole)
        else:
            aten.addmm.dtype_out(whole, left, right, whole.dtype, out=whole)
    else:
        product = left.to(whole.dtype) @ right.to(whole.dtype)
        if first:
            whole.copy_(product)
        else:
            whole.add_(product)


_is_kept: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph


@dataclass(frozen=True)
class Scaled:
    """Called with a tensor that nobody else has and a number; gives their product, rounded once.

    Attributes:
        in_place: write it over the tensor where backward runs for the last time. A CUDA graph of backward may be replayed for one that runs
            again, and gets memory of its own.
    """

    in_place: bool = False

    __name__ = "scaled"

    def __str__(self) -> str:
        return self.__name__

    def __call__(self, value: Tensor, factor: Tensor) -> Tensor:
        wide = factor.reshape((1,) * value.dim())  # so that it is not rounded to the type of the value
        if not self.in_place or _is_kept() or (value.is_cuda and torch.cuda.is_current_stream_capturing()):
            return (value * wide).to(value.dtype)
        if factor.dtype is value.dtype:  # at the rate of memory, which strides of zero keep the other from
            torch._foreach_mul_([value], factor)
        else:
            torch.mul(value, wide, out=value)
        return value.detach()


def compile_steps(graph: fx.Graph, compile_step: Callable[[fx.GraphModule], Run]) -> None:
    """Let the calls in chunks of a graph run compiled code, and those of `Scaled` run in place."""
    for node in graph.nodes:
        if isinstance(node.target, Chunked):
            node.target = node.target.compiled(node.args[0].meta["val"].shape[0], compile_step)
        elif isinstance(node.target, Scaled):
            node.target = Scaled(in_place=True)
