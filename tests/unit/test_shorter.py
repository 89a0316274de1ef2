"""Shorter calls end in the very overload that they stand for, with the same result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from fusepass.runtime.operators import SHORTER, shorten, shorter

aten = torch.ops.aten

X = torch.arange(24.0).reshape(2, 3, 4) - 11.5
M = torch.arange(12.0).reshape(3, 4)
IMAGE = torch.arange(50.0).reshape(1, 2, 5, 5) / 50
WEIGHT = torch.arange(36.0).reshape(2, 2, 3, 3) / 36
ONES = torch.ones(2)
Q = torch.arange(32.0).reshape(1, 2, 4, 4) / 32
META = torch.empty(1, 2, 8, 8, dtype=torch.float16, device="meta")
GEOMETRY = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)

CALLS: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (aten._convolution.default, (IMAGE, WEIGHT, None, *GEOMETRY, False, False, True, False), {}),
    (aten._foreach_add_.Scalar, ([X.clone(), M.clone()], 1), {}),
    (aten._foreach_copy_.default, ([X.clone(), M.clone()], [X + 1, M + 1]), {}),
    (aten._softmax.default, (X, -1, False), {}),
    (aten.add.Tensor, (X, M), {"alpha": 2}),
    (aten.add.Tensor, (X, 2.5), {}),
    (aten.add.Tensor, (X.long(), 2), {}),
    (aten.addmm.default, (ONES, X[:, 0], M.t()[:, :2]), {"beta": 0.5, "alpha": 2}),
    (aten.amax.default, (X, [0, 2], True), {}),
    (aten.amax.default, (X,), {}),
    (aten.baddbmm.default, (X.sum((1, 2), keepdim=True), X, X.mT), {}),
    (aten.bmm.default, (X, X.mT), {}),
    (aten.cat.default, ([X, X], 1), {}),
    (aten.clone.default, (IMAGE,), {"memory_format": torch.channels_last}),
    (aten.convolution.default, (IMAGE, WEIGHT, ONES, *GEOMETRY), {}),
    (aten.copy_.default, (X.clone(), M), {}),
    (aten.expand.default, (M, [2, 3, 4]), {}),
    (aten.expand.default, (M, [2, -1, 4]), {"implicit": True}),
    (aten._scaled_dot_product_efficient_attention.default, (META, META, META, None, True, 0.1, True), {}),
    (aten._scaled_dot_product_flash_attention_for_cpu.default, (Q, Q, Q, 0.0, True), {"scale": 0.5}),
    (aten.cudnn_batch_norm.default, (META, *[META[0, :, 0, 0].float()] * 4, True, 0.1, 1e-5), {}),
    (aten.embedding.default, (M, torch.tensor([2, 0]), -1, False, False), {}),
    (aten.gelu.default, (X,), {"approximate": "tanh"}),
    (aten.max_pool2d_with_indices.default, (IMAGE, [2, 2], [2, 2], [1, 1]), {}),
    (aten.mean.dim, (X, [1], True), {}),
    (aten.mean.dim, (X, [-1]), {"dtype": torch.float64}),
    (aten.mean.dim, (X, None), {}),
    (aten.mm.default, (M, M.t()), {}),
    (aten.mul.Tensor, (X, M), {}),
    (aten.native_batch_norm.default, (IMAGE, ONES, None, ONES, ONES, True, 0.1, 1e-5), {}),
    (aten.native_dropout.default, (X, 0.5, False), {}),
    (aten.mul.Tensor, (X, 3), {}),
    (aten.native_group_norm.default, (IMAGE, ONES, None, 1, 2, 25, 2, 1e-5), {}),
    (aten.native_layer_norm.default, (X, [4], None, torch.ones(4), 1e-5), {}),
    (aten.permute.default, (X, [2, 0, 1]), {}),
    (aten.relu.default, (X,), {}),
    (aten.select.int, (X, 1, -1), {}),
    (aten.sum.dim_IntList, (X, [0, 2], True), {}),
    (aten.sum.dim_IntList, (X, [], False), {}),
    (aten.sum.dim_IntList, (X, None), {}),
    (aten.sum.dim_IntList, (X, [1]), {"dtype": torch.float64}),
    (aten.t.default, (M,), {}),
    (aten.transpose.int, (X, 0, -1), {}),
    (aten.unsqueeze.default, (X, -1), {}),
    (aten.view.default, (X, [6, -1]), {}),
    (aten.view.default, (X[0, 0, 0], []), {}),
]


class _Seen(TorchDispatchMode):
    """Keeps the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.operators.append(func)
        return func(*args, **(kwargs or {}))


def _copied(value: Any) -> Any:
    if isinstance(value, list):
        return [_copied(item) for item in value]
    return value.clone() if isinstance(value, Tensor) else value


@pytest.mark.parametrize(("overload", "args", "kwargs"), CALLS, ids=lambda value: str(value)[:30])
def test_a_shorter_call_is_the_same_operator(overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    wanted = overload(*map(_copied, args), **kwargs)
    with _Seen() as seen:
        result = shorter(overload)(*map(_copied, args), **kwargs)
    assert seen.operators[-1:] == [overload]
    if wanted is not None:
        torch.testing.assert_close(result, wanted, rtol=0, atol=0, check_stride=True)


def test_every_shorter_call_is_tried() -> None:
    assert {overload for overload, _, _ in CALLS} == set(SHORTER)
    assert shorter(aten.sin.default) is aten.sin.default


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_cast_is_a_method_s_where_it_casts(dtype: torch.dtype) -> None:
    graph = make_fx(lambda x: aten._to_copy.default(x.t(), dtype=dtype, layout=torch.strided, device=x.device))(M)
    shorten(graph)
    with _Seen() as seen:
        result = graph(M)
    assert seen.operators[-1] is aten._to_copy.default
    assert result.stride() == M.t().stride()
    assert torch.equal(result, M.t().to(dtype))
    assert result.data_ptr() != M.data_ptr()
    methods = [node.target for node in graph.graph.nodes if node.target is torch.Tensor.to]
    assert bool(methods) == (dtype is torch.float16)
