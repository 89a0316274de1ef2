"""Candidates of one region, as they are generated without those of others."""

from __future__ import annotations

from fusepass.autotune.candidates import generate_anew, has_candidates
from fusepass.autotune.work import Work
from fusepass.codegen.forms import Forms
from fusepass.codegen.search.others import Begin


def generate_candidates(work: Work, forms: Forms, begin: Begin = lambda source: None) -> None:
    """Give `work` its candidates in this process, or the reason why there are none; no other schedules of them."""
    if not has_candidates(work, forms, begin):
        generate_anew(work, forms, begin)
