"""Compiles by NVRTC, whose library it calls itself. Imports nothing of this package, so that a worker starts soon."""

from __future__ import annotations

import ctypes
import functools
import pickle
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path


def answer(task: bytes) -> bytes:
    """In a worker: the packed `compiled` of its packed arguments, by name."""
    return pickle.dumps(compiled(**pickle.loads(task)))


def compiled(
    library: str, text: str, kernels: Sequence[str], headers: Mapping[str, str], options: Sequence[str]
) -> tuple[bytes, str]:
    """Compile `text`, which may include each of `headers` by its name, by the NVRTC at `library`.

    Only `kernels` are kept, as nothing launches them.

    Returns:
        The cubin, empty where it failed; what NVRTC said.
    """
    nvrtc, program = _loaded(library), ctypes.c_void_p()

    def read(what: str) -> bytes:
        size = ctypes.c_size_t()
        nvrtc[f"nvrtcGet{what}Size"](program, ctypes.byref(size))
        content = ctypes.create_string_buffer(size.value)
        nvrtc[f"nvrtcGet{what}"](program, content)
        return content.raw

    status: int = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), text.encode(), b"kernels.cu", len(headers), _strings(headers.values()), _strings(headers)
    )
    if status:
        return b"", f"a program cannot be made: {_error(nvrtc, status)}"
    try:
        for kernel in kernels:
            nvrtc.nvrtcAddNameExpression(program, kernel.encode())
        status = nvrtc.nvrtcCompileProgram(program, len(options), _strings(options))
        said = read("ProgramLog").decode(errors="replace").rstrip("\0")
        if status:
            return b"", f"{_error(nvrtc, status)}\n{said}"
        return read("CUBIN"), said
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def version(library: str) -> str:
    """The version of the NVRTC at `library`, as ``13.0``."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _loaded(library).nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


@functools.cache
def _loaded(library: str) -> ctypes.CDLL:
    """The library, behind the one with what it knows of the device, which not every version finds beside itself."""
    for builtins in Path(library).parent.glob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(builtins))
    loaded = ctypes.CDLL(library)
    loaded.nvrtcGetErrorString.restype = ctypes.c_char_p
    return loaded


def _error(nvrtc: ctypes.CDLL, status: int) -> str:
    said: bytes = nvrtc.nvrtcGetErrorString(status)
    return said.decode()


def _strings(texts: Collection[str]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * len(texts))(*(text.encode() for text in texts))
