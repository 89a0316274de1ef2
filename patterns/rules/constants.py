"""Tensors that hold one number everywhere become that number, and functions of them are computed beforehand."""

from __future__ import annotations

import math

import torch
from torch import fx
from torch._ops import OpOverload

from fusepass.patterns.analysis.constants import number
from fusepass.patterns.infer import is_plain
from fusepass.patterns.language import Call, of_class, op, var
from fusepass.patterns.matcher import Declined, Match
from fusepass.patterns.opclass import OpClass, is_elementwise
from fusepass.patterns.rule import Rule

aten = torch.ops.aten

_x, _y = var("x"), var("y")


def filled(found: Match) -> str | None:
    """The number must be one of the type of x, so that it is the same as an element and as a number."""
    value, dtype = number(found.y), found.x.meta["val"].dtype
    if value is None or not dtype.is_floating_point or found.root.meta["val"].dtype is not dtype:
        return f"{found.y.name} is not one number of the type of {found.x.name}"
    same = math.isfinite(value) and float(torch.tensor(value, dtype=dtype)) == value
    return None if same else f"{value} is no element of {dtype}"


def known(found: Match) -> str | None:
    target = found.root.target
    assert isinstance(target, OpOverload)
    if any(number(node) is None for node in found.root.all_input_nodes):
        return "an operand is not one number"
    if is_elementwise(target) and is_plain(found.root.meta["val"]):
        return None
    return "no elementwise function, or laid out in another way"


def _folded(found: Match) -> fx.Node:
    """A tensor filled with what the operator makes of single elements."""

    def element(node: fx.Node) -> torch.Tensor:
        return torch.tensor(number(node), dtype=node.meta["val"].dtype)

    root, result = found.root, found.root.meta["val"]
    args, kwargs = fx.map_arg((root.args, dict(root.kwargs)), element)
    assert isinstance(root.target, OpOverload)
    value = root.target(*args, **kwargs)
    if not isinstance(value, torch.Tensor) or value.dtype is not result.dtype or not math.isfinite(value.item()):
        raise Declined("its result is no finite number")
    options = {"dtype": result.dtype, "device": result.device, "pin_memory": False}
    return found.call(aten.full.default, list(result.shape), value.item(), like=root, **options)


def _binary(name: str, pattern: Call, target: OpOverload) -> Rule:
    return Rule(
        name=name,
        pattern=pattern,
        guards=(filled,),
        rewrite=lambda m: m.call(target, m.x, number(m.y), like=m.root if _lies_alike(m) else None),
        why="an operand that is the same number everywhere may as well be that number",
    )


def _lies_alike(found: Match) -> bool:
    """Whether the result looks like x, which is what it then is an elementwise function of."""
    x, result = found.x.meta["val"], found.root.meta["val"]
    return bool(x.shape == result.shape and x.stride() == result.stride())


RULES: tuple[Rule, ...] = (
    _binary("add-filled", op(aten.add, commutative=True)(_x, _y), aten.add.Tensor),
    _binary("multiply-by-filled", op(aten.mul, commutative=True)(_x, _y), aten.mul.Tensor),
    _binary("subtract-filled", op(aten.sub)(_x, _y), aten.sub.Tensor),
    _binary("subtract-from-filled", op(aten.sub)(_y, _x), aten.rsub.Scalar),
    _binary("divide-by-filled", op(aten.div)(_x, _y), aten.div.Tensor),
    Rule(
        name="function-of-filled",
        pattern=of_class(OpClass.POINTWISE)(_x),
        guards=(known,),
        rewrite=_folded,
        why="the function of one number is computed beforehand, by PyTorch's own operator in the same type",
    ),
)
