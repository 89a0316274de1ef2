"""Finds the compilers, says with which flags they run, and what identifies them in a cache key."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.resources
import os
import platform
import re
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from fusepass.codegen import nvrtc_program
from fusepass.codegen.source import Target
from fusepass.config import current
from fusepass.errors import BuildError

CPU_FLAGS = (
    "-O3",
    "-march=native",
    "-fopenmp",
    "-std=c++17",
    "-fno-math-errno",  # nobody reads errno, and without it calls of math functions become instructions
    "-fno-trapping-math",  # nobody unmasks floating-point traps
    "-ffp-contract=off",  # each operator rounds, in every kernel that computes it; one rounding for two is written: fp::fma
    # GCC takes half a register of AVX-512 for most of Intel's processors; elsewhere it means nothing.
    *(("-mprefer-vector-width=512",) if platform.machine() in ("x86_64", "AMD64") else ()),
)
# No -O: it is for the host's part alone, which only launches; the device's part is optimised as far as it goes without.
CUDA_FLAGS = (
    "-std=c++17",
    "--fmad=false",  # as -ffp-contract=off above
    "--expt-relaxed-constexpr",
    "--split-compile=0",  # functions side by side on all CPUs; what comes out is the same
    # The guard of a header of libstdc++: C++17's special functions, which nothing uses, are a third of what an empty unit
    # compiles. Elsewhere it means nothing.
    "-D_GLIBCXX_BITS_SPECFUN_H=1",
)

# Of a C++ source that launches what is in a cubin.
LAUNCHER_FLAGS = ("-O1", "-std=c++17", "-fno-exceptions")
# It needs nothing of C++'s library, and to read that takes the linker longer than all else.
LAUNCHER_LINK_FLAGS = ("-nodefaultlibs", "-lcudart", "-lgcc", "-lc")
LAUNCHER_HEADERS = ("fp_host.hpp", "fp_host_defines.h", "fp_standard.cuh")
"""What such a source, or NVRTC, includes beside the generated source's own."""

# Variables that change what the compilers do without being seen in the command.
_CPU_VARIABLES = ("CPATH", "CPLUS_INCLUDE_PATH")
_CUDA_VARIABLES = (
    *_CPU_VARIABLES,
    "CC",
    "NVCC_CCBIN",
    "NVCC_PREPEND_FLAGS",
    "NVCC_APPEND_FLAGS",
    "PYTORCH_NVCC",
)

_PIECE, _MOST_PIECES = 1 << 16, 32  # bytes of a program that are read at once, and how often

_CXX_REMEDY = "install one (for example `apt install g++`) or name one in CXX"
_NVCC_REMEDY = (
    "for a PyTorch with CUDA 13 `pip install 'fusepass[cuda13]'` brings it; for others install the CUDA toolkit, "
    "and name its folder in CUDA_HOME where nvcc is not on the path"
)


@dataclass(frozen=True)
class Compiler:
    """A compiler on this machine.

    Attributes:
        path: how it was found.
        identity: resolved path, size in bytes and a hash of the program: what `--version` would tell apart, without running it.
    """

    path: Path
    identity: str

    @classmethod
    def at(cls, path: Path) -> Compiler:
        """The compiler `path`, which exists."""
        real = path.resolve()
        stat = real.stat()
        return cls(path, f"{real} {stat.st_size} {_content(real, stat.st_size, stat.st_mtime_ns)}")

    @property
    def is_nvrtc(self) -> bool:
        """Whether this is NVRTC: a library, which takes the device's part of a source alone."""
        return self.path.name.startswith("libnvrtc.")

    def version(self) -> str:
        """The line of ``--version`` that has the version number in it. Runs the compiler.

        Raises:
            BuildError: it does not run.
        """
        if self.is_nvrtc:
            return f"NVRTC {nvrtc_program.version(str(self.path))}"
        command = (str(self.path), "--version")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise BuildError("a compiler does not run", command=command, stderr=done.stderr)
        lines = done.stdout.splitlines()
        return next((line for line in lines if "release" in line), lines[0] if lines else "")


@functools.cache
def _content(program: Path, size: int, _changed: int) -> str:
    """A hash of a program: of large ones of pieces evenly spread, as reading all of nvcc would take longer than a key may."""
    pieces = hashlib.sha256()
    with program.open("rb") as file:
        for start in range(0, size, max(_PIECE, size // _MOST_PIECES)):
            file.seek(start)
            pieces.update(file.read(_PIECE))
    return pieces.hexdigest()


def cxx() -> Compiler:
    """The C++ compiler: ``CXX``, else the first of c++, g++ and clang++ on the path.

    Raises:
        BuildError: there is none; the text says what to install.
    """
    named = os.environ.get("CXX")
    for name in (named,) if named else ("c++", "g++", "clang++"):
        if path := shutil.which(name):
            return Compiler.at(Path(path))
    what = f"CXX is {named!r}, which is no program" if named else "no C++ compiler was found"
    raise BuildError(f"{what}; {_CXX_REMEDY}")


def nvcc() -> Compiler:
    """CUDA's compiler: in ``CUDA_HOME`` or ``CUDA_PATH``, else pip's beside this Python, on the path, in /usr/local/cuda.

    But for pip's, which it does not know, PyTorch looks in the same places. pip's goes before the path: it was installed
    for this PyTorch.

    Raises:
        BuildError: there is none; the text says what to install.
    """
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        found = shutil.which("nvcc", path=f"{home}/bin")
    else:
        found = _pip_nvcc() or shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if found is None:
        what = f"there is no nvcc in {home}/bin" if home else "no nvcc was found"
        raise BuildError(f"{what}; {_NVCC_REMEDY}")
    return Compiler.at(Path(found))


@functools.cache
def _pip_nvcc() -> str | None:
    """The nvcc that pip installed beside this Python. Its finder takes long to import: only where the package is there."""
    try:
        importlib.metadata.distribution("nvidia-cuda-nvcc")
        from cuda.pathfinder import find_nvidia_binary_utility
    except ModuleNotFoundError:  # of the package, too
        return None
    found: str | None = find_nvidia_binary_utility("nvcc")
    return found


@functools.cache
def nvrtc() -> Compiler | None:
    """NVRTC's library, which comes with PyTorch by pip; None where it, or CUDA's headers beside it, are not there."""
    try:
        package = importlib.metadata.distribution("nvidia-cuda-nvrtc")
    except ModuleNotFoundError:
        return None
    for file in package.files or ():
        if file.name.startswith("libnvrtc.so."):
            path = Path(str(package.locate_file(file)))
            headers = path.parents[1] / "include" / "cuda_runtime_api.h"  # which CUDA 12's packages have elsewhere
            return Compiler.at(path) if headers.exists() else None
    return None


@functools.cache
def _nvrtc_is_as_good() -> bool:
    """Whether NVRTC, which is there, makes nvcc's machine code: that of CUDA 13.0 computes addresses in shared memory with 64 bits."""
    version = importlib.metadata.version("nvidia-cuda-nvrtc")
    return tuple(map(int, version.split(".")[:2])) >= (13, 1)


def cuda_compiler() -> Compiler:
    """nvcc or NVRTC, as `Config.cuda_compiler` says, or the other one where that is not there.

    Raises:
        BuildError: there is neither; the text says what to install.
    """
    wanted, library = current().cuda_compiler, nvrtc()
    if library is not None and (wanted == "nvrtc" or (wanted == "auto" and _nvrtc_is_as_good())):
        return library
    try:
        return nvcc()
    except BuildError:
        if library is not None:
            return library
        raise


def launches_cubins() -> bool:
    """Whether CUDA's runtime, as that of CUDA 13 does, launches what is in a cubin; else nvcc compiles sources as a whole."""
    import torch  # which processes that only generate do without

    return int((torch.version.cuda or "0").partition(".")[0]) >= 13


def cuda_home() -> Path:
    """The folder of the toolkit that `cuda_compiler` is part of.

    Raises:
        BuildError: there is none.
    """
    return _home_of(cuda_compiler().path)


@functools.cache
def _home_of(compiler: Path) -> Path:
    """The toolkit of a compiler; of an nvcc that only runs another one, that one's, which it tells."""
    real = compiler.resolve()
    if compiler.name == "nvcc" and not (real.parent / "nvcc.profile").exists():
        command = (str(compiler), "--dryrun", "-E", "-x", "cu", os.devnull)
        told = subprocess.run(command, capture_output=True, text=True, check=False).stderr
        if (top := re.search(r"^#\$ TOP=(.+)", told, re.MULTILINE)) is not None:
            return Path(top[1]).resolve()
    return real.parents[1]


def versioned_cudart(home: Path) -> Path | None:
    """CUDA's runtime library in a toolkit that has no ``libcudart.so``, by which the linker would find it, as pip's has none."""
    folder = next((each for each in (home / "lib64", home / "lib") if each.is_dir()), home)
    if (folder / "libcudart.so").exists():
        return None
    return max(folder.glob("libcudart.so.*"), default=None)


def ninja() -> Path:
    """The ninja that load_inline is to run: on the path, else the one installed beside this Python.

    Raises:
        BuildError: there is none; the text says what to install.
    """
    found = shutil.which("ninja") or shutil.which("ninja", path=sysconfig.get_path("scripts"))
    if found is None:
        raise BuildError("no ninja was found; install it with `pip install ninja`")
    return Path(found)


def flags(target: Target, arch: str) -> tuple[str, ...]:
    """What the compiler for `target` is told, for `arch` as in `Source`.

    There is no fast-math in it. Hopper is compiled for as sm_90a: its tensor core instructions need that.
    """
    if target is Target.CPU:
        return tuple(f"-march={arch}" if flag == "-march=native" else flag for flag in CPU_FLAGS)
    number = _number(arch)
    return (*CUDA_FLAGS, f"-gencode=arch=compute_{number},code=sm_{number}")


def _number(arch: str) -> str:
    number = arch.removeprefix("sm_")
    return "90a" if number == "90" else number


def nvrtc_flags(arch: str) -> tuple[str, ...]:
    """What NVRTC is told: the same, as far as it is for a compiler of device code."""
    number = _number(arch)
    return ("-std=c++17", "--fmad=false", "-default-device", f"-arch=sm_{number}")


UNUSED_LIBRARIES = ("c10", "c10_cuda", "torch_cpu", "torch_cuda", "torch", "torch_python")
"""What load_inline names to the linker, which generated code has no use for: to read their symbols takes longer than all else of linking."""


def link_flags(target: Target) -> tuple[str, ...]:
    """What the linker is told: of the libraries that load_inline names, keep those in use, so not torch's.

    OpenMP's is linked, but the one that torch has loaded already serves: there is one pool of threads.
    """
    openmp = ("-fopenmp",) if target is Target.CPU else ()
    return ("-Wl,--as-needed", *openmp)


def identity(target: Target) -> tuple[str, ...]:
    """What decides, besides text, flags and CPU, which machine code comes out: compilers and their environment.

    Costs a few file reads; no program runs.

    Raises:
        BuildError: a compiler is not installed.
    """
    variables = _CUDA_VARIABLES if target is Target.CUDA else _CPU_VARIABLES
    environment = tuple(f"{name}={os.environ.get(name, '')}" for name in variables)
    if target is Target.CUDA:  # nvcc leaves the host's part to the C++ compiler
        return (cuda_compiler().identity, cxx().identity, *environment)
    return (cxx().identity, *environment)


@functools.cache
def cpu_identity() -> str:
    """The CPU as far as ``-march=native`` is concerned: its model and instruction sets."""
    told = {"vendor_id", "cpu family", "model", "model name", "stepping", "flags"}
    told |= {"Features", "CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision"}
    lines = []
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in iter(file.readline, "\n"):  # the first processor; reading them all takes long
                if not line:
                    break
                if line.partition(":")[0].strip() in told:
                    lines.append(line.strip())
    except OSError:
        pass
    return "\n".join([platform.machine(), *lines])


@functools.cache
def include_directory() -> Path:
    """The folder of the headers that generated sources include by name."""
    return Path(str(importlib.resources.files("fusepass.templates"))) / "include"


def environment() -> dict[str, str]:
    """What os.environ lacks for load_inline to find ninja and the C++ compiler; mostly nothing.

    Raises:
        BuildError: one of them is not installed.
    """
    lacking = {}
    if shutil.which("ninja") is None:
        lacking["PATH"] = os.pathsep.join([str(ninja().parent), os.environ.get("PATH", os.defpath)])
    if "CXX" not in os.environ and shutil.which("c++") is None:
        lacking["CXX"] = str(cxx().path)
    return lacking
