"""Runs fused regions through the reference interpreter instead of a compiled library: everything but the templates.

A program then costs no compiler, so that thousands of models can be tried; the launchers, which hand over pointers as to
a library, are the real ones.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from fusepass.autotune import candidates
from fusepass.codegen import build
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.forms import Forms
from fusepass.codegen.generate import Generated
from fusepass.codegen.ir.expr import Builder
from fusepass.codegen.ir.program import Buffer, Program
from fusepass.codegen.search import candidate
from fusepass.codegen.source import Source
from fusepass.compile import pipeline
from fusepass.runtime.call_text import CallText
from fusepass.runtime.region import FusedRegion
from tests.support.interpret import STORAGE, Array, interpret


class _OriginalRegion(FusedRegion):
    """A region whose call runs its ATen operators."""

    @functools.cached_property
    def _text(self) -> CallText:
        return CallText("def run(*inputs): return region.original(*inputs)\n", {"__name__": "fusepass.generated"}, None)


@contextlib.contextmanager
def original_operators() -> Iterator[None]:
    """While open, regions of newly optimised models are generated in full, but their calls run ATen operators.

    Everything around the kernels is tried so, many times faster than by interpreting them.
    """
    with interpreted(), mock.patch.object(candidates, "FusedRegion", _OriginalRegion):
        yield


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """While open, newly optimised models interpret their kernels; what was optimised inside stays so."""
    programs: dict[Path, Program] = {}
    generate = candidate.generate

    def remembered(program: Program, builder: Builder, facts: DeviceFacts, *options: Any) -> Generated:
        made = generate(program, builder, facts, *options)
        programs[_library(made.source)] = programs[_library(made.unaligned())] = made.program
        return made

    def load(library: Path, entry: str, arguments: int) -> Callable[..., int]:
        return _entry(programs[library], arguments)

    def build_each(sources: Sequence[Source]) -> Iterator[tuple[int, Path]]:
        return enumerate(map(_library, sources))

    with (
        mock.patch.object(candidate, "generate", remembered),
        mock.patch.object(candidates, "restore", return_value=False),  # of the text alone
        mock.patch.object(pipeline, "find_lists", return_value=()),  # whose entries take other arguments
        mock.patch.object(Forms, "shared", lambda forms, generated: generated),
        mock.patch.object(build, "begin"),
        mock.patch.object(build, "build_each", build_each),
        mock.patch.object(build, "build", _library),
        mock.patch.object(build, "load", load),
    ):
        yield


def _library(source: Source) -> Path:
    """A name for the library that `source` would become."""
    return Path(hashlib.sha256(source.text.encode()).hexdigest())


def _entry(program: Program, arguments: int) -> Callable[..., int]:
    """What the library of `program` would export."""
    buffers = program.arguments
    assert len(buffers) == arguments
    given = [buffer.name for buffer in buffers]

    def run(*pointers: int | None) -> int:
        memory = {b.name: _at(pointer, b) for b, pointer in zip(buffers, pointers, strict=False)}
        unused = [b for b in program.buffers if b.name not in given]
        inputs = memory | {b.name: np.zeros(b.extent, STORAGE[b.dtype]) for b in unused}
        try:
            results = interpret(program, inputs)
        except IndexError:
            return 1
        for name in {*program.outputs} & {*given}:
            memory[name][:] = results[name]
        return 0

    return run


def _at(pointer: int | None, buffer: Buffer) -> Array:
    """The memory of `buffer` at an address."""
    nbytes = buffer.extent * buffer.dtype.nbytes
    if not nbytes or pointer is None:
        return np.zeros(buffer.extent, STORAGE[buffer.dtype])
    raw = np.frombuffer((ctypes.c_uint8 * nbytes).from_address(pointer), np.uint8)
    return raw.view(STORAGE[buffer.dtype])
