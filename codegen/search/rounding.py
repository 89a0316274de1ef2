"""Whether the library's kernel for a float32 convolution rounds its operands to TF32: tried once, and kept on disk."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import torch
from torch import fx

from fusepass import measure
from fusepass.codegen import choices

_TF32_ROUNDING = 2e-5  # of a result's norm: float32 kernels differ by some 1e-6, TF32 by some 3e-4
_MEMORY_SHARE = 0.25  # of what is free may be taken to try a convolution
_TF32, _FLOAT32 = "TF32", "float32"
_Key = tuple[torch.device, *tuple[str, ...]]
_known: dict[_Key, str] = {}


def rounds_to_tf32(node: fx.Node) -> bool:
    """Whether the library's kernel for the convolution as it stands is one that rounds to TF32.

    Which kernel cuDNN takes depends on all sizes, so it is tried, on made-up numbers. Where that cannot be done the
    answer is no, and the convolution stays: a result that is right within TF32's rounding would be wrong beside eager's.
    Where there is no CUDA device code is only generated, and the answer is yes.
    """
    operands = [node.args[0].meta["val"], node.args[1].meta["val"]]  # type: ignore[union-attr]
    device = operands[0].device
    if device.type != "cuda" or not torch.cuda.is_available():
        return True
    needed = sum(map(measure.nbytes, operands)) + 3 * measure.nbytes(node.meta["val"])
    if torch.cuda.is_current_stream_capturing() or needed > _MEMORY_SHARE * measure.free_bytes(device):
        choices.momentary()
        return False
    key = (device, str(_flags()), str(node.args[3:9]), *(f"{each.shape} {each.stride()}" for each in operands))
    if key not in _known:
        try:
            _known[key] = _found_earlier(key) or _found_now(key, operands, node.args[3:9])
        except RuntimeError:  # no memory after all, or no kernel for full precision
            choices.momentary()
            return False
    return _known[key] == _TF32


def _found_earlier(key: _Key) -> str | None:
    """What an earlier process found: trying a convolution takes as long as all else that a process with a filled cache does."""
    record = choices.lookup(_key_on_disk(key))
    return None if record is None else str(record.choice["chosen"])


def _found_now(key: _Key, operands: Sequence[torch.Tensor], geometry: Sequence[Any]) -> str:
    device = key[0]
    found = _TF32 if differs_from_float32(operands, geometry, device) else _FLOAT32
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    record = choices.Record("convolution", torch.cuda.get_device_name(device), "", now, {"chosen": found})
    choices.store(_key_on_disk(key), record)
    return found


def _flags() -> tuple[bool, bool, bool]:
    """What else cuDNN's choice of a kernel depends on, in the order in which ``aten._convolution`` takes it."""
    cudnn = torch.backends.cudnn
    return (cudnn.benchmark, cudnn.deterministic, cudnn.enabled)


def _key_on_disk(key: _Key) -> str:
    device, *convolution = key
    return choices.key_of(
        {
            "rounding": convolution,
            "device": torch.cuda.get_device_name(device),
            "versions": [torch.__version__, torch.backends.cudnn.version()],
        }
    )


def differs_from_float32(operands: Sequence[torch.Tensor], geometry: Sequence[Any], device: torch.device) -> bool:
    """Whether a convolution on `device` is less exact than float32 arithmetic is.

    Args:
        operands: descriptions of input and weight.
        geometry: what ``aten.convolution`` takes after the bias.
    """
    with measure.as_compiled_code_runs(device):
        x, weight = measure.made_up(operands, device)
        weight -= 0.75  # of both signs, so that sums do not hide the rounding
        exact = torch.ops.aten._convolution.default(x, weight, None, *geometry, *_flags(), False)
        plain = torch.ops.aten.convolution.default(x, weight, None, *geometry)
        return bool((plain - exact).norm() > _TF32_ROUNDING * exact.norm())
