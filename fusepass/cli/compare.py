"""The command `compare`: eager, torch.compile and fusepass side by side, with times, memory and errors."""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fusepass
from fusepass import measure
from fusepass.cli.arguments import add_call, add_options, call_of, options_of
from fusepass.cli.model import Call, UsageError, attempt
from fusepass.numerics import check
from fusepass.numerics.comparison import Leaf
from fusepass.report.table import Column, human_bytes, table, terminal_width, wrap

_COLUMNS = (
    Column("", least=13),
    Column("median ms", right=True),
    Column("x eager", right=True),
    Column("first call s", right=True),
    Column("peak memory", right=True),
    Column("error", right=True),
    Column("verdict"),
)
_LEAST, _MOST = 5, 200  # rounds


@dataclass(frozen=True)
class Way:
    """What one way to run a model took.

    Attributes:
        name: ``"eager"``, ``"torch.compile"`` or ``"fusepass"``.
        milliseconds: median of a call.
        first: seconds of the first call, compilers included.
        memory: bytes that a call holds at most beside the model and its inputs.
        error: relative error (L2) against float64, of the result that is worst.
        right: whether the results are right by the numeric policy.
        failed: why it could not run; empty where it did.
    """

    name: str
    milliseconds: float = math.nan
    first: float = math.nan
    memory: int = 0
    error: float = math.nan
    right: bool = True
    failed: str = ""


def add(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``fusepass compare``."""
    add_call(parser)
    add_options(parser, train=True)
    parser.add_argument("--mode", help="mode of torch.compile; reduce-overhead with --graphs, else default")
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="for the rounds in which all are timed, 2 by default"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_compare)


def _compare(arguments: argparse.Namespace) -> int:
    call = call_of(arguments)
    options = options_of(arguments)
    mode = arguments.mode or ("reduce-overhead" if arguments.graphs else "default")
    models: Mapping[str, Callable[[nn.Module], Any]] = {
        "eager": lambda model: model,
        "torch.compile": lambda model: torch.compile(model, mode=mode),
        "fusepass": lambda model: fusepass.optimize(model, **options),
    }
    ways, disturbed = attempt(
        f"comparing {arguments.target}", lambda: compared(call, models, arguments.seconds, train=arguments.train)
    )
    title = f"{type(call.model).__name__} on {call.device}, torch {torch.__version__}, torch.compile in mode {mode}"
    if arguments.json:
        print(json.dumps({"title": title, "disturbed": disturbed, "ways": [asdict(way) for way in ways]}, indent=2))
    else:
        print("\n".join(_lines(title, ways, disturbed, terminal_width())))
    eager, *others = ways
    if eager.failed:
        raise UsageError(f"{arguments.target} itself fails: {eager.failed}")
    return 0 if all(way.right and not way.failed for way in others if way.name == "fusepass") else 1


def _lines(title: str, ways: Sequence[Way], disturbed: int, width: int) -> list[str]:
    rows = [_row(way, ways[0]) for way in ways]
    lines = [line for block in table(_COLUMNS, rows, width) for line in block]
    notes = [line for way in ways if way.failed for line in wrap(f"{way.name} failed: {way.failed}", width)]
    if disturbed:
        notes += wrap(f"{disturbed} rounds were interrupted by other work on this machine: times are uncertain", width)
    return [*wrap(title, width), "", *lines, *([""] if notes else []), *notes]


def _row(way: Way, eager: Way) -> tuple[str, ...]:
    if way.failed:
        return (way.name, "failed", "", "", "", "", "")
    ratio = f"{eager.milliseconds / way.milliseconds:.2f}"
    verdict = "right" if way.right else "WRONG"
    memory, error = human_bytes(way.memory), f"{way.error:.1e}"
    return (way.name, f"{way.milliseconds:.4g}", ratio, f"{way.first:.2f}", memory, error, verdict)


def compared(
    call: Call, models: Mapping[str, Callable[[nn.Module], Any]], seconds: float, *, train: bool
) -> tuple[list[Way], int]:
    """What each of `models`, which makes what to call of a copy of the model, takes; and how many rounds were disturbed."""
    results = step if train else _inference
    oracle = _exact(call, results)
    runs: dict[str, Callable[[], Any]] = {}
    ways: dict[str, Way] = {}
    expected: Any = None
    for name, make in models.items():
        own = Call(copy.deepcopy(call.model), call.args, call.kwargs)
        start = time.perf_counter()
        try:
            made = make(own.model)
            given = results(made, own)
        except Exception as error:  # the user's model, or a compiler: it is told, and the others are compared
            ways[name] = Way(name, failed=f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}")
            continue
        _wait(call.device)
        first = time.perf_counter() - start
        expected = given if expected is None else expected
        comparison = check.settled(check.compare(given, expected, oracle), given, _nudged(call, results), oracle)
        worst = max(comparison.leaves, key=lambda leaf: (bool(leaf.problem), leaf.actual.l2), default=Leaf(""))
        ways[name] = Way(name, first=first, error=worst.actual.l2, right=comparison.ok)
        runs[name] = _run(results, made, own)
    for name, run in runs.items():
        run()  # the second call may be the one that captures
        ways[name] = Way(**asdict(ways[name]) | {"memory": _peak(run, call.device)})
    rounds = measure.in_turn(runs, measure.clock(call.device), seconds, least=_LEAST, most=_MOST)
    for name, samples in rounds.samples.items():
        ways[name] = Way(**asdict(ways[name]) | {"milliseconds": 1e3 * statistics.median(samples)})
    return list(ways.values()), rounds.disturbed


def _run(results: Callable[[Any, Call], Any], made: Any, own: Call) -> Callable[[], Any]:
    return lambda: results(made, own)


def _inference(model: Any, call: Call) -> Any:
    with torch.no_grad():
        return model(*call.args, **call.kwargs)


def step(model: Any, call: Call) -> Any:
    """Results and gradients of one step of training: forward, and backward from fixed cotangents."""
    call.model.zero_grad(set_to_none=True)
    outputs = model(*call.args, **call.kwargs)
    leaves = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not leaves:
        raise UsageError("no result of the model has gradients, so there is nothing to train")
    torch.autograd.backward(leaves, [_cotangent(leaf) for leaf in leaves])
    gradients = {name: parameter.grad for name, parameter in call.model.named_parameters()}
    return pytree.tree_map_only(Tensor, Tensor.detach, outputs), gradients


def _cotangent(leaf: Tensor) -> Tensor:
    """The same numbers each time: of both signs, as a sum of all would have no gradient behind a normalisation."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(leaf.shape, generator=generator, dtype=torch.float32).to(leaf.device, leaf.dtype)


def _exact(call: Call, results: Callable[[Any, Call], Any]) -> Any:
    """The results in float64."""
    return _with(call, results)(*check.in_float64(call.model, (*call.args, *call.kwargs.values())))


def _nudged(call: Call, results: Callable[[Any, Call], Any]) -> Iterator[Any]:
    """The results of eager for numbers that are one rounding off."""
    return check.nudged_results(call.model, (*call.args, *call.kwargs.values()), _with(call, results))


def _with(call: Call, results: Callable[[Any, Call], Any]) -> Callable[[nn.Module, Sequence[Any]], Any]:
    """`results` for another model and other values of the arguments of `call`, all in a row."""
    count = len(call.args)

    def run(model: nn.Module, values: Sequence[Any]) -> Any:
        named = dict(zip(call.kwargs, values[count:], strict=True))
        return results(model, Call(model, tuple(values[:count]), named))

    return run


def _peak(run: Callable[[], Any], device: torch.device) -> int:
    """Bytes that are allocated during a call beyond those before it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    assert profile.profiler is not None
    held = most = 0
    kineto: Any = profile.profiler.kineto_results
    for event in sorted((e for e in kineto.events() if e.name() == "[memory]"), key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
