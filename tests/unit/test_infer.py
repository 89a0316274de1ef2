"""What a result is said to look like is what it looks like, and finding out loads nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusepass.patterns.infer import infer
from tests.support.aten import traced

aten = torch.ops.aten

X = torch.randn(2, 3, 4, 5)
LAST = X.to(memory_format=torch.channels_last)
CONVOLUTION = ([1, 2], [1, 0], [2, 1], False, [0, 0], 1)
TRANSPOSED = ([2, 1], [1, 0], [1, 2], True, [1, 0], 3)

CALLS: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.exp.default, (X,)),
    (aten.exp.default, (LAST,)),
    (aten.exp.default, (X.transpose(0, 3),)),
    (aten.exp.default, (X[:, :, ::2],)),
    (aten.exp.default, (torch.randn(4, 1, 3).transpose(0, 1),)),
    (aten.exp.default, (torch.randn(()),)),
    (aten.exp.default, (torch.arange(3),)),
    (aten.mul.Tensor, (X, 2.0)),
    (aten.mul.Tensor, (LAST, torch.tensor(2.0))),
    (aten.mul.Tensor, (X, X.double())),
    (aten.mul.Tensor, (X, torch.randn(3, 1, 1))),
    (aten.mul.Tensor, (torch.randn(4, 1), torch.randn(1, 8))),
    (aten.mul.Tensor, (torch.randn(8), torch.randn(3, 1, 1))),
    (aten.mul.Tensor, (X, LAST)),
    (aten.mul.Tensor, (LAST, LAST)),
    (aten.mul.Tensor, (X[0, 0].t(), torch.randn(4))),
    (aten.mul.Tensor, (torch.randn(4), X[0, 0].t())),
    (aten.mul.Tensor, (X[:, :, :1], LAST)),
    (aten.mul.Tensor, (torch.randn(3, 1).expand(3, 4), torch.randn(3, 1, 4).transpose(0, 1))),
    (aten.gt.Tensor, (X, X)),
    (aten.where.self, (X > 0, X, 2 * X)),
    (aten.logical_not.default, (LAST > 0,)),
    (aten.masked_fill.Scalar, (X, X > 0, 2.0)),
    (aten.masked_fill.Scalar, (LAST, X[:1, :, :, :1] > 0, 2.0)),
    (aten.masked_fill.Scalar, (torch.zeros(1, 1), torch.rand(4, 1, 3).transpose(0, 1) > 0.5, -torch.inf)),
    (aten.clamp.default, (LAST, 0, 1)),
    (aten.sum.dim_IntList, (X, [1, -1])),
    (aten.sum.dim_IntList, (X, [1, -1], True)),
    (aten.sum.default, (X,)),
    (aten.sum.dim_IntList, (torch.arange(3), [0])),
    (aten.amax.default, (LAST, [1], True)),
    (aten.amax.default, (LAST, [1])),
    (aten.mean.dim, (X.transpose(0, 1), [2])),
    (aten.mean.dim, (X, [2], False)),
    (aten.logsumexp.default, (X, [3])),
    (aten.mm.default, (X[0, 0], X[0, 0].t())),
    (aten.bmm.default, (X[0], X[0].mT)),
    (aten.mv.default, (X[0, 0], X[0, 0, 0])),
    (aten.addmm.default, (X[0, 0, 0, :4], X[0, 0], X[0, 0].t())),
    (aten.convolution.default, (X, torch.randn(6, 3, 3, 2), None, *CONVOLUTION)),
    (aten.convolution.default, (X, torch.randn(3, 2, 2, 2), torch.randn(6), *TRANSPOSED)),
    (aten.convolution.default, (X[:, :1].contiguous(), torch.randn(6, 1, 1, 1), None, *CONVOLUTION)),
    (aten.avg_pool2d.default, (X, [2, 2])),
    (aten.avg_pool2d.default, (X, [3, 2], [2, 1], [1, 0])),
    (aten.avg_pool2d.default, (LAST, [2, 2])),
    (aten.avg_pool3d.default, (X, [1, 2, 2], [])),
    (aten.max_pool2d_with_indices.default, (X, [2, 2])),
    (aten.view.default, (X, [6, 20])),
    (aten.view.default, (X, [6, -1, 1])),
    (aten.view.default, (X[:1, :1, :1, :1].clone(), [])),
    (aten.view.default, (torch.randn(()), [1, -1])),
    (aten.view.default, (torch.randn(0, 3), [-1, 1, 3])),
    (aten.view.default, (X[1:], [12, 5])),
    (aten.view.default, (X[:, :, :2], [6, 10])),
    (aten.view.default, (LAST, [2, 3, 2, 2, 5])),
    (aten.permute.default, (LAST, [0, -1, 1, 2])),
    (aten.permute.default, (X[1:], [3, 2, 1, 0])),
    (aten.permute.default, (torch.randn(()), [])),
    (aten.expand.default, (X[:, :1], [2, 3, 4, 5])),
    (aten.clone.default, (LAST,)),
]


def nodes(arguments: tuple[Any, ...], function: Callable[..., Any]) -> tuple[Any, ...]:
    """`arguments` with graph inputs for tensors."""
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    placeholders = iter(traced(function, *tensors).graph.find_nodes(op="placeholder"))
    return tuple(next(placeholders) if isinstance(argument, Tensor) else argument for argument in arguments)


@pytest.mark.parametrize(("target", "arguments"), CALLS)
def test_it_is_what_the_operator_gives(target: Any, arguments: tuple[Any, ...]) -> None:
    wanted = target(*arguments)
    found = infer(target, nodes(arguments, lambda *tensors: tensors[0].clone()), {}, torch.device("cpu"))
    for one, other in zip(
        *((value if isinstance(value, tuple) else (value,)) for value in (found, wanted)), strict=True
    ):
        assert (one.shape, one.stride(), one.dtype, one.device) == (
            other.shape, other.stride(), other.dtype, other.device,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("target", "arguments"),
    [
        (aten.mul.Tensor, (X, X[0, 0, 0, :3])),
        (aten.mm.default, (X[0, 0], X[0, 0])),
        (aten.sum.dim_IntList, (X, [7])),
        (aten.view.default, (X, [7, -1])),
        (aten.view.default, (X, [-1, -1])),
        (aten.view.default, (X[0, 0, 0, :1], [0])),
        (aten.view.default, (LAST, [120])),
        (aten.permute.default, (X, [0, 1, 2, 2])),
        (aten.permute.default, (X, [0, 1, 2, 4])),
        (aten.convolution.default, (LAST, torch.randn(6, 3, 3, 2), None, *CONVOLUTION)),
    ],
)
def test_what_the_operator_does_not_take_raises(target: Any, arguments: tuple[Any, ...]) -> None:
    with pytest.raises((RuntimeError, IndexError)):
        infer(target, nodes(arguments, lambda *tensors: tensors[0].clone()), {}, torch.device("cpu"))


@pytest.mark.parametrize("tensor", [X, LAST, X[:, :1], X[..., :1], X.transpose(2, 3), X[:, :1, :1], LAST[:, :, :1]])
@pytest.mark.parametrize("dim", [1, -2])
def test_parts_behind_each_other(tensor: Tensor, dim: int) -> None:
    parts = [tensor, tensor.narrow(dim, 0, 1)]
    nodes = traced(lambda *tensors: tensors[0].clone(), *parts).graph.find_nodes(op="placeholder")
    found = infer(aten.cat.default, (list(nodes), dim), {}, torch.device("cpu"))
    wanted = torch.cat(parts, dim)
    assert (found.shape, found.stride()) == (wanted.shape, wanted.stride())


def test_a_tensor_filled_with_a_number() -> None:
    found = infer(aten.full.default, ([3, 1, 2], 1.0), {"dtype": torch.half}, torch.device("cpu"))
    wanted = torch.full([3, 1, 2], 1.0, dtype=torch.half)
    assert (found.shape, found.stride(), found.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)


def test_nothing_slow_is_loaded() -> None:
    program = """
import sys, torch
from torch import fx
from fusepass.codegen.lowering.tracer import Spec
from fusepass.patterns.infer import infer
aten, graph, cpu = torch.ops.aten, fx.Graph(), torch.device("cpu")
def node(*shape):
    made = graph.placeholder("x")
    made.meta["val"] = Spec.of(torch.empty(shape))
    return made
x, weight = node(2, 3, 8, 8), node(4, 3, 3, 3)
infer(aten.convolution.default, (x, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1), {}, cpu)
infer(aten.mul.Tensor, (x, 2.0), {}, cpu)
infer(aten.sum.dim_IntList, (x, [1, 2]), {}, cpu)
infer(aten.addmm.default, (node(7), node(3, 4), node(4, 7)), {}, cpu)
infer(aten.view.default, (x, [6, 64]), {}, cpu)
infer(aten.cat.default, ([x, x], 1), {}, cpu)
infer(aten.slice.Tensor, (x, 1, 0, 2), {}, cpu)
infer(aten.permute.default, (x, [0, 2, 1, 3]), {}, cpu)
infer(aten.constant_pad_nd.default, (x, [1, 0]), {}, cpu)
infer(aten.avg_pool2d.default, (x, [2, 2]), {}, cpu)
infer(aten.expand.default, (node(1, 3), [4, 3]), {}, cpu)
mask = node(3, 1)
mask.meta["val"] = Spec.of(torch.empty(3, 1, dtype=torch.bool))
infer(aten.full.default, ([1, 1], 0.0), {"dtype": torch.half, "device": cpu}, cpu)
infer(aten.logical_not.default, (mask,), {}, cpu)
infer(aten.masked_fill.Scalar, (node(1, 3), mask, 2.0), {}, cpu)
print(sorted({name.partition(".")[0] for name in sys.modules} & {"sympy"}), "torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "False"]
