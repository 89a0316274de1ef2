"""What becomes of kernels: what ptxas says of them, and, of Hopper's machine code, registers that are written while products on tensor cores still read them."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from fusepass.codegen.source import Source
from tests.support.native import compile_command

_INSTRUCTION = re.compile(r"\*/\s+(?:@!?U?P\d+\s+)?(\S+)\s+(.*?);")
_WIDTHS = {"128": 4, "64": 2}  # registers of an instruction with such a suffix
_WRITES_NOTHING = ("ST", "RED", "BAR", "BRA", "CCTL")


def told_by_ptxas(source: Source, folder: Path) -> str:
    """What it says of registers, and of products that it lets run one by one; skips the test where there is no nvcc."""
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    text = folder / "kernel.cu"
    text.write_text(source.text)
    command = [*compile_command(source, text, folder / "kernel.o"), "-Xptxas", "-v"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def disassembler() -> str | None:
    """The path of ``nvdisasm``, which CUDA's compiler packages do not always bring."""
    return shutil.which("nvdisasm") or shutil.which("nvdisasm", path="/usr/local/cuda/bin")


def instructions(cubin: Path) -> Iterator[tuple[str, str]]:
    """Operation and operands of each instruction of a compiled file, in order."""
    tool = disassembler()
    assert tool is not None
    listing = subprocess.run([tool, "-c", str(cubin)], capture_output=True, text=True, check=True).stdout
    for line in listing.splitlines():
        found = _INSTRUCTION.search(line)
        if found:
            yield found[1], found[2]


def products(code: Iterable[tuple[str, str]]) -> int:
    """The products whose left operand lies in registers."""
    return sum(operation.startswith("HGMMA") and len(_registers(operands)) > 2 for operation, operands in code)


def written_while_read(code: Iterable[tuple[str, str]]) -> list[str]:
    """Instructions between products and the wait for them that write to registers of a left operand."""
    reading: set[int] = set()
    faults = []
    for operation, operands in code:
        numbers = _registers(operands)
        if operation.startswith("HGMMA"):
            if len(numbers) > 2:  # result, left operand, sum; without the second where it lies in shared memory
                reading |= set(range(numbers[1], numbers[1] + 4))
        elif operation.startswith("WARPGROUP.DEPBAR"):
            reading = set()
        elif operands.startswith("R") and not operation.startswith(_WRITES_NOTHING):
            width = next((count for bits, count in _WIDTHS.items() if f".{bits}" in operation), 1)
            if reading & set(range(numbers[0], numbers[0] + width)):
                faults.append(f"{operation} {operands}")
    return faults


def _registers(operands: str) -> list[int]:
    return [int(number) for number in re.findall(r"\bR(\d+)", operands)]
