"""Runs a specialisation step by step and takes the times: its operators one by one, then regions as they are."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from fusepass import measure
from fusepass.autotune.work import Work
from fusepass.codegen.detect import device_facts
from fusepass.compile.pipeline import CompiledGraph
from fusepass.patterns.aliasing import is_view
from fusepass.patterns.naming import location
from fusepass.patterns.ordering import execution_order
from fusepass.patterns.region import Region
from fusepass.patterns.traffic import nbytes
from fusepass.profiling.profile import OpTime, Profile, Step
from fusepass.profiling.walk import Item, Run, Values, given, last_reads, node_run, nodes_of
from fusepass.report.report import RegionReport, RegionState, SourceFile

_SECONDS = 1.0  # for the rounds of a profile, each way
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 30
_COPY_BYTES = 1 << 26
_PRODUCT_SIZE = {"cpu": 1024, "cuda": 4096}


@dataclass(frozen=True)
class _Limits:
    """Rates that the device reaches: bytes per second, how that is known, and operations per second (0: unknown)."""

    bandwidth: float
    source: str
    flop_rate: float


def profile(compiled: CompiledGraph, arguments: Sequence[torch.Tensor], written: frozenset[int]) -> Profile:
    """Time each step of `compiled` for these arguments, as `Signature.bind` gives them.

    Args:
        compiled: the graph and its regions.
        arguments: for the placeholders. They are read only.
        written: positions of those that the graph writes; copies are written instead.
    """
    graph = compiled.before.graph
    works = {work.region: work for work in compiled.works}
    items = execution_order(graph, list(works))
    flat = [node for item in items for node in nodes_of(item)]
    device = arguments[0].device if arguments else torch.device(compiled.report.device)
    values = given(graph, arguments, written)
    alone = {node: node_run(node, compiled.before) for node in flat}
    before = _Way({node: alone[node] for node in flat})
    after = _Way({i: _region_run(works[i]) if isinstance(i, Region) else alone[i] for i in items})
    with measure.as_compiled_code_runs(device), torch.random.fork_rng([device] if device.type == "cuda" else []):
        clock = measure.clock(device)
        _measured((before, after), values, clock)
        flops = {node: _flops(node) for node in flat}
        limits = _limits(device, clock, next((node for node in flat if flops[node]), None))
    reports = dict(zip((work.region for work in compiled.works), compiled.report.regions, strict=True))
    steps = _Steps(reports, limits, before.seconds(), after.seconds(), flops)
    made = tuple(steps.make(item) for item in items if _is_step(item))
    return Profile(compiled.report.model, str(device), limits.bandwidth, limits.source, limits.flop_rate, made)


def _region_run(work: Work) -> Run:
    """What computes a region's outputs, as the optimised model does."""
    call, arguments, outputs = work.call.run if work.call else work.original(), work.arguments, work.region.outputs

    def run(values: Values) -> None:
        result = call(*(values[node] for node in arguments))
        values.update(zip(outputs, result if len(outputs) > 1 else (result,), strict=True))

    return run


class _Way:
    """One way to run the graph, as items in order: its operators, or regions and the other operators."""

    def __init__(self, runs: Mapping[Item, Run]) -> None:
        self._runs = runs
        self._samples: dict[Item, list[float]] = {item: [] for item in runs if _is_step(item)}
        self._last_read = last_reads(list(runs))

    def go(self, given: Mapping[fx.Node, torch.Tensor], clock: measure.Clock, *, keep: bool) -> None:
        """One round; values are dropped once nobody reads them any more."""
        values: Values = dict(given)
        for number, (item, run) in enumerate(self._runs.items()):
            bound = partial(run, values)
            if item not in self._samples:
                bound()
            elif keep:
                self._samples[item].append(clock(bound))
            else:
                clock(bound)
            for node in self._last_read.get(number, ()):
                values.pop(node, None)

    def seconds(self) -> dict[Item, float]:
        """Typical seconds of each step."""
        return {item: measure.typical(taken) for item, taken in self._samples.items()}


def _measured(ways: Sequence[_Way], given: Mapping[fx.Node, torch.Tensor], clock: measure.Clock) -> None:
    """Rounds of all ways in turn; the first ones warm up."""
    for way in ways:
        way.go(given, clock, keep=False)
    end = time.perf_counter() + _SECONDS
    for done in range(_MOST_ROUNDS):
        if done >= _LEAST_ROUNDS and time.perf_counter() > end:
            break
        for way in ways:
            way.go(given, clock, keep=True)


def _is_step(item: fx.Node | Region) -> bool:
    """Whether `item` does work: no input, no view, no part of another's result."""
    return isinstance(item, Region) or (isinstance(item.target, OpOverload) and not is_view(item.target))


class _Steps:
    """Makes the steps of a profile, in order; remembers which step each value comes from."""

    def __init__(
        self,
        reports: Mapping[Region, RegionReport],
        limits: _Limits,
        before: Mapping[Item, float],
        after: Mapping[Item, float],
        flops: Mapping[fx.Node, int],
    ) -> None:
        self._reports = reports
        self._limits = limits
        self._before = before
        self._after = after
        self._flops = flops
        self._step_of: dict[fx.Node, str] = {}

    def make(self, item: Item) -> Step:
        """The step of a region or an operator."""
        nodes = nodes_of(item)
        inside = frozenset(nodes)
        producers = [_producer(source) for node in nodes for source in node.all_input_nodes if source not in inside]
        inputs = dict.fromkeys(self._step_of[node] for node in producers if node in self._step_of)
        self._step_of.update(dict.fromkeys(nodes, item.name))
        moved, saved, kind, sources, choice = self._told(item)
        flops = sum(self._flops[node] for node in nodes)
        by_copy = moved / self._limits.bandwidth
        by_products = flops / self._limits.flop_rate if flops else 0.0
        return Step(
            name=item.name,
            kind=kind,
            ops=tuple(_op_time(node, self._before[node]) for node in nodes if _is_step(node)),
            seconds=max(self._after[item], 1e-9),
            bytes_moved=moved,
            bytes_saved=saved,
            flops=flops,
            limit_seconds=max(by_copy, by_products),
            bound_by_products=by_products > by_copy,
            inputs=tuple(inputs),
            sources=sources,
            choice=choice,
        )

    def _told(self, item: Item) -> tuple[int, int, str, tuple[SourceFile, ...], str]:
        """Bytes moved and saved, kind, sources, and what was chosen."""
        if isinstance(item, fx.Node):
            return _bytes_alone(item), 0, "operator", (), ""
        report = self._reports[item]
        moved = report.bytes_after if report.state is RegionState.FUSED else report.bytes_before
        choice = str(report.choice) if report.choice else ""
        return moved, report.bytes_saved, report.state.value, report.sources, choice


def _op_time(node: fx.Node, seconds: float) -> OpTime:
    producers = (_producer(source) for source in node.all_input_nodes)
    inputs = dict.fromkeys(producer.name for producer in producers if _is_step(producer))
    return OpTime(node.name, str(node.target), location(node), seconds, tuple(inputs))


def _producer(node: fx.Node) -> fx.Node:
    """The operator behind views and parts of results."""
    while node.op == "call_function" and not _is_step(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _bytes_alone(node: fx.Node) -> int:
    if "empty" in str(node.target):  # nobody fills it
        return 0
    values = [source.meta["val"] for source in node.all_input_nodes] + [node.meta.get("val")]
    return sum(nbytes(leaf) for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor))


def _flops(node: fx.Node) -> int:
    """Operations of a convolution or matrix product by PyTorch's own formulas; 0 for all else."""
    from torch.utils.flop_counter import flop_registry

    formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    return int(formula(*args, **kwargs, out_val=node.meta["val"]))


def _limits(device: torch.device, clock: measure.Clock, product: fx.Node | None) -> _Limits:
    """The copy rate (measured on a CPU, by the driver's word on CUDA) and the rate of a product of that type."""
    rate = _product_rate(device, product.meta["val"].dtype, clock) if product is not None else 0.0
    if device.type == "cuda":
        return _Limits(device_facts(device).bandwidth, "from the memory's clock and width", rate)
    source, target = torch.ones(2, _COPY_BYTES, dtype=torch.uint8)
    samples = measure.in_turn({"copy": lambda: target.copy_(source)}, clock, 0.2, least=5, most=30).samples
    return _Limits(2 * _COPY_BYTES / measure.typical(samples["copy"]), "measured", rate)


def _product_rate(device: torch.device, dtype: torch.dtype, clock: measure.Clock) -> float:
    size = _PRODUCT_SIZE[device.type]
    a, b = torch.ones(2, size, size, dtype=dtype, device=device)
    samples = measure.in_turn({"product": lambda: a @ b}, clock, 0.2, least=5, most=30).samples
    return 2.0 * size**3 / measure.typical(samples["product"])
