"""How much there is to do for a convolution, its gradient or a matrix product, and whether that is worth other kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fusepass.codegen.ir.convolution import has_few_results
from fusepass.codegen.ir.vectors import ACCESS
from fusepass.patterns.traffic import nbytes

HALVES = (torch.float16, torch.bfloat16)

_LARGE_OF_HALVES = 2**28
"""Multiplications from which on a convolution of halves is: libraries take some 20 microseconds for so many, tensor cores one."""

_WIDE_OF_HALVES = 2**25
"""Bytes of its tensors from which on it is, too: as long for memory. Libraries take many times as long for few channels."""

_LARGE_OF_WEIGHTS = 2**24
"""Bytes of its tensors from which on the gradient of a convolution's weight is."""

_LARGE_PRODUCT = 2**28
"""Multiplications from which on a matrix product is: some 10 microseconds of a large GPU without its tensor cores."""

_LARGE_PRODUCT_OF_HALVES = 2**30
"""The same of halves: some 50 microseconds, by the library's kernels for operands that lie badly."""


def is_large(anchor: fx.Node) -> bool:
    """Whether an anchor takes so long that another kernel for it is worth a build.

    Convolutions of float32 do, large ones of halves, and large matrix products of float32, or of halves whose rows do not all begin with
    whole accesses: libraries take several times as long for these.
    """
    if anchor.target is torch.ops.aten.convolution_backward.default:
        return is_large_of_weights(anchor)
    result: torch.Tensor = anchor.meta["val"]
    if anchor.target in (torch.ops.aten.convolution.default, torch.ops.aten._convolution.default):
        return result.dtype is torch.float32 or (
            result.dtype in HALVES and (is_large_of_halves(anchor) or gives_few_results(anchor))
        )
    left = anchor.args[-2]
    assert isinstance(left, fx.Node)
    products: int = result.numel() * left.meta["val"].shape[-1]
    if result.dtype in HALVES:
        return products >= _LARGE_PRODUCT_OF_HALVES and not all(map(_lies_well, (*anchor.args[-2:], anchor)))
    return result.dtype is torch.float32 and products >= _LARGE_PRODUCT


def _lies_well(matrix: Any) -> bool:
    """Whether rows of a matrix, or its columns, begin with whole accesses."""
    value: torch.Tensor = matrix.meta["val"]
    apart = [stride for stride in value.stride()[-2:] if stride != 1]
    return all(stride * value.itemsize % ACCESS == 0 for stride in apart)


def is_large_of_halves(convolution: fx.Node) -> bool:
    """Whether an `aten.convolution` of halves takes so long that another kernel for it is worth a build."""
    return moved(convolution) >= _WIDE_OF_HALVES or multiplications(convolution) >= _LARGE_OF_HALVES


def is_large_of_weights(gradient: fx.Node) -> bool:
    """Whether an `aten.convolution_backward` of halves, in images, takes so long that converting layouts for it is worth a build."""
    given = [node.meta["val"] for node in gradient.all_input_nodes[:2]]
    images = all(each.dtype in HALVES and each.dim() == 4 for each in given)
    return images and sum(map(nbytes, given)) >= _LARGE_OF_WEIGHTS


def gives_few_results(convolution: fx.Node) -> bool:
    """Whether an `aten.convolution` may be plain arithmetic, as it is to few channels."""
    arguments: tuple[Any, ...] = convolution.args
    weight, stride, transposed, groups = arguments[1].meta["val"], arguments[3], arguments[6], arguments[8]
    results = convolution.meta["val"].shape[1]
    return groups == 1 and has_few_results(results, weight.shape[2:], stride if transposed else (1,))


def moved(convolution: fx.Node) -> int:
    """Bytes of the tensors of an `aten.convolution`, its bias apart."""
    return sum(nbytes(node.meta["val"]) for node in (*convolution.all_input_nodes[:2], convolution))


def multiplications(convolution: fx.Node) -> int:
    """Of an `aten.convolution`: each weight meets each position of the result, or of the input where it is transposed."""
    arguments: tuple[Any, ...] = convolution.args
    x, weight = (node.meta["val"] for node in arguments[:2])
    over = x if arguments[6] else convolution.meta["val"]
    found: int = weight.numel() * over.numel() // max(over.shape[1], 1)
    return found
