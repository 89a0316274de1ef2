"""`check` and `extract` behind the light import: tools for whoever looks for a wrong number or a slow kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fusepass.api.entry import module_of
from fusepass.api.module import OptimizedModule, optimized
from fusepass.capture.trace import CaptureFailure
from fusepass.dispatch.specialisation import Specialisation
from fusepass.errors import CaptureError
from fusepass.numerics import check as policy
from fusepass.numerics.comparison import compare
from fusepass.profiling.errors import Errors, record_of, region_errors
from fusepass.profiling.extract import extracted
from fusepass.structure import Template

_Arguments = tuple[torch.Tensor, ...]


def check(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Errors:
    """See `fusepass.check`."""
    optimised = _optimised(model, "check")
    original = optimised.original
    with torch.no_grad():
        made, bound = _prepared(optimised, args, kwargs)
        regions, flat = region_errors(made.compiled, bound, made.written)
        called, inputs = _Positional(original, kwargs), (*args, *kwargs.values())
        oracle, results = policy.exact(called, inputs)["output"], made.captured.outputs.fill(list(flat))
        others = policy.nudged_results(called, inputs, _output)
        rewritten = policy.settled(compare(results, _output(called, inputs), oracle), results, others, oracle)
        whole = policy.check(called, _Positional(optimised, kwargs), inputs)
    count = made.report.ops_total
    records = (
        record_of("rewritten graph", "operators", count, rewritten),
        *regions,
        record_of("whole model", "model", count, whole),
    )
    return Errors(type(original).__name__, made.report.device, records)


def extract(
    model: nn.Module, region: str, directory: str | Path, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Path:
    """See `fusepass.extract`."""
    optimised = _optimised(model, "extract")
    with torch.no_grad():
        made, bound = _prepared(optimised, args, kwargs)
        return extracted(made.compiled, bound, made.written, region, Path(directory))


def _output(model: nn.Module, inputs: Sequence[Any]) -> Any:
    return policy.observe(model, inputs)["output"]


class _Positional(nn.Module):
    """`model` with the last of its positional arguments passed by the names of `kwargs`."""

    def __init__(self, model: nn.Module, kwargs: Mapping[str, Any]) -> None:
        super().__init__()
        self.model = model
        self.names = tuple(kwargs)

    def forward(self, *values: Any) -> Any:
        count = len(values) - len(self.names)
        return self.model(*values[:count], **dict(zip(self.names, values[count:], strict=True)))


def _optimised(model: nn.Module, function: str) -> OptimizedModule:
    return model if isinstance(model, OptimizedModule) else optimized(module_of(model, function), {})


def _prepared(
    optimised: OptimizedModule, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Specialisation, _Arguments]:
    """The specialisation for a call, and the arguments of its graph.

    Raises:
        CaptureError: the model cannot be traced as one graph; the text says why.
    """
    made = optimised._specialiser.prepare(args, kwargs)
    if isinstance(made, CaptureFailure):
        raise CaptureError(f"{type(optimised.original).__name__} has no single graph: {made.reason}") from made.error
    tensors, _ = Template.of_call(args, kwargs)
    bound = made.signature.bind(tensors)
    assert bound is not None  # it was made for these
    return made, bound
