"""Training through torch.compile on a GPU: gradients as far from float64's as eager's are, running statistics, every region fused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusepass.compile.pipeline import CompiledGraph
from fusepass.numerics.check import in_float64
from fusepass.report.report import RegionState
from fusepass.training.backend import Backend
from tests.support.precision import exact_products

pytestmark = [pytest.mark.gpu, pytest.mark.models]


class Next(nn.Module):
    """A ConvNeXt block, or one whose depthwise convolution is transposed."""

    def __init__(self, depthwise: type[nn.Conv2d | nn.ConvTranspose2d], kernel: int) -> None:
        super().__init__()
        self.conv = depthwise(32, 32, kernel, padding=kernel // 2, groups=32)
        self.norm, self.wide, self.back = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.back(F.gelu(self.wide(self.norm(self.conv(x).permute(0, 2, 3, 1)))))
        return x + y.permute(0, 3, 1, 2)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "next": lambda: nn.Sequential(Next(nn.Conv2d, 7), Next(nn.Conv2d, 3)),
    "transposed next": lambda: Next(nn.ConvTranspose2d, 5),
    "batch norm": lambda: nn.Sequential(
        nn.Conv2d(32, 48, 3, bias=False), nn.BatchNorm2d(48), nn.ReLU(), nn.Conv2d(48, 32, 3, stride=2), nn.SiLU()
    ),
    "grouped": lambda: nn.Sequential(nn.Conv2d(32, 64, 3, groups=4), nn.GELU(), nn.Conv2d(64, 16, 1), nn.Tanh()),
    "strided depthwise": lambda: nn.Sequential(nn.Conv2d(32, 64, 3, 2, 1, groups=32), nn.GELU(), nn.Conv2d(64, 8, 1)),
    "transposed": lambda: nn.Sequential(nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.GroupNorm(4, 16), nn.SiLU()),
    "bent and pooled": lambda: nn.Sequential(
        nn.Conv2d(32, 24, 3),
        nn.LeakyReLU(0.1),
        nn.AvgPool2d(2),
        nn.ReflectionPad2d(1),
        nn.Hardsigmoid(),
        nn.Conv2d(24, 32, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(3),
    ),
}
FIRST, LAST = torch.contiguous_format, torch.channels_last
CASES = ((32, 64, FIRST), (3, 29, FIRST), (32, 64, LAST))


@pytest.fixture(autouse=True)
def _exact() -> object:
    """Products in full precision, because results are held against float64."""
    with exact_products():
        yield


def gradients(call: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    given = x.detach().clone().requires_grad_()
    result = call(given)
    weights = torch.linspace(0.5, 1.5, result.numel(), device=x.device, dtype=torch.float64).view(result.shape)
    (result * weights.to(result.dtype)).sum().backward()
    found = [given.grad, *(each.grad for each in model.parameters())]
    return [each.detach().double() for each in found if each is not None]


def distance(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [float((a - b).norm() / b.norm().clamp_min(1e-300)) for a, b in zip(found, exact, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_as_exact_as_eager_s(
    name: str, case: tuple[int, int, torch.memory_format], dtype: torch.dtype
) -> None:
    samples, side, layout = case
    model = MODELS[name]().to("cuda", dtype)
    x = torch.randn(samples, 32, side, side, device="cuda").to(dtype).to(memory_format=layout)
    made: list[CompiledGraph] = []
    torch._dynamo.reset()
    wide, (exact_x,) = in_float64(model, (x,))
    exact = gradients(wide, wide, exact_x)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    eager = gradients(model, model, x)
    after = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict(state)
    compiled = torch.compile(model, backend=Backend("graph", {}, observe=made.append))
    found = gradients(compiled, model, x)
    least = 4 * torch.finfo(dtype).eps
    for mine, theirs in zip(distance(found, exact), distance(eager, exact), strict=True):
        assert mine <= 2 * theirs + least
    for key, value in model.state_dict().items():  # running statistics
        torch.testing.assert_close(value, after[key], rtol=1e-2, atol=1e-3)
    assert [graph.report.regions for graph in made]
    states = {region.state for graph in made for region in graph.report.regions}
    assert states <= {RegionState.FUSED, RegionState.EAGER}, [str(graph.report) for graph in made]
    assert not any(graph.report.fallbacks for graph in made)
