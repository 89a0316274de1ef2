"""Writes docs/operators.md: what becomes of every operator in PyTorch's operator database.

``python -m tests.opinfo_coverage`` takes some minutes. Nothing is compiled; that the results are right is what
``tests/models/test_opinfo.py`` is for.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.support.interpreted import interpreted
from tests.support.opinfo import Outcome, Status, cases, everything_fuses, operators, outcome_of, summary, title

PAGE = Path(__file__).parents[1] / "docs" / "operators.md"
SAMPLES = 2
"""Samples of an operator in each type; more tell more of what is fused in part."""

TYPES = (torch.float32, torch.int64)

_HEAD = """# Operators

What becomes of the {count} entries of PyTorch's own operator database (`op_db`, which its tests use), in torch {version}
on a CPU: up to {samples} samples of each, in {types},
as models of one operator. `python -m tests.opinfo_coverage` writes this page.

| | operators |
|---|---|
{totals}

- **fused**: every sample becomes generated code, alone or in a chain. Views are index arithmetic inside a kernel.
- **fused in part**: samples with other arguments or types are left to PyTorch, for the reasons given.
- **refused**: the operators behind it are PyTorch's own; `fusepass.explain` gives the same reasons.
- **not captured**: the result, or its size, depends on values, or a tensor is of a kind that is not traced.
- **not tensor code**: takes no tensor (what is filled with constants is folded into the kernels that use it) or gives none.
- **no work**: these samples give their input back, or have no elements.
- **not on this device**: has no samples of these types that run on a CPU.

## Reasons

Why operators, or some of their samples, are not fused; some have several reasons.

| operators | reason |
|---|---|
{reasons}

## Every operator

| operator | what becomes of it | why |
|---|---|---|
"""


_BEHIND = " (an operator behind it)"


def outcomes(info: Any) -> Iterator[Outcome]:
    """What becomes of the samples of one operator."""
    for dtype in TYPES:
        try:
            for case in cases(info, dtype, SAMPLES):
                yield outcome_of(case)
        except (RuntimeError, AssertionError, NotImplementedError) as error:  # PyTorch's samples for other devices
            yield Outcome(Status.NOT_CAPTURED, (f"PyTorch raises {type(error).__name__}",))


def rows() -> Iterator[tuple[str, str, str]]:
    """(operator, what becomes of it, why) for every operator in the database."""
    with everything_fuses(), interpreted():
        for info in operators():
            word, why = summary(list(outcomes(info)))
            yield title(info), word, _brief(why)


def _brief(why: str) -> str:
    """`why` for a cell of the table: without what differs from sample to sample."""
    parts = (part.removeprefix("trace: ") for part in why.split("; ") if not part.startswith("Dynamo: "))
    cut = dict.fromkeys(re.sub(r"element type \w+ has", "its element type has", part) for part in parts)
    return "; ".join(list(cut)[:3]).replace("|", "\\|")


def _reasons(found: list[tuple[str, str, str]]) -> Counter[str]:
    """How many operators have each reason, whatever operator behind them it is about."""
    told = Counter[str]()
    for _, _, why in found:
        reasons = {part.partition(": ")[2] or part for part in why.split("; ") if part}
        told.update(re.sub(r" (?:for aten|for prims|\(aten)\..*", _BEHIND, reason) for reason in reasons)
    return told


def page(found: list[tuple[str, str, str]]) -> str:
    """The text of the page."""
    totals = Counter(word for _, word, _ in found)
    head = _HEAD.format(
        count=len(found),
        version=torch.__version__.partition("+")[0],
        samples=SAMPLES,
        types=", ".join(str(dtype).removeprefix("torch.") for dtype in TYPES),
        totals="\n".join(f"| {word} | {count} |" for word, count in totals.most_common()),
        reasons="\n".join(f"| {count} | {reason} |" for reason, count in _reasons(found).most_common()),
    )
    return head + "".join(f"| `{name}` | {word} | {why} |\n" for name, word, why in found)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    PAGE.write_text(page(list(rows())))
