"""One value has one set of bits: in every kernel that computes it, in vectors and in what is left of them, stored or compared."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusepass.codegen import toolchain
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Builder, Op
from fusepass.codegen.ir.index import Axis, axis_index
from fusepass.codegen.ir.program import Kernel, Role, Store
from fusepass.codegen.render import render
from fusepass.codegen.source import Target
from fusepass.training.backend import Backend
from tests.support import kernels as k
from tests.support.probe import Probe, include_lines

UNARY = [
    "exp",
    "exp2",
    "expm1",
    "log",
    "log2",
    "log10",
    "log1p",
    "sin",
    "cos",
    "tan",
    "asin",
    "acos",
    "atan",
    "sinh",
    "cosh",
    "tanh",
    "asinh",
    "acosh",
    "atanh",
    "erf",
    "erfc",
    "sigmoid",
    "normal_cdf",
]
BINARY = ["pow", "atan2", "hypot"]
C = {torch.float32: "float", torch.float64: "double"}
WAYS = {"all": 0, "eight": 8, "four": 4, "one": 1}
"""How many neighbours a loop has; 0: as many as there are."""


@cache
def _library() -> Probe:
    lines = [include_lines()]
    for name in UNARY + BINARY:
        for ctype in C.values():
            for way, size in WAYS.items():
                call = f"fp::{name}(a[i])" if name in UNARY else f"fp::{name}(a[i], b[i])"
                loop = f"for (long i = first; i < first + {size or 'n'}; ++i) y[i] = {call};"
                around = f"for (long first = 0; first + {size or 'n'} <= n; first += {size or 'n'})"
                no_vectors = '__attribute__((optimize("no-tree-vectorize"))) ' if size == 1 else ""
                head = f'extern "C" {no_vectors}void {name}_{ctype}_{way}(const {ctype}* a, const {ctype}* b, {ctype}* y, long n)'
                lines.append(f"{head} {{ {around} {{ {loop} }} }}")
    return Probe("bits", "\n".join(lines))


@pytest.mark.parametrize("dtype", C, ids=str)
@pytest.mark.parametrize("name", UNARY + BINARY)
@pytest.mark.invariant(35)
def test_a_function_gives_the_same_bits_in_vectors_and_alone(name: str, dtype: torch.dtype) -> None:
    """Neighbours that are NaN, infinite or far away, which are computed another way, change nothing."""
    torch.manual_seed(1)
    a = torch.randn(2017, dtype=dtype) * 3
    a[::7] *= 1e4
    a[::11], a[::13] = torch.inf, torch.nan
    a = a.abs() if name in ("pow", "log", "log2", "log10") else a
    b = torch.randn(2017, dtype=dtype)
    found = [
        torch.from_numpy(_library()(f"{name}_{C[dtype]}_{way}", [a.numpy(), b.numpy()], torch.empty_like(a).numpy()))
        for way in WAYS
    ]
    shifted = _library()(f"{name}_{C[dtype]}_all", [a[5:].numpy(), b[5:].numpy()], torch.empty_like(a[5:]).numpy())
    for other, size in zip(found, WAYS.values(), strict=True):
        whole = a.numel() // max(size, 1) * max(size, 1)
        torch.testing.assert_close(other[:whole], found[0][:whole], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(torch.from_numpy(shifted), found[0][5:], rtol=0, atol=0, equal_nan=True)


CHAINS: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.tanh,
    F.gelu,
    lambda x: x * 1.1 + x * x,
    lambda x: F.silu(x) * 1.3 - torch.atan(x) / 1.7,
    lambda x: torch.erf(x * 0.7) - 0.3 * x.exp(),
)


@pytest.mark.parametrize("dtype", C, ids=str)
@pytest.mark.parametrize("number", range(len(CHAINS)))
@pytest.mark.thinned(3)
@pytest.mark.invariant(35)
def test_extremes_are_among_the_values(number: int, dtype: torch.dtype) -> None:
    """Each line has its maximum, in what is stored and in what is compared; and no window's maximum is below what is in it."""
    chain, dims = CHAINS[number], range(3)

    def function(x: Tensor) -> tuple[Tensor, ...]:
        y = chain(x)
        found = [each for dim in dims for each in (y.amax(dim, keepdim=True), y.amin(dim, keepdim=True))]
        hits = [y == each for each in found]
        pools = [y > F.max_pool2d(y, (1, 19), 1, (0, 9)), y > F.max_pool2d(y, 3, 1, 1)]
        return y, *found, *hits, *pools, y.cummax(0)[0][-1]

    torch._dynamo.reset()
    x = torch.randn(3, 37, 53, dtype=dtype)
    y, *others, last = torch.compile(function, backend=Backend("graph", {"tune": "off"}))(x)
    for count, (found, hit) in enumerate(zip(others[:6], others[6:12], strict=True)):
        dim = count // 2
        assert torch.equal(found, y.amin(dim, keepdim=True) if count % 2 else y.amax(dim, keepdim=True))
        assert torch.equal(hit, y == found)
        assert hit.any(dim).all()
    assert not any(each.any() for each in others[12:])
    assert torch.equal(last, y.amax(0))


@pytest.mark.parametrize("extreme", ["amax", "amin"])
def test_gradients_of_extremes_are_eager_s(extreme: str) -> None:
    """Backward compares values with the extreme; where none is equal to it there is nothing to divide by."""

    def function(x: Tensor) -> Tensor:
        return getattr(torch.tanh(x) + x * 0.1, extreme)(0)

    torch._dynamo.reset()
    found = []
    x = torch.randn(32, 53)
    for run in (torch.compile(function, backend=Backend("graph", {"tune": "off"})), function):
        given = x.clone().requires_grad_()
        run(given).sum().backward()
        found.append(given.grad)
    torch.testing.assert_close(*found)


@pytest.mark.invariant(35)
def test_compilers_contract_nothing() -> None:
    assert "-ffp-contract=off" in toolchain.flags(Target.CPU, "native")
    assert "--fmad=false" in toolchain.flags(Target.CUDA, "sm_90")


@pytest.mark.parametrize("facts", [DeviceFacts.cpu(1), DeviceFacts.h200()], ids=["cpu", "cuda"])
def test_only_a_term_is_rounded_with_its_sum(facts: DeviceFacts) -> None:
    texts = []
    for op in (Op.MUL, Op.TERM):
        b, i = Builder(), Axis("i", 64)
        x, three = b.load("x", axis_index(i), DType.F32), b.const(3.0, DType.F32)
        value = b.apply(Op.ADD, b.apply(op, x, three), x)
        kernel = Kernel("sum", (i,), (), (), (), (Store("y", axis_index(i), value),), ("add",))
        program = k.program("sum", [k.buffer("x", Role.INPUT, [64]), k.result("y", [64])], kernel)
        texts.append(render(program, facts).text)
    assert ["fp::fma(" in text for text in texts] == [False, True]
