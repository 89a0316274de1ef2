"""The pipeline from an ATen graph to a rewritten one: simplify, partition, lower, generate, build, splice."""

from __future__ import annotations

import contextvars
import functools
import itertools
import logging
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from math import inf
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from fusepass.autotune.candidates import build_candidates, load_candidates
from fusepass.autotune.generation import generate_all
from fusepass.autotune.layout import chosen_layout
from fusepass.autotune.recorded import keep
from fusepass.autotune.tune import choose, remember, settle
from fusepass.autotune.tune_budget import spend
from fusepass.autotune.whole_graph import leave_out
from fusepass.autotune.work import Work
from fusepass.background import threads_soon
from fusepass.codegen import build, choices
from fusepass.codegen.detect import device_facts
from fusepass.codegen.forms import Forms
from fusepass.codegen.ir.anchor_format import AnchorFormat
from fusepass.codegen.search.others import Begin
from fusepass.codegen.search.space import handed_format
from fusepass.compile import recalled
from fusepass.compile.alike import follow, note_alike
from fusepass.compile.boundary_views import edges
from fusepass.compile.casts import gather_casts
from fusepass.compile.chunked import compile_steps
from fusepass.compile.chunks import chunk_products
from fusepass.compile.constants import compute_constants
from fusepass.compile.corrections import correct
from fusepass.compile.disabled import warn_of_unknown_names
from fusepass.compile.draws import gather_draws
from fusepass.compile.dropout import split_dropout
from fusepass.compile.foreach import write_lists_in_place
from fusepass.compile.grouped import group_queries
from fusepass.compile.in_place import write_rows_in_place
from fusepass.compile.layout_propagation import Layouts, hand_over
from fusepass.compile.layouts import use_layouts
from fusepass.compile.multiply_add import spell_out
from fusepass.compile.padded_products import pad_products
from fusepass.compile.segments import Segments, find_cut, segments_of
from fusepass.compile.splice import empty_arguments, keep_code, only_call, splice, subgraph, with_targets
from fusepass.compile.summary import summary
from fusepass.compile.writes import gather_writes, updates_of
from fusepass.config import current
from fusepass.garbage import collector_paused, collector_resumed
from fusepass.patterns.lists import find_lists
from fusepass.patterns.one_layout import ONE_LAYOUT, contiguous_sums
from fusepass.patterns.partition import Region, partition
from fusepass.patterns.simplify import Application, simplify
from fusepass.progress import tell
from fusepass.report.choice import EAGER
from fusepass.report.report import RegionState, Report
from fusepass.runtime import fast_path, masks
from fusepass.runtime.fallbacks import FallbackCounter
from fusepass.runtime.meta import Meta
from fusepass.runtime.operators import shorten
from fusepass.runtime.ops import Operators, register
from fusepass.runtime.packed import Packed
from fusepass.runtime.region import FusedRegion

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parts:
    """What a compiled graph is made of; calls need none of it.

    Attributes:
        before: the captured graph, simplified, every operator in it; `works` are regions of it.
        works: its regions, with what became of them.
        spliced: makes `CompiledGraph.graph_module` when it is first called.
        rewritten: makes the graph that `CompiledGraph.call` runs, as a graph, with the regions' functions in it.
        called: by its name in `works`, what `call` runs a region by; its `run` is in that graph.
    """

    before: fx.GraphModule
    works: tuple[Work, ...]
    spliced: Callable[[], fx.GraphModule]
    rewritten: Callable[[], fx.GraphModule]
    called: Mapping[str, FusedRegion]


@dataclass(frozen=True)
class CompiledGraph:
    """One specialisation.

    Attributes:
        graph: what was compiled: simplified, or as it was captured where an earlier process has simplified it.
        parts: gives what it is made of; where an earlier process has compiled it, that is compiled once more.
        call: the same function as `graph_module` without the dispatcher, for plain tensors outside of every dispatch mode.
            Where callers want that, of a list that it empties, so that arguments that nobody else holds are freed behind their last use.
        without_python: makes what does as `call` with launchers that need no Python, once `fusepass.runtime.fast_path` is there; with
            the positions of what it takes among the arguments of `call`.
        saved: seconds a call that the rewrites save, by the model of costs.
        report: what was fused and what was not; fallbacks counted so far are read through `fallbacks`.
        fallbacks: counts calls that ran as the original operators.
        segments: the same as `call` for CUDA graphs, where it is cut; None where it is not.
    """

    graph: fx.GraphModule
    parts: Callable[[], Parts]
    call: Callable[..., tuple[Any, ...]]
    without_python: Callable[[], tuple[Callable[..., tuple[Any, ...]], Sequence[int]]]
    saved: float
    report: Report
    fallbacks: FallbackCounter
    segments: Segments | None = None

    @property
    def before(self) -> fx.GraphModule:
        """As `Parts` has it."""
        return self.parts().before

    @property
    def works(self) -> tuple[Work, ...]:
        """As `Parts` has them."""
        return self.parts().works

    @property
    def called(self) -> Mapping[str, FusedRegion]:
        """As `Parts` has them."""
        return self.parts().called

    def rewritten(self) -> fx.GraphModule:
        """As `Parts` makes it."""
        return self.parts().rewritten()

    @property
    def calls(self) -> int:
        """Regions, and operators that run as they were."""
        fused = sum(region.state is RegionState.FUSED for region in self.report.regions)
        return self.report.ops_total - self.report.ops_fused + fused

    @property
    def seconds_saved(self) -> float:
        """Seconds a call that rewrites and regions save, as far as that was measured; infinite where a region was not."""
        fused = (region for region in self.report.regions if region.state is RegionState.FUSED)
        return self.saved + sum(inf if region.choice is None else region.choice.seconds_saved for region in fused)

    @property
    def graph_module(self) -> fx.GraphModule:
        """Takes the captured graph's placeholders, returns its flat tuple; calls registered operators, so it can be
        traced, compiled and exported.
        """
        return self.parts().spliced()


@dataclass
class _Clock:
    """Seconds per stage, in the order in which stages ran."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str, *, waits: bool = False) -> Iterator[None]:
        """Clock a stage; one that does not wait for compilers or devices keeps the garbage collector off."""
        start = time.perf_counter()
        try:
            with collector_resumed() if waits else collector_paused():
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def next_of(self, name: str, works: Iterator[Work]) -> Work | None:
        """The next of `works`, for which it may have to wait; None at their end."""
        with self.stage(name, waits=True):
            return next(works, None)


_PLENTY = 8
"""Compilers at once from which on one more, for the library that calls without Python, does not delay those of the regions."""


def compile_graph(
    graph: fx.GraphModule,
    *,
    name: str,
    fallbacks: FallbackCounter | None = None,
    forms: Forms | None = None,
    exact_inputs: bool = False,
    applied: Sequence[Application] = (),
    emptying: bool = False,
    visible: int = sys.maxsize,
    parameters: Collection[int] = (),
    lists: bool = True,
) -> CompiledGraph:
    """Fuse a flat functional ATen graph whose nodes carry fake tensors.

    A region that cannot be generated or built keeps its operators, is reported and counted; nothing is raised for a valid graph.

    Args:
        graph: as `fusepass.capture.trace.capture` or AOTAutograd makes it; it is not changed.
        name: the model's name, for the report.
        fallbacks: the counter to use; a new one by default.
        forms: the libraries of the model for other sizes; none by default.
        exact_inputs: whether the caller compares strides, so that regions need not.
        applied: rewrites that took place before, for the report.
        emptying: whether `CompiledGraph.call` takes a list that it empties.
        visible: how many of the results somebody may write to; others are saved for backward.
        parameters: the positions of placeholders that are parameters or buffers, the same from call to call.
        lists: whether there may be regions of `fusepass.patterns.lists`, of which none or all run as generated code.
    """
    warn_of_unknown_names()
    counter = fallbacks if fallbacks is not None else FallbackCounter()
    forms = forms or Forms()
    compiled = functools.partial(
        _compiled, graph, name=name, counter=counter, forms=forms, exact_inputs=exact_inputs, applied=applied,
        emptying=emptying, visible=visible, parameters=parameters, lists=lists,
    )  # fmt: skip
    if not exact_inputs or emptying or applied or forms.knows_sizes:
        forms.catch_up()
        return compiled()
    clock = _Clock()
    with clock.stage("look up"):
        key = recalled.key_of(graph, visible=visible, parameters=tuple(parameters), lists=lists)
        parts = _Later(lambda: compiled().parts())
        found = None if key is None else recalled.recall(key, name, counter, lambda: parts().called)
    if found is None:
        with choices.asked() as asked:
            return compiled(keep=None if key is None else functools.partial(recalled.keep, key, asked))
    forms.tell_later(parts)
    fast_path.begin()
    _count_masks(found.direct.graph, counter)
    report = replace(found.report, seconds=tuple(clock.seconds.items()))
    _log_report(report)
    without_python = _without_python(found.direct, found.regions, found.only)
    keep_code(found.direct)
    return CompiledGraph(graph, parts, found.direct.forward, without_python, found.saved, report, counter)


class _Later:
    """What `make` gives under the options of now, when it is first called."""

    def __init__(self, make: Callable[[], Parts]) -> None:
        self._make = make
        self._surroundings = contextvars.copy_context()
        self._lock = threading.RLock()
        self._made: Parts | None = None

    def __call__(self) -> Parts:
        with self._lock:
            if self._made is None:
                self._made = self._surroundings.run(self._make)
            return self._made


def _compiled(
    graph: fx.GraphModule,
    *,
    name: str,
    counter: FallbackCounter,
    forms: Forms,
    exact_inputs: bool,
    applied: Sequence[Application],
    emptying: bool,
    visible: int,
    parameters: Collection[int],
    lists: bool,
    keep: Callable[[Mapping[str, Any], float, Report], None] | None = None,
) -> CompiledGraph:
    """As `compile_graph`, whatever became of such a graph earlier; `keep` gets what a later process may need, where that can be written."""
    given = graph
    clock = _Clock()
    forms.next_round()
    tell("simplify")
    with clock.stage("simplify"):
        graph = _LazyGraphModule(graph, _copied(graph.graph))  # few ever read its code, which takes long to make
        correct(graph.graph)
        spell_out(graph.graph)
        split_dropout(graph.graph)
        _count_masks(graph.graph, counter)
        group_queries(graph.graph)
        applications = [*applied, *chunk_products(graph.graph), *simplify(graph), *compute_constants(graph)]
        pad_products(graph.graph)
        graph, first_sum = contiguous_sums(graph) if current().allows(ONE_LAYOUT) else (graph, None)
        applications += [Application(ONE_LAYOUT, first_sum)] if first_sum else []
    packed: Packed | None = None
    if exact_inputs:
        tell("layout")
        with clock.stage("layout", waits=True):
            graph, laid_out, packed = chosen_layout(graph, parameters, forms)
            applications += laid_out
    tell("partition")
    with clock.stage("partition"):
        parts = partition(graph, lists=find_lists(graph.graph) if lists else ())
    if parts.regions and current().jobs >= _PLENTY:
        fast_path.begin()
    works, fused, layouts = _fused(graph, parts.regions, forms, counter, clock, exact=exact_inputs)
    for work in works:
        _tell(work, counter)
        remember(work, forms)
    with clock.stage("whole graph", waits=True):
        leave_out(graph, works, functools.partial(_spliced, graph, fused, packed), forms, apart=not layouts)
    if any(work.region.members and work.state is not RegionState.FUSED for work in works):
        # Taken apart, PyTorch's operators on lists would be a launch for each tensor.
        return _compiled(
            given, name=name, counter=counter, forms=forms, exact_inputs=exact_inputs, applied=applied, emptying=emptying,
            visible=visible, parameters=parameters, lists=False, keep=keep,
        )  # fmt: skip
    if layouts and not any(work.state is RegionState.FUSED for work in works):
        _put_back(layouts)
    with clock.stage("splice"):
        kept = [work for work in works if work.state is RegionState.FUSED]
        for work in kept:
            work.call = fused[work.region.name]
        regions = [work.region for work in kept]
        ways = edges(kept, fused)
        seen = {key: way.seen(fused[key]) for key, way in ways.items()}
        own_ways = {}
        for work in kept:
            key = work.region.name
            own_ways[key] = way = ways[key].writing(seen[key], work.updates)
            work.writes = [way.results[number] for number in way.written]
        called = {key: seen[key].writing(way.written) for key, way in own_ways.items()}
        direct = splice(graph, regions, own_ways, called)
        if packed is not None:
            packed.use(direct)
        steps: list[CompiledGraph] = []

        def compile_step(step: fx.GraphModule) -> Callable[..., tuple[Any, ...]]:
            steps.append(compile_graph(step, name=name, fallbacks=counter))
            return steps[-1].call

        compile_steps(direct.graph, compile_step)
        gather_casts(direct)
        write_lists_in_place(direct)
        write_rows_in_place(direct)
        gather_writes(direct)
        kept_regions = use_layouts(direct.graph, exact_inputs=exact_inputs, visible=visible)
        gather_draws(direct.graph)
        for each in {*fused.values(), *seen.values(), *called.values(), *kept_regions}:
            each.stay()

        def rewritten() -> _LazyGraphModule:
            made = splice(graph, regions, own_ways, {key: value.run for key, value in called.items()})
            gather_casts(made)
            gather_writes(made)
            return made

        only = None if emptying else only_call(direct.graph)
        record = None
        if keep is not None and not any(work.lost for work in works):
            own = {work.region.name: functools.partial(operators_of, graph, work) for work in kept}
            record = recalled.record_of(direct, kept_regions, packed, lambda name: own[name](), only)
        cut = find_cut(direct.graph, visible) if emptying else None
        shorten(direct)
        segments = None if cut is None else segments_of(direct, cut)
        if emptying:
            empty_arguments(direct.graph)
        direct.real_recompile()
        without_python = _without_python(direct, kept_regions, only)
        keep_code(direct)
        for work in works:
            work.let_go()
    report = summary(name, graph, parts, works, applications, clock.seconds, [step.report for step in steps])
    _log_report(report)

    @functools.cache
    def spliced() -> fx.GraphModule:
        own = {work.region.name: functools.partial(operators_of, graph, work) for work in kept}
        operators = {key: register(value, own[key]) for key, value in seen.items()}
        made = splice(graph, regions, ways, operators)
        made.real_recompile()
        return made

    fast_path.begin()  # behind the builds and trials that the call waits for
    saved = sum(application.before.seconds - application.after.seconds for application in applications)
    if keep is not None and record is not None:
        keep(record, saved, report)
    made = Parts(graph, tuple(works), spliced, rewritten, called)
    return CompiledGraph(graph, lambda: made, direct.forward, without_python, saved, report, counter, segments)


def _count_masks(graph: fx.Graph, counter: FallbackCounter) -> None:
    """Let masks of dropout that PyTorch's operators make count as fallbacks of whoever has some."""
    if graph.find_nodes(op="call_function", target=masks.KEPT):
        counter.join(masks.fallbacks)


def _without_python(
    direct: fx.GraphModule, called: Sequence[FusedRegion], only: recalled.Only | None
) -> Callable[[], tuple[Callable[..., tuple[Any, ...]], Sequence[int]]]:
    """`CompiledGraph.without_python` of `direct`, which calls these regions; `only` says of what one call it consists, if it does."""
    regions, count = {region.run: region for region in called}, len(direct.graph.find_nodes(op="placeholder"))

    def made() -> tuple[Callable[..., tuple[Any, ...]], Sequence[int]]:
        if only is not None and only[0] in regions:
            return regions[only[0]].launcher(always_tuple=True), only[1]
        return with_targets(direct, {run: value.launcher() for run, value in regions.items()}), range(count)

    return made


def _log_report(report: Report) -> None:
    """Tell loggers what became of a graph, and of its parts where they want to know."""
    fused = sum(region.state is RegionState.FUSED for region in report.regions)
    seconds = sum(taken for _, taken in report.seconds)
    words = "%s: %d of %d operators in %d fused regions of %d, compiled in %.2f s"
    _log.info(words, report.model, report.ops_fused, report.ops_total, fused, len(report.regions), seconds)
    if _log.isEnabledFor(logging.DEBUG):
        for region in report.regions:
            why = region.reason or region.choice or "nothing was to be chosen"
            _log.debug("%s: %s is %s: %s", report.model, region.name, region.state, why)
        for refused in report.refusals:
            _log.debug("%s: %s (%s) is not fused: %s", report.model, refused.node, refused.target, refused.reason)


def _fused(
    graph: fx.GraphModule,
    regions: Sequence[Region],
    forms: Forms,
    counter: FallbackCounter,
    clock: _Clock,
    *,
    exact: bool,
) -> tuple[list[Work], dict[str, FusedRegion], Layouts]:
    """What became of each region, those that can be called, and results that lie otherwise now: a region writes as the next one reads.

    Operators that run as they were would pass on a layout that is not theirs. So regions beside these are made once more, for values that lie as they did.
    """
    loaded: dict[str, dict[str, FusedRegion]] = {}
    layouts: Layouts | None = None
    known: dict[Region, Work] = {}
    while True:
        with clock.stage("generate"), threads_soon():
            works, handed = generated(
                graph, regions, forms, exact=exact, known=known, handing=layouts is None, begin=build.begin
            )
        layouts = handed if layouts is None else layouts
        fresh = [work for work in works if work.region not in known]
        loaded |= _chosen(fresh, counter, clock)
        beside = {
            node for work in works if work.state is not RegionState.FUSED for node in _edges_of(work) if node in layouts
        }
        if not beside:
            break
        _put_back({node: layouts.pop(node) for node in beside})
        known = {work.region: work for work in works if beside.isdisjoint(_edges_of(work))}
    kept = [work for work in works if work.candidate is not None and work.state is RegionState.FUSED]
    fused = {work.region.name: loaded[work.region.name][work.candidate.name] for work in kept if work.candidate}
    return works, fused, layouts


def _edges_of(work: Work) -> Iterator[fx.Node]:
    return itertools.chain(work.region.inputs, work.region.outputs)


def _chosen(works: Sequence[Work], counter: FallbackCounter, clock: _Clock) -> dict[str, dict[str, FusedRegion]]:
    """The calls of the candidates of `works` that could be built, by region and name; what runs each region is chosen as soon as they are there."""
    loaded: dict[str, dict[str, FusedRegion]] = {}
    first = [work for work in works if work.like is None]
    number = itertools.count()

    def choose_one(work: Work) -> None:
        with clock.stage("load"):
            calls = loaded[work.region.name] = load_candidates(work, counter)
        with clock.stage("tune", waits=True):
            tell("tune", next(number), len(works), work.region.name)
            if work.like is not None and work.like.choice is not None:
                settle(work, work.like.choice)
            elif calls:
                choose(work, calls)
            keep(work)

    with closing(build_candidates(first)) as built:
        while (work := clock.next_of("build", built)) is not None:
            choose_one(work)
    for work in works:
        if work.like is not None:
            follow(work)
            choose_one(work)
    return loaded


def _put_back(layouts: Layouts) -> None:
    """Describe results as they were before regions were to hand them over."""
    for node, value in layouts.items():
        node.meta["val"] = value


def _spliced(
    graph: fx.GraphModule, fused: Mapping[str, FusedRegion], packed: Packed | None, works: Sequence[Work]
) -> Callable[..., Any]:
    """`graph` with the regions of `works` fused and no others, as a function."""
    ways = edges(works, fused)
    calls = {name: way.seen(fused[name]).run for name, way in ways.items()}
    made = splice(graph, [work.region for work in works], ways, calls)
    if packed is not None:
        packed.use(made)
    made.real_recompile()
    return made.forward


def generated(
    graph: fx.GraphModule,
    regions: Sequence[Region],
    forms: Forms,
    *,
    exact: bool = False,
    known: Mapping[Region, Work] = MappingProxyType({}),
    handing: bool = True,
    begin: Begin = lambda source: None,
) -> tuple[list[Work], Layouts]:
    """Each region with its candidates, none of which is built; and the nodes whose results lie otherwise now, with what they were.

    Args:
        graph: simplified; where a region writes as the next one reads, its nodes are described anew.
        regions: of it.
        forms: the libraries for other sizes.
        exact: whether callers compare strides.
        known: regions that are through with all of this.
        handing: whether regions may write as others read.
        begin: is told of sources that are going to be built, as soon as they are there.
    """
    works = _works(graph, regions, exact, known)
    layouts = hand_over(regions, _formats(works)) if handing else {}
    if layouts:
        works = _works(graph, regions, exact, known)
    fresh = [work for work in works if work.region not in known]
    note_alike(fresh, known.values())
    seconds_left = spend(fresh, device_facts)
    generate_all([work for work in fresh if work.like is None], forms, begin, seconds_left=seconds_left)
    masks.begin(_masks_alone(graph.graph, works), begin)
    return works, layouts


def _masks_alone(graph: fx.Graph, works: Sequence[Work]) -> list[fx.Node]:
    """The masks of dropout that run as operators, in calls or in trials that are to come."""
    inside = {node for work in works if _is_settled(work.like or work) for node in work.region.nodes}
    return [node for node in graph.find_nodes(op="call_function", target=masks.KEPT) if node not in inside]


def _is_settled(work: Work) -> bool:
    """Whether generated code is to run a region without another trial."""
    untried = work.choice is None and current().tune == "off"
    return work.reason is None and (untried or (work.choice is not None and not work.choice.leaves_eager))


def _works(
    graph: fx.GraphModule, regions: Sequence[Region], exact: bool, known: Mapping[Region, Work] = MappingProxyType({})
) -> list[Work]:
    written = updates_of(graph.graph, regions)
    return [
        known.get(region)
        or Work(
            region,
            subgraph(graph, region),
            _constants(graph, region),
            exact,
            written.get(region, {}),
            anew=functools.partial(subgraph, graph, region),
        )
        for region in regions
    ]


def _formats(works: Sequence[Work]) -> dict[str, AnchorFormat]:
    """The format in which each region's convolution should get its input."""
    known = [work for work in works if work.region.anchor is not None and work.device.type in ("cpu", "cuda")]
    effort = current().tune
    return {work.region.name: handed_format(work.graph, device_facts(work.device), effort) for work in known}


def _copied(graph: fx.Graph) -> fx.Graph:
    fresh = fx.Graph()
    output = fresh.graph_copy(graph, {})
    fresh.output(output)
    return fresh


def _constants(owner: fx.GraphModule, region: Region) -> dict[fx.Node, torch.Tensor]:
    """Inputs of the region that are numbers fixed at capture, such as ``torch.tensor(0.5)`` in forward."""
    found = {}
    for node in region.inputs:
        source = node
        while source.op == "call_function" and source.target is torch.ops.aten.lift_fresh_copy.default:
            source = source.args[0]  # type: ignore[assignment]
        if source.op == "get_attr":
            value = getattr(owner, str(source.target))
            if isinstance(value, torch.Tensor) and value.dim() == 0 and value.device.type == "cpu":
                found[node] = value
    return found


def operators_of(owner: fx.GraphModule, work: Work) -> Operators:
    """The own operators of a region of `owner`."""
    region = work.region
    constants = {place: work.constants[node] for place, node in enumerate(region.inputs) if node in work.constants}
    given, results = ([Meta.of(node.meta["val"]) for node in nodes] for nodes in (work.arguments, region.outputs))
    return Operators(subgraph(owner, region), constants, given, results)


def _tell(work: Work, counter: FallbackCounter) -> None:
    """Count what keeps a region, or one of its candidates, from running."""
    name = work.region.name
    if work.alone is not None:
        counter.count("generation in several processes", work.alone, instead="generation in this one")
    if work.reason is not None:
        counter.count(name, work.reason, toolchain=work.generated is not None)
        return
    for candidate, reason in {**work.lost, **dict(work.choice.dropped if work.choice else ())}.items():
        instead = EAGER if work.state is RegionState.EAGER or work.candidate is None else work.candidate.name
        counter.count(f'{name}, candidate "{candidate}"', reason, instead=f'"{instead}"')
