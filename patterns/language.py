"""The pattern language of rewrite rules: what an expression of ATen operators looks like.

::

    x = var("x")
    relu = op(aten.relu)
    relu(relu(x))                                   # any overload; arguments not mentioned have their defaults
    op(aten.mul, commutative=True)(x, const("one", equals(1)))
    op(aten.neg)(op(aten.neg)(x)["inner"])          # the inner negation is captured, too

Patterns are immutable values; `fusepass.patterns.matcher.match` finds them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from torch._ops import OpOverloadPacket

from fusepass.patterns.opclass import OpClass

Operand: TypeAlias = "Var | Const | Call"


@dataclass(frozen=True)
class Var:
    """Any tensor. The same name stands for the same node everywhere in a pattern."""

    name: str


@dataclass(frozen=True)
class Const:
    """A value that is no tensor (a number, a list of ints, None), captured under `name` where `accepts` holds."""

    name: str
    accepts: Callable[[Any], bool]


class Flat(NamedTuple):
    """A call of an operator on any tensors, called `names`; the other fields are as in `Call`."""

    names: tuple[str, ...]
    name: str | None
    open: bool
    commutative: bool


@dataclass(frozen=True)
class Call:
    """A call of one of `packets`, in any overload, or of any operator of class `op_class`.

    Attributes:
        args: by position in the operator's schema.
        kwargs: by name in the operator's schema.
        open: arguments that are not mentioned may be anything; otherwise they must have their default values.
        commutative: the first two arguments may be exchanged.
        name: captures the call's node, if given.
        item: matches the ``getitem`` of that result of the call; `name` captures the call.
    """

    packets: frozenset[OpOverloadPacket] = frozenset()
    op_class: OpClass | None = None
    args: tuple[Operand, ...] = ()
    kwargs: Mapping[str, Operand] = field(default_factory=lambda: MappingProxyType({}))
    open: bool = False
    commutative: bool = False
    name: str | None = None
    item: int | None = None

    @cached_property
    def flat(self) -> Flat | None:
        """What there is to know, where a call of the operator on any different tensors will do; most patterns are so."""
        names = tuple(operand.name for operand in self.args if isinstance(operand, Var))
        plain = self.item is None and not self.kwargs and self.name not in names
        different = len(set(names)) == len(self.args)
        return Flat(names, self.name, self.open, self.commutative) if names and plain and different else None

    @cached_property
    def producer(self) -> Call:
        """The pattern of the call of which this is one of the results."""
        return replace(self, item=None)

    def __getitem__(self, name: str) -> Call:
        """The same pattern, its node captured under `name`."""
        return replace(self, name=name)


def var(name: str) -> Var:
    """Any tensor, captured under `name`."""
    return Var(name)


def const(name: str, accepts: Callable[[Any], bool] = lambda value: True) -> Const:
    """A value that is no tensor, captured under `name`, if it `accepts` it."""
    return Const(name, accepts)


def op(*packets: OpOverloadPacket, commutative: bool = False, open: bool = False) -> Callable[..., Call]:
    """A constructor of patterns that call one of `packets`: ``op(aten.relu)(x)``."""
    return lambda *args, **kwargs: Call(
        packets=frozenset(packets), args=args, kwargs=MappingProxyType(kwargs), commutative=commutative, open=open
    )


def result(number: int, call: Call) -> Call:
    """Result `number` of a call that gives several: ``result(0, op(aten.max_pool2d_with_indices, open=True)(x))``."""
    return replace(call, item=number)


def of_class(op_class: OpClass) -> Callable[..., Call]:
    """A constructor of patterns that call any operator of `op_class`, whatever its arguments after the given ones."""
    return lambda *args: Call(op_class=op_class, args=args, open=True)


def equals(number: float) -> Callable[[Any], bool]:
    """Accepts that number, whatever its Python type; a bool is no number, and zero has its sign."""
    return lambda value: type(value) in (int, float) and value == number and str(float(value)) == str(float(number))
