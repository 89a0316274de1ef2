"""Compiles every CUDA source that the tests' generator emitted, on machines that have nvcc but no GPU.

``python -m tests.compile_cuda`` after a test run. The tests leave the sources in `SOURCES` (see conftest.py); what
compiled before is not compiled again. Sources are compiled many to a translation unit, because the headers take longer
than the kernels do. What a kernel declares of shared memory and what it is launched with must fit a block of the device.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path

from fusepass.codegen import toolchain
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.source import Source, Target

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "build" / "test-cuda"
_BATCH = 128
# The device's part alone, for which the host's is read and checked, too. What is compiled does not run: it need not be fast.
_FLAGS = ("-cubin", "-o", "/dev/null", "-Xptxas", "-v")
_QUICK = "--Ofast-compile"  # of CUDA 12.9 and later
_LAUNCH = re.compile(r"fp::launch(_teams)?<(\w+)>\(([^;]*?) stream,")
_DECLARED = re.compile(r"Compiling entry function '(\w+)'.*(?:\n.*)*?\n.*Used \d+ registers(?:.*?(\d+) bytes smem)?")


def keep(source: Source) -> None:
    """Leave a source for compilation; called by tests."""
    SOURCES.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(source.text.encode()).hexdigest()[:16]
    path = SOURCES / f"{source.arch}_{name}.cu"
    if not path.exists():
        aside = path.with_suffix(f".{os.getpid()}")
        aside.write_text(source.text)
        aside.rename(path)


def compile_all() -> int:
    """Compile what was left; prints failures and a closing line. Returns how many sources failed."""
    if shutil.which("nvcc") is None:
        print("nvcc is not here: no CUDA source was compiled")
        return 0
    waiting = [path for path in sorted(SOURCES.glob("sm_*.cu")) if not path.with_suffix(".ok").exists()]
    alike = [list(paths) for _, paths in groupby(waiting, _arch)]
    batches = [paths[start : start + _BATCH] for paths in alike for start in range(0, len(paths), _BATCH)]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        failed = [path for part in pool.map(_compile_batch, batches) for path in part]
    for path in failed:
        done = _compile([path])
        print(f"{path.relative_to(ROOT)}:\n{done.stderr if done.returncode else _too_large(path, done.stderr)}")
    print(f"CUDA sources: {len(waiting) - len(failed)} passed, {len(failed)} failed")
    return len(failed)


def dynamic_shared(text: str) -> Iterator[tuple[str, int]]:
    """Each kernel of a source, and the bytes of shared memory that it is launched with; those alone that are known before."""
    for kind, name, arguments in _LAUNCH.findall(text):
        nbytes = arguments.split(",")[3 if kind else 2].strip()  # as the functions in fp_launch.cuh take it
        if nbytes.isdecimal():
            yield name, int(nbytes)


def _too_large(path: Path, told: str) -> list[str]:
    """What kernels of a source have of shared memory where a block has less; `told` by ptxas of a unit that it is in."""
    facts = DeviceFacts.described(_arch(path))
    declared = {entry: int(nbytes or 0) for entry, nbytes in _DECLARED.findall(told) if f"n{path.stem}" in entry}
    too_large = []
    for name, nbytes in dynamic_shared(path.read_text()):
        (entry,) = (each for each in declared if f"{len(name)}{name}E" in each)
        if declared[entry] + nbytes > facts.shared_bytes_per_block:
            too_large.append(f"{name} takes {declared[entry]} + {nbytes} bytes of shared memory")
    return too_large


def _arch(path: Path) -> str:
    return path.stem.rpartition("_")[0]


def _compile_batch(paths: Sequence[Path]) -> list[Path]:
    """The sources of a batch that do not compile."""
    done = _compile(paths)
    if done.returncode == 0:
        failed = [path for path in paths if _too_large(path, done.stderr)]
    else:
        failed = [path for path in paths if (alone := _compile([path])).returncode or _too_large(path, alone.stderr)]
    for path in paths:
        if path not in failed:
            path.with_suffix(".ok").touch()
    return failed


def _compile(paths: Sequence[Path]) -> subprocess.CompletedProcess[str]:
    unit = SOURCES / f"unit-{paths[0].stem}.cu"
    unit.write_text("".join(_wrapped(path) for path in paths))
    try:
        command = ["nvcc", *toolchain.flags(Target.CUDA, _arch(paths[0])), *_FLAGS, *_quick()]
        command += [f"-I{toolchain.include_directory()}", str(unit)]
        return subprocess.run(command, capture_output=True, text=True, check=False)
    finally:
        unit.unlink()


@functools.cache
def _quick() -> tuple[str, ...]:
    told = subprocess.run(["nvcc", "--help"], capture_output=True, text=True, check=True).stdout
    return (f"{_QUICK}=max",) if _QUICK in told else ()


def _wrapped(path: Path) -> str:
    """The source in a namespace of its own; its includes come first, its entries get names of their own."""
    lines = path.read_text().splitlines()
    includes = [line for line in lines if line.startswith("#include")]
    rest = "\n".join(line for line in lines if not line.startswith("#include"))
    entries = re.findall(r'^extern "C" int (\w+)', rest, re.MULTILINE)
    renamed = re.sub(rf"\b({'|'.join(entries)})\b", rf"\1_{path.stem}", rest)
    return "\n".join([*includes, f"namespace n{path.stem} {{", renamed, "}\n"])


if __name__ == "__main__":
    sys.exit(1 if compile_all() else 0)
