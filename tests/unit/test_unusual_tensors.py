"""Kernels get tensors whose memory they understand; any other one, and any other kind of model, runs as in eager."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import fusepass
from fusepass.runtime.memory import unusual

ROOT = Path(__file__).parents[2]
X = torch.randn(4, 8)

KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "never written": lambda: torch._efficientzerotensor((4, 8)),
    "functional": lambda: torch._to_functional_tensor(X.clone()),  # type: ignore[attr-defined]
    "negated": lambda: torch._neg_view(X.clone()),  # type: ignore[attr-defined]
    "conjugated": lambda: torch.randn(4, 8, dtype=torch.complex64).conj(),
    "sparse": lambda: torch.eye(4, 8).to_sparse(),
    "compressed": lambda: torch.eye(4, 8).to_sparse_csr(),
    "mkldnn": lambda: X.to_mkldnn(),
    "meta": lambda: X.to("meta"),
    "nested": lambda: torch.nested.nested_tensor([X, X[:2]]),
}


class Chain(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * 2) * x.sigmoid()


class Buffered(nn.Module):
    def __init__(self, held: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("held", held)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * self.held + 1) * x.sigmoid()


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x) * 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.invariant(51)
def test_only_plain_memory_is_understood(kind: str) -> None:
    assert unusual(KINDS[kind]()) is not None
    for plain in (X, nn.Parameter(X), X.t(), X[:, ::2], X[:0], X[:1].expand(4, 8), torch.zeros(3, device="cpu:0")):
        assert unusual(plain) is None


def test_memory_that_is_smaller_than_the_tensor_is_not_understood() -> None:
    tensor = torch.randn(4, 8)
    assert unusual(tensor[1:]) is None
    tensor.untyped_storage().resize_(100)
    assert unusual(tensor) == "a tensor has less memory than elements"
    tensor.untyped_storage().resize_(0)
    assert unusual(tensor) == "a tensor has less memory than elements"


_ENDED_THE_PROCESS = """
import warnings
import torch
import fusepass
from fusepass.runtime import fast_path
from tests.unit.test_unusual_tensors import KINDS, X, Buffered, Chain

warnings.simplefilter("ignore")

def plain(t):
    if torch._is_functional_tensor(t):
        torch._sync(t)
        t = torch._from_functional_tensor(t)
    return t.clone()

def same(call, reference, x):
    try:
        expected = reference(x)
    except (RuntimeError, NotImplementedError) as error:
        try:
            call(x)
        except type(error):
            return
        raise AssertionError(f"{error} was not raised")
    torch.testing.assert_close(plain(call(x)), plain(expected))

def compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, backend="fusepass", options={"tune": "off"})

def warm(model, *calls):
    optimised = fusepass.optimize(model, tune="off")
    for call in calls:  # before anything was seen
        same(optimised, model, call)
    for _ in range(3):
        optimised(X)
        fast_path.wait()
    return optimised

with torch.no_grad():
    chain = Chain()
    for kind in ("never written", "functional", "nested"):
        call = KINDS[kind]()
        optimised = warm(chain, call)
        same(optimised, chain, call)
        same(optimised, chain, X)
        if kind != "nested":
            same(compiled(chain), chain, call)
            model = Buffered(KINDS[kind]())
            same(fusepass.optimize(model, tune="off"), model, X)
            assert len(fusepass.explain(model, X).regions) == 0
            model = Buffered(X.clone())
            optimised = warm(model)
            model.held = KINDS[kind]()
            same(optimised, model, X)
        print(kind)

    tensor = X.clone()
    optimised, function = warm(chain), compiled(chain)
    optimised(tensor), function(tensor)
    tensor.untyped_storage().resize_(0)
    for call in (optimised, function):
        for _ in range(2):
            try:
                call(tensor)
            except RuntimeError as error:
                assert "has elements but no memory" in str(error), error
            else:
                raise AssertionError("nothing was raised")
    print("released")

for gradient in (torch._efficientzerotensor((4, 8)), torch._neg_view(X.clone()), X, torch._efficientzerotensor((4, 8))):
    wanted, got = (X.clone().requires_grad_() for _ in range(2))
    chain(wanted).backward(gradient)
    if gradient.is_neg() is False:
        function = compiled(chain)
    function(got).backward(gradient)
    torch.testing.assert_close(got.grad.clone(), wanted.grad.clone())
gradient = X.clone()
gradient.untyped_storage().resize_(0)
try:
    function(X.clone().requires_grad_()).backward(gradient)
except RuntimeError as error:
    assert "has elements but no memory" in str(error), error
print("gradients")
"""


@pytest.mark.invariant(51)
def test_no_tensor_ends_the_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _ENDED_THE_PROCESS], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout.split("\n")[:-1] == ["never written", "functional", "nested", "released", "gradients"], (
        done.stderr
    )
    assert done.returncode == 0


def test_an_unusual_call_leaves_plain_ones_fused() -> None:
    model, negated = Chain(), torch._neg_view(X.clone())  # type: ignore[attr-defined]
    optimised = fusepass.optimize(model, tune="off")
    with torch.no_grad():
        with pytest.warns(fusepass.FusepassWarning, match="lazily"):
            first = optimised(negated)
        torch.testing.assert_close(first, model(negated))
        torch.testing.assert_close(optimised(X), model(X))
    assert len(optimised.report().regions) == 1


def test_compiled_graphs_take_what_fake_tensors_do_not_show() -> None:
    class Rectified(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x).sigmoid().tanh()

    model = Rectified()
    compiled = torch.compile(model, backend="fusepass", options={"tune": "off"})
    held = torch.eye(4, 8).to_mkldnn()
    with torch.no_grad(), pytest.warns(fusepass.FusepassWarning, match="MkldnnCPU"):
        torch.testing.assert_close(compiled(held).to_dense(), model(held).to_dense())


def test_memory_that_forward_does_not_read_may_be_released() -> None:
    class Shape(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("held", torch.randn(4, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x * self.held.shape[0]) * x

    model = Shape()
    model.held.untyped_storage().resize_(0)  # type: ignore[operator, union-attr]
    with torch.no_grad(), pytest.warns(fusepass.FusepassWarning, match="less memory"):
        torch.testing.assert_close(fusepass.optimize(model, tune="off")(X), model(X))


def test_torchscript_runs_as_it_is_and_says_so() -> None:
    model = Linear().eval()
    traced = torch.jit.trace(model, X)
    for script in (traced, torch.jit.freeze(traced), nn.Sequential(torch.jit.freeze(traced), nn.Tanh())):
        optimised = fusepass.optimize(script, tune="off")
        with torch.no_grad():
            with pytest.warns(fusepass.FusepassWarning, match="TorchScript"):
                first = optimised(X)
            torch.testing.assert_close(first, script(X))
            torch.testing.assert_close(optimised(X), script(X))
        assert "TorchScript" in str(fusepass.explain(script, X).reason)


def test_exported_and_wrapped_modules_are_optimised() -> None:
    model = Linear().eval()
    exported = torch.export.export(model, (X,)).module()
    for wrapped in (exported, torch.fx.symbolic_trace(model), nn.DataParallel(model)):
        optimised = fusepass.optimize(wrapped, tune="off")
        with torch.no_grad():
            torch.testing.assert_close(optimised(X), model(X))
        assert len(optimised.report().regions) == 1


@pytest.mark.parametrize(
    ("made", "advice"),
    [
        (lambda: torch.export.export(Linear(), (X,)), "pass its .module()"),
        (lambda: torch.jit.trace(torch.relu, X), "put a function into the forward method of a module"),
        (lambda: functools.partial(Linear()), "put a function into the forward method of a module"),
        (lambda: Linear().forward, "pass the module that it is a method of"),
        (lambda: X, "put a function into the forward method of a module"),
        (lambda: [Linear()], "put several into one, such as torch.nn.Sequential"),
    ],
)
def test_what_is_no_module_is_refused_with_advice(made: Callable[[], object], advice: str) -> None:
    for function in (fusepass.optimize, fusepass.explain):
        with pytest.raises(TypeError, match=advice):
            function(made(), X)  # type: ignore[operator]


def test_the_first_cpu_is_the_cpu() -> None:
    class Makes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(x.to("cpu:0") * torch.full((8,), 1.5, device="cpu:0")) + torch.zeros(8, device="cpu:0")
            return y * torch.arange(8, device=torch.device("cpu", 0))

    model = Makes()
    optimised = fusepass.optimize(model, tune="off")
    with torch.no_grad():
        torch.testing.assert_close(optimised(X), model(X))
    assert [region.ops[0].target for region in optimised.report().regions]
