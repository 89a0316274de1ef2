"""Chains of additions and multiplications with numbers, as ``scale * x + shift``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from fusepass.patterns.arguments import arguments

aten = torch.ops.aten


@dataclass(frozen=True)
class Affine:
    """``scale * source + shift``, element by element, in the type of `source`: ``scale * (source + lead) + rest``.

    Attributes:
        lead: what is added to the source, in its units, before anything but a sign multiplies it. The source and what is taken from it
            may be nearly the same, and their difference exact; that of their multiples is not.
        rest: what is added behind that.
        growth: the largest factor by which a number is multiplied on the way, before or after which others follow;
            larger than `scale` where a value grows first and shrinks later.
        offsets: the sum of the magnitudes of what is added on the way.
        steps: how many operators these are.
    """

    source: fx.Node
    scale: float
    shift: float
    growth: float
    offsets: float
    lead: float
    rest: float
    steps: int = 1

    @property
    def terms(self) -> int:
        """Operators that compute the same from `source`."""
        return (self.scale != 1) + (self.shift != 0)

    @property
    def adds_first(self) -> bool:
        """Whether `lead` is to be added before something multiplies."""
        return self.lead != 0 and abs(self.scale) != 1

    def after(self, inner: Affine) -> Affine:
        """This function of `inner`, one operator, which is what `source` stands for."""
        shift, sign = self.scale * inner.shift + self.shift, abs(inner.scale) == 1
        return Affine(
            inner.source,
            self.scale * inner.scale,
            shift,
            max(inner.growth, abs(inner.scale) * self.growth),
            inner.offsets * max(1.0, self.growth) + self.offsets,
            inner.scale * (inner.shift + self.lead) if sign else 0.0,
            self.rest if sign else shift,
            inner.steps + self.steps,
        )


def step(node: fx.Node) -> Affine | None:
    """One operator as such a function, if it is one: with a finite number, on floats whose type it keeps."""
    if len(node.all_input_nodes) != 1 or not isinstance(node.target, OpOverload):
        return None
    given = arguments(node)
    source = given.get("self")
    if not isinstance(source, fx.Node) or isinstance(given.get("other"), fx.Node):
        return None
    dtype = source.meta["val"].dtype
    if not dtype.is_floating_point or node.meta["val"].dtype is not dtype:
        return None
    found = _coefficients(node.target.overloadpacket, given)
    if found is None or not all(map(math.isfinite, found)):
        return None
    scale, shift = found
    lead, rest = (scale * shift, 0.0) if abs(scale) == 1 else (0.0, shift)
    return Affine(source, scale, shift, abs(scale), abs(shift), lead, rest)


def _coefficients(packet: Any, given: dict[str, Any]) -> tuple[float, float] | None:
    """Scale and shift of an operator whose first argument is the tensor."""
    if packet is aten.neg:
        return -1.0, 0.0
    number = given.get("other")
    if not isinstance(number, int | float) or isinstance(number, bool):
        return None
    alpha = given.get("alpha", 1)
    if packet is aten.add:
        return 1.0, float(alpha * number)
    if packet is aten.sub:
        return 1.0, -float(alpha * number)
    if packet is aten.rsub:
        return -float(alpha), float(number)
    if packet is aten.mul:
        return float(number), 0.0
    if packet is aten.div and number != 0 and given.get("rounding_mode") is None:
        return 1.0 / number, 0.0
    return None


def chains(node: fx.Node) -> Iterator[Affine]:
    """The chains of such operators that end in `node`, none of them but `node` read by others; shorter ones first."""
    found = step(node)
    while found is not None:
        yield found
        inner = step(found.source) if len(found.source.users) == 1 else None
        found = None if inner is None else found.after(inner)
