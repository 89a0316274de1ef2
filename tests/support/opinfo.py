"""PyTorch's own sample inputs of its operators (`op_db`) as small models, and what fusion makes of them."""

from __future__ import annotations

import contextlib
import enum
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils import _pytree as pytree

import fusepass
from fusepass.codegen.generate import generate
from fusepass.codegen.search import candidate
from fusepass.config import override
from fusepass.numerics.check import check
from fusepass.patterns import partition
from fusepass.patterns.opclass import OpClass
from fusepass.patterns.pattern import Pattern, register, unregister
from fusepass.report.report import CaptureRoute, Report

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool)
"""The types that samples are drawn in, where an operator has them: one of each kind that promotion tells apart."""

_ALL = frozenset(OpClass) - {OpClass.OTHER}


class Status(enum.Enum):
    """What became of a sample."""

    FUSED = "fused"
    REFUSED = "refused"
    NOT_CAPTURED = "not captured"
    NOT_TENSOR_CODE = "not tensor code"
    NO_WORK = "no work"  # gives its input back, or has no elements to compute


@dataclass(frozen=True)
class Outcome:
    """A `Status`, and why; one reason per operator that does not fuse."""

    status: Status
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Case:
    """One call of an operator.

    Attributes:
        name: operator, type and number of the sample.
        function: the operator.
        arguments: ``(args, kwargs)`` with tensors.
    """

    name: str
    function: Callable[..., Any]
    arguments: Any

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(leaf for leaf in pytree.tree_leaves(self.arguments) if isinstance(leaf, torch.Tensor))

    def model(self, *, chain: bool) -> nn.Module:
        """A module whose inputs are `tensors`: the operator alone, or with another one behind it."""
        return _Sample(self.function, self.arguments, chain)


class _Sample(nn.Module):
    def __init__(self, function: Callable[..., Any], arguments: Any, chain: bool) -> None:
        super().__init__()
        self.call = lambda args, kwargs: function(*args, **kwargs)  # capture looks into attributes, not into functions
        leaves, self.form = pytree.tree_flatten(arguments)
        self.leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.holes = [number for number, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self.chain = chain
        self.dtype = next((leaf.dtype for leaf in leaves if isinstance(leaf, torch.Tensor)), None)

    def forward(self, *tensors: torch.Tensor) -> Any:
        # Where it runs in float64, so does an operator that is told the type of its tensors.
        leaves = [tensors[0].dtype if leaf is self.dtype and tensors else leaf for leaf in self.leaves]
        for hole, tensor in zip(self.holes, tensors, strict=True):
            leaves[hole] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.form)
        results = tuple(pytree.tree_leaves(self.call(args, kwargs)))
        return tuple(map(_behind, results)) if self.chain else results


def _behind(value: Any) -> Any:
    """A second operator that is exact, so that the numeric policy judges the first alone."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.logical_not() if value.dtype in (torch.bool, torch.uint8) else -value


@cache
def operators() -> tuple[Any, ...]:
    """PyTorch's operator database, by name; the import takes seconds."""
    from torch.testing._internal.common_methods_invocations import op_db

    return tuple(sorted(op_db, key=title))


def title(info: Any) -> str:
    """The name of an operator in the database, with its candidate."""
    variant = f" ({info.variant_test_name})" if info.variant_test_name else ""
    return f"{info.name}{variant}"


def cases(info: Any, dtype: torch.dtype, most: int | None = None, device: str = "cpu") -> Iterator[Case]:
    """The first `most` samples (all) of an operator in one type; none where it does not take the type."""
    if dtype not in info.supported_dtypes(device):
        return
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, sample in enumerate(islice(info.sample_inputs(device, dtype, requires_grad=False), most)):
            name = f"{title(info)} {str(dtype).removeprefix('torch.')} #{number}"
            yield Case(name, info.op, ((sample.input, *sample.args), sample.kwargs))


@contextlib.contextmanager
def everything_fuses() -> Iterator[None]:
    """While open, whatever may be in a region is in one, even an operator alone. No source is kept for a GPU."""
    whole = Pattern("whole", _ALL, _ALL, _ALL, 1, "what is legal is tried, whether it pays or not")
    register(whole)
    try:
        with (
            mock.patch.object(partition, "_gains", return_value=True),
            mock.patch.object(candidate, "generate", generate),
        ):
            yield
    finally:
        unregister(whole.name)


def fused(case: Case, *, chain: bool) -> tuple[nn.Module, Any]:
    """The model of `case` and what `optimize` makes of it, ready for a call."""
    model = case.model(chain=chain)
    with override(debug=True), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model, fusepass.optimize(model, example_inputs=case.tensors)


def problem(model: nn.Module, optimised: Any, case: Case) -> str | None:
    """What is wrong with the values that `optimised` gives, by the numeric policy, if anything is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcome = check(model, optimised, case.tensors)
    return None if outcome.ok else f"{case.name}: {outcome.explain()}"


def is_tensor_code(case: Case) -> bool:
    """Whether tensors are all that the operator gives, and it takes some. Runs it."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = pytree.tree_leaves(case.model(chain=False)(*(tensor.clone() for tensor in case.tensors)))
    return bool(case.tensors) and all(isinstance(result, torch.Tensor) for result in results)


def outcome_of(case: Case) -> Outcome:
    """What becomes of the operator alone."""
    if not is_tensor_code(case):
        return Outcome(Status.NOT_TENSOR_CODE)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = fusepass.explain(case.model(chain=False), *(tensor.clone() for tensor in case.tensors))
    return judged(report)


def summary(outcomes: Sequence[Outcome]) -> tuple[str, str]:
    """What is said of an operator, given what became of its samples: a word or two, and the reasons."""
    met = {outcome.status for outcome in outcomes}
    reasons = sorted(
        {reason for outcome in outcomes for reason in outcome.reasons if outcome.status is not Status.NO_WORK}
    )
    order = (Status.FUSED, Status.REFUSED, Status.NOT_CAPTURED, Status.NOT_TENSOR_CODE, Status.NO_WORK)
    word = next((status.value for status in order if status in met), "not on this device")
    if Status.FUSED in met and reasons:
        word = "fused in part"
    return word, "; ".join(reasons)


def judged(report: Report) -> Outcome:
    """The outcome that a report tells of. Writing a result back to an argument is no operator of its own."""
    if report.capture is not CaptureRoute.TRACED:
        return Outcome(Status.NOT_CAPTURED, (report.reason or "no reason is known",))
    reasons = {
        f"{refusal.target.removeprefix('aten.')}: {refusal.reason}"
        for refusal in report.refusals
        if refusal.target != "aten.copy_"
    }
    reasons |= {region.reason for region in report.regions if region.reason is not None}
    if reasons:
        empty = all(reason.endswith("a tensor is empty") for reason in reasons)
        return Outcome(Status.NO_WORK if empty else Status.REFUSED, tuple(sorted(reasons)))
    return Outcome(Status.FUSED if report.ops_total else Status.NO_WORK)
