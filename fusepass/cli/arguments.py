"""The arguments that commands share: which model, which inputs."""

from __future__ import annotations

import argparse

import torch

from fusepass.cli.model import Call, InputSpec, attempt, load_call


def add_call(parser: argparse.ArgumentParser) -> None:
    """What names a model and its inputs."""
    parser.add_argument(
        "target",
        metavar="MODULE:CALLABLE",
        help="an nn.Module, or what gives one, or a (model, inputs) pair, when called without arguments",
    )
    parser.add_argument(
        "--input",
        dest="inputs",
        action="append",
        default=[],
        type=InputSpec.parse,
        metavar="SIZE,...[:DTYPE]",
        help="shape of the next input, such as 2,3,8,8 or 4,16:int64; repeat it for several",
    )
    parser.add_argument("--device", help="where to run, such as cpu or cuda:0")


def call_of(arguments: argparse.Namespace) -> Call:
    """The model and the inputs that `arguments` name.

    Raises:
        UsageError: one of them cannot be had.
    """
    return load_call(arguments.target, arguments.inputs, device_of(arguments))


def device_of(arguments: argparse.Namespace) -> torch.device | None:
    """The device that `arguments` name, if any.

    Raises:
        UsageError: torch knows none of that name.
    """
    name = arguments.device
    return attempt(f"device {name!r}", lambda: torch.device(name)) if name is not None else None
