"""The ways in which a region may be generated, ranked: the one to choose without a measurement first.

They differ in the memory format in which the library runs a convolution, and in who computes the region's anchor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.convolution import (
    Convolution,
    few_channels,
    few_halves,
    fill_halves,
    holds_weights,
    is_plain_product,
    takes_output_tiles,
    tiled_halves,
)
from fusepass.codegen.ir.dtype import Precision
from fusepass.codegen.lowering.formats import MEMORY_FORMATS, AnchorFormat, is_channels_last, lies
from fusepass.codegen.passes.anchors import AnchorSource
from fusepass.codegen.passes.few_columns import MOST_COLUMNS
from fusepass.codegen.passes.geometry import per_axis
from fusepass.codegen.search.candidate import CandidateSpec
from fusepass.codegen.search.rounding import rounds_to_tf32
from fusepass.codegen.search.worth import AnchorCost
from fusepass.codegen.source import Target
from fusepass.patterns.anchor_work import (
    HALVES,
    gives_few_results,
    is_large_of_halves,
    is_large_of_weights,
    moved,
    multiplications,
)
from fusepass.patterns.cost import cost
from fusepass.patterns.opclass import OpClass, direct_class
from fusepass.patterns.rates import tf32_convolutions

_CONVOLUTION = torch.ops.aten.convolution.default
_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
_LEAST_READ = 1 << 22  # bytes of the left operand of a product of few columns: less takes no longer than a launch
_WEIGHT_GRADIENT = torch.ops.aten.convolution_backward.default
_MAPPING = (OpClass.POINTWISE, OpClass.VIEW)  # anything else, decomposed operators among it, may need several elements
_ACCESS = 16  # bytes that a thread loads at once

_LEAST_FLOAT32 = 16  # input channels
_LEAST_HALVED = 1.5e9  # floating-point operations: libraries take some 30 us for so many, products and their six small kernels as long
_LEAST_FEW = 5e8  # the same of few channels, which take longer
_LEAST_OTHERS, _LEAST_OTHERS_FEW = (
    8e9,
    2e9,
)  # from which on other ways to multiply halves may gain what they take to build
_MULTIPLIED = 1.8e14 / 132  # operations a second of a multiprocessor of an H100, in generated convolutions of TF32
_LONGER = 2  # times as long as memory takes: from there on products of halves were faster
_MOST_TILED = 64  # input channels of halves as they are, of which a tile may be better than panels


def search_space(graph: fx.GraphModule, facts: DeviceFacts, effort: str) -> tuple[CandidateSpec, ...]:
    """The candidates that are worth a try for a region, the one to choose without a measurement first.

    `effort` is `Config.tune`: ``"off"`` tries nothing, ``"max"`` everything. ``"fast"`` tries the anchor in both
    implementations, and the other memory format where the rule for it (`anchor_formats`) is least sure: on CUDA,
    where tensor cores may compute a convolution in either. A depthwise one of what lies channels last is also tried on a
    copy that lies channel by channel. One that is a matrix product of its tensors is also tried as that, as they lie. One to
    few channels is also tried as plain arithmetic. A large convolution of halves, or that has few channels or may be rounded
    to TF32, is also tried as a product of halves, in one way or several. Two candidates may turn out to be the same program.
    """
    first, *others = anchor_formats(graph, facts)
    anchored = facts.target is Target.CUDA and any(_is_anchor(node) for node in graph.graph.nodes)
    every = (AnchorSource.PREFERRED, AnchorSource.LIBRARY, AnchorSource.GENERATED)
    anchors = every if anchored else every[:1]
    ranked = [CandidateSpec(first, anchor) for anchor in anchors]
    if effort == "fast":
        ranked += [CandidateSpec(other, AnchorSource.PREFERRED) for other in others if _is_unsure(graph, facts)]
    else:
        ranked += [CandidateSpec(other, anchor) for other in others for anchor in anchors]
    if anchored and first is not AnchorFormat.CALLER and _is_plain_product(graph):
        ranked.append(CandidateSpec(AnchorFormat.CALLER, AnchorSource.GENERATED))
    few = map(gives_few_results, graph.graph.find_nodes(op="call_function", target=_CONVOLUTION))
    if anchored and (any(few) or any(map(_has_few_columns, graph.graph.nodes))):
        ranked.append(CandidateSpec(AnchorFormat.CALLER, AnchorSource.ARITHMETIC))
    if anchored and _is_depthwise_across(graph):
        ranked.append(CandidateSpec(AnchorFormat.CHANNELS_FIRST, AnchorSource.GENERATED))
    if _suits_halves(graph, facts):
        ranked += [CandidateSpec(AnchorFormat.CALLER, anchor) for anchor in _halves(graph)]
    return tuple(ranked[:1] if effort == "off" else dict.fromkeys(ranked))


def is_precise(spec: CandidateSpec, graph: fx.GraphModule, facts: DeviceFacts) -> bool:
    """Whether a candidate but the first one has the precision of the region's own operators.

    Float32 convolutions on tensor cores round to TF32 channels last, wherever that is allowed; see `anchor_formats`.
    """
    if facts.target is not Target.CUDA or spec.anchor_format is not AnchorFormat.CHANNELS_LAST:
        return True
    nodes = graph.graph.find_nodes(op="call_function", target=_CONVOLUTION)
    rounded = nodes and nodes[0].args[0].meta["val"].dtype is torch.float32 and tf32_convolutions()
    return not rounded or rounds_to_tf32(nodes[0])


def anchor_cost(anchor: fx.Node | None, facts: DeviceFacts) -> AnchorCost:
    """What the comparison of candidates needs to know of a region's `anchor`, if it has one."""
    if anchor is None or facts.target is not Target.CUDA:
        return AnchorCost()
    waits = False
    if anchor.target is _CONVOLUTION:
        seconds = 2 * multiplications(anchor) / (_MULTIPLIED * facts.multiprocessors)
        waits = seconds < _LONGER * moved(anchor) / facts.bandwidth
    return AnchorCost(cost([anchor]).flops, waits)


def _operands(node: fx.Node) -> list[Any]:
    """The tensors that `node` reads, in order, each as often as it does."""
    return [each.meta["val"] for each in node.args if isinstance(each, fx.Node)]


def _has_few_columns(node: fx.Node) -> bool:
    """Whether `node` is a product of few columns that may be sums along rows, of which there is much to read."""
    if node.target not in _PRODUCTS:
        return False
    left, result = _operands(node)[-2], node.meta["val"]
    return bool(0 < result.shape[-1] <= MOST_COLUMNS and left.numel() * left.element_size() >= _LEAST_READ)


def _is_anchor(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and direct_class(node.target) is OpClass.ANCHOR


def handed_format(graph: fx.GraphModule, facts: DeviceFacts, effort: str) -> AnchorFormat:
    """The format in which other regions should leave the input of a region's convolution: that of its first candidate.

    Where products of float32 tensors as they lie, or of scaled halves, are tried on Hopper, these are as a rule the fastest. They
    take tensors along positions, so nothing is handed over. Products of halves take them channels last without packing.
    """
    nodes = graph.graph.find_nodes(op="call_function", target=_CONVOLUTION)
    halves = any(node.args[0].meta["val"].dtype in HALVES for node in nodes)
    tried = _suits_halves(graph, facts) or _is_plain_product(graph)
    multiplied = facts.warp_groups and tried and not halves
    return AnchorFormat.CALLER if multiplied and effort != "off" else anchor_formats(graph, facts)[0]


def anchor_formats(graph: fx.GraphModule, facts: DeviceFacts) -> tuple[AnchorFormat, ...]:
    """The formats that the convolution of a region may run in, the one to choose without a measurement first.

    There is a choice where a region has one two- or three-dimensional convolution whose result would not lie channels
    last anyway, or the gradient of a two-dimensional one's weight, of halves. The rule for the first, after
    TorchInductor's ``decide_layout_opt``: on CUDA, cuDNN's fastest kernels for tensor cores work channels last and
    surround themselves with conversions otherwise, so two-dimensional convolutions go channels last. They stay where

    - they have groups (cuDNN's grouped kernels are slower channels last);
    - the channels of a pixel of the input or the result are not whole accesses of 16 bytes, so that the library pads
      or takes slower kernels;
    - the library's kernel in the caller's format does not round float32 to TF32, as the channels-last kernels do: with
      few input channels, or few positions;
    - generated code does them (`few_channels`);
    - the result has one pixel per channel, where both formats are the same;
    - the region reduces or pools, and reads something else as large that does not lie channels last: such kernels do
      not exchange tiles of what they load;
    - numbers are float32 and TF32 is not allowed: no tensor core, hence no conversion to avoid. float64 has no
      channels-last kernels at all.

    Three-dimensional ones stay, too: which format wins there differs from case to case. An input that lies channels
    last already decides for it. Gradients of weights go channels last unless they are matrix products: other kernels
    take as long for each channel as for all (depthwise ones), or convert layouts.
    """
    nodes = graph.graph.find_nodes(op="call_function", target=_CONVOLUTION)
    gradients = graph.graph.find_nodes(op="call_function", target=_WEIGHT_GRADIENT)
    if facts.target is Target.CUDA and any(map(is_large_of_weights, gradients)):
        return _gradient_formats(gradients[0])
    if len(nodes) != 1:
        return (AnchorFormat.CALLER,)
    (node,) = nodes
    x, result = node.args[0].meta["val"], node.meta["val"]
    if x.dim() not in MEMORY_FORMATS or x.dtype is torch.float64 or x.numel() == 0 or result.numel() == 0:
        return (AnchorFormat.CALLER,)
    if is_channels_last(result.shape, result.stride()):
        return (AnchorFormat.CALLER,)
    last = is_channels_last(x.shape, x.stride())
    if last or (
        facts.target is Target.CUDA and _prefers_channels_last(node) and not _reduces_another_layout(graph, node)
    ):
        return (AnchorFormat.CHANNELS_LAST, AnchorFormat.CALLER)
    return (AnchorFormat.CALLER, AnchorFormat.CHANNELS_LAST)


def _gradient_formats(node: fx.Node) -> tuple[AnchorFormat, ...]:
    """The formats for the gradient of a weight."""
    given = _operands(node)
    if all(is_channels_last(each.shape, each.stride()) for each in given[:2]):
        return (AnchorFormat.CALLER,)
    taps = given[2].shape[2:].numel()
    formats = (AnchorFormat.CHANNELS_LAST, AnchorFormat.CALLER)
    return formats if taps > 1 else formats[::-1]


def _is_unsure(graph: fx.GraphModule, facts: DeviceFacts) -> bool:
    """Whether a convolution, or a gradient, may well be faster in the format that the rule does not choose."""
    if graph.graph.find_nodes(op="call_function", target=_WEIGHT_GRADIENT):
        return True
    (node,) = graph.graph.find_nodes(op="call_function", target=_CONVOLUTION)
    x, groups = node.args[0].meta["val"], node.args[8]
    if facts.target is not Target.CUDA or is_channels_last(x.shape, x.stride()):
        return False
    # Of few channels the library's kernels are slow in either format.
    return _suits_tensor_cores(node) or (x.dtype in HALVES and groups == 1 and is_large_of_halves(node))


def _suits_halves(graph: fx.GraphModule, facts: DeviceFacts) -> bool:
    """Whether a region has a large convolution that may be a product of halves: of halves, of few channels, or rounded to TF32."""
    nodes = graph.graph.find_nodes(op="call_function", target=_CONVOLUTION)
    if not facts.warp_groups or len(nodes) != 1:
        return False
    (node,) = nodes
    x, stride, transposed, groups = node.args[0].meta["val"], node.args[3], node.args[6], node.args[8]
    if x.dtype not in (torch.float32, *HALVES) or groups != 1:
        return False
    work = 2 * multiplications(node)
    if x.dtype in HALVES:
        return is_large_of_halves(node) and not _is_plain_product(graph)
    if few_halves(x.shape[1], (1,) if transposed else stride):
        return work >= _LEAST_FEW
    return tf32_convolutions() and fill_halves(x.shape[1]) and work >= _LEAST_HALVED


def _is_plain_product(graph: fx.GraphModule) -> bool:
    """Whether the region's anchor is a convolution of float32 or halves that is a matrix product of its tensors."""
    for node in graph.graph.find_nodes(op="call_function", target=_CONVOLUTION):
        x, weight, result = (each.meta["val"] for each in (*node.args[:2], node))
        stride, padding, transposed, groups = (node.args[place] for place in (3, 4, 6, 8))
        source, kernel, made = (tensor.shape[2:] for tensor in (x, weight, result))
        plain = is_plain_product(source, kernel, made, stride, padding, groups, transposed)
        plain = plain or takes_output_tiles(_anchor(node), kernel, x.stride(-1), x.itemsize)
        return plain and weight.dtype in (torch.float32, *HALVES)
    return False


def _is_depthwise_across(graph: fx.GraphModule) -> bool:
    """Whether the region's anchor is a depthwise convolution of what does not lie channel by channel, as generated windows want it."""
    for node in graph.graph.find_nodes(op="call_function", target=_CONVOLUTION):
        x, groups = node.args[0].meta["val"], node.args[8]
        return 1 < groups == x.shape[1] and not lies(AnchorFormat.CHANNELS_FIRST, x.shape, x.stride())
    return False


def _halves(graph: fx.GraphModule) -> list[AnchorSource]:
    """The ways in which halves of such a region's convolution may be multiplied."""
    (node,) = graph.graph.find_nodes(op="call_function", target=_CONVOLUTION)
    x, stride, transposed = node.args[0].meta["val"], node.args[3], node.args[6]
    read = (1,) if transposed else stride
    least = _LEAST_OTHERS_FEW if few_halves(x.shape[1], read) else _LEAST_OTHERS
    of_halves = x.dtype in HALVES
    worth = x.shape[1] <= _MOST_TILED if of_halves else 2 * multiplications(node) >= least
    if not worth:
        return [AnchorSource.HALVES]
    found = [AnchorSource.HALVES, *([AnchorSource.TILED_HALVES] if tiled_halves(x.shape[1], read) else [])]
    return [*found, *([AnchorSource.REGISTER_STATIONARY] if not of_halves and _may_hold(node) else [])]


def _may_hold(node: fx.Node) -> bool:
    """Whether a convolution of few channels may keep its weights in registers, at least with one half for a number."""
    anchor = _anchor(node)
    x, weight = _operands(node)[:2]
    return few_halves(x.shape[1], anchor.step) and holds_weights(anchor, weight.shape)


def _anchor(node: fx.Node) -> Convolution:
    """An `aten.convolution` as an anchor of no buffers, with one half for a number."""
    arguments: tuple[Any, ...] = node.args
    _, weight, _, stride, padding, dilation, transposed, _, groups = arguments
    axes = weight.meta["val"].dim() - 2
    steps, border, apart = (per_axis(tuple(each), axes) for each in (stride, padding, dilation))
    return Convolution("", "", "", steps, border, apart, bool(transposed), Precision.TF32, warps=4, groups=groups)


def _prefers_channels_last(node: fx.Node) -> bool:
    x = node.args[0].meta["val"]  # type: ignore[union-attr]
    if x.dim() != 4 or not _suits_tensor_cores(node):
        return False
    return x.dtype is not torch.float32 or rounds_to_tf32(node)


def _suits_tensor_cores(node: fx.Node) -> bool:
    """Whether types and sizes are such that the library's channels-last kernels run on tensor cores."""
    x, result = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    stride, transposed, groups = node.args[3], node.args[6], node.args[8]
    if groups != 1 or any(each.shape[1] * each.itemsize % _ACCESS for each in (x, result)):
        return False
    few = few_channels(x.shape[1], stride if transposed else (1,))  # type: ignore[arg-type]
    return x.dtype is not torch.float32 or (tf32_convolutions() and x.shape[1] >= _LEAST_FLOAT32 and not few)


def library_rounds(graph: fx.GraphModule, facts: DeviceFacts) -> bool:
    """Whether the library rounds the operands of a region's float32 convolution to TF32; False where there is none."""
    nodes = graph.graph.find_nodes(op="call_function", target=_CONVOLUTION)
    if facts.target is not Target.CUDA or len(nodes) != 1 or nodes[0].args[0].meta["val"].dtype is not torch.float32:
        return False
    return tf32_convolutions() and rounds_to_tf32(nodes[0])


def _reduces_another_layout(graph: fx.GraphModule, anchor: fx.Node) -> bool:
    """Whether operators that do more than map elements may read another large input that does not lie channels last."""
    targets = {node.target for node in graph.graph.nodes if node is not anchor}
    if all(direct_class(target) in _MAPPING for target in targets if isinstance(target, OpOverload)):
        return False
    result = anchor.meta["val"]
    for node in graph.graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        large = value.dim() == result.dim() and 4 * value.numel() >= result.numel()
        read = large and any(user is not anchor for user in node.users)
        if read and not is_channels_last(value.shape, value.stride()):
            return True
    return False
