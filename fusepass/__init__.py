"""fusepass: runs chains of a PyTorch module's operators as a few generated, readable CUDA or C++ kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

from fusepass.config import Config, Options, current, override
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
from fusepass.supported import require_linux

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from fusepass.api.module import OptimizedModule
    from fusepass.profiling.errors import Errors
    from fusepass.report.report import Report

__all__ = [
    "BuildError",
    "CaptureError",
    "Config",
    "FusepassError",
    "FusepassWarning",
    "IRError",
    "Options",
    "RenderError",
    "ScheduleError",
    "__version__",
    "check",
    "current",
    "explain",
    "extract",
    "optimize",
    "override",
]

__version__ = "0.1.0"

require_linux()


def optimize(model: nn.Module, example_inputs: Any = None, **options: Unpack[Options]) -> OptimizedModule:
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


def check(model: nn.Module, *inputs: Any, **kwargs: Any) -> Errors:
    """How far each region of `model` is from float64, beside its own operators, for a call with these inputs and without gradients.

    Each region runs on the values that PyTorch's operators give it, so one that is wrong is found whatever comes before it. The
    rewritten graph, run by PyTorch, shows what the algebraic rules change; the whole model comes last.

    Args:
        model: a model, or what `optimize` made of one, whose options then count.
        *inputs: positional arguments of the call.
        **kwargs: named ones.

    Raises:
        TypeError: `model` is not an ``nn.Module``.
        CaptureError: it cannot be traced as one graph; the text says why.
    """
    with collector_paused():
        from fusepass.api.tools import check

    return check(model, inputs, kwargs)


def extract(model: nn.Module, region: str, directory: str | Path, *inputs: Any, **kwargs: Any) -> Path:
    """Write one region of `model` as a program of its own, for profilers and debuggers, and give its path.

    Below `directory` are the program (``.cu`` or ``.cpp``), the headers that it includes, and a file with what its kernels read
    in a call with these inputs. Its first lines say how it is built. It runs the kernels, checks the results and prints times.

    Args:
        model: as in `check`.
        region: the region's name, as in the report.
        directory: where to write; it is made if it is not there.
        *inputs: positional arguments of the call.
        **kwargs: named ones.

    Raises:
        TypeError: `model` is not an ``nn.Module``.
        ValueError: there is no such region, or no code is generated for it.
        CaptureError: the model cannot be traced as one graph; the text says why.
        BuildError: the region's code does not compile.
    """
    with collector_paused():
        from fusepass.api.tools import extract

    return extract(model, region, directory, inputs, kwargs)
