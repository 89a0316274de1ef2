"""Writes a region as a program of its own, with its inputs, that builds, checks and times itself: for profilers and debuggers."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fusepass.autotune.candidates import region_of
from fusepass.autotune.work import Work
from fusepass.codegen import build, toolchain
from fusepass.codegen.ir.program import Buffer, Role
from fusepass.codegen.render.template import fill
from fusepass.codegen.source import Source, Target
from fusepass.compile.pipeline import CompiledGraph
from fusepass.compile.splice import subgraph
from fusepass.errors import BuildError
from fusepass.numerics.agreement import Reference, as_tuple, in_float64
from fusepass.numerics.comparison import Leaf, compare
from fusepass.profiling.walk import Tensors, walk
from fusepass.runtime.fallbacks import FallbackCounter
from fusepass.runtime.region import FusedRegion

_ALIGNMENT = 16
_INCLUDE = re.compile(r'^#include "(\S+)"', re.MULTILINE)
_HARNESS = "fp_standalone.h"


@dataclass(frozen=True)
class _Held:
    """A buffer as the program describes it: places in the file in bytes, -1 for none; errors that are allowed."""

    name: str
    kind: str
    nbytes: int
    contents: int
    expected: int
    shape: str
    strides: str
    largest: str
    l2: str
    eager: str


@dataclass(frozen=True)
class _Program:
    title: str
    name: str
    build: str
    source: str
    entry: str
    buffers: tuple[_Held, ...]
    numbers: tuple[int, int] | None
    moved: int


class _File:
    """Bytes one after another, each piece where a type of 8 bytes may lie."""

    def __init__(self) -> None:
        self.data = bytearray()

    def add(self, piece: bytes) -> int:
        """Where `piece` begins."""
        self.data += bytes(-len(self.data) % 8)
        start = len(self.data)
        self.data += piece
        return start


@dataclass(frozen=True)
class Standalone:
    """What the program of a region holds beside its source.

    Attributes:
        contents: by name, the bytes of each buffer that the kernels read.
        expected: by name, for each result its values and how far they may be off; values are float64, or int64 for whole numbers.
        moved: bytes that a run reads and writes.
    """

    contents: dict[str, bytes]
    expected: dict[str, tuple[torch.Tensor, Leaf]]
    moved: int


def extracted(
    compiled: CompiledGraph, arguments: Sequence[torch.Tensor], written: frozenset[int], region: str, directory: Path
) -> Path:
    """Write the region called `region` below `directory` and give the path of its program; see `fusepass.extract`.

    Raises:
        ValueError: there is no such region, or no code could be generated for it.
        BuildError: its code does not compile.
    """
    work = next((work for work in compiled.works if work.region.name == region), None)
    if work is None:
        names = ", ".join(work.region.name for work in compiled.works) or "none at all"
        raise ValueError(f"there is no region {region!r}; there are {names}")
    if work.candidate is None:
        raise ValueError(f"no code is generated for {region}: {work.reason}")
    found: list[Standalone] = []

    def visit(visited: Work, taken: Tensors, made: Tensors) -> None:
        if visited is work:
            found.append(_observed(compiled, work, taken, made))

    walk(compiled, arguments, written, visit)
    generated = work.candidate.generated
    title = f"{region} of {compiled.report.model}, as generated for {generated.source.arch}."
    return write_program(generated.source, generated.outline.arguments, found[0], title, directory)


def _observed(compiled: CompiledGraph, work: Work, taken: Tensors, made: Tensors) -> Standalone:
    """What the kernels of `work` read for these inputs, and what they are to give."""
    region = _built(work)
    assert work.generated is not None
    program = region.generated.outline
    contents: dict[str, bytes] = {}

    def observe(*pointers: Any) -> int:
        for buffer, pointer in zip(program.arguments, pointers, strict=False):
            if buffer.role in (Role.INPUT, Role.ANCHOR):
                contents[buffer.name] = _bytes_at(pointer, buffer.extent * buffer.dtype.nbytes, work.device)
        return region.entry(*pointers)

    aligned = tuple(each.clone() if each.data_ptr() % _ALIGNMENT else each for each in taken)
    given = as_tuple(region.with_entry(observe)(*aligned))
    wide = work.run_on(in_float64(subgraph(compiled.before, work.region)))
    truth = Reference(lambda *_: made, wide, taken, ()).truth or made
    leaves = compare(given, made, truth).leaves
    expected = {
        name: (_expected(eager, exact), leaf)
        for name, eager, exact, leaf in zip(program.outputs, made, truth, leaves, strict=True)
    }
    return Standalone(contents, expected, sum(each.read + each.written for each in work.generated.kernels))


def _built(work: Work) -> FusedRegion:
    """The call of the candidate in use; one that lost to eager may not have been built so far."""
    candidate = work.candidate
    assert candidate is not None
    results = build.build_all(candidate.sources)
    failed = next((result for result in results if isinstance(result, BuildError)), None)
    if failed is not None:
        raise failed
    library, *converters = (result for result in results if isinstance(result, Path))
    own = replace(candidate, library=library, converters=dict(zip(candidate.conversions, converters, strict=True)))
    return region_of(work, own, FallbackCounter())


def _bytes_at(pointer: int | None, count: int, device: torch.device) -> bytes:
    """So many bytes of the memory of `device`."""
    if not count or not pointer:
        return b""
    if device.type != "cuda":
        return ctypes.string_at(pointer, count)
    array = {"shape": (count,), "typestr": "|u1", "data": (pointer, False), "version": 3}
    seen = torch.as_tensor(type("_Memory", (), {"__cuda_array_interface__": array})(), device=device)
    return bytes(seen.cpu().numpy())


def _expected(eager: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """What a result is held against: float64 where that is finite, else what eager has; whole numbers as they are."""
    if not eager.is_floating_point():
        return eager.to("cpu", torch.int64)
    return torch.where(exact.isfinite() & eager.isfinite(), exact, eager).to("cpu", torch.float64)


def write_program(source: Source, buffers: Sequence[Buffer], holds: Standalone, title: str, directory: Path) -> Path:
    """Write the program of `source` below `directory`: its text, its data, the headers that both need.

    Args:
        source: the generated library.
        buffers: what its entry takes, in order.
        holds: the data.
        title: the first line.
        directory: where; made if it is not there.
    """
    name = source.name
    suffix = "cu" if source.target is Target.CUDA else "cpp"
    file = _File()
    held = tuple(_held(buffer, holds, file) for buffer in buffers)
    packed = source.packed_numbers()
    compiler = "nvcc -lineinfo" if source.target is Target.CUDA else "c++"
    flags = " ".join(toolchain.flags(source.target, source.arch))
    program = _Program(
        title,
        name,
        f"{compiler} {flags} -Iinclude -o {name} {name}.{suffix}",
        source.text,
        source.entry,
        held,
        (file.add(packed), len(packed)) if source.numbers is not None else None,
        holds.moved,
    )
    include = directory / "include"
    include.mkdir(parents=True, exist_ok=True)
    for header, text in _headers((*source.headers, _HARNESS)).items():
        (include / header).write_text(text, encoding="utf-8")
    (directory / f"{name}.bin").write_bytes(file.data)
    path = directory / f"{name}.{suffix}"
    path.write_text(fill("program/standalone.j2", program=program), encoding="utf-8")
    return path


def _held(buffer: Buffer, holds: Standalone, file: _File) -> _Held:
    contents, expected, leaf = -1, -1, Leaf("")
    if buffer.name in holds.contents:
        contents = file.add(holds.contents[buffer.name])
    if buffer.name in holds.expected:
        values, leaf = holds.expected[buffer.name]
        expected = file.add(values.contiguous().numpy().tobytes())
    return _Held(
        buffer.name,
        str(buffer.dtype),
        buffer.extent * buffer.dtype.nbytes,
        contents,
        expected,
        ", ".join(map(str, buffer.shape)),
        ", ".join(map(str, buffer.strides)),
        *map(_literal, (leaf.allowed.maximum, leaf.allowed.l2, leaf.eager.l2)),
    )


def _literal(value: float) -> str:
    return repr(value) if math.isfinite(value) else "HUGE_VAL"


def _headers(names: Sequence[str]) -> dict[str, str]:
    """The texts of headers and of those that they include."""
    found: dict[str, str] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = (toolchain.include_directory() / name).read_text(encoding="utf-8")
            waiting += _INCLUDE.findall(found[name])
    return found
