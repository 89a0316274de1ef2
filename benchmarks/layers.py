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

    Those of `SINGLE`, single operators and losses, of `CHAINS`, more chains and blocks, and of `NETWORKS`, networks, are
    measured when they are asked for, those of `DRAWN` by a seed.
    """

    MISSION = "mission"
    VISIBLE = "visible"
    EXTRA = "extra"
    SINGLE = "single"
    CHAINS = "chains"
    NETWORKS = "networks"
    DRAWN = "drawn"


class Apply(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


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
class Input:
    """A tensor that a model takes: uniform random numbers in [0, 1), or integers from 0 on that are less than `below`."""

    shape: tuple[int, ...]
    below: int | None = None

    def draw(self, dtype: torch.dtype, device: str | torch.device) -> Tensor:
        """A new tensor; `dtype` is that of numbers which are no integers."""
        return self.redraw(torch.empty(self.shape, dtype=dtype if self.below is None else torch.int64, device=device))

    def redraw(self, tensor: Tensor) -> Tensor:
        """Puts other numbers into `tensor`."""
        return tensor.uniform_() if self.below is None else tensor.random_(self.below)


class _TakesSeveral(nn.Sequential):
    """Layers in order, of which the first takes all of the model's inputs."""

    def forward(self, *inputs: Tensor) -> Tensor:
        first, *others = self
        result: Tensor = first(*inputs)
        for layer in others:
            result = layer(result)
        return result


@dataclass(frozen=True)
class Workload:
    """A model and its inputs, at two sizes.

    Attributes:
        name: identifies it in tables and on the command line.
        layers: the layers in order; takes the size because some have widths that shrink with it.
        full: the input's shape; where there are several, or integers, the inputs.
        reduced: likewise at `Size.REDUCED`.
        group: where it comes from.
        dtype: of parameters and inputs that are no integers.
        training: whether the modules are in training mode, in which BatchNorm uses the batch's statistics.
    """

    name: str
    layers: Callable[[Size], tuple[nn.Module, ...]]
    full: tuple[int, ...] | tuple[Input, ...]
    reduced: tuple[int, ...] | tuple[Input, ...]
    group: Group = Group.VISIBLE
    dtype: torch.dtype = torch.float32
    training: bool = True

    def model(self, size: Size, device: str | torch.device) -> nn.Module:
        """The model with the initial weights that seed 0 gives."""
        torch.manual_seed(0)
        usual = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        container = nn.Sequential if len(self.takes(size)) == 1 else _TakesSeveral
        try:
            with torch.device(device):
                return container(*self.layers(size)).train(self.training)
        finally:
            torch.set_default_dtype(usual)

    def takes(self, size: Size) -> tuple[Input, ...]:
        """What the model takes at `size`."""
        given = self.full if size is Size.FULL else self.reduced
        several = tuple(each for each in given if isinstance(each, Input))
        return several or (Input(given),)

    def inputs(self, size: Size, device: str | torch.device) -> tuple[Tensor, ...]:
        """New tensors of random numbers."""
        return tuple(each.draw(self.dtype, device) for each in self.takes(size))

    def redraw(self, size: Size, tensors: tuple[Tensor, ...]) -> None:
        """Puts other numbers into what `inputs` gave at `size`."""
        for each, tensor in zip(self.takes(size), tensors, strict=True):
            each.redraw(tensor)


def single(
    name: str,
    function: Callable[..., Tensor],
    full: tuple[int, ...] | tuple[Input, ...],
    reduced: tuple[int, ...] | tuple[Input, ...],
    dtype: torch.dtype = torch.float32,
) -> Workload:
    """A function of `Group.SINGLE`, by itself."""
    return Workload(name, lambda size: (Apply(function),), full, reduced, Group.SINGLE, dtype)
