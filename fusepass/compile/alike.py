"""Regions of one graph that differ in nothing but names, as those of equal layers do: what becomes of one becomes of all of them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import replace

from fusepass.autotune.work import Work


def note_alike(works: Iterable[Work], earlier: Iterable[Work] = ()) -> None:
    """Tell each of `works` that is like one of `earlier`, or like one before it, so."""
    known: dict[Hashable, Work] = {work.kind: work for work in earlier if work.like is None}
    for work in works:
        first = known.setdefault(work.kind, work)
        work.like = None if first is work else first


def follow(work: Work) -> None:
    """Give `work` what was generated and built for the region that it is like."""
    first = work.like
    assert first is not None
    copies = {id(each): replace(each) for each in first.candidates}
    work.candidates = list(copies.values())
    work.candidate = None if first.candidate is None else copies[id(first.candidate)]
    work.offered, work.lost, work.choice, work.reason = first.offered, dict(first.lost), first.choice, first.reason
