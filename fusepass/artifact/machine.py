"""On which machines the libraries of an artifact run: those of a CPU's instruction sets, or of one kind of GPU."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

import torch

from fusepass.codegen import instructions
from fusepass.codegen.source import Source, Target

_MOST_NAMED = 4


def requirement(source: Source) -> dict[str, Any]:
    """What a machine must be to run what `source` was built into here, as JSON holds it."""
    if source.target is Target.CUDA:
        return {"target": source.target.value, "arch": source.arch}
    needed = sorted(instructions.needed(source.arch))
    return {"target": source.target.value, "arch": source.arch, "machine": platform.machine(), "instructions": needed}


def problem(needed: Mapping[str, Any], device: torch.device | None) -> str | None:
    """Why this machine does not run what has this `requirement`, or None; `device` is the GPU to run on."""
    if Target(needed["target"]) is Target.CUDA:
        if device is None:
            return f"built for {needed['arch']}, and there is no GPU"
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
