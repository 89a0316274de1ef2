"""Tensors that hold one number everywhere become that number, and functions of them are computed beforehand."""

from __future__ import annotations

import math

import torch
from torch import fx
from torch._ops import OpOverload

from fusepass.patterns.aliasing import written
from fusepass.patterns.arguments import arguments
from fusepass.patterns.effects import is_constant_number
from fusepass.patterns.infer import is_plain
from fusepass.patterns.language import Call, of_class, op, var
from fusepass.patterns.matcher import Declined, Match
from fusepass.patterns.memo import remembered
from fusepass.patterns.opclass import OpClass, is_elementwise
from fusepass.patterns.rule import Rule

aten = torch.ops.aten

_x, _y = var("x"), var("y")

_FILLED = {aten.full: "fill_value", aten.full_like: "fill_value", aten.new_full: "fill_value", aten.scalar_tensor: "s"}
_FIXED = {
    **dict.fromkeys((aten.zeros, aten.zeros_like, aten.new_zeros), 0),
    **dict.fromkeys((aten.ones, aten.ones_like, aten.new_ones), 1),
}


def number(node: fx.Node) -> float | None:
    """What every element of `node` is, where the graph says it: a filled tensor, or a 0-dim constant of the CPU."""
    value = _constant(node) if node.op == "get_attr" or node.target is aten.lift_fresh_copy.default else _filled(node)
    if value is None or any(node is target for user in node.users for target in written(user)):
        return None
    return value


def _filled(node: fx.Node) -> float | None:
    if not isinstance(node.target, OpOverload):
        return None
    given = _given(node.target)
    value = arguments(node)[given] if isinstance(given, str) else given
    return value if isinstance(value, int | float) else None


@remembered
def _given(target: OpOverload) -> str | int | None:
    """The argument that is what an operator fills a tensor with, or that number itself; None of another operator."""
    packet = target.overloadpacket
    return _FILLED.get(packet, _FIXED.get(packet))


def _constant(node: fx.Node) -> float | None:
    if not is_constant_number(node):
        return None
    while node.op != "get_attr":
        (node,) = node.all_input_nodes
    value = getattr(node.graph.owning_module, str(node.target), None)
    return value.item() if isinstance(value, torch.Tensor) and not value.is_complex() else None


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
