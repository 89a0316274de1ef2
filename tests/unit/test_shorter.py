"""Shorter calls end in the very overload that they stand for, with the same result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusepass.runtime.operators import SHORTER, shorter

aten = torch.ops.aten

X = torch.arange(24.0).reshape(2, 3, 4) - 11.5
M = torch.arange(12.0).reshape(3, 4)
IMAGE = torch.arange(50.0).reshape(1, 2, 5, 5) / 50
WEIGHT = torch.arange(36.0).reshape(2, 2, 3, 3) / 36
ONES = torch.ones(2)
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
    (aten.mean.dim, (X, [1], True), {}),
    (aten.mean.dim, (X, [-1]), {"dtype": torch.float64}),
    (aten.mean.dim, (X, None), {}),
    (aten.mm.default, (M, M.t()), {}),
    (aten.mul.Tensor, (X, M), {}),
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
