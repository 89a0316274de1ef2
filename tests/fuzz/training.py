"""A chunk of random models that are trained through torch.compile: results and gradients held against PyTorch's and float64."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx._lazy_graph_module import _use_lazy_graph_module

from fusepass.config import Algebra, override
from fusepass.garbage import collector_paused
from fusepass.numerics.check import check, compare, exact, nudged_results, observe, settled
from fusepass.training.backend import Backend
from tests.blackbox.ways import Step
from tests.fuzz.chunk import Example, Failure, Phases, draw, noted, quietly
from tests.fuzz.noise import is_noise
from tests.property.training import trained_models
from tests.support.batched import batched
from tests.support.lost import is_lost
from tests.support.on_a_gpu import trained_on_a_gpu
from tests.sweep.steps import as_on_a_gpu

_ENDS_GRAPHS = (DataDependentOutputException, DynamicOutputShapeException)
"""Where Python asks for a value, or sizes depend on values: only Dynamo ends graphs there."""


@dataclass
class _Prepared:
    example: Example
    eager: Step
    compiled: Step
    inputs: tuple[Tensor, ...]
    expected: Any
    exact: Any


def draw_trained(number: int, count: int) -> list[Example]:
    """`count` different examples; the same ones for the same number."""
    return draw(number, count, trained_models(large=True), (Algebra.SAFE, Algebra.SAFE, Algebra.OFF))


def run(
    examples: list[Example],
    device: str,
    phases: Phases | None = None,
    judging: Callable[[Example], object] = lambda example: None,
    *,
    partition: str = "own",
) -> list[Failure]:
    """Those of `examples` that are wrong, in order. With ``partition="gpu"`` joint graphs of a CPU are cut as for a GPU; with ``"h200"`` they
    are divided and lowered for one, too, and kernels are interpreted.

    `judging` is called with each example whose kernels are called next.
    """
    failures: list[Failure] = []
    prepared: list[_Prepared] = []
    phases = phases or Phases()
    cut = as_on_a_gpu() if partition == "gpu" else contextlib.nullcontext()
    lazily = _use_lazy_graph_module(True)  # type: ignore[no-untyped-call]
    with quietly(), cut, batched() as batch, collector_paused(), lazily, override(debug=True, tune="off"):
        with phases.timed("generate"):
            for example in examples:
                with noted(example, failures, device), override(algebra=example.level):
                    judging(example)
                    each = _prepare(example, device, partition)
                    if each is None:
                        continue
                    prepared.append(each)
                    if partition != "h200":  # where nothing is built, it is traced when it is judged
                        with batch.dry(), contextlib.suppress(*_ENDS_GRAPHS):
                            observe(each.compiled, each.inputs)
        with phases.timed("compile"):
            batch.compile()
        with phases.timed("judge"):
            for each in prepared:
                judging(each.example)
                with noted(each.example, failures, device), override(algebra=each.example.level):
                    failures += _judge(each)
                if is_lost(device):
                    break
    torch._dynamo.reset()
    return failures


def _prepare(example: Example, device: str, partition: str) -> _Prepared | None:
    """None where eager does not train, in its types or in float64: autograd forbids some writes, and some operators have no gradient."""
    module, inputs = example.model.make(device)
    wanted = _wanted(example, inputs)
    eager = Step(module, writes=True, wanted=wanted)
    try:
        expected, oracle = observe(copy.deepcopy(eager), inputs), exact(eager, inputs)
    except (RuntimeError, NotImplementedError):
        return None
    call: Callable[..., Any]
    if partition == "h200":
        call = trained_on_a_gpu(module, random.Random(example.model.seed))
    else:
        call = torch.compile(module, backend=Backend("step", {}), dynamic=False)
    return _Prepared(example, eager, Step(module, call, writes=True, wanted=wanted), inputs, expected, oracle)


def _wanted(example: Example, inputs: tuple[Tensor, ...]) -> list[int]:
    """Which of the floating-point inputs have gradients: all or some, by the model's seed; perhaps none where there are parameters."""
    count = sum(each.is_floating_point() for each in inputs)
    wanted = [number for number in range(count) if (example.model.seed >> number) % 4]
    return wanted if wanted or "nn." in "".join(example.model.layers.values()) else [0]


def _judge(prepared: _Prepared) -> list[Failure]:
    eager, inputs, oracle = prepared.eager, prepared.inputs, prepared.exact
    try:
        actual = observe(prepared.compiled, inputs, state=eager)
    except _ENDS_GRAPHS:
        return []
    outcome = compare(actual, prepared.expected, oracle)
    outcome = settled(outcome, actual, nudged_results(eager, inputs, observe), oracle)
    if outcome.ok:
        return []
    noise = is_noise(eager, inputs, outcome, prepared.example.model.coarsest)
    noise = noise or _is_traced_so(prepared)
    return [Failure(prepared.example, f"step: {outcome.explain()}", noise)]


def _is_traced_so(prepared: _Prepared) -> bool:
    """Whether PyTorch's own backend that does nothing is wrong, too: Dynamo and AOTAutograd lose some writes."""
    torch._dynamo.reset()
    module: nn.Module = prepared.eager.module
    call = torch.compile(module, backend="aot_eager", dynamic=False)
    traced = Step(module, call, writes=True, wanted=prepared.eager.wanted)
    return not check(prepared.eager, traced, prepared.inputs).ok
