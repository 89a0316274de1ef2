"""Builds rendered CPU programs and runs them on numpy memory as the interpreter does; compiles sources alone."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fusepass.codegen import toolchain
from fusepass.codegen.build import build, load
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.program import Program, Role
from fusepass.codegen.render.cpu.library import render_cpu
from fusepass.codegen.source import Source, Target
from tests.support.interpret import poisoned
from tests.support.numpy_ops import Array

FACTS = DeviceFacts.cpu(cores=2)


def run_native(program: Program, inputs: Mapping[str, Array], facts: DeviceFacts = FACTS) -> dict[str, Array]:
    """Every output and temporary of `program` as memory after its built library ran; as `interpret` gives them."""
    return run_native_source(program, render_cpu(program, facts), inputs)


def run_native_source(program: Program, source: Source, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """The same for a source of the program, which may take numbers at run time."""
    numbers = ctypes.create_string_buffer(source.packed_numbers())
    given = [] if source.numbers is None else [ctypes.addressof(numbers)]
    entry = load(build(source), source.entry, len(program.arguments) + len(given))
    memory = {
        buffer.name: np.ascontiguousarray(inputs[buffer.name])
        if buffer.role in (Role.INPUT, Role.ANCHOR)
        else poisoned(buffer)
        for buffer in program.buffers
    }
    status = entry(*(memory[buffer.name].ctypes.data for buffer in program.arguments), *given, None)
    assert status == 0
    return {b.name: memory[b.name] for b in program.buffers if b.role in (Role.OUTPUT, Role.TEMP)}


def compile_command(source: Source, text: Path, output: Path) -> tuple[str, ...]:
    """The product's command that compiles the file `text`, which holds `source.text`, to the object file `output`.

    Raises:
        BuildError: the compiler is not installed.
    """
    position_independent = ("-Xcompiler", "-fPIC") if source.target is Target.CUDA else ("-fPIC",)
    return (
        str((toolchain.nvcc() if source.target is Target.CUDA else toolchain.cxx()).path),
        *toolchain.flags(source.target, source.arch),
        *position_independent,
        f"-I{toolchain.include_directory()}",
        "-c",
        str(text),
        "-o",
        str(output),
    )
