"""The commands `build` and `run`: a model as a file that needs no compiler, and such a file on made-up inputs."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

import fusepass
from fusepass import measure
from fusepass.artifact.module import LoadedModule
from fusepass.artifact.tensors import unpacked
from fusepass.cli.arguments import add_call, add_tune, call_of, device_of, options_of
from fusepass.cli.model import Call, InputSpec, UsageError, attempt, dtype_of
from fusepass.report.table import Column, human_bytes, table, terminal_width

_ROUNDS = 20
_COLUMNS = (Column("inputs", least=12), Column("results", least=12), Column("ms", right=True))


def add_build(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``fusepass build``."""
    add_call(parser, sizes=True)
    add_tune(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the file to write")
    parser.add_argument(
        "--arch",
        dest="architectures",
        action="append",
        help="build for this architecture, such as sm_80 or x86-64-v3, not for the device at hand; repeat it for several",
    )
    parser.add_argument("--no-weights", action="store_true", help="leave parameters and buffers out of the file")
    parser.add_argument(
        "--dynamic", action="store_true", help="build for the ends of ranges in --input, and serve all sizes"
    )
    parser.set_defaults(run=_build)


def _build(arguments: argparse.Namespace) -> int:
    first, *rest = _sizes(arguments.inputs)
    if arguments.dynamic:
        rest = rest[-1:]
    arguments.inputs, out = first, arguments.out
    call = call_of(arguments)
    dtype = dtype_of(arguments.dtype) if arguments.dtype is not None else None
    calls = [call, *(call.given(specs, device_of(arguments), dtype) for specs in rest)]
    optimised, examples = fusepass.optimize(call.model, **options_of(arguments)), list(map(_example, calls))
    attempt(
        f"building {arguments.target}",
        lambda: fusepass.save(
            optimised,
            out,
            examples,
            architectures=arguments.architectures,
            weights=not arguments.no_weights,
            dynamic=arguments.dynamic,
        ),
    )
    print(f"wrote {out}, {human_bytes(out.stat().st_size)}")
    return 0


def _sizes(inputs: Sequence[Sequence[InputSpec]]) -> list[list[InputSpec]]:
    """The inputs of each call: ranges of several inputs go together, and what has none is the same in all calls.

    Raises:
        UsageError: two ranges are not equally long.
    """
    counts = {len(each) for each in inputs} - {1}
    if len(counts) > 1:
        raise UsageError("the ranges of several inputs go together: give them the same number of sizes")
    return [[each[number % len(each)] for each in inputs] for number in range(max(counts, default=1))]


def _example(call: Call) -> Any:
    """The arguments of `call`, as `fusepass.save` takes them."""
    if not call.kwargs:
        return call.args
    return dict(inspect.signature(call.model.forward).bind(*call.args, **call.kwargs).arguments)


def add_run(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``fusepass run``."""
    parser.add_argument("file", type=Path, metavar="FILE", help="what `fusepass build` or `fusepass.save` wrote")
    parser.add_argument("--device", help="the GPU to run on, such as cuda:1")
    parser.add_argument("--weights", type=Path, metavar="FILE", help="a safetensors file with parameters and buffers")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    loaded = attempt(f"loading {arguments.file}", lambda: _loaded(arguments))
    rows = attempt(f"running {arguments.file}", lambda: [_row(loaded, *call) for call in loaded.made_up()])
    print(f"{loaded.extra_repr()}")
    for block in table(_COLUMNS, rows, terminal_width()):
        print(*block, sep="\n")
    return 0


def _loaded(arguments: argparse.Namespace) -> LoadedModule:
    state_dict = None
    if arguments.weights is not None:
        state_dict = unpacked(arguments.weights.read_bytes())
    return fusepass.load(arguments.file, device=arguments.device, state_dict=state_dict)


def _row(loaded: LoadedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, str, str]:
    """What a call takes and gives, and its typical time."""
    with torch.no_grad():
        results = loaded(*args, **kwargs)
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs, results)) if isinstance(leaf, torch.Tensor)]
        seconds = measure.clock(next((each.device for each in tensors if each.is_cuda), torch.device("cpu")))
        times = [seconds(lambda: loaded(*args, **kwargs)) for _ in range(_ROUNDS)]
    return _described((args, kwargs)), _described(results), f"{1e3 * measure.typical(times):.3f}"


def _described(value: Any) -> str:
    """The tensors in a nested value."""
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return ", ".join(f"{str(each.dtype).removeprefix('torch.')}{list(each.shape)}" for each in tensors)
