"""Splits a graph into regions: candidates grow from every seed and compete by the memory traffic that they save."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import count
from operator import itemgetter, or_

import torch
from torch import fx

from fusepass.codegen.lowering import registry
from fusepass.patterns import horizontal, naming
from fusepass.patterns import library as library  # registers the patterns
from fusepass.patterns.dataflow import Candidate, Dataflow, Unit, bits, remove_dead
from fusepass.patterns.deciding import note_rounded
from fusepass.patterns.growth import grow
from fusepass.patterns.legality import Refusal
from fusepass.patterns.lists import LISTS, List
from fusepass.patterns.opclass import OpClass, Vocabulary
from fusepass.patterns.pattern import Pattern, patterns
from fusepass.patterns.region import Region, make_region
from fusepass.patterns.region_legality import (
    final_reason,
    no_cycle,
    not_too_many_arguments,
    not_too_many_ops,
    room_beside,
    room_taken,
    step_reason,
)
from fusepass.patterns.standalone import pays

__all__ = ["Partition", "Region", "partition"]

aten = torch.ops.aten


@dataclass(frozen=True)
class Partition:
    """What becomes of a graph.

    Attributes:
        regions: in graph order of their first operators; no operator is in two.
        refusals: one for each operator in no region, in graph order; views and ``getitem`` are none.
    """

    regions: tuple[Region, ...]
    refusals: tuple[Refusal, ...]


@dataclass(frozen=True, eq=False)
class _Offer:
    """A candidate with the region that it would be; one that is `alone` is none without a companion."""

    candidate: Candidate
    pattern: Pattern
    region: Region
    alone: bool = False

    def __lt__(self, other: _Offer) -> bool:
        """Whether this one is taken first: it saves more, or stands earlier in the graph."""
        return (-self.region.bytes_saved, self.first) < (-other.region.bytes_saved, other.first)

    @property
    def first(self) -> int:
        return next(bits(self.candidate.members))

    @cached_property
    def grounds(self) -> tuple[horizontal.Ground, ...]:
        """What it goes over, as independent operators may."""
        return horizontal.grounds(self.candidate, self.region, alone=self.alone)


def partition(graph_module: fx.GraphModule, vocabulary: Vocabulary = registry, lists: Sequence[List] = ()) -> Partition:
    """The regions of a graph, by greedy choice: most bytes saved first, what is left of the others grows again. Then those that go over the
    same memory become one, operators that are in none among them.

    Dead operators are removed from the graph. A view that several regions, or a region and others, read is copied in it
    for each of them, so that the nodes of regions are disjoint and a region's views serve nothing else.

    Args:
        graph_module: flat functional ATen; every node has a fake tensor in ``meta["val"]``.
        vocabulary: what code generation can express.
        lists: `fusepass.patterns.lists.find_lists` of it; each becomes a region.
    """
    size = len(graph_module.graph.nodes)
    remove_dead(graph_module.graph)
    note_rounded(graph_module.graph)
    flow = Dataflow(graph_module.graph, vocabulary)
    reasons: dict[int, str] = {}
    of_lists = [offer for members in lists if (offer := _of_list(flow, members)) is not None]
    chosen = [*_chosen(flow, reasons, _members(of_lists))]
    joined = _joined(flow, [*chosen, *_alone(flow, _members([*chosen, *of_lists]))])
    if len(joined) == 1 and not of_lists:
        joined = [_with_counts(flow, *joined)]
    joined = sorted([*joined, *of_lists], key=lambda offer: offer.first)
    regions = _own_views(graph_module.graph, flow, [offer.region for offer in joined])
    if not size == len(flow.position) == len(graph_module.graph.nodes):
        graph_module.recompile()
    taken = _members(joined)
    return Partition(_named(regions), tuple(_refusals(flow, taken, reasons)))


def _of_list(flow: Dataflow, members: List) -> _Offer | None:
    """The region of a list, which runs as one from now on; None where something else comes between its members."""
    nodes = {node for member in members for node in member}
    candidate = _together(flow, (unit for unit in flow.units if unit.node in nodes))
    if candidate.size < len(nodes) or no_cycle(candidate):
        return None
    flow.contract(candidate.members)
    name = naming.region_name(members[0])
    return _Offer(candidate, LISTS, replace(make_region(candidate, LISTS), name=name, members=members))


def _chosen(flow: Dataflow, reasons: dict[int, str], taken: int) -> Iterator[_Offer]:
    """The offers that save most, without overlap and legal beside each other and what is `taken`."""
    free = reduce(or_, (1 << unit.index for unit in flow.units if unit.op_class is not None), 0) & ~taken
    queue = [offer for pattern in patterns() for offer in _offers(flow, pattern, free, free, reasons)]
    heapq.heapify(queue)
    while queue:
        offer = heapq.heappop(queue)
        members = offer.candidate.members
        if members & ~free or not _is_legal(flow, offer.candidate):
            for rest in _offers(flow, offer.pattern, members & free, free, reasons):
                heapq.heappush(queue, rest)
            continue
        flow.contract(members)
        free &= ~members
        yield offer


def _members(offers: Iterable[_Offer]) -> int:
    """Mask of all their units."""
    return reduce(or_, (offer.candidate.members for offer in offers), 0)


def _alone(flow: Dataflow, taken: int) -> Iterator[_Offer]:
    """Each operator that is in no region, as what may become one with another."""
    seeds = {op_class: pattern for pattern in reversed(patterns()) for op_class in pattern.seed}
    for unit in flow.units:
        pattern = seeds.get(unit.op_class) if unit.op_class is not None else None
        if pattern is not None and not taken >> unit.index & 1:
            candidate = Candidate(flow).plus(unit)
            yield _Offer(candidate, pattern, make_region(candidate, pattern), alone=True)


def _joined(flow: Dataflow, offers: Iterable[_Offer]) -> list[_Offer]:
    """`offers` in graph order, with those that are better as one, as one, and without those that stay alone."""
    found = _Found(flow)
    for offer in sorted(offers, key=lambda offer: offer.first):
        while pair := _with_independent(flow, offer, found):
            other, offer = pair
            found.remove(other)
        found.add(offer)
    return sorted((offer for offer in found if not offer.alone), key=lambda offer: offer.first)


class _Found:
    """Offers in the order in which they came, by what they go over. Each runs as one already, and is known by its first unit."""

    def __init__(self, flow: Dataflow) -> None:
        self._flow = flow
        self._offers: dict[int, tuple[int, _Offer]] = {}
        self._over: defaultdict[Hashable, int] = defaultdict(int)
        self._taking: tuple[defaultdict[int, int], ...] = (defaultdict(int), defaultdict(int))
        self._number = count()

    def __iter__(self) -> Iterator[_Offer]:
        return (offer for _, offer in self._offers.values())

    def add(self, offer: _Offer) -> None:
        self._offers[offer.first] = next(self._number), offer
        for key in self._keys(offer):
            self._over[key] |= 1 << offer.first
        for taking, taken in zip(self._taking, room_taken(offer.candidate), strict=True):
            taking[taken] |= 1 << offer.first

    def remove(self, offer: _Offer) -> None:
        del self._offers[offer.first]
        for key in self._keys(offer):
            self._over[key] &= ~(1 << offer.first)
        for taking, taken in zip(self._taking, room_taken(offer.candidate), strict=True):
            taking[taken] &= ~(1 << offer.first)

    def beside(self, offer: _Offer, ground: horizontal.Ground) -> list[_Offer]:
        """Those that are better as one with `offer`, which goes over `ground`, too.

        Left out are most that would not be legal, so that each offer is tried with few: those with another of them between, and those that
        are too large beside it.
        """
        flow, first = self._flow, offer.first
        over = reduce(or_, map(self._over.__getitem__, horizontal.shared(ground, offer.region)), 0)
        for taking, room in zip(self._taking, room_beside(offer.candidate), strict=True):
            over &= reduce(or_, (mask for taken, mask in taking.items() if taken <= room), 0)
        before, after = over & flow.before[first], over & flow.after[first]
        near = over & ~(before | after)
        while before:
            last = before.bit_length() - 1
            near |= 1 << last
            before &= ~(flow.before[last] | 1 << last)
        while after:
            next_one = next(bits(after))
            near |= 1 << next_one
            after &= ~(flow.after[next_one] | 1 << next_one)
        return [other for _, other in sorted(map(self._offers.__getitem__, bits(near)), key=itemgetter(0))]

    def _keys(self, offer: _Offer) -> Iterator[Hashable]:
        return (key for ground in offer.grounds for key in horizontal.shared(ground, offer.region))


def _with_independent(flow: Dataflow, offer: _Offer, found: _Found) -> tuple[_Offer, _Offer] | None:
    """The first of those `found` that is better as one with `offer`, over what it goes over, and the two as one."""
    for ground in offer.grounds:
        for other in found.beside(offer, ground):
            candidate = other.candidate.joined(offer.candidate)
            if step_reason(candidate) is None:
                flow.contract(candidate.members)
                pattern = min(other.pattern, offer.pattern, key=patterns().index)
                return other, _Offer(candidate, pattern, make_region(candidate, pattern))
    return None


def _with_counts(flow: Dataflow, offer: _Offer) -> _Offer:
    """`offer`, the only one of a graph, with how a call counts itself, so that it does all that the call does.

    A count waits for nothing, and nothing but the write of it waits for it.
    """
    counts = [unit for unit in flow.units if _is_count(unit, offer.region)]
    candidate = _together(flow, (*offer.candidate.units, *counts))
    if not counts or not_too_many_arguments(candidate) or not_too_many_ops(candidate):
        return offer
    flow.contract(candidate.members)
    region = replace(make_region(candidate, offer.pattern), name=offer.region.name)
    return _Offer(candidate, offer.pattern, region)


def _is_count(unit: Unit, region: Region) -> bool:
    """Whether it makes a single number of one that the graph is given, to be written there, on the device of `region`."""
    value, users = unit.node.meta.get("val"), [*unit.node.users]
    if (
        unit.op_class is not OpClass.POINTWISE
        or len(unit.bases) != 1
        or len(users) != 1
        or not isinstance(value, torch.Tensor)
    ):
        return False
    (source,), (user,) = unit.bases, users
    written = source.op == "placeholder" and user.target is aten.copy_.default and user.args[0] is source
    return written and value.dim() == 0 and value.device == region.outputs[0].meta["val"].device


def _is_legal(flow: Dataflow, candidate: Candidate) -> bool:
    """Whether `candidate` is so beside the regions chosen since it grew, which have changed what waits for what."""
    return step_reason(_together(flow, candidate.units)) is None


def _together(flow: Dataflow, units: Iterable[Unit]) -> Candidate:
    """The set of `units`, and what waits for them by now."""
    return reduce(Candidate.plus, sorted(units, key=lambda unit: unit.index), Candidate(flow))


def _offers(flow: Dataflow, pattern: Pattern, seeds: int, free: int, reasons: dict[int, str]) -> Iterator[_Offer]:
    """Every candidate of `pattern` that gains something, from `seeds` over `free` units."""
    # Seeds that a pattern can absorb meet in one candidate; where a limit parts them, units stay in the first.
    absorbs_seeds = bool(pattern.seed & (pattern.upstream | pattern.downstream))
    covered = 0
    for index in bits(seeds):
        seed = flow.units[index]
        if seed.op_class not in pattern.seed or covered >> index & 1:
            continue
        candidate = grow(flow, seed, pattern, free & ~covered if absorbs_seeds else free, reasons)
        covered |= candidate.members
        reason = final_reason(candidate)
        if reason is not None:
            reasons.update(dict.fromkeys(bits(candidate.members), reason))
        elif _counts(candidate) >= pattern.min_ops:
            region = make_region(candidate, pattern)
            if _gains(candidate, region):
                yield _Offer(candidate, pattern, region)


def _counts(candidate: Candidate) -> int:
    """The operators of `candidate` that are kernels in PyTorch: all but those that fill a tensor."""
    return sum(bool(unit.reads) for unit in candidate.units)


def _gains(candidate: Candidate, region: Region) -> bool:
    """Whether the region saves traffic or kernels, or is one operator that generated code does better."""
    if _counts(candidate) > 1:
        return region.bytes_saved >= 0
    (unit,) = (unit for unit in candidate.units if unit.reads)
    return pays(unit)


def _own_views(graph: fx.Graph, flow: Dataflow, regions: list[Region]) -> list[Region]:
    """The regions with views of their own in place of those that others read as well."""
    owning = []
    for region in regions:
        own = {node: node for node in region.nodes}
        for view in reversed(region.nodes):
            inside = set(own.values())
            if view not in flow.views or all(user in inside for user in view.users):
                continue
            with graph.inserting_after(view):
                own[view] = graph.node_copy(view)
            for user in inside & view.users.keys():
                user.replace_input_with(view, own[view])
        owning.append(replace(region, nodes=tuple(own.values())))
    return owning


def _named(regions: list[Region]) -> tuple[Region, ...]:
    """The regions, no two with the same name."""
    taken: dict[str, Region] = {}
    for region in regions:
        name = naming.unique(region.name, taken)
        taken[name] = replace(region, name=name)
    return tuple(taken.values())


def _refusals(flow: Dataflow, taken: int, reasons: dict[int, str]) -> Iterator[Refusal]:
    for unit in flow.units:
        if taken >> unit.index & 1 or unit.node.op != "call_function":
            continue
        reason = reasons.get(unit.index, "nothing beside it to fuse with")
        yield unit.refusal or Refusal(reason, unit.node.name, str(unit.node.target.overloadpacket))  # type: ignore[union-attr]
