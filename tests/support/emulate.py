"""Runs rendered CUDA sources on the host (see cuda_on_host.h) on numpy arrays, with checks around every buffer."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.program import Buffer, Program, Role
from fusepass.codegen.ir.updates import written_over
from fusepass.codegen.render.cuda.families import HEADERS
from fusepass.codegen.source import Source
from fusepass.codegen.toolchain import CUDA_FLAGS, include_directory

_BUILD = Path(__file__).parents[2] / "build" / "test-emulation"
_HERE = Path(__file__).parent
_MARGIN = 64  # elements on each side of a buffer that no kernel may write
_FLAGS = (
    "-std=c++17",
    "-Og",
    "-fPIC",
    "-w",
    "-fsanitize=alignment,bounds",
    "-fno-sanitize-recover=all",
    *(["-fuse-ld=gold"] if shutil.which("ld.gold") else []),  # takes a third of the time, which was a third of all
    *(flag for flag in CUDA_FLAGS if flag.startswith("-D")),
)

_OBJECTS = {"cuda_on_host.o": "cuda_on_host.cpp", "under_way.o": "host/under_way.cpp"}

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
"""A mark of tests that emulate kernels."""

NUMPY = {
    DType.BOOL: np.bool_,
    DType.U8: np.uint8,
    DType.I8: np.int8,
    DType.I16: np.int16,
    DType.I32: np.int32,
    DType.I64: np.int64,
    DType.F16: np.float16,
    DType.BF16: np.uint16,  # its bits
    DType.F32: np.float32,
    DType.F64: np.float64,
}


def emulate(
    program: Program, source: Source, inputs: Mapping[str, np.ndarray], *, shift: int = 0, in_place: bool = False
) -> dict[str, np.ndarray]:
    """Every output of `source`, rendered from `program`, as flat arrays.

    Inputs are flat arrays that cover their buffer's extent; they start `shift` elements past a multiple of 16 bytes.
    Outputs start as noise. Raises AssertionError where a kernel writes outside a buffer, or stores to an input; an asynchronous copy
    from outside of every buffer ends the process. With `in_place`, outputs that may be written over inputs are.
    """
    memory = {
        b.name: _Memory(b, inputs.get(b.name), shift if b.role is Role.INPUT else 0, result=b.name in program.outputs)
        for b in program.arguments
    }
    for output, updated in written_over(program) if in_place else ():
        memory[updated].written = True
        memory[output] = memory[updated]
    library = ctypes.CDLL(str(_compiled(source)))
    library.emulation_no_buffers()
    for each in memory.values():
        library.emulation_buffer(*(ctypes.c_void_p(place) for place in each.range))
    entry = getattr(library, source.entry)
    entry.restype = ctypes.c_int
    numbers = [] if source.numbers is None else [ctypes.create_string_buffer(source.packed_numbers())]
    pointers = [ctypes.c_void_p(memory[b.name].pointer) for b in program.arguments]
    passed = [(ctypes.c_void_p * len(pointers))(*pointers)] if source.of_list else pointers
    status = entry(*passed, *numbers, None)
    assert status == 0, f"status {status}"
    for each in memory.values():
        each.check()
    return {name: memory[name].array.copy() for name in program.outputs if name in memory}


class _Memory:
    """A buffer with margins on both sides."""

    def __init__(self, buffer: Buffer, value: np.ndarray | None, shift: int, *, result: bool) -> None:
        dtype = np.dtype(NUMPY[buffer.dtype])
        self.buffer, extent = buffer, max(buffer.extent, 1)
        raw = np.full((extent + 2 * _MARGIN + 16) * dtype.itemsize + 16, 0x7F, np.uint8)
        start = -raw.ctypes.data % 16 + (_MARGIN + shift) * dtype.itemsize
        self.raw, self.start, self.stop = raw, start, start + extent * dtype.itemsize
        self.array = raw[start : self.stop].view(dtype)
        if value is not None:
            self.array[: value.size] = value
        self.pointer = raw.ctypes.data + start
        self.range = self.pointer, raw.ctypes.data + self.stop
        self.before = raw.copy()
        self.written = buffer.role in (Role.OUTPUT, Role.TEMP) or result

    def check(self) -> None:
        same = self.raw == self.before
        if self.written:
            same[self.start : self.stop] = True
        assert same.all(), f"wrote outside {self.buffer.name}"


def _compiled(source: Source) -> Path:
    shared, text = _shared(), host_text(source.text)
    name = hashlib.sha256(text.encode() + shared.name.encode()).hexdigest()[:20]
    library = _BUILD / f"{name}.so"
    if library.exists():
        return library
    code, made = _BUILD / f"{name}.cpp", _BUILD / f"{name}.tmp.so"
    code.write_text(text)
    _compile(code, made, "-shared", f"-I{shared}", *_objects(shared))
    made.rename(library)
    return library


@functools.cache
def _shared() -> Path:
    """The directory of what all libraries share, compiled: the headers as the compiler left them after reading, and `_OBJECTS`."""
    headers = sorted(path for path in include_directory().iterdir() if path.is_file())
    own = [*sorted(_HERE.glob("cuda_on_host.*")), *sorted((_HERE / "host").iterdir())]
    content = b"".join(path.read_bytes() for path in (*headers, *own)) + " ".join((*_FLAGS, *HEADERS)).encode()
    place = _BUILD / hashlib.sha256(content).hexdigest()[:20]
    place.mkdir(parents=True, exist_ok=True)
    everything = place / "emulated.h"
    everything.write_text("".join(f'#include "{name}"\n' for name in ("cuda_on_host.h", *HEADERS)))
    objects = {name: (_HERE / source, "-c", "-O2") for name, source in _OBJECTS.items()}
    for name, (source, *kind) in {**objects, "emulated.h.gch": (everything, "-xc++-header")}.items():
        if not (place / name).exists():
            made = place / f"{os.getpid()}.{name}"
            _compile(source, made, *kind)
            made.rename(place / name)
    return place


def _objects(shared: Path) -> list[str]:
    return [str(shared / name) for name in _OBJECTS]


def compile_on_host(source: Path, program: Path) -> Path:
    """Compile a C++ source that first includes `emulated.h`, all headers of kernels, to `program`, which it returns."""
    shared = _shared()
    _compile(source, program, f"-I{shared}", *_objects(shared))
    return program


def check_syntax(source: Source) -> None:
    """That the compiler for the host takes `source`, of which it makes nothing."""
    shared, text = _shared(), host_text(source.text)
    with tempfile.TemporaryDirectory() as folder:
        code = Path(folder, "kernels.cpp")
        code.write_text(text)
        _compile(code, code.with_suffix(".o"), "-fsyntax-only", f"-I{shared}")


def _compile(source: Path, output: Path, *more: str) -> None:
    compiler = shutil.which("g++")
    assert compiler is not None
    folders = [f"-I{folder}" for folder in (_HERE / "host", include_directory(), _HERE)]
    command = [compiler, *_FLAGS, *more, *folders, str(source), "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def host_text(text: str) -> str:
    """CUDA source as C++ for the emulation: dynamic shared memory becomes a pointer."""
    text = re.sub(
        r"extern __shared__ __align__\(\d+\) unsigned char (\w+)\[\];",
        r"unsigned char* const \1 = emulation::dynamic_shared();",
        text,
    )
    return f'#include "emulated.h"\n{text}'
