"""One step of training of public networks by kernel: fusepass beside torch.compile's own backend.

python benchmarks/step_profile.py --only 'vit|gpt2' --json step_profile.json

For each way: milliseconds of a step, of its kernels and of the host; launches; what forward leaves allocated for backward; the
peak; the first step in seconds; kernel time by class of operator, told by the names that libraries and compilers give their kernels.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # this folder has a transformers.py of its own

from benchmarks.public import TRAINING, Network
from benchmarks.run import about_machine

WAYS = {"eager": None, "compile": "inductor", "fusepass": "fusepass"}
CLASSES = (
    ("attention", r"flash|fmha|attention|sdpa"),
    ("convolution", r"conv|wgrad|dgrad|fprop|cudnn.*(xmma|cutlass)|implicit"),
    ("product", r"gemm|nvjet|cublas|splitK|cutlass.*(gemm|wgmma)|ampere_|hopper|xmma"),
    ("generated", r"^triton_|^fp_|_\d+$|_\d+\("),
    ("copy or cast", r"memcpy|memset|copy|cat_array|catarray|fill|nchwtonhwc|nhwctonchw"),
)
"""Classes of kernels by name; the first that matches counts. What none matches is eager's."""

WARM_UPS = 24  # a trial of replays takes nine or more


@dataclass(frozen=True)
class Step:
    """What one way of training does in a step."""

    first_s: float = 0.0
    step_ms: float = 0.0
    host_ms: float = 0.0
    kernels_ms: float = 0.0
    launches: int = 0
    saved_mib: float = 0.0
    peak_mib: float = 0.0
    by_class: dict[str, float] = field(default_factory=dict)
    kernels: list[tuple[str, int, float]] = field(default_factory=list)
    error: str = ""


def forward_of(network: Network, model: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The loss of one step; gradients are new ones."""
    model.zero_grad(set_to_none=True)
    with network.casting(x.device):
        result = call(x)
    return result.float().square().mean()


def profile(network: Network, backend: str | None, device: torch.device) -> Step:
    """All figures of one way."""
    torch._dynamo.reset()
    model, x = network.model(device), network.input(device)
    call = model if backend is None else torch.compile(model, backend=backend)

    def step() -> None:
        forward_of(network, model, call, x).backward()

    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    for _ in range(WARM_UPS):
        step()
        torch.cuda.synchronize()
    step_ms, host_ms = _times(step)
    saved, peak = _memory(network, model, call, x)
    kernels = _kernels(step)
    by_class: Counter[str] = Counter()
    for name, (_, us) in kernels.items():
        by_class[class_of(name)] += us / 1e3
    listed = sorted(((name, count, us) for name, (count, us) in kernels.items()), key=lambda each: -each[2])
    return Step(
        first,
        step_ms,
        host_ms,
        sum(by_class.values()),
        sum(count for count, _ in kernels.values()),
        saved,
        peak,
        dict(by_class.most_common()),
        listed,
    )


def class_of(kernel: str) -> str:
    """The class of a kernel, by its name."""
    return next((name for name, pattern in CLASSES if re.search(pattern, kernel, re.IGNORECASE)), "eager")


def _times(step: Callable[[], None], runs: int = 15) -> tuple[float, float]:
    """Median milliseconds of whole steps, and of the host alone, which is waited for no kernel."""
    whole, host = [], []
    for _ in range(runs):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        host.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        whole.append(time.perf_counter() - start)
    return 1e3 * statistics.median(whole), 1e3 * statistics.median(host)


def _memory(network: Network, model: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor) -> tuple[float, float]:
    """MiB that forward leaves for backward, and the peak of a step, both beyond what was allocated before."""
    model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = forward_of(network, model, call, x)
    saved = torch.cuda.memory_allocated() - before
    loss.backward()
    torch.cuda.synchronize()
    return saved / 2**20, (torch.cuda.max_memory_allocated() - before) / 2**20


def _kernels(step: Callable[[], None]) -> dict[str, tuple[int, float]]:
    """Launches and microseconds of each kernel of one step, by name."""
    for _ in range(2):  # the first profile of a process can miss kernels
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            step()
            torch.cuda.synchronize()
    kernels: dict[str, tuple[int, float]] = {}
    for event in found.events():
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            count, us = kernels.get(event.name, (0, 0.0))
            kernels[event.name] = count + 1, us + event.self_device_time_total
    return kernels


def _lines(network: Network, steps: dict[str, Step]) -> list[str]:
    lines = [network.name]
    for way, found in steps.items():
        if found.error:
            lines.append(f"  {way:9} {found.error[:300]}")
            continue
        classes = "  ".join(f"{name} {ms:.2f}" for name, ms in found.by_class.items())
        lines.append(
            f"  {way:9} step {found.step_ms:7.2f} host {found.host_ms:7.2f} kernels {found.kernels_ms:7.2f} ms, {found.launches:5d} launches, "
            f"saved {found.saved_mib:6.0f} peak {found.peak_mib:6.0f} MiB, first {found.first_s:5.1f} s | {classes}"
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a few lines for each network; with ``--json`` write them with all kernels."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="PATTERN", help="networks whose names it matches")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    device, rows = torch.device("cuda"), {}
    for network in TRAINING:
        if not re.search(options.only, network.name):
            continue
        steps: dict[str, Step] = {}
        for way in options.ways.split(","):
            try:
                steps[way] = profile(network, WAYS[way], device)
            except Exception as error:  # others go on
                steps[way] = Step(error=repr(error))
        rows[network.name] = {way: asdict(found) for way, found in steps.items()}
        print("\n".join(_lines(network, steps)), flush=True)
        if options.json:
            options.json.write_text(json.dumps({**about_machine("cuda"), "rows": rows}, indent=1) + "\n")
    return 0 if rows else 2


if __name__ == "__main__":
    sys.exit(main())
