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
from collections.abc import Iterator, Mapping, Sequence
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
# What sources consist of, as the renderer lays it out.
_KERNEL = re.compile(
    r"^(?P<head>(?:template[^\n]*\n)?__global__[^{]*?\b(?P<name>\w+)\(\n[^{]*)\{\n.*?^\}\n", re.MULTILINE | re.DOTALL
)
_HOST = re.compile(r'^(?:extern "C"|template <typename Stream>\nstatic) .*?^\}\n', re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"//[^\n]*")
_BESIDES = re.compile(r"//[^\n]*|^#include.*|\s+", re.MULTILINE)
# But for members, qualified names and what begins as the compiler's own names do.
_NAME = re.compile(r"(?<![\w.:])[A-Za-z]\w*")
_PARAMETER = re.compile(r"(\w+)[,)]\n")
_KEYWORDS = _NAME.findall(
    "auto bool break case char const constexpr continue do double else false float for if inline int long return short"
    " signed sizeof static struct switch template true typename union unsigned using void volatile while"
)


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
    seen: set[tuple[str, ...]] = set()
    texts = {path: without_repeats(path.read_text(), _arch(path), seen) for path in waiting}
    alike = [list(paths) for _, paths in groupby(waiting, _arch)]
    batches = [paths[start : start + _BATCH] for paths in alike for start in range(0, len(paths), _BATCH)]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        failed = [path for part in pool.map(lambda paths: _compile_batch(paths, texts), batches) for path in part]
    for path in failed:
        done = _compile({path: path.read_text()})
        print(f"{path.relative_to(ROOT)}:\n{done.stderr if done.returncode else _too_large(path, done.stderr)}")
    print(f"CUDA sources: {len(waiting) - len(failed)} passed, {len(failed)} failed")
    return len(failed)


def dynamic_shared(text: str) -> Iterator[tuple[str, int]]:
    """Each kernel of a source, and the bytes of shared memory that it is launched with; those alone that are known before."""
    for kind, name, arguments in _LAUNCH.findall(text):
        nbytes = arguments.split(",")[3 if kind else 2].strip()  # as the functions in fp_launch.cuh take it
        if nbytes.isdecimal():
            yield name, int(nbytes)


def without_repeats(text: str, arch: str, seen: set[tuple[str, ...]]) -> str:
    """A source whose kernels that are among those `seen`, but for names, have no body; `seen` gets the others.

    What a kernel is depends on its text, the architecture, the shared memory that it is launched with, and what the source has besides.
    """
    launched = dict(dynamic_shared(text))
    besides = _BESIDES.sub("", _HOST.sub("", _KERNEL.sub("", text)))

    def kernel(found: re.Match[str]) -> str:
        places: dict[str, str] = {}
        kept = _kept_names().difference(_PARAMETER.findall(found["head"]))

        def place(name: re.Match[str]) -> str:
            return name[0] if name[0] in kept else places.setdefault(name[0], f"v{len(places)}")

        key = (_NAME.sub(place, _COMMENT.sub("", found[0])), arch, str(launched.get(found["name"])), besides)
        if key in seen:
            return f"{found['head']}{{\n}}\n"
        seen.add(key)
        return found[0]

    return _KERNEL.sub(kernel, text)


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


@functools.cache
def _kept_names() -> frozenset[str]:
    """Names that mean the same in all sources."""
    headers = "\n".join(path.read_text() for path in toolchain.include_directory().iterdir() if path.is_file())
    return frozenset(_NAME.findall(headers)).union(_KEYWORDS)


def _compile_batch(paths: Sequence[Path], texts: Mapping[Path, str]) -> list[Path]:
    """The sources of a batch that do not compile."""
    done = _compile({path: texts[path] for path in paths})
    if done.returncode == 0:
        failed = [path for path in paths if _too_large(path, done.stderr)]
    else:
        alone = {path: _compile({path: path.read_text()}) for path in paths}
        failed = [path for path in paths if alone[path].returncode or _too_large(path, alone[path].stderr)]
    for path in paths:
        if path not in failed:
            path.with_suffix(".ok").touch()
    return failed


def _compile(texts: Mapping[Path, str]) -> subprocess.CompletedProcess[str]:
    first = next(iter(texts))
    unit = SOURCES / f"unit-{first.stem}.cu"
    unit.write_text("".join(_wrapped(path, text) for path, text in texts.items()))
    try:
        command = ["nvcc", *toolchain.flags(Target.CUDA, _arch(first)), *_FLAGS, *_quick()]
        command += [f"-I{toolchain.include_directory()}", str(unit)]
        return subprocess.run(command, capture_output=True, text=True, check=False)
    finally:
        unit.unlink()


@functools.cache
def _quick() -> tuple[str, ...]:
    told = subprocess.run(["nvcc", "--help"], capture_output=True, text=True, check=True).stdout
    return (f"{_QUICK}=max",) if _QUICK in told else ()


def _wrapped(path: Path, text: str) -> str:
    """The text of a source in a namespace of its own; its includes come first, its entries get names of their own."""
    lines = text.splitlines()
    includes = [line for line in lines if line.startswith("#include")]
    rest = "\n".join(line for line in lines if not line.startswith("#include"))
    entries = re.findall(r'^extern "C" int (\w+)', rest, re.MULTILINE)
    renamed = re.sub(rf"\b({'|'.join(entries)})\b", rf"\1_{path.stem}", rest)
    return "\n".join([*includes, f"namespace n{path.stem} {{", renamed, "}\n"])


if __name__ == "__main__":
    sys.exit(1 if compile_all() else 0)
