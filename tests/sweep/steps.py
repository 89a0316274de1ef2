"""A step of training of one model, through the backend of torch.compile, cut as for a GPU: are its gradients as exact as eager's?"""

from __future__ import annotations

import contextlib
import copy
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fusepass.compile.pipeline import CompiledGraph
from fusepass.config import override
from fusepass.numerics.check import in_float64
from fusepass.training import attention, backend
from fusepass.training.backend import Backend
from fusepass.training.gradients import BENDS, DECOMPOSITIONS
from fusepass.training.joint import minimum_cut
from tests.support.interpreted import interpreted
from tests.sweep.entry import Entry, Inputs
from tests.sweep.trial import Outcome, where

MODE = "step"
"""What outcomes call it, beside ``eval`` and ``train``."""

_TIMES, _LEAST = 3, 2e-6
"""How far gradients may be from float64's: times eager's distance, and part of their norm."""

_DRAWS, _ULP = 8, 6e-8
"""Times that weights are moved to see what a step makes of it, and how far: by half of what their last bit is worth."""

_SMALL = 1e-6
"""Part of the largest gradient of a model, below which one is what is left of terms that cancel."""

Gradients = dict[str, Tensor]


def run(entry: Entry) -> Outcome:
    """Train `entry` by one step on a CPU, kernels interpreted, in eager, in eager as float64, and compiled."""
    torch._dynamo.reset()
    start, made, detail = time.process_time(), list[CompiledGraph](), ""
    with override(debug=True, tune="off"), warnings.catch_warnings(), interpreted(), as_on_a_gpu():
        warnings.simplefilter("ignore")
        try:
            torch.manual_seed(0)
            model, inputs = entry.make().train(), entry.inputs()
            _switch_dropout_off(model)
            verdict = _judge(model, inputs, made)
        except Exception as error:
            text = next(iter(str(error).splitlines()), "")
            verdict, detail = f"raises {type(error).__name__}: {text[:150]}", traceback.format_exc()
    reports = [graph.report for graph in made]
    return Outcome(
        entry.package,
        entry.name,
        MODE,
        where("cpu", "interpreted"),
        verdict,
        detail,
        ops=sum(report.ops_total for report in reports),
        fused=sum(report.ops_fused for report in reports),
        regions=sum(len(report.regions) for report in reports),
        failed=tuple(f"{each.name}: {each.reason}" for report in reports for each in report.regions if each.reason),
        total_seconds=time.process_time() - start,
    )


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """What is done to graphs of GPUs alone."""
    with (
        mock.patch.object(backend, "partition_joint", minimum_cut),
        mock.patch.object(backend, "DECOMPOSITIONS", DECOMPOSITIONS | BENDS),
        mock.patch.object(attention, "_is_served", return_value=True),
    ):
        yield


def _switch_dropout_off(model: nn.Module) -> None:
    """Float64 would draw other numbers."""
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and (name == "drop_prob" or "dropout" in name):
                setattr(module, name, 0.0)
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0


def _judge(model: nn.Module, inputs: Inputs, made: list[CompiledGraph]) -> str:
    wide, exact_inputs = in_float64(model, inputs)
    exact = _step(wide, exact_inputs)
    eager = _step(copy.deepcopy(model), inputs)
    compiled = copy.deepcopy(model)
    call = torch.compile(compiled, backend=Backend(MODE, {}, observe=made.append))
    found, theirs = (_errors(each, exact, eager) for each in (_step(compiled, inputs, call), eager))
    norms = {name: float(gradient.nan_to_num(0.0, 0.0, 0.0).norm()) for name, gradient in exact.items()}
    least = _SMALL * max(norms.values(), default=0.0)
    wrong = [name for name in exact if not found[name] <= _TIMES * theirs[name] + _LEAST * norms[name] + least]
    if not wrong:
        return "ok"
    moved = _sensitivity(model, inputs, exact, eager)
    wrong = [name for name in wrong if not found[name] <= _TIMES * moved[name]]
    told = ", ".join(f"{name}: {found[name]:.1e} ({theirs[name]:.1e}, moved {moved[name]:.1e})" for name in wrong[:3])
    return f"gradients are wrong: {told}" if wrong else "ok"


def _step(model: nn.Module, inputs: Inputs, call: Callable[..., Any] | None = None) -> Gradients:
    """The gradients of all parameters that have one, of a sum of the results that ask for one, weighted at random."""
    args, kwargs = inputs
    result = (model if call is None else call)(*args, **kwargs)
    leaves = pytree.tree_leaves(dict(result) if hasattr(result, "keys") else result)
    chance = torch.Generator().manual_seed(0)
    asked = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    loss = sum((leaf * torch.randn(leaf.shape, generator=chance).to(leaf.dtype)).sum() for leaf in asked)
    assert isinstance(loss, Tensor)
    loss.backward()  # type: ignore[no-untyped-call]
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def _errors(found: Gradients, exact: Gradients, eager: Gradients) -> dict[str, float]:
    """The distance of each gradient where eager's are numbers, in both types; one that is missing is zero, as PyTorch's own backends have it."""
    distances = {}
    for name, gradient in exact.items():
        difference = found[name].double() - gradient if name in found else gradient
        known = gradient.isfinite() & (eager[name].isfinite() if name in eager else True)
        distances[name] = float(difference.where(known, 0.0).norm())
    return distances


def _sensitivity(model: nn.Module, inputs: Inputs, exact: Gradients, eager: Gradients) -> dict[str, float]:
    """How far eager's gradients are where weights are moved by what rounding moves them: values near a bend change sides."""
    most = dict.fromkeys(exact, 0.0)
    for seed in range(_DRAWS):
        moved, chance = copy.deepcopy(model), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in moved.parameters():
                parameter.mul_(1 + _ULP * (2 * torch.rand(parameter.shape, generator=chance) - 1))
        for name, error in _errors(_step(moved, inputs), exact, eager).items():
            most[name] = max(most[name], error)
    return most
