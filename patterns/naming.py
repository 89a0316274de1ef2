"""What regions are called, and where in the user's code an operator stands."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import lru_cache
from pathlib import Path

import torch
from torch import fx

_SPELLINGS = {
    "_native_batch_norm_legit_functional": "batch_norm",
    "_native_batch_norm_legit_no_training": "batch_norm",
    "_native_batch_norm_legit": "batch_norm",
    "_to_copy": "cast",
    "constant_pad_nd": "pad",
    "addmm": "linear",
    "kept": "dropout",
}
_LONGEST = 6  # operators in a name
_KEPT = 4  # of a longer chain

_FRAME = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)')
_TORCH = str(Path(torch.__file__).parent)
_CALLS_FORWARD = str(Path("fusepass", "dispatch", "through_dynamo.py"))
_OF_DYNAMO = re.compile(r"^L\[.*?\](\.__self__)?(\.|$)")
"""What leads from a frame that Dynamo traces to the model."""


def region_name(nodes: Sequence[fx.Node]) -> str:
    """Such as ``conv_transpose3d_layer_norm_gelu_mul``, an identifier; long chains are cut to ``..._and_7_more``."""
    names = [op_name(node) for node in nodes]
    if len(names) > _LONGEST:
        names = [*names[:_KEPT], f"and_{len(names) - _KEPT}_more"]
    return "_".join(names)


def op_name(node: fx.Node) -> str:
    """What users call the operator, such as ``conv2d`` for ``aten.convolution``."""
    packet = str(node.target).split(".")[1]
    if packet in ("convolution", "_convolution"):
        rank = node.args[0].meta["val"].dim() - 2  # type: ignore[union-attr]
        return f"conv_transpose{rank}d" if node.args[6] else f"conv{rank}d"
    spelled = _SPELLINGS.get(packet, packet)
    return spelled.removeprefix("native_").removesuffix("_with_indices").strip("_")


def unique(name: str, taken: Collection[str]) -> str:
    """`name`, with a number behind it where it is taken."""
    numbers = (f"{name}_{number}" for number in range(1, len(taken) + 2))
    return next(candidate for candidate in (name, *numbers) if candidate not in taken)


def location(node: fx.Node) -> str:
    """``"net.py:12 in forward"``, the innermost frame outside of torch; else the innermost module's path; else ""."""
    paths = [_OF_DYNAMO.sub("", path) for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    modules = [path for path in paths if path]
    return _user_frame(node.meta.get("stack_trace") or "") or (str(modules[-1]) if modules else "")


@lru_cache(maxsize=4096)
def _user_frame(stack_trace: str) -> str:
    frames = _FRAME.findall(stack_trace)
    own = [each for each in frames if not each[0].startswith(_TORCH) and not each[0].endswith(_CALLS_FORWARD)]
    if not own:
        return ""
    file, line, function = own[-1]
    return f"{Path(file).name}:{line} in {function}"
