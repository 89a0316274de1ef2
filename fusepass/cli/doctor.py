"""Examines what fusepass needs from the machine, and says what to do about what is missing."""

from __future__ import annotations

import json
import platform
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.utils.collect_env import get_pretty_env_info

from fusepass.codegen import cache, cache_folders, toolchain
from fusepass.codegen.build import build, load
from fusepass.codegen.detect import device_facts
from fusepass.codegen.source import Source, Target
from fusepass.config import current, override
from fusepass.errors import BuildError
from fusepass.report.table import Column, human_bytes, table, terminal_width, wrap
from fusepass.runtime import fast_path

_COLUMNS = (Column(""), Column("check"), Column("found", least=12))

_CPU_TEXT = """\
extern "C" int fusepass_doctor(const float* in, float* out, void*) {
    #pragma omp parallel for
    for (int i = 0; i < 1024; ++i) out[i] = 2 * in[i];
    return 0;
}
"""
# As templates/cuda/library.cu.j2 has it, for `codegen/cubins.py` to take apart.
_CUDA_TEXT = """\
#include "fp_launch.cuh"

namespace {

__global__ void __launch_bounds__(256) twice(
    const float* __restrict__ in,
    float* __restrict__ out)
{
    out[blockIdx.x * 256 + threadIdx.x] = 2 * in[blockIdx.x * 256 + threadIdx.x];
}

}  // namespace

extern "C" int fusepass_doctor(
    void* in,
    void* out,
    void* stream)
{
    fp::launch<twice>(4, 256, 0, stream,
        static_cast<const float*>(in),
        static_cast<float*>(out));
    return static_cast<int>(cudaGetLastError());
}
"""


@dataclass(frozen=True)
class Check:
    """One thing that was examined.

    Attributes:
        name: what it is.
        ok: whether fusepass can work with it.
        found: version, path, or what went wrong.
        remedy: what to do where it is not ok, else empty.
    """

    name: str
    ok: bool
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """All checks. ``str()`` is a table that fits the terminal.

    Attributes:
        checks: what was examined.
        environment: what PyTorch's ``collect_env`` says of the machine, where it was asked.
    """

    checks: tuple[Check, ...]
    environment: str = ""

    @property
    def ok(self) -> bool:
        """Whether every check is."""
        return all(check.ok for check in self.checks)

    def to_json(self) -> str:
        """The checks as JSON, under the names of their fields."""
        return json.dumps({"ok": self.ok, **asdict(self)}, indent=2)

    def __str__(self) -> str:
        width = terminal_width()
        rows = [("ok" if check.ok else "FAIL", check.name, _line(check.found)) for check in self.checks]
        lines = table(_COLUMNS, rows, width)
        for block, check in zip(lines[1:], self.checks, strict=True):
            if check.remedy:
                block.extend(wrap(f"-> {check.remedy}", width, indent=6))
        found = "\n".join(line for block in lines for line in block)
        return f"{found}\n\n{self.environment}" if self.environment else found


def diagnose(*, environment: bool = False) -> Diagnosis:
    """Examine Python, torch, the compilers and the cache, and build and run one kernel for each target.

    The kernels are built anew, beside the cache. Without a CUDA device none is run on it, and nvcc may be
    missing. With `environment`, PyTorch describes the machine, too, for a report of a fault: that takes seconds.
    Never raises for what it finds.
    """
    needs = [
        Check("python", True, platform.python_version()),
        Check("torch", True, f"{torch.__version__}, CUDA {torch.version.cuda or 'not built in'}"),
        _compiler("C++ compiler", toolchain.cxx),
        _ninja(),
        _cuda_compiler(),
        _cache(),
        _kernel(Target.CPU, torch.device("cpu")),
        _calls(),
    ]
    if torch.cuda.is_available():
        needs.append(_kernel(Target.CUDA, torch.device("cuda", torch.cuda.current_device())))
    return Diagnosis(tuple(needs), get_pretty_env_info() if environment else "")


def _compiler(name: str, find: Callable[[], toolchain.Compiler]) -> Check:
    try:
        compiler = find()
        return Check(name, True, f"{compiler.path}: {compiler.version()}")
    except BuildError as error:
        return _failed(name, error)


def _cuda_compiler() -> Check:
    check = _compiler("CUDA compiler", toolchain.cuda_compiler)
    if check.ok:
        return _of_torch(check)
    if torch.cuda.is_available():
        return check
    return Check(check.name, True, f"{check.found} (not needed without a GPU)")


def _of_torch(nvcc: Check) -> Check:
    """The check of a compiler that runs; it fails for an nvcc with which PyTorch refuses to build: its CUDA has another major version."""
    release = re.search(r"release (\d+)\.", nvcc.found)
    wanted = (torch.version.cuda or "").partition(".")[0]
    if release is None or not wanted or release[1] == wanted:
        return nvcc
    remedy = (
        "pip install 'fusepass[cuda13]'" if wanted == "13" else f"name the folder of one of CUDA {wanted} in CUDA_HOME"
    )
    return Check(nvcc.name, False, f"{nvcc.found}, but PyTorch is built for CUDA {wanted}", remedy)


def _ninja() -> Check:
    try:
        return Check("ninja", True, str(toolchain.ninja()))
    except BuildError as error:
        return _failed("ninja", error)


def _cache() -> Check:
    directory = current().cache_dir
    if problem := cache_folders.unusable(directory):
        remedy = "make it writable for you alone, or name another directory in FUSEPASS_CACHE_DIR"
        return Check("cache", False, f"{directory}: {problem}", remedy)
    kept, damaged = cache.entries(), len(cache.verify())
    found = f"{directory}: {len(kept)} libraries, {human_bytes(sum(entry.nbytes for entry in kept))}"
    return Check("cache", True, f"{found}, {damaged} damaged" if damaged else found)


def _source(target: Target, arch: str) -> Source:
    """``out[i] = 2 * in[i]``."""
    text, headers = (_CUDA_TEXT, ("fp_launch.cuh",)) if target is Target.CUDA else (_CPU_TEXT, ())
    return Source("doctor", "fusepass_doctor", target, text, headers, arch)


def _kernel(target: Target, device: torch.device) -> Check:
    """Build and run ``out[i] = 2 * in[i]`` on `device`."""
    name = f"{target.name} kernel"
    source = _source(target, device_facts(device).arch)
    start = time.perf_counter()
    try:
        with cache_folders.stage(Path(tempfile.gettempdir()), cache_folders.OWN) as fresh, override(cache_dir=fresh):
            run = load(build(source), source.entry, arguments=2)
    except BuildError as error:
        return _failed(name, error)
    seconds = time.perf_counter() - start
    given = torch.arange(1024, dtype=torch.float32, device=device)
    out = torch.zeros_like(given)
    stream = torch.cuda.current_stream(device).cuda_stream if target is Target.CUDA else 0
    status = run(given.data_ptr(), out.data_ptr(), stream)
    if status != 0:
        return Check(name, False, f"it returned error {status}", "check the driver with nvidia-smi")
    if not torch.equal(out, 2 * given):
        return Check(name, False, "it gave wrong results", "please report this, with this table")
    return Check(name, True, f"built in {seconds:.1f} s, runs on {device_facts(device).name}")


def _calls() -> Check:
    """Whether the usual call needs no Python; with Python it takes longer, which is no fault."""
    fast_path.wait()
    there = fast_path.types() is not None
    return Check("calls", True, "without Python" if there else "by Python: its headers, or a compiler, are missing")


def _failed(name: str, error: BuildError) -> Check:
    """The message says what, and mostly what to do; a compiler's own words follow it."""
    found, _, remedy = error.args[0].partition("; ")
    return Check(name, False, found, remedy or error.stderr or "the checks above may say why")


def _line(text: str) -> str:
    """`text` on one line."""
    return " ".join(text.split())
