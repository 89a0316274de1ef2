"""Operators that do not depend on each other and go over the same memory: one kernel does for all of them."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence

import torch
from torch import fx
from torch._ops import OpOverload

from fusepass.codegen.ir.program import FEW_POINTS
from fusepass.patterns.aliasing import is_view
from fusepass.patterns.copies import resamples
from fusepass.patterns.dataflow import Candidate, Unit
from fusepass.patterns.effects import is_constant_number
from fusepass.patterns.opclass import OpClass, is_elementwise, made_of, module_of
from fusepass.patterns.region import Region
from fusepass.patterns.traffic import users_among

Elements = tuple[str, torch.Size, tuple[int, ...]]
Ground = fx.Node | Elements
"""What a kernel goes over: all of a value, or the elements of results by device, shape and strides."""

_IN_PLACE = frozenset({"activations", "pointwise"})
"""The modules of `fusepass.codegen.lowering` that express functions of elements, also such as PyTorch has no tag for."""


def grounds(candidate: Candidate, region: Region, *, alone: bool = False) -> tuple[Ground, ...]:
    """What `region`, made of `candidate`, goes over, and what independent operators beside them of it go over, too.

    One that is `alone`, an operator that is no region by itself, has independent operators beside them over values only.
    """
    elements = None if alone else _elements(region)
    return (*_values(candidate, region), *([] if elements is None else [elements]))


def shared(ground: Ground, region: Region) -> Sequence[Hashable]:
    """What two regions over `ground` have one of in common if they are better as one: one reading serves both, or they have few elements."""
    if isinstance(ground, fx.Node):
        return (ground,)
    _, shape, _ = ground
    if shape.numel() <= FEW_POINTS:
        return (ground,)
    return [(ground, node) for node in region.inputs if node.meta["val"].shape == shape]


def _values(candidate: Candidate, region: Region) -> list[fx.Node]:
    """The values that `region` reads whole, and that are as large as all else that it reads or gives."""
    if not all(map(_stays_in_place, candidate.units)):
        return []
    nodes, views = set(region.nodes), candidate.flow.views
    sizes = {node: node.meta["val"].numel() for node in (*region.inputs, *region.outputs)}
    most = max(sizes.values(), default=0)
    large = (node for node in region.inputs if sizes[node] == most and not is_constant_number(node))
    return [node for node in large if _elements_read(node, nodes, views) >= most]


def _stays_in_place(unit: Unit) -> bool:
    """Whether a kernel for `unit` meets each element of what it reads once, at its own place: no products, windows, running values, or
    elements that are looked up.
    """
    if unit.op_class is not OpClass.POINTWISE:
        return unit.op_class in (OpClass.REDUCTION, OpClass.NORMALISATION)
    return all(map(is_in_place, made_of(unit.node))) and not resamples(unit.node)


def is_in_place(target: OpOverload) -> bool:
    """Whether each element of the result of `target` is made of those at its own place, or seen anew there."""
    return module_of(target) in _IN_PLACE or is_elementwise(target) or is_view(target)


def _elements_read(node: fx.Node, nodes: Collection[fx.Node], views: Collection[fx.Node]) -> int:
    """How many elements of `node` operators among `nodes` read, perhaps through views, of which different ones are taken for different parts."""
    users = users_among(node, nodes)
    value = node.meta.get("val")
    size = value.numel() if isinstance(value, torch.Tensor) else 0
    if size and any(user not in views for user in users):
        return size
    parts = {(user.target, user.args): user for user in users}
    read = sum(_elements_read(user, nodes, views) for user in parts.values())
    return min(read, size) if size else read


def _elements(region: Region) -> Elements | None:
    """What a region of pointwise operators walks: device, shape and stride of its results, if all have the same."""
    if region.pattern != "pointwise":
        return None
    results = [node.meta["val"] for node in region.outputs]
    kinds = {(str(result.device), result.shape, result.stride()) for result in results}
    return kinds.pop() if len(kinds) == 1 else None
