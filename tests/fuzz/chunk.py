"""A chunk of random models: drawn from one seed, generated, compiled together, and held against PyTorch."""

from __future__ import annotations

import contextlib
import logging
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any
from unittest import mock

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture.engine import ConjectureRunner
from torch.utils import _pytree as pytree

import fusepass
from fusepass.config import Algebra, override
from fusepass.numerics.check import check, observe
from tests.fuzz.limits import is_aliased_otherwise, is_laid_out_otherwise
from tests.fuzz.noise import is_noise
from tests.fuzz.places import is_elsewhere
from tests.property.random_models import marked_models
from tests.property.script import Model, copies
from tests.support.batched import batched
from tests.support.lost import is_lost

KNOWN = (
    "an output whose memory has gaps",
    "an output that overlaps itself",
    "as_strided of a tensor whose memory has gaps",
)
"""Regions that lowering gives back as a whole, visibly."""

LEVELS = (Algebra.SAFE, Algebra.SAFE, Algebra.SAFE, Algebra.OFF, Algebra.FINITE)


@dataclass(frozen=True)
class Example:
    """A model, and the level of algebra it is optimised at."""

    model: Model
    level: Algebra

    @property
    def fair(self) -> bool:
        """Whether the level may meet the model's numbers: one of them assumes that all are finite."""
        return self.level is not Algebra.FINITE or not any(word in self.model.text for word in ("inf", "nan"))


@dataclass(frozen=True)
class Failure:
    """An example, and what is wrong with it.

    Attributes:
        noise: it is nothing but rounding errors, or what documents name: places of infinities, Dynamo's limits.
        lost: the device is of no more use to this process, so that nothing was tried after it.
    """

    example: Example
    problem: str
    noise: bool = False
    lost: bool = False

    @property
    def kind(self) -> str:
        """What a smaller example must have in common with this one."""
        return self.problem.partition(":")[0]


@dataclass
class Prepared:
    """An example that is generated, and compiled soon."""

    example: Example
    module: torch.nn.Module
    inputs: tuple[torch.Tensor, ...]
    fused: Any


@dataclass
class Phases:
    """Where the time goes: seconds by the name of a phase."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """What is done while open counts for `name`."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start


class _Enough(Exception):
    """What was to be drawn is there."""


def draw(
    number: int, count: int, models: st.SearchStrategy[Model] | None = None, levels: Sequence[Algebra] = LEVELS
) -> list[Example]:
    """`count` different examples; the same ones for the same number. They are of `models`: any, marked.

    They are drawn without oneDNN, whose convolutions of half precision crash on processors with AMX: outside of
    `tests.farm`, which keeps oneDNN from using it, too.
    """
    found: dict[str, Example] = {}

    @seed(number)
    @settings(
        max_examples=2 * count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(model=marked_models(large=True) if models is None else models, level=st.sampled_from(levels))
    def collect(model: Model, level: Algebra) -> None:
        example = Example(model, level)
        if example.fair and len(found) < count:
            found.setdefault(model.text, example)
        if len(found) == count:
            raise _Enough

    plain = torch.backends.mkldnn.flags(enabled=False)
    fresh = mock.patch.object(
        ConjectureRunner, "generate_mutations_from"
    )  # models that hardly differ from the last one
    with plain, fresh, contextlib.suppress(_Enough):  # as a failing test, the one way to end before all is drawn
        collect()
    return list(found.values())


def run(
    examples: list[Example],
    device: str,
    phases: Phases | None = None,
    judging: Callable[[Example], object] = lambda example: None,
) -> list[Failure]:
    """Those of `examples` that are wrong, in order; ends with one that the device is lost to.

    `judging` is called with each example whose kernels are called next.
    """
    failures: list[Failure] = []
    prepared: list[Prepared] = []
    phases = phases or Phases()
    with quietly(), batched() as batch, override(debug=True, tune="off"):
        with phases.timed("generate"):
            for example in examples:
                with noted(example, failures, device):
                    prepared.append(_prepare(example, device))
                    with contextlib.suppress(Exception), batch.dry(), override(algebra=example.level):
                        observe(prepared[-1].fused, prepared[-1].inputs)  # wrong numbers may be rejected
        with phases.timed("compile"):
            batch.compile()
        with phases.timed("judge"):
            for each in prepared:
                before = len(failures)
                judging(each.example)
                with noted(each.example, failures, device), override(algebra=each.example.level):
                    failures += _judge(each)
                if len(failures) > before and is_lost(device):
                    return [*failures[:-1], replace(failures[-1], lost=True)]
    return failures


def _prepare(example: Example, device: str) -> Prepared:
    module, inputs = example.model.make(device)
    given_ = copies(dict(enumerate(inputs)), device).values()
    with override(algebra=example.level), torch.no_grad():
        return Prepared(example, module, inputs, fusepass.optimize(module, example_inputs=tuple(given_)))


def _judge(prepared: Prepared) -> list[Failure]:
    """What is wrong, if anything is. The second call takes the short way; where it gives the same bits, it is judged."""
    module, inputs, example = prepared.module, prepared.inputs, prepared.example
    results: list[Any] = []

    def kept(*arguments: Any) -> Any:
        results.append(prepared.fused(*arguments))
        return results[-1]

    for call in ("first", "second"):
        if call == "second" and _same(results[0], observe(prepared.fused, inputs, state=module)["output"]):
            break
        outcome = check(module, kept, inputs)
        if not outcome.ok:
            noise = is_noise(module, inputs, outcome, example.model.coarsest)
            noise = noise or is_elsewhere(example.model, module, prepared.fused, inputs, outcome)
            noise = noise or is_laid_out_otherwise(module, prepared.fused, inputs, outcome)
            return [Failure(example, f"{call} call: {outcome.explain()}", noise)]
    eager, actual = (sharing(call, module, inputs) for call in (module, prepared.fused))
    if eager != actual:
        noise = is_aliased_otherwise(module, prepared.fused, lambda call: sharing(call, module, inputs))
        return [Failure(example, f"memory is shared otherwise: {actual} instead of {eager}", noise)]
    reasons = [region.reason for region in prepared.fused.report().regions]
    failed = [reason for reason in reasons if reason is not None and reason not in KNOWN]
    return [Failure(example, f"a region fell back: {failed[0]}")] if failed else []


def _same(first: Any, second: Any) -> bool:
    pairs = zip(pytree.tree_leaves(first), pytree.tree_leaves(second), strict=True)
    with torch.no_grad():  # a view of a parameter that was written may not be read otherwise
        return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs if isinstance(a, torch.Tensor))


def sharing(call: Callable[..., Any], module: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Which parameters, buffers, inputs and results of a call share memory, as pairs; what is empty has none."""
    tensors: list[torch.Tensor] = []

    def observed(*arguments: torch.Tensor) -> Any:
        result = call(*arguments)
        passed = [leaf for leaf in pytree.tree_leaves((arguments, result)) if isinstance(leaf, torch.Tensor)]
        tensors.extend([*module.parameters(), *module.buffers(), *passed])
        return result

    observe(observed, inputs, state=module)
    memory = [tensor.untyped_storage().data_ptr() if tensor.numel() else None for tensor in tensors]
    return [(i, j) for i, j in combinations(range(len(tensors)), 2) if memory[i] is not None and memory[i] == memory[j]]


@contextlib.contextmanager
def noted(example: Example, failures: list[Failure], device: str) -> Iterator[None]:
    """An exception is a failure, unless eager raises one, too: some operators take less on a GPU than where models are drawn."""
    try:
        yield
    except Exception as error:  # whatever it is
        if _eager_raises(example, device):
            return
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {str(error)[:500]} ({where.name}, line {where.lineno})"
        failures.append(Failure(example, text))


def _eager_raises(example: Example, device: str) -> bool:
    if is_lost(device):
        return False
    try:
        module, inputs = example.model.make(device)
        observe(module, inputs)
    except Exception:
        return True
    return is_lost(device)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """No warnings, and no log of what Dynamo cannot trace: the report says it."""
    logger = logging.getLogger("torch._dynamo")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
