"""Copies that nobody could tell from the original, and casts there and back."""

from __future__ import annotations

import torch
from torch import fx

from fusepass.patterns.language import const, op, var
from fusepass.patterns.matcher import Declined, Match
from fusepass.patterns.rule import Rule

aten = torch.ops.aten

_x = var("x")
_LAYOUT = {name: const(name) for name in ("layout", "device", "pin_memory", "non_blocking", "memory_format")}


def widening(found: Match) -> str | None:
    narrow, wide = found.x.meta["val"].dtype, found.wide
    alike = wide is not None and narrow.is_floating_point == wide.is_floating_point and not wide.is_complex
    lossless = alike and narrow is not torch.bool and torch.promote_types(narrow, wide) is wide
    return None if lossless else f"{narrow} to {wide} loses digits"


_VIEWS = frozenset({aten.view.default, aten._unsafe_view.default, aten.permute.default, aten.transpose.int})


def _copy_once(found: Match) -> fx.Node:
    """The views between two copies, of what the first one copies."""
    between, node = list[fx.Node](), found.viewed
    while node.target in _VIEWS:
        between.append(node)
        node = node.all_input_nodes[0]
    if node.target is not aten.clone.default or not between:
        raise Declined("there is no copy before the views")
    shown = node.all_input_nodes[0]
    if shown.meta["val"].shape != node.meta["val"].shape:
        raise Declined("the copy has another shape")
    for view in reversed(between):
        shown = found.call(view.target, shown, *view.args[1:])
    return found.call(aten.clone.default, shown, memory_format=found.memory_format)


RULES: tuple[Rule, ...] = (
    Rule(
        name="idle-clone",
        pattern=op(aten.clone)(_x, memory_format=const("memory_format")),
        rewrite=lambda m: m.x,
        why="memory of its own is not needed where nobody writes and only one of the two is seen",
    ),
    Rule(
        name="idle-cast",
        pattern=op(aten._to_copy)(_x, dtype=const("dtype"), **_LAYOUT),
        rewrite=lambda m: m.x,
        why="a cast to the same type, device and layout is a clone",
    ),
    Rule(
        name="copy-of-copy",
        pattern=op(aten.clone)(var("viewed"), memory_format=const("memory_format")),
        rewrite=_copy_once,
        why="where a tensor may be seen in the same ways as a copy of it, a copy of what is seen has the same elements",
    ),
    Rule(
        name="widening-cast-and-back",
        pattern=op(aten._to_copy)(op(aten._to_copy)(_x, dtype=const("wide")), dtype=const("dtype")),
        guards=(widening,),
        rewrite=lambda m: m.x,
        why="the wider type holds every value of the narrower one",
    ),
)
