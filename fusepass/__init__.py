"""fusepass: runs chains of a PyTorch module's operators as a few generated, readable CUDA or C++ kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fusepass.config import Config, current, override
from fusepass.errors import (
    BuildError,
    CaptureError,
    FusepassError,
    FusepassWarning,
    IRError,
    RenderError,
    ScheduleError,
)
from fusepass.garbage import collector_paused

if TYPE_CHECKING:
    from torch import nn

    from fusepass.api.module import OptimizedModule
    from fusepass.report.report import Report

__all__ = [
    "BuildError",
    "CaptureError",
    "Config",
    "FusepassError",
    "FusepassWarning",
    "IRError",
    "RenderError",
    "ScheduleError",
    "__version__",
    "current",
    "explain",
    "optimize",
    "override",
]

__version__ = "0.1.0"


def optimize(model: nn.Module, example_inputs: Any = None, **options: Any) -> OptimizedModule:
    """A module that is called like `model` and runs chains of its operators as fused kernels.

    `model` is not modified. The result shares its parameters, buffers and hooks, so training, loading, moving and
    saving either of them is doing so to both. A call that needs gradients runs generated kernels forward and backward.
    A call that has no fused form (under a dispatch mode, say) runs the original operators, with a warning at the first and a count in ``report()``.

    Args:
        model: the model. One that `optimize` gave back already is optimised anew with `options`, not twice.
        example_inputs: a tuple of positional arguments, a dict of keyword arguments, or one tensor. With them kernels
            are built now, for calls like that without gradients; else at the first call with each signature.
        **options: options of `fusepass.config.Config`, by name.

    Raises:
        TypeError: `model` is not an ``nn.Module``, `example_inputs` is none of the above, or an option is unknown.
        ValueError: an option is out of range, or the model itself rejects `example_inputs`.
    """
    with collector_paused():
        from fusepass.api.entry import optimize

    return optimize(model, example_inputs, options)


def explain(model: nn.Module, *inputs: Any, **kwargs: Any) -> Report:
    """What of `model` fuses when it is called with these inputs and without gradients, what does not, and why.

    Kernels are built, but `model` is neither called nor modified. A model that cannot be traced as one graph is
    called once, as a copy.

    Raises:
        TypeError: `model` is not an ``nn.Module``.
        ValueError: the model itself rejects the inputs.
    """
    with collector_paused():
        from fusepass.api.entry import explain

    return explain(model, inputs, kwargs)
