"""Copies that nobody could tell from the original, and casts there and back."""

from __future__ import annotations

import torch
from torch import fx

from fusepass.patterns.analysis.reordered import Reordered
from fusepass.patterns.language import const, op, var
from fusepass.patterns.matcher import Declined, Match
from fusepass.patterns.rule import Rule
from fusepass.patterns.rules.builder import Builder, shape_of

aten = torch.ops.aten

_x = var("x")
_LAYOUT = {name: const(name) for name in ("layout", "device", "pin_memory", "non_blocking", "memory_format")}


def widening(found: Match) -> str | None:
    narrow, wide = found.x.meta["val"].dtype, found.wide
    alike = wide is not None and narrow.is_floating_point == wide.is_floating_point and not wide.is_complex
    ordered = alike and _is_promoted(narrow) and _is_promoted(wide)
    lossless = ordered and narrow is not torch.bool and torch.promote_types(narrow, wide) is wide
    return None if lossless else f"{narrow} to {wide} loses digits"


def _is_promoted(dtype: torch.dtype) -> bool:
    """Whether PyTorch says which types hold the values of `dtype`: it raises for floating-point ones of one byte and for wide unsigned ones."""
    return dtype.itemsize > 1 if dtype.is_floating_point else dtype.is_signed or dtype.itemsize == 1


def _copy_once(found: Match) -> fx.Node:
    """A copy of what the first one copies, in the order in which the second one sees that."""
    seen = Reordered.of(found.viewed)
    if seen.source is found.viewed or seen.source.target is not aten.clone.default:
        raise Declined("there is no copy before the views")
    build = Builder(found)
    ordered = build.permute(build.split(seen.source.all_input_nodes[0], seen.sizes), seen.order)
    copy = found.call(aten.clone.default, ordered, memory_format=torch.contiguous_format)
    return build.view(copy, shape_of(found.root))


RULES: tuple[Rule, ...] = (
    Rule(
        name="idle-clone",
        pattern=op(aten.clone)(_x, memory_format=const("memory_format")),
        rewrite=lambda m: m.x,
        why="memory of its own is not needed where nobody writes and only one of the two is seen",
        exact=True,
    ),
    Rule(
        name="idle-cast",
        pattern=op(aten._to_copy)(_x, dtype=const("dtype"), **_LAYOUT),
        rewrite=lambda m: m.x,
        why="a cast to the same type, device and layout is a clone",
        exact=True,
    ),
    Rule(
        name="copy-of-copy",
        pattern=op(aten.clone)(var("viewed"), memory_format=const("memory_format")),
        rewrite=_copy_once,
        why="a copy of a copy has the elements of the first tensor, whose dimensions come apart wherever it lies",
        exact=True,
    ),
    Rule(
        name="widening-cast-and-back",
        pattern=op(aten._to_copy)(op(aten._to_copy)(_x, dtype=const("wide")), dtype=const("dtype")),
        guards=(widening,),
        rewrite=lambda m: m.x,
        why="the wider type holds every value of the narrower one",
        exact=True,
    ),
)
