"""A program that a region may become: what sets it apart from others, and how it is generated of the lowered region."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import Generated, conversions, generate
from fusepass.codegen.ir.anchor_format import AnchorFormat
from fusepass.codegen.ir.expr import Builder
from fusepass.codegen.ir.program import Program
from fusepass.codegen.passes.anchors import AnchorSource
from fusepass.codegen.passes.pipeline import Known
from fusepass.codegen.schedule.overrides import NO_OVERRIDES, ScheduleOverrides
from fusepass.codegen.source import Source

GENERATED = "generated"
"""The candidate that nothing sets apart from others."""

Share = Callable[[Generated], Generated]


@dataclass(frozen=True)
class CandidateSpec:
    """What sets a candidate for a region apart from others.

    Attributes:
        anchor_format: how the library's convolution reads and writes.
        anchor: who computes the convolution or matrix product.
        overrides: how the other kernels are laid out.
    """

    anchor_format: AnchorFormat
    anchor: AnchorSource
    overrides: ScheduleOverrides = NO_OVERRIDES

    @property
    def name(self) -> str:
        """In words, for reports and records."""
        words = [f"{self.anchor.value} anchor"] if self.anchor is not AnchorSource.PREFERRED else []
        words += [self.anchor_format.value] if self.anchor_format is not AnchorFormat.CALLER else []
        words += self.overrides.words
        return ", ".join(words) or GENERATED


@dataclass
class Candidate:
    """One program that a region may become, on its way to a library.

    Attributes:
        spec: what sets it apart from the others.
        generated: program and source.
        conversions: by the name of the library call's result, what changes a layout for the library.
        library: the built library; None where there is none.
        converters: the libraries of the conversions.
    """

    spec: CandidateSpec
    generated: Generated
    conversions: dict[str, Generated]
    library: Path | None = None
    converters: dict[str, Path] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What reports call it."""
        return self.spec.name

    @property
    def parts(self) -> list[Generated]:
        """What is built for it: its kernels, then its conversions."""
        return [self.generated, *self.conversions.values()]

    @property
    def sources(self) -> list[Source]:
        """Of its parts."""
        return [part.source for part in self.parts]


@dataclass
class Common:
    """What candidates of a region have in common while they are generated.

    Attributes:
        builder: of their expressions.
        lowered: by the format of the anchor, the program before the passes.
        converted: by the same, its `Candidate.conversions`.
        known: by how kernels depart from the rules, what passes gave.
    """

    builder: Builder = field(default_factory=Builder)
    lowered: dict[AnchorFormat, Program] = field(default_factory=dict)
    converted: dict[AnchorFormat, Mapping[str, Generated]] = field(default_factory=dict)
    known: defaultdict[ScheduleOverrides, Known] = field(default_factory=lambda: defaultdict(Known))

    def candidate(self, spec: CandidateSpec, facts: DeviceFacts, share: Share = lambda made: made) -> Candidate:
        """The program of `spec`, of whose format the region is lowered; `share` may give what is generated a library that serves other sizes, too."""
        program, chosen = self.lowered[spec.anchor_format], spec.anchor_format
        if chosen not in self.converted:
            found = conversions(program)
            self.converted[chosen] = {call.result: generate(each, own, facts) for call, each, own in found}
        shared = {name: share(each) for name, each in self.converted[chosen].items()}
        known = self.known[spec.overrides]
        return Candidate(
            spec, share(generate(program, self.builder, facts, spec.anchor, spec.overrides, known)), shared
        )
