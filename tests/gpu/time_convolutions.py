"""Generated convolutions beside the library's: ``python -m tests.gpu.time_convolutions [name ...]``.

For each case, with its chain (bias, relu, scale): time of eager, times and errors of generated kernels in both precisions, and of
products of scaled halves, with all that packs them. Errors
are norms relative to float64, of the first sample; eager's are given for both settings of ``torch.backends.cudnn.allow_tf32``.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from math import prod

import torch

from fusepass.codegen.build import build_all, load
from fusepass.codegen.detect import device_facts
from fusepass.codegen.ir.convolution import Precision
from fusepass.codegen.ir.program import Program
from fusepass.codegen.render import describe, render
from fusepass.codegen.schedule_convolution import warps_together
from fusepass.errors import BuildError
from tests.support.convolutions import LARGE, Case, generated
from tests.support.precision import cudnn

_REPEATS = 20
_HALVES = (False, False), (True, False), (True, True)  # whether scaled ones are multiplied, and in tiles


def main() -> None:
    facts = device_facts(torch.device("cuda"))
    cases = [LARGE[name] for name in sys.argv[1:] or LARGE]
    warps = warps_together(facts)
    forms = [
        replace(case, precision=precision, warps=warps, halves=halves, tiled=tiled)
        for case in cases
        for precision, (halves, tiled) in itertools.product(Precision, _HALVES[: 3 if warps > 1 else 1])
        if not tiled or precision is Precision.TF32
    ]
    programs = [generated(case, facts=facts) for case in forms]
    sources = [render(program, facts) for program in programs]
    told = None
    for case, program, source, path in zip(forms, programs, sources, build_all(sources), strict=True):
        halves = f", {'tiled ' if case.tiled else ''}halves" if case.halves else ""
        precision = f"{case.precision.value}{halves}"
        if (case.source, case.weight) != told:
            _tell_eager(case)
        told = (case.source, case.weight)
        if isinstance(path, BuildError):
            print(f"  {precision}: {path}")
            continue
        _tell(case, program, load(path, source.entry, len(program.arguments)), precision)
        for kernel in program.kernels:
            print(f"    {describe(program, kernel, facts)}")


def _operands(case: Case) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, device="cuda") for shape in (case.source, case.weight, (case.out_channels,))]


def _eager(case: Case, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.convolution(x, weight, bias, *case.geometry).relu() * 2  # type: ignore[call-overload,no-any-return]


def _exact(case: Case, operands: list[torch.Tensor]) -> torch.Tensor:
    x, weight, bias = (each.double() for each in operands)
    return _eager(case, x[:1], weight, bias)


def _error(result: torch.Tensor, exact: torch.Tensor) -> float:
    return float((result[:1].double() - exact).norm() / exact.norm())


def _tell_eager(case: Case) -> None:
    print(case)
    operands = _operands(case)
    exact = _exact(case, operands)
    for allowed in (False, True):
        with cudnn(allow_tf32=allowed):
            error = _error(_eager(case, *operands), exact)
            seconds = _median_seconds(lambda: _eager(case, *operands))
        print(f"  eager, TF32 {'allowed' if allowed else 'not allowed'}: {seconds * 1e3:8.3f} ms, error {error:.1e}")


def _tell(case: Case, program: Program, run: Callable[..., int], precision: str) -> None:
    operands = _operands(case)
    given = dict(zip(("x", "w", "bias"), operands, strict=True))
    memory = [given[b.name] if b.name in given else torch.empty(b.numel, device="cuda") for b in program.arguments]
    pointers = [each.data_ptr() for each in memory]
    stream = torch.cuda.current_stream().cuda_stream
    seconds = _median_seconds(lambda: run(*pointers, stream))
    result = next(each for b, each in zip(program.arguments, memory, strict=True) if b.name == "y").view(case.result)
    error = _error(result, _exact(case, operands))
    # Each weight meets each position of the input (transposed) or of the result, but for the border.
    positions = case.source if case.transposed else case.result
    operations = 2 * prod(case.weight) * positions[0] * prod(positions[2:])
    rate = operations / seconds / 1e12
    print(f"  generated, {precision}: {seconds * 1e3:8.3f} ms, {rate:6.1f} TFLOP/s, error {error:.1e}")


def _median_seconds(run: Callable[[], object]) -> float:
    flush = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")  # more than the second-level cache holds
    times = []
    for _ in range(_REPEATS + 3):
        flush.zero_()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return sorted(times[3:])[_REPEATS // 2]


if __name__ == "__main__":
    main()
