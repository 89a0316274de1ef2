"""Takes the place of nvcc where there is none: NVRTC, which comes with PyTorch, compiles what runs on the device, the C++ compiler what launches it.

NVRTC knows no host code, no standard library and no ``<<<...>>>``. So a source is taken apart where its template does: the kernels are
compiled to a cubin, with `fp_standard.cuh` for the standard headers. What launches them is a C++ source with the same launches, in which each
kernel is an empty function that `fp_host.hpp` knows by the kernel's name in the cubin. The library has both in it, and the same entries as nvcc's.
"""

from __future__ import annotations

import re
from pathlib import Path

from fusepass.codegen import nvrtc_program, toolchain
from fusepass.codegen.source import Source
from fusepass.errors import BuildError

IMAGE = "kernels.cubin"

_STANDARD = ("cmath", "cstddef", "cstdint", "cstring", "limits", "type_traits", "utility")
_FOR_HOST = ("fp_list.cuh", "fp_tensor_map.cuh", "fp_replay.cuh")  # headers that have a part for what launches
_END = "\n}  // namespace\n"  # of the kernels, as templates/cuda/library.cu.j2 has it
_KERNEL = re.compile(r"^__global__ void __launch_bounds__\([^\n]*\) (\w+)\(\n.*?\)(?=\n\{\n)", re.MULTILINE | re.DOTALL)
_HOST = """\
#include "fp_host.hpp"
#include "fp_launch.cuh"
{headers}
namespace {{
{kernels}
}}  // namespace
FP_IMAGE("{image}")
const fp::Named fp::kernels[] = {{{names}}};
{launches}"""


def compiled(source: Source, directory: Path) -> str:
    """Compiles the kernels of `source` to `IMAGE` in `directory`, and gives the C++ source that launches them from there.

    Raises:
        BuildError: NVRTC does not take them; with what it said.
    """
    device, _, launches = source.text.partition(_END)
    kernels = list(_KERNEL.finditer(device))
    named, options = (
        [kernel[1] for kernel in kernels],
        (*toolchain.nvrtc_flags(source.arch), f"-I{toolchain.include_directory()}"),
    )
    made = nvrtc_program.compiled(device + _END, named, _STANDARD, '#include "fp_standard.cuh"\n', options)
    if not made.image:
        raise BuildError(f"{source.name} could not be compiled by NVRTC for {source.arch}", stderr=made.said)
    (directory / IMAGE).write_bytes(bytes.fromhex(made.image))
    missing = directory / "crt" / "host_defines.h"  # which CUDA's headers that come with PyTorch include
    missing.parent.mkdir()
    missing.write_text('#include "fp_host_defines.h"\n')
    return _HOST.format(
        headers="".join(f'#include "{name}"\n' for name in source.headers if name in _FOR_HOST),
        kernels="\n".join(f"{kernel[0]} {{}}" for kernel in kernels),
        image=IMAGE,
        names=", ".join(f'{{(void*){kernel[1]}, "{name}"}}' for kernel, name in zip(kernels, made.names, strict=True)),
        launches=launches,
    )
