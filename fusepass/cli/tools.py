"""The commands `check` and `extract`: where a wrong number comes from, and a region as a program of its own."""

from __future__ import annotations

import argparse
from pathlib import Path

import fusepass
from fusepass.cli.arguments import add_call, add_options, call_of, options_of
from fusepass.cli.model import attempt


def add_check(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``fusepass check``."""
    add_call(parser)
    add_options(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_check)


def _check(arguments: argparse.Namespace) -> int:
    call = call_of(arguments)
    optimised = fusepass.optimize(call.model, **options_of(arguments))
    errors = attempt(f"checking {arguments.target}", lambda: fusepass.check(optimised, *call.args, **call.kwargs))
    print(errors.to_json() if arguments.json else errors)
    return 0 if errors.ok else 1


def add_extract(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``fusepass extract``."""
    add_call(parser)
    parser.add_argument("region", help="the region's name, as `fusepass explain` prints it")
    add_options(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write; the region's name by default")
    parser.set_defaults(run=_extract)


def _extract(arguments: argparse.Namespace) -> int:
    call = call_of(arguments)
    optimised = fusepass.optimize(call.model, **options_of(arguments))
    directory = arguments.out or Path(arguments.region)
    program = attempt(
        f"extracting {arguments.region}",
        lambda: fusepass.extract(optimised, arguments.region, directory, *call.args, **call.kwargs),
    )
    print(f"wrote {program}; its first lines say how to build and run it")
    return 0
