"""Finds a pattern of `fusepass.patterns.language` in a graph."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from fusepass.codegen.lowering.tracer import results_of
from fusepass.config import debugging
from fusepass.patterns.arguments import arguments, defaults, optional
from fusepass.patterns.infer import infer
from fusepass.patterns.language import Call, Const, Operand, Var
from fusepass.patterns.opclass import direct_class


class Declined(Exception):
    """Raised by a rewrite, or by `Match.call` in it, for a match that it has no valid result for."""


@dataclass(frozen=True)
class Mismatch:
    """Why a pattern is not found; ``str()`` says it in words."""

    node: fx.Node
    template: str
    values: tuple[object, ...] = ()

    def __str__(self) -> str:
        return f"{self.node.name}: {self.template.format(*self.values)}"


class Match(NamedTuple):
    """A pattern found. Captures are attributes: nodes for `Var` and named calls, plain values for `Const`.

    Attributes:
        root: the node that the whole pattern stands for.
        nodes: every operator matched, `root` among them.
        captures: what the names of the pattern stand for.
        unwritten: whether it is known that no operator before `root` writes to memory.
    """

    root: fx.Node
    nodes: frozenset[fx.Node]
    captures: Mapping[str, Any]
    unwritten: bool = False

    def __getattr__(self, name: str) -> Any:
        try:
            return self.captures[name]
        except KeyError:
            raise AttributeError(f"the pattern has no capture called {name!r}") from None

    @property
    def device(self) -> torch.device:
        """Where the root computes."""
        return results_of(self.root)[0].device

    def call(self, target: Any, *args: Any, like: fx.Node | None = None, **kwargs: Any) -> fx.Node:
        """A new node before `root`, with a description of its result and the source location of `root`.

        Args:
            target: the operator.
            args: its arguments.
            like: a node whose result looks as this one will, where that is known (and checked when debugging); it is
                inferred otherwise.
            kwargs: its arguments by name.

        Raises:
            Declined: the operator does not take these arguments.
        """
        if like is not None:
            result = like.meta["val"]
            if debugging():
                self._assert_alike(result, target, args, kwargs)
        else:
            try:
                result = infer(target, args, kwargs, self.device)
            except (RuntimeError, IndexError, ValueError) as error:  # the last once PyTorch's Python has taken over
                raise Declined(str(error)) from error
        return self._inserted(target, args, kwargs, self._meta(), result)

    def described(self, result: Any, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new node before `root` for a call whose result, or those of its results that are needed, looks like `result`."""
        return self._inserted(target, args, kwargs, self._meta(), result)

    def _meta(self) -> dict[str, Any]:
        kept = ("stack_trace", "nn_module_stack")
        return {key: value for key, value in self.root.meta.items() if key in kept}

    def _inserted(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], meta: Any, result: Any) -> fx.Node:
        """A node before `root` that says so of its result."""
        graph = self.root.graph
        with graph.inserting_before(self.root):
            node = graph.call_function(target)
        node.args = args  # given at once, they would be searched for symbolic sizes, of which there are none
        if kwargs:
            node.kwargs = kwargs
        node.meta.update(meta, val=result)
        return node

    def _assert_alike(self, expected: Any, target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """That a call gives the shapes that a rule says it gives; layouts and types of statistics differ by device."""
        with contextlib.suppress(RuntimeError):
            found = infer(target, args, kwargs, self.device)
            shapes = [
                pytree.tree_map_only(torch.Tensor, lambda each: tuple(each.shape), value) for value in (found, expected)
            ]
            assert shapes[0] == shapes[1], f"{target} of {args} gives {shapes[0]}, not {shapes[1]} as {self.root} does"

    def item(self, call: fx.Node, number: int) -> fx.Node:
        """A new node before `root` for one of several results of `call`."""
        return self._inserted(operator.getitem, (call, number), {}, call.meta, call.meta["val"][number])


def match(pattern: Call, node: fx.Node) -> Match | Mismatch:
    """The first way in which `node` is an instance of `pattern`, or why it is none."""
    attempt = _Attempt()
    found = next(attempt.matches(pattern, node), None)
    return found or attempt.mismatch or Mismatch(node, "no match")


def every(pattern: Call, node: fx.Node, *, unwritten: bool = False) -> Iterator[Match]:
    """Every way in which `node` is an instance of `pattern`; `unwritten` is for `Match`."""
    return _Attempt().matches(pattern, node, unwritten)


class _Found(NamedTuple):
    """What is matched so far."""

    captures: Mapping[str, Any] = MappingProxyType({})
    nodes: tuple[fx.Node, ...] = ()

    def capture(self, name: str | None, value: Any) -> _Found | None:
        """With `value` under `name`; None if that is taken by another value."""
        if name is None or (name in self.captures and self.captures[name] is value):
            return self
        if name in self.captures:
            return None
        return _Found({**self.captures, name: value}, self.nodes)


class _Attempt:
    """A search with backtracking; `mismatch` is the last thing that did not fit."""

    def __init__(self) -> None:
        self.mismatch: Mismatch | None = None

    def matches(self, pattern: Call, node: fx.Node, unwritten: bool = False) -> Iterator[Match]:
        """Every way in which `node` fits `pattern`."""
        for found in self._call(pattern, node, _Found()):
            yield Match(node, frozenset(found.nodes), found.captures, unwritten)

    def _fail(self, node: fx.Node, template: str, *values: object) -> None:
        self.mismatch = Mismatch(node, template, values)

    def _call(self, pattern: Call, node: fx.Node, found: _Found) -> Iterator[_Found]:
        if pattern.item is not None:
            yield from self._item(pattern, node, found)
            return
        target = node.target
        if not isinstance(target, OpOverload) or not is_called(pattern, target):
            self._fail(node, "is a call of {}, not of {}", target, pattern.op_class or set(pattern.packets))
            return
        values = self._arguments(pattern, node, target)
        if values is None:
            return
        captured = found.capture(pattern.name, node)
        if captured is None:
            self._fail(node, "is not what {} stands for already", pattern.name)
            return
        start = _Found(captured.captures, (*captured.nodes, node))
        operands = (*pattern.args, *pattern.kwargs.values())
        yield from self._operands(operands, values, start)
        if pattern.commutative:
            yield from self._operands((operands[1], operands[0], *operands[2:]), values, start)

    def _arguments(self, pattern: Call, node: fx.Node, target: OpOverload) -> Sequence[Any] | None:
        """What `node` gives for each operand of `pattern`; None where it does not take them, or other arguments matter."""
        count = len(pattern.args)
        if pattern.open and not pattern.kwargs and len(node.args) >= count:
            return node.args[:count]
        given = arguments(node)
        names = list(given)
        wanted = [*names[:count], *pattern.kwargs]
        if count > len(names) or not given.keys() >= set(wanted):
            self._fail(node, "takes other arguments")
            return None
        if not pattern.open:
            rest = [name for name in names if name not in wanted and not _is_default(target, name, given[name])]
            if rest:
                self._fail(node, "argument {} is {}", rest[0], given[rest[0]])
                return None
        return [given[name] for name in wanted]

    def _item(self, pattern: Call, node: fx.Node, found: _Found) -> Iterator[_Found]:
        """`node` as one of several results of a call of which nobody reads another one."""
        if node.target is not operator.getitem or node.args[1] != pattern.item:
            self._fail(node, "is not result {} of a call", pattern.item)
            return
        producer = node.all_input_nodes[0]
        if any(other.users for other in producer.users if other is not node):
            self._fail(producer, "another of its results is used")
            return
        yield from self._call(pattern.producer, producer, _Found(found.captures, (*found.nodes, node)))

    def _operands(self, operands: Sequence[Operand], values: Sequence[Any], found: _Found) -> Iterator[_Found]:
        if not operands:
            yield found
            return
        for first in self._operand(operands[0], values[0], found):
            yield from self._operands(operands[1:], values[1:], first)

    def _operand(self, operand: Operand, value: Any, found: _Found) -> Iterator[_Found]:
        match operand, value:
            case Call(), fx.Node():
                yield from self._call(operand, value, found)
            case Var(name), fx.Node():
                captured = found.capture(name, value)
                if captured is None:
                    self._fail(value, "is not what {} stands for already", name)
                else:
                    yield captured
            case Const(name, accepts), _ if not isinstance(value, fx.Node) and accepts(value):
                captured = found.capture(name, value)
                if captured is not None:
                    yield captured
            case _:
                self._fail(found.nodes[-1], "argument {} is no {}", value, operand)


def is_called(pattern: Call, target: OpOverload) -> bool:
    """Whether a call of `target`, or a result of one, may be an instance of `pattern`, whatever its arguments."""
    if pattern.op_class is not None:
        return direct_class(target) is pattern.op_class
    return target.overloadpacket in pattern.packets


def _is_default(target: OpOverload, name: str, value: Any) -> bool:
    return not isinstance(value, fx.Node) and name in optional(target) and bool(defaults(target)[name] == value)
