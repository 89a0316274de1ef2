"""One model in one mode: is the result right, how much was fused, what was not and why, how long did Python take."""

from __future__ import annotations

import collections
import contextlib
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils import _pytree as pytree

import fusepass
from fusepass.config import override
from fusepass.numerics.check import check, observe
from fusepass.report.report import Report
from tests.fuzz.noise import is_noise
from tests.support.batched import Batch, batched
from tests.support.interpreted import interpreted, original_operators
from tests.sweep.entry import Entry

_STAGES = ("capture", "simplify", "partition", "generate", "splice")
"""Stages of a first call that run in Python; building and loading depend on the compiler and the cache."""


@dataclass(frozen=True)
class Outcome:
    """What became of one model in one mode.

    Attributes:
        package, name, mode: which model, and ``eval`` or ``train``.
        device: where it ran, and by which of `KERNELS`.
        verdict: ``ok``, or what is wrong, in one line.
        detail: a traceback or the comparison's text; empty where all is well.
        route: how the model was captured.
        ops, fused: operators in its graphs, and how many of them run in generated kernels.
        regions, kernels: numbers of both.
        refused: reasons why operators were left alone, with the number of operators.
        failed: reasons why regions run as their original operators.
        reason: why the model was not captured whole.
        seconds: CPU time of the first call in Python, by stage.
        total_seconds: CPU time of the whole trial.
    """

    package: str
    name: str
    mode: str
    device: str
    verdict: str
    detail: str = ""
    route: str = ""
    ops: int = 0
    fused: int = 0
    regions: int = 0
    kernels: int = 0
    refused: tuple[tuple[str, int], ...] = ()
    failed: tuple[str, ...] = ()
    reason: str = ""
    seconds: tuple[tuple[str, float], ...] = ()
    total_seconds: float = 0.0

    @classmethod
    def of(cls, told: dict[str, Any]) -> Outcome:
        """An outcome that was written as JSON."""
        pairs = {name: tuple(map(tuple, told[name])) for name in ("refused", "seconds")}
        return cls(**{**told, **pairs, "failed": tuple(told["failed"])})

    @property
    def ok(self) -> bool:
        """Whether the results are right and every region was generated."""
        return self.verdict == "ok" and not self.failed

    @property
    def share(self) -> float:
        """The part of the operators that is fused, 0 to 1."""
        return self.fused / self.ops if self.ops else 0.0

    @property
    def seconds_per_100_ops(self) -> float:
        """Python's part of the first call."""
        return 100 * sum(seconds for _, seconds in self.seconds) / self.ops if self.ops else 0.0


class _Call(nn.Module):
    """A model whose call takes ``(args, kwargs)`` as two positional arguments, which is what `check` passes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _comparable(self.model(*args, **kwargs))


def _comparable(result: Any) -> Any:
    """`result` with the tensors of a cache of keys and values in place of the cache, which compares by identity."""
    layers = getattr(result, "layers", None)
    if isinstance(layers, list):
        return [vars(layer) for layer in layers]
    if isinstance(result, dict):
        return {key: _comparable(value) for key, value in result.items()}
    return result


KERNELS: dict[str, Callable[[], contextlib.AbstractContextManager[Batch | None]]] = {
    "interpreted": interpreted,
    "compiled": batched,
    "original": original_operators,
}
"""How fused regions run: by the reference interpreter (CPU only), by a compiler's code, or as ATen operators (CPU only)."""


def where(device: str, kernels: str) -> str:
    """What an outcome calls the place where a model ran."""
    return f"{device}, {kernels}"


def run(entry: Entry, *, training: bool, device: str = "cpu", kernels: str = "interpreted") -> Outcome:
    """Build and optimise `entry`, and compare two calls, the second one of a specialisation that is there.

    Args:
        training: the mode of the model. Gradients are off in both.
        device: where it runs.
        kernels: a key of `KERNELS`.
    """
    if "torch._dynamo" in sys.modules:  # its limits on recompilation count for code that models share
        torch._dynamo.reset()
    start = time.process_time()
    mode = "train" if training else "eval"
    ran = where(device, kernels)
    report, detail = None, ""
    cpu_seconds = mock.patch.object(time, "perf_counter", time.process_time)  # the machine may be busy otherwise
    with override(debug=True, tune="off"), warnings.catch_warnings(), KERNELS[kernels]() as batch, cpu_seconds:
        warnings.simplefilter("ignore")
        try:
            torch.manual_seed(0)
            model = entry.make().train(training).to(device)
            inputs = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), entry.inputs())
            fused = fusepass.optimize(model)
            if batch is not None:
                _compile(batch, model, fused, inputs)
            verdict, detail = _judge(model, fused, inputs)
            report = fused.report()
        except Exception as error:
            text = next(iter(str(error).splitlines()), "")
            verdict, detail = f"raises {type(error).__name__}: {text[:150]}", traceback.format_exc()
    seconds = time.process_time() - start
    if report is None:
        return Outcome(entry.package, entry.name, mode, ran, verdict, detail, total_seconds=seconds)
    return replace(_outcome(entry, mode, ran, report), verdict=verdict, detail=detail, total_seconds=seconds)


def _compile(batch: Batch, model: nn.Module, fused: nn.Module, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
    """The kernels of a call together; what goes wrong in it shows in the next one."""
    with contextlib.suppress(Exception), batch.dry():
        observe(lambda args, kwargs: fused(*args, **kwargs), inputs, state=model)
    batch.compile()


def _judge(model: nn.Module, fused: nn.Module, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[str, str]:
    """``ok``, or what is wrong, and the comparison's text."""
    after = {}

    def candidate(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = fused(*args, **kwargs)
        after["fused"] = torch.get_rng_state()
        return _comparable(result)

    whole = _Call(model)
    for call in ("first", "second"):
        outcome = check(whole, candidate, inputs)
        if not outcome.ok and not is_noise(whole, inputs, outcome, torch.float32):
            return f"wrong in the {call} call", outcome.explain()
    with torch.no_grad(), torch.random.fork_rng():
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        whole(*inputs)
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
        if not torch.equal(after["fused"], torch.get_rng_state()):
            return "the random generator is elsewhere afterwards than eager leaves it", ""
    return "ok", ""


def _outcome(entry: Entry, mode: str, device: str, report: Report) -> Outcome:
    refused = collections.Counter(refusal.reason for refusal in report.refusals)
    return Outcome(
        entry.package,
        entry.name,
        mode,
        device,
        "ok",
        route=report.capture.value,
        ops=report.ops_total,
        fused=report.ops_fused,
        regions=len(report.regions),
        kernels=sum(len(region.kernels) for region in report.regions),
        refused=tuple(refused.most_common()),
        failed=tuple(f"{region.name}: {region.reason}" for region in report.regions if region.reason is not None),
        reason=report.reason or "",
        seconds=tuple((name, value) for name, value in report.seconds if name in _STAGES),
    )
