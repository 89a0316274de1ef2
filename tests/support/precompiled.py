"""C++ sources' headers, compiled once for all builds of a test run: reading them takes longer than to compile most kernels."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from fusepass.codegen import toolchain

_BUILD = Path(__file__).parents[2] / "build" / "test-headers"
_OWN = ("-fPIC",)  # what load_inline adds
_LESS = tuple(flag for flag in toolchain.CUDA_FLAGS if flag.startswith("-D"))  # of the standard library, as for CUDA
# Of programs alone, which few tests build. It includes streams and containers: with them, to begin took 0.08 s instead of 0.02 s, and
# every build began so.
_RARE = ("fp_standalone.h",)

PLAIN = toolchain.CPU_FLAGS
"""Those that other processes build with."""


def use() -> None:
    """Let every C++ build begin with the precompiled headers; does nothing where the compiler is not GCC."""
    if shutil.which("g++") is None or "clang" in (compiler := toolchain.cxx()).version():
        return
    headers = sorted(path for path in toolchain.include_directory().glob("*.h") if path.name not in _RARE)
    content = b"".join(path.read_bytes() for path in headers) + repr((_OWN, PLAIN, _LESS, compiler.identity)).encode()
    header = _BUILD / hashlib.sha256(content).hexdigest()[:20] / "headers.h"
    made = header.with_name("headers.h.gch")
    if not made.exists():
        header.parent.mkdir(parents=True, exist_ok=True)
        header.write_text("#include <algorithm>\n" + "".join(f'#include "{path.name}"\n' for path in headers))
        aside = made.with_suffix(f".{os.getpid()}")
        command = [compiler.path, *_OWN, *PLAIN, *_LESS, f"-I{toolchain.include_directory()}"]
        if subprocess.run([*command, "-xc++-header", header, "-o", aside], check=False).returncode != 0:
            return
        aside.rename(made)
    toolchain.CPU_FLAGS = (*PLAIN, *_LESS, "-include", str(header))
