"""No source of any workload changes unless it is meant to: digests of all candidates, and what a sample of them takes of a multiprocessor.

A usual run looks at a sample; ``pytest tests/golden_sources -m "slow or not slow"`` at all. With ``--update-golden`` what is looked at is written
anew. Sources are the same under every hash seed: a process has a seed of its own, and one test asks for two.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from benchmarks.layers import Workload
from fusepass.codegen import toolchain
from fusepass.codegen.source import Source, Target
from tests.golden_sources.digests import GROUPS, Digests, digests, sources

ROOT = Path(__file__).parents[2]
TEXTS = Path(__file__).parent / "digests"
RESOURCES = Path(__file__).parent / "resources.txt"
_EVERY = 12  # a usual run looks at the first of so many workloads of a group


def _cases() -> Iterator[ParameterSet]:
    for group, (workloads, _, _) in GROUPS.items():
        for number, workload in enumerate(workloads):
            marks = [pytest.mark.slow] if number % _EVERY else []
            yield pytest.param(group, workload, id=f"{group}-{workload.name}", marks=marks)


@pytest.mark.parametrize(("group", "workload"), list(_cases()))
def test_sources_are_as_they_were(group: str, workload: Workload, update_golden: bool) -> None:
    path, found = TEXTS / group / f"{workload.name}.txt", digests(group, workload)
    if update_golden:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{digest} {name}\n" for name, digest in found.items()))
    known = _read(path)
    changed = [name for name in {**known, **found} if known.get(name) != found.get(name)]
    assert not changed, "\n".join(f"{workload.name}, {name}: {_change(name, known, found)}" for name in changed)


def _read(path: Path) -> Digests:
    lines = path.read_text().splitlines() if path.exists() else []
    return {name: digest for digest, _, name in (line.partition(" ") for line in lines)}


def _change(name: str, known: Digests, found: Digests) -> str:
    return "is new" if name not in known else "is gone" if name not in found else "changed"


def test_a_change_names_workload_region_and_candidate() -> None:
    known, found = {"norm/generated": "1", "norm/no teams": "2"}, {"norm/generated": "3", "norm/rank": "2"}
    assert [_change(name, known, found) for name in ("norm/generated", "norm/no teams", "norm/rank")] == [
        "changed", "is gone", "is new"
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["1", "2"])
def test_the_hash_seed_changes_nothing(seed: str) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        __file__,
        "-k",
        "sources_are_as_they_were and mission",
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


# ---- Registers, spills and shared memory


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_a_sample_takes_the_registers_that_it_took(update_golden: bool, tmp_path: Path) -> None:
    """Of the first candidate of each workload that a usual run looks at. Another compiler may need other registers."""
    sample = {name: source for name, source in _first_sources() if source.target is Target.CUDA}
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        taken = list(pool.map(functools.partial(_resources, folder=tmp_path), sample, sample.values()))
    told = [_compiler(), *(line for lines in taken for line in lines)]
    if update_golden:
        RESOURCES.write_text("".join(f"{line}\n" for line in told))
    known = RESOURCES.read_text().splitlines()
    if known[0] != told[0]:
        pytest.skip(f"the table is of {known[0]}, this is {told[0]}")
    assert sorted({*told} ^ {*known}) == []


def _first_sources() -> Iterator[tuple[str, Source]]:
    for group in ("mission", "visible", "single", "networks", "training"):
        for workload in GROUPS[group][0][::_EVERY]:
            for name, made in sources(group, workload):
                if isinstance(made, list):
                    yield f"{workload.name}: {name}", made[0]
                    break


def _resources(name: str, source: Source, folder: Path) -> list[str]:
    """A line for each kernel."""
    text = folder / f"{hashlib.sha256(source.text.encode()).hexdigest()[:16]}.cu"
    text.write_text(source.text)
    command = ["nvcc", *toolchain.flags(Target.CUDA, source.arch), f"-I{toolchain.include_directory()}"]
    command += ["-cubin", "-Xptxas", "-v", "-o", str(text.with_suffix(".cubin")), str(text)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    kernels = re.findall(r"Function properties for \w+\n(.*)\n.*Used (\d+ registers)(.*)", told)
    return [f"{name}, kernel {number}: {' '.join(each).strip()}" for number, each in enumerate(sorted(kernels))]


def _compiler() -> str:
    return subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[-1]
