"""Rendered CUDA kernels under compute-sanitizer: no access out of bounds, no race, no barrier that some threads miss."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import CUDA_HOME

from fusepass.codegen.build import build_all
from fusepass.codegen.cache_entry import library_of
from fusepass.codegen.detect import device_facts
from fusepass.codegen.ir.program import Buffer, Program, Role
from fusepass.codegen.render import render
from fusepass.errors import BuildError
from tests.conftest import ROOT
from tests.support import convolutions, kernels, products
from tests.support.launch import BufferPlan, LaunchPlan, Plan

SANITIZER = shutil.which("compute-sanitizer", path=f"{os.environ.get('PATH')}:{CUDA_HOME}/bin")
_WIDEST = 16  # bytes of one access
_MOST_BYTES = 16 << 20  # of a sample: racecheck takes hundreds of times the kernel's own time

SAMPLES = {**kernels.SAMPLES, **convolutions.SAMPLES, **products.SAMPLES}

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(SANITIZER is None, reason="compute-sanitizer is not installed")]


def _buffer(buffer: Buffer, aligned: bool) -> BufferPlan:
    shifted = buffer.role is Role.INPUT and not aligned
    nbytes = buffer.dtype.nbytes
    # An asynchronous copy that ends with zeros reads its real bytes alone; memcheck takes its whole width for read.
    whole = -(-buffer.extent * nbytes // _WIDEST) * _WIDEST
    return {"nbytes": whole, "shift": nbytes if shifted else 0}


def _moderate(program: Program) -> bool:
    return sum(buffer.nbytes for buffer in program.arguments) <= _MOST_BYTES


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every sample of moderate size, for aligned and for unaligned inputs, as a file for `tests.support.launch`."""
    facts = device_facts(torch.device("cuda"))
    programs = {name: make() for name, make in SAMPLES.items()}
    keys = [(name, aligned) for name, program in programs.items() if _moderate(program) for aligned in (True, False)]
    sources = [render(programs[name], facts, aligned=aligned) for name, aligned in keys]
    launches: list[LaunchPlan] = []
    for (name, aligned), source, library in zip(keys, sources, build_all(sources), strict=True):
        if isinstance(library, BuildError):
            raise library
        buffers = [_buffer(buffer, aligned) for buffer in programs[name].arguments]
        file = str(library_of(library.parent))  # which it may share with others
        launches.append({"name": name, "library": file, "entry": source.entry, "buffers": buffers})
    runtime = next(path for path in Path(str(CUDA_HOME)).glob("lib*/libcudart.so*"))
    written: Plan = {"runtime": str(runtime), "launches": launches}
    place = tmp_path_factory.mktemp("sanitizer") / "plan.json"
    place.write_text(json.dumps(written))
    return place


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_clean(tool: str, plan: Path) -> None:
    launched = [sys.executable, "-m", "tests.support.launch", str(plan)]
    command = [str(SANITIZER), "--tool", tool, "--error-exitcode", "9", *launched]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if "Device not supported" in done.stdout:
        pytest.skip("compute-sanitizer does not support this device or its driver")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "launched" in done.stdout
