"""The host's time of tiny steps of training, where Python and launches are all that counts: the ways of training side by side.

python benchmarks/step_host.py                             # or --only 'cnn' --steps 500
python benchmarks/step_host.py --ways compile,fusepass --device cuda

Microseconds of forward and backward, in float32 and under autocast. A step begins when the device is idle, and ends when its last launch has
been made. On a CPU, where kernels are part of it, it is the time of the calling thread alone, with one thread for kernels. Steps are
interleaved; the first quartile stands for each way, as whatever comes between makes a step longer.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # this folder has a transformers.py of its own

import fusepass
from benchmarks.blocks import CausalAttention, Residual, convolution, feed_forward
from benchmarks.layers import Apply

WAYS: Mapping[str, Callable[[nn.Module], Callable[[Tensor], Tensor]]] = {
    "eager": lambda model: model,
    "compile": torch.compile,
    "fusepass": lambda model: torch.compile(model, backend="fusepass", options={"tune": "off"}),
    "optimize": lambda model: fusepass.optimize(model, training="fused", tune="off"),
}


def _gpt() -> tuple[nn.Module, Tensor]:
    """Two layers of a language model, with dropout, and its vocabulary."""
    layers = (
        layer
        for _ in range(2)
        for layer in (
            Residual(nn.LayerNorm(32), CausalAttention(32, 2), nn.Dropout(0.1)),
            Residual(nn.LayerNorm(32), *feed_forward(32, 128), nn.Dropout(0.1)),
        )
    )
    return nn.Sequential(nn.Embedding(50, 32), *layers, nn.LayerNorm(32), nn.Linear(32, 50)), torch.randint(50, (2, 16))


def _cnn() -> tuple[nn.Module, Tensor]:
    """A small residual network."""
    relu, mean = nn.ReLU(), Apply(lambda x: x.mean((2, 3)))
    inner = Residual(convolution(8, 8, after=relu), convolution(8, 8))
    layers = convolution(3, 8, 3, 2, after=relu), inner, relu, convolution(8, 16, 3, 2, after=relu)
    return nn.Sequential(*layers, mean, nn.Linear(16, 10)), torch.rand(2, 3, 16, 16)


MODELS = {"gpt": _gpt, "cnn": _cnn}


def step(call: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor, autocast: bool) -> tuple[float, float]:
    """Microseconds of forward and of backward."""
    on_gpu = x.is_cuda
    clock = time.perf_counter if on_gpu else time.thread_time
    model.zero_grad(set_to_none=True)
    if on_gpu:
        torch.cuda.synchronize(x.device)
    start = clock()
    with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
        result = call(x)
    forward, loss = clock() - start, result.float().square().mean()
    start = clock()
    loss.backward()
    return 1e6 * forward, 1e6 * (clock() - start)


def measure(name: str, ways: Sequence[str], device: torch.device, steps: int, autocast: bool) -> dict[str, list[float]]:
    """Forward, backward and both, by way."""
    calls: dict[str, Callable[[], tuple[float, float]]] = {}
    for way in ways:
        torch.manual_seed(0)
        model, x = MODELS[name]()
        model, x = model.to(device), x.to(device)
        calls[way] = partial(step, WAYS[way](model), model, x, autocast)
        for _ in range(5):
            calls[way]()
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for _ in range(steps):
        for way, call in calls.items():
            found[way].append(call())
    return {
        way: [
            _quartile(forward for forward, _ in rows),
            _quartile(backward for _, backward in rows),
            _quartile(map(sum, rows)),
        ]
        for way, rows in found.items()
    }


def _quartile(samples: object) -> float:
    return statistics.quantiles(samples, n=4)[0]  # type: ignore[call-overload,no-any-return]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each model, precision and way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default="", metavar="PATTERN", help="models whose names it matches")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    names = [name for name in MODELS if re.search(options.only, name)]
    for name in names:
        for autocast in (False, True):
            ways = options.ways.split(",")
            for way, times in measure(name, ways, torch.device(options.device), options.steps, autocast).items():
                forward, backward, both = times
                kind = "autocast" if autocast else "float32"
                print(
                    f"{name:4} {kind:9} {way:9} forward {forward:7.0f} backward {backward:7.0f} both {both:7.0f} us",
                    flush=True,
                )
    return 0 if names else 2


if __name__ == "__main__":
    sys.exit(main())
