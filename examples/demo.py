"""Shows fusepass at work on five models: what was fused, that the result is right, and how much faster it is.

`make demo`, or `python examples/demo.py [cpu|cuda]`. Small batches on a CPU, full ones on a GPU.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from types import ModuleType

import conv_transpose2d_gelu_group_norm
import conv_transpose3d_batch_norm_subtract_mean
import conv_transpose3d_layer_norm_gelu
import conv_transpose3d_scale_batch_norm_pool
import layer_norm_3d
import torch
from torch import Tensor, nn

import fusepass
from fusepass.api.module import OptimizedModule
from fusepass.numerics import check
from fusepass.report.report import RegionState

MODELS = (
    conv_transpose3d_layer_norm_gelu,
    conv_transpose3d_batch_norm_subtract_mean,
    conv_transpose2d_gelu_group_norm,
    conv_transpose3d_scale_batch_norm_pool,
    layer_norm_3d,
)


def show(example: ModuleType, device: str) -> bool:
    """Optimises one model, prints the report, the check and the speed; says whether the result was right."""
    print(f"\n== {example.__name__}: {(example.__doc__ or '').splitlines()[0]}")
    torch.manual_seed(0)
    model = example.make_model().to(device)
    inputs = example.make_inputs(device, full=device == "cuda")

    start = time.perf_counter()
    fused = fusepass.optimize(model)
    fused(*inputs)
    seconds = time.perf_counter() - start
    print(fused.report())

    verdict = check.check(model, fused, inputs)
    print(f"against eager and float64: {verdict.explain()}")
    print(f"first call {seconds:.2f} s; {speed(fused, model, inputs, device)}")
    return verdict.ok


def speed(fused: OptimizedModule, model: nn.Module, inputs: tuple[Tensor, ...], device: str) -> str:
    """How much faster it is, in words; nothing is measured where every region is left to eager."""
    if not any(region.state is RegionState.FUSED for region in fused.report().regions):
        return "no generated kernel runs it, so there is no speed-up to show"
    eager_ms, fused_ms = medians(lambda: model(*inputs), lambda: fused(*inputs), device)
    return f"eager {eager_ms:.3f} ms, fused {fused_ms:.3f} ms: {eager_ms / fused_ms:.2f} times as fast"


def medians(first: Callable[[], object], second: Callable[[], object], device: str) -> tuple[float, ...]:
    """Median milliseconds of two calls, measured in turn; benchmarks/ measures more carefully."""
    samples: tuple[list[float], list[float]] = ([], [])
    for run in range(23):
        for call, times in zip((first, second), samples, strict=True):
            start = time.perf_counter()
            call()
            if device == "cuda":
                torch.cuda.synchronize()
            if run >= 3:  # warm by then
                times.append(1e3 * (time.perf_counter() - start))
    return tuple(statistics.median(times) for times in samples)


def main() -> int:
    """Shows every model. The exit status is the number of wrong results."""
    device = sys.argv[1] if len(sys.argv) > 1 else ("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"fusepass on {name}, torch {torch.__version__}")
    with torch.no_grad():
        wrong = [example.__name__ for example in MODELS if not show(example, device)]
    print(f"\n{len(MODELS) - len(wrong)} of {len(MODELS)} models agree with PyTorch", *wrong)
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main())
