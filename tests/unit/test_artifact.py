"""Artifacts: one file that gives the model's results in a fresh process without compilers, and refuses what it cannot serve."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fusepass
from fusepass.artifact import container, machine, versions
from fusepass.artifact.container import MANIFEST
from fusepass.artifact.module import Signature
from fusepass.codegen import instructions, plain
from fusepass.compile import chunks
from fusepass.errors import ArtifactError, CaptureError
from tests.support.layout import ROOT

pytest.importorskip("safetensors")


class Net(nn.Module):
    """A convolution, statistics, tied weights, a buffer outside of the state dict, results of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.head.weight
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)
        self.shift = torch.linspace(0, 1, 8)

    def forward(self, x: Tensor, *, bias: Tensor | None = None, power: float = 1.0) -> dict[str, Any]:
        y = nn.functional.gelu(self.norm(self.conv(x))) * self.scale
        pooled = y.mean((2, 3)) + self.shift
        z = self.tied(self.head(pooled).relu() ** power).softmax(-1)
        return {"z": z if bias is None else z + bias, "rest": (pooled.sum(), 3, [y])}


X, LARGER, BIAS = torch.randn(2, 3, 6, 6), torch.randn(5, 3, 6, 6), torch.randn(8)
CALLS: list[dict[str, Any]] = [{"x": X}, {"x": LARGER}, {"x": X, "bias": BIAS, "power": 2.0}]


def close(result: Any, expected: Any) -> None:
    found, structure = pytree.tree_flatten(result)
    wanted, other = pytree.tree_flatten(expected)
    assert structure == other
    for one, another in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, another)


@pytest.fixture(scope="module")
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture(scope="module")
def saved(net: Net, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact of `net` for `CALLS`, the first two by position."""
    path = tmp_path_factory.mktemp("artifact") / "net.fuse"
    fusepass.save(fusepass.optimize(net), path, [X, (LARGER,), CALLS[2]])
    return path


@pytest.fixture
def changed(saved: Path, tmp_path: Path) -> Callable[..., Path]:
    """Writes the artifact anew with another manifest, hashes and all."""

    def write(**others: Any) -> Path:
        with container.Reader(saved) as reader:
            files = {name: reader.read(name) for name in reader.manifest["entries"]}
            rest = {name: value for name, value in reader.manifest.items() if name not in ("format", "entries")}
        container.write(tmp_path / "changed.fuse", rest | others, files)
        return tmp_path / "changed.fuse"

    return write


FRESH = """
import sys, time, warnings
import torch
start = time.perf_counter()
import fusepass
warnings.simplefilter("error", fusepass.FusepassWarning)
loaded = fusepass.load(sys.argv[1])
seconds = time.perf_counter() - start
calls, results = torch.load(sys.argv[2])
from torch.utils import _pytree as pytree
for call, expected in zip(calls, results, strict=True):
    for _ in range(2):
        found = loaded(**call)
        assert pytree.tree_structure(found) == pytree.tree_structure(expected)
        for one, other in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
            assert one == other if isinstance(one, int) else torch.allclose(one, other, 1e-4, 1e-5)
slow = [name for name in sys.modules if name.split(".")[0] == "sympy" or name.startswith(("torch._dynamo.", "torch._inductor"))]
assert not slow, slow[:5]
unwanted = [name for name in sys.modules if name.startswith(("fusepass.capture", "fusepass.compile", "fusepass.dispatch", "fusepass.codegen.passes"))]
assert not unwanted, unwanted
print(seconds)
"""


@torch.no_grad()
@pytest.mark.invariant(57)
def test_a_fresh_process_without_compilers_gives_the_results(net: Net, saved: Path, tmp_path: Path) -> None:
    """Programs of the compilers' names leave a trace where they are run; the cache does not exist."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("c++", "g++", "clang++", "gcc", "nvcc", "ninja", "ld"):
        (programs / name).write_text(f"#!/bin/sh\n: > {tmp_path}/ran\nexit 1\n")
        (programs / name).chmod(0o755)
    torch.save((CALLS, [net(**call) for call in CALLS]), tmp_path / "calls.pt")
    environment = {"PATH": str(programs), "FUSEPASS_CACHE_DIR": str(tmp_path / "cache"), "CUDA_HOME": str(tmp_path)}
    environment |= {
        name: os.environ[name] for name in ("HOME", "LD_LIBRARY_PATH", "PYTHONPYCACHEPREFIX") if name in os.environ
    }
    command = [sys.executable, "-c", FRESH, str(saved), str(tmp_path / "calls.pt")]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 10, "a second on a machine with nothing else to do"
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "cache").exists()


@torch.no_grad()
def test_calls_by_position_and_by_name_are_served(net: Net, saved: Path) -> None:
    loaded = fusepass.load(saved)
    for _ in range(2):
        close(loaded(X), net(X))
        close(loaded(x=LARGER), net(LARGER))
        close(loaded(X, bias=BIAS, power=2.0), net(X, bias=BIAS, power=2.0))
    with torch.inference_mode():
        close(loaded(X), net(X))
    assert "fused" in loaded.report()


def test_it_holds_what_it_says(net: Net, saved: Path) -> None:
    with zipfile.ZipFile(saved) as archive:
        names = archive.namelist()
        manifest = json.loads(archive.read(MANIFEST))
    assert manifest["torch"] == torch.__version__.partition("+")[0]
    assert set(manifest["entries"]) == set(names) - {MANIFEST}
    assert [len(signature["variants"]) for signature in manifest["signatures"]] == [1, 1, 1]
    assert sum(len(signature["variants"][0]["regions"]) for signature in manifest["signatures"]) >= 3
    assert len(set(manifest["libraries"])) == len(manifest["libraries"]) >= 2
    assert fusepass.load(saved).state_dict().keys() == net.state_dict().keys()


@torch.no_grad()
def test_weights_are_supplied_replaced_and_loaded(net: Net, saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "bare.fuse"
    fusepass.save(fusepass.optimize(net), path, X, weights=False)
    with pytest.raises(ArtifactError, match="holds no weights: give them as state_dict="):
        fusepass.load(path)
    wrong = {name: tensor for name, tensor in net.state_dict().items() if name != "conv.weight"}
    with pytest.raises(
        ValueError, match=r"it lacks conv.weight.*; conv.bias is torch.float32\[2\], not torch.float32\[8\]"
    ):
        fusepass.load(path, state_dict=wrong | {"conv.bias": torch.ones(2)})
    loaded = fusepass.load(path, state_dict=net.state_dict())
    close(loaded(X), net(X))
    loaded.conv.weight.zero_()
    assert net.conv.weight.any(), "they are copies"
    other = copy.deepcopy(net)
    for parameter in other.parameters():
        parameter.mul_(1.25)
    loaded.load_state_dict(other.state_dict())
    close(loaded(X), other(X))
    close(fusepass.load(saved, state_dict=other.state_dict())(X), other(X))
    assert loaded.tied.weight is loaded.head.weight
    assert {tensor.requires_grad for tensor in loaded.parameters()} == {False}


@torch.no_grad()
def test_a_model_around_it_may_be_compiled(net: Net, saved: Path) -> None:
    torch._dynamo.reset()
    loaded = fusepass.load(saved)

    class Around(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.tanh())["z"].tanh()  # type: ignore[no-any-return]

    compiled = torch.compile(Around(loaded), backend="eager")
    for _ in range(2):
        close(compiled(X), Around(net)(X))
    with pytest.raises(ArtifactError, match="runs compiled kernels alone"):
        torch.export.export(loaded, (X,))


@torch.no_grad()
def test_statistics_in_training_are_written(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    fusepass.save(fusepass.optimize(model), tmp_path / "net.fuse", X)
    loaded, twin = fusepass.load(tmp_path / "net.fuse"), copy.deepcopy(model)
    for _ in range(3):
        close(loaded(X), twin(X))
    close(dict(loaded.state_dict()), dict(twin.state_dict()))
    assert loaded.state_dict()["1.num_batches_tracked"] == 3


@torch.no_grad()
def test_products_in_chunks_are_whole_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Loss(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).logsumexp(1).mean()

    for name, value in (("LEAST_ROWS", 5), ("CHUNK_BYTES", 1), ("WORTH_BYTES", 1), ("TILE", 1)):
        monkeypatch.setattr(chunks, name, value)
    model, x = Loss(6, 40), torch.randn(20, 6)
    fused = fusepass.optimize(model)
    close(fused(x), model(x))
    assert chunks.CHUNKS in [each.rule for each in fused.report().rewrites]
    fusepass.save(fused, tmp_path / "net.fuse", x)
    close(fusepass.load(tmp_path / "net.fuse")(x), model(x))


@torch.no_grad()
def test_random_numbers_are_eager_s(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.GELU(), nn.Tanh())
    fusepass.save(fusepass.optimize(model), tmp_path / "net.fuse", X)
    loaded = fusepass.load(tmp_path / "net.fuse")
    for seed in (1, 2):
        torch.manual_seed(seed)
        expected = model(X)
        torch.manual_seed(seed)
        close(loaded(X), expected)


@torch.no_grad()
def test_an_index_out_of_range_raises_eager_s_error(tmp_path: Path) -> None:
    """The kernel reports it, and the region's own operators, which the file holds as data, raise."""

    class Picks(nn.Module):
        def forward(self, table: Tensor, index: Tensor) -> Tensor:
            return (table[index] * 2 + 1).exp()

    table, index = torch.randn(7, 5), torch.tensor([1, 2, 6])
    fusepass.save(fusepass.optimize(Picks()), tmp_path / "net.fuse", (table, index))
    loaded = fusepass.load(tmp_path / "net.fuse")
    close(loaded(table, index), Picks()(table, index))
    with pytest.raises(IndexError, match="out of bounds"):
        loaded(table, torch.tensor([1, 2, 7]))


@torch.no_grad()
def test_what_a_call_writes_may_not_be_shared(tmp_path: Path) -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x.mul_(2).add_(y)
            return (x + y).tanh()

    memory = torch.randn(20)
    x, y = torch.randn(8), torch.randn(8)
    fusepass.save(fusepass.optimize(Writes()), tmp_path / "net.fuse", (x, y))
    loaded = fusepass.load(tmp_path / "net.fuse")
    mine, other = x.clone(), x.clone()
    close(loaded(mine, y), Writes()(other, y))
    close(mine, other)
    with pytest.raises(ArtifactError, match="shared by two tensors"):
        loaded(memory[:8], memory[4:12])


@torch.no_grad()
def test_many_sizes_share_libraries_and_are_made_ready_as_they_are_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8)).eval()
    examples = [torch.randn(rows, 6) for rows in range(1, 13)]
    fusepass.save(fusepass.optimize(model), tmp_path / "net.fuse", examples)
    with container.Reader(tmp_path / "net.fuse") as reader:
        assert len(reader.manifest["libraries"]) < 6
    loaded = fusepass.load(tmp_path / "net.fuse")
    (tmp_path / "net.fuse").unlink()
    assert [each._call is not None for each in loaded._signatures] == [True, *[False] * 11]
    threads = [threading.Thread(target=torch.no_grad()(loaded), args=(examples[7],)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [each._call is not None for each in loaded._signatures] == [True, *[False] * 6, True, *[False] * 4]
    for example in examples:
        close(loaded(example), model(example))
    asked: list[Signature] = []
    serve = Signature.serve
    monkeypatch.setattr(Signature, "serve", lambda self, args: [serve(self, args), asked.append(self)][0])
    for example in reversed(examples):
        close(loaded(example), model(example))
    assert asked == loaded._signatures[::-1], "one each, however many sizes there are"
    with pytest.raises(
        ValueError, match=r"float32\[13, 6\].*or one of 9 others. Save it with an example like this one"
    ):
        loaded(torch.randn(13, 6))


# ---- what it refuses


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ({"x": torch.randn(3, 3, 6, 6)}, r"x is float32\[3, 3, 6, 6\] with .*, not float32\[2, .* or float32\[5, "),
        ({"x": X.double()}, r"x is float64\[2, 3, 6, 6\]"),
        ({"x": X.to("meta")}, "on meta"),
        ({"x": X.contiguous(memory_format=torch.channels_last)}, r"with strides \(108, 1, 18, 3\)"),
        (
            {"x": X, "bias": BIAS, "power": 3.0},
            r"it is called as \(x=tensor, bias=tensor, power=3.0\), not \(x=tensor\) or \(x=tensor, bias=tensor, power=2.0\)",
        ),
        ({"x": [X]}, r"called as \(x=\[tensor\]\), not \(x=tensor\)"),
        ({"x": X.numpy()}, r"called as \(x=ndarray\), not \(x=tensor\)"),
        ({"y": {"a": (X,)}}, r"called as \(y=\{'a': \(tensor,\)\}\), not \(x=tensor\)"),
        ({}, r"called as \(\), not \(x=tensor\)"),
        ({"x": torch.randn(2, 3, 6, 6, dtype=torch.complex64).imag.conj()}, "strides"),
    ],
    ids=["shape", "type", "device", "strides", "number", "nesting", "numpy", "name", "nothing", "gaps"],
)
def test_other_inputs_are_refused(saved: Path, call: dict[str, Any], told: str) -> None:
    loaded = fusepass.load(saved)
    with torch.no_grad(), pytest.raises(ValueError, match=f"Net was not saved for such a call: .*{told}"):
        loaded(**call)


def test_other_modes_are_refused(net: Net, saved: Path) -> None:
    loaded = fusepass.load(saved)
    loaded(X)  # no parameter asks for gradients, so grad mode does not matter
    with pytest.raises(ArtifactError, match=r"computes no gradients: call it under torch.no_grad\(\)"):
        loaded(X.clone().requires_grad_())
    loaded.conv.weight.requires_grad_()
    with pytest.raises(ArtifactError, match="computes no gradients"):
        loaded(X)
    loaded.requires_grad_(False)
    with torch.autocast("cpu"), pytest.raises(ValueError, match="autocast is cpu bfloat16, not off"):
        loaded(X)
    with pytest.raises(ArtifactError, match=r"a torch.func transform is active"):
        torch.func.vmap(loaded)(X)
    for spoil in (
        nn.Module.double,
        lambda model: setattr(model.conv, "bias", None),
        lambda model: delattr(model.conv, "bias"),
    ):
        loaded = fusepass.load(saved)
        loaded(X)
        spoil(loaded)
        with pytest.raises(
            ArtifactError, match=r"(conv.weight is float64|conv.bias is no tensor).*an artifact stays as it is"
        ):
            loaded(X)
    with pytest.raises(TypeError, match="load its file again"):
        copy.deepcopy(loaded)


def test_under_autocast_it_serves_calls_under_autocast(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Softmax(-1))
    with torch.autocast("cpu"), torch.no_grad():
        fusepass.save(fusepass.optimize(model), tmp_path / "net.fuse", X)
        loaded = fusepass.load(tmp_path / "net.fuse")
        for _ in range(2):
            result = loaded(X)
            assert result.dtype is model(X).dtype
            torch.testing.assert_close(result, model(X))
    with pytest.raises(ValueError, match="autocast is off, not cpu bfloat16"):
        loaded(X)


def test_a_call_with_too_much_is_told_as_it_was_made(saved: Path) -> None:
    with torch.no_grad(), pytest.raises(ValueError, match=r"called as \(x=tensor, argument 2=3\), not \(x=tensor\)"):
        fusepass.load(saved)(X, 3)


def test_another_kind_of_file_is_no_artifact(tmp_path: Path) -> None:
    torch.save(X, tmp_path / "x.pt")
    with pytest.raises(ArtifactError, match=r"x.pt is no artifact of fusepass, but another zip file"):
        fusepass.load(tmp_path / "x.pt")


def test_files_of_operators_and_of_models_are_told_apart(saved: Path, tmp_path: Path) -> None:
    container.write(tmp_path / "net.ops", {"operators": {}}, {})
    with pytest.raises(ArtifactError, match=r"net.ops holds no signatures: fusepass.load_operators reads such a file"):
        fusepass.load(tmp_path / "net.ops")
    with pytest.raises(ArtifactError, match=r"net.fuse holds no operators: fusepass.load reads such a file"):
        fusepass.load_operators(saved)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_a_file_that_is_cut_short_is_refused(saved: Path, tmp_path: Path, share: float) -> None:
    content = saved.read_bytes()
    (tmp_path / "cut.fuse").write_bytes(content[: int(share * len(content))])
    with pytest.raises(ArtifactError, match="damaged: it is no artifact, or cut short"):
        fusepass.load(tmp_path / "cut.fuse")


def test_a_byte_that_differs_is_noticed(net: Net, saved: Path, tmp_path: Path) -> None:
    """In whatever is read: what zip keeps besides, such as dates, does not matter."""
    content = saved.read_bytes()
    noticed = 0
    with torch.no_grad():
        expected = net(X)
    for place in range(len(content) // 80, len(content), len(content) // 40):
        (tmp_path / "other.fuse").write_bytes(content[:place] + bytes([content[place] ^ 0x5A]) + content[place + 1 :])
        told = ""
        try:
            close(fusepass.load(tmp_path / "other.fuse")(X), expected)
        except ArtifactError as error:
            told = str(error)
        assert "damaged" in told or not told
        noticed += bool(told)
    assert noticed > 25, "of forty"


def test_entries_that_were_put_in_place_of_others_are_refused(saved: Path, tmp_path: Path) -> None:
    def copied(change: Callable[[str, bytes], bytes | None], *more: str) -> Path:
        path = tmp_path / "other.fuse"
        with zipfile.ZipFile(saved) as archive, zipfile.ZipFile(path, "w") as other:
            other.comment = archive.comment
            for name in archive.namelist():
                content = change(name, archive.read(name))
                if content is not None:
                    other.writestr(name, content)
            for name in more:
                other.writestr(name, b"more")
        return path

    with zipfile.ZipFile(saved) as archive:
        library = next(name for name in archive.namelist() if name.endswith(".so"))
    for name, told in ((library, "is not what was written"), (MANIFEST, "is not what was written")):
        with pytest.raises(ArtifactError, match=told):
            fusepass.load(copied(lambda each, content, name=name: content + b" " if each == name else content))
    with pytest.raises(ArtifactError, match="other entries than it lists"):
        fusepass.load(copied(lambda each, content: None if each == library else content))
    with pytest.raises(ArtifactError, match="other entries than it lists"):
        fusepass.load(copied(lambda each, content: content, "more"))


def test_another_release_of_pytorch_is_refused(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "9.9.1+cpu")
    with pytest.raises(ArtifactError, match=r"saved with PyTorch 2\..*, and this is 9.9.1"):
        fusepass.load(saved)


def test_another_device_is_refused(saved: Path, changed: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArtifactError, match="saved for cpu, not for cuda"):
        fusepass.load(saved, device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    same = versions.settings()
    with pytest.raises(ArtifactError, match="saved for cuda, and PyTorch finds no CUDA device"):
        fusepass.load(changed(devices=["cuda:0"], settings=same))
    with pytest.raises(
        ArtifactError, match=r"torch.get_float32_matmul_precision\(\) was 'high', and here it is 'highest'"
    ):
        fusepass.load(changed(devices=["cuda:0"], settings=same | {"torch.get_float32_matmul_precision()": "high"}))


def test_another_cpu_is_refused(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fewer = frozenset(sorted(instructions.available())[1:])
    monkeypatch.setattr(instructions, "available", lambda: fewer)
    with pytest.raises(
        ArtifactError, match=r"no code in the artifact runs on this machine: built for a CPU \(native\) that has"
    ):
        fusepass.load(saved)


def test_another_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    needed = {"target": "cuda", "arch": "sm_80", "cuda": "13"}
    assert machine.problem(needed, torch.device("cuda", 0)) == "built for sm_80, not sm_90"
    assert machine.problem(needed | {"arch": "sm_90"}, torch.device("cuda", 0)) is None
    assert machine.problem(needed, None) == "built for sm_80, and there is no GPU"
    assert (
        machine.problem(needed | {"cuda": "12"}, torch.device("cuda", 0))
        == "built for CUDA 12, and PyTorch has 13 here"
    )


def test_another_format_is_refused(saved: Path, changed: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "FORMAT", container.FORMAT + 1)
    with pytest.raises(ArtifactError, match="has format 1; this version of fusepass reads format 2"):
        fusepass.load(saved)


@pytest.mark.parametrize("part", ["states", "signatures", "kinds", "libraries", "torch", "devices"])
def test_a_manifest_that_lacks_something_is_damage(changed: Callable[..., Path], part: str) -> None:
    with pytest.raises(ArtifactError, match=r"damaged|saved with PyTorch None"):
        fusepass.load(changed(**{part: None}))


@pytest.mark.skipif(not instructions.available() >= instructions.needed("x86-64-v3"), reason="needs a CPU of level v3")
def test_one_file_serves_several_architectures(net: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "net.fuse"
    fusepass.save(fusepass.optimize(net), path, X, architectures=["native", "x86-64-v3"])
    with zipfile.ZipFile(path) as archive:
        (signature,) = json.loads(archive.read(MANIFEST))["signatures"]
    assert [{each["arch"] for each in variant["requires"]} for variant in signature["variants"]] == [
        {"native"},
        {"x86-64-v3"},
    ]
    numbers = [{region["code"]["library"] for region in variant["regions"]} for variant in signature["variants"]]
    assert not numbers[0] & numbers[1]
    monkeypatch.setattr(instructions, "available", lambda: instructions.needed("x86-64-v3"))
    with torch.no_grad():
        close(fusepass.load(path)(X), net(X))
    with pytest.raises(ValueError, match="'sm_90' is no architecture of this CPU; there are native, x86-64"):
        fusepass.save(fusepass.optimize(net), path, X, architectures=["sm_90"])
    with pytest.raises(ValueError, match="give a list such as"):
        fusepass.save(fusepass.optimize(net), path, X, architectures="native")


def test_what_cannot_be_saved_is_named(tmp_path: Path) -> None:
    path = tmp_path / "net.fuse"
    linear = nn.Linear(6, 6)
    with pytest.raises(TypeError, match=r"takes what fusepass.optimize gave back, not a Linear"):
        fusepass.save(linear, path, X)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="examples is empty"):
        fusepass.save(fusepass.optimize(linear), path, [])
    hooked = nn.Linear(6, 6)
    hooked.register_forward_hook(lambda module, args, result: None)
    with pytest.raises(ArtifactError, match="Linear cannot be saved: it has forward hooks"):
        fusepass.save(fusepass.optimize(hooked), path, X)

    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.exp() * 2 if bool((x > 0).all()) else x.tanh() + 1

    with pytest.raises(ArtifactError, match="branches on values"):
        fusepass.save(fusepass.optimize(Branches()), path, X)

    class Sizes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.nonzero() * 2

    with pytest.raises(CaptureError, match="Sizes has no single graph"):
        fusepass.save(fusepass.optimize(Sizes()), path, X)
    assert not path.exists()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, -0.0, 1e300, float("inf"), 1 - 2j, "text", b"bytes", (1, (2.5, None)), [1, (2,)], {"a": [1], 2: (3,)},
        slice(1, None, 2), torch.Size([2, 3]), torch.float16, torch.device("cuda", 1), torch.channels_last, torch.strided,
    ],
    ids=repr,
)  # fmt: skip
def test_plain_values_come_back(value: Any) -> None:
    found = plain.decode(json.loads(json.dumps(plain.encode(value), allow_nan=False)))
    assert type(found) is type(value)
    assert repr(found) == repr(value)


@pytest.mark.parametrize(
    "value", [object(), print, {1: object()}, torch.ones(2)], ids=["object", "function", "inside", "tensor"]
)
def test_what_is_not_plain_is_refused(value: Any) -> None:
    with pytest.raises(ArtifactError, match="cannot be written to an artifact"):
        plain.encode(value)


@pytest.mark.parametrize(
    "data", [{"dtype": "load"}, {"dtype": "ops"}, {"eval": "1"}, {"tuple": 3}, {}, {"a": 1, "b": 2}, {"float": "x"}]
)
def test_data_that_names_no_value_is_refused(data: Any) -> None:
    with pytest.raises(ArtifactError, match="a value cannot be read"):
        plain.decode(data)
