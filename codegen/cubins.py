"""A CUDA source in two parts: what runs on the device becomes a cubin, by nvcc or NVRTC, and the C++ compiler compiles what launches that.

So a source is taken apart where its template does. What launches its kernels is a C++ source with the same launches, in which each kernel is an
object of `fp_host.hpp` that knows the kernel's name. The library has both in it. nvcc could compile the whole, but takes twice as long: it reads the
headers of the host three times, and starts eight programs in the place of three.

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
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
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
    unit = joined([replace(source, text=source.text.partition(_END)[0] + _END) for source in sources])
    kernels = [list(_KERNEL.finditer(source.text.partition(_END)[0])) for source in sources]
    if toolchain.cuda_compiler().is_nvrtc:
        pairs = zip(sources, kernels, strict=True)
        image = _by_nvrtc(unit, [qualified(each["name"], source, sources) for source, own in pairs for each in own])
    else:
        image = _by_nvcc(unit, directory)
    (directory / IMAGE).write_bytes(image)
    missing = directory / "crt" / "host_defines.h"  # which CUDA's headers that come with PyTorch include
    missing.parent.mkdir()
    missing.write_text('#include "fp_host_defines.h"\n')
    names = {found[1].decode() for found in _SECTION.finditer(image)}
    hosts = [
        _host(source, {each["name"]: each["parameters"] for each in own}, partial(_name_of, source, sources, names))
        for source, own in zip(sources, kernels, strict=True)
    ]
    return f'{joined(hosts).text}\nFP_IMAGE("{IMAGE}")\n'


def _name_of(source: Source, sources: Sequence[Source], names: Collection[str], kernel: str) -> str:
    """Which of the `names` in a cubin a kernel of `source` has, in the unit of `sources`: it is in a namespace without a name, and maybe in another one."""
    *outer, _ = qualified(kernel, source, sources).split("::")
    begin, end = "_ZN" + "".join(f"{len(each)}{each}" for each in outer), f"{len(kernel)}{kernel}E"
    (found,) = (name for name in names if name.startswith(begin) and end in name)
    return found


def _host(source: Source, kernels: Mapping[str, str], name_of: Callable[[str], str]) -> Source:
    """The part of `source` that launches its `kernels`, which have these parameters; `name_of` tells what the cubin calls them."""
    headers = (*_LAUNCHES, *(header for header in source.headers if header in _FOR_HOST))
    includes = "\n".join(f'#include "{header}"' for header in headers)
    known = "\n".join(f'FP_KERNEL({kernel}, "{name_of(kernel)}",\n{each})' for kernel, each in kernels.items())
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
