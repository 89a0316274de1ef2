"""Reductions over any dimensions, kept or not, of any type and layout."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from math import inf, nan
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusepass
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import generate
from fusepass.codegen.lowering.lower import lower
from fusepass.codegen.lowering.tensor import Unsupported
from fusepass.codegen.lowering.tracer import Spec
from tests.support.emulate import emulate
from tests.support.regions import NO_SPLIT, TINY, memory_of, region, trace

NAN, INF = float("nan"), float("inf")
DIMS = (0, -1, (0, 1), (0, 2), (0, 1, 2))
ONE = (0, 1, -1)
INPUTS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.randn(3, 4, 5, dtype=torch.float64),
    "permuted": lambda: torch.randn(5, 3, 4, dtype=torch.float64).permute(1, 2, 0),
    "expanded": lambda: torch.randn(3, 1, 5, dtype=torch.float64).expand(3, 4, 5),
    "ones": lambda: torch.randn(1, 1, 1, dtype=torch.float64),
    "float16": lambda: torch.randn(3, 4, 5).half(),
}
WHOLE: dict[str, Callable[[], Tensor]] = {
    "int64": lambda: torch.randint(-5, 5, (3, 4, 5)),
    "int8": lambda: torch.randint(-100, 100, (3, 4, 5), dtype=torch.int8),
    "uint8": lambda: torch.randint(0, 200, (3, 4, 5), dtype=torch.uint8),
    "bool": lambda: torch.rand(3, 4, 5) > 0.5,
}
Reduce = Callable[..., Any]
OVER_DIMS: dict[str, Reduce] = {
    "sum": torch.sum,
    "amax": torch.amax,
    "amin": torch.amin,
    "any": torch.any,
    "all": torch.all,
}
OF_FLOATS: dict[str, Reduce] = {
    "mean": torch.mean,
    "var": torch.var,
    "var(0)": lambda x, d, keepdim: torch.var(x, d, correction=0, keepdim=keepdim),
    "std_mean": lambda x, d, keepdim: torch.std_mean(x, d, keepdim=keepdim),
    "var_mean(2)": lambda x, d, keepdim: torch.var_mean(x, d, correction=2, keepdim=keepdim),
    "logsumexp": torch.logsumexp,
    "norm(2)": lambda x, d, keepdim: torch.linalg.vector_norm(x, 2, d, keepdim),
    "norm(1)": lambda x, d, keepdim: torch.linalg.vector_norm(x, 1, d, keepdim),
    "norm(3)": lambda x, d, keepdim: torch.linalg.vector_norm(x, 3, d, keepdim),
    "norm(4)": lambda x, d, keepdim: torch.linalg.vector_norm(x, 4, d, keepdim),
    "norm(0.5)": lambda x, d, keepdim: torch.linalg.vector_norm(x, 0.5, d, keepdim),
    "norm(inf)": lambda x, d, keepdim: torch.linalg.vector_norm(x, INF, d, keepdim),
    "nansum": torch.nansum,
}
OVER_ONE: dict[str, Reduce] = {
    "prod": torch.prod,
    "max": lambda x, d, keepdim: tuple(torch.max(x, d, keepdim)),
    "min": lambda x, d, keepdim: tuple(torch.min(x, d, keepdim)),
    "max values": lambda x, d, keepdim: torch.max(x, d, keepdim)[0],
    "min indices": lambda x, d, keepdim: torch.min(x, d, keepdim)[1],
}


def _results(function: Reduce, x: Tensor, dims: tuple[Any, ...]) -> list[Tensor]:
    results = [function(x, d, keepdim=keep) for d, keep in itertools.product(dims, (False, True))]
    return [r for result in results for r in (result if isinstance(result, tuple) else (result,))]


@pytest.mark.parametrize("name", [*INPUTS, *WHOLE])
@pytest.mark.parametrize("operator", OVER_DIMS)
def test_over_dims(operator: str, name: str) -> None:
    x = (INPUTS | WHOLE)[name]()
    function = OVER_DIMS[operator]
    region(lambda x: _results(function, x, (*DIMS, ())), x).check()


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("operator", OF_FLOATS)
@pytest.mark.thinned(3)
def test_of_floats(operator: str, name: str) -> None:
    function = OF_FLOATS[operator]
    region(lambda x: _results(function, x, DIMS), INPUTS[name]()).check()


@pytest.mark.parametrize("name", [*INPUTS, *WHOLE])
@pytest.mark.parametrize("operator", OVER_ONE)
def test_over_one(operator: str, name: str) -> None:
    function = OVER_ONE[operator]
    region(lambda x: _results(function, x, ONE), (INPUTS | WHOLE)[name]()).check()


@pytest.mark.parametrize("name", INPUTS)
def test_softmax(name: str) -> None:
    region(
        lambda x: [f(x, d) for f in (torch.softmax, torch.log_softmax, F.softmin) for d in ONE], INPUTS[name]()
    ).check()


@pytest.mark.parametrize("name", [*INPUTS, *WHOLE])
def test_of_everything(name: str) -> None:
    functions = [torch.sum, torch.prod, torch.max, torch.min, torch.any, torch.all, torch.count_nonzero]
    x = (INPUTS | WHOLE)[name]()
    if x.is_floating_point():
        functions += [torch.mean, torch.var, torch.std, torch.norm]
    if x.dtype is not torch.bool:
        functions += [torch.argmax, torch.argmin]
    region(lambda x: [f(x) for f in functions], x).check()
    region(lambda x: [x.sum(dtype=torch.float64), x.mean(1, dtype=torch.float32), x.aminmax(dim=1)[0]], x).check()


@pytest.mark.parametrize("options", [None, NO_SPLIT, TINY], ids=["lowered", "no_split", "tiny"])
def test_special_numbers(options: Any) -> None:
    """NaN wins every extreme and stops every sum; a row of -inf has the softmax that PyTorch gives it."""
    rows = torch.randn(6, 12, dtype=torch.float64)
    rows[0, 3] = NAN
    rows[1, 4] = INF
    rows[2, 5] = -INF
    rows[3] = -INF
    rows[4, 2], rows[4, 7] = INF, -INF
    made = region(
        lambda x: [
            x.softmax(1), x.log_softmax(1), x.logsumexp(1), *x.max(1), *x.min(1), x.argmax(1), x.argmin(1),
            x.amax(1), x.sum(1), x.mean(1), x.prod(1), x.nansum(1), x.any(1),
        ],
        rows,
    )  # fmt: skip
    made.check(None if options is None else made.passed(options))


def test_first_of_equal_extremes() -> None:
    x = torch.tensor([[1.0, 3, 3, 0, 0], [2, 2, 2, 2, 2]])
    region(lambda x: [*x.max(1), *x.min(1), x.argmax(), x.argmin(), x.argmax(0)], x).check()


def test_scalar() -> None:
    region(
        lambda x: [
            x.sum(), x.sum(0), x.mean(0), x.softmax(0), x.log_softmax(-1), x.var(correction=0), x.amax(), *x.max(0),
            x.argmax(), x.prod(0), x.any(()),
        ],
        torch.tensor(2.5, dtype=torch.float64),
    ).check()  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_variance_without_freedom() -> None:
    """NaN for one value, infinity where the correction exceeds the count, as in PyTorch."""
    x = torch.randn(2, 1, 3, dtype=torch.float64)
    region(lambda x: [x.var(1), x.var(0, correction=2), x.var(2, correction=5), torch.std_mean(x, 1)[1]], x).check()


@pytest.mark.models
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("dim", [0, 1], ids=["outer", "inner"])
@pytest.mark.parametrize("size", [1, 2, 5, 33, 700])
@pytest.mark.thinned(5)
def test_a_mean_beside_a_variance_moves_on_from_infinities(size: int, dim: int, dtype: torch.dtype) -> None:
    """As eager's, it is NaN, but for one infinity that comes last."""
    found = torch.randn(12, size, dtype=dtype, generator=torch.Generator().manual_seed(5))
    for row, places in enumerate([(0,), (size // 2,), (-2,), (-1,), (0, -1), (-2, -1), ()]):
        found[row, [place for place in places if -size <= place]] = inf
    found[7, -1] = -inf
    found[8, 0], found[8, -1] = -inf, inf
    found[9, size // 2] = nan
    x = found if dim else found.t().contiguous()

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.std_mean(x, dim)[1].neg() * 2

    with torch.no_grad():
        fused = fusepass.optimize(Model(), tune="off")
        torch.testing.assert_close(fused(x), Model()(x), equal_nan=True)
        assert fused.report().fused_share == 1


def test_a_mean_beside_a_variance_on_a_gpu() -> None:
    """NaN wherever there is an infinity: at which place eager keeps one, only its kernel knows."""
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(5))
    x[0, 20] = x[1, -1] = inf
    graph, _ = trace(lambda x: torch.var_mean(x, 1)[1] * 2, x)
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            node.meta["val"] = Spec.of(x, torch.device("cuda"))
    program, builder = lower(graph, "region", ["x"])
    generated = generate(program, builder, DeviceFacts.h200())
    (found,) = emulate(generated.program, generated.source, {"x": memory_of(x)}).values()
    np.testing.assert_allclose(found[:3], [nan, nan, 2 * x[2].mean()], rtol=1e-5)


@pytest.mark.parametrize("shape", [(3, 0, 4), (2, 0)])
def test_over_nothing(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64)
    region(
        lambda x: [
            x.sum(1), x.mean(1), x.prod(1), x.any(1), x.all(1), x.sum(0), x.sum(), x.mean(), x.exp(),
            x.softmax(1),
        ],
        x,
    ).check()  # fmt: skip
    with pytest.raises(Unsupported, match="mean and variance of no elements"):
        region(lambda x: x.var(1), x)
    with pytest.raises(Unsupported, match="logsumexp of nothing"):
        region(lambda x: x.logsumexp(1), x)
