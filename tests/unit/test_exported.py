"""Exported programs: the original's operators whatever was called before, fused ones where they are asked for, both in fresh processes."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusepass
from fusepass.errors import ArtifactError
from tests.support.layout import ROOT

X, LARGER = torch.randn(2, 8), torch.randn(5, 8)


class Net(nn.Module):
    """Two arguments, one of them optional, and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, hidden: Tensor, scale: Tensor | None = None, *, power: float = 1.0) -> dict[str, Tensor]:
        y = nn.functional.gelu(self.norm(self.first(hidden))) ** power
        return {"result": (y if scale is None else y * scale).softmax(-1)}


@pytest.fixture
def net() -> Net:
    return Net().eval()


def called(net: Net, *, before: bool) -> Any:
    """`net` optimised; `before` for one that served calls."""
    fused = fusepass.optimize(net)
    if before:
        with torch.no_grad():
            for _ in range(3):
                fused(X)
    return fused


def operators(program: Any) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.invariant(58)
def test_export_is_the_original_s(net: Net, strict: bool, before: bool) -> None:
    fused = called(net, before=before)
    with torch.no_grad():
        program = torch.export.export(fused, (X,), strict=strict)
        expected = torch.export.export(net, (X,), strict=strict)
    assert operators(program) == operators(expected)
    one, other = program.graph_signature, expected.graph_signature
    assert one.user_inputs == other.user_inputs
    assert [(each.kind, each.target) for each in one.input_specs] == [
        (each.kind, each.target) for each in other.input_specs
    ]
    if not strict:  # where Dynamo names parameters by how it came to them
        assert one == other


@pytest.mark.parametrize("before", [False, True])
def test_dynamic_shapes_go_by_the_names_of_the_original(net: Net, before: bool) -> None:
    rows = torch.export.Dim("rows")
    shapes = {"hidden": {0: rows}, "scale": {0: rows}}
    fused = called(net, before=before)
    program = torch.export.export(fused, (X,), {"scale": X}, dynamic_shapes=shapes)
    with torch.no_grad():
        torch.testing.assert_close(program.module()(LARGER, scale=LARGER), net(LARGER, LARGER))


def test_its_forward_has_the_signature_of_the_original(net: Net) -> None:
    """As trainers and pipelines ask for it; copies and pickles have it too, and what has no signature does without."""
    for fused in (
        fusepass.optimize(net),
        copy.deepcopy(fusepass.optimize(net)),
        pickle.loads(pickle.dumps(fusepass.optimize(net))),
    ):
        assert inspect.signature(fused.forward) == inspect.signature(net.forward)
        assert isinstance(fused, type(fusepass.optimize(nn.Linear(2, 2))).__mro__[1])
    listed = fusepass.optimize(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    assert list(inspect.signature(listed.forward).parameters) == ["input"]
    assert len(listed) == 2


@pytest.mark.skipif(importlib.util.find_spec("onnxscript") is None, reason="needs onnxscript")
def test_onnx_export_after_calls(net: Net) -> None:
    import onnx.reference

    program = torch.onnx.export(called(net, before=True), (X,), dynamo=True)
    reference = onnx.reference.ReferenceEvaluator(program.model_proto)
    (found,) = reference.run(None, {reference.input_names[0]: X.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(found), net(X)["result"])


# ---- fused operators


def test_fused_operators_where_they_are_asked_for(net: Net) -> None:
    program = fusepass.export(fusepass.optimize(net), (X,), {"scale": X})
    assert any(name.startswith("fusepass.") for name in operators(program))
    assert set(program.state_dict) == set(net.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(program.module()(X, scale=X), net(X, X))
    with pytest.raises(TypeError, match=r"takes what fusepass.optimize gave back, not a Net"):
        fusepass.export(net, (X,))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="args is a Tensor; pass a tuple"):
        fusepass.export(fusepass.optimize(net), X)  # type: ignore[arg-type]


def fresh(script: str, *arguments: object, bare: bool = True) -> str:
    """What a process without compilers prints that runs `script` and has made nothing."""
    environment = {
        name: os.environ[name] for name in ("HOME", "LD_LIBRARY_PATH", "PYTHONPYCACHEPREFIX") if name in os.environ
    }
    environment = (
        environment | {"PATH": "/nonexistent", "FUSEPASS_CACHE_DIR": "/nonexistent"} if bare else dict(os.environ)
    )
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


PROGRAM = """
import sys, torch, fusepass
folder = sys.argv[1]
try:
    torch.export.load(folder + "/net.pt2")
except Exception:  # whatever PyTorch makes of an unknown operator
    print("unknown")
names = fusepass.load_operators(folder + "/net.ops")
assert names and all(hasattr(torch.ops.fusepass, name) for name in names)
program = torch.export.load(folder + "/net.pt2")
x, expected = torch.load(folder + "/call.pt")
with torch.no_grad():
    torch.testing.assert_close(program.module()(x)["result"], expected)
"""

GRAPH = """
import sys, torch
folder = sys.argv[1]
graph = torch.load(folder + "/graph.pt", weights_only=False)
x, expected = torch.load(folder + "/call.pt")
with torch.no_grad():
    torch.testing.assert_close(graph(x)["result"], expected)
assert "torch.ops.fusepass" in graph.code
"""


@pytest.mark.invariant(58)
def test_programs_and_graphs_load_in_fresh_processes(net: Net, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    fused = fusepass.optimize(net)
    program, graph = fusepass.export(fused, (X,)), fused.graph_module(X)
    with torch.no_grad():
        torch.save((X, net(X)["result"]), tmp_path / "call.pt")
    torch.export.save(program, tmp_path / "net.pt2")
    fusepass.save_operators(program, tmp_path / "net.ops")
    torch.save(graph, tmp_path / "graph.pt")
    assert fresh(PROGRAM, tmp_path) == "unknown\n"
    fresh(GRAPH, tmp_path)
    names = fusepass.load_operators(tmp_path / "net.ops")  # here they are registered, too: the newest serves
    with torch.no_grad():
        torch.testing.assert_close(program.module()(X), net(X))
        torch.testing.assert_close(copy.deepcopy(graph)(X), net(X))
    with pytest.raises(ArtifactError, match="copy the file"):
        fusepass.save_operators(program, tmp_path / "again.ops")
    assert names == tuple(
        sorted({node.target._opname for node in program.graph.nodes if "fusepass." in str(node.target)})
    )
    content = (tmp_path / "net.ops").read_bytes()
    (tmp_path / "net.ops").write_bytes(content[:-20])
    with pytest.raises(ArtifactError, match="damaged"):
        fusepass.load_operators(tmp_path / "net.ops")


AOTI = """
import sys, torch, fusepass
folder = sys.argv[1]
fusepass.load_operators(folder + "/net.ops")
model = torch._inductor.aoti_load_package(folder + "/net.pt2")
x, expected = torch.load(folder + "/call.pt")
torch.testing.assert_close(model(x)["result"], expected)
"""


@pytest.mark.slow
def test_what_aotinductor_makes_of_it_loads_in_a_fresh_process(net: Net, tmp_path: Path) -> None:
    program = fusepass.export(fusepass.optimize(net), (X,))
    with torch.no_grad():
        torch.save((X, net(X)["result"]), tmp_path / "call.pt")
        torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "net.pt2"))
    fusepass.save_operators(program, tmp_path / "net.ops")
    fresh(AOTI, tmp_path, bare=False)
