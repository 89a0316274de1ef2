"""What a workload is, and the small layers that let one be written as a list."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


class Size(enum.Enum):
    """Full workloads fill a GPU; reduced ones keep the operators and run on a CPU in milliseconds."""

    FULL = "full"
    REDUCED = "reduced"

    def of(self, width: int) -> int:
        """A layer's width, or number of groups, at this size."""
        return width if self is Size.FULL else width // 32


class Group(enum.Enum):
    """Where a workload comes from: the mission names it, its list shows it, or this project added it.

    Those of `SINGLE`, single operators, and of `CHAINS`, more chains and blocks, are measured when they are asked for.
    """

    MISSION = "mission"
    VISIBLE = "visible"
    EXTRA = "extra"
    SINGLE = "single"
    CHAINS = "chains"


class Apply(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class With(nn.Module):
    """A binary operator between the tensor and a parameter of `shape`, drawn from a normal distribution."""

    def __init__(self, operator: Callable[[Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.operator = operator
        self.parameter = nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.operator(x, self.parameter)


class AddInput(nn.Sequential):
    """Layers whose result is added to a detached copy of their input."""

    def forward(self, x: Tensor) -> Tensor:
        original = x.clone().detach()
        result: Tensor = super().forward(x)
        return result + original


@dataclass(frozen=True)
class Workload:
    """A model and its input, at two sizes.

    Attributes:
        name: identifies it in tables and on the command line.
        layers: the layers in order; takes the size because some have widths that shrink with it.
        full: the input's shape.
        reduced: the input's shape at `Size.REDUCED`.
        group: where it comes from.
        dtype: of parameters and input.
        training: whether the modules are in training mode, in which BatchNorm uses the batch's statistics.
    """

    name: str
    layers: Callable[[Size], tuple[nn.Module, ...]]
    full: tuple[int, ...]
    reduced: tuple[int, ...]
    group: Group = Group.VISIBLE
    dtype: torch.dtype = torch.float32
    training: bool = True

    def model(self, size: Size, device: str | torch.device) -> nn.Module:
        """The model with the initial weights that seed 0 gives."""
        torch.manual_seed(0)
        usual = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with torch.device(device):
                return nn.Sequential(*self.layers(size)).train(self.training)
        finally:
            torch.set_default_dtype(usual)

    def shape(self, size: Size) -> tuple[int, ...]:
        """The input's shape at `size`."""
        return self.full if size is Size.FULL else self.reduced

    def input(self, size: Size, device: str | torch.device) -> Tensor:
        """Uniform random numbers in [0, 1)."""
        return torch.rand(self.shape(size), device=device, dtype=self.dtype)


def single(
    name: str,
    function: Callable[[Tensor], Tensor],
    full: tuple[int, ...],
    reduced: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
) -> Workload:
    """A function of `Group.SINGLE`, by itself."""
    return Workload(name, lambda size: (Apply(function),), full, reduced, Group.SINGLE, dtype)
