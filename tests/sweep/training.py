"""Three steps of training of one model as users write them: through `fusepass.optimize` or `torch.compile`, beside eager."""

from __future__ import annotations

import copy
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fusepass
from fusepass.compile.pipeline import CompiledGraph
from fusepass.config import override
from fusepass.numerics.check import nudged
from fusepass.report.report import Report
from fusepass.runtime.fallbacks import FallbackCounter
from fusepass.training.backend import Backend
from tests.sweep.entry import Entry, Inputs
from tests.sweep.trial import KERNELS, Outcome, where

MODES = ("optimize", "compile")
"""What outcomes call the two ways."""

_STEPS, _RATE = 3, 1e-3
_NEAR, _SMALL = 2e-5, 1e-6
"""How far a value may be from eager's: part of its norm, and of the largest norm of a step's gradients."""

_TIMES, _NUDGES = 4, 4
"""What is further away may be so many times as far as eager's own values are, where all parameters are one rounding off."""


@dataclass(frozen=True)
class _Step:
    """What a step leaves: a description of forward's result, values by name, and the random generator."""

    result: str
    values: dict[str, Tensor]
    generator: Tensor


def run(entry: Entry, mode: str, kernels: str = "original") -> Outcome:
    """Train `entry` by three steps on a CPU, in eager and in one of `MODES`, with `KERNELS`; dropout draws as eager's does."""
    torch._dynamo.reset()
    start, detail, reports = time.process_time(), "", list[Report]()
    fallbacks: tuple[str, ...] = ()
    with override(debug=True, tune="off"), warnings.catch_warnings(), KERNELS[kernels]():
        warnings.simplefilter("ignore")
        try:
            torch.manual_seed(0)
            model = entry.make().train()
            batches = list(_batches(entry))
            eager = _train(copy.deepcopy(model), None, batches)
            other = copy.deepcopy(model)
            call, told = _optimized(other) if mode == "optimize" else _compiled(other)
            found = _train(other, call, batches)
            reports, fallbacks = told()
            verdict = _judge(model, batches, eager, found)
        except Exception as error:
            text = next(iter(str(error).splitlines()), "")
            verdict, detail = f"raises {type(error).__name__}: {text[:150]}", traceback.format_exc()
    return Outcome(
        entry.package,
        entry.name,
        mode,
        where("cpu", kernels),
        verdict,
        detail,
        route=",".join(dict.fromkeys(report.capture.value for report in reports)),
        ops=sum(report.ops_total for report in reports),
        fused=sum(report.ops_fused for report in reports),
        regions=sum(len(report.regions) for report in reports),
        failed=tuple(f"{each.name}: {each.reason}" for report in reports for each in report.regions if each.reason)
        + fallbacks,
        reason="; ".join(report.reason for report in reports if report.reason),
        total_seconds=time.process_time() - start,
    )


def _batches(entry: Entry) -> Iterator[Inputs]:
    for step in range(_STEPS):
        torch.manual_seed(step)
        yield entry.inputs()


_Told = Callable[[], tuple[list[Report], tuple[str, ...]]]


def _optimized(model: nn.Module) -> tuple[Callable[..., Any], _Told]:
    fused = fusepass.optimize(model)

    def told() -> tuple[list[Report], tuple[str, ...]]:
        report = fused.report()
        parts = [report] if report.backward is None else [report, report.backward]
        refused = (
            f"{each.target}: {each.reason}" for each in report.refusals if each.target in ("training", "AOTAutograd")
        )
        return parts, (*_texts(report.fallbacks), *refused)

    return fused, told


def _compiled(model: nn.Module) -> tuple[Callable[..., Any], _Told]:
    made, counter = list[CompiledGraph](), FallbackCounter()
    call = torch.compile(model, backend=Backend("graph", {}, fallbacks=counter, observe=made.append))
    return call, lambda: ([graph.report for graph in made], _texts(counter.records()))


def _texts(fallbacks: Sequence[Any]) -> tuple[str, ...]:
    return tuple(f"{each.count} x {each.where}: {each.reason}" for each in fallbacks)


def _train(model: nn.Module, call: Callable[..., Any] | None, batches: Sequence[Inputs]) -> list[_Step]:
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], _RATE)
    steps = []
    for number, (args, kwargs) in enumerate(batches):
        torch.manual_seed(number)
        optimizer.zero_grad()
        result = (model if call is None else call)(*copy.deepcopy(args), **copy.deepcopy(kwargs))
        leaves = list(_leaves(result))
        loss = _loss(leaves)
        loss.backward()  # type: ignore[no-untyped-call]
        values = {f"result {place}": leaf.detach().clone() for place, leaf in enumerate(leaves)}
        values |= {
            f"gradient of {name}": each.grad.clone() for name, each in model.named_parameters() if each.grad is not None
        }
        optimizer.step()
        values |= {f"buffer {name}": each.clone() for name, each in model.named_buffers()}
        steps.append(_Step(_told(result, leaves), values, torch.get_rng_state()))
    return steps


def _leaves(result: Any) -> Iterator[Tensor]:
    """The tensors in what a forward gives, whatever holds them."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, dict):
        for value in result.values():
            yield from _leaves(value)
    elif isinstance(result, (list, tuple)):
        for value in result:
            yield from _leaves(value)
    elif hasattr(result, "__dict__"):
        for value in vars(result).values():
            yield from _leaves(value)


def _told(result: Any, leaves: Sequence[Tensor]) -> str:
    """Types and shapes of a result."""
    tensors = ", ".join(f"{leaf.dtype}{list(leaf.shape)}{'*' * leaf.requires_grad}" for leaf in leaves)
    return f"{type(result).__name__}({tensors})"


def _loss(leaves: Sequence[Tensor]) -> Tensor:
    """A mean of the results that ask for gradients, weighted at random."""
    chance = torch.Generator().manual_seed(0)
    asked = [leaf for leaf in leaves if leaf.requires_grad and leaf.numel()]
    assert asked, "no result asks for a gradient"
    loss = sum(
        (leaf * torch.randn(leaf.shape, generator=chance).to(leaf.dtype)).sum() / leaf.numel() ** 0.5 for leaf in asked
    )
    assert isinstance(loss, Tensor)
    return loss


def _judge(model: nn.Module, batches: Sequence[Inputs], eager: list[_Step], found: list[_Step]) -> str:
    wrong: list[tuple[int, str, float, float]] = []
    for number, (theirs, ours) in enumerate(zip(eager, found, strict=True)):
        if ours.result != theirs.result:
            return f"step {number}: the result is {ours.result[:200]}, eager's {theirs.result[:200]}"
        if not torch.equal(ours.generator, theirs.generator):
            return f"step {number}: the random generator is elsewhere afterwards than eager leaves it"
        missing = {name for name in theirs.values.keys() ^ ours.values.keys() if not _is_zero(name, theirs, ours)}
        if missing:
            return f"step {number}: {', '.join(sorted(missing)[:3])}: there in one way alone"
        largest = max(
            (float(value.norm()) for name, value in theirs.values.items() if name.startswith("gradient")), default=0.0
        )
        for name, value in theirs.values.items():
            if name not in ours.values:
                continue
            if ours.values[name].shape != value.shape or ours.values[name].dtype != value.dtype:
                return f"step {number}: {name} is {ours.values[name].dtype}{list(ours.values[name].shape)}"
            error = _error(ours.values[name], value)
            least = _SMALL * largest if name.startswith("gradient") else _SMALL
            allowed = _NEAR * _norm(value) + least
            if not error <= allowed:
                wrong.append((number, name, error, allowed))
    if not wrong:
        return "ok"
    moved = _moved(model, batches, eager)
    wrong = [each for each in wrong if not each[2] <= max(each[3], _TIMES * moved[each[0], each[1]])]
    told = "; ".join(
        f"step {number}: {name}: {error:.1e} ({moved[number, name]:.1e})" for number, name, error, _ in wrong[:3]
    )
    return f"{len(wrong)} wrong: {told}" if wrong else "ok"


def _is_zero(name: str, *steps: _Step) -> bool:
    """A gradient that is missing is as good as zeros."""
    return name.startswith("gradient") and all(not step.values[name].any() for step in steps if name in step.values)


def _norm(value: Tensor) -> float:
    return float(value.double().nan_to_num(0.0, 0.0, 0.0).norm()) if not value.is_complex() else float(value.norm())


def _error(ours: Tensor, theirs: Tensor) -> float:
    """Their distance; infinite where one is no number and the other is, or where what is counted differs."""
    if not (theirs.is_floating_point() or theirs.is_complex()):
        return 0.0 if torch.equal(ours, theirs) else float("inf")
    if not torch.equal(ours.isfinite(), theirs.isfinite()):
        return float("inf")
    return _norm((ours - theirs).where(theirs.isfinite(), 0.0))


def _moved(model: nn.Module, batches: Sequence[Inputs], eager: list[_Step]) -> dict[tuple[int, str], float]:
    """How far eager's values are where parameters and inputs are one rounding off."""
    most: dict[tuple[int, str], float] = {}
    for seed in range(_NUDGES):
        chance, moved = torch.Generator().manual_seed(seed), copy.deepcopy(model)
        for parameter in moved.parameters():
            parameter.data = nudged(parameter.data, chance)
        others = pytree.tree_map_only(Tensor, lambda tensor, chance=chance: nudged(tensor, chance), list(batches))
        for number, (theirs, found) in enumerate(zip(eager, _train(moved, None, others), strict=True)):
            for name, value in theirs.values.items():
                error = _error(found.values[name], value) if name in found.values else _norm(value)
                most[number, name] = max(most.get((number, name), 0.0), error)
    return most
