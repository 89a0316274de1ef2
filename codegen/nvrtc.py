"""Does with NVRTC, which comes with PyTorch, what nvcc would: NVRTC compiles what runs on the device, the C++ compiler what launches it.

NVRTC knows no host code, no standard library and no ``<<<...>>>``. So a source is taken apart where its template does: the kernels are
compiled to a cubin, with `fp_standard.cuh` for the standard headers. What launches them is a C++ source with the same launches, in which each
kernel is an object of `fp_host.hpp` that knows the kernel's name in the cubin. The library has both in it, and the same entries as nvcc's.

NVRTC compiles in processes of its own, which live as long as there is something to compile: up to CUDA 13.0 it compiles but one source of a process
at a time, and what ends a compiler may not end the program.
"""

from __future__ import annotations

import contextlib
import pickle
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fusepass.codegen import nvrtc_program, toolchain
from fusepass.codegen.key import included
from fusepass.codegen.source import Source
from fusepass.codegen.units import joined, qualified
from fusepass.codegen.workers import Failed, Kind, Lost, Unavailable, can_start, workers
from fusepass.errors import BuildError

IMAGE = "kernels.cubin"

COMPILATION = Kind(f"{nvrtc_program.__file__}:answer", bounded=False)
"""What workers do for NVRTC."""

_STANDARD = ("cmath", "cstddef", "cstdint", "cstring", "limits", "type_traits", "utility")
_IN_THEIR_PLACE = "fp_standard.cuh"
_FOR_HOST = ("fp_list.cuh", "fp_tensor_map.cuh", "fp_replay.cuh")  # headers that have a part for what launches
_LAUNCHES = ("fp_host.hpp", "fp_launch.cuh")  # before them
_END = "\n}  // namespace\n"  # of the kernels, as templates/cuda/library.cu.j2 has it
_KERNEL = re.compile(
    r"^__global__ void __launch_bounds__\([^\n]*\) (?P<name>\w+)\(\n(?P<parameters>.*?)\)(?=\n\{\n)", re.M | re.S
)


def compiled(sources: Sequence[Source], directory: Path) -> str:
    """Compiles the kernels of `sources`, which are for one architecture, to `IMAGE` in `directory`; gives the C++ source that launches them from there.

    Raises:
        BuildError: NVRTC does not take them; with what it said.
    """
    devices = [replace(source, text=source.text.partition(_END)[0] + _END) for source in sources]
    kernels = [list(_KERNEL.finditer(device.text)) for device in devices]
    names = [
        qualified(each["name"], source, sources)
        for source, found in zip(sources, kernels, strict=True)
        for each in found
    ]
    unit = joined(devices)
    found = included(unit.name, (*unit.headers, _IN_THEIR_PLACE), unit.text)
    headers = {name: header.text for name, header in found.items()}
    headers |= dict.fromkeys(_STANDARD, f'#include "{_IN_THEIR_PLACE}"\n')
    image, lowered, said = _compiled(
        unit.name, library=str(toolchain.cuda_compiler().path), text=unit.text, kernels=names, headers=headers,
        options=toolchain.nvrtc_flags(unit.arch),
    )  # fmt: skip
    if not image:
        raise BuildError(f"{unit.name} could not be compiled by NVRTC for {unit.arch}", stderr=said)
    (directory / IMAGE).write_bytes(image)
    missing = directory / "crt" / "host_defines.h"  # which CUDA's headers that come with PyTorch include
    missing.parent.mkdir()
    missing.write_text('#include "fp_host_defines.h"\n')
    called = iter(lowered)
    hosts = [
        _host(source, [(each, next(called)) for each in found]) for source, found in zip(sources, kernels, strict=True)
    ]
    return f'{joined(hosts).text}\nFP_IMAGE("{IMAGE}")\n'


def _host(source: Source, kernels: Sequence[tuple[re.Match[str], str]]) -> Source:
    """The part of `source` that launches its `kernels`, of which each has its name in the cubin beside it."""
    headers = (*_LAUNCHES, *(name for name in source.headers if name in _FOR_HOST))
    includes = "\n".join(f'#include "{name}"' for name in headers)
    known = "\n".join(f'FP_KERNEL({each["name"]}, "{lowered}",\n{each["parameters"]})' for each, lowered in kernels)
    launches = source.text.partition(_END)[2]
    return replace(source, text=f"{includes}\n\nnamespace {{\n{known}\n}}  // namespace\n{launches}", headers=headers)


def _compiled(name: str, **what: Any) -> tuple[bytes, Sequence[str], str]:
    """`nvrtc_program.compiled`, by a worker, or by another one if that is lost; in this process where none can be started.

    Raises:
        BuildError: two are lost.
    """
    task = pickle.dumps(what)
    if can_start():
        with contextlib.suppress(Unavailable):
            try:
                try:
                    answer = workers(COMPILATION).ask(task)
                except Lost:
                    answer = workers(COMPILATION).ask(task)
            except (Lost, Failed) as error:
                raise BuildError(f"{name} could not be compiled by NVRTC: {error}") from error
            return tuple(pickle.loads(answer))
    return nvrtc_program.compiled(**what)
