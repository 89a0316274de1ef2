"""Fixtures and settings that every test shares."""

from __future__ import annotations

from tests.support import bytecode  # noqa: F401, before all that it is to keep

# isort: split
import gc
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import Generated, generate
from fusepass.codegen.ir.expr import Builder
from fusepass.codegen.ir.program import Program
from fusepass.codegen.ir.text import program_text
from fusepass.config import current
from fusepass.runtime import fast_path
from tests import compile_cuda
from tests.support import precompiled

ROOT = Path(__file__).parents[1]
_described: set[str] = set()  # programs whose CUDA sources are kept

# Set before anything reads it: tests never touch the user's cache, and reuse each other's builds.
os.environ["FUSEPASS_CACHE_DIR"] = str(ROOT / "build" / "test-cache")
# What fuses must not depend on how fast this machine is at the moment; tests of measuring ask for it.
os.environ["FUSEPASS_TUNE"] = "off"
# What a test replaces in the generator is not replaced in other processes; tests of these ask for them.
os.environ["FUSEPASS_WORKERS"] = "0"

try:
    import hypothesis
except ImportError:  # a GPU machine without the dev extra still runs the gpu tests
    pass
else:
    # "ci" draws the same examples every time, so that a failure can be repeated; "dev" looks for new ones.
    hypothesis.settings.register_profile("ci", deadline=None, max_examples=10, derandomize=True, database=None)
    hypothesis.settings.register_profile("dev", deadline=None, max_examples=100, print_blob=True)
    hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden files instead of comparing")


def pytest_configure() -> None:
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
    precompiled.use()


def pytest_collectstart() -> None:
    """What a module draws as it is imported is the same in every run."""
    torch.manual_seed(0)


@pytest.hookimpl(tryfirst=True)  # before what is slow is left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    cases: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("thinned")
        if mark is not None and not item.get_closest_marker("slow"):
            name = item.nodeid.partition("[")[0]
            if cases[name] % mark.args[0]:
                item.add_marker(pytest.mark.slow)
            cases[name] += 1
    if torch.cuda.is_available():
        return
    no_device = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(no_device)


def pytest_collection_finish() -> None:
    """What is there for good, modules and tests, is not looked through at each collection of garbage: that was a twelfth of the time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _calls_need_no_python() -> None:
    """From the first test on, and without a build that goes on beside one."""
    fast_path.wait()


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Random inputs and initial weights are the same in every run and in any order of tests."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _generated_anew(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test replaces in the generator is run, whatever an earlier test generated of the same region; unless it asks for `records`.
    The same of whole graphs, which are found unless it asks for `graphs`."""
    if "records" not in request.fixturenames:
        monkeypatch.setattr("fusepass.autotune.candidates.restore", lambda *_: False)
    if "graphs" not in request.fixturenames:
        monkeypatch.setattr("fusepass.compile.recalled.key_of", lambda *_, **__: None)


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache in which what is generated of regions is kept and found; gives the folder of these records."""
    monkeypatch.setenv("FUSEPASS_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "v1" / "regions"


@pytest.fixture
def graphs(records: Path) -> Path:
    """The same of whole graphs, too; gives the folder of theirs."""
    return records.with_name("graphs")


@pytest.fixture
def without_gradients() -> Iterator[None]:
    """As inference is."""
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True)
def _keep_cuda_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a test generates for the CPU is also generated for a GPU and kept for `tests.compile_cuda`."""
    if shutil.which("nvcc") is None:
        return

    def both(program: Program, builder: Builder, facts: DeviceFacts, *options: Any) -> Generated:
        ways = options[:2]  # what is known besides, is of this device
        same = repr((program_text(program), ways, current().disable))
        if same not in _described:
            described = generate(program, builder, DeviceFacts.h200(), *ways)
            compile_cuda.keep(described.source)
            compile_cuda.keep(described.unaligned())
            _described.add(same)
        return generate(program, builder, facts, *options)

    monkeypatch.setattr("fusepass.codegen.search.candidate.generate", both)


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be rewritten (`--update-golden`)."""
    return bool(request.config.getoption("--update-golden"))
