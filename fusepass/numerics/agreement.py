"""Whether generated code gives what a region's own operators give, judged on made-up inputs.

First the two are compared with each other. Rounding errors of a sum of n terms grow like the root of n, those of k
operators one after another like the root of k (Higham and Mary, A New Approach to Probabilistic Rounding Error Analysis,
2019), so results may be

    l2 = 4 * (sqrt(k) * u + sqrt(n) * v)

apart, relative to the norm, and 16 times that at one place, relative to the largest value. ``u`` is the unit roundoff of
the coarsest type among a result and the values that the operators make it of, ``v`` that of its sums, float32 at least: what
is beside it in the region, and in fewer digits, says nothing of it. Infinities and NaN must stand in the same places.
A wrong index is told from that by orders of magnitude, as the values are random.

What is further apart need not be wrong: eager may round to TF32, or a function may amplify errors. So then both are held
against the same operators in float64, by the policy of `fusepass.numerics.comparison`, with the operators on inputs that are one
rounding off as a second measure. Where even the operators are far off, nothing can be said.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from fusepass.numerics.check import nudged
from fusepass.numerics.comparison import compare

_SAFETY = 4.0
_PEAK = 16.0  # how much further than the norm's share a single value may be off
# Of whole numbers and truth values may differ: a comparison of nearly equal numbers turns out either way.
_FLIPPED = 1 / 1000
_FAR = 0.05  # relative error of the operators themselves, from which on nothing can be said
# Relative distance that counts as wrong even where there is no float64 to hold it against; TF32 stays below.
_GROSS = 0.01
_GROSS_BOUNDS = 30  # the same as a multiple of the bound, for halves
_NUDGES = 3

Call = Callable[..., Any]


class Verdict(enum.Enum):
    """What came of a comparison."""

    SAME = "same"
    DIFFERENT = "different"
    UNCLEAR = "unclear"


@dataclass(frozen=True)
class Agreement:
    """A verdict, and the numbers or the reason in words."""

    verdict: Verdict
    detail: str

    def __str__(self) -> str:
        how = "results agree" if self.verdict is Verdict.SAME else "results were not to be compared"
        return f"{how}: {self.detail}"


@dataclass(frozen=True)
class Tolerance:
    """How far results may be apart by rounding alone: `l2` relative to the norm, `peak` to the largest value."""

    l2: float

    @property
    def peak(self) -> float:
        return _PEAK * self.l2

    @classmethod
    def of(cls, graph: fx.GraphModule) -> tuple[Tolerance, ...]:
        """That of each result of a region's operators; its nodes carry descriptions of tensors."""
        (results,) = graph.graph.output_node().args
        return tuple(map(cls._of_result, results if isinstance(results, tuple | list) else (results,)))

    @classmethod
    def _of_result(cls, result: fx.Node) -> Tolerance:
        calls = _calls_for(result)
        # Of several results of one operator those count that are used, each by a node of its own.
        values = [value for node in (result, *calls) if isinstance(value := node.meta.get("val"), Tensor)]
        units = [torch.finfo(value.dtype).eps / 2 for value in values if value.is_floating_point()]
        unit = max(units, default=0.0)
        sums = min(unit, torch.finfo(torch.float32).eps / 2)
        longest = max(map(_longest_sum, calls), default=1)
        return cls(_SAFETY * (math.sqrt(len(calls)) * unit + math.sqrt(longest) * sums))


class Reference:
    """What a region's operators give for some inputs; results of generated code are held against it.

    Args:
        operators: the region's operators as a function of `inputs`.
        wide: the same in float64; None where that is not to be tried.
        inputs: made up; they are not changed.
        tolerances: how far each result may be apart.

    Attributes:
        expected: what the operators gave.
    """

    def __init__(
        self, operators: Call, wide: Call | None, inputs: Sequence[Tensor], tolerances: Sequence[Tolerance]
    ) -> None:
        self._operators, self._wide, self._inputs, self._tolerances = operators, wide, inputs, tolerances
        self.expected = as_tuple(operators(*inputs))

    @cached_property
    def truth(self) -> tuple[Tensor, ...] | None:
        """The results in float64; None where there are none."""
        try:
            return None if self._wide is None else as_tuple(self._wide(*map(_widened, self._inputs)))
        except RuntimeError:  # some operators take halves only, and memory may be short
            return None

    def judge(self, results: Any) -> Agreement | None:
        """The verdict on what generated code gave for the same inputs; None where `by_policy` has to give it."""
        actual = as_tuple(results)
        pairs = list(zip(actual, self.expected, strict=True))
        problem = next(filter(None, (_metadata(*pair) for pair in pairs)), None)
        if problem is not None:
            return Agreement(Verdict.DIFFERENT, problem)
        near = [_near(*pair, tolerance) for pair, tolerance in zip(pairs, self._tolerances, strict=True)]
        return None if any(each.verdict is Verdict.DIFFERENT for each in near) else _best(near)

    def by_policy(self, results: Any) -> Agreement:
        """The verdict on results that are further apart than rounding explains."""
        actual, truth = as_tuple(results), self.truth
        if truth is None:
            judged = list(zip(actual, self.expected, self._tolerances, strict=True))
            worst = _best([_near(*each) for each in judged])
            gross = any(_distance(a, e) > max(_GROSS, _GROSS_BOUNDS * bound.l2) for a, e, bound in judged)
            return worst if gross else Agreement(Verdict.UNCLEAR, f"no float64 to compare with; {worst.detail}")
        verdict = _held(actual, self.expected, truth)
        for seed in range(_NUDGES):
            if verdict.verdict is not Verdict.DIFFERENT:
                break
            generator = torch.Generator(self.expected[0].device).manual_seed(seed)
            others = as_tuple(self._operators(*(nudged(tensor, generator) for tensor in self._inputs)))
            again = _held(actual, others, truth)
            verdict = again if again.verdict is not Verdict.DIFFERENT else verdict
        return verdict


def in_float64(graph: fx.GraphModule) -> fx.GraphModule:
    """A copy of a region's graph that computes in float64: every floating-point type that it names becomes that."""
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph.graph, {}))
    for node in copied.nodes:
        node.args, node.kwargs = fx.node.map_aggregate((node.args, node.kwargs), _wide_type)
    owner = {str(node.target): _widened(getattr(graph, str(node.target))) for node in copied.find_nodes(op="get_attr")}
    return fx.GraphModule(owner, copied)


def as_tuple(results: Any) -> tuple[Tensor, ...]:
    """The results of a fused call as a tuple."""
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


def _wide_type(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(torch.float64)  # keeps the strides of dense tensors
    return value


def _tensors(node: fx.Node) -> list[Tensor]:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return [each for each in values if isinstance(each, Tensor)]


def _calls_for(result: fx.Node) -> list[fx.Node]:
    """The operators that `result` is made by, itself among them."""
    found, waiting = dict[fx.Node, None](), [result]
    while waiting:
        node = waiting.pop()
        if node not in found and node.op == "call_function":
            found[node] = None
            waiting += node.all_input_nodes
    return list(found)


def _longest_sum(node: fx.Node) -> int:
    """Terms of the longest sum of one operator, or more."""
    inputs = [value.numel() for source in node.all_input_nodes for value in _tensors(source)]
    results = [value.numel() for value in _tensors(node)]
    if not inputs or not results or not min(results):
        return 1
    # A matrix product M x K by K x N has MN results of MK and KN numbers; a convolution has no more terms than weights.
    largest = sorted(inputs)[-2:]
    product = math.isqrt(math.prod(largest) // max(results)) if len(largest) == 2 else 1
    weights = largest[0] if "convolution" in str(node.target) else 1
    return max(max(inputs) // min(results), product, weights)


def _metadata(actual: Tensor, expected: Tensor) -> str:
    for name in ("shape", "dtype"):
        got, wanted = getattr(actual, name), getattr(expected, name)
        if got != wanted:
            return f"{name} {got} instead of {wanted}"
    return ""


def _near(actual: Tensor, expected: Tensor, tolerance: Tolerance) -> Agreement:
    """Whether two results are the same but for rounding; UNCLEAR where one could not tell another value from it."""
    if not expected.is_floating_point():
        if expected.numel() > 0 and bool((expected == expected.flatten()[0]).all()) and torch.equal(actual, expected):
            return Agreement(Verdict.UNCLEAR, "its results are all the same")
        return _few_differ(actual != expected, "")
    if not bool(torch.isfinite(expected).all()) or not bool(torch.isfinite(actual).all()):
        if bool((_kind(actual) != _kind(expected)).any()):
            return Agreement(Verdict.DIFFERENT, "NaN or infinities stand elsewhere")
        finite = torch.isfinite(expected)
        actual, expected = actual[finite], expected[finite]
        if not len(actual):
            return Agreement(Verdict.UNCLEAR, "no result is finite")
    difference = actual - expected
    size, off = _norm(expected), _norm(difference)
    peak, most = float(difference.abs().max()), float(expected.abs().max())
    detail = f"relative distance {_share(off, size):.1e}, {_share(peak, most):.1e} at one place"
    if not (off <= tolerance.l2 * size and peak <= tolerance.peak * most):
        return Agreement(Verdict.DIFFERENT, detail)
    mean = float(expected.sum(dtype=torch.float64)) / expected.numel()
    spread = math.sqrt(max(size * size - expected.numel() * mean * mean, 0.0))
    if expected.numel() > 1 and spread <= 2 * tolerance.l2 * size:
        return Agreement(Verdict.UNCLEAR, "its results hardly differ from each other")
    return Agreement(Verdict.SAME, detail)


def _few_differ(wrong: Tensor, other: str) -> Agreement:
    count, total = int(wrong.sum()), wrong.numel()
    detail = f"{count} of {total} whole numbers or truth values differ{other}"
    return Agreement(Verdict.SAME if count <= _FLIPPED * total else Verdict.DIFFERENT, detail)


def _held(actual: Sequence[Tensor], expected: Sequence[Tensor], truth: Sequence[Tensor]) -> Agreement:
    """The verdict by the numeric policy, against float64."""
    verdicts = []
    for result, eager, exact in zip(actual, expected, truth, strict=True):
        if not result.is_floating_point():
            verdicts.append(_few_differ((result != eager) & (result != exact), ", from float64, too"))
            continue
        (leaf,) = compare(result, eager, exact).leaves
        if leaf.eager.l2 > _FAR:
            verdicts.append(
                Agreement(Verdict.UNCLEAR, f"the operators are {leaf.eager.l2:.1e} from float64 themselves")
            )
        else:
            verdict = Verdict.DIFFERENT if leaf.problem else Verdict.SAME
            verdicts.append(Agreement(verdict, leaf.problem or leaf.numbers()))
    return _best(verdicts)


def _best(found: Sequence[Agreement]) -> Agreement:
    """One verdict for several results: wrong if one is, right if one is known to be."""
    order = (Verdict.DIFFERENT, Verdict.SAME, Verdict.UNCLEAR)
    return min(found, key=lambda each: order.index(each.verdict))


def _distance(actual: Tensor, expected: Tensor) -> float:
    """Relative distance of results, 1 where NaN or infinities stand elsewhere, share of others that differ."""
    if not expected.is_floating_point():
        return float((actual != expected).double().mean())
    if bool((_kind(actual) != _kind(expected)).any()):
        return 1.0
    finite = torch.isfinite(expected)
    return _share(_norm((actual - expected)[finite]), _norm(expected[finite]))


def _share(part: float, whole: float) -> float:
    return part / whole if whole else (math.inf if part else 0.0)


def _norm(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) if values.numel() else 0.0


def _kind(values: Tensor) -> Tensor:
    """0 finite, 1 +inf, 2 -inf, 3 NaN."""
    return values.isposinf() * 1 + values.isneginf() * 2 + values.isnan() * 3
