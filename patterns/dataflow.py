"""Who reads whom in a graph: units that fuse as a whole, views looked through, reachability as bit masks.

A mask is an int whose bit ``i`` stands for unit ``i`` or, for values, for the graph's ``i``-th node. The graph of units
is acyclic, and `Dataflow.contract` keeps it so: it makes one node of a chosen region, as in a quotient graph.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise

import torch
from torch import fx
from torch._ops import OpOverload

from fusepass.codegen.lowering.anchors import PRODUCTS
from fusepass.patterns.aliasing import written
from fusepass.patterns.effects import is_constant_number, is_random
from fusepass.patterns.legality import Refusal
from fusepass.patterns.memo import remembered
from fusepass.patterns.opclass import OpClass, Vocabulary, classify

aten = torch.ops.aten

WRITES = "writes"
"""In ``meta`` of a node: whether it calls generated code that writes over some of its arguments."""

TRANSPOSES = frozenset({aten.t.default, aten.transpose.int, aten.permute.default})
"""Operators that may transpose a matrix."""


@dataclass(frozen=True, eq=False, slots=True)
class Unit:
    """An operator with the ``getitem`` nodes of its results: the smallest thing that a region takes.

    Attributes:
        index: its position among the units, which is topological.
        node: the operator.
        values: the nodes of the tensors it makes.
        bases: the tensors it reads once all views are looked through.
        op_class: None for what is in no region.
        refusal: why not, for an operator in no region.
        looks_at: mask of `bases`.
        reads: mask of the nodes whose tensors it reads once the views inside its region are looked through.
        makes: mask of `values`.
    """

    index: int
    node: fx.Node
    values: tuple[fx.Node, ...]
    bases: tuple[fx.Node, ...]
    op_class: OpClass | None
    refusal: Refusal | None
    looks_at: int
    reads: int
    makes: int


@dataclass(frozen=True, eq=False, slots=True)
class Candidate:
    """A set of units that may become a region.

    Attributes:
        flow: the graph.
        members, anchors: masks of units, the latter of those of class ANCHOR.
        before, after: masks of the units that the members wait for and of those that wait for them.
        reads, values: masks of the nodes that the members read and make.
        open: mask of the nodes among `values` that units outside read.
    """

    flow: Dataflow
    members: int = 0
    anchors: int = 0
    before: int = 0
    after: int = 0
    reads: int = 0
    values: int = 0
    open: int = 0

    def plus(self, unit: Unit) -> Candidate:
        """This set and `unit`."""
        bit, flow = 1 << unit.index, self.flow
        members, opened = self.members | bit, self.open
        for place in bits((unit.looks_at & self.values) | unit.makes):
            outside = flow.readers[flow.nodes[place]] & ~members
            opened = opened | 1 << place if outside else opened & ~(1 << place)
        return Candidate(
            flow,
            members=members,
            anchors=self.anchors | bit if unit.op_class is OpClass.ANCHOR else self.anchors,
            before=self.before | flow.before[unit.index],
            after=self.after | flow.after[unit.index],
            reads=self.reads | unit.reads,
            values=self.values | unit.makes,
            open=opened,
        )

    def joined(self, other: Candidate) -> Candidate:
        """This set and `other`, apart from it; each of both runs as one already (`Dataflow.contract`), so one unit waits for what all wait for."""
        flow, members, opened = self.flow, self.members | other.members, 0
        for place in bits(self.open | other.open):
            if flow.readers[flow.nodes[place]] & ~members:
                opened |= 1 << place
        one, two = next(bits(self.members)), next(bits(other.members))
        return Candidate(
            flow,
            members=members,
            anchors=self.anchors | other.anchors,
            before=flow.before[one] | flow.before[two],
            after=flow.after[one] | flow.after[two],
            reads=self.reads | other.reads,
            values=self.values | other.values,
            open=opened,
        )

    @property
    def units(self) -> list[Unit]:
        """The members in topological order."""
        return [self.flow.units[index] for index in bits(self.members)]

    @property
    def size(self) -> int:
        """How many operators these are."""
        return self.members.bit_count()

    @property
    def before_anchor(self) -> int:
        """Mask of the members that an anchor among them waits for."""
        anchors = (self.flow.before[index] for index in bits(self.anchors))
        return reduce(operator.or_, anchors, 0) & self.members

    @property
    def input_count(self) -> int:
        return (self.reads & ~self.values).bit_count()

    @property
    def output_count(self) -> int:
        return self.open.bit_count()

    @property
    def lasting_inputs(self) -> int:
        """How many inputs this and all larger sets have: what no region makes."""
        return (self.reads & self.flow.given).bit_count()

    @property
    def lasting_outputs(self) -> int:
        """How many outputs this and all larger sets have: what is read by units in no region."""
        return (self.values & self.flow.taken).bit_count()

    @property
    def reads_tensors(self) -> bool:
        """Whether any input is more than a number."""
        return bool(self.reads & ~self.values & ~self.flow.numbers)

    def escapes(self, value: fx.Node) -> bool:
        """Whether `value`, which a member makes, is read by a unit outside, perhaps through views."""
        return bool(self.open >> self.flow.position[value] & 1)


class Dataflow:
    """The units of a graph and how they depend on each other.

    Besides data, dependence is order: what writes to memory comes after earlier and before later readers of it, and
    operators with effects keep their order.

    Attributes:
        nodes: of the graph, in its order.
        units: in topological order; the last is the graph's output.
        readers: per node that makes a tensor, the mask of the units that read it, directly or through views.
        before, after: per unit, the masks of all units it waits for and of all that wait for it.
        numbers: mask of the nodes that are numbers to kernels.
        views: the views that can be looked through.
        given, taken: masks of the nodes that units of no class, which are in no region, or the graph's caller make, and read.
    """

    def __init__(self, graph: fx.Graph, vocabulary: Vocabulary) -> None:
        self.nodes = list(graph.nodes)
        self.position = {node: number for number, node in enumerate(self.nodes)}
        self.views: set[fx.Node] = set()
        self.units: list[Unit] = []
        self.readers: dict[fx.Node, int] = defaultdict(int)
        self.numbers = sum(
            1 << self.position[node] for node in graph.find_nodes(op="get_attr") if is_constant_number(node)
        )
        self._unit_of: dict[fx.Node, Unit] = {}
        for node in graph.nodes:
            if node.op not in ("placeholder", "get_attr"):
                self._add(node, vocabulary)
        self.before, self.after = self._reachability()
        self.given, self.taken = (1 << len(self.nodes)) - 1, 0
        for unit in self.units:
            if unit.op_class is None:
                self.taken |= unit.looks_at
            else:
                self.given &= ~unit.makes

    def base(self, node: fx.Node) -> fx.Node:
        """The tensor that `node` is a view of, through views of views; `node` itself where it is none."""
        while node in self.views:
            node = node.all_input_nodes[0]
        return node

    def inner_views(self, source: fx.Node, reader: fx.Node, op_class: OpClass | None) -> list[fx.Node]:
        """The views between `source` and its base that a region makes itself for the operator `reader`, of `op_class`.

        An anchor is a call of a library, of which a matrix product reads a transposed operand, but nothing is computed on the way.
        """
        views = []
        while source in self.views:
            views.append(source)
            source = source.all_input_nodes[0]
        transposed = len(views) == 1 and views[0].target in TRANSPOSES and reader.target in PRODUCTS
        return views if op_class is not OpClass.ANCHOR or transposed else []

    def neighbours(self, unit: Unit) -> Iterator[tuple[Unit, bool]]:
        """The units that read from `unit` or that it reads from, and whether only through views."""
        for value in unit.values:
            for index in bits(self.readers[value]):
                reader = self.units[index]
                yield reader, value not in reader.node.all_input_nodes
        for node in unit.node.all_input_nodes:
            made_by = self._unit_of.get(self.base(node))
            if made_by is not None:
                yield made_by, node in self.views

    def contract(self, members: int) -> None:
        """Let `members` wait for each other's dependences, as they run as one.

        What waits for each member waits for all that they wait for already, and the other way round: only the others change.
        """
        before, after = members, members
        known_before, known_after = -1, -1
        for index in bits(members):
            before |= self.before[index]
            after |= self.after[index]
            known_before &= self.before[index]
            known_after &= self.after[index]
        for index in bits(after & ~known_after):
            self.before[index] |= before
        for index in bits(before & ~known_before):
            self.after[index] |= after

    def _add(self, node: fx.Node, vocabulary: Vocabulary) -> None:
        """Make `node` a view, a value of an earlier unit, or a unit of its own."""
        producer = self._unit_of.get(node.all_input_nodes[0]) if node.target is operator.getitem else None
        if producer is not None:
            self._unit_of[node] = producer
            return
        if node.target is operator.getitem and node.all_input_nodes[0] in self.views:
            self.views.add(node)  # as what it is a part of, which need not be classified once for each part
            return
        found = classify(node, vocabulary) if node.op == "call_function" else None
        if found is OpClass.VIEW:
            self.views.add(node)
            return
        values: tuple[fx.Node, ...] = (node,)
        if isinstance(node.meta.get("val"), tuple | list):
            values = tuple(user for user in node.users if user.target is operator.getitem)
        op_class = found if isinstance(found, OpClass) else None
        reads = 0
        for source in node.all_input_nodes:
            self.readers[self.base(source)] |= 1 << len(self.units)
            views = self.inner_views(source, node, op_class)
            reads |= 1 << self.position[views[-1].all_input_nodes[0] if views else source]
        bases = tuple(map(self.base, node.all_input_nodes))
        unit = Unit(
            index=len(self.units),
            node=node,
            values=values,
            bases=bases,
            looks_at=reduce(operator.or_, (1 << self.position[base] for base in bases), 0),
            op_class=op_class,
            refusal=found if isinstance(found, Refusal) else None,
            reads=reads,
            makes=sum(1 << self.position[value] for value in values),
        )
        self.units.append(unit)
        self._unit_of[node] = unit

    def _reachability(self) -> tuple[list[int], list[int]]:
        """All units before each unit, and all after it. Every dependence goes from an earlier to a later unit."""
        before, after = [0] * len(self.units), [0] * len(self.units)
        direct = self._dependences()
        for index, needed in enumerate(direct):
            for other in needed:
                before[index] |= before[other] | 1 << other
        for index in reversed(range(len(self.units))):
            for other in direct[index]:
                after[other] |= after[index] | 1 << index
        return before, after

    def _dependences(self) -> list[set[int]]:
        """Per unit, those that it must come after."""
        direct: list[set[int]] = [set() for _ in self.units]
        for value, readers in self.readers.items():
            if value in self._unit_of:
                for index in bits(readers):
                    direct[index].add(self._unit_of[value].index)
        for unit in self.units:
            for value in written(unit.node):
                for index in bits(self.readers[self.base(value)]):
                    direct[max(index, unit.index)].add(min(index, unit.index))
        effects = [unit.index for unit in self.units if has_effect(unit.node)]
        for earlier, later in pairwise([*effects, len(self.units) - 1]):
            direct[later].add(earlier)
        for index, needed in enumerate(direct):
            needed.discard(index)
        return direct


def has_effect(node: fx.Node) -> bool:
    """Whether `node` does more than give a result: it writes, draws random numbers, or may raise."""
    if node.op != "call_function" or node.target is aten._assert_tensor_metadata.default:
        return False  # tracing has checked the metadata, which the graph is specialised on
    if isinstance(node.target, OpOverload):
        return is_random(node.target) or _acts(node.target)
    return node.meta.get(WRITES, False) or node.is_impure()


@remembered
def _acts(target: OpOverload) -> bool:
    """Whether calls of `target` are impure for PyTorch, which takes long to say so."""
    return fx.Graph().call_function(target).is_impure()


def remove_dead(graph: fx.Graph) -> None:
    """Erase the operators whose results nobody reads and that have no effect."""
    for node in reversed(graph.nodes):
        if node.op in ("call_function", "get_attr") and not node.users and not has_effect(node):
            graph.erase_node(node)


def bits(mask: int) -> Iterator[int]:
    """The numbers of the bits that are set, in ascending order."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
