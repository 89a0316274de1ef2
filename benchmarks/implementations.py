"""The ways of running a model that are compared: eager PyTorch, torch.compile in two modes, and fusepass."""

from __future__ import annotations

import enum
from collections.abc import Callable

import torch
from torch import Tensor, nn

Call = Callable[..., Tensor]


class Implementation(enum.Enum):
    """One way of running a model; `prepare` may be lazy, work can still happen in the first call."""

    EAGER = "eager"
    COMPILE = "compile"
    AUTOTUNE = "autotune"
    FUSEPASS = "fusepass"

    def prepare(self, model: nn.Module) -> Call:
        """A callable that stands for `model` and shares its parameters and buffers."""
        match self:
            case Implementation.EAGER:
                return model
            case Implementation.COMPILE:
                return torch.compile(model)
            case Implementation.AUTOTUNE:
                return torch.compile(model, mode="max-autotune-no-cudagraphs")
            case Implementation.FUSEPASS:
                import fusepass  # here, so that its import counts as part of the first call

                return fusepass.optimize(model)


RIVALS = {
    "eager": (Implementation.EAGER.value,),
    "torch.compile": (Implementation.COMPILE.value, Implementation.AUTOTUNE.value),
}
"""What fusepass is held against; each is as fast as the best of its modes."""
