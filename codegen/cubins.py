"""A CUDA source in two parts: what runs on the device becomes a cubin, by nvcc or NVRTC, and the C++ compiler compiles what launches that.

So a source is taken apart where its template does. What launches its kernels is a C++ source with the same launches, in which each kernel is an
object of `fp_host.hpp` that knows the kernel's name. The library has both in it. nvcc could compile the whole, but takes 1.7
times the processor time (docs/install.md).

NVRTC comes with PyTorch. It knows no standard library: `fp_standard.cuh` stands in for it. It compiles in processes of its own, which live as long as
there is something to compile: up to CUDA 13.0 it compiles but one source of a process at a time, and what ends a compiler may not end the
program.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import chain
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
_SOURCE = "kernels.cu"
_END = "\n}  // namespace\n"  # of the kernels, as templates/cuda/library.cu.j2 has it
_SECTION = re.compile(rb"(?<=\0)\.text\.(\w+)\0")  # of a cubin, for each kernel
_KERNEL = re.compile(
    r"^__global__ void __launch_bounds__\([^\n]*\) (?P<name>\w+)\(\n(?P<parameters>.*?)\)(?=\n\{\n)", re.M | re.S
)


def compiled(sources: Sequence[Source], directory: Path) -> str:
    """Compiles the kernels of `sources`, which are for one architecture, to `IMAGE` in `directory`; gives the C++ source that launches them from there.

    Raises:
        BuildError: the compiler does not take them; with what it said.
    """
    devices = [replace(source, text=source.text.partition(_END)[0] + _END) for source in sources]
    unit, kernels = joined(devices), [list(_KERNEL.finditer(device.text)) for device in devices]
    pairs = zip(sources, kernels, strict=True)
    named = [[qualified(each["name"], source, sources) for each in own] for source, own in pairs]
    is_nvrtc = toolchain.cuda_compiler().is_nvrtc
    image = _by_nvrtc(unit, [*chain.from_iterable(named)]) if is_nvrtc else _by_nvcc(unit, directory)
    (directory / IMAGE).write_bytes(image)
    missing = directory / "crt" / "host_defines.h"  # which CUDA's headers that come with PyTorch include
    missing.parent.mkdir()
    missing.write_text('#include "fp_host_defines.h"\n')
    inside = {found[1].decode() for found in _SECTION.finditer(image)}
    hosts = [
        _host(source, own, [_mangled(name, inside) for name in names])
        for source, own, names in zip(sources, kernels, named, strict=True)
    ]
    return f'{joined(hosts).text}\nFP_IMAGE("{IMAGE}")\n'


def _mangled(name: str, inside: Collection[str]) -> str:
    """Which of the names `inside` a cubin the kernel `name` has: it is in a namespace without a name, and maybe in another one."""
    *outer, kernel = name.split("::")
    begin, end = "_ZN" + "".join(f"{len(each)}{each}" for each in outer), f"{len(kernel)}{kernel}E"
    (found,) = (each for each in inside if each.startswith(begin) and end in each)
    return found


def _host(source: Source, kernels: Sequence[re.Match[str]], mangled: Sequence[str]) -> Source:
    """The part of `source` that launches its `kernels`, which the cubin calls as `mangled` says."""
    headers = (*_LAUNCHES, *(header for header in source.headers if header in _FOR_HOST))
    includes = "\n".join(f'#include "{header}"' for header in headers)
    pairs = zip(kernels, mangled, strict=True)
    known = "\n".join(f'FP_KERNEL({each["name"]}, "{name}",\n{each["parameters"]})' for each, name in pairs)
    launches = source.text.partition(_END)[2]
    return replace(source, text=f"{includes}\n\nnamespace {{\n{known}\n}}  // namespace\n{launches}", headers=headers)


def _by_nvcc(unit: Source, directory: Path) -> bytes:
    (directory / _SOURCE).write_text(unit.text)
    host = os.environ.get("CC")  # as PyTorch has it
    command = [
        str(toolchain.cuda_compiler().path), *(("-ccbin", host) if host else ()), *toolchain.flags(unit.target, unit.arch),
        f"-I{toolchain.include_directory()}", "--diag-suppress=177", "-cubin", "-o", IMAGE, _SOURCE,  # as no kernel is referred to
    ]  # fmt: skip
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    if done.returncode:
        message = f"{unit.name} does not compile for {unit.arch}"
        raise BuildError(message, command=command, stderr=done.stdout + done.stderr)
    return (directory / IMAGE).read_bytes()


def _by_nvrtc(unit: Source, kernels: Sequence[str]) -> bytes:
    found = included(unit.name, (*unit.headers, _IN_THEIR_PLACE), unit.text)
    headers = {name: header.text for name, header in found.items()}
    headers |= dict.fromkeys(_STANDARD, f'#include "{_IN_THEIR_PLACE}"\n')
    image, said = _compiled(
        unit.name, library=str(toolchain.cuda_compiler().path), text=unit.text, kernels=kernels, headers=headers,
        options=toolchain.nvrtc_flags(unit.arch),
    )  # fmt: skip
    if not image:
        raise BuildError(f"{unit.name} does not compile for {unit.arch}, by NVRTC", stderr=said)
    return image


def _compiled(name: str, **what: Any) -> tuple[bytes, str]:
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
