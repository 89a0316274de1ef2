"""16-bit values are eager's, to the bit, where something decides by them, and everywhere where that is asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusepass
from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Apply, Builder, Expr, Masked, Op
from fusepass.codegen.ir.fitting import fits
from fusepass.codegen.ir.index import Axis, Bound, axis_index
from fusepass.codegen.ir.program import Program
from fusepass.codegen.lowering.rounding import ROUNDED
from fusepass.config import override
from fusepass.patterns.deciding import deciding, note_rounded
from fusepass.patterns.simplify import simplify
from fusepass.training import backend
from fusepass.training.joint import minimum_cut, partition_joint
from tests.support.regions import region, trace

Function = Callable[..., Any]

LARGE = torch.linspace(-300, 300, 96).reshape(8, 12)  # products of these are beyond float16's numbers, or near its end
SMALL = torch.linspace(-3, 3, 96).reshape(8, 12).sin() * 2


class _Model(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def guarded(x: Tensor, w: Tensor) -> Tensor:
    """As models of transformers guard their halves."""
    h = x * w + x
    limit = torch.where(torch.isinf(h).any(), torch.finfo(h.dtype).max - 1000, torch.finfo(h.dtype).max)
    return torch.clamp(h, min=-limit, max=limit)


def compared(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    v = (x * w + w) * x
    return v > w, v


def extremes(x: Tensor, w: Tensor) -> Tensor:
    v = x * w + x
    return v == v.amax(-1, keepdim=True)


DECIDING: dict[str, tuple[Function, torch.dtype, Tensor]] = {
    "isfinite": (lambda x, w: torch.isfinite(x * w), torch.float16, LARGE),
    "isinf": (guarded, torch.float16, LARGE),
    "isnan": (lambda x, w: torch.isnan(x * w - x * w * 2), torch.float16, LARGE),
    "nan_to_num": (lambda x, w: torch.nan_to_num(x * w) * 0.5, torch.float16, LARGE),
    "a scale that rules would merge": (lambda x, w: torch.isinf(x * 300 * 0.001 * w), torch.float16, LARGE),
    "eq": (lambda x, w: ((x + w) - x) == w, torch.bfloat16, SMALL),
    "gt, and the value itself": (compared, torch.bfloat16, SMALL),
    "an extreme": (extremes, torch.bfloat16, SMALL),
    "argmax": (lambda x, w: (x * 0.01 + w + 8).argmax(-1), torch.bfloat16, SMALL),
    "max": (lambda x, w: (x * 0.01 + w + 8).max(-1), torch.bfloat16, SMALL),
    "places of a pool": (lambda x, w: F.max_pool1d(x * 0.01 + w + 8, 2, return_indices=True), torch.bfloat16, SMALL),
    "cumulative maximum": (lambda x, w: torch.cummax(x * 0.01 + w + 8, 1), torch.bfloat16, SMALL),
    "integers": (lambda x, w: (x * w * 100 + x).to(torch.int32), torch.bfloat16, SMALL),
    "truth": (lambda x, w: ((x + w) - w).bool(), torch.bfloat16, SMALL),
    "in float32": (lambda x, w: (x * w + x).float() * 1.5 > 1, torch.bfloat16, SMALL),
    "floor": (lambda x, w: torch.floor(x * w * 30), torch.bfloat16, SMALL),
    "remainder": (lambda x, w: torch.remainder(x * w * 30, 1.0), torch.bfloat16, SMALL),
    "floored quotient": (lambda x, w: torch.div(x * w + x, 0.01, rounding_mode="floor"), torch.bfloat16, SMALL),
    "how many": (lambda x, w: torch.linalg.vector_norm((x + w) - w - x, 0, -1), torch.bfloat16, SMALL),
    "sign": (lambda x, w: torch.sign((x + w) - w), torch.bfloat16, SMALL),
    "truncated quotient": (lambda x, w: torch.div(x * w + x, 0.01, rounding_mode="trunc"), torch.bfloat16, SMALL),
    "threshold": (lambda x, w: F.threshold(x * w + x, 0.3, 0.0), torch.bfloat16, SMALL),
    "frac": (lambda x, w: torch.frac(x * w * 30), torch.bfloat16, SMALL),
    "heaviside": (lambda x, w: torch.heaviside((x + w) - w - x, w), torch.bfloat16, SMALL),
    "hardshrink": (lambda x, w: F.hardshrink((x + w) - w, 0.5), torch.bfloat16, SMALL),
    "bucketize": (lambda x, w: torch.bucketize(x * w + x, torch.linspace(-3, 3, 60).bfloat16()), torch.bfloat16, SMALL),
    "rows": (lambda x, w: x.index_select(0, ((x * w).sum(-1) * 7).to(torch.int64) % 8), torch.bfloat16, SMALL),
    "behind a reduction": (lambda x, w: (x * w + x).std(-1) * 1.1 > 1.3, torch.bfloat16, SMALL),
}


def operands(dtype: torch.dtype, values: Tensor) -> tuple[Tensor, Tensor]:
    return values.to(dtype), values.flip(0).roll(5, 1).to(dtype)


def assert_equal(actual: Any, eager: Any) -> None:
    torch.testing.assert_close(actual, eager, rtol=0, atol=0, equal_nan=True)


OF_COMPILED_CODE = {"bucketize", "floored quotient"}
"""What is not fused alone, and what the interpreter, which computes in float64, decides otherwise than float32."""


@pytest.mark.parametrize("name", [name for name in DECIDING if name not in OF_COMPILED_CODE])
@pytest.mark.invariant(37)
def test_what_is_decided_is_what_eager_decides(name: str) -> None:
    """In the interpreter, which all back ends share their programs with; before and after the passes."""
    function, dtype, values = DECIDING[name]
    given = operands(dtype, values)
    made = region(function, *given)
    for program in (made.program, made.passed()):
        for actual, eager in zip(made.run(program), made.eager(), strict=True):
            assert_equal(actual, eager)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_decides_as_eager_does(compiled: bool) -> None:
    """All of them in one model, on both routes."""
    named = [(function, operands(dtype, values)) for function, dtype, values in DECIDING.values()]

    def everything(*tensors: Tensor) -> list[Any]:
        rest = iter(tensors)
        return [function(next(rest), next(rest)) for function, _ in named]

    tensors = [tensor for _, pair in named for tensor in pair]
    with override(tune="off"), torch.no_grad():
        model = _Model(everything)
        torch._dynamo.reset()
        fused = torch.compile(model, backend="fusepass") if compiled else fusepass.optimize(model)
        for actual, eager in zip(fused(*tensors), model(*tensors), strict=True):
            assert_equal(actual, eager)


def test_every_reader_has_the_value_that_decided() -> None:
    """``where(isfinite(v), v, 0)`` gives what was found finite, and a sum of it in float32, too."""

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        v = x * w
        kept = torch.where(torch.isfinite(v), v, 0.0)
        return kept, kept.float().sum(-1)

    made = region(function, *operands(torch.float16, LARGE))
    for actual, eager in zip(made.run(made.passed()), made.eager(), strict=True):
        torch.testing.assert_close(actual, eager, rtol=1e-6, atol=0)


def roundings(program: Program) -> int:
    nodes = (node for kernel in program.kernels for node in kernel.nodes)
    return sum(isinstance(node, Apply) and node.op is Op.CAST and node.dtype.is_half for node in nodes)


def chain(x: Tensor, w: Tensor) -> Tensor:
    return F.leaky_relu(torch.relu((x * w + w) * x - w).clamp(-1, 1).maximum(w) * 0.3 + x.tanh())


def test_nothing_is_rounded_where_nothing_decides() -> None:
    assert roundings(region(chain, *operands(torch.bfloat16, SMALL)).program) == 0


def test_what_is_rounded_already_is_not_rounded_again() -> None:
    """Loads, extremes, signs and choices of halves have no other values; a product has."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        return (torch.maximum(x.relu(), -w) * w).abs().clamp(min=0.5) > 1

    assert roundings(region(function, *operands(torch.bfloat16, SMALL)).program) == 1


@pytest.mark.invariant(37)
def test_eager_rounding_gives_eager_s_bits() -> None:
    given = operands(torch.bfloat16, SMALL)

    def arithmetic(x: Tensor, w: Tensor) -> Tensor:
        return torch.relu((x * w + w) * x - w) * 3.1 * 2.7 + 0.1 + x

    with torch.no_grad():
        eager = arithmetic(*given)
        for options in ({"rounding": "eager"}, {"rounding": "fused"}):
            fused = fusepass.optimize(_Model(arithmetic), tune="off", **options)
            assert torch.equal(fused(*given), eager) is (options["rounding"] == "eager")
            assert fused.report().regions[0].state.value == "fused"
        torch._dynamo.reset()
        compiled = torch.compile(arithmetic, backend="fusepass", options={"tune": "off", "rounding": "eager"})
        assert torch.equal(compiled(*given), eager)


def test_a_composite_rounds_its_result_alone() -> None:
    """What eager computes in float32 within one operator is no 16-bit value."""
    given = operands(torch.bfloat16, SMALL)
    graph, _ = trace(lambda x, w: F.gelu(x * w).softmax(-1) + w, *given)
    with override(rounding="eager"):
        note_rounded(graph.graph)
    marked = [node.name for node in graph.graph.nodes if ROUNDED in node.meta]
    assert marked == ["mul", "gelu", "_softmax", "add"]


@pytest.mark.parametrize("rows", [3, 5])
def test_a_call_with_one_tensor_twice_is_another_than_one_with_two(rows: int) -> None:
    """In either order: what is known of one, by which operands it decides, is not true of the other."""
    a, b = (each[:rows] for each in operands(torch.bfloat16, SMALL))
    functions: list[tuple[Function, int]] = [
        (lambda a, b: torch.logaddexp(a, a), 1), (lambda a, b: torch.logaddexp(a, b), 2),
    ]  # fmt: skip
    for function, count in functions if rows == 3 else functions[::-1]:
        (node,) = trace(function, a, b)[0].graph.find_nodes(op="call_function", target=torch.ops.aten.logaddexp.default)
        assert len(deciding(node)) == count


def test_a_forward_that_branches_computes_what_it_asked() -> None:
    class Branching(nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            h = x * w
            return h.clamp(-60000, 60000) if torch.isinf(h).any() else h

    given = operands(torch.float16, LARGE)
    model = Branching()
    with torch.no_grad():
        fused = fusepass.optimize(model, tune="off")
        for scale in (1.0, 0.01):
            assert_equal(fused(given[0] * scale, given[1]), model(given[0] * scale, given[1]))


def test_under_autocast_too() -> None:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(12, 12)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            return (y * y + y) * y > 0.1

    model = Scores()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert_equal(fusepass.optimize(model, tune="off")(SMALL), model(SMALL))


def of_extremes(v: Tensor) -> Tensor:
    return torch.where(v == v.amax(0, keepdim=True), v * 2, v * 0.5)


OF_VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "amax": lambda v: v.amax(0),
    "pool": lambda v: F.max_pool1d(v, 2),
    "a comparison of the model": of_extremes,
    "relu": lambda v: v.relu(),
}


@pytest.mark.parametrize("cut", [partition_joint, minimum_cut])
@pytest.mark.parametrize("name", OF_VALUES)
@pytest.mark.invariant(37)
def test_gradients_go_where_eager_sends_them(
    name: str, cut: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backward asks what is equal to the extreme, or takes the places: forward has rounded before, and what is computed again is, too."""
    monkeypatch.setattr(backend, "partition_joint", cut)

    def function(x: Tensor, w: Tensor) -> Tensor:
        return OF_VALUES[name]((x + w) - x)

    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    x, start = (torch.randn(64, 96, generator=generator).bfloat16() for _ in range(2))
    found = []
    for call in (torch.compile(function, backend="fusepass", options={"tune": "off"}), function):
        w = start.clone().requires_grad_()
        call(x, w).sum().backward()
        assert w.grad is not None
        found.append(w.grad)
    assert_equal(*found)


def rewrites(function: Function, *given: Tensor) -> list[str]:
    return [found.rule for found in simplify(trace(function, *given)[0])]


def test_rules_that_move_a_rounding_stay_away_from_what_decides() -> None:
    given = operands(torch.float16, LARGE)[:1]
    assert rewrites(lambda x: x * 0.5 * 3, *given) == ["affine-chain"]
    assert rewrites(lambda x: torch.isinf(x * 0.5 * 3), *given) == []
    assert rewrites(lambda x: torch.isinf(x.float() * 0.5 * 3), *given) == ["affine-chain"]
    assert rewrites(lambda x: torch.isinf((x * 300).neg().neg()), *given) == ["double-negation"]
    with override(rounding="eager"):
        assert rewrites(lambda x: x * 0.5 * 3, *given) == []


def values() -> Iterator[tuple[Expr, bool]]:
    """Expressions in float32, and whether bfloat16 holds them."""
    b, axis = Builder(), Axis("i", 4)
    half = b.cast(b.load("x", axis_index(axis), DType.BF16), DType.F32)
    wide = b.load("y", axis_index(axis), DType.F32)
    for number, held in ((0.5, True), (0.1, False), (math.inf, True), (257.0, False)):
        yield b.const(number, DType.F32), held
    for op in (Op.NEG, Op.ABS, Op.FLOOR, Op.TRUNC):
        yield b.apply(op, half), True
        yield b.apply(op, wide), False
    yield b.apply(Op.SIGN, wide), True
    yield b.apply(Op.MAXIMUM, half, b.const(0.0, DType.F32)), True
    yield b.apply(Op.MAXIMUM, half, wide), False
    yield b.apply(Op.MUL, half, half), False
    yield b.apply(Op.WHERE, b.apply(Op.LT, wide, half, dtype=DType.BOOL), half, b.apply(Op.NEG, half)), True
    yield b.cast(b.cast(wide, DType.F16), DType.F32), False
    yield b.cast(b.apply(Op.LT, wide, half, dtype=DType.BOOL), DType.F32), True
    yield Masked((Bound(axis_index(axis), 0, 2),), half, wide, DType.F32), False


def test_what_a_narrower_type_holds() -> None:
    assert [fits(value, DType.BF16) for value, _ in values()] == [held for _, held in values()]
