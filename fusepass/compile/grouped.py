"""Attention with fewer heads of keys than of queries: the library's kernels take them as they are, not repeated for each query head.

Models write ``keys[:, :, None].expand(...).reshape(...)`` in front of attention, which copies a cache as many times in each step as heads share it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx

from fusepass.codegen.lowering.modes import without_modes
from fusepass.config import Algebra, current
from fusepass.patterns.dataflow import remove_dead

aten = torch.ops.aten

GROUPS = frozenset({
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
})  # fmt: skip
"""Kernels in which head `i` of ``n * m`` query heads attends to head ``i // m`` of `n`, with the results that repeated heads give."""


@functools.cache
def takes_groups(device: str) -> bool:
    """Whether PyTorch gives grouped queries to such a kernel itself; on a CPU not every version does."""
    if device != "cpu":
        return True
    few, many = torch.empty(1, 1, 2, 8), torch.empty(1, 2, 2, 8)
    with without_modes():
        chosen = torch._fused_sdp_choice(many, few, few, enable_gqa=True)
    return chosen == torch._C._SDPBackend.FLASH_ATTENTION.value


_RESHAPES = frozenset({aten.view.default, aten._unsafe_view.default, aten.reshape.default})


def group_queries(graph: fx.Graph) -> bool:
    """Give attention the keys and values whose heads are repeated for it, in place; tells whether there were any. Sizes may be symbolic.

    Args:
        graph: ATen operators; every node that stands for a tensor has it in ``meta["val"]``.
    """
    changed = False
    if current().algebra is Algebra.OFF:
        return False
    for node in [node for target in GROUPS for node in graph.find_nodes(op="call_function", target=target)]:
        queries, keys, values, *rest = node.args
        few = _unrepeated(keys), _unrepeated(values)
        if not takes_groups(node.meta["val"][0].device.type):
            continue
        if None in few or not _same(few[0].meta["val"].shape[1], few[1].meta["val"].shape[1]):  # type: ignore[union-attr]
            continue
        node.args = (queries, *few, *rest)
        changed = True
    if changed:
        remove_dead(graph)
    return changed


def _unrepeated(node: Any) -> fx.Node | None:
    """What `node` is made of by repeating each head, ``[N, heads, length, size]``; None where it is made otherwise."""
    if node.target not in _RESHAPES:
        return None
    repeated = node.all_input_nodes[0]
    if repeated.target is aten.clone.default:
        repeated = repeated.all_input_nodes[0]
    if repeated.target is not aten.expand.default:
        return None
    single = repeated.all_input_nodes[0]
    if single.target is not aten.unsqueeze.default or single.args[1] not in (2, -3):
        return None
    source: fx.Node = single.args[0]
    before, between, after = (each.meta["val"] for each in (source, repeated, node))
    if before.dim() != 4 or after.dim() != 4 or not _same(before.stride()[-1], 1):
        return None
    batch, heads, length, size = before.shape
    times = between.shape[2]
    whole = (batch, heads * times, length, size)
    same = all(map(_same, whole, after.shape)) and all(map(_same, (batch, heads, times, length, size), between.shape))
    return source if same else None


def _same(size: Any, other: Any) -> bool:
    """Whether two sizes are equal, whatever the symbols in them stand for; no guard comes of it."""
    one, two = (each.node.expr if isinstance(each, torch.SymInt) else each for each in (size, other))
    return bool(one == two)
