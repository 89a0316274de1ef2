"""Launchers of `fusepass.runtime.fast_path` around functions of Python."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from fusepass.runtime import fast_path

_functions: list[object] = []  # an address does not keep one


def address_of(function: Callable[..., int], *types: Any) -> int:
    """Where C finds `function`, which takes these types and gives an int."""
    made = ctypes.CFUNCTYPE(ctypes.c_int, *types)(function)
    _functions.append(made)
    return ctypes.cast(made, ctypes.c_void_p).value or 0


class Runtime:
    """A stand-in for CUDA: whether streams are `captured`, how often errors were forgotten.

    Attributes:
        addresses: what a launcher takes.
    """

    def __init__(self) -> None:
        self.captured = False
        self.error = 0
        self.forgotten = 0
        pointers = ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)
        self.addresses = address_of(self._capturing, *pointers), address_of(self._forget)

    def _capturing(self, stream: int | None, status: Any) -> int:
        status[0] = int(self.captured)
        return self.error

    def _forget(self) -> int:
        self.forgotten += 1
        return 0


def launch_of(status: int, seen: list[tuple[int | None, ...]], **changes: Any) -> Callable[..., Any]:
    """A launcher of two inputs, a workspace, and one result, whose entry notes what it gets and returns `status`."""

    def entry(*pointers: int | None) -> int:
        seen.append(pointers)
        options["entered"]()
        return status

    made = fast_path.types()
    assert made is not None
    options: dict[str, Any] = {
        "empty": torch._C._dynamo.guards._empty_strided_cpu, "outputs": (((2,), (1,), torch.float32),),
        "stream": lambda index: 70 + index, "current": lambda: 3, "device": 3, "single": True,
        "runtime": (0, 0), "small": (True, True), "entered": lambda: None, "told": lambda written: None, "written": (), "results": (fast_path.MADE,),
    } | changes  # fmt: skip
    launcher = made.launcher(
        "name", "module", lambda *tensors: ("plain", tensors), lambda *told: ("failed", told), options["empty"],
        options["outputs"], ((64,), (1,), torch.uint8), options["stream"], options["current"], options["device"],
        address_of(entry, *[ctypes.c_void_p] * 6), 99, options["single"], 2,
        ((0, 1, 0), (1, 0, 0), (2, 0, 32), (0, 0, 0)), *options["runtime"], *options["small"], options["told"],
        options["written"], options["results"],
    )  # fmt: skip
    return launcher  # type: ignore[no-any-return]
