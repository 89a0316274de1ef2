"""Generates, builds and loads the programs that a region may become."""

from __future__ import annotations

import functools
import operator
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from fusepass.choice import EAGER, Choice
from fusepass.codegen import build
from fusepass.codegen.detect import device_facts
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import conversions, generate
from fusepass.codegen.lowering.lower import Unsupported, lower
from fusepass.codegen.passes.anchors import AnchorSource
from fusepass.config import current
from fusepass.errors import BuildError
from fusepass.fallbacks import FallbackCounter
from fusepass.patterns.aliasing import is_view
from fusepass.runtime import FusedRegion, Meta
from fusepass.tune import adopt, named, recall
from fusepass.variants import Variant, is_precise, library_rounds, variants
from fusepass.work import Candidate, Work


def generate_candidates(work: Work) -> None:
    """Lower, run the passes and render each variant that is worth a try; a region beyond the IR gets its reason instead."""
    foreign = [node.name for node in work.arguments if node.meta["val"].device != work.device]
    if foreign:
        work.reason = f"{foreign[0]} is not on {work.device}"
        return
    try:
        _generate_variants(work)
    except Unsupported as unsupported:
        work.reason = str(unsupported)
    except Exception as bug:  # ours; the other regions and the model still run
        work.reason = _told(bug)


def _told(bug: Exception) -> str:
    """An error of this package in words; raises it when debugging."""
    if current().debug:
        raise bug
    return f"internal error: {type(bug).__name__}: {next(iter(str(bug).splitlines()), '')}"


def _generate_variants(work: Work) -> None:
    """The candidates: the first one, and those that are to be compared with it or that were found to be better."""
    facts = device_facts(work.device)
    first, *others = variants(work.graph, facts, current().tune)
    work.offered = tuple(variant.name for variant in (first, *others))
    work.candidate = _candidate(work, first, facts)
    work.candidates.append(work.candidate)
    record = recall(work)
    if record is not None:  # maybe of one who tried more
        every = variants(work.graph, facts, "max")[1:]
        _generate_others(work, [variant for variant in every if variant.name in named(record)], facts)
    if record is None or not adopt(work, record):
        _generate_others(work, others, facts)
    if work.choice is None and _is_anchor_alone(work):
        work.choice = Choice(EAGER, reason="the library's call alone, for which there is no generated code")


def _is_anchor_alone(work: Work) -> bool:
    """Whether the region is one convolution or product, and all candidates would call the library as it does."""
    operators = [node for node in work.region.nodes if not is_view(node.target) and node.target is not operator.getitem]
    calls = [each for each in work.candidates if not each.generated.generates_anchor and not each.conversions]
    return operators == [work.region.anchor] and calls == work.candidates


def _generate_others(work: Work, others: Sequence[Variant], facts: DeviceFacts) -> None:
    """Add the candidates of `others` that are new programs as precise as the region's operators; failures are noted."""
    first = work.candidates[0]
    own = AnchorSource.GENERATED if first.generated.generates_anchor else AnchorSource.LIBRARY
    for variant in others:
        if variant == replace(first.variant, anchor=own) or not is_precise(variant, work.graph, facts):
            continue
        try:
            made = _candidate(work, variant, facts)
        except Exception as bug:
            work.lost[variant.name] = _told(bug)
            continue
        if not any(made.sources == known.sources for known in work.candidates):
            work.candidates.append(made)


def _candidate(work: Work, variant: Variant, facts: DeviceFacts) -> Candidate:
    labels = [node.name for node in work.region.inputs]
    values = {node.name: value.item() for node, value in work.constants.items()}
    tf32 = library_rounds(work.graph, facts)
    program, builder = lower(work.graph, work.region.name, labels, values, variant.anchor_format, tf32=tf32)
    converted = {call.result: generate(conversion, own, facts) for call, conversion, own in conversions(program)}
    return Candidate(variant, generate(program, builder, facts, variant.anchor), converted)


def build_candidates(works: Sequence[Work]) -> None:
    """Build what was generated, side by side; of a region whose choice is made already, what was chosen."""
    ready = [(work, candidate) for work in works for candidate in _wanted(work)]
    start = time.perf_counter()
    sources = [source for _, candidate in ready for source in candidate.sources]
    results: Sequence[Path | BuildError]
    try:
        results = build.build_all(sources)
    except OSError as error:  # not even a temporary directory can be made
        results = [BuildError(str(error))] * len(sources)
    rest = iter(results)
    for work, candidate in ready:
        work.seconds = time.perf_counter() - start
        made = [next(rest) for _ in candidate.sources]
        failed = next((result for result in made if isinstance(result, BuildError)), None)
        if failed is not None:
            work.lost[candidate.name] = f"build failed: {failed.args[0]}"
            continue
        candidate.library, *converters = [result for result in made if isinstance(result, Path)]
        candidate.converters = dict(zip(candidate.conversions, converters, strict=True))


def _wanted(work: Work) -> list[Candidate]:
    """The candidates that may come to run."""
    if work.choice is None:
        return work.candidates
    return [] if work.choice.leaves_eager or work.candidate is None else [work.candidate]


def load_candidates(work: Work, counter: FallbackCounter) -> dict[str, FusedRegion]:
    """The calls of the candidates that could be built, by name; where there is none, the region gets its reason."""
    loaded = {}
    for candidate in _wanted(work):
        try:
            if candidate.name not in work.lost:
                loaded[candidate.name] = _region(work, candidate, counter)
        except BuildError as error:
            work.lost[candidate.name] = f"loading failed: {error.args[0]}"
    if not loaded and work.candidate is not None:
        work.reason = work.reason or work.lost.get(work.candidate.name)
    work.candidate = next((each for each in work.candidates if each.name in loaded), work.candidate)
    return loaded


def _region(work: Work, candidate: Candidate, counter: FallbackCounter) -> FusedRegion:
    arguments = work.arguments
    position = {node.name: number for number, node in enumerate(arguments)}
    return FusedRegion(
        work.region.name,
        candidate.generated,
        candidate.library,
        [Meta.of(node.meta["val"]) for node in arguments],
        [position[name] for name in candidate.generated.program.inputs],
        work.device,
        work.original(),
        counter,
        {name: _converter(candidate, name, work.device, counter) for name in candidate.conversions},
    )


def _converter(candidate: Candidate, name: str, device: torch.device, counter: FallbackCounter) -> FusedRegion:
    """The function that changes a layout for the library."""
    generated = candidate.conversions[name]
    call = next(call for call in candidate.generated.program.calls if call.result == name)
    original = functools.partial(torch.ops.aten.clone.default, **dict(call.kwargs))
    inputs = [Meta.of_buffer(generated.program.buffer(given)) for given in generated.program.inputs]
    title = generated.program.name
    return FusedRegion(title, generated, candidate.converters[name], inputs, [0], device, original, counter)
