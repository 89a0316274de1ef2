"""Measures eager PyTorch, torch.compile and fusepass side by side: `python benchmarks/run.py --help`."""

from __future__ import annotations

import argparse
import datetime
import platform
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))  # last, so that an installed fusepass comes first

from benchmarks import summary  # noqa: E402
from benchmarks.case import Row, Settings  # noqa: E402
from benchmarks.drawn import drawn  # noqa: E402
from benchmarks.implementations import Implementation  # noqa: E402
from benchmarks.layers import Group, Size, Workload  # noqa: E402
from benchmarks.worker import Worker  # noqa: E402
from benchmarks.workloads import ALL, WORKLOADS  # noqa: E402


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark. The exit status is 1 where fusepass was wrong or anything raised, 0 otherwise."""
    options = _parser().parse_args(arguments)
    among = [w for w in ALL if w.group.value == options.group] if options.group else WORKLOADS
    if options.drawn:
        seed, count = options.drawn
        among = [drawn(seed, number) for number in range(count)]
    chosen = [workload for workload in among if re.search(options.only, workload.name)]
    if not chosen:
        print(f"no workload matches --only {options.only!r}", file=sys.stderr)
        return 2
    settings = Settings(
        device=options.device[0],
        size=Size.FULL if options.device[0].startswith("cuda") else Size.REDUCED,
        implementations=options.implementations,
        seconds=options.seconds,
        first_calls=frozenset(w.name for w in chosen if options.first_calls and w.group is Group.MISSION),
    )
    machine = about_machine(settings.device) | {"devices": len(options.device)}
    rows, left_out = _measure(chosen, settings, options, machine)
    print(f"\n{machine['device']}, torch {machine['torch']}, commit {machine['commit']}")
    print(summary.text(rows, left_out))
    return int(any(summary.failed(row) for row in rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Correctness, medians, kernel counts, time to the first result; mission workloads first.",
        epilog="On a GPU allow about 15 s a workload, most of it for torch.compile's compiler; "
        "--implementations eager,fusepass takes about 4 s, and autotune a minute more where there are convolutions or "
        "matrix products. A CPU runs reduced shapes.",
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument(
        "--device",
        type=lambda names: tuple(names.split(",")),
        default=(device,),
        metavar="LIST",
        help=f"cuda or cpu (here: {device}); several, as in cuda:0,cuda:1, share the workloads",
    )
    parser.add_argument("--only", default="", metavar="REGEX", help="workloads whose name matches")
    groups = [group.value for group in Group if group is not Group.DRAWN]
    parser.add_argument("--group", choices=groups, help="workloads of one group")
    parser.add_argument("--drawn", type=_seed_and_count, metavar="SEED:COUNT", help="so many workloads drawn at random")
    parser.add_argument(
        "--implementations",
        type=lambda names: tuple(Implementation(name) for name in names.split(",")),
        default=(Implementation.EAGER, Implementation.COMPILE, Implementation.FUSEPASS),
        metavar="LIST",
        help="of eager, compile, autotune (torch.compile's max-autotune-no-cudagraphs), fusepass, with commas "
        "(all but autotune)",
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="where to write everything measured")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="start no workload after this")
    parser.add_argument("--timeout-s", type=float, default=240.0, help="for one workload (%(default)s)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of timing for one workload (%(default)s)")
    parser.add_argument(
        "--first-calls", action="store_true", help="also time to the first result, cold and warm (mission)"
    )
    return parser


def _seed_and_count(text: str) -> tuple[int, int]:
    seed, count = map(int, text.split(":"))
    return seed, count


def _measure(
    chosen: Sequence[Workload], settings: Settings, options: argparse.Namespace, machine: dict[str, object]
) -> tuple[list[Row], list[str]]:
    """Rows, and the names of workloads that did not fit the budget. JSON is kept up to date all along."""
    rows: dict[str, Row] = {}
    waiting = deque(chosen)
    lock = threading.Lock()
    end = time.perf_counter() + options.budget_s

    def result() -> tuple[list[Row], list[str]]:
        measured = [rows[workload.name] for workload in chosen if workload.name in rows]
        return measured, [workload.name for workload in chosen if workload.name not in rows]

    def measure_on(device: str) -> None:
        worker = Worker(replace(settings, device=device))
        try:
            while True:
                with lock:
                    longest = max((row.seconds for row in rows.values()), default=0.0)
                    remaining = end - time.perf_counter()
                    if not waiting or remaining < longest:
                        return
                    workload = waiting.popleft()
                row = worker.measure(workload, min(options.timeout_s, max(remaining, 1.0)))
                with lock:
                    rows[workload.name] = row
                    print(f"[{len(rows)}/{len(chosen)}] {row.workload} {row.seconds:.1f} s {row.error}", flush=True)
                    if options.json:
                        summary.write_json(options.json, machine, *result())
        finally:
            worker.stop()

    with ThreadPoolExecutor(len(options.device)) as pool:
        list(pool.map(measure_on, options.device))
    return result()


def about_machine(device: str) -> dict[str, object]:
    cuda = device.startswith("cuda")
    return {
        "device": torch.cuda.get_device_name(device) if cuda else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "commit": _output("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _output(*command: str) -> str:
    """The first line that a command prints; empty where it is missing or fails."""
    try:
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
    return printed.partition("\n")[0]


if __name__ == "__main__":
    sys.exit(main())
