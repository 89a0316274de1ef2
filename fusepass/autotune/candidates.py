"""Generates, builds and loads the programs that a region may become."""

from __future__ import annotations

import functools
import operator
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from fusepass.autotune.lists import list_candidate
from fusepass.autotune.recorded import restore
from fusepass.autotune.tune import adopt, chosen_earlier, named, recall, reuse
from fusepass.autotune.work import Work
from fusepass.codegen import build
from fusepass.codegen.detect import device_facts
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.forms import Forms, OfOneSize, TooManyBuilds
from fusepass.codegen.ir.anchor_format import AnchorFormat
from fusepass.codegen.ir.program import Program
from fusepass.codegen.lowering.lower import Unsupported, lower
from fusepass.codegen.passes.anchors import AnchorSource
from fusepass.codegen.search.candidate import Candidate, CandidateSpec, Common, Share
from fusepass.codegen.search.others import Begin, builds_fast, copies_in_order, different, others_of, preferred, told
from fusepass.codegen.search.schedules import schedule_candidates
from fusepass.codegen.search.space import anchor_cost, is_precise, library_rounds, search_space
from fusepass.codegen.search.worth import AnchorCost
from fusepass.codegen.source import Source, Target
from fusepass.config import current
from fusepass.errors import BuildError
from fusepass.patterns.aliasing import is_view
from fusepass.report.choice import EAGER, Choice
from fusepass.runtime.fallbacks import FallbackCounter
from fusepass.runtime.meta import Meta
from fusepass.runtime.region import FusedRegion, lies_as_told


def has_candidates(work: Work, forms: Forms, begin: Begin) -> bool:
    """Give `work` what takes no time to generate, or what an earlier process generated; whether there is nothing else to do."""
    foreign = [node.name for node in work.arguments if node.meta["val"].device != work.device]
    if foreign:
        work.reason = f"{foreign[0]} is not on {work.device}"
        return True
    with _reasons(work):
        facts = device_facts(work.device)
        if work.region.members:
            _generate_list(work, facts, begin)
            return True
        return is_first(work, forms) and restore(work, facts, forms, candidate_of)
    return True


def is_first(work: Work, forms: Forms) -> bool:
    """Whether nothing was chosen for other sizes of the region, and libraries may be built for these."""
    return not forms.sealed and chosen_earlier(work, forms) is None


def generate_anew(
    work: Work, forms: Forms, begin: Begin, take: Callable[[Work, DeviceFacts], bool] = lambda work, facts: False
) -> None:
    """Give `work`, which has no candidates, those that `take` has from another process, if it says so; else lower it, run the passes and render
    each candidate that is worth a try. `forms` has the libraries for other sizes.

    A region beyond the IR, or one library too many, gets its reason instead. `begin` is told of sources that are going to be built, as
    soon as they are there.
    """
    with _reasons(work):
        facts = device_facts(work.device)
        if not take(work, facts):
            _generate_space(work, facts, forms, begin)
        for candidate in sorted(_wanted(work), key=lambda each: builds_fast(each.spec)):
            for source in candidate.sources:
                begin(source)
    work.common = Common()


@contextmanager
def _reasons(work: Work) -> Iterator[None]:
    """What is raised becomes the reason why a region has no generated code."""
    try:
        yield
    except (Unsupported, TooManyBuilds) as refused:
        work.reason = str(refused)
    except Exception as bug:  # ours; the other regions and the model still run
        work.reason = told(bug)


def _generate_list(work: Work, facts: DeviceFacts, begin: Begin) -> None:
    """The one candidate of a list."""
    work.candidate = list_candidate(work, facts)
    work.candidates.append(work.candidate)
    work.offered = (work.candidate.name,)
    record = recall(work)
    if record is None or not adopt(work, record):
        begin(work.candidate.generated.source)


def _generate_space(work: Work, facts: DeviceFacts, forms: Forms, begin: Begin) -> None:
    """The candidates: the first one, and those that are to be compared with it or that were found to be better.

    Sizes that come later have the candidate that was chosen for the first ones as their only candidate.
    """
    earlier = _earlier(work, facts, forms)
    first, *others = [earlier] if earlier else search_space(work.graph, facts, current().tune)
    work.candidate = _first_candidate(work, first, facts, forms)
    work.candidates.append(work.candidate)
    if earlier or work.candidate.generated.general is not None:
        others, work.beyond_budget = [], ()
    others = within_budget(work, others)
    offer(work, others)
    reuse(work, forms)
    if work.choice is not None:
        return
    record = recall(work)
    if record is not None:  # maybe of one who tried more
        every = [spec for spec in search_space(work.graph, facts, "max")[1:] if spec.name != work.candidate.name]
        every += _other_schedules(work, named(record))
        _generate_others(work, [spec for spec in every if spec.name in named(record)], facts)
    if record is None or not adopt(work, record):
        anchor = None if current().tune == "max" else anchor_cost(work.region.anchor, facts)
        _generate_others(work, others, facts, begin, anchor)
    settle_unmeasured(work, copies=copies_in_order(work.candidate.generated.program))


def within_budget(work: Work, specs: Sequence[CandidateSpec]) -> list[CandidateSpec]:
    """Those of `specs` that are not `Work.beyond_budget`."""
    return [spec for spec in specs if spec.name not in work.beyond_budget]


def offer(work: Work, others: Sequence[CandidateSpec]) -> None:
    """Note that `work`, which has its first candidate, may be tried in `others`, too."""
    assert work.candidate is not None
    work.beyond_budget = tuple(name for name in work.beyond_budget if name != preferred(work.candidate).name)
    work.offered = (work.candidate.name, *(spec.name for spec in others))


def settle_unmeasured(work: Work, *, copies: bool) -> None:
    """Choose the operators where it takes no measurement; `copies` says whether the first candidate does nothing but copy a tensor as it lies."""
    if work.choice is None and _is_anchor_alone(work):
        work.choice = Choice(EAGER, reason="the library's call alone, for which there is no generated code")
    if work.choice is None and copies:
        work.choice = Choice(EAGER, reason="a copy in the order of memory, which PyTorch makes at the memory's rate")


def _other_schedules(work: Work, names: Sequence[str]) -> list[CandidateSpec]:
    """The specs of the first candidate that differ in schedules alone, if any of `names` may be one of them."""
    assert work.candidate is not None
    first, facts = work.candidate, work.candidate.generated.facts
    if {*names} <= {spec.name for spec in search_space(work.graph, facts, "max")}:
        return []
    offered = schedule_candidates(first.generated.program, facts, "max")
    return [replace(first.spec, overrides=each.overrides) for each in offered]


def _is_anchor_alone(work: Work) -> bool:
    """Whether the region is one convolution or product, and all candidates would call the library as it does."""
    operators = [node for node in work.region.nodes if not is_view(node.target) and node.target is not operator.getitem]
    calls = [each for each in work.candidates if not each.generated.generates_anchor and not each.conversions]
    return operators == [work.region.anchor] and calls == work.candidates


def _earlier(work: Work, facts: DeviceFacts, forms: Forms) -> CandidateSpec | None:
    """The candidate that was chosen for other sizes, if it is as precise for these."""
    name = chosen_earlier(work, forms)
    if name is None:
        return None
    first, *others = search_space(work.graph, facts, "max")
    found = next((spec for spec in others if spec.name == name), first)
    return found if found == first or is_precise(found, work.graph, facts) else first


def _first_candidate(work: Work, spec: CandidateSpec, facts: DeviceFacts, forms: Forms) -> Candidate:
    """The candidate to choose without a measurement; where it would be one library too many, the library computes the anchor. Where sizes
    change, rows are not reduced over by what goes along them.

    Raises:
        TooManyBuilds: that would be one too many, too.
    """
    try:
        return candidate_of(work, spec, facts, forms.shared)
    except OfOneSize:
        apart = replace(spec, overrides=replace(spec.overrides, over_rows=False))
        return _first_candidate(work, apart, facts, forms)
    except TooManyBuilds:
        if work.region.anchor is None:
            raise
        return candidate_of(work, replace(spec, anchor=AnchorSource.LIBRARY), facts, forms.shared)


def _generate_others(
    work: Work,
    specs: Sequence[CandidateSpec],
    facts: DeviceFacts,
    begin: Begin = lambda source: None,
    anchor: AnchorCost | None = None,
) -> None:
    """Add the candidates of `specs` that are new programs as precise as the region's operators; failures are noted.

    By what is known of its `anchor` those are left out that are not worth a build; None leaves out none.
    """
    precise = [spec for spec in specs if is_precise(spec, work.graph, facts)]
    found = others_of(lambda spec: candidate_of(work, spec, facts), work.candidates[0], precise, anchor, begin)
    work.lost.update(found.lost)
    if anchor is not None:
        work.ruled_out = found.ruled_out
    work.candidates += different(found.kept, work.candidates)


def candidate_of(work: Work, spec: CandidateSpec, facts: DeviceFacts, share: Share = lambda made: made) -> Candidate:
    """The program of `spec`; `share` may give what is generated a library that serves other sizes, too."""
    lower_for(work, [spec], facts)
    return work.common.candidate(spec, facts, share)


def lower_for(work: Work, specs: Sequence[CandidateSpec], facts: DeviceFacts) -> None:
    """Lower `work` as `specs` need it.

    Raises:
        Unsupported: the kernel IR cannot express it.
    """
    for spec in specs:
        if spec.anchor_format not in work.common.lowered:
            work.common.lowered[spec.anchor_format] = _lowered(work, spec.anchor_format, facts)


def _lowered(work: Work, anchor_format: AnchorFormat, facts: DeviceFacts) -> Program:
    """The program of a region before the passes."""
    labels = [node.name for node in work.region.inputs]
    values = {node.name: value.item() for node, value in work.constants.items()}
    tf32 = library_rounds(work.graph, facts)
    updates = {number: write.all_input_nodes[0].name for number, write in work.updates.items()}
    program, _ = lower(
        work.graph,
        work.region.name,
        labels,
        values,
        anchor_format,
        tf32=tf32,
        wide=facts.target is Target.CPU,
        updates=updates,
        builder=work.common.builder,
    )
    return program


def build_candidates(works: Sequence[Work]) -> Generator[Work]:
    """Build what was generated, side by side; of a region whose choice is made already, what was chosen.

    Gives each of `works` when all that it has is built, or cannot be. On a CPU that is when everything is, in their order: what runs it is not to
    share processors with compilers.
    """
    start = time.perf_counter()
    sources: list[Source] = []
    owners: list[int] = []  # of each source: which of `works` has it
    places: list[range] = []  # of each of `works`: where its sources are
    for number, work in enumerate(works):
        own = [source for candidate in _wanted(work) for source in candidate.sources]
        owners += [number] * len(own)
        places.append(range(len(sources), len(sources) + len(own)))
        sources += own
    made: dict[int, Path | BuildError] = {}

    def built(number: int) -> Work:
        work, rest = works[number], (made[place] for place in places[number])
        work.seconds = time.perf_counter() - start
        for candidate in _wanted(work):
            _put(work, candidate, [next(rest) for _ in candidate.sources])
        return work

    results = _results(sources)
    if any(work.device.type == "cpu" for work in works):
        made.update(results)
        yield from map(built, range(len(works)))
        return
    yield from (built(number) for number, own_places in enumerate(places) if not own_places)
    for place, result in results:
        made[place] = result
        if all(each in made for each in places[owners[place]]):
            yield built(owners[place])


def _results(sources: Sequence[Source]) -> Iterator[tuple[int, Path | BuildError]]:
    left = dict.fromkeys(range(len(sources)))
    try:
        for number, result in build.build_each(sources):
            del left[number]
            yield number, result
    except OSError as error:  # not even a temporary directory can be made
        yield from ((number, BuildError(str(error))) for number in left)


def _put(work: Work, candidate: Candidate, made: Sequence[Path | BuildError]) -> None:
    """Give a candidate its libraries, or `work` the reason why it has none."""
    failed = next((result for result in made if isinstance(result, BuildError)), None)
    if failed is not None:
        work.lost[candidate.name] = f"build failed: {failed.args[0]}"
        return
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
                loaded[candidate.name] = region_of(work, candidate, counter)
        except BuildError as error:
            work.lost[candidate.name] = f"loading failed: {error.args[0]}"
    if not loaded and work.candidate is not None:
        work.reason = work.reason or work.lost.get(work.candidate.name)
    work.candidate = next((each for each in work.candidates if each.name in loaded), work.candidate)
    return loaded


def region_of(work: Work, candidate: Candidate, counter: FallbackCounter) -> FusedRegion:
    """The call of a candidate that was built.

    Raises:
        BuildError: its library cannot be loaded.
    """
    arguments = work.arguments
    # A program's inputs are called as those of the region that it was made for.
    named = arguments if work.like is None else work.like.arguments
    position = {node.name: number for number, node in enumerate(named)}
    program, told = candidate.generated.outline, [Meta.of(node.meta["val"]) for node in arguments]
    used = [position[name] for name in program.inputs]
    exact = [number for number, node in enumerate(arguments) if work.is_exact(node)]
    return FusedRegion(
        work.region.name,
        candidate.generated,
        candidate.library,
        told,
        used,
        work.device,
        work.original(),
        counter,
        {name: _converter(candidate, name, work.device, counter) for name in candidate.conversions},
        [number for number in exact if lies_as_told(program, used, number, told[number])],
    )


def _converter(candidate: Candidate, name: str, device: torch.device, counter: FallbackCounter) -> FusedRegion:
    """The function that changes a layout for the library."""
    generated = candidate.conversions[name]
    call = next(call for call in candidate.generated.outline.calls if call.result == name)
    original = functools.partial(torch.ops.aten.clone.default, **dict(call.kwargs))
    inputs = [Meta.of_buffer(generated.outline.buffer(given)) for given in generated.outline.inputs]
    title = generated.outline.name
    return FusedRegion(title, generated, candidate.converters[name], inputs, [0], device, original, counter)
