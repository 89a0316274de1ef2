"""Launches generated CUDA libraries without PyTorch, as `compute-sanitizer` needs it: each buffer is an allocation of its own.

``python -m tests.support.launch plan.json``, where the plan is what `tests.gpu.test_sanitizer` writes: the CUDA runtime,
and for each library its entry point and the bytes of its buffers, the inputs' beginning some bytes past a multiple of 256.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import TypedDict

_PATTERN = 0x3C  # as a float, half or double of any width: small and finite


class BufferPlan(TypedDict):
    """`nbytes` of data after `shift` bytes."""

    nbytes: int
    shift: int


class LaunchPlan(TypedDict):
    """One call."""

    name: str
    library: str
    entry: str
    buffers: list[BufferPlan]


class Plan(TypedDict):
    """All calls, and the path of libcudart."""

    runtime: str
    launches: list[LaunchPlan]


class _Runtime:
    """The few calls of the CUDA runtime that this needs; an error is a RuntimeError."""

    def __init__(self, path: str) -> None:
        self.library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)

    def call(self, name: str, *arguments: object) -> None:
        status = getattr(self.library, name)(*arguments)
        if status:
            raise RuntimeError(f"{name} gave error {status}")

    def allocate(self, plan: BufferPlan) -> ctypes.c_void_p:
        pointer = ctypes.c_void_p()
        nbytes = ctypes.c_size_t(plan["nbytes"] + plan["shift"])
        self.call("cudaMalloc", ctypes.byref(pointer), nbytes)
        if pointer.value:
            self.call("cudaMemset", pointer, _PATTERN, nbytes)
        return pointer


def launch(runtime: _Runtime, plan: LaunchPlan) -> None:
    """Run the library once on fresh memory.

    Raises:
        RuntimeError: a call of the runtime or the launch failed.
    """
    memory = [runtime.allocate(buffer) for buffer in plan["buffers"]]
    places = [
        ctypes.c_void_p((pointer.value or 0) + buffer["shift"])
        for pointer, buffer in zip(memory, plan["buffers"], strict=True)
    ]
    status = getattr(ctypes.CDLL(plan["library"]), plan["entry"])(*places, None)
    if status:
        raise RuntimeError(f"{plan['name']}: the launch gave error {status}")
    runtime.call("cudaDeviceSynchronize")
    for pointer in memory:
        runtime.call("cudaFree", pointer)


def main() -> None:
    plan: Plan = json.loads(Path(sys.argv[1]).read_text())
    runtime = _Runtime(plan["runtime"])
    for each in plan["launches"]:
        launch(runtime, each)
    print(f"launched {len(plan['launches'])}")


if __name__ == "__main__":
    main()
