"""An optimised model as an exported program that calls fused operators, for those who ask for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.export import ExportedProgram

from fusepass.api.module import OptimizedModule


def export(optimised: OptimizedModule, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> ExportedProgram:
    """See `fusepass.export`."""
    if not isinstance(optimised, OptimizedModule):
        raise TypeError(f"fusepass.export takes what fusepass.optimize gave back, not a {type(optimised).__name__}")
    if not isinstance(args, tuple):
        raise TypeError(f"args is a {type(args).__name__}; pass a tuple of positional arguments")
    named = dict(kwargs or {})
    graph = optimised.graph_module(*args, **named)
    with torch.no_grad():
        return torch.export.export(graph, args, named, strict=False)
