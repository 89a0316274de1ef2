"""Fused operators as a library that registers them with libtorch when it is loaded: for C++, and for Python without fusepass."""

from __future__ import annotations

import math
import struct
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils import cpp_extension

from fusepass.artifact.libraries import Libraries
from fusepass.codegen import build, cache_folders, toolchain
from fusepass.codegen.ir.program import LibraryCall, Ref, Role
from fusepass.codegen.source import Source
from fusepass.errors import ArtifactError, BuildError
from fusepass.runtime import ops
from fusepass.runtime.call_text import workspace_places
from fusepass.runtime.meta import Meta
from fusepass.runtime.region import FusedRegion

_FLAGS = ("-shared", "-fPIC", "-O1", "-std=c++20", "-w")
_HEAD = """\
// Fused operators, registered with libtorch when this library is loaded. Each holds the library of its kernels.
#include "fp_operators.hpp"
"""
_CUDA_HEAD = """\
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
"""
_EMBEDDED = """\
__asm__(".section .rodata\\n.hidden {name}\\n.hidden {name}_end\\n.global {name}\\n.global {name}_end\\n"
        "{name}:\\n.incbin \\"{file}\\"\\n{name}_end:\\n.byte 0\\n.previous\\n");
extern "C" __attribute__((visibility("hidden"))) const char {name}[], {name}_end[];
"""


def write(graph: fx.Graph, path: Path) -> None:
    """See `fusepass.build_operators`."""
    regions = {name: region for name, (region, _) in ops.called(graph).items()}
    if not regions:
        raise ArtifactError("the program calls no fused operators: make it with fusepass.export")
    libraries = Libraries()
    text = operators_text(regions, libraries)
    _, entries = libraries.entries()
    compiled = [content for name, content in entries.items() if name.startswith("libraries/")]
    with cache_folders.stage(Path(tempfile.gettempdir()), cache_folders.OWN) as folder:
        for number, content in enumerate(compiled):
            (folder / f"{number}.so").write_bytes(content)
        embedded = [_EMBEDDED.format(name=_embedded(n), file=folder / f"{n}.so") for n in range(len(compiled))]
        source = folder / "operators.cpp"
        source.write_text("\n".join([*embedded, text]), encoding="utf-8")
        _compile(source, path, cuda=any(region.device.type == "cuda" for region in regions.values()))


def operators_text(regions: Mapping[str, FusedRegion], libraries: Libraries) -> str:
    """C++ that registers `regions` by their names; `libraries` receives those that they call."""
    cuda = any(region.device.type == "cuda" for region in regions.values())
    parts = [_HEAD + (_CUDA_HEAD if cuda else ""), "namespace {\n"]
    registered = ["TORCH_LIBRARY_FRAGMENT(fusepass, library)", "{"]
    for name, region in regions.items():
        if region.written:
            raise ArtifactError(f"{name} writes to its arguments, which operators of exported programs do not")
        parts.append(_operator(name, region, libraries))
        registered.append(f'    library.def("{ops.schema(name, region)}", {{at::Tag::needs_exact_strides}});')
        for key, function in ((region.device.type.upper(), name), ("Meta", f"{name}_meta")):
            kernel = f"torch::CppFunction::makeFromBoxedFunction<&{function}>()"
            registered.append(f'    library.impl("{name}", c10::DispatchKey::{key}, {kernel});')
    return "\n".join([*parts, "}  // namespace\n", *registered, "}", ""])


def _operator(name: str, region: FusedRegion, libraries: Libraries) -> str:
    count, device = len(region.inputs), f"at::DeviceType::{region.device.type.upper()}"
    given = [
        f'fp::argument(*stack, {count}, {number}, "{name}", {device}, {_layout(each)})'
        for number, each in enumerate(region.inputs)
    ]
    unmade = [f"fp::empty({_layout(each)}, at::kMeta)" for each in region.outputs]
    return "\n".join([
        _function(f"{name}_results", region, libraries),
        f"void {name}(const c10::OperatorHandle&, fp::Stack* stack)",
        "{",
        "    const at::AutoDispatchBelowADInplaceOrView below;",
        f"    fp::returned(*stack, {count}, {name}_results({', '.join(given)}));",
        "}\n",
        f"void {name}_meta(const c10::OperatorHandle&, fp::Stack* stack)",
        "{",
        f"    fp::returned(*stack, {count}, {{{', '.join(unmade)}}});",
        "}\n",
    ])  # fmt: skip


def _function(function: str, region: FusedRegion, libraries: Libraries) -> str:
    """The call of a region, as `fusepass.runtime.call_text` has it for Python; before it those that change layouts for it."""
    program, cuda = region.generated.outline, region.device.type == "cuda"
    before = [_function(f"{function}_{name}", each, libraries) for name, each in region.conversions.items()]
    arguments = [f"a{number}" for number in range(len(region.inputs))]
    names = {name: arguments[place] for name, place in zip(program.inputs, region.used, strict=True)}
    device = (
        f"const at::Device device = {arguments[0]}.device();"
        if arguments
        else f'const at::Device device("{region.device}");'
    )
    body = [device, *(["const c10::cuda::CUDAGuard on(device);"] if cuda else [])]
    for (name, label), place in zip(names.items(), region.used, strict=True):
        buffer = program.buffer(name)
        if place not in region.exact and (buffer in program.arguments or program.calls):
            body.append(f"{label} = fp::lying({label}, {_layout(Meta.of_buffer(buffer))});")
    for number, call in enumerate(program.calls):
        names[call.result] = f"c{number}"
        layout = _layout(Meta.of_buffer(program.buffer(call.result)))
        made = _call(call, names)
        if call.result in region.conversions:
            (given,) = call.args
            made = f"{function}_{call.result}({value_text(given, 'Tensor', names)})[0]"
        body.append(f"at::Tensor c{number} = fp::lying({made}, {layout});")
    results = [f"o{number}" for number in range(len(program.outputs))]
    for name, label, meta in zip(program.outputs, results, region.outputs, strict=True):
        made = f"fp::empty({_layout(meta)}, device)"
        if program.buffer(name).role is Role.ANCHOR:
            made = f"fp::seen({names[name]}, {_layout(meta)})"
        body.append(f"at::Tensor {label} = {made};")
        names[name] = label
    offsets, total = workspace_places([buffer for buffer in program.arguments if buffer.role is Role.TEMP])
    if total:
        body.append(f"at::Tensor workspace = fp::empty({{{{{total}}}, {{1}}, at::ScalarType::Byte}}, device);")
        body.append("char* base = static_cast<char*>(workspace.data_ptr());")
    passed, outside = list[str](), list[str]()
    for number, buffer in enumerate(program.arguments):
        pointer = f"p{number}"
        if buffer.name in offsets:
            body.append(f"void* {pointer} = base + {offsets[buffer.name]};")
        else:
            body.append(f'void* {pointer} = fp::address({names[buffer.name]}, "{region.name}");')
        passed.append(pointer)
        outside += [pointer] if buffer.role is Role.INPUT else []
    if cuda:
        body.append("void* stream = c10::cuda::getCurrentCUDAStream(device.index()).stream();")
    passed.append("stream" if cuda else "nullptr")
    body += ["int status = 0;", *_launched(region, passed, outside, libraries)]
    body.append(
        f'TORCH_CHECK(status == 0, "{region.name}: its kernels failed with status ", status, "{_reason(cuda)}");'
    )
    body.append(f"return {{{', '.join(results)}}};")
    parameters = ", ".join(f"at::Tensor {each}" for each in arguments)
    return "\n".join([*before, f"fp::Tensors {function}({parameters})", "{", *_indented(body), "}\n"])


def _reason(cuda: bool) -> str:
    return "" if cuda else ": an index is out of range"


def _launched(region: FusedRegion, passed: Sequence[str], outside: Sequence[str], libraries: Libraries) -> list[str]:
    """Lines that launch the kernels, or those for memory that is not aligned."""
    source = region.generated.source
    usual = _launch(source, libraries.number(region.library, source), passed)
    try:
        other = region.generated.unaligned()
        rest = _launch(other, libraries.number(build.build(other), other), passed)
    except BuildError:
        rest = [f'TORCH_CHECK(false, "{region.name}: an input is not aligned to 16 bytes; pass a copy");']
    if usual == rest or not outside:
        return usual
    here = " && ".join(f"fp::aligned({each})" for each in outside)
    return [f"if ({here}) {{", *_indented(usual), "} else {", *_indented(rest), "}"]


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _launch(source: Source, library: int, passed: Sequence[str]) -> list[str]:
    name = _embedded(library)
    lines = [f'static void* const entry = fp::loaded({name}, {name}_end, "{source.entry}");']
    *pointers, stream = passed
    if source.numbers is not None:
        packed = source.packed_numbers()
        numbers = ", ".join(f"{each}ll" for each in struct.unpack(f"{len(packed) // 8}q", packed))
        lines.append(f"static int64_t numbers[] = {{{numbers or 0}}};")
        pointers.append("numbers")
    kinds = ", ".join(["void*"] * (len(pointers) + 1))
    return [*lines, f"status = reinterpret_cast<int (*)({kinds})>(entry)({', '.join([*pointers, stream])});"]


def _call(call: LibraryCall, names: Mapping[str, str]) -> str:
    """A call of an operator of PyTorch's with all its arguments in order."""
    operator: Any = torch.ops
    for part in call.target.split("."):
        operator = getattr(operator, part)
    schema = operator._schema
    given = dict(zip((each.name for each in schema.arguments), call.args, strict=False)) | dict(call.kwargs)
    values = ", ".join(
        value_text(given.get(each.name, each.default_value), str(each.type), names) for each in schema.arguments
    )
    return f'fp::called("{schema.name}", "{schema.overload_name}", {{{values}}}, {call.item or 0})'


def value_text(value: Any, kind: str, names: Mapping[str, str]) -> str:
    """An argument of an operator whose schema says that it is of this `kind`."""
    if isinstance(value, Ref):
        return names[value.buffer]
    if value is None:
        return "c10::IValue()"
    if isinstance(value, list | tuple) and "List[" in kind and "Optional[Tensor]" not in kind:
        inner = next(each for each in ("Tensor", "float", "bool", "int") if each in kind)
        element = {"Tensor": "at::Tensor", "float": "double", "bool": "bool", "int": "int64_t"}[inner]
        values = ", ".join(_plain(each, inner, names) for each in value)
        return f"c10::List<{element}>({f'{{{values}}}' if values else ''})"
    return f"c10::IValue({_plain(value, kind, names)})"


def _plain(value: Any, kind: str, names: Mapping[str, str]) -> str:
    if isinstance(value, Ref):
        return names[value.buffer]
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) or (isinstance(value, int) and "float" in kind):
        if math.isfinite(value):
            return float(value).hex()
        limits = "std::numeric_limits<double>::"
        return f"{limits}quiet_NaN()" if math.isnan(value) else f"{'-' if value < 0 else ''}{limits}infinity()"
    if isinstance(value, int):
        return f"int64_t{{{value}}}"
    if isinstance(value, torch.dtype):
        return f"static_cast<int64_t>({_type(value)})"
    if isinstance(value, torch.memory_format):
        words = str(value).removeprefix("torch.").removesuffix("_format").split("_")
        return f"static_cast<int64_t>(at::MemoryFormat::{''.join(map(_capital, words))})"
    raise ArtifactError(f"an operator takes {value!r} as {kind}, which is not written as C++: save_operators can")


def _capital(word: str) -> str:
    return word if word.endswith("d") and word[:-1].isdecimal() else word.capitalize()


def _layout(meta: Meta) -> str:
    shape, strides = (", ".join(map(str, each)) for each in (meta.shape, meta.strides))
    return f"fp::Layout{{{{{shape}}}, {{{strides}}}, {_type(meta.dtype)}}}"


def _type(dtype: torch.dtype) -> str:
    return f"at::ScalarType::{_TYPES[dtype]}"


_TYPES = {
    torch.bool: "Bool", torch.uint8: "Byte", torch.int8: "Char", torch.int16: "Short", torch.int32: "Int", torch.int64: "Long",
    torch.float16: "Half", torch.bfloat16: "BFloat16", torch.float32: "Float", torch.float64: "Double",
}  # fmt: skip


def _embedded(number: int) -> str:
    return f"fusepass_library_{number}"


def _compile(source: Path, path: Path, *, cuda: bool) -> None:
    device = "cuda" if cuda else "cpu"
    folders = [*map(str, cpp_extension.include_paths(device)), str(toolchain.include_directory())]
    command = [str(toolchain.cxx().path), *_FLAGS, *(f"-I{each}" for each in folders), str(source), "-o", str(path)]
    command += [f"-L{each}" for each in cpp_extension.library_paths(device)]
    command += ["-ltorch", "-ltorch_cpu", "-lc10", *(["-lc10_cuda"] if cuda else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(
            f"the C++ compiler refused the operators of {path.name}", command=command, path=source, stderr=done.stderr
        )
