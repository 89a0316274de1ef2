"""Seconds from a plain model to its first fast result, with an empty and a filled cache, in new processes."""

from __future__ import annotations

import argparse
import compileall
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
CACHES = ("FUSEPASS_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


@dataclass(frozen=True)
class FirstCall:
    """Seconds with an empty cache (`cold`) and, in a second process, with what the first left (`warm`)."""

    cold: float
    warm: float


def first_call(workload: str, implementation: str, size: str, device: str, timeout_s: float = 180.0) -> FirstCall:
    """Starts two processes. PyTorch's import, CUDA's start and an eager call are over when the clock starts.

    This package's bytecode is there beforehand, as it is once pip has installed a package.

    Raises:
        RuntimeError: a process failed; the text ends with what it said last.
        subprocess.TimeoutExpired: a process took longer than `timeout_s`.
    """
    _compile_bytecode()
    command = [sys.executable, __file__, workload, implementation, size, device]
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {name: f"{folder}/{name.lower()}" for name in CACHES}
        return FirstCall(cold=_seconds(command, environment, timeout_s), warm=_seconds(command, environment, timeout_s))


@functools.cache
def _compile_bytecode() -> None:
    """What a checkout lacks where Python may not write bytecode, or has not run yet."""
    for folder in ("fusepass", "patterns", "codegen", "templates"):
        compileall.compile_dir(ROOT / folder, quiet=2)


def _seconds(command: list[str], environment: dict[str, str], timeout_s: float) -> float:
    """What a child printed."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)
    if done.returncode:
        raise RuntimeError(f"first call failed with status {done.returncode}: {done.stderr.strip()[-200:]}")
    return float(done.stdout.split()[-1])


def _child(name: str, implementation: str, size: str, device: str) -> float:
    import torch

    from benchmarks.implementations import Implementation
    from benchmarks.layers import Size
    from benchmarks.workloads import by_name

    workload = by_name(name)
    model, inputs = workload.model(Size(size), device), workload.inputs(Size(size), device)

    def finished() -> None:
        if device.startswith("cuda"):
            torch.cuda.synchronize()

    with torch.no_grad():
        model(*inputs)
        finished()
        start = time.perf_counter()
        Implementation(implementation).prepare(model)(*inputs)
        finished()
        return time.perf_counter() - start


def _networks(arguments: Sequence[str]) -> None:
    from benchmarks.first_networks import CACHES, KNOWN, measured, networks
    from benchmarks.public import INFERENCE
    from benchmarks.smallest import SMALLEST

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="*", metavar="NAME", choices=[*KNOWN], help="all large ones by default")
    parser.add_argument("--smallest", action="store_true", help="the forty smallest networks of torchvision and timm")
    parser.add_argument("--one", choices=[*KNOWN], help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--caches", nargs="+", choices=CACHES, default=CACHES, help="both by default")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="of each process")
    told = parser.parse_args(arguments)
    if told.one:
        print(json.dumps(asdict(measured(told.one, told.device))))
    else:
        every = [network.name for network in (SMALLEST if told.smallest else INFERENCE)]
        networks(told.networks or every, told.device, told.timeout, told.caches)


if __name__ == "__main__":
    sys.path.append(str(ROOT))
    if sys.argv[1:2] and sys.argv[1].startswith("--"):
        _networks(sys.argv[1:])
    else:
        print(_child(*sys.argv[1:]))
