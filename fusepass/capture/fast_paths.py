"""What PyTorch's modules for attention compute in inference, of which tracing does not see anything.

`nn.MultiheadAttention` and `nn.TransformerEncoderLayer` call kernels of their own there, but not while they are traced: then they take
another path, whose results lie in another order, and are zero instead of NaN where all keys are masked. They note why they do not call
their kernels. Where that is tracing alone, what is traced here gives the kernels' results.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_ATTENTION, _LAYER = nn.MultiheadAttention.forward.__code__, nn.TransformerEncoderLayer.forward.__code__
_NOTES = {_ATTENTION: "why_not_fast_path", _LAYER: "why_not_sparsity_fast_path"}
"""The local variables that have the reason, by the code of the modules."""

_TRACING = frozenset({"some Tensor argument has_torch_function", "we are running make_fx tracing"})
_BETWEEN = tuple(f"{Path(file).parent}{os.sep}" for file in (__file__, torch.__file__))


def called_as_in_inference(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of ``func(*args, **kwargs)``, or of what the kernel of the module that calls it has in its place."""
    if func is F.multi_head_attention_forward and _skips_its_kernel(_ATTENTION):
        given = signature(func).bind(*args, **kwargs)
        given.apply_defaults()
        if given.arguments["in_proj_bias"] is not None and _masks_fit(given.arguments):
            return _attention(given.arguments)
    result = func(*args, **kwargs)
    if func is torch.Tensor.add and _skips_its_kernel(_LAYER):  # a residual sum
        return result.contiguous()
    return result


def _skips_its_kernel(code: CodeType) -> bool:
    """Whether the module that calls has this `code`, and tracing alone keeps it, or the layer around it, from calling a kernel."""
    callers = list(_callers())
    reasons = (caller.f_locals.get(_NOTES[caller.f_code]) for caller in callers)
    return bool(callers) and callers[0].f_code is code and not _TRACING.isdisjoint(reasons)


def _callers() -> Iterator[FrameType]:
    """The modules for attention that call, innermost first, with nothing but PyTorch's own Python between them."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        if frame.f_code in _NOTES:
            yield frame
        frame = frame.f_back


def _attention(given: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Several heads of attention of (length, batch, width), as results of `F.multi_head_attention_forward`, but in the order of batches."""
    heads, weighs = given["num_heads"], given["need_weights"]
    x = given["query"].transpose(0, 1)
    batch, length, width = x.shape
    projected = F.linear(x, given["in_proj_weight"], given["in_proj_bias"])
    query, key, value = projected.view(batch, length, 3, heads, width // heads).permute(2, 0, 3, 1, 4).unbind()
    mask, weights = _mask(given, batch, heads), None
    causal = given["is_causal"] and mask is not None and given["key_padding_mask"] is None
    if not weighs and (mask is None or causal):
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=causal)
    else:
        scores = (query * (1 / math.sqrt(width // heads))) @ key.transpose(-2, -1)
        weights = (scores if mask is None else scores + mask).softmax(-1)
        attended = weights @ value
    attended = attended.transpose(1, 2).reshape(batch, length, width)
    result = F.linear(attended, given["out_proj_weight"], given["out_proj_bias"]).transpose(0, 1)
    if weights is None or not weighs:
        return result, None
    return result, weights.mean(1) if given["average_attn_weights"] else weights


def _masks_fit(given: dict[str, Any]) -> bool:
    """Whether masks are of the shapes that modules take; of others the function says what is wrong."""
    length, batch, _ = given["query"].shape
    mask, padding = given["attn_mask"], given["key_padding_mask"]
    fits = mask is None or mask.shape in ((length, length), (batch * given["num_heads"], length, length))
    return fits and (padding is None or padding.shape == (batch, length))


def _mask(given: dict[str, Any], batch: int, heads: int) -> Tensor | None:
    """What is added to scores of (batch, heads, length, length)."""
    mask: Tensor | None = given["attn_mask"]
    padding: Tensor | None = given["key_padding_mask"]
    if mask is not None and mask.dim() == 3:
        mask = mask.view(batch, heads, *mask.shape[1:])
    if padding is None:
        return mask
    padding = padding.view(batch, 1, 1, -1)
    return padding if mask is None else mask + padding
