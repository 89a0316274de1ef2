"""What the algebra saves on a CPU: the workloads that it makes cheaper, at reduced shapes, beside torch.compile and eager.

python benchmarks/algebra.py --json benchmarks/results/algebra_cpu.json     # one core, by CPU time
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import sub
from pathlib import Path

import torch
from torch import Tensor, nn

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import fusepass
from benchmarks.layers import AddInput, Apply, Size, With
from benchmarks.workloads import by_name
from fusepass.numerics.check import check

RESULTS = Path(__file__).with_name("results") / "algebra_cpu.json"
_WIDTH = 2048
_ROUNDS = 15


@dataclass(frozen=True)
class Case:
    """A model, the shape of its input, and how many times faster than torch.compile it has to be."""

    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    least: float


@dataclass(frozen=True)
class Row:
    """Milliseconds of one call, the lower quartile of as many rounds; `correct` by the numeric policy."""

    name: str
    shape: tuple[int, ...]
    least: float
    eager: float
    compiled: float
    fusepass: float
    correct: bool

    @property
    def ratio(self) -> float:
        """How many times faster than torch.compile."""
        return self.compiled / self.fusepass


def _narrow_linear() -> nn.Module:
    """`linear_sub_mean_logsumexp_gelu_residual` at a quarter of its width."""
    torch.manual_seed(0)
    mean = Apply(lambda x: x.mean(dim=1, keepdim=True))
    largest = Apply(lambda x: torch.logsumexp(x, dim=1, keepdim=True))
    return nn.Sequential(AddInput(nn.Linear(_WIDTH, _WIDTH), With(sub, _WIDTH), mean, largest, nn.GELU()))


def _full(name: str) -> Callable[[], nn.Module]:
    return lambda: by_name(name).model(Size.FULL, "cpu")


CASES: Mapping[str, Case] = {
    "linear_sub_mean_logsumexp_gelu_residual": Case(_narrow_linear, (512, _WIDTH), 7.5),
    "convt3d_depthmean_add_softmax_tanh_scale": Case(
        _full("convt3d_depthmean_add_softmax_tanh_scale"), (2, 16, 16, 48, 48), 5.0
    ),
    "conv2d_avgpool_sigmoid_sum": Case(_full("conv2d_avgpool_sigmoid_sum"), (4, 8, 128, 128), 2.0),
    "eval_convt3d_scale_batchnorm_gap": Case(_full("eval_convt3d_scale_batchnorm_gap"), (2, 64, 8, 12, 12), 25.0),
}
"""The weights are the workloads' own but for one; `least` is half of what is asked for on an H200."""


def measure(name: str, case: Case, clock: Callable[[], float]) -> Row:
    """Calls all three in turn, after two calls each."""
    model, x = case.model(), torch.rand(case.shape)
    optimised = fusepass.optimize(model, x)
    calls: list[Callable[[Tensor], Tensor]] = [model, torch.compile(model), optimised]
    for call in 2 * calls:
        call(x)
    taken: list[list[float]] = [[] for _ in calls]
    for _ in range(_ROUNDS):
        for call, samples in zip(calls, taken, strict=True):
            start = clock()
            call(x)
            samples.append(1e3 * (clock() - start))
    eager, compiled, fused = (sorted(samples)[len(samples) // 4] for samples in taken)
    return Row(name, case.shape, case.least, eager, compiled, fused, check(model, optimised, [x]).ok)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each case; with ``--json`` write them, too. 1 where one is wrong or slower than is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="CASE", help="all by default")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    rows = []
    with torch.no_grad():
        for name in options.names or CASES:
            row = measure(name, CASES[name], clock)
            rows.append(row)
            times = f"eager {row.eager:8.2f} ms  compile {row.compiled:8.2f} ms  fusepass {row.fusepass:8.2f} ms"
            print(f"{name:42}{times}  {row.ratio:6.1f}x of {row.least}  {'' if row.correct else 'WRONG'}", flush=True)
    if options.json:
        facts = {"machine": platform.machine(), "torch": torch.__version__, "threads": options.threads}
        listed = [{**asdict(row), "ratio": row.ratio} for row in rows]
        options.json.write_text(json.dumps({**facts, "rows": listed}, indent=1) + "\n")
    return int(not all(row.correct and row.ratio >= row.least for row in rows))


if __name__ == "__main__":
    sys.exit(main())
