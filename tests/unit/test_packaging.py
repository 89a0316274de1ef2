"""What is built, installed and registered: wheel, source distribution, editable install, entry points."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch._dynamo.backends.registry import lookup_backend

import fusepass
import fusepass.patterns
from fusepass.codegen import ir
from fusepass.training.backend import fusepass_backend
from tests.support.layout import FOLDERS, ROOT

PROJECT: Mapping[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
DIST_INFO = f"fusepass-{PROJECT['project']['version']}.dist-info"
TEMPLATE_GLOBS = "cuda/*.j2", "cpu/*.j2", "html/*.j2", "include/*", "program/*.j2"


def run(command: Sequence[str | Path], cwd: Path, **environment: str) -> str:
    """Standard output of `command`; a test that runs a failing command shows what it printed."""
    done = subprocess.run(command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def template_files() -> set[str]:
    """The template data in the source tree, by its path in an installed `fusepass.templates`."""
    folder = FOLDERS["fusepass.templates"]
    return {path.relative_to(folder).as_posix() for glob in TEMPLATE_GLOBS for path in folder.glob(glob)}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a source distribution, so that it can only hold what both hold.

    Built in a copy of the tree: setuptools leaves a build/lib behind, from which deleted modules come back.
    """
    tree = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for folder in FOLDERS.values():
        shutil.copytree(folder, tree / folder.name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", tree / "dist", tree], tree)
    (built,) = (tree / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the wheel as installed, and nothing else."""
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    run([*pip, "--target", target, wheel], target)
    return target


def run_installed(program: str, installed: Path, cwd: Path) -> Any:
    """What `program` prints as JSON, run where the wheel's files come first on the path."""
    return json.loads(run([sys.executable, "-c", program], cwd, PYTHONPATH=str(installed)))


def test_the_wheel_holds_every_source_file_and_nothing_else(wheel: Path) -> None:
    expected = {"fusepass/py.typed"} | {f"fusepass/templates/{name}" for name in template_files()}
    for package, folder in FOLDERS.items():
        place = package.replace(".", "/")
        expected |= {f"{place}/{path.relative_to(folder)}" for path in folder.rglob("*.py")}
    held = {name for name in zipfile.ZipFile(wheel).namelist() if not name.startswith(DIST_INFO)}
    assert held == expected


def test_the_wheel_installs_one_top_level_package(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names} == {"fusepass", DIST_INFO}
    assert f"{DIST_INFO}/licenses/LICENSE" in names


def test_every_file_of_the_template_folder_is_known_to_packaging() -> None:
    """A file that no glob of the package data matches would be missing from an installed fusepass."""
    assert tuple(PROJECT["tool"]["setuptools"]["package-data"]["fusepass.templates"]) == TEMPLATE_GLOBS
    folder = FOLDERS["fusepass.templates"]
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {name for name in files if not name.endswith((".py", ".pyc"))} == template_files()


def test_an_installed_wheel_imports_and_finds_its_data(installed: Path, tmp_path: Path) -> None:
    program = """
import importlib.metadata, importlib.resources, json, pathlib
import fusepass, fusepass.patterns, fusepass.codegen.ir.dtype, fusepass.templates
templates = pathlib.Path(importlib.resources.files("fusepass.templates"))
data = [path for path in templates.glob("*/*") if path.parent.name != "__pycache__"]
print(json.dumps({
    "modules": [fusepass.__file__, fusepass.patterns.__file__, fusepass.codegen.ir.dtype.__file__],
    "data": [path.relative_to(templates).as_posix() for path in data],
    "metadata": str(importlib.metadata.distribution("fusepass").locate_file("")),
}))
"""
    found = run_installed(program, installed, tmp_path)
    assert found["modules"] == [
        str(installed / "fusepass" / name) for name in ("__init__.py", "patterns/__init__.py", "codegen/ir/dtype.py")
    ]
    assert set(found["data"]) == template_files()
    assert Path(found["metadata"]) == installed


def test_torch_compile_finds_the_backend_by_name(installed: Path, tmp_path: Path) -> None:
    """Nothing imports fusepass here: the entry point alone must lead to it, and its result must be right."""
    program = """
import json, sys, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(24, 40), torch.nn.GELU(), torch.nn.LayerNorm(40), torch.nn.Tanh())
x = torch.randn(16, 24)
assert "fusepass" not in sys.modules
with torch.no_grad():
    eager = model(x)
    fused = torch.compile(model, backend="fusepass")(x)
    exact = model.double()(x.double())
backend = sys.modules["fusepass.training.backend"]
print(json.dumps({
    "backend": backend.__file__,
    "fused": (fused - exact).abs().max().item(),
    "eager": (eager - exact).abs().max().item(),
    "dtype": str(fused.dtype),
}))
"""
    found = run_installed(program, installed, tmp_path)
    assert found["backend"] == str(installed / "fusepass" / "training" / "backend.py")
    assert found["dtype"] == "torch.float32"
    assert found["fused"] <= 2 * found["eager"] + 1e-6


def test_every_entry_point_can_be_loaded() -> None:
    points = importlib.metadata.distribution("fusepass").entry_points
    assert {(point.group, point.name, point.value) for point in points} == {
        ("console_scripts", "fusepass", "fusepass.cli.main:main"),
        ("torch_dynamo_backends", "fusepass", "fusepass.training.registered:entry_point"),
    }
    (command,) = points.select(group="console_scripts")
    assert callable(command.load())
    assert lookup_backend("fusepass") is fusepass_backend


def test_this_install_is_consistent() -> None:
    """An editable install leads to the source tree, any other to one folder; data lies beside the code."""
    templates = Path(str(importlib.resources.files("fusepass.templates")))
    places = {
        "fusepass": Path(str(fusepass.__file__)).parent,
        "fusepass.patterns": Path(str(fusepass.patterns.__file__)).parent,
        "fusepass.codegen": Path(str(ir.__file__)).parents[1],
        "fusepass.templates": templates,
    }
    # A source tree that was installed from holds an egg-info too, which a run from there finds first.
    records = importlib.metadata.distributions(name="fusepass")
    origins = [json.loads(text) for text in (record.read_text("direct_url.json") for record in records) if text]
    if any(origin.get("dir_info", {}).get("editable") for origin in origins):
        assert {package: place.resolve() for package, place in places.items()} == FOLDERS
    else:
        home = places["fusepass"]
        assert places == {package: home.joinpath(*package.split(".")[1:]) for package in FOLDERS}
