"""The candidates of a region beside its first one: generated, compared by the cost models, and rendered where they are worth a build."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fusepass.codegen.ir.expr import Load
from fusepass.codegen.ir.program import Program
from fusepass.codegen.passes.anchors import AnchorSource
from fusepass.codegen.search.candidate import Candidate, CandidateSpec
from fusepass.codegen.search.worth import AnchorCost, ruled_out, without_slower
from fusepass.codegen.source import Source
from fusepass.config import current

Begin = Callable[[Source], None]

_SLOW_TO_BUILD = (AnchorSource.TILED_HALVES, AnchorSource.REGISTER_STATIONARY, AnchorSource.HALVES)


@dataclass
class Others:
    """What was generated beside the first candidate.

    Attributes:
        kept: what is worth a build, in the order in which it was asked for.
        ruled_out: by name, what is expected to be too slow; see `fusepass.codegen.search.worth.ruled_out`.
        lost: by name, what could not be generated, and why.
    """

    kept: list[Candidate]
    ruled_out: Mapping[str, float] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)


def others_of(
    make: Callable[[CandidateSpec], Candidate],
    first: Candidate,
    specs: Sequence[CandidateSpec],
    anchor: AnchorCost | None,
    begin: Begin = lambda source: None,
) -> Others:
    """The candidates of `specs` beside `first`.

    Those are left out that are not worth a build, by what is known of the region's `anchor`; None keeps all of them. What takes the compiler
    longest is generated first, and `begin` told of it.
    """
    found: dict[CandidateSpec, Candidate] = {}
    lost: dict[str, str] = {}
    for spec in sorted(specs, key=builds_fast):
        if spec == preferred(first):
            continue
        try:
            found[spec] = make(spec)
        except Exception as bug:
            lost[spec.name] = told(bug)
    made, slow = [found[spec] for spec in specs if spec in found], dict[str, float]()
    if anchor is not None:
        made = without_slower(_new(made, first), anchor)
        slow = dict(ruled_out(first, made, anchor))
    kept = [each for each in made if each.name not in slow]
    for each in sorted(kept, key=lambda each: builds_fast(each.spec)):
        try:
            sources = each.sources
        except Exception as bug:
            kept.remove(each)
            lost[each.name] = told(bug)
            continue
        if not builds_fast(each.spec) and sources != first.sources:
            for source in sources:
                begin(source)
    return Others(kept, slow, lost)


def different(candidates: Sequence[Candidate], known: Sequence[Candidate]) -> list[Candidate]:
    """Those of `candidates` whose sources neither one of `known` has, nor one before them."""
    found: list[Candidate] = []
    for each in candidates:
        if not any(each.sources == other.sources for other in (*known, *found)):
            found.append(each)
    return found


def preferred(first: Candidate) -> CandidateSpec:
    """What asks by name for the implementation of the anchor that `first` has."""
    anchor = AnchorSource.GENERATED if first.generated.generates_anchor else AnchorSource.LIBRARY
    return replace(first.spec, anchor=anchor)


def builds_fast(spec: CandidateSpec) -> bool:
    """Whether a compiler takes no longer for it than for most."""
    return spec.anchor not in _SLOW_TO_BUILD


def copies_in_order(program: Program) -> bool:
    """Whether `program` does nothing but copy a tensor as it lies in memory."""
    if program.calls or len(program.kernels) != 1 or len(program.kernels[0].stores) != 1:
        return False
    (store,) = program.kernels[0].stores
    return isinstance(store.value, Load) and store.value.index == store.index


def told(bug: Exception) -> str:
    """An error of this package in words; raises it when debugging."""
    if current().debug:
        raise bug
    return f"internal error: {type(bug).__name__}: {next(iter(str(bug).splitlines()), '')}"


def _new(made: Sequence[Candidate], first: Candidate) -> list[Candidate]:
    """Those of `made` whose program neither `first` has, nor one before them."""
    programs = [[part.outline for part in each.parts] for each in (first, *made)]
    return [each for place, each in enumerate(made, 1) if programs[place] not in programs[:place]]
