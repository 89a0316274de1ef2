"""One workload measured: correctness, medians, kernel counts, host time, time to the first result."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import measure
from benchmarks.first_call import FirstCall, first_call
from benchmarks.implementations import Call, Implementation
from benchmarks.layers import Size, Workload
from benchmarks.limits import cost
from fusepass.numerics import check

# Bytes per element of the largest tensor while three results are compared: float64 for one, float32 for two.
_CHECK_BYTES = 48


@dataclass(frozen=True)
class Settings:
    """How every workload of a run is measured.

    Attributes:
        device: such as ``"cuda"``.
        size: which of a workload's two shapes.
        implementations: what is compared.
        seconds: how long the interleaved timing of one workload lasts.
        first_calls: names of the workloads whose time to the first result is measured in new processes.
    """

    device: str
    size: Size
    implementations: tuple[Implementation, ...]
    seconds: float = 1.0
    first_calls: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Outcome:
    """What one implementation did on one workload; None is 'not measured', `error` is what it raised."""

    timing: measure.Timing | None = None
    kernels: int | None = None
    host_us: float | None = None
    correct: bool | None = None
    check: str = ""
    first_call: FirstCall | None = None
    error: str = ""


@dataclass(frozen=True)
class Row:
    """Everything measured on one workload; `bytes_*` are fusepass's own count of its regions' traffic."""

    workload: str
    group: str
    limit_ms: float | None = None
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    regions: int | None = None
    fallbacks: int | None = None
    bytes_before: int | None = None
    bytes_after: int | None = None
    seconds: float = 0.0
    error: str = ""


def measure_workload(workload: Workload, settings: Settings) -> Row:
    """Measures one workload. An implementation that raises becomes an `Outcome.error`; the others go on."""
    started = time.perf_counter()
    with torch.no_grad():
        case = _Case(workload, settings)
        case.check()
        case.time()
        if workload.name in settings.first_calls:
            case.time_first_calls()
    return Row(
        workload=workload.name,
        group=workload.group.value,
        limit_ms=case.cost.limit_ms if settings.size is Size.FULL else None,
        outcomes={way.value: outcome for way, outcome in case.outcomes.items()},
        seconds=time.perf_counter() - started,
        **case.report(),
    )


class _Case:
    """A workload's model and inputs with a running call for each implementation that has not failed so far."""

    def __init__(self, workload: Workload, settings: Settings) -> None:
        torch._dynamo.reset()
        self.workload, self.settings = workload, settings
        self.device = torch.device(settings.device)
        self.cost = cost(workload, settings.size)
        self.model = workload.model(settings.size, self.device)
        self.inputs = workload.inputs(settings.size, self.device)
        self.calls: dict[Implementation, Call] = {}
        self.outcomes = {way: Outcome() for way in settings.implementations}
        for way in settings.implementations:
            self._attempt(way, partial(self._start, way))

    def check(self) -> None:
        """Compares output, buffers and inputs after the call with eager and float64, on memory full of NaN."""
        inputs = self._affordable_inputs()
        eager = check.observe(self.model, inputs)
        oracle = check.exact(self.model, inputs)
        for way, call in list(self.calls.items()):
            self._attempt(way, partial(self._compare, call, inputs, eager, oracle))

    def time(self) -> None:
        """Interleaved medians first, then what does not need a cold cache."""
        calls = {way.value: partial(call, *self.inputs) for way, call in self.calls.items()}
        redraw = partial(self.workload.redraw, self.settings.size, self.inputs)
        timings = measure.interleaved(calls, redraw, self.device, self.settings.seconds)
        for way in list(self.calls):
            self._attempt(way, partial(self._profile, timings[way.value], calls[way.value]))

    def time_first_calls(self) -> None:
        """Starts two processes for each implementation but eager, which has nothing to prepare."""
        for way in list(self.calls):
            if way is not Implementation.EAGER:
                self._attempt(way, partial(self._first_call, way))

    def report(self) -> dict[str, Any]:
        """What fusepass says of itself, as fields of `Row`."""
        optimised = self.calls.get(Implementation.FUSEPASS)
        if optimised is None:
            return {}
        report = optimised.report()  # type: ignore[attr-defined]
        return {
            "regions": len(report.regions),
            "fallbacks": sum(fallback.count for fallback in report.fallbacks),
            "bytes_before": sum(region.bytes_before for region in report.regions),
            "bytes_after": sum(region.bytes_after for region in report.regions),
        }

    def _attempt(self, way: Implementation, step: Callable[[], dict[str, Any]]) -> None:
        try:
            self.outcomes[way] = replace(self.outcomes[way], **step())
        except Exception as error:
            text = " ".join(str(error).split())
            self.outcomes[way] = replace(self.outcomes[way], error=f"{type(error).__name__}: {text:.300}")
            self.calls.pop(way, None)

    def _start(self, way: Implementation) -> dict[str, Any]:
        call = way.prepare(self.model)
        call(*self.inputs)
        self.calls[way] = call
        return {}

    def _affordable_inputs(self) -> tuple[Tensor, ...]:
        """Samples whose comparison fits in the device's memory: all of them on a large GPU."""
        if self.device.type != "cuda":
            return self.inputs
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self.device)
        batch = self.inputs[0].shape[0]
        affordable = max(2, batch * free // (self.cost.largest * _CHECK_BYTES))
        return tuple(x[:affordable] if x.shape[0] == batch else x for x in self.inputs)

    def _compare(self, call: Call, inputs: tuple[Tensor, ...], eager: Any, oracle: Any) -> dict[str, Any]:
        measure.poison(self.device, 4 * self.cost.largest)
        outcome = check.compare(check.observe(call, inputs, state=self.model), eager, oracle)
        return {"correct": outcome.ok, "check": outcome.explain()}

    def _profile(self, timing: measure.Timing, call: Callable[[], object]) -> dict[str, Any]:
        kernels = measure.kernel_count(call, self.device)
        tiny = timing.median < 1.0  # beyond, the call waits for the device and would take long
        return {
            "timing": timing,
            "kernels": kernels,
            "host_us": measure.host_us(call, self.device) if tiny else None,
        }

    def _first_call(self, way: Implementation) -> dict[str, Any]:
        return {"first_call": first_call(self.workload.name, way.value, self.settings.size.value, self.settings.device)}
