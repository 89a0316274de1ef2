"""Artifacts in sizes that they were not saved for: right results by the libraries in the file, or a clear refusal."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusepass
from fusepass.artifact import module as artifact_module
from fusepass.artifact.sizes import OpenSizes, names_in
from fusepass.errors import ArtifactError, FusepassWarning
from tests.support.layout import ROOT

pytest.importorskip("safetensors")


class Block(nn.Module):
    """Attention under a mask of the length, a constant, a tied weight, a plain tensor, divisions by sizes; two sizes are open."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)
        self.tied = nn.Linear(16, 16)
        self.tied.weight = self.out.weight
        self.shift = torch.linspace(0, 1, 16)

    def forward(self, x: Tensor, *, power: float = 1.0) -> dict[str, Any]:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(batch, length, 3, 2, 8).permute(2, 0, 3, 1, 4)
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        weights = (q @ k.transpose(-1, -2) * 0.35).masked_fill(~mask, -1e9).softmax(-1)
        y = self.tied(F.gelu(self.out((weights @ v).transpose(1, 2).reshape(batch, length, 16)))) + self.shift
        return {"y": y * torch.tensor(1.5), "mean": (y.sum((0, 1)) / (batch * length) + power).exp()}


def sizes(*pairs: tuple[int, int]) -> list[Tensor]:
    return [torch.randn(batch, length, 16) for batch, length in pairs]


@pytest.fixture(scope="module")
def block() -> Block:
    torch.manual_seed(0)
    return Block().eval()


@pytest.fixture(scope="module")
def saved(block: Block, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("artifact") / "block.fuse"
    fusepass.save(fusepass.optimize(block, tune="off"), path, sizes((2, 5), (3, 7), (4, 12)), dynamic=True)
    return path


FRESH = """
import sys, warnings
import torch
import fusepass
warnings.simplefilter("error", fusepass.FusepassWarning)
loaded = fusepass.load(sys.argv[1])
light = [name for name in sys.modules if name.startswith(("fusepass.capture", "fusepass.compile", "fusepass.api.lowered"))]
assert not light, light
with torch.no_grad():
    for x, expected in torch.load(sys.argv[2]):
        for _ in range(2):
            found = loaded(x)
            for name in expected:
                assert torch.allclose(found[name], expected[name], 1e-4, 1e-5)
heavy = [name for name in sys.modules if name.split(".")[0] == "sympy" or name.startswith(("torch._dynamo.", "torch._inductor"))]
assert not heavy, heavy[:5]
"""


@torch.no_grad()
def test_a_fresh_process_without_compilers_serves_further_sizes(block: Block, saved: Path, tmp_path: Path) -> None:
    """Programs of the compilers' names leave a trace where they are run; kernels serve all, as none warns; nothing is written."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("c++", "g++", "clang++", "gcc", "nvcc", "ninja", "ld"):
        (programs / name).write_text(f"#!/bin/sh\n: > {tmp_path}/ran\nexit 1\n")
        (programs / name).chmod(0o755)
    inputs = sizes((2, 5), (2, 7), (5, 6), (3, 11))
    torch.save([(x, block(x)) for x in inputs], tmp_path / "calls.pt")
    environment = {"PATH": str(programs), "FUSEPASS_CACHE_DIR": str(tmp_path / "cache"), "CUDA_HOME": str(tmp_path)}
    environment |= {
        name: os.environ[name] for name in ("HOME", "LD_LIBRARY_PATH", "PYTHONPYCACHEPREFIX") if name in os.environ
    }
    command = [sys.executable, "-c", FRESH, str(saved), str(tmp_path / "calls.pt")]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "cache").exists()


@torch.no_grad()
def test_a_further_size_is_made_ready_once(
    block: Block, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = fusepass.load(saved)
    made: list[object] = []
    lower = loaded._further[0].__self__._lower  # type: ignore[attr-defined]
    monkeypatch.setattr(
        loaded._further[0].__self__,  # type: ignore[attr-defined]
        "_lower",
        lambda *args: [lower(*args), made.append(None)][0],
    )
    (x,) = sizes((6, 9))
    errors: list[BaseException] = []

    def call() -> None:
        try:
            with torch.inference_mode():
                torch.testing.assert_close(loaded(x), block(x), rtol=1e-4, atol=1e-5)
        except BaseException as error:
            errors.append(error)

    call()
    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(made) == 1
    torch.testing.assert_close(loaded(x.transpose(0, 1).contiguous().transpose(0, 1)), block(x), rtol=1e-4, atol=1e-5)
    assert len(made) == 2, "other strides"
    loaded.out.weight.mul_(2)
    assert (loaded(x)["y"] - block(x)["y"]).abs().max() > 0.01, "weights may change"


@torch.no_grad()
def test_the_oldest_of_many_sizes_is_forgotten(block: Block, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifact_module, "_MOST_FURTHER", 2)
    loaded = fusepass.load(saved)
    for x in sizes((2, 6), (2, 8), (2, 9), (2, 6)):
        torch.testing.assert_close(loaded(x), block(x), rtol=1e-4, atol=1e-5)
    assert len(loaded._added) == 2
    assert sum(map(len, loaded._of_shapes.values())) == 3 + 2


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ({"x": torch.randn(1, 5, 16)}, r"such sizes: size 0 of x is 1, not 2 or more. Save it with an example like"),
        ({"x": torch.randn(3, 5, 17)}, "such sizes: size 2 of x is 17, not 16"),
        ({"x": torch.randn(3, 5, 16).double()}, r"such a call: x is float64\[3, 5, 16\]"),
        ({"x": torch.randn(3, 80)}, r"such a call: x is float32\[3, 80\]"),
        ({"x": torch.randn(3, 5, 16), "power": 2.0}, r"such a call: it is called as \(x=tensor, power=2.0\)"),
    ],
    ids=["one", "fixed", "type", "dimensions", "number"],
)
def test_what_is_not_open_is_refused(saved: Path, call: dict[str, Any], told: str) -> None:
    loaded = fusepass.load(saved)
    with torch.no_grad(), pytest.raises(ValueError, match=f"Block was not saved for {told}"):
        loaded(**call)


def test_autocast_is_refused_at_further_sizes(saved: Path) -> None:
    loaded = fusepass.load(saved)
    with torch.no_grad(), torch.autocast("cpu"), pytest.raises(ValueError, match="was not saved for such a call"):
        loaded(*sizes((6, 6)))


@torch.no_grad()
def test_a_region_without_a_library_runs_its_operators(tmp_path: Path) -> None:
    """One that a size takes past a threshold, here that of several threads, may need another text."""
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)).eval()
    path = tmp_path / "net.fuse"
    fusepass.save(fusepass.optimize(model, tune="off"), path, [torch.randn(2, 8), torch.randn(3, 8)], dynamic=True)
    loaded, x = fusepass.load(path), torch.randn(200_000, 8)
    with pytest.warns(FusepassWarning, match="no library for .* at these sizes; save it with an example of them, too"):
        found = loaded(x)
    torch.testing.assert_close(found, model(x), rtol=1e-4, atol=1e-5)
    fusepass.save(fusepass.optimize(model, tune="off"), path, [torch.randn(2, 8), torch.randn(3, 8), x], dynamic=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FusepassWarning)
        other = torch.randn(200_001, 8)
        torch.testing.assert_close(fusepass.load(path)(other), model(other), rtol=1e-4, atol=1e-5)


class Branches(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x + y).exp() * 2 if x.shape[0] > 8 else (x * y).tanh() + 1


@torch.no_grad()
def test_sizes_for_which_forward_does_something_else_are_refused(tmp_path: Path) -> None:
    path, model = tmp_path / "net.fuse", Branches()

    def pair(first: int, second: int) -> tuple[Tensor, Tensor]:
        return torch.randn(first, 3), torch.randn(second, 3)

    fusepass.save(fusepass.optimize(model, tune="off"), path, [pair(20, 20), pair(3, 3), pair(5, 5)], dynamic=True)
    loaded = fusepass.load(path)
    for size in (3, 5, 20, 4, 8):
        inputs = pair(size, size)
        torch.testing.assert_close(loaded(*inputs), model(*inputs))
    with pytest.raises(ValueError, match="size 0 of x is 9, not from 2 to 8"):
        loaded(*pair(9, 9))
    with pytest.raises(ValueError, match="size 0 of y is 5, not 4"):
        loaded(*pair(4, 5))


class ReturnsSize(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return x.exp() + 1, x.shape[0]


class Specialises(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp() * sum(1 / (n + 1) for n in range(x.shape[0]))


class Roots(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp() * x.shape[0] ** -0.5


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (
            ReturnsSize(),
            "no sizes can be left open: the model returns numbers that depend on them; save it without dyn",
        ),
        (nn.Sequential(nn.BatchNorm1d(3), nn.ReLU()), "the model writes to its inputs or statistics"),
        (Specialises(), "no sizes can be left open: torch.export says"),
        (Roots(), "cannot be written to an artifact"),
    ],
    ids=["number", "statistics", "loop", "root"],
)
def test_what_cannot_be_left_open_is_named(model: nn.Module, told: str, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=told):
        fusepass.save(
            fusepass.optimize(model, tune="off"), tmp_path / "n", [torch.rand(4, 3), torch.rand(5, 3)], dynamic=True
        )
    assert not (tmp_path / "n").exists()


def test_examples_have_to_differ_in_sizes(tmp_path: Path) -> None:
    fused = fusepass.optimize(nn.Sequential(nn.Linear(3, 3), nn.GELU()).eval(), tune="off")
    for examples in (torch.rand(4, 3), [torch.rand(4, 3), torch.rand(4, 3)]):
        with pytest.raises(ValueError, match="give two examples of different sizes"):
            fusepass.save(fused, tmp_path / "n", examples, dynamic=True)


@pytest.mark.parametrize(
    ("shapes", "told"),
    [
        ([(4, 8), (4,)], None),
        ([(4, 9), (4,)], "size 1 of x is 9, not 8"),
        ([(4, 8), (5,)], "size 0 of y is 5, not 4"),
        ([(1, 2), (1,)], "size 0 of x is 1, not 2 or more"),
        ([(40, 80), (40,)], "size 0 of x is 40, not from 2 to 32"),
        ([(3, 6), (3,)], r"its sizes {'s0': 3} are such that"),
    ],
    ids=["fits", "follows", "equal", "one", "large", "odd"],
)
def test_open_sizes(shapes: list[tuple[int, ...]], told: str | None) -> None:
    """y has as many rows as x, which has twice as many columns, and an even number of them."""
    ends = [0, 32] if told and "32" in told else [0, None]
    found = OpenSizes([["s0", ["Mul", 2, "s0"]], ["s0"]], {"s0": ends}, [["Equality", ["Mod", "s0", 2], 0]])
    problem = found.problem(["x", "y"], shapes)
    assert problem is None if told is None else problem is not None and told in problem


def test_the_names_in_a_term() -> None:
    assert names_in(["Add", 1, ["Mul", "s0", "s1"], "s0"]) == {"s0", "s1"}
    assert names_in(3) == set()
