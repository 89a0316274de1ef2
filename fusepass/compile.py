"""The pipeline from an ATen graph to a rewritten one: simplify, partition, lower, generate, build, splice."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fusepass.codegen import build
from fusepass.codegen.detect import device_facts
from fusepass.codegen.forms import Forms, TooManyBuilds
from fusepass.codegen.generate import conversions, generate
from fusepass.codegen.ir.text import program_text
from fusepass.codegen.lowering.formats import AnchorFormat
from fusepass.codegen.lowering.lower import Unsupported
from fusepass.codegen.source import Source
from fusepass.config import current
from fusepass.errors import BuildError
from fusepass.fallbacks import FallbackCounter
from fusepass.handover import hand_over
from fusepass.ops import register
from fusepass.patterns.partition import Region, partition
from fusepass.patterns.simplify import simplify
from fusepass.report import RegionState, Report
from fusepass.runtime import FusedRegion, Meta
from fusepass.splice import splice, subgraph
from fusepass.summary import summary
from fusepass.tune import choose
from fusepass.variants import chosen_format, variants
from fusepass.work import Work
from fusepass.writes import gather_writes


@dataclass(frozen=True)
class CompiledGraph:
    """One specialisation.

    Attributes:
        before: the captured graph, simplified, every operator in it; `works` are regions of it.
        works: its regions, with what became of them.
        spliced: makes `graph_module` when it is first called.
        call: the same function as `graph_module` without the dispatcher, for plain tensors outside of every dispatch mode.
        report: what was fused and what was not; fallbacks counted so far are read through `fallbacks`.
        fallbacks: counts calls that ran as the original operators.
    """

    before: fx.GraphModule
    works: tuple[Work, ...]
    spliced: Callable[[], fx.GraphModule]
    call: Callable[..., tuple[Any, ...]]
    report: Report
    fallbacks: FallbackCounter

    @property
    def graph_module(self) -> fx.GraphModule:
        """Takes the captured graph's placeholders, returns its flat tuple; calls registered operators, so it can be
        traced, compiled and exported.
        """
        return self.spliced()


@dataclass
class _Clock:
    """Seconds per stage, in the order in which stages ran."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def compile_graph(
    graph: fx.GraphModule, *, name: str, fallbacks: FallbackCounter | None = None, forms: Forms | None = None
) -> CompiledGraph:
    """Fuse a flat functional ATen graph whose nodes carry fake tensors.

    A region that cannot be generated or built keeps its operators, is reported and counted; nothing is raised for a valid graph.

    Args:
        graph: as `fusepass.capture.capture` or AOTAutograd makes it; it is not changed.
        name: the model's name, for the report.
        fallbacks: the counter to use; a new one by default.
        forms: the libraries of the model for other sizes; none by default.
    """
    clock = _Clock()
    forms = forms or Forms()
    forms.next_round()
    counter = fallbacks if fallbacks is not None else FallbackCounter()
    graph = fx.GraphModule(graph, _copied(graph.graph))
    with clock.stage("simplify"):
        applications = simplify(graph)
    with clock.stage("partition"):
        parts = partition(graph)
    works, fused = _fused(graph, parts.regions, forms, counter, clock)
    for work in works:
        if work.reason is not None:
            counter.count(work.region.name, work.reason, toolchain=work.generated is not None)
    with clock.stage("splice"):
        kept = [work for work in works if work.state is RegionState.FUSED]
        fused = {work.region.name: fused[work.region.name] for work in kept}
        for work in kept:
            work.call = fused[work.region.name].run
        regions = [work.region for work in kept]
        arguments = {work.region.name: work.arguments for work in kept}
        direct = splice(graph, regions, arguments, {key: value.run for key, value in fused.items()})
        gather_writes(direct)
    report = summary(name, graph, parts, works, applications, clock.seconds)

    @functools.cache
    def spliced() -> fx.GraphModule:
        operators = {key: register(value, program_text(value.generated.program)) for key, value in fused.items()}
        return splice(graph, regions, arguments, operators)

    return CompiledGraph(graph, tuple(works), spliced, direct.forward, report, counter)


def _fused(
    graph: fx.GraphModule,
    regions: Sequence[Region],
    forms: Forms,
    counter: FallbackCounter,
    clock: _Clock,
    *,
    handing: bool = True,
) -> tuple[list[Work], dict[str, FusedRegion]]:
    """What became of each region, and those that can be called; `handing` lets one write as the next one reads."""
    works = _works(graph, regions)
    layouts = hand_over(regions, _formats(works)) if handing else {}
    if layouts:
        works = _works(graph, regions)
    with clock.stage("generate"):
        for work in works:
            _generate(work, forms)
    with clock.stage("build"):
        _build(works)
    fused: dict[str, FusedRegion] = {}
    with clock.stage("load"):
        for work in works:
            region = _load(work, counter)
            if region is not None:
                fused[work.region.name] = region
    with clock.stage("tune"):
        for work in works:
            if work.region.name in fused:
                _choose(work, fused[work.region.name], forms)
    if layouts and any(work.state is not RegionState.FUSED for work in works):
        # Operators that run as they were would pass on a layout that is not theirs.
        for node, value in layouts.items():
            node.meta["val"] = value
        return _fused(graph, regions, forms, counter, clock, handing=False)
    return works, fused


def _choose(work: Work, region: FusedRegion, forms: Forms) -> None:
    """What `choose` does; a library for several sizes is measured once for all that move about as many bytes."""
    assert work.generated is not None
    key = work.generated.source.text, work.region.bytes_before.bit_length()
    work.choice = forms.choices.get(key)
    if work.choice is None:
        choose(work, region)
        if work.generated.source.numbers is not None and work.choice is not None and work.choice.reason is None:
            forms.choices[key] = work.choice


def _works(graph: fx.GraphModule, regions: Sequence[Region]) -> list[Work]:
    return [Work(region, subgraph(graph, region), _constants(graph, region)) for region in regions]


def _formats(works: Sequence[Work]) -> dict[str, AnchorFormat]:
    """The format that each region's convolution is going to run in."""
    known = [work for work in works if work.region.anchor is not None and work.device.type in ("cpu", "cuda")]
    return {work.region.name: chosen_format(work.graph, device_facts(work.device)) for work in known}


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


def _generate(work: Work, forms: Forms) -> None:
    """Lower, run the passes and render; a region beyond the IR, or one library too many, gets its reason instead."""
    region = work.region
    foreign = [node.name for node in work.arguments if node.meta["val"].device != work.device]
    if foreign:
        work.reason = f"{foreign[0]} is not on {work.device}"
        return
    try:
        labels = [node.name for node in region.inputs]
        values = {node.name: value.item() for node, value in work.constants.items()}
        facts = device_facts(work.device)
        chosen = next(variants(work.graph, region.name, labels, values, facts))
        work.variant = chosen.name
        work.conversions = {
            call.result: forms.shared(generate(conversion, own, facts))
            for call, conversion, own in conversions(chosen.program)
        }
        work.generated = forms.shared(generate(chosen.program, chosen.builder, facts))
    except (Unsupported, TooManyBuilds) as refused:
        work.reason = str(refused)
    except Exception as bug:  # ours; the other regions and the model still run
        if current().debug:
            raise
        work.reason = f"internal error: {type(bug).__name__}: {next(iter(str(bug).splitlines()), '')}"


def _build(works: Sequence[Work]) -> None:
    """Build what was generated, side by side."""
    ready = [work for work in works if work.generated is not None]
    start = time.perf_counter()
    sources = [source for work in ready for source in _sources(work)]
    results: Sequence[Path | BuildError]
    try:
        results = build.build_all(sources)
    except OSError as error:  # not even a temporary directory can be made
        results = [BuildError(str(error))] * len(sources)
    rest = iter(results)
    for work in ready:
        work.seconds = time.perf_counter() - start
        made = [next(rest) for _ in _sources(work)]
        failed = next((result for result in made if isinstance(result, BuildError)), None)
        if failed is not None:
            work.reason = f"build failed: {failed.args[0]}"
            continue
        work.library, *converters = [result for result in made if isinstance(result, Path)]
        work.converters = dict(zip(work.conversions, converters, strict=True))


def _sources(work: Work) -> list[Source]:
    """What is built for a region: its kernels, then its conversions."""
    assert work.generated is not None
    return [work.generated.source, *(conversion.source for conversion in work.conversions.values())]


def _load(work: Work, counter: FallbackCounter) -> FusedRegion | None:
    if work.generated is None or work.library is None:
        return None
    arguments = work.arguments
    position = {node.name: number for number, node in enumerate(arguments)}
    try:
        return FusedRegion(
            work.region.name,
            work.generated,
            work.library,
            [Meta.of(node.meta["val"]) for node in arguments],
            [position[name] for name in work.generated.program.inputs],
            work.device,
            work.original(),
            counter,
            {name: _converter(work, name, counter) for name in work.conversions},
        )
    except BuildError as error:
        work.reason = f"loading failed: {error.args[0]}"
        return None


def _converter(work: Work, name: str, counter: FallbackCounter) -> FusedRegion:
    """The function that changes a layout for the library."""
    assert work.generated is not None
    generated = work.conversions[name]
    call = next(call for call in work.generated.program.calls if call.result == name)
    original = functools.partial(torch.ops.aten.clone.default, **dict(call.kwargs))
    inputs = [Meta.of_buffer(generated.program.buffer(given)) for given in generated.program.inputs]
    title = generated.program.name
    return FusedRegion(title, generated, work.converters[name], inputs, [0], work.device, original, counter)
