"""The numeric policy: a result is right when it is about as near to the float64 result as eager's own.

Three results are compared leaf by leaf: `actual` (what is judged), `eager` (PyTorch's operators one by one)
and `oracle` (the same model and inputs in float64). For a floating-point tensor both of

    max|actual - oracle|              <=  2 * max|eager - oracle|              +  U * eps * max|oracle|
    ||actual - oracle|| / ||oracle||  <=  2 * ||eager - oracle|| / ||oracle||  +  U * eps * s

must hold, `eps` being the spacing of the dtype at 1. The first finds one wrong element, the second a digit
lost everywhere. The factor 2 is for another order of the same sums. The last term is for results that eager
rounds to the exact value by luck. `s` is what many elements average such an ulp to: 1/sqrt(n) for n elements,
at least 1/sqrt(12), the root mean square of a rounding error in ulps. `U` counts ulps at the output's scale:

* float32: 4. Intermediate values are rounded (half an ulp each), and functions are good to 1 or 2 ulps.
* float16, bfloat16, float8: 1. Fused code computes in float32 and rounds once, half an ulp; the rest is for
  ties.
* float64: 1024. Here the oracle *is* eager, so eager's error reads zero and says nothing; ten bits are what a
  normalisation of data with a small spread costs. Twelve decimal digits stay guarded.

Results below the smallest normal number are further apart than `eps` of them: that number is the least scale.

NaN and infinities are compared by place: an element's kind (finite, +inf, -inf, NaN) must be eager's or the
rounded oracle's. Where those two agree there is no choice. They differ where half precision overflowed
inside eager's chain; there, being right is allowed. A value within the tolerance of the dtype's overflow
threshold may fall on either side of it. Shape, dtype, significant strides and device must be eager's;
an integer or a boolean must be eager's or the oracle's, which differ where rounding decides (the place of the larger of two numbers
that nearly tie).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_ULPS = {torch.float64: 1024.0, torch.float32: 4.0}
_ULPS_NARROW = 1.0
_CHUNK = 1 << 25  # elements judged at once: bounds the float64 temporaries to a few hundred MiB


@dataclass(frozen=True)
class Error:
    """A distance from the oracle: `maximum` is absolute, `l2` relative to the oracle's norm."""

    maximum: float
    l2: float

    def within(self, allowed: Error) -> bool:
        """Whether both measures are finite and small enough; NaN never is."""
        return self.maximum <= allowed.maximum and self.l2 <= allowed.l2


_EXACT = Error(0.0, 0.0)


@dataclass(frozen=True)
class Leaf:
    """The judgement on one leaf of a result. `problem` is empty when it is accepted."""

    path: str
    problem: str = ""
    actual: Error = _EXACT
    eager: Error = _EXACT
    allowed: Error = _EXACT

    @property
    def strain(self) -> float:
        """How much of the allowance is used: 1 is the limit."""
        pairs = ((self.actual.maximum, self.allowed.maximum), (self.actual.l2, self.allowed.l2))
        return max(used / limit if limit else (math.inf if used else 0.0) for used, limit in pairs)

    def numbers(self) -> str:
        """Both errors beside what is allowed and what eager has."""
        a, e, limit = self.actual, self.eager, self.allowed
        return (
            f"max error {a.maximum:.2e} (allowed {limit.maximum:.2e}, eager {e.maximum:.2e}), "
            f"relative L2 {a.l2:.2e} (allowed {limit.l2:.2e}, eager {e.l2:.2e})"
        )


@dataclass(frozen=True)
class Comparison:
    """The judgement on a whole result, one `Leaf` per tensor or plain value in it."""

    leaves: tuple[Leaf, ...]

    @property
    def ok(self) -> bool:
        """Whether every leaf is accepted."""
        return not any(leaf.problem for leaf in self.leaves)

    def explain(self) -> str:
        """One line: the first problem, or how near the worst leaf came to its limit."""
        wrong = [leaf for leaf in self.leaves if leaf.problem]
        if wrong:
            rest = f" (and {len(wrong) - 1} more of {len(self.leaves)} results)" if len(wrong) > 1 else ""
            return f"{wrong[0].path or 'result'}: {wrong[0].problem}{rest}"
        if not self.leaves:
            return "ok: nothing to compare"
        worst = max(self.leaves, key=lambda leaf: leaf.strain)
        return f"ok: {len(self.leaves)} results, the worst is {worst.path or 'the result'}: {worst.numbers()}"


def compare(actual: Any, eager: Any, oracle: Any) -> Comparison:
    """Judges `actual` by the policy above; all three are pytrees of tensors, numbers and None of one form.

    `oracle` has float64 where `eager` has floating-point tensors. A difference is a `Leaf.problem`, never
    raised.
    """
    leaves, spec = pytree.tree_flatten(actual)
    expected, expected_spec = pytree.tree_flatten_with_path(eager)
    truth, truth_spec = pytree.tree_flatten(oracle)
    if spec != expected_spec:
        return Comparison((Leaf("", f"structure {spec} instead of {expected_spec}"),))
    if truth_spec != expected_spec:
        return Comparison((Leaf("", f"the oracle's structure is {truth_spec} instead of {expected_spec}"),))
    return Comparison(
        tuple(_judge(pytree.keystr(path), a, e, o) for a, (path, e), o in zip(leaves, expected, truth, strict=True))
    )


def _judge(path: str, actual: Any, eager: Any, oracle: Any) -> Leaf:
    if type(actual) is float and type(eager) is float:
        return _judge(path, *(torch.tensor(value, dtype=torch.float64) for value in (actual, eager, oracle)))
    if not isinstance(eager, Tensor) or not isinstance(actual, Tensor):
        same = type(actual) is type(eager) and actual == eager
        return Leaf(path, "" if same else f"{_brief(actual)} instead of {_brief(eager)}")
    if problem := _metadata_problem(actual, eager) or _oracle_problem(oracle, eager):
        return Leaf(path, problem)
    if not (eager.is_floating_point() or eager.is_complex()):
        wrong = int(((actual != eager) & (actual != oracle.to(actual.device))).sum())
        return Leaf(path, f"{wrong} of {eager.numel()} {eager.dtype} values differ" if wrong else "")
    return _judge_values(path, actual, eager, oracle.to(actual.device))


def _brief(value: Any) -> str:
    return f"a {value.dtype} tensor" if isinstance(value, Tensor) else f"{type(value).__name__} {value!r:.60}"


def _metadata_problem(actual: Tensor, eager: Tensor) -> str:
    pairs = {
        "shape": (tuple(actual.shape), tuple(eager.shape)),
        "dtype": (actual.dtype, eager.dtype),
        "device": (actual.device, eager.device),
        "layout": (actual.layout, eager.layout),
    }
    for name, (got, wanted) in pairs.items():
        if got != wanted:
            return f"{name} {got} instead of {wanted}"
    if _strides(actual) != _strides(eager):
        return f"strides {actual.stride()} instead of {eager.stride()} for shape {tuple(eager.shape)}"
    return ""


def _oracle_problem(oracle: Any, eager: Tensor) -> str:
    if isinstance(oracle, Tensor) and oracle.shape == eager.shape:
        return ""
    return f"the oracle is {_brief(oracle)}, not a tensor of shape {tuple(eager.shape)}"


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """The strides that address memory: an axis of one element, or a tensor of none, has no such stride."""
    if tensor.numel() == 0:
        return ()
    return tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)


def _judge_values(path: str, actual: Tensor, eager: Tensor, oracle: Tensor) -> Leaf:
    dtype = actual.dtype.to_real()
    measured = _Measured(dtype)
    for chunk in _chunks(actual, eager, oracle):
        measured.add(*chunk)
    ulps = _ULPS.get(dtype, _ULPS_NARROW) * torch.finfo(dtype).eps
    actual_error, eager_error = measured.errors()
    spread = max(actual.numel(), 1) ** -0.5
    allowed = Error(
        2 * eager_error.maximum + ulps * measured.scale,
        2 * eager_error.l2 + ulps * max(spread, 12**-0.5),
    )
    leaf = Leaf(path, "", actual_error, eager_error, allowed)
    if measured.not_finite:
        chunks = _chunks(actual, eager, oracle)
        misplaced = sum(_misplaced(a, e, o, dtype, allowed.maximum) for a, e, o in chunks)
        if misplaced:
            problem = f"{misplaced} of {actual.numel()} elements are NaN, infinite or finite out of place"
            return replace(leaf, problem=problem)
    if actual_error.within(allowed):
        return leaf
    # For complex results the last axis of the place is the real or imaginary part.
    shape = tuple(actual.shape) + ((2,) if actual.is_complex() else ())
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(measured.worst), shape)) if shape else ()
    return replace(leaf, problem=f"{leaf.numbers()}, worst at {place}")


def _chunks(actual: Tensor, eager: Tensor, oracle: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The same elements of each tensor as flat float64 pieces, complex numbers as pairs."""
    a, e, o = (_flat(tensor) for tensor in (actual, eager, oracle))
    for start in range(0, a.numel(), _CHUNK):
        piece = slice(start, start + _CHUNK)
        yield a[piece].double(), e[piece].double(), o[piece].double()


def _flat(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return real.detach().reshape(-1)


class _Measured:
    """Running maxima and sums of squares over the chunks of one leaf."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._least = torch.finfo(dtype).smallest_normal
        self.scale = self._least
        self._dtype = dtype
        self.not_finite = False
        self.worst = 0
        self._max = [0.0, 0.0]  # actual, eager
        self._squares = [0.0, 0.0, 0.0]  # actual, eager, oracle
        self._seen = 0

    def add(self, actual: Tensor, eager: Tensor, oracle: Tensor) -> None:
        # Where the oracle is not finite but eager is (the root of a rounding error), eager is all there is.
        truth = torch.where(oracle.isfinite(), oracle, eager)
        known = truth.to(self._dtype).isfinite()  # beyond its range only the place counts
        self.not_finite |= not bool((known & actual.isfinite() & eager.isfinite()).all())
        for side, value in enumerate((actual, eager)):
            error = torch.where(known & value.isfinite(), value - truth, 0.0).abs()
            largest = float(error.max())
            if side == 0 and largest > self._max[0]:
                self.worst = self._seen + int(error.argmax())
            self._max[side] = max(self._max[side], largest)
            self._squares[side] += float(error.square().sum())
        truth = torch.where(known, truth, 0.0)
        self.scale = max(self.scale, float(truth.abs().max()))
        self._squares[2] += float(truth.square().sum())
        self._seen += actual.numel()

    def errors(self) -> tuple[Error, Error]:
        norm = math.sqrt(self._squares[2]) or 1.0  # an oracle of zeros has no scale: errors are absolute then
        norm = max(norm, self._least * math.sqrt(self._seen))
        l2 = [math.sqrt(squares) / norm for squares in self._squares]
        return Error(self._max[0], l2[0]), Error(self._max[1], l2[1])


def _kind(values: Tensor) -> Tensor:
    """0 finite, 1 +inf, 2 -inf, 3 NaN."""
    return values.isposinf() * 1 + values.isneginf() * 2 + values.isnan() * 3


def _misplaced(actual: Tensor, eager: Tensor, oracle: Tensor, dtype: torch.dtype, tolerance: float) -> int:
    kind = _kind(actual)
    allowed = (kind == _kind(eager)) | (kind == _kind(oracle.to(dtype).double()))
    size, limit = oracle.abs(), torch.finfo(dtype).max
    borderline = (size + tolerance >= limit) & (size - tolerance <= limit)
    allowed |= borderline & ((kind == 0) | (actual == oracle.sign() * math.inf))
    return int((~allowed).sum())
