"""A piece of a black-box suite as a job: which cases, and what came of each in one way."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.blackbox.case import Case
from tests.blackbox.suites import SUITES
from tests.farm.pool import Job

PIECE = 60
"""Cases of a job."""

_THEIRS = "[as aot_eager] "


def piece(suite: str, only: str, start: int = 0, count: int | None = None) -> Sequence[Case]:
    """`count` cases of a suite from `start` on (all), of those whose names have `only` in them."""
    found = [case for case in SUITES[suite] if re.search(only, case.name)]
    return found[start : None if count is None else start + count]


def job(suite: str, way: str, start: int, only: str, kernels: str) -> Job:
    """Try the `PIECE` cases from `start` on."""
    arguments = {"suite": suite, "way": way, "start": start, "only": only, "kernels": kernels}
    return Job(f"{suite}-{way}-{start}", f"{__name__}:tried", arguments, PIECE * (0.2 if way == "optimize" else 1.0))


def tried(suite: str, way: str, start: int, only: str, kernels: str, left: Path) -> dict[str, Any]:
    """What came of a piece; the case at work stands in `left` meanwhile."""
    from tests.support.interpreted import interpreted

    runs = []
    with interpreted() if kernels == "interpreted" else contextlib.nullcontext():
        for case in piece(suite, only, start, PIECE):
            left.write_text(case.name)
            runs.append({"suite": suite, "way": way, "case": case.name, **judged(case, way)})
    left.unlink(missing_ok=True)
    return {"runs": runs}


def judged(case: Case, way: str) -> dict[str, str]:
    """A verdict (passed, failed, or failed as aot_eager does), and what is wrong."""
    from tests.blackbox.ways import problem

    try:
        found = problem(case, way)
    except Exception as error:  # whatever it is
        where = traceback.extract_tb(error.__traceback__)[-1]
        found = f"{type(error).__name__}: {str(error)[:300]} ({where.name}, line {where.lineno})"
    if not found:
        return {"verdict": "passed", "problem": ""}
    theirs = found.startswith(_THEIRS)
    return {"verdict": "as aot_eager" if theirs else "failed", "problem": found.removeprefix(_THEIRS)}
