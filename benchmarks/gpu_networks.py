"""Whole networks on a GPU: eager, torch.compile's modes and fusepass side by side, each network in a process of its own.

python benchmarks/gpu_networks.py                                     # calls without gradients
python benchmarks/gpu_networks.py resnet50 vit_small --training       # steps of training
python benchmarks/gpu_networks.py --seconds 400 --json build/gpu_networks.json

Caches are filled first, by several processes at once; what first calls take there is told, too. Then each network has the device for itself:
medians of calls on new inputs, the L2 cache flushed before each, the host waited for. Where seconds run out, networks are left out, and named.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import torch
from torch import Tensor, nn

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # this folder has a transformers.py of its own

import fusepass
from benchmarks.measure import flusher
from benchmarks.public import INFERENCE, TRAINING, Network
from benchmarks.run import about_machine
from benchmarks.step_profile import WARM_UPS, forward_of
from fusepass.api.module import OptimizedModule

Flush = Callable[[], object]
Make = Callable[[nn.Module], Callable[[Tensor], Any]]
WAYS: Mapping[str, Make] = {
    "eager": lambda model: model,
    "compile": torch.compile,
    "reduce-overhead": partial(torch.compile, mode="reduce-overhead"),
    "max-autotune": partial(torch.compile, mode="max-autotune"),
    "fusepass": fusepass.optimize,
}
_USUAL = "eager,compile,reduce-overhead,fusepass"
_INPUTS, _FEW_CALLS, _CALLS, _ROWS = 4, 4, 30, 2


@dataclass(frozen=True)
class Result:
    """A network by way: milliseconds of a call on the device and until the host is through with it; MiB beyond the model and its inputs that
    are reserved and that are allocated at most, of which the latter leave out what CUDA graphs keep; how far the first results are from
    float64's, relative to these."""

    name: str
    milliseconds: dict[str, float] = field(default_factory=dict)
    host_milliseconds: dict[str, float] = field(default_factory=dict)
    mebibytes: dict[str, float] = field(default_factory=dict)
    allocated: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    first_seconds: dict[str, float] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    replayed: list[str] = field(default_factory=list)

    @property
    def over(self) -> float | None:
        """How many times faster fusepass is than the fastest mode of torch.compile."""
        others = [taken for way, taken in self.milliseconds.items() if way not in ("eager", "fusepass")]
        own = self.milliseconds.get("fusepass")
        return min(others) / own if others and own else None


def measure(network: Network, ways: Sequence[str], *, fill: bool) -> Result:
    """All figures of one network, or, to `fill` caches, the seconds of first calls."""
    device = torch.device("cuda")
    flush = flusher(device)
    inputs = [network.input(device) for _ in range(_INPUTS)]
    exact = None if fill or network.train else _exact(network, inputs[0])
    result = Result(network.name)
    for way in ways:
        try:
            _measure(result, network, way, inputs, exact, None if fill else flush)
        except Exception as error:  # the other ways go on
            result.problems[way] = f"{type(error).__name__}: {str(error)[:200]}"
    return result


def _measure(
    result: Result, network: Network, way: str, inputs: Sequence[Tensor], exact: Tensor | None, flush: Flush | None
) -> None:
    """Put the figures of one way into `result`; where there is no `flush`, those of the first call alone."""
    torch._dynamo.reset()  # what an earlier way holds
    gc.collect()
    torch.cuda.empty_cache()
    model = network.model(inputs[0].device)
    own, allocated = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    call = WAYS[way](model)
    run = partial(_step if network.train else _call, network, model, call)
    start = time.perf_counter()
    run(inputs[0])
    torch.cuda.synchronize()
    result.first_seconds[way] = time.perf_counter() - start
    for number in range(WARM_UPS if flush is not None else _FEW_CALLS):
        run(inputs[number % len(inputs)])
    if flush is None:
        return
    times = [_timed(run, inputs[number % len(inputs)], flush) for number in range(_CALLS)]
    result.milliseconds[way], result.host_milliseconds[way] = (median(each) for each in zip(*times, strict=True))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    found = run(inputs[0])
    torch.cuda.synchronize()
    result.mebibytes[way] = (torch.cuda.max_memory_reserved() - own) / 2**20
    result.allocated[way] = (torch.cuda.max_memory_allocated() - allocated) / 2**20
    if exact is not None and isinstance(found, Tensor):
        result.errors[way] = float((found[: len(exact)].double() - exact).norm() / exact.norm())
    if isinstance(call, OptimizedModule):
        result.replayed.extend(call.report().cuda_graphs)


def _call(network: Network, model: nn.Module, call: Callable[[Tensor], Any], x: Tensor) -> Any:
    with torch.no_grad(), network.casting(x.device):
        return call(x)


def _step(network: Network, model: nn.Module, call: Callable[[Tensor], Any], x: Tensor) -> None:
    forward_of(network, model, call, x).backward()


def _timed(run: Callable[[Tensor], Any], x: Tensor, flush: Flush) -> tuple[float, float]:
    """Milliseconds of one call, by events on the device and by the host's clock."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    flush()
    torch.cuda.synchronize()
    start = time.perf_counter()
    begin.record()
    run(x)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end), 1e3 * (time.perf_counter() - start)


@torch.no_grad()
def _exact(network: Network, x: Tensor) -> Tensor | None:
    """Results in float64 of the first samples, or of all of them where these share statistics; None where it gives no tensor."""
    x = x if network.batch_statistics else x[:_ROWS]
    found = network.model(x.device).double()(x.double() if x.is_floating_point() else x)
    return found if isinstance(found, Tensor) else None


def _process(network: Network, arguments: Sequence[str], seconds: float) -> Result:
    """`measure` in a process of its own."""
    command = [sys.executable, __file__, network.name, "--alone", *arguments]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=max(seconds, 1), check=False)
    except subprocess.TimeoutExpired:
        return Result(network.name, problems={"": "no time was left"})
    lines = run.stdout.splitlines()
    if run.returncode or not lines:
        return Result(network.name, problems={"": run.stderr[-300:]})
    return Result(**json.loads(lines[-1]))


def _line(result: Result) -> str:
    times = "  ".join(f"{way} {each:7.3f}" for way, each in result.milliseconds.items())
    ratio = f"{result.over:5.2f}x" if result.over else "    -"
    return f"{result.name:22}{ratio}  ms: {times}  MiB: { ({k: (round(v), round(result.allocated[k])) for k, v in result.mebibytes.items()}) }  {dict(result.problems) or ''}"


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each network, and the geometric mean; with ``--json`` write them, too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NETWORK", help="all by default")
    parser.add_argument("--training", action="store_true", help="steps of training, not calls without gradients")
    parser.add_argument("--ways", default=_USUAL)
    parser.add_argument("--seconds", type=float, default=3600.0, help="for all of it")
    parser.add_argument("--processes", type=int, default=8, help="that fill caches at once; 0: none does")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--fill", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    end = time.monotonic() + options.seconds
    networks = [
        each for each in (TRAINING if options.training else INFERENCE) if each.name in (options.names or (each.name,))
    ]
    ways = options.ways.split(",")
    if options.alone:
        (network,) = networks
        print(json.dumps(asdict(measure(network, ways, fill=options.fill))))
        return 0
    training = ["--training"] * options.training
    firsts: dict[str, dict[str, float]] = {}
    if options.processes:
        filling = [*training, "--fill", "--ways", ",".join(way for way in ways if way != "eager")]
        os.environ.setdefault(
            "TORCHINDUCTOR_COMPILE_THREADS", str(max(1, 2 * (os.cpu_count() or 1) // options.processes))
        )
        with ThreadPoolExecutor(options.processes) as pool:
            made = pool.map(lambda each: _process(each, filling, end - time.monotonic()), networks)
            firsts = {each.name: each.first_seconds for each in made}
    results: list[Result] = []
    for network in networks:
        result = _process(network, [*training, "--ways", options.ways], end - time.monotonic())
        results.append(replace(result, first_seconds=firsts.get(network.name, result.first_seconds)))
        print(_line(results[-1]), flush=True)
        if options.json:
            about = {**about_machine("cuda"), "training": options.training, "processes": options.processes}
            options.json.write_text(json.dumps({**about, "rows": [asdict(each) for each in results]}, indent=1) + "\n")
    ratios = [each.over for each in results if each.over]
    print(f"geometric mean {geometric_mean(ratios):.2f}, least {min(ratios):.2f}" if ratios else "nothing was timed")
    return 0 if ratios else 2


if __name__ == "__main__":
    sys.exit(main())
