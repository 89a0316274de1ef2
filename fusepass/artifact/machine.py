"""On which machines the libraries of an artifact run: those of a CPU's instruction sets, or of one kind of GPU."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from fusepass.codegen import instructions
from fusepass.codegen.source import Source, Target
from fusepass.errors import ArtifactError

_MOST_NAMED = 4


def requirement(source: Source) -> dict[str, Any]:
    """What a machine must be to run what `source` was built into here, as JSON holds it."""
    if source.target is Target.CUDA:
        return {"target": source.target.value, "arch": source.arch, "cuda": _cuda()}
    needed = sorted(instructions.needed(source.arch))
    return {"target": source.target.value, "arch": source.arch, "machine": platform.machine(), "instructions": needed}


def _cuda() -> str:
    """The major version of PyTorch's CUDA, whose runtime library the kernels' libraries use."""
    return (torch.version.cuda or "none").partition(".")[0]


def problem(needed: Mapping[str, Any], device: torch.device | None) -> str | None:
    """Why this machine does not run what has this `requirement`, or None; `device` is the GPU to run on."""
    if Target(needed["target"]) is Target.CUDA:
        if device is None:
            return f"built for {needed['arch']}, and there is no GPU"
        if needed["cuda"] != _cuda():
            return f"built for CUDA {needed['cuda']}, and PyTorch has {_cuda()} here"
        major, minor = torch.cuda.get_device_capability(device)
        return None if needed["arch"] == f"sm_{major}{minor}" else f"built for {needed['arch']}, not sm_{major}{minor}"
    if needed["machine"] != platform.machine():
        return f"built for {needed['machine']}, not {platform.machine()}"
    missing = sorted({*needed["instructions"]} - instructions.available())
    if not missing:
        return None
    more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
    named = ", ".join(missing[:_MOST_NAMED])
    return f"built for a CPU ({needed['arch']}) that has {named}{more}, which this one lacks"


def runnable(variants: Sequence[Mapping[str, Any]], gpu: torch.device | None) -> Mapping[str, Any]:
    """The first of several that this machine runs."""
    problems = []
    for variant in variants:
        found = [told for needed in variant["requires"] if (told := problem(needed, gpu)) is not None]
        if not found:
            return variant
        problems += found
    raise ArtifactError(
        f"no code in the artifact runs on this machine: {'; '.join(dict.fromkeys(problems))}; save it for this one too"
    )


class Devices:
    """The device to use in place of each that is named: the same one, or of a GPU the one that was asked for."""

    def __init__(self, saved: Iterable[str], chosen: torch.device | None) -> None:
        """Devices for an artifact that names those that are `saved`.

        Raises:
            ArtifactError: there is no such device, or the `chosen` one is of another kind.
        """
        kinds = {torch.device(name).type for name in saved}
        if chosen is not None and chosen.type not in kinds:
            raise ArtifactError(f"the artifact was saved for {' and '.join(sorted(kinds))}, not for {chosen.type}")
        self.gpu: torch.device | None = None
        if "cuda" in kinds:
            if not torch.cuda.is_available():
                raise ArtifactError("the artifact was saved for cuda, and PyTorch finds no CUDA device here")
            index = chosen.index if chosen is not None and chosen.type == "cuda" else None
            self.gpu = torch.device("cuda", torch.cuda.current_device() if index is None else index)

    def __call__(self, name: str) -> torch.device:
        named = torch.device(name)
        return self.gpu if named.type == "cuda" and self.gpu is not None else named
