"""The arguments that commands share: which model, which inputs, which options."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import torch

from fusepass.cli.model import Call, InputSpec, attempt, dtype_of, load_call
from fusepass.config import EFFORTS


def add_call(parser: argparse.ArgumentParser, *, sizes: bool = False) -> None:
    """What names a model and its inputs; with `sizes`, of many sizes each."""
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
        type=InputSpec.parse_sizes if sizes else InputSpec.parse,
        metavar="[NAME=]SIZE,...[:DTYPE]",
        help="shape of the next input, such as 2,3,8,8 or 4,16:int64 or mask=4,16:bool; repeat it for several"
        + ("; 1..8,3,8,8 is all sizes from 1 to 8" if sizes else ""),
    )
    parser.add_argument("--device", help="where to run, such as cpu or cuda:0")
    parser.add_argument(
        "--dtype", help="floating-point type of the model and of inputs that name none, such as bfloat16"
    )


def add_tune(parser: argparse.ArgumentParser) -> None:
    """The option of all commands that choose kernels."""
    parser.add_argument("--tune", choices=EFFORTS, help="how much is measured before a kernel is chosen")


def add_options(parser: argparse.ArgumentParser, *, train: bool = False) -> None:
    """Options of fusepass; `train` for commands that can take a step of training."""
    add_tune(parser)
    parser.add_argument("--graphs", action="store_true", help="capture calls in CUDA graphs and replay them")
    if train:
        parser.add_argument("--train", action="store_true", help="a step of training, forward and backward")


def call_of(arguments: argparse.Namespace) -> Call:
    """The model and the inputs that `arguments` name.

    Raises:
        UsageError: one of them cannot be had.
    """
    dtype = dtype_of(arguments.dtype) if arguments.dtype is not None else None
    call = load_call(arguments.target, arguments.inputs, device_of(arguments), dtype)
    if getattr(arguments, "train", False):
        call.model.train()
    return call


def device_of(arguments: argparse.Namespace) -> torch.device | None:
    """The device that `arguments` name, if any.

    Raises:
        UsageError: torch knows none of that name.
    """
    name = arguments.device
    return attempt(f"device {name!r}", lambda: torch.device(name)) if name is not None else None


def options_of(arguments: argparse.Namespace) -> Mapping[str, Any]:
    """The options of `fusepass.config.Config` that `arguments` set."""
    options: dict[str, Any] = {}
    if arguments.tune is not None:
        options["tune"] = arguments.tune
    if getattr(arguments, "graphs", False):
        options["cuda_graphs"] = True
    if getattr(arguments, "train", False):
        options["training"] = "fused"
    return options
