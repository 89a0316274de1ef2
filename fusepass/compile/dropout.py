"""Dropout on a GPU, taken apart into a draw, which moves the generator on, and functions of elements.

The numbers stay those of eager, to the last one: PyTorch's kernel gives an element its place in the generator's stream by a rule, which is
tried on the device before it is relied on. So dropout is part of the kernels around it, and backward, instead of what was kept, saves where
the generator stood.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch._ops import OpOverload

from fusepass.codegen.ir.random import OF_A_CALL
from fusepass.codegen.lowering import registry
from fusepass.codegen.lowering.dropout import default_generator, share_kept
from fusepass.codegen.lowering.dropout import kept as computed
from fusepass.codegen.lowering.modes import without_modes
from fusepass.codegen.lowering.tracer import Spec, meta_like
from fusepass.patterns.aliasing import base, readers
from fusepass.patterns.effects import is_random
from fusepass.patterns.opclass import OpClass, classify
from fusepass.runtime.masks import KEPT

aten = torch.ops.aten
draw, kept = torch.ops.fusepass.draw.default, KEPT

_BLOCK = 256  # threads of a block of PyTorch's kernel
_WIDTHS = (8, 4, 2)
_FUSED = (OpClass.POINTWISE, OpClass.REDUCTION, OpClass.NORMALISATION, OpClass.POOLING, OpClass.SCAN)


@dataclass(frozen=True)
class Rule:
    """How PyTorch's kernel for dropout goes over the elements of a tensor on a device.

    Attributes:
        most: threads that it has at most.
        widths: elements that a thread takes at a time at most, for each type of which this is known.
    """

    most: int
    widths: Mapping[torch.dtype, int]

    def threads(self, count: int) -> int:
        """Threads for so many elements."""
        return min(self.most, -(-count // _BLOCK) * _BLOCK)

    def width(self, dtype: torch.dtype, count: int) -> int:
        """Elements that a thread takes at a time, where memory begins as it does when it is allocated: a power of two that divides their count."""
        return min(self.widths[dtype], count & -count)

    def drawn(self, count: int) -> int:
        """How far so many elements move the generator on."""
        return -(-count // (self.threads(count) * OF_A_CALL)) * OF_A_CALL


def split_dropout(graph: fx.Graph) -> None:
    """Write dropout beside fused operators as a draw and functions of elements, on each device on which that gives eager's numbers."""
    found = graph.find_nodes(op="call_function", target=aten.native_dropout.default)
    for device in {node.args[0].meta["val"].device for node in found}:
        if device.type == "cuda" and (rule := rule_of(device)) is not None:
            split_by(rule, graph, device)


def split_by(rule: Rule, graph: fx.Graph, device: torch.device) -> None:
    """As `split_dropout`, for one device by its `rule`."""
    run: list[fx.Node] = []
    for node in [*graph.nodes]:
        if _is_known(node, rule, device) and _is_beside_fused(node):
            run.append(node)
        elif _may_draw(node):
            _split(run, rule)
            run = []
    _split(run, rule)


def _is_known(node: fx.Node, rule: Rule, device: torch.device) -> bool:
    """Whether `node` is dropout of which the place of each element in the stream is known."""
    if node.target is not aten.native_dropout.default:
        return False
    x, p, train = node.args
    value = x.meta["val"]  # type: ignore[union-attr]
    if value.device != device or value.dtype not in rule.widths or train is False or not 0 < p < 1:  # type: ignore[operator]
        return False
    if not all(isinstance(size, int) for size in (*value.shape, *value.stride())):
        return False
    # Of an odd number each has a call of the generator for itself, which is no faster than PyTorch's kernel.
    even = value.numel() > 0 and value.numel() % 2 == 0
    return even and bool(aten.is_non_overlapping_and_dense(meta_like(value)))


def _is_beside_fused(node: fx.Node) -> bool:
    """Whether a kernel for `node` may do something else as well: with what made the memory that it reads, or with what reads its value."""
    values = [user for user in node.users if user.args[1] == 0]
    around = [base(node.args[0]), *(reader for value in values for reader in readers(value))]  # type: ignore[arg-type]
    return any(each.op == "call_function" and classify(each, registry) in _FUSED for each in around)


def _may_draw(node: fx.Node) -> bool:
    """Whether `node` may move the generator on: as it is known to, or as what it does is not known here."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    known = isinstance(node.target, OpOverload) and node.target.namespace in ("aten", "prims")
    return not known or is_random(node.target)


def _split(run: list[fx.Node], rule: Rule) -> None:
    """Write dropouts between which nothing draws with one draw for all of them."""
    if not run:
        return
    graph, values = run[0].graph, [node.args[0].meta["val"] for node in run]  # type: ignore[union-attr]
    counts = [rule.drawn(value.numel()) for value in values]
    with graph.inserting_before(run[0]):
        drawn = graph.call_function(draw, (counts,), {"device": values[0].device})
    drawn.meta["val"] = [_like(value, (2,), (1,), torch.int64) for value in values]
    for number, (node, value) in enumerate(zip(run, values, strict=True)):
        x, p, _ = node.args
        size, strides, count = tuple(value.shape), value.stride(), value.numel()
        assert isinstance(p, float | int)
        with graph.inserting_before(node):
            state = graph.call_function(operator.getitem, (drawn, number))
            placed = rule.threads(count), rule.width(value.dtype, count)
            mask = graph.call_function(kept, (state, [*size], [*strides], p, value.dtype, *placed))
            chosen = graph.call_function(aten.mul.Tensor, (x, mask))
            scaled = graph.call_function(aten.mul.Tensor, (chosen, 1.0 / share_kept(p, value.dtype)))
        state.meta["val"] = drawn.meta["val"][number]
        for made, dtype in ((mask, torch.bool), (chosen, value.dtype), (scaled, value.dtype)):
            made.meta = {**node.meta, "val": _like(value, size, strides, dtype)}
        for user in list(node.users):
            user.replace_all_uses_with(mask if user.args[1] else scaled)
            graph.erase_node(user)
        graph.erase_node(node)


def _like(value: torch.Tensor, size: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What a tensor beside `value` looks like."""
    mode = detect_fake_mode(value)
    if mode is None:
        return Spec.described(size, strides, dtype, value.device)
    with mode:
        return torch.empty_strided(size, strides, dtype=dtype, device=value.device)


def rule_of(device: torch.device) -> Rule | None:
    """The rule on `device`; None where there is no such device, or while a CUDA graph is captured."""
    if not torch.cuda.is_available() or torch.cuda.is_current_stream_capturing():
        return None
    with without_modes(), torch.no_grad():  # graphs are cut under AOTAutograd's fake tensor mode
        return _tried(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _tried(index: int) -> Rule:
    properties: Any = torch.cuda.get_device_properties(index)  # torch's stub lacks some of what it has
    most = properties.multi_processor_count * (properties.max_threads_per_multi_processor // _BLOCK) * _BLOCK
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    found = {dtype: width for dtype in dtypes if (width := _width(dtype, most, torch.device("cuda", index)))}
    return Rule(most, found)


def _width(dtype: torch.dtype, most: int, device: torch.device) -> int | None:
    """Elements that a thread takes at a time; None where the rule is another one."""
    several = most * _WIDTHS[0] * 5 // 4  # more than all threads take at once
    return next((width for width in _WIDTHS if _agrees(several, dtype, most, width, device)), None)


def _agrees(count: int, dtype: torch.dtype, most: int, width: int, device: torch.device) -> bool:
    """Whether PyTorch's dropout of so many elements keeps those that the rule says."""
    generator = default_generator(device)
    before, seed, offset = generator.get_state(), 12345, 40
    try:
        generator.manual_seed(seed)
        generator.set_offset(offset)
        _, mask = aten.native_dropout.default(torch.ones(count, dtype=dtype, device=device), 0.5, True)
        moved = generator.get_offset() - offset
    finally:
        generator.set_state(before)
    expected = computed(torch.tensor([seed, offset], device=device), (count,), (1,), 0.5, dtype, most, width)
    return moved == Rule(most, {}).drawn(count) and torch.equal(mask, expected)
