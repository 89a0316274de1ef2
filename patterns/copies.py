"""Operators whose results stand elsewhere than their sources, and how."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx
from torch._ops import OpOverload

from fusepass.patterns.aliasing import is_view
from fusepass.patterns.memo import remembered
from fusepass.patterns.opclass import made_of, module_of

aten = torch.ops.aten

_PLAIN = frozenset({aten.clone.default, aten._to_copy.default, aten.copy.default})
"""Operators whose results have the elements of a tensor in its order, if maybe not in its layout."""

_MOVING = frozenset({"padding", "views", "writes"})
"""The modules of `fusepass.codegen.lowering` that express operators which put elements elsewhere, or a number in their place."""


def moves(node: fx.Node) -> bool:
    """Whether `node`, an operator that code generation expresses, computes nothing: its elements are those of tensors, or a number."""
    return not _is_tagged(node) and all(map(_moves, made_of(node)))


def resamples(node: fx.Node) -> bool:
    """Whether elements of `node` are functions of elements at other places, which do not come from data: upsampling, a gated half."""
    result = node.meta["val"]
    if _is_tagged(node) or not isinstance(result, torch.Tensor):
        return False
    elsewhere = all(source.shape != result.shape for source in _sources(node))
    return elsewhere and not any(map(_looks_up, made_of(node)))


def broadcasts(node: fx.Node) -> bool:
    """Whether `node`, an operator that code generation expresses, is a function of elements of tensors that do not all lie as its result
    does: PyTorch finds the place of each element of each of them then.
    """
    result = node.meta["val"]
    if moves(node) or not isinstance(result, torch.Tensor) or any(map(_looks_up, made_of(node))):
        return False
    return any(source.numel() > 1 and _steps(source) != _steps(result) for source in _sources(node))


def lies_alike(node: fx.Node) -> bool:
    """Whether `node` is a copy into the layout that its source has: PyTorch makes it at the memory's rate."""
    if node.target not in _PLAIN:
        return False
    result = node.meta["val"]
    return all(_steps(source) == _steps(result) for source in _sources(node))


def widens(node: fx.Node) -> bool:
    """Whether elements of `node` have more bytes than those of a source, as floats made of halves have, which PyTorch's kernels on CUDA make
    at 60 % of the memory's rate on an H100.
    """
    return any(source.itemsize < node.meta["val"].itemsize for source in _sources(node))


def lies_across(node: fx.Node) -> bool:
    """Whether some source of `node` has neighbours in memory along another dimension than its result has."""
    result = node.meta["val"]
    alike = (source for source in _sources(node) if source.dim() == result.dim())
    return any(_innermost(source) != _innermost(result) for source in alike)


def _is_tagged(node: fx.Node) -> bool:
    """Whether PyTorch calls `node` a function of elements; it says so of some copies."""
    assert isinstance(node.target, OpOverload)
    return torch.Tag.pointwise in node.target.tags and node.target not in _PLAIN


@remembered
def _moves(target: OpOverload) -> bool:
    return target in _PLAIN or is_view(target) or module_of(target) in _MOVING


def _looks_up(target: OpOverload) -> bool:
    return module_of(target) == "gathers"


def _sources(node: fx.Node) -> Iterator[torch.Tensor]:
    return (source.meta["val"] for source in node.all_input_nodes)


def _steps(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Size and stride of the dimensions of more than one element."""
    return [(size, step) for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]


def _innermost(tensor: torch.Tensor) -> int | None:
    """The dimension whose elements are nearest in memory, the last of several; None where there is one element."""
    steps = tensor.stride()
    found = (number for number in reversed(range(tensor.dim())) if steps[number] and tensor.shape[number] != 1)
    return min(found, key=steps.__getitem__, default=None)
