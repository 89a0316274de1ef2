"""Lists of tensors: equal chains of pointwise operators over different tensors, such as one for each parameter of an optimiser, as one region.

PyTorch's operators on lists (``_foreach_add``) each pass over the memory of all tensors. Here such an operator is taken apart into operators on
one tensor, as PyTorch itself does where it has no kernel for lists; so loops over parameters and operators on lists look the same. Operators that
share values of one layout are a member; members that differ in nothing but their tensors are a list, for which there is one kernel
(`fusepass.autotune.lists`). What becomes no member of a list is put back into its operator on lists.

An operator on lists passes tensors of any layout, so members may differ in shape and strides. All tensors of one member lie in memory alike, or are
single numbers. Numbers that a member alone uses are made in it; others, such as counts of steps that are kept, are lists of their own.
"""

from __future__ import annotations

import functools
import operator
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from fusepass.codegen.lowering import registry
from fusepass.codegen.lowering.modes import without_modes
from fusepass.codegen.lowering.rounding import ROUNDED
from fusepass.codegen.lowering.tracer import Tracer, meta_like
from fusepass.config import current
from fusepass.patterns.aliasing import is_view
from fusepass.patterns.horizontal import is_in_place
from fusepass.patterns.opclass import OpClass, classify, made_of
from fusepass.patterns.pattern import Pattern

aten = torch.ops.aten

LISTS = Pattern(
    name="lists",
    seed=frozenset({OpClass.POINTWISE}),
    upstream=frozenset({OpClass.POINTWISE}),
    downstream=frozenset({OpClass.POINTWISE}),
    min_ops=1,
    why="equal chains over many tensors are one launch, which reads and writes each tensor once",
)

_ALSO = frozenset({aten.copy.default, aten.full_like.default})
"""Operators that work element by element if their operands lie alike, and have no tag that says so."""

LEAST = 4
"""Members of a list: fewer are a launch each, or merged as other regions are."""

Member = tuple[fx.Node, ...]
List = tuple[Member, ...]


def find_lists(graph: fx.Graph) -> tuple[List, ...]:
    """The lists of `graph`: for each its members, and for each of these its operators in the graph's order.

    Operators on lists are taken apart for them, in place; what they do for other tensors stays one operator.

    Args:
        graph: flat and functional but for writes at its end; every node that stands for a tensor has it in ``meta["val"]``.
    """
    if not current().allows(LISTS.name):
        return ()
    apart = [each for node in list(graph.nodes) if (each := _take_apart(node)) is not None]
    found = tuple(_Chains(graph, {single: each.node for each in apart for single in each.singles}).lists())
    inside = {node for members in found for member in members for node in member}
    for each in apart:
        each.put_back(inside)
    return found


@dataclass(frozen=True)
class _Apart:
    """An operator on lists, and for each of its results the node that takes it out and what stands for that in the graph meanwhile."""

    node: fx.Node
    parts: tuple[fx.Node, ...]
    singles: tuple[fx.Node, ...]

    def put_back(self, kept: Collection[fx.Node]) -> None:
        """Leave to the operator what is not `kept` apart."""
        graph, left = self.node.graph, [number for number, single in enumerate(self.singles) if single not in kept]
        for number, (part, single) in enumerate(zip(self.parts, self.singles, strict=True)):
            if single in kept:
                graph.erase_node(part)
            else:
                single.replace_all_uses_with(part)
                graph.erase_node(single)
                part.args = (self.node, left.index(number))
        if not left:
            graph.erase_node(self.node)
            return
        count, value = len(self.parts), self.node.meta["val"]

        def of_those(argument: Any) -> Any:
            is_list = isinstance(argument, list | tuple) and len(argument) == count
            return [argument[number] for number in left] if is_list else argument

        self.node.args = tuple(map(of_those, self.node.args))
        self.node.kwargs = {key: of_those(argument) for key, argument in self.node.kwargs.items()}
        self.node.meta["val"] = [value[number] for number in left]


def _take_apart(node: fx.Node) -> _Apart | None:
    """Let operators on one tensor each stand for `node`, behind it; None where it is no operator on lists, or one that does more."""
    target = node.target
    if not isinstance(target, OpOverload) or not target._schema.name.startswith("aten::_foreach_"):
        return None
    results = node.meta.get("val")
    parts = {part.args[1]: part for part in node.users if part.target is operator.getitem}
    if (
        target._schema.is_mutable
        or not isinstance(results, list | tuple)
        or not len(node.users) == len(parts) == len(results)
    ):
        return None
    traced = _traced(node, target)
    if traced is None:
        return None
    singles, graph = list[fx.Node](), node.graph
    place = node
    for number, (func, args, kwargs) in enumerate(traced):
        with graph.inserting_after(place):
            single = place = graph.call_function(func, args, kwargs)
        part = parts[number]
        single.meta = {**node.meta, **part.meta}
        part.replace_all_uses_with(single)
        singles.append(single)
    return _Apart(node, tuple(parts[number] for number in range(len(singles))), tuple(singles))


def _traced(node: fx.Node, target: OpOverload) -> list[tuple[OpOverload, tuple[Any, ...], dict[str, Any]]] | None:
    """The operator by which PyTorch makes each result of `node` where it has no kernel for lists, with its arguments in the graph.

    None where that is not one operator for each.
    """
    key = torch._C.DispatchKey.CompositeExplicitAutograd
    if not target.has_kernel_for_dispatch_key(key):
        return None
    tracer, own = Tracer(), dict[fx.Node, fx.Node]()
    with without_modes(), torch._C._DisablePythonDispatcher(), torch.no_grad():
        given = {source: meta_like(source.meta["val"]) for source in node.all_input_nodes}
        for source, tensor in given.items():
            own[tracer.placeholder(source.name, tensor)] = source
        args, kwargs = fx.map_arg((node.args, node.kwargs), given.__getitem__)
        with tracer:
            results = target._op_dk(key, *args, **kwargs)
    made = [each for each in tracer.graph.nodes if each.op == "call_function"]
    if len(made) != len(results) or [tracer.node_of(result) for result in results] != made:
        return None
    return [(each.target, *fx.map_arg((each.args, each.kwargs), own.__getitem__)) for each in made]


class _Chains:
    """The members of a graph.

    Attributes:
        singles: what was taken out of an operator on lists, with that.
    """

    def __init__(self, graph: fx.Graph, singles: dict[fx.Node, fx.Node]) -> None:
        self._graph, self._singles = graph, singles
        self._wholes: set[fx.Node] = set(singles.values())
        self._pointwise: set[fx.Node] = set()
        self._level: dict[fx.Node, int] = {}
        self._leader: dict[fx.Node, fx.Node] = {}
        self._member: dict[fx.Node, fx.Node] = {}
        self._order = {node: number for number, node in enumerate(graph.nodes)}

    def lists(self) -> Iterator[List]:
        """Members that are equal, as lists."""
        self._join()
        members = defaultdict[fx.Node, list[fx.Node]](list)
        for node in self._graph.nodes:
            if node in self._member:
                members[self._member[node]].append(node)
        alike = defaultdict[Hashable, list[Member]](list)
        for nodes in members.values():
            if self._may_be_one(nodes):
                alike[self._kind(nodes)].append(tuple(nodes))
        for found in alike.values():
            if len(found) >= LEAST and (len(found[0]) > 1 or not self._is_well_done(found[0][0])):
                yield tuple(found)

    def _join(self) -> None:
        """Find the members: pointwise operators over tensors of one layout that share a value, and numbers that one of these alone uses.

        Between operators of one `_level` no other operator comes, so what has one level may run as one.
        """
        reader: dict[tuple[fx.Node, int], fx.Node] = {}
        for node in self._graph.nodes:
            if node.op != "call_function" or node in self._wholes:
                self._level[node] = 0 if node.op == "placeholder" else self._level_of(node)
                continue
            if self._is_pointwise(node):
                self._pointwise.add(node)
            level = self._level[node] = self._level_of(node)
            if node not in self._pointwise:
                continue
            self._leader[node] = node
            for source in _tensors(node, numbers=not _dim(node)):
                if source in self._pointwise and self._level[source] == level:
                    self._unite(source, node)
                elif source not in self._pointwise and _dim(node):
                    self._unite(reader.setdefault((source, level), node), node)
        tensors = [node for node in self._pointwise if _dim(node)]
        self._member = {node: self._first(node) for node in tensors}
        for node in reversed(self._graph.nodes):
            if node in self._pointwise and not _dim(node):
                users = {self._member.get(user) for user in self._users(node)}
                owner = users.pop() if len(users) == 1 else None
                if owner is not None and _dim(owner):
                    self._member[node] = owner
        numbers = [node for node in self._pointwise if node not in self._member]
        for node in numbers:  # those that were not made in a member are joined anew, without those that were
            self._leader[node] = node
        for node in sorted(numbers, key=self._order.__getitem__):
            for source in _tensors(node, numbers=True):
                if source in self._leader and source not in self._member and self._level[source] == self._level[node]:
                    self._unite(source, node)
        self._member |= {node: self._first(node) for node in numbers}

    def _is_pointwise(self, node: fx.Node) -> bool:
        """Whether `node` may be one of a member."""
        value, target = node.meta.get("val"), node.target
        if not isinstance(value, torch.Tensor) or not isinstance(target, OpOverload) or is_view(target):
            return False
        layout = _layout(value)
        if layout is None or not node.all_input_nodes:
            return False
        for source in node.all_input_nodes:
            read = source.meta.get("val")
            if not isinstance(read, torch.Tensor) or read.device != value.device or source.op == "get_attr":
                return False
            if read.dim() and _layout(read) != layout:
                return False
            if (
                read.dim()
                and node not in self._singles
                and source.op != "placeholder"
                and source not in self._pointwise
            ):
                return False  # such as an activation of a network, which the operators around it make
        if classify(node, registry) is not OpClass.POINTWISE:
            return False
        return target in _ALSO or all(map(is_in_place, made_of(node)))

    def _level_of(self, node: fx.Node) -> int:
        """How often, on the way from inputs to `node`, operators on tensors lead to others."""
        inside = node in self._pointwise
        return max(
            (
                self._level.get(source, 0) + (not inside and source in self._pointwise and bool(_dim(source)))
                for source in node.all_input_nodes
            ),
            default=0,
        )

    def _is_well_done(self, node: fx.Node) -> bool:
        """Whether PyTorch has one kernel for all members of the operator `node` alone: on lists, or counts (`fusepass.compile.writes`)."""
        return node in self._singles or (
            not _dim(node) and all(user.target is aten.copy_.default for user in node.users)
        )

    def _users(self, node: fx.Node) -> list[fx.Node]:
        """Those of `node`, without what is taken apart."""
        return [user for user in node.users if user not in self._wholes]

    def _unite(self, one: fx.Node, other: fx.Node) -> None:
        first, second = sorted((self._first(one), self._first(other)), key=self._order.__getitem__)
        self._leader[second] = first

    def _first(self, node: fx.Node) -> fx.Node:
        while (leader := self._leader[node]) is not node:
            self._leader[node] = self._leader[leader]
            node = leader
        return node

    def _may_be_one(self, nodes: Sequence[fx.Node]) -> bool:
        """Whether a member that no operator on lists was taken apart for begins and ends where the graph does."""
        inside = {*nodes}
        if not inside.isdisjoint(self._singles):
            return True
        users = {user for node in nodes for user in self._users(node)} - inside
        return all(user.op == "output" or user.target is aten.copy_.default or user in self._member for user in users)

    def _kind(self, nodes: Sequence[fx.Node]) -> Hashable:
        """What members of one list have in common."""
        inside, places = {*nodes}, dict[fx.Node, int]()

        def place(node: fx.Node) -> Hashable:
            return (places.setdefault(node, len(places)), node.meta["val"].dtype, bool(_dim(node)))

        operators = []
        for node in nodes:
            arguments = _frozen((node.args, tuple(node.kwargs.items())), place)
            used = any(user not in inside for user in self._users(node))
            operators.append((node.target, arguments, place(node), used, node.meta.get(ROUNDED)))
        first = nodes[0]
        return (first.meta["val"].device, self._level[first], *operators)


def _frozen(argument: Any, place: Any) -> Hashable:
    """An argument of an operator as a value; what is equal in Python but not for operators, such as 1 and 1.0, is told apart."""
    if isinstance(argument, fx.Node):
        return place(argument)  # type: ignore[no-any-return]
    if isinstance(argument, list | tuple):
        return tuple(_frozen(each, place) for each in argument)
    return type(argument), repr(argument)


def _dim(node: fx.Node) -> int:
    return int(node.meta["val"].dim())


def _tensors(node: fx.Node, *, numbers: bool) -> list[fx.Node]:
    """What `node` reads that is as its result: a number or more."""
    return [source for source in node.all_input_nodes if bool(_dim(source)) is not numbers]


def _layout(value: torch.Tensor) -> Hashable | None:
    """Equal for tensors whose elements lie in memory alike, without gaps; None for others."""
    return _layout_of(tuple(value.shape), value.stride())


@functools.lru_cache(maxsize=4096)
def _layout_of(shape: tuple[Any, ...], strides: tuple[Any, ...]) -> Hashable | None:
    if not all(isinstance(size, int) for size in (*shape, *strides)):
        return None
    dense = aten.is_non_overlapping_and_dense(torch.empty_strided(shape, strides, device="meta"))
    return (shape, tuple(stride for size, stride in zip(shape, strides, strict=True) if size != 1)) if dense else None
