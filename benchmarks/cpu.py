"""Single operators and short chains on a CPU, fusepass beside eager, on tensors beyond the second-level cache.

python benchmarks/cpu.py                  # one core, by CPU time: steady on a machine that others use, too
python benchmarks/cpu.py --threads 2      # by the clock on the wall
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import geometric_mean

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import fusepass

_HALF, _BFLOAT = torch.float16, torch.bfloat16
_ROUNDS = 5


@dataclass(frozen=True)
class Case:
    """A function of one tensor, and that tensor's shape and type."""

    forward: Callable[[Tensor], Tensor]
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Result:
    """Milliseconds of one call, the lower quartile of `rounds`, and the candidates that serve the regions."""

    name: str
    eager: float
    fusepass: float
    rounds: int
    chosen: tuple[str, ...]

    @property
    def ratio(self) -> float:
        """How many times faster than eager."""
        return self.eager / self.fusepass


# fmt: off
CASES: Mapping[str, Case] = {
    "sum": Case(lambda x: x.sum(), (1 << 24,)),
    "sum_rows": Case(lambda x: x.sum(-1), (4096, 4096)),
    "sum_rows_half": Case(lambda x: x.sum(-1), (4096, 4096), _HALF),
    "sum_middle": Case(lambda x: x.sum(1), (64, 256, 1024)),
    "mean_columns": Case(lambda x: x.mean(0), (4096, 4096)),
    "max": Case(lambda x: x.amax(), (1 << 24,)),
    "max_rows": Case(lambda x: x.amax(-1), (4096, 4096)),
    "min_rows_half": Case(lambda x: x.amin(-1), (4096, 4096), _HALF),
    "argmax_rows": Case(lambda x: x.argmax(-1), (4096, 4096)),
    "variance_rows": Case(lambda x: x.var(-1), (4096, 4096)),
    "logsumexp_rows": Case(lambda x: x.logsumexp(-1), (4096, 4096)),
    "cumsum_rows": Case(lambda x: x.cumsum(-1), (4096, 4096)),
    "cumsum_rows_half": Case(lambda x: x.cumsum(-1), (4096, 4096), _HALF),
    "cumsum_middle": Case(lambda x: x.cumsum(1), (64, 256, 1024)),
    "cumsum_reversed": Case(lambda x: x.flip(-1).cumsum(-1).flip(-1), (4096, 4096)),
    "cumprod_rows": Case(lambda x: (x * 0.01 + 1).cumprod(-1), (4096, 4096)),
    "sigmoid_sum": Case(lambda x: torch.sigmoid(x).sum(-1), (4096, 4096)),
    "square_mean": Case(lambda x: (x * x).mean(-1), (4096, 4096)),
    "layer_norm": Case(lambda x: F.layer_norm(x, (1024,)), (16384, 1024)),
    "layer_norm_half": Case(lambda x: F.layer_norm(x, (1024,)), (16384, 1024), _HALF),
    "layer_norm_bfloat16": Case(lambda x: F.layer_norm(x, (1024,)), (16384, 1024), _BFLOAT),
    "layer_norm_few_long_rows": Case(lambda x: F.layer_norm(x, x.shape[1:]), (16, 64, 128, 128)),
    "layer_norm_short_rows": Case(lambda x: F.layer_norm(x, (64,)), (65536, 64)),
    "group_norm": Case(lambda x: F.group_norm(x, 8), (16, 64, 128, 128)),
    "batch_norm_training": Case(lambda x: F.batch_norm(x, None, None, training=True), (32, 64, 64, 64)),
    "rms_norm": Case(lambda x: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6), (8192, 2048)),
    "softmax": Case(lambda x: x.softmax(-1), (16384, 1024)),
    "softmax_half": Case(lambda x: x.softmax(-1), (8192, 1024), _HALF),
    "softmax_middle": Case(lambda x: x.softmax(1), (64, 64, 1024)),
    "gelu_scale": Case(lambda x: F.gelu(x) * 2, (1 << 24,)),
    "tanh_add": Case(lambda x: torch.tanh(x) + x, (1 << 24,)),
    "add_gelu_bfloat16": Case(lambda x: F.gelu(x + 1), (1 << 23,), _BFLOAT),
    "silu_mul_half": Case(lambda x: F.silu(x) * x, (1 << 23,), _HALF),
    "add_mul_relu_sub": Case(lambda x: ((x + 1) * x).relu() - x, (1 << 24,)),
    "max_pool": Case(lambda x: F.max_pool2d(x, 2), (16, 64, 128, 128)),
    "average_pool": Case(lambda x: F.avg_pool2d(x, 3, 2, 1), (16, 64, 128, 128)),
}
# fmt: on


class _Model(nn.Module):
    def __init__(self, forward: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def measure(name: str, case: Case, clock: Callable[[], float], seconds: float) -> Result:
    """Calls both in turn for `seconds`, at least five times, after one call each."""
    model, x = _Model(case.forward), torch.randn(case.shape).to(case.dtype)
    optimised = fusepass.optimize(model, x)
    samples: dict[nn.Module, list[float]] = {model: [], optimised: []}
    for call in samples:
        call(x)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(samples[model]) < _ROUNDS:
        for call, taken in samples.items():
            start = clock()
            call(x)
            taken.append(1e3 * (clock() - start))
    eager, fused = (sorted(taken)[len(taken) // 4] for taken in samples.values())
    chosen = tuple(region.choice.chosen for region in optimised.report().regions if region.choice)
    return Result(name, eager, fused, len(samples[model]), chosen)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each case, and the geometric mean; with ``--json`` write them, too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="CASE", help="all by default")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each case")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    results = []
    with torch.no_grad():
        for name in options.names or CASES:
            result = measure(name, CASES[name], clock, options.seconds)
            results.append(result)
            times = f"eager {result.eager:8.2f} ms  fusepass {result.fusepass:8.2f} ms  {result.ratio:6.2f}x"
            print(f"{name:26}{times}  {', '.join(result.chosen)}", flush=True)
    mean = geometric_mean(result.ratio for result in results)
    print(f"geometric mean {mean:.2f}, least {min(result.ratio for result in results):.2f}")
    if options.json:
        rows = [{**asdict(result), "ratio": result.ratio} for result in results]
        facts = {"threads": options.threads, "torch": torch.__version__, "geometric_mean": mean, "rows": rows}
        options.json.write_text(json.dumps(facts, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
