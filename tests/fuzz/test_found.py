"""Models that were wrong when random ones were tried, made smaller; with compiled kernels."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fusepass
from fusepass.config import override
from fusepass.errors import FusepassWarning
from fusepass.numerics.check import check

pytestmark = pytest.mark.models


class WindowOverRows(nn.Module):
    """A pool over what rows were reduced to reads other rows than its own."""

    def forward(self, x: Tensor) -> Tensor:
        return F.adaptive_max_pool3d(x.prod(4, keepdim=True), 1)


class ConditionalSum(nn.Module):
    """Unrolled and vectorised, `condition ? a * b + c : d * 2` is miscompiled by GCC 12 where it knows the condition."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(8, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return torch.cat([y, y * 2], 3)


class PositionsOfTruths(nn.Module):
    """The position of a maximum is a number, although the maximum is a truth value."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        largest = (x > 0.8).max(1)
        return largest.values.logical_not(), -largest.indices


class GatheredProduct(nn.Module):
    """What is gathered of a product is not the product's epilogue."""

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(x @ x.mT * 0.1, scale_factor=2, mode="nearest")


class WriteInMemoryFormat(nn.Module):
    """Tracing would have it that what is written becomes contiguous, and so would a copy of it."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x.masked_fill_(x > 0.5, 0.1)
        y = x * 2
        return x.clone(), y.tril_().clone()


@pytest.mark.parametrize(
    ("model", "shape", "dtype"),
    [
        (WindowOverRows(), (1, 1, 2, 3, 8), torch.bfloat16),
        (WindowOverRows(), (2, 3, 2, 3, 8), torch.float32),
        (ConditionalSum(), (1, 8, 1, 7), torch.bfloat16),
        (ConditionalSum(), (1, 8, 1, 4), torch.float32),
        (ConditionalSum(), (1, 8, 1, 7), torch.float16),
        (PositionsOfTruths(), (25, 5), torch.float32),
    ],
)
def test_once_wrong(model: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    model, x = model.to(dtype), torch.rand(shape).to(dtype)
    with override(debug=True, algebra="off"):
        fused = fusepass.optimize(model)
        outcome = check(model, fused, (x,))
    assert outcome.ok, outcome.explain()
    assert fused.report().fused_share == 1


class TriangleOfCopies(nn.Module):
    """A triangle of copies of a row is not copies of the row's triangle."""

    def forward(self, x: Tensor) -> Tensor:
        return x.expand(4, -1).triu() + 1


class SumOfSelu(nn.Module):
    """The constants of an activation are no halves: rounded, they would pull a whole sum to one side."""

    def forward(self, x: Tensor) -> Tensor:
        return F.selu(x).sum() * 0.1


class DoubledCopies(nn.Module):
    """What is added to itself is broadcast on both sides: one of them has to stay."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.atan(x).unsqueeze(0).expand(2, *x.shape)
        return y + y


class DivergenceOfItself(nn.Module):
    """The two sides of a difference that is zero are to be rounded alike: halves in neither of them."""

    def forward(self, x: Tensor) -> Tensor:
        zero = torch.sub(x, x)
        return F.kl_div(zero.log_softmax(-1), zero.softmax(-1), reduction="none")


class LargestSoftplus(nn.Module):
    """Softplus steps down where it becomes the identity, so its largest value is not that of the largest number."""

    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(x, beta=2, threshold=3).max(1).values


class SumOfSteps(nn.Module):
    """Numbers added one by one are rounded less than their sum, which is larger and pulls every element to one side."""

    def forward(self, x: Tensor) -> Tensor:
        return (((x > -9).to(x.dtype) - 1) + (2**-8 + 2**-13)).sum() * 0.1


class TurnedNumber(nn.Module):
    """A tensor without dimensions has one to turn round."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.flip(-1)


class TurnedWindows(nn.Module):
    """Windows whose places are quotients, from the last to the first."""

    def forward(self, x: Tensor) -> Tensor:
        return F.adaptive_max_pool3d(x, 2).rot90(1, (4, 2))


@pytest.mark.parametrize(
    ("model", "shape", "dtype"),
    [
        (TurnedNumber(), (), torch.float32),
        (TurnedWindows(), (1, 1, 5, 1, 1), torch.float64),
        (SumOfSteps(), (9000,), torch.float16),
        (LargestSoftplus(), (2049, 13), torch.float64),
        (GatheredProduct(), (1, 1, 31, 16), torch.float32),
        (TriangleOfCopies(), (1, 4), torch.float32),
        (DivergenceOfItself(), (4, 5), torch.float16),
        (DoubledCopies(), (1, 1), torch.float16),
        (DoubledCopies(), (3, 5), torch.float32),
        (nn.Sequential(nn.BatchNorm2d(6), nn.GroupNorm(2, 6)), (4, 6, 3, 3), torch.float32),
        (SumOfSelu(), (15, 5, 8), torch.float16),
    ],
)
def test_once_wrong_or_not_generated(model: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(34)
    x = torch.randn(shape).to(dtype)
    with override(debug=True, tune="off"):
        fused = fusepass.optimize(model)
        outcome = check(model, fused, (x,))
    assert outcome.ok, outcome.explain()
    assert fused.report().regions


class ProductUnderAutocast(nn.Module):
    """Eager rounds the product twice and may come out exact; what stays in float32 between is rounded once."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            return F.relu(x @ x.mT * 0.1) + x.sum(-1, keepdim=True) * 0.1


class InFloat32(nn.Module):
    """Arithmetic of float32 in a model of float64, whose own eager run is the oracle."""

    def forward(self, x: Tensor) -> Tensor:
        return (torch.arctan2(x, x.abs() + 1).float() * 3 + 0.1).double()


@pytest.mark.parametrize(
    ("model", "shape", "dtype"),
    [(ProductUnderAutocast(), (4, 1, 1), torch.float32), (InFloat32(), (80, 32), torch.float64)],
)
def test_roundings_to_a_narrower_type(model: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(11)).to(dtype)
    with override(debug=True, tune="off"):
        fused = fusepass.optimize(model)
        outcome = check(model, fused, (x,))
    assert outcome.ok, outcome.explain()
    assert fused.report().regions


@pytest.mark.parametrize("shape", [(1, 2, 2, 8, 2), (3, 5)])
def test_a_write_keeps_strides(shape: tuple[int, ...]) -> None:
    model, x = WriteInMemoryFormat(), torch.rand(shape).transpose(0, -1).contiguous().transpose(0, -1)
    with override(debug=True):
        fused = fusepass.optimize(model)
        outcome = check(model, fused, (x,))
    assert outcome.ok, outcome.explain()
    assert fused.report().regions


class UpsamplingOfWritten(nn.Module):
    """A write to an input is traced under fake tensors, where PyTorch's Python takes upsampling apart."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode

    def forward(self, x: Tensor) -> Tensor:
        x[..., :1].mul_(2)
        return F.interpolate(x, scale_factor=2, mode=self.mode)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "linear"])
def test_upsampling_keeps_strides_where_an_input_is_written(mode: str) -> None:
    model, x = UpsamplingOfWritten(mode), torch.randn(1, 2, 2).permute(2, 1, 0)
    with override(debug=True):
        fused = fusepass.optimize(model)
        outcome = check(model, fused, (x,))
    assert outcome.ok, outcome.explain()
    assert fused.report().fused_share > 0


@pytest.mark.parametrize("batch", [2, 0])
def test_upsampling_keeps_strides_under_torch_compile(batch: int) -> None:
    model, x = nn.Sequential(nn.ReLU(), nn.Upsample(scale_factor=2)), torch.randn(5, 4, batch).permute(2, 1, 0)
    result = torch.compile(model, backend="fusepass")(x)
    assert result.stride() == model(x).stride()
    torch.testing.assert_close(result, model(x), rtol=0, atol=0)


@pytest.mark.parametrize("order", [(0, 3, 1, 2), (3, 1, 0, 2), (0, 1, 2, 3)])
def test_random_numbers_are_drawn_in_the_order_of_memory(order: tuple[int, ...]) -> None:
    model, x = nn.Sequential(nn.ReLU(), nn.Dropout(0.3), nn.Tanh()).train(), torch.randn(2, 5, 6, 7).permute(order)
    with override(debug=True):
        fused = fusepass.optimize(model)
        outcome = check(model, fused, (x,))
    assert outcome.ok, outcome.explain()
    assert fused.report().fused_share > 0


class DrawsFromNumPy(nn.Module):
    """Masks by NumPy, as models of speech do, beside dropout."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(x.relu(), 0.3, training=True) * float(numpy.random.rand())
        return y.tanh() * torch.from_numpy(numpy.random.rand(x.shape[-1]).astype(numpy.float32))


def test_numpy_s_random_numbers_leave_pytorch_s_alone() -> None:
    model, x = DrawsFromNumPy(), torch.randn(4, 6)
    fused = fusepass.optimize(model)
    found = []
    for call in (model, fused, fused):
        numpy.random.seed(3)
        torch.manual_seed(5)
        with torch.no_grad():
            found.append((call(x), torch.rand(()), numpy.random.rand()))
    for result, drawn, other in found[1:]:
        torch.testing.assert_close(result, found[0][0])
        assert (drawn, other) == found[0][1:]


class FillsExpanded(nn.Module):
    """Functional forms of such a write add up what each copy is changed by."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.unsqueeze(0).expand(2, *x.shape)
        y.fill_(0.3)
        return y


class MasksExpanded(nn.Module):
    """Eager allows it; a copy of what it becomes over it, which has its strides, is refused."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.as_strided((x.numel(),), (0,))
        y.masked_fill_(y > 0, 0.1)
        return y


class WritesWindows(nn.Module):
    """Eager writes each element as often as there are windows of it, and reads what it wrote before."""

    def __init__(self, write: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        windows = x.exp().flatten().as_strided((3, x.numel() - 4), (2, 1))
        self.write(windows)
        return torch.softmax(windows * 2, -1)


WRITES: dict[str, Callable[[Tensor], object]] = {
    "method": lambda windows: windows.mul_(0.5),
    "one window": lambda windows: windows[0].mul_(0.5),
    "slice": lambda windows: windows.__setitem__(slice(1, 2), 0.5),
    "flag": lambda windows: F.relu(windows, inplace=True),
    "flag by position": lambda windows: F.leaky_relu(windows, 0.1, True),
    "list": lambda windows: torch._foreach_add_([windows], 1.5),
    "out": lambda windows: torch.add(windows, 1.5, out=windows),
}


@pytest.mark.parametrize(
    "model", [FillsExpanded(), MasksExpanded(), *map(WritesWindows, WRITES.values())], ids=["fill", "mask", *WRITES]
)
def test_a_write_to_elements_that_share_memory(model: nn.Module) -> None:
    fused = fusepass.optimize(model)
    x = torch.randn(3, 4)
    with pytest.warns(fusepass.FusepassWarning, match="elements share memory"):
        outcome = check(model, fused, (x,))
    assert outcome.ok, outcome.explain()
    assert check(model, fused, (x,)).ok


class WritesBesideWindows(nn.Module):
    """Neither what windows are of, nor what is made of them, overlaps itself."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.exp().flatten()
        windows = y.as_strided((3, y.numel() - 4), (2, 1))
        y.mul_(0.5)
        spread = (windows * 2).add_(1).unsqueeze(0).expand(2, -1, -1).clone()
        spread[0].mul_(3)
        return torch.softmax(spread, -1)


@pytest.mark.filterwarnings("error::fusepass.FusepassWarning")
def test_a_write_beside_elements_that_share_memory() -> None:
    fused = fusepass.optimize(WritesBesideWindows())
    x = torch.randn(3, 4)
    assert check(WritesBesideWindows(), fused, (x,)).ok
    assert fusepass.explain(fused, x).regions


class PoolsOfLookedUp(nn.Module):
    """Windows of unequal sizes mask what is out of reach, also along dimensions in which nothing is looked up."""

    def forward(self, x: Tensor) -> Tensor:
        output_tiles = F.unfold(x.asinh(), (1, 3), (2, 2), (0, 0), (2, 1))
        return F.adaptive_avg_pool1d(output_tiles, 5)


def test_windows_over_what_is_looked_up() -> None:
    fused = fusepass.optimize(PoolsOfLookedUp())
    x = torch.randint(-9, 10, (8, 4, 15, 8)).to(torch.int32)
    outcome = check(PoolsOfLookedUp(), fused, (x,))
    assert outcome.ok, outcome.explain()
    assert not fused.report().fallbacks


class DrawsBeforeAWrite(nn.Module):
    """The write has AOTAutograd trace the model, whose functional `bernoulli` draws in the order of dimensions."""

    def forward(self, x: Tensor) -> Tensor:
        smallest = F.alpha_dropout(x, 0.2, training=True).min(0)[0]
        smallest.view(-1).add_(0.1)
        return smallest


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(3, 8, 4, 2).contiguous(memory_format=torch.channels_last),
        torch.randn(37).as_strided((3, 7, 8, 7, 4), (0, 0, 2, 2, 3), 1),  # made like it, memory has another order
    ],
    ids=["channels last", "overlapping"],
)
def test_random_numbers_of_another_memory_format_before_a_write(x: Tensor) -> None:
    model = DrawsBeforeAWrite()
    fused = fusepass.optimize(model)
    results = []
    for call in (model, fused, fused):
        torch.manual_seed(3)
        results.append(call(x))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])


class EnlargesSingles(nn.Module):
    """PyTorch's polynomials of the weights cancel: six units in the last place in a region, where eager has two."""

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(x.mean((3, 2, 1), keepdim=True) + 1, scale_factor=1.7, mode="bicubic")


def test_weights_of_a_bicubic_upsampling() -> None:
    fused = fusepass.optimize(EnlargesSingles(), tune="off")
    torch.manual_seed(1)
    outcome = check(EnlargesSingles(), fused, (torch.randn(2, 8, 8, 15),))
    assert outcome.ok, outcome.explain()
    assert not fused.report().fallbacks


class WritesWindows(nn.Module):
    """PyTorch puts written windows back by the gradient of `unfold`, which has zeros where there is no window."""

    def __init__(self, size: int, step: int) -> None:
        super().__init__()
        self.size, self.step = size, step

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2 + 1
        y.unfold(-1, self.size, self.step).add_(1)
        return y


@pytest.mark.parametrize(("size", "step"), [(1, 3), (2, 2), (1, 1)])
def test_a_write_to_windows_leaves_what_lies_between(size: int, step: int) -> None:
    model, x = WritesWindows(size, step), torch.randn(3, 7, generator=torch.Generator().manual_seed(2))
    covered = (size, step) == (1, 1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fused = fusepass.optimize(model, tune="off")
        compiled = torch.compile(model, backend="fusepass")
        outcomes = [check(model, call, (x,)) for call in (fused, fused, compiled)]
    assert all(outcome.ok for outcome in outcomes), [outcome.explain() for outcome in outcomes]
    assert covered != any("between windows" in str(each.message) for each in told)
    assert bool(fused.report().regions) == covered


class Positions(nn.Module):
    """Eager scatters into zeros, and so gives contiguous results; tracing compares, which gives the strides of what is compared."""

    def __init__(self, written: bool) -> None:
        super().__init__()
        self.written = written

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.written:
            x.clamp_(max=4)
        hot = F.one_hot(x, 5)
        return hot, hot.float() * 2


@pytest.mark.parametrize("written", [False, True], ids=["recorded", "exported"])
def test_positions_of_a_transposed_tensor(written: bool) -> None:
    model, x = Positions(written), (torch.arange(42) % 5).view(6, 7).t()
    fused = fusepass.optimize(model, tune="off")
    outcome = check(model, fused, (x,))
    assert outcome.ok, outcome.explain()
    assert fused.report().fused_share > 0


class CountsInSteps(nn.Module):
    """Eager rounds ends and steps to the type; what PyTorch decomposes it into rounds the result alone."""

    def __init__(self, dtype: torch.dtype, powers: bool) -> None:
        super().__init__()
        self.dtype, self.powers = dtype, powers

    def forward(self, x: Tensor) -> Tensor:
        steps, ends = (torch.logspace, (4.3, 0)) if self.powers else (torch.linspace, (-2.7, 10.9))
        return x * 2 + steps(*ends, 50, dtype=self.dtype)


@pytest.mark.parametrize("powers", [False, True])
@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.float16, torch.bfloat16, torch.float32, torch.float64]
)
def test_steps_from_one_number_to_another(dtype: torch.dtype, powers: bool) -> None:
    model, x = CountsInSteps(dtype, powers), torch.arange(50).to(dtype if dtype.is_floating_point else torch.float32)
    fused = fusepass.optimize(model, tune="off")
    outcome = check(model, fused, (x,))
    assert outcome.ok, outcome.explain()
    assert fused.report().fused_share > 0


class NormOfOne(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x.unsqueeze(-1) * 2).norm(1, (-1,)) * 0.1


def test_a_norm_along_a_dimension_of_size_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch 2.11's Python leaves it in where it is counted from the end, and Dynamo believes it; here later ones are made to."""
    positive = torch._prims_common.canonicalize_dims

    def forgetful(rank: int, dims: Any, wrap_scalar: bool = True) -> Any:
        caller = sys._getframe(1).f_code.co_name
        return dims if caller == "vector_norm" else positive(rank, dims, wrap_scalar)

    monkeypatch.setattr(torch._prims_common, "canonicalize_dims", forgetful)
    FakeTensorMode.cache_clear()
    model, x = NormOfOne(), torch.randn(7, generator=torch.Generator().manual_seed(1))
    with FakeTensorMode():
        assert torch.empty(7, 1).norm(1, (-1,)).shape == (7, 1)
    with pytest.warns(FusepassWarning, match="another shape"):
        outcomes = [check(model, torch.compile(model, backend="fusepass"), (x,))]
    outcomes.append(check(model, fusepass.optimize(model, tune="off"), (x,)))
    FakeTensorMode.cache_clear()
    assert all(outcome.ok for outcome in outcomes), [outcome.explain() for outcome in outcomes]
