"""Candidates of a region that another process generates: the order that it gets, and what it gives back.

What it gets is lowered, so it needs no torch: a process starts in a third of the time and a tenth of the memory. What of torch's is among the
arguments of library calls, such as a memory format, stays where it is, and a `_Token` stands for it.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.generate import Generated, KernelSummary
from fusepass.codegen.ir.outline import Outline
from fusepass.codegen.ir.updates import outlined
from fusepass.codegen.search.candidate import Candidate, CandidateSpec, Common
from fusepass.codegen.search.others import copies_in_order, different, others_of
from fusepass.codegen.search.schedules import ScheduleCandidate, schedule_candidates
from fusepass.codegen.search.worth import AnchorCost
from fusepass.codegen.source import Source
from fusepass.codegen.workers import Kind
from fusepass.config import override

GENERATION = Kind(f"{__name__}:answer_packed")
"""What workers do with what `packed` gives."""


@dataclass(frozen=True)
class Order:
    """What is to be generated of a region.

    Attributes:
        common: the region, lowered for all `specs`.
        specs: its candidates, the one to choose without a measurement first; all as precise as its operators.
        facts: the device.
        anchor: what is known of its anchor; None where all candidates are wanted, whatever they are expected to take.
        options: those of `fusepass.config.Config`.
    """

    common: Common
    specs: Sequence[CandidateSpec]
    facts: DeviceFacts
    anchor: AnchorCost | None
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Code:
    """What is kept of a program once it is rendered: its outline, the source, and what reports say of its kernels."""

    outline: Outline
    source: Source
    kernels: tuple[KernelSummary, ...]

    @classmethod
    def of(cls, generated: Generated) -> Code:
        return cls(outlined(generated.outline), generated.source, generated.kernels)


Coded = tuple[CandidateSpec, Code, Mapping[str, Code]]
"""A candidate: what sets it apart, its code, and that of its conversions."""


@dataclass(frozen=True)
class Answer:
    """What was generated.

    Attributes:
        candidates: different programs all, the first one first.
        ruled_out: names of others, as `fusepass.codegen.search.others` has them.
        lost: names of those that could not be generated, and why.
        copies: whether the first one does nothing but copy a tensor as it lies in memory.
        schedules: departures from the rules that are worth a try in the kernels of the first one.
    """

    candidates: Sequence[Coded]
    ruled_out: Mapping[str, float]
    lost: Mapping[str, str]
    copies: bool
    schedules: Sequence[ScheduleCandidate]


def answered(order: Order) -> Answer:
    """What `order` asks for: the same as the process that gives it would generate."""
    with override(**order.options):
        spec, *specs = order.specs
        make = partial(order.common.candidate, facts=order.facts)
        first = make(spec)
        others = others_of(make, first, specs, order.anchor)
        every = [first, *different(others.kept, [first])]
        return Answer(
            [_coded(each) for each in every],
            others.ruled_out,
            others.lost,
            copies_in_order(first.generated.program),
            schedule_candidates(first.generated.program, order.facts, order.options["tune"]),
        )


def packed(order: Order, foreign: Sequence[type]) -> tuple[bytes, list[object]]:
    """`order` for another process, and its values of `foreign` types, which stay in this one."""
    kept: list[object] = []

    def token(value: object) -> tuple[type, tuple[int, str]]:
        if not any(each is value for each in kept):
            kept.append(value)
        return _Token, (next(number for number, each in enumerate(kept) if each is value), repr(value))

    file = io.BytesIO()
    pickler = pickle.Pickler(file, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = {**copyreg.dispatch_table, **dict.fromkeys(foreign, token)}
    pickler.dump(order)
    return file.getvalue(), kept


def answer_packed(order: bytes) -> bytes:
    """In that process: the packed `answered` of what `packed` gave."""
    return pickle.dumps(answered(pickle.loads(order)), pickle.HIGHEST_PROTOCOL)


def unpacked(answer: bytes, kept: Sequence[object]) -> Answer:
    """What `answer_packed` gave; with what `packed` `kept`."""
    found: Answer = _Unpacker(io.BytesIO(answer), kept).load()
    return found


@dataclass(frozen=True)
class _Token:
    """What stands for value `number` of those that are kept, in words as that."""

    number: int
    words: str

    def __repr__(self) -> str:
        return self.words

    def __reduce__(self) -> tuple[type, tuple[int, str]]:
        return _Token, (self.number, self.words)


class _Unpacker(pickle.Unpickler):
    """Reads what was `kept` in place of tokens."""

    def __init__(self, file: io.BytesIO, kept: Sequence[object]) -> None:
        super().__init__(file)
        self._kept = kept

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (_Token.__module__, _Token.__name__):
            return lambda number, words: self._kept[number]
        return super().find_class(module, name)


def _coded(candidate: Candidate) -> Coded:
    conversions = {name: Code.of(each) for name, each in candidate.conversions.items()}
    return candidate.spec, Code.of(candidate.generated), conversions
