"""How far each region of a model is from float64, beside its own operators: finds where a wrong number comes from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from fusepass.autotune.work import Work
from fusepass.compile.pipeline import CompiledGraph
from fusepass.compile.splice import subgraph
from fusepass.numerics.agreement import Reference, Tolerance, Verdict, as_tuple, in_float64
from fusepass.numerics.comparison import Comparison, Leaf, compare
from fusepass.profiling.walk import Tensors, walk
from fusepass.report.table import Column, table, terminal_width, wrap

_COLUMNS = (
    Column("what", least=16),
    Column("runs as"),
    Column("operators", right=True),
    Column("eager", right=True),
    Column("fused", right=True),
    Column("verdict"),
)
_WORDS = {Verdict.SAME: "right", Verdict.DIFFERENT: "wrong", Verdict.UNCLEAR: "unclear"}


@dataclass(frozen=True)
class ErrorRecord:
    """The results of one part of a model, held against float64 on the same inputs.

    Attributes:
        name: a region's name, or what else was compared.
        state: ``"fused"``, ``"eager"`` or ``"fallback"`` for a region; ``"operators"`` for the rewritten graph run by PyTorch,
            ``"model"`` for the whole.
        operators: how many operators it stands for.
        eager: the relative error (L2) of the original operators, of the result that is worst; NaN where float64 could not run.
        fused: the same of what the optimised model runs.
        verdict: ``"right"``, ``"wrong"`` or ``"unclear"`` by the numeric policy.
        detail: the numbers or the reason in words.
    """

    name: str
    state: str
    operators: int
    eager: float
    fused: float
    verdict: str
    detail: str


@dataclass(frozen=True)
class Errors:
    """Errors of a model, part by part. ``str()`` is a table that fits the terminal.

    Attributes:
        model: the model's class.
        device: such as ``"cuda:0"``.
        records: the rewritten graph, the regions in the order in which they run, the whole.
    """

    model: str
    device: str
    records: tuple[ErrorRecord, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return all(record.verdict != "wrong" for record in self.records)

    def to_json(self) -> str:
        """Everything as JSON, under the names of the fields."""
        return json.dumps({"ok": self.ok, **asdict(self)}, indent=2)

    def __str__(self) -> str:
        width = terminal_width()
        rows = [
            (each.name, each.state, str(each.operators), f"{each.eager:.1e}", f"{each.fused:.1e}", each.verdict)
            for each in self.records
        ]
        head = wrap(f"{self.model} on {self.device}: relative errors (L2) against float64 on the same inputs", width)
        lines = [line for block in table(_COLUMNS, rows, width) for line in block]
        wrong = [line for each in self.records if each.verdict != "right" for line in _told(each, width)]
        return "\n".join([*head, "", *lines, *([""] if wrong else []), *wrong])


def _told(record: ErrorRecord, width: int) -> Iterator[str]:
    yield from wrap(f"{record.name} is {record.verdict}: {record.detail}", width)


def region_errors(
    compiled: CompiledGraph, arguments: Sequence[torch.Tensor], written: frozenset[int]
) -> tuple[list[ErrorRecord], Tensors]:
    """The errors of each region of `compiled`, each on the values that PyTorch's operators give it; and the results of the graph by these.

    Args:
        compiled: the graph and its regions.
        arguments: for the placeholders. They are read only.
        written: positions of those that the graph writes; copies are written instead.
    """
    records: list[ErrorRecord] = []

    def visit(work: Work, taken: Tensors, made: Tensors) -> None:
        records.append(_of_region(compiled, work, taken, made))

    return records, walk(compiled, arguments, written, visit)


def _of_region(compiled: CompiledGraph, work: Work, taken: Tensors, made: Tensors) -> ErrorRecord:
    graph = subgraph(compiled.before, work.region)
    wide = work.run_on(in_float64(graph))
    reference = Reference(lambda *_: made, wide, taken, Tolerance.of(graph))
    given = as_tuple(work.call(*taken)) if work.call is not None else made
    count = sum(isinstance(node.target, torch._ops.OpOverload) for node in work.region.nodes)
    if reference.truth is None:
        nothing = float("nan")
        return ErrorRecord(
            work.region.name,
            work.state.value,
            count,
            nothing,
            nothing,
            "unclear",
            "its operators do not run in float64",
        )
    comparison = compare(given, made, reference.truth)
    if comparison.ok:
        return record_of(work.region.name, work.state.value, count, comparison)
    # One run of the operators may be right by luck: they are tried again on inputs that are one rounding off.
    again = Reference(work.original(), wide, taken, Tolerance.of(graph)).by_policy(given)
    return record_of(work.region.name, work.state.value, count, comparison, _WORDS[again.verdict], again.detail)


def record_of(
    name: str, state: str, operators: int, comparison: Comparison, verdict: str = "", detail: str = ""
) -> ErrorRecord:
    """The record of `comparison`, whose verdict another one may replace."""
    worst = max(comparison.leaves, key=_badness, default=Leaf(""))
    return ErrorRecord(
        name,
        state,
        operators,
        worst.eager.l2,
        worst.actual.l2,
        verdict or ("right" if comparison.ok else "wrong"),
        detail or comparison.explain(),
    )


def _badness(leaf: Leaf) -> Any:
    return bool(leaf.problem), leaf.strain
