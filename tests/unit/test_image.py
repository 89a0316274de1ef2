"""The image of examples/docker: its commands, in an environment whose path has no compiler from the second stage on."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fusepass.codegen import instructions
from tests.support.layout import ROOT

pytest.importorskip("safetensors")

FOLDER = ROOT / "examples" / "docker"
STAGES = (FOLDER / "Dockerfile").read_text(encoding="utf-8").split("\nFROM ")[1:]


def test_the_page_of_recipes_shows_it() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert f"```dockerfile\n{(FOLDER / 'Dockerfile').read_text(encoding='utf-8')}```" in page


def copied(stage: str, folder: Path) -> None:
    """Do what a stage's ``COPY`` of the project's own files does."""
    for names in re.findall(r"^COPY ((?!--).*) \./$", stage, re.MULTILINE):
        for name in names.split():
            (folder / name).write_bytes((FOLDER / name).read_bytes())


def python(command: list[str], folder: Path, path: str, given: str = "") -> str:
    """What ``python ...`` prints, with ``/`` for `folder`."""
    assert command[0] == "python"
    placed = [str(folder / word[1:]) if word.startswith("/") else word for word in command[1:]]
    environment = {"PATH": path, "HOME": str(folder), "PYTHONPATH": str(ROOT), "CUDA_HOME": str(folder)}
    environment |= {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "PYTHONPYCACHEPREFIX") if name in os.environ}
    done = subprocess.run(
        [sys.executable, *placed],
        cwd=folder, env=environment, input=given, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "FusepassWarning" not in done.stderr
    return done.stdout


@pytest.mark.skipif(not instructions.available() >= instructions.needed("x86-64-v3"), reason="needs a CPU of level v3")
def test_the_image_is_built_and_serves_without_a_compiler(tmp_path: Path) -> None:
    build, serve = tmp_path / "build", tmp_path / "serve"
    for folder in (build, serve, tmp_path / "none"):
        folder.mkdir()
    copied(STAGES[0], build)
    copied(STAGES[1], serve)
    (command,) = re.findall(r"^RUN (python .*)$", STAGES[0], re.MULTILINE)
    python(command.split(), build, os.environ["PATH"])
    ((source, target),) = re.findall(r"^COPY --from=build /(\S+) /(\S+)$", STAGES[1], re.MULTILINE)
    (serve / target).write_bytes((build / source).read_bytes())

    (command,) = re.findall(r"^CMD (.*)$", STAGES[1], re.MULTILINE)
    requests = [[1, 2, 3, 4], *(torch.rand(rows, 4).tolist() for rows in (2, 37, 256))]
    lines = "".join(f"{json.dumps(each)}\n" for each in requests)
    printed = python(json.loads(command), serve, str(tmp_path / "none"), lines)
    spec = importlib.util.spec_from_file_location("net", FOLDER / "net.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with torch.no_grad():
        expected = [module.make_net()(torch.atleast_2d(torch.tensor(each, dtype=torch.float32))) for each in requests]
    for line, wanted in zip(printed.splitlines(), expected, strict=True):
        torch.testing.assert_close(torch.tensor(json.loads(line)), wanted, rtol=1e-4, atol=1e-5)
    assert not [*(serve / ".cache").glob("**/*.so")], "nothing was built"
