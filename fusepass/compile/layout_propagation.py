"""Activations on their way from one region to another region's convolution, written as its library call reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx
from torch._ops import OpOverload

from fusepass.codegen.lowering.formats import AnchorFormat, is_channels_last
from fusepass.codegen.lowering.tracer import Spec
from fusepass.patterns.opclass import OpClass, direct_class
from fusepass.patterns.partition import Region
from fusepass.patterns.relaid import channels_last

Layouts = dict[fx.Node, Spec]
"""Descriptions of values before they were laid out differently."""


def hand_over(regions: Sequence[Region], formats: Mapping[str, AnchorFormat]) -> Layouts:
    """Describe what only convolutions that run channels last, and pointwise operators of regions, read as channels last.

    Nobody else may see such a value: not the caller, no operator that runs as it is, no view.

    Args:
        regions: disjoint, of one graph; ``meta["val"]`` of values that change is replaced.
        formats: of the convolution of each region that has one, by the region's name.

    Returns:
        The values that changed, as they were described before.
    """
    readers = {
        region.anchor
        for region in regions
        if region.anchor is not None and formats.get(region.name) is AnchorFormat.CHANNELS_LAST
    }
    inside = {node for region in regions for node in region.nodes}
    changed: Layouts = {}
    for node in (output for region in regions for output in region.outputs):
        value, users = node.meta["val"], list(node.users)
        wanted = any(user in readers and user.args[0] is node for user in users)
        allowed = all(_reads_any_layout(user, node, readers, inside) for user in users)
        if wanted and allowed and type(value) is Spec and not is_channels_last(value.shape, value.stride()):
            changed[node] = value
            node.meta["val"] = channels_last(value)
    return changed


def _reads_any_layout(user: fx.Node, value: fx.Node, readers: set[fx.Node], inside: set[fx.Node]) -> bool:
    if user in readers:
        return [arg for arg in user.all_input_nodes if arg is value] == [value] and user.args[0] is value
    target = user.target
    return user in inside and isinstance(target, OpOverload) and direct_class(target) is OpClass.POINTWISE
