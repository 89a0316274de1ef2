"""What operators cost, by a simple model: the gate that every rewrite has to pass.

Convolutions and matrix products are calls of a library: they read their operands from memory and write their result,
which what follows reads again. Pointwise operators and views become part of the kernel that makes or reads their
operands: they move nothing of their own between neighbours. Reductions, normalisations and pools are kernels that take
the pointwise operators around them in.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload, OpOverloadPacket

from fusepass.codegen.lowering.tracer import results_of
from fusepass.patterns.aliasing import is_view
from fusepass.patterns.arguments import arguments
from fusepass.patterns.dataflow import has_effect
from fusepass.patterns.memo import remembered
from fusepass.patterns.opclass import OpClass, direct_class
from fusepass.patterns.rates import RATES
from fusepass.patterns.traffic import nbytes

aten = torch.ops.aten


@dataclass(frozen=True)
class Cost:
    """What a set of operators costs.

    Attributes:
        seconds: estimated time; good for comparisons only.
        flops: floating-point operations.
        bytes: memory traffic.
    """

    seconds: float = 0.0
    flops: int = 0
    bytes: int = 0


NOTHING = Cost()
"""What no operators cost."""


CHEAP = 1
COSTLY = 10
"""Operations for one element of a pointwise operator: of a copy or simple arithmetic, and of a root, a quotient, an exponential."""

_SIMPLE = frozenset(
    {
        aten.add, aten.sub, aten.rsub, aten.mul, aten.neg, aten.abs, aten.relu, aten.clamp, aten.clamp_min, aten.clamp_max,
        aten.hardtanh, aten.maximum, aten.minimum, aten.where, aten.sign, aten.leaky_relu, aten.threshold, aten.masked_fill,
        aten.clone, aten._to_copy, aten.copy, aten.cat, aten.constant_pad_nd, aten.lift_fresh_copy,
        aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge, aten.isnan, aten.logical_not, aten.addcmul,
    }
)  # fmt: skip


_FILLS = frozenset({aten.full_like, aten.zeros_like, aten.ones_like, aten.full, aten.zeros, aten.ones})


class _Kind(enum.Enum):
    FREE = "view, or a result of several"
    POINTWISE = "pointwise"
    SWEEP = "reduction, normalisation, pool or scan"
    PRODUCT = "convolution or matrix product"
    OTHER = "any other operator"


_FUSING = (_Kind.POINTWISE, _Kind.SWEEP)
_SWEEPS = (OpClass.REDUCTION, OpClass.NORMALISATION, OpClass.POOLING, OpClass.SCAN)
_CONVOLUTIONS = frozenset({aten.convolution, aten._convolution, aten.convolution_backward})
_ATTENTION = frozenset(
    {
        aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_efficient_attention,
        aten._scaled_dot_product_cudnn_attention, aten._scaled_dot_product_flash_attention_for_cpu,
    }
)  # fmt: skip
_CONTRACTED = {aten.mm: 0, aten.bmm: 0, aten.mv: 0, aten.dot: 0, aten.addmm: 1, aten.baddbmm: 1, aten.addmv: 1}
"""Matrix products, with the position of the argument whose last dimension they sum over."""


def dying(replaced: Mapping[fx.Node, fx.Node]) -> list[fx.Node]:
    """What is dead once the nodes `replaced` gave way to their values: they, then operands, each after all its users."""
    kept, dead = set(replaced.values()), set(replaced)
    order = list(replaced)
    for node in order:  # grows
        for source in node.all_input_nodes:
            removable = (
                source not in dead and source not in kept and source.op == "call_function" and not has_effect(source)
            )
            if removable and all(user in dead for user in source.users):
                dead.add(source)
                order.append(source)
    return order


def cost(nodes: Collection[fx.Node], *, replaced: Mapping[fx.Node, fx.Node] = MappingProxyType({})) -> Cost:
    """What `nodes`, all on one device, cost as a part of their graph.

    Args:
        nodes: calls of operators.
        replaced: nodes with those that are about to take their place: what reads the former reads the latter.
    """
    if all(is_view(node.target) for node in nodes):
        return NOTHING
    rates = RATES.get(_device(nodes), RATES["cuda"])
    inside, stands_for = frozenset(nodes), {new: old for old, new in replaced.items()}
    seconds, flops, sources = 0.0, 0, dict[fx.Node, int]()
    for node in nodes:
        kind = _kind(node.target)
        if kind is _Kind.FREE:
            continue
        count = _operations(node, kind)
        rate = rates.of_product(node) if kind is _Kind.PRODUCT else rates.scalar
        flops += count
        seconds += count / rate + (rates.launch if kind is not _Kind.POINTWISE else 0.0)
        seconds += _additions(node, kind, stands_for) / rates.scalar
        for operand in () if _fills(node.target) else node.all_input_nodes:
            _read(sources, operand, node, inside)
    written = sum(_bytes_written(node, inside, stands_for) for node in inside)
    traffic = written + sum(sources.values())
    return Cost(seconds + traffic / rates.bandwidth, flops, traffic)


@remembered
def _fills(target: Any) -> bool:
    """Whether a call of `target` writes one number everywhere, whatever it reads."""
    return isinstance(target, OpOverload) and target.overloadpacket in _FILLS


def _read(sources: dict[fx.Node, int], operand: fx.Node, reader: fx.Node, inside: frozenset[fx.Node]) -> None:
    """Add to `sources` what `reader` reads of `operand` from memory; a tensor is read once by all that fuse."""
    source = _source(operand)
    made_here = source in inside
    if made_here or (_kind(source.target) in _FUSING and _kind(reader.target) in _FUSING):
        return  # counted where it is made, or not in memory at all
    value = operand.meta.get("val")
    read = nbytes(value) if isinstance(value, torch.Tensor) else 0
    whole = source.meta.get("val")
    if isinstance(whole, torch.Tensor):
        read = min(read, nbytes(whole))
    sources[source] = max(sources.get(source, 0), read)


_Stand = Mapping[fx.Node, fx.Node]
"""New nodes with those whose users will read them."""


def _additions(node: fx.Node, kind: _Kind, stands_for: _Stand) -> int:
    """Additions of a bias: generated kernels add it as they read the product; without them the library does, for nothing."""
    if kind is not _Kind.PRODUCT or not isinstance(node.target, OpOverload):
        return 0
    packet, given = node.target.overloadpacket, arguments(node)
    biased = packet in (aten.addmm, aten.baddbmm) or isinstance(given.get("bias"), fx.Node)
    read = biased and any(_kind(user.target) in _FUSING for user in _users(node, stands_for))
    return int(node.meta["val"].numel()) if read else 0


def _bytes_written(node: fx.Node, inside: frozenset[fx.Node], stands_for: _Stand) -> int:
    """What `node` writes, and what others read of that; 0 where it stays in a kernel.

    One of several results of an operator that is not `inside` is written for those alone who read it.
    """
    kind = _kind(node.target)
    if node.target is operator.getitem and node.all_input_nodes[0] not in inside:
        kind = _kind(node.all_input_nodes[0].target)
    if kind is _Kind.FREE:
        return 0
    stays = kind in _FUSING and all(
        _kind(user.target) is _Kind.POINTWISE or (kind is _Kind.POINTWISE and _kind(user.target) is _Kind.SWEEP)
        for user in _users(node, stands_for)
    )
    if stays:
        return 0
    return sum(2 * nbytes(part) for part in _tensors(node))


def _users(node: fx.Node, stands_for: _Stand) -> list[fx.Node]:
    """What reads `node`, through views and as one of several results, too."""
    old = stands_for.get(node)
    found = [] if old is None else _users(old, stands_for)
    for user in node.users:
        found += _users(user, stands_for) if _kind(user.target) is _Kind.FREE else [user]
    return found


def computed(node: fx.Node) -> bool:
    """Whether generated kernels compute `node`, or what it is a view of."""
    return _kind(_source(node).target) in _FUSING


def _source(node: fx.Node) -> fx.Node:
    """What makes the memory of `node`."""
    while node.op == "call_function" and _kind(node.target) is _Kind.FREE:
        node = node.all_input_nodes[0]
    return node


def _operations(node: fx.Node, kind: _Kind) -> int:
    """Operations of `node`: those of PyTorch's flop counter for products, else some for each element."""
    if not isinstance(node.target, OpOverload):
        return 0  # nothing is known of it
    packet = node.target.overloadpacket
    if kind is _Kind.PRODUCT:
        return _products(packet, arguments(node), node.meta["val"])
    size = sum(part.numel() for part in _tensors(node))
    if kind is _Kind.POINTWISE:
        return 0 if _fills(node.target) else size * _per_element(node.target)
    read = sum(part.numel() for source in node.all_input_nodes for part in _tensors(source))
    window = arguments(node).get("kernel_size")
    if window is None:
        # A maximum finds its position, too, whether or not that is used.
        return read + sum(int(part.numel()) for part in results_of(node))
    taps = prod(window) if len(window) > 1 else window[0] ** (_tensors(node.all_input_nodes[0])[0].dim() - 2)
    return max(read, size * int(taps)) + 2 * size  # each result finds out where its window begins and ends


@remembered
def _per_element(target: OpOverload) -> int:
    return CHEAP if target.overloadpacket in _SIMPLE else COSTLY


def _products(packet: OpOverloadPacket, given: Mapping[str, Any], result: Any) -> int:
    """Twice the multiplications of a convolution, its backward, or a matrix product."""
    if packet in _CONTRACTED:
        left = list(given.values())[_CONTRACTED[packet]].meta["val"]
        return 2 * int(result.numel()) * int(left.shape[-1])
    if packet in _ATTENTION:
        queries, keys, values = (given[name].meta["val"] for name in ("query", "key", "value"))
        pairs = int(queries.numel()) * int(keys.shape[-2]) * (1 + values.shape[-1] / queries.shape[-1])
        return int(pairs if given["is_causal"] else 2 * pairs)
    times = 2 * int(prod(given["weight"].meta["val"].shape[1:]))
    if packet in (aten.convolution, aten._convolution):
        elements = given["input"].meta["val"] if given["transposed"] else result
        return times * int(elements.numel())
    elements = given["input" if given["transposed"] else "grad_output"].meta["val"]
    return times * int(elements.numel() * sum(given["output_mask"][:2]))


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    """The tensors that `node` gives; of several those that are used."""
    value = node.meta.get("val")
    if isinstance(value, tuple | list):
        value = [value[user.args[1]] for user in node.users if user.target is operator.getitem]  # type: ignore[index]
        return [part for part in value if isinstance(part, torch.Tensor)]
    return [value] if isinstance(value, torch.Tensor) else []


def _device(nodes: Collection[fx.Node]) -> str:
    return next((tensor.device.type for node in nodes for tensor in _tensors(node)), "cpu")


@remembered
def _kind(target: Any) -> _Kind:
    if target is operator.getitem or is_view(target):
        return _Kind.FREE
    if not isinstance(target, OpOverload):
        return _Kind.OTHER
    packet = target.overloadpacket
    if packet in _CONTRACTED or packet in _ATTENTION | _CONVOLUTIONS:
        return _Kind.PRODUCT
    known = direct_class(target)
    if known is OpClass.POINTWISE or torch.Tag.pointwise in target.tags or packet in _SIMPLE | _FILLS:
        return _Kind.POINTWISE
    return _Kind.SWEEP if known in _SWEEPS or "pool" in str(packet) else _Kind.OTHER
