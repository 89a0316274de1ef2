"""Compiles small C++ functions over arrays, to test the headers that generated code includes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fusepass.codegen.build import build
from fusepass.codegen.source import Source, Target
from fusepass.codegen.toolchain import include_directory
from tests.support.numpy_ops import Array


class Probe:
    """The functions of a piece of C++; each takes pointers, then a count."""

    def __init__(self, name: str, text: str) -> None:
        headers = tuple(sorted(path.name for path in include_directory().glob("*.h")))
        source = Source(name, name, Target.CPU, text, headers, "native")
        self._library = ctypes.CDLL(str(build(source)))

    def __call__(self, function: str, inputs: Sequence[Array], result: Array, *counts: int) -> Array:
        """Run `function` on `inputs`, which writes `result`; the count is `result`'s size unless given."""
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (*map(np.ascontiguousarray, inputs), result)]
        call = getattr(self._library, function)
        call.restype = None
        call(*pointers, *(ctypes.c_int64(count) for count in counts or (result.size,)))
        return result


def include_lines() -> str:
    """Includes of every header for the CPU."""
    names = sorted(Path(include_directory()).glob("*.h"))
    return "".join(f'#include "{path.name}"\n' for path in names)
