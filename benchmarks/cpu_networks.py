"""Whole networks on a CPU: eager, torch.compile and fusepass in turn in one process, with errors against float64.

python benchmarks/cpu_networks.py                                    # twelve networks in float32 and bfloat16, on two cores
python benchmarks/cpu_networks.py resnet50 swin_t --types float32 --json build/cpu_networks.json
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import torch
from torch import nn

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import fusepass
from benchmarks.public import Network

NETWORKS = (
    "resnet50", "densenet121", "googlenet", "inception_v3", "mobilenet_v3_large", "mnasnet1_0", "shufflenet_v2_x1_0", "efficientnet_b0",
    "regnet_y_400mf", "convnext_tiny", "vit_b_16", "swin_t",
)  # fmt: skip
"""Of torchvision; one image of 224 x 224 each."""

_WAYS: Mapping[str, Callable[[nn.Module], Callable[..., Any]]] = {
    "eager": lambda model: model,
    "compile": torch.compile,
    "fusepass": fusepass.optimize,
}
_ROUNDS = 5


@dataclass(frozen=True)
class Result:
    """A network of one type: by way the milliseconds of a call, least, lower quartile and median of `rounds`, the seconds of the first call, and
    how far the result is from float64's, relative to that."""

    name: str
    dtype: str
    rounds: int
    milliseconds: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)
    first_seconds: Mapping[str, float] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)

    def over(self, way: str) -> float:
        """How many times faster fusepass is, by the lower quartile."""
        return self.milliseconds[way][1] / self.milliseconds["fusepass"][1]


@torch.no_grad()
def measure(name: str, dtype: torch.dtype, seconds: float) -> Result:
    """Calls all in turn for `seconds`, at least five times."""
    cpu = torch.device("cpu")
    network = Network(name, "torchvision", name, (1, 3, 224, 224), weights=dtype)
    model, x = network.model(cpu), network.input(cpu)
    exact = copy.deepcopy(model).double()(x.double())
    torch.compiler.reset()
    calls: dict[str, Callable[..., Any]] = {}
    first, errors = {}, {}
    for way, make in _WAYS.items():
        calls[way] = make(copy.deepcopy(model))
        start = time.perf_counter()
        result = calls[way](x)
        first[way] = time.perf_counter() - start
        errors[way] = float((result.double() - exact).norm() / exact.norm().clamp(min=1e-300))  # some heads are zero
    samples: dict[str, list[float]] = {way: [] for way in calls}
    for _ in range(2):
        for call in calls.values():
            call(x)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(samples["eager"]) < _ROUNDS:
        for way, call in calls.items():
            start = time.perf_counter()
            call(x)
            samples[way].append(1e3 * (time.perf_counter() - start))
    taken = {way: (min(each), sorted(each)[len(each) // 4], median(each)) for way, each in samples.items()}
    return Result(name, str(dtype).removeprefix("torch."), len(samples["eager"]), taken, first, errors)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each network and type, and the geometric means; with ``--json`` write them, too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NETWORK", help="all by default")
    parser.add_argument("--types", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each network and type")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    results: list[Result] = []
    for dtype in options.types:
        for name in options.names or NETWORKS:
            result = measure(name, getattr(torch, dtype), options.seconds)
            results.append(result)
            times = "  ".join(f"{way} {each[1]:7.2f} ms" for way, each in result.milliseconds.items())
            print(
                f"{name:20}{dtype:10}{times}  {result.over('compile'):5.2f}x {result.over('eager'):5.2f}x", flush=True
            )
    means = {way: geometric_mean(result.over(way) for result in results) for way in ("compile", "eager")}
    least = {way: min(result.over(way) for result in results) for way in means}
    for way in means:
        print(f"over {way}: geometric mean {means[way]:.2f}, least {least[way]:.2f}")
    if options.json:
        facts = {"threads": options.threads, "torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability()}
        rows = [asdict(result) for result in results]
        options.json.write_text(
            json.dumps({**facts, "geometric_mean": means, "least": least, "rows": rows}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
