"""Graphs with open sizes, lowered for sizes that come: at save to find the libraries that it takes, where an artifact runs with those alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fusepass.artifact.dynamic import Lowering
from fusepass.capture.trace import CaptureFailure, capture
from fusepass.codegen.detect import taken_for
from fusepass.codegen.forms import Forms
from fusepass.compile.pipeline import CompiledGraph, compile_graph
from fusepass.config import override
from fusepass.errors import CaptureError


def compiled_for(
    lowering: Lowering, graph: fx.GraphModule, tensors: Sequence[torch.Tensor], forms: Forms
) -> CompiledGraph:
    """`graph` for `tensors` like these, with the libraries of `forms`; nothing is measured.

    Raises:
        CaptureError: it cannot be captured.
    """
    options = {**lowering.options, "disable": frozenset(lowering.options["disable"])}
    with override(**options, tune="off"), taken_for(lowering.facts), torch.no_grad():
        captured = capture(graph, tuple(tensors), {})
        if isinstance(captured, CaptureFailure):
            raise CaptureError(f"{lowering.name} is not captured at such sizes: {captured.reason}") from captured.error
        return compile_graph(
            captured.graph, name=lowering.name, fallbacks=lowering.fallbacks, forms=forms, exact_inputs=True
        )


def lowered(
    lowering: Lowering, forms: Sequence[Any], graph: fx.GraphModule, tensors: Sequence[torch.Tensor]
) -> Callable[..., tuple[Any, ...]]:
    """See `fusepass.artifact.dynamic.Lower`."""
    compiled = compiled_for(lowering, graph, tensors, Forms.saved(forms))
    for region in compiled.called.values():
        for each in (region, *region.conversions.values()):
            each.unaligned_entry()  # while libraries are given
    return compiled.call
