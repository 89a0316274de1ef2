"""Every operator of the lowering vocabulary, called under its own name, gives what PyTorch gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._ops import OpOverload

from fusepass.codegen.lowering import lower, registry
from tests.support.regions import operator_region

F64, F32 = torch.float64, torch.float32
assert lower  # imported for the handlers that it registers
HANDLERS = {str(target): target for target in registry._HANDLERS}


def _tensor(*shape: int, dtype: torch.dtype = F64) -> torch.Tensor:
    """Values inside the domain of every function: positive, below one, all different."""
    count = torch.Size(shape).numel()
    order = torch.randperm(count, generator=torch.Generator().manual_seed(count))
    return ((order + 0.5) / count * 0.9 + 0.05).reshape(shape).to(dtype)


def _ints(*shape: int) -> torch.Tensor:
    return torch.arange(1, torch.Size(shape).numel() + 1).reshape(shape)


X, Y, Q = _tensor(2, 3, 4), _tensor(2, 3, 4).flip(0).contiguous(), _tensor(1, 2, 5, 6)
N, M = _ints(2, 3), _ints(2, 3).flip(1).contiguous()
CUBE = _tensor(1, 2, 4, 5, 6)
C, W = _tensor(2, 3, 7), _tensor(4, 3, 3)
POOLED_MAXIMA = torch.ops.aten.max_pool2d_with_indices(Q, [3, 2], [1, 2], [1, 0], [1, 2])

# Arguments of operators for which the schema does not say what makes sense.
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "aten.convolution.default": (C, W, _tensor(4), [2], [1], [1], False, [0], 1),
    "aten._convolution.default": (C, W, None, [2], [1], [1], False, [0], 1, False, False, True, False),
    "aten.convolution_backward.default": (
        *(_tensor(2, 4, 4), C, W, None, [2], [1], [1], False, [0], 1, [False, True, False]),
    ),
    "aten.im2col.default": (C, [2, 2], [1, 1], [1, 0], [1, 2]),
    "aten.col2im.default": (_tensor(2, 12, 20), [5, 6], [2, 2], [1, 1], [0, 0], [1, 1]),
    "aten.mm.default": (_tensor(2, 3), _tensor(3, 4)),
    "aten.bmm.default": (_tensor(2, 3, 4), _tensor(2, 4, 5)),
    "aten.addmm.default": (_tensor(4), _tensor(2, 3), _tensor(3, 4)),
    "aten.baddbmm.default": (_tensor(2, 1, 5), _tensor(2, 3, 4), _tensor(2, 4, 5)),
    "aten.native_layer_norm.default": (X, [4], _tensor(4), _tensor(4), 1e-5),
    "aten.native_group_norm.default": (Q, _tensor(2), _tensor(2), 1, 2, 30, 2, 1e-5),
    "prims.nextafter.default": (_tensor(3, dtype=F32), _tensor(3, dtype=F32).flip(0)),
    "prims.shift_left.default": (N, M),
    "prims.shift_right_arithmetic.default": (N, M),
    "aten.__lshift__.Tensor": (N, M),
    "aten.__lshift__.Scalar": (N, 2),
    "aten.__rshift__.Tensor": (N, M),
    "aten.__rshift__.Scalar": (N, 2),
    "aten.clamp.default": (X, 0.3, 0.6),
    "aten.clamp.Tensor": (X, None, Y),
    "aten.where.self": (X > 0.5, X, Y),
    "aten.where.ScalarOther": (X > 0.5, X, 2.0),
    "aten.where.ScalarSelf": (X > 0.5, 2.0, X),
    "aten.where.Scalar": (X > 0.5, 2.0, 1.0),
    "aten.masked_fill.Scalar": (X, X > 0.5, 2.0),
    "aten.masked_fill.Tensor": (X, X > 0.5, torch.tensor(2.0)),
    "aten.reshape.default": (X, [4, 6]),
    "aten._native_batch_norm_legit_functional.default": (X, *(_tensor(3) for _ in range(4)), True, 0.1, 1e-5),
    "aten._native_batch_norm_legit.no_stats": (X, _tensor(3), _tensor(3), True, 0.1, 1e-5),
    "aten._native_batch_norm_legit_no_training.default": (X, *(_tensor(3) for _ in range(4)), 0.1, 1e-5),
    "prims.where.default": (X > 0.5, X, Y),
    "aten.full_like.default": (X, 0.5),
    "prims.scalar_tensor.default": (2.5,),
    "aten._to_copy.default": (X,),
    "prims.convert_element_type.default": (X, F32),
    "prims.var.default": (X, [1], 1.0),
    "aten.view.default": (X, [4, 6]),
    "aten._unsafe_view.default": (X, [4, 6]),
    "prims.squeeze.default": (_tensor(2, 1, 3), [1]),
    "prims.reshape.default": (X, [4, 6]),
    "prims.split_dim.default": (X, 2, 2),
    "prims.collapse_view.default": (X, 1, 2),
    "aten.permute.default": (X, [2, 0, -2]),
    "prims.transpose.default": (X, [2, 0, 1]),
    "aten.t.default": (_tensor(2, 3),),
    "fusepass.kept.default": (torch.tensor([7, 4]), [5, 6], [6, 1], 0.4, F32, 256, 2),
    "aten.transpose.int": (X, 0, -1),
    "aten.expand.default": (_tensor(3, 1), [2, -1, 4]),
    "prims.broadcast_in_dim.default": (_tensor(3), [2, 3, 4], [1]),
    "aten.select.int": (X, 0, -1),
    "aten.slice.Tensor": (X, 0, -1, 9),
    "aten.slice_scatter.default": (X, Y[:, :, :2], 2, 1, 9, 2),
    "aten.select_scatter.default": (X, Y[:, 0], 1, -1),
    "aten.split.Tensor": (X[:1], 2, -2),
    "aten.split_with_sizes.default": (X[:1], [1, 0, 2], 1),
    "aten.unsafe_split.Tensor": (X[:1, :1], 3, 2),
    "aten.unsafe_split_with_sizes.default": (X, [1, 1]),
    "aten.unbind.int": (X[:1], -2),
    "aten.unfold.default": (X, 2, 2, 2),
    "aten.as_strided.default": (X, [4, 3], [3, 1], 12),
    "aten.cat.default": ([X, Y[:, :1], X], 1),
    "prims.cat.default": ([X, Y], 2),
    "aten.constant_pad_nd.default": (X, [1, -1, 0, 2], 0.5),
    "aten.copy.default": (X.to(F32), _tensor(3, 1)),
    "prims.iota.default": (5,),
    "aten.empty_permuted.default": ([2, 0], [1, 0]),
    "aten.empty.memory_format": ([0],),
    "aten.empty_strided.default": ([0, 2], [2, 1]),
    "aten.empty_like.default": (X[:0],),
    "aten.binary_cross_entropy.default": (X, Y, _tensor(4), 2),
    "aten._cdist_forward.default": (_tensor(2, 3, 4), _tensor(2, 5, 4).flip(0).contiguous(), 2.0, None),
    "aten.diagonal_scatter.default": (X, _tensor(3, 2), -1, 2, 0),
    "aten.embedding.default": (_tensor(5, 3), N % 5),
    "aten.index_select.default": (X, -1, torch.tensor([3, 0, 0])),
    "aten.gather.default": (X, 1, torch.tensor([[[2, 0, 1], [0, 0, 2]]])),
    "aten.scatter.src": (X, 1, torch.tensor([[[2, 0, 1, 1]], [[0, 0, 2, 1]]]), Y[:, :1]),
    "aten.scatter.value": (X, -1, torch.tensor([[[2], [0], [1]], [[3], [0], [2]]]), 0.5),
    "aten.scatter_add.default": (X, 0, torch.tensor([[[1, 0, 1, 1], [0, 0, 1, 1], [0, 1, 1, 0]]]), Y[:1]),
    "aten.take.default": (X, torch.tensor([[-1, 0], [23, -24]])),
    "aten.index.Tensor": (X, [None, torch.tensor([[-1], [0]]), torch.tensor([3, 1, -4])]),
    "aten._unsafe_index.Tensor": (X, [torch.tensor([1, 0]), None, torch.tensor([3, 1])]),
    "aten.avg_pool2d_backward.default": (_tensor(1, 2, 3, 3), Q, [3, 2], [2, 2], [1, 0], True, False, None),
    "aten.avg_pool3d_backward.default": (_tensor(1, 2, 2, 2, 3), CUBE, [2], [2], [0], False, True, 3),
    "aten._adaptive_avg_pool2d_backward.default": (_tensor(1, 2, 3, 4), Q),
    "aten._adaptive_avg_pool3d_backward.default": (_tensor(1, 2, 2, 7, 3), CUBE),
    "aten.max_pool2d_with_indices_backward.default": (
        POOLED_MAXIMA[0] * 2,
        Q,
        [3, 2],
        [1, 2],
        [1, 0],
        [1, 2],
        False,
        POOLED_MAXIMA[1],
    ),
    "aten.upsample_nearest1d_backward.default": (_tensor(2, 3, 8), [8], [2, 3, 4], 2.0),
    "aten.upsample_nearest2d_backward.default": (_tensor(1, 2, 10, 18), [10, 18], [1, 2, 5, 6]),
    "aten.upsample_nearest3d_backward.default": (_tensor(1, 2, 4, 3, 10), [4, 3, 10], [1, 2, 2, 3, 5]),
    "aten._upsample_nearest_exact1d_backward.default": (_tensor(2, 3, 9), [9], [2, 3, 3]),
    "aten._upsample_nearest_exact2d_backward.default": (_tensor(1, 2, 10, 18), [10, 18], [1, 2, 5, 6], 2.0, 3.0),
    "aten._upsample_nearest_exact3d_backward.default": (_tensor(1, 2, 4, 3, 10), [4, 3, 10], [1, 2, 2, 3, 5]),
    "aten.upsample_linear1d_backward.default": (_tensor(2, 3, 8), [8], [2, 3, 5], False),
    "aten.upsample_bilinear2d_backward.default": (_tensor(1, 2, 8, 6), [8, 6], [1, 2, 4, 9], False, 2.0),
    "aten.upsample_trilinear3d_backward.default": (_tensor(1, 2, 3, 4, 5), [3, 4, 5], [1, 2, 2, 3, 4], True),
    "aten.upsample_bicubic2d_backward.default": (_tensor(1, 2, 8, 7), [8, 7], [1, 2, 4, 3], False),
    "aten.nll_loss_forward.default": (_tensor(3, 4), torch.tensor([3, 0, 1]), _tensor(4), 1, 0),
    "aten.nll_loss2d_forward.default": (_tensor(2, 3, 5, 1), torch.arange(10).reshape(2, 5, 1) % 3, None, 1, -100),
    "aten.nll_loss_backward.default": (
        _tensor(1)[0],
        _tensor(3, 4),
        torch.tensor([3, 0, 1]),
        _tensor(4),
        1,
        0,
        _tensor(1)[0] * 2,
    ),
    "aten.nll_loss2d_backward.default": (
        _tensor(2, 5, 1),
        _tensor(2, 3, 5, 1),
        torch.arange(10).reshape(2, 5, 1) % 3,
        None,
        0,
        -100,
        _tensor(1)[0],
    ),
    "aten.reflection_pad1d.default": (C, [3, 1]),
    "aten.reflection_pad2d.default": (Q, [3, -1, 0, 4]),
    "aten.reflection_pad3d.default": (CUBE, [3, 1, 0, 4, 2, 1]),
    "aten.replication_pad1d.default": (C, [9, 1]),
    "aten.replication_pad2d.default": (Q, [3, -1, 0, 14]),
    "aten.replication_pad3d.default": (CUBE, [3, 1, 0, 4, 2, 1]),
    "aten.upsample_nearest1d.default": (C, [11], 1.6),
    "aten.upsample_nearest1d.vec": (C, None, [1.6]),
    "aten.upsample_nearest2d.default": (Q, [11, 4]),
    "aten.upsample_nearest2d.vec": (Q, [3, 13], None),
    "aten.upsample_nearest3d.default": (CUBE, [5, 9, 6]),
    "aten.upsample_nearest3d.vec": (CUBE, None, [1.5, 2.0, 0.5]),
    "aten._upsample_nearest_exact1d.default": (C, [11], 1.6),
    "aten._upsample_nearest_exact1d.vec": (C, None, [1.6]),
    "aten._upsample_nearest_exact2d.default": (Q, [11, 4]),
    "aten._upsample_nearest_exact2d.vec": (Q, [3, 13], None),
    "aten._upsample_nearest_exact3d.default": (CUBE, [5, 9, 6]),
    "aten._upsample_nearest_exact3d.vec": (CUBE, None, [1.5, 2.0, 0.5]),
    "aten.upsample_linear1d.default": (C, [11], False, 1.6),
    "aten.upsample_linear1d.vec": (C, None, False, [1.6]),
    "aten.upsample_bilinear2d.default": (Q, [11, 4], True),
    "aten.upsample_bilinear2d.vec": (Q, [3, 13], False, None),
    "aten.upsample_bicubic2d.default": (Q, [11, 4], True),
    "aten.upsample_bicubic2d.vec": (Q, None, False, [1.7, 0.6]),
    "aten.upsample_trilinear3d.default": (CUBE, [5, 9, 6], False),
    "aten.upsample_trilinear3d.vec": (CUBE, None, True, [1.5, 2.0, 0.7]),
    "aten.arange.default": (7,),
    "aten.eye.default": (7,),
    "aten.eye.m": (5, 7),
    "aten.arange.start": (2, 7),
    "aten.arange.start_step": (2.5, 7, 0.3),
    "aten.tril.default": (X, -1),
    "aten.triu.default": (X, 1),
    "aten.glu.default": (X, 2),
    "aten.repeat.default": (X, [2, 1, 3, 2]),
    "aten.stack.default": ([X, Y, X], -2),
    "aten.pixel_shuffle.default": (_tensor(3, 12, 2, 3), 2),
    "aten.pixel_unshuffle.default": (_tensor(2, 6, 4), 2),
    "aten.roll.default": (X, [1, -1], [0, 2]),
}
KEYWORDS: dict[str, dict[str, Any]] = {
    "aten.div.Tensor_mode": {"rounding_mode": "floor"},
    "aten.div.Scalar_mode": {"rounding_mode": "trunc"},
    "aten._to_copy.default": {"dtype": torch.float16},
    "prims.iota.default": {
        "start": 2, "step": 3, "dtype": torch.int64, "device": torch.device("cpu"), "requires_grad": False,
    },
    "prims.scalar_tensor.default": {"dtype": F64, "device": torch.device("cpu")},
}  # fmt: skip
POOLED = {"1d": C, "2d": Q, "3d": CUBE}


def _arguments(name: str, target: OpOverload) -> tuple[Any, ...]:
    """Arguments from the schema: two equal shapes for tensors, small numbers for the rest."""
    if name in ARGUMENTS:
        return ARGUMENTS[name]
    kinds = [str(a.type) for a in target._schema.arguments if not (a.has_default_value() or a.kwarg_only)]
    pooled = next((x for rank, x in POOLED.items() if f"pool{rank}" in name), None)
    if pooled is not None:
        return (pooled, [2] * (pooled.dim() - 2))
    tensors = iter((N, M) if "bitwise" in name else (X, Y, X))
    numbers: dict[str, Any] = {
        "int": 1,
        "number": 2,
        "float": 0.5,
        "bool": False,
        "List[int]": [1],
        "Optional[List[int]]": [1],
    }
    return tuple(next(tensors) if kind == "Tensor" else numbers[kind] for kind in kinds)


@pytest.mark.parametrize("name", HANDLERS)
@pytest.mark.invariant(12)
def test_operator(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, used = HANDLERS[name], []
    handler = registry._HANDLERS[target]

    def recording(*args: Any, **kwargs: Any) -> registry.Result:
        used.append(name)
        return handler(*args, **kwargs)

    monkeypatch.setitem(registry._HANDLERS, target, recording)
    arguments = _arguments(name, target)
    # The other results of these are indices and scratch memory, which no region gives.
    results = 1 if "max_pool" in name or "log_sigmoid" in name else None
    operator_region(target, *arguments, results=results, **KEYWORDS.get(name, {})).check(exact=False)
    assert used, "the operator never reaches its handler"
