"""One compilation by NVRTC, here or in a process of its own: it compiles one source of a process at a time. Imports nothing of this package."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

_here = threading.Lock()  # held while this process compiles


@dataclass(frozen=True)
class Compiled:
    """What came of a compilation.

    Attributes:
        image: the cubin in hexadecimal; empty where it failed.
        names: what the kernels are called in it.
        said: NVRTC's words.
    """

    image: str
    names: Sequence[str]
    said: str


def compiled(
    text: str, kernels: Sequence[str], headers: Sequence[str], header: str, options: Sequence[str]
) -> Compiled:
    """Compile `text`, in which each of `headers` is `header`, and keep `kernels`."""
    given: dict[str, Any] = {"text": text, "kernels": kernels, "headers": headers, "header": header, "options": options}
    if _here.acquire(blocking=False):
        try:
            return _compiled(**given)
        finally:
            _here.release()
    done = subprocess.run(
        [sys.executable, __file__], input=json.dumps(given), capture_output=True, text=True, check=False
    )
    return Compiled(**json.loads(done.stdout)) if done.returncode == 0 else Compiled("", (), done.stderr)


def _compiled(
    text: str, kernels: Sequence[str], headers: Sequence[str], header: str, options: Sequence[str]
) -> Compiled:
    from cuda.bindings import nvrtc

    def read(size: Any, get: Any) -> bytes:
        length: int = size(program)[1]
        # It is written into, so it has two bytes at least: Python has each of one byte but once.
        read = bytes(length + 1)
        get(program, read)
        return read[:length]

    names, contents = [name.encode() for name in headers], [header.encode()] * len(headers)
    _, program = nvrtc.nvrtcCreateProgram(text.encode(), b"kernels.cu", len(names), contents, names)
    try:
        for kernel in kernels:
            nvrtc.nvrtcAddNameExpression(program, kernel.encode())
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        said = read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).decode(errors="replace").rstrip("\0")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            return Compiled("", (), f"{status.name}\n{said}")
        lowered = tuple(nvrtc.nvrtcGetLoweredName(program, kernel.encode())[1].decode() for kernel in kernels)
        return Compiled(read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN).hex(), lowered, said)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


if __name__ == "__main__":
    json.dump(asdict(_compiled(**json.load(sys.stdin))), sys.stdout)
