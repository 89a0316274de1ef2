"""fusepass: runs chains of a PyTorch module's operators as a few generated, readable CUDA or C++ kernels."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from fusepass.config import Config, Options, current, override
from fusepass.errors import (
    ArtifactError,
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

    import torch
    from torch import fx, nn
    from torch.export import ExportedProgram

    from fusepass.api.module import OptimizedModule
    from fusepass.artifact.module import LoadedModule
    from fusepass.profiling.errors import Errors
    from fusepass.report.report import Report

__all__ = [
    "ArtifactError",
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
    "build_operators",
    "check",
    "current",
    "explain",
    "export",
    "extract",
    "load",
    "load_operators",
    "optimize",
    "override",
    "register_cache_artifacts",
    "save",
    "save_operators",
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


def save(
    optimized: OptimizedModule,
    path: str | os.PathLike[str],
    examples: Any,
    *,
    architectures: Sequence[str] | None = None,
    weights: bool = True,
    dynamic: bool = False,
) -> None:
    """Write what `optimized` becomes for some calls to one file, which `load` runs without a compiler or the model's Python.

    The calls are not made. They are captured in the present mode (autocast, training or not) and without gradients, and built where they
    are not yet.

    Args:
        optimized: what `optimize` gave back.
        path: the file; what is there is replaced.
        examples: an example of a call as `optimize` takes it, or a list of them: each becomes a signature that the file serves.
        architectures: what to build for, such as ``["sm_80", "sm_90"]``, or ``["x86-64-v3"]`` on a CPU; by default the device
            at hand. For others than that nothing is measured: regions are generated as with ``tune="off"``.
        weights: whether the file holds parameters and buffers; else `load` must be given them.
        dynamic: whether the file serves further sizes, too: those in which examples differ are left open. Nothing is measured for these.

    Raises:
        TypeError: `optimized` or an example is of another type.
        ValueError: there is no example, none of another size for `dynamic`, or no such architecture.
        CaptureError: the model cannot be traced as one graph.
        ArtifactError: it is traced, but cannot be written as data; the text says what stands against it.
    """
    from pathlib import Path

    with collector_paused():
        from fusepass.api.saving import save

    save(optimized, Path(path), examples, architectures, weights=weights, dynamic=dynamic)


def load(
    path: str | os.PathLike[str],
    *,
    device: torch.device | str | None = None,
    state_dict: Mapping[str, torch.Tensor] | None = None,
) -> LoadedModule:
    """The model that `save` wrote to `path`, as a module for calls like its examples, without gradients.

    A file holds native code: load none that you would not run.

    Args:
        path: the file.
        device: the GPU to run on, by default the current one; of the kind that it was saved for.
        state_dict: parameters and buffers in place of those in the file, or where it has none. They are copied.

    Raises:
        OSError: there is no such file.
        ValueError: `state_dict` does not fit.
        ArtifactError: the file is damaged, or was saved for another machine, device or PyTorch.
    """
    from pathlib import Path

    with collector_paused():
        import torch

        from fusepass.artifact.loading import load

    def lower(*args: Any) -> Any:
        from fusepass.api.lowered import lowered

        return lowered(*args)

    return load(Path(path), None if device is None else torch.device(device), state_dict, lower)


def export(
    optimized: OptimizedModule, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> ExportedProgram:
    """An exported program for calls like this one, without gradients, that calls fused operators.

    ``torch.export.export(optimized, ...)`` gives the original's operators instead, and may leave sizes open; fused operators have those of
    the example. A process that loads the program needs the operators, too: see `save_operators`.

    Raises:
        TypeError: `optimized` is not what `optimize` gave back, or `args` is no tuple.
        CaptureError: the model cannot be traced as one graph.
    """
    from fusepass.api.exporting import export

    return export(optimized, args, kwargs)


def save_operators(program: ExportedProgram | fx.GraphModule, path: str | os.PathLike[str]) -> None:
    """Write the fused operators that `program` calls to a file of their own, beside what torch.export or AOTInductor makes of it.

    Args:
        program: what `export` gave, or a graph module that calls such operators.
        path: the file; what is there is replaced.

    Raises:
        ArtifactError: an operator cannot be written, or was loaded from such a file.
    """
    from pathlib import Path

    from fusepass.artifact.operators import write

    write(program.graph, Path(path))


def build_operators(program: ExportedProgram | fx.GraphModule, path: str | os.PathLike[str]) -> None:
    """Build the fused operators that `program` calls into one shared library, which registers them with libtorch as it is loaded.

    A C++ program opens it as a shared library before it opens what AOTInductor made of `program`; a Python process by
    ``torch.ops.load_library``. Neither needs fusepass, nor a compiler. The library serves the PyTorch, the device and the CPU or GPU
    architecture that it was built for. A process in which the operators are registered already, such as this one, cannot load it.

    Args:
        program: what `export` gave, or a graph module that calls such operators.
        path: the library, such as ``model_ops.so``; what is there is replaced.

    Raises:
        ArtifactError: `program` calls no fused operators, or one cannot be written.
        BuildError: there is no C++ compiler, or it does not find PyTorch's headers.
    """
    from pathlib import Path

    from fusepass.artifact.native import write

    write(program.graph, Path(path))


def load_operators(path: str | os.PathLike[str], *, device: torch.device | str | None = None) -> tuple[str, ...]:
    """Register the operators that `save_operators` wrote, under the names that it returns: before a program that calls them is loaded.

    As with `load`, there is no compiler and no capture, and the file holds native code.

    Raises:
        OSError: there is no such file.
        ArtifactError: the file is damaged, or was saved for another machine, device or PyTorch.
    """
    from pathlib import Path

    import torch

    from fusepass.artifact.operators import load

    return load(Path(path), None if device is None else torch.device(device))


def register_cache_artifacts() -> None:
    """Have ``torch.compiler.save_cache_artifacts`` take along what this process uses of fusepass's cache from now on.

    Libraries, measured choices and what was generated of regions become artifacts of the type ``"fusepass"``, beside those of PyTorch's
    own caches. Call this before models are compiled; and in a process that loads such artifacts, before
    ``torch.compiler.load_cache_artifacts``, which loads nothing where it meets a type that nobody registered. Artifacts hold native
    code: load none that you would not run.
    """
    from fusepass.api.cache_artifacts import register

    register()
