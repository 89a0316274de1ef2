"""Jobs in other processes: the longest first, and one that raises, dies or hangs costs nothing but itself."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from tests.farm.pool import Job, Pool

HERE = f"{__name__}:"


def product(left: Path, a: int, b: int) -> dict[str, Any]:
    return {"product": a * b, "process": os.getpid(), "threads": os.environ["OMP_NUM_THREADS"]}


def raises(left: Path) -> dict[str, Any]:
    raise ValueError("planted")


def dies(left: Path) -> dict[str, Any]:
    left.write_text("last words")
    os._exit(3)


def sleeps(left: Path) -> dict[str, Any]:
    time.sleep(60)
    return {}


def says_last(left: Path) -> dict[str, Any]:
    return {"process": os.getpid(), "last": True}


def test_the_longest_come_first_in_one_process() -> None:
    jobs = [Job(f"job{n}", HERE + "product", {"a": n, "b": 2}, seconds=n) for n in (1, 3, 2)]
    done = list(Pool(workers=1, threads=3).each(jobs))
    assert [each.outcome["product"] for each in done] == [6, 4, 2]
    assert len({each.outcome["process"] for each in done}) == 1
    assert done[0].outcome["threads"] == "3"


def test_what_fails_is_told_and_the_rest_goes_on() -> None:
    names = ("raises", "dies", "says_last")
    jobs = [Job(name, HERE + name, {}) for name in names] + [Job("after", HERE + "product", {"a": 1, "b": 1}, 0.5)]
    done = {each.job.name: each for each in Pool(workers=1).each(jobs)}
    assert "ValueError: planted" in done["raises"].problem
    assert (done["dies"].problem, done["dies"].outcome["left"]) == ("its process ended with 3", "last words")
    assert done["after"].outcome["process"] != done["says_last"].outcome["process"]


def test_a_job_that_hangs_is_ended() -> None:
    (done,) = Pool(workers=1, longest=0.5).each([Job("sleeps", HERE + "sleeps", {})])
    assert done.problem == "its process ended with -6"


def test_nothing_begins_when_the_time_is_over_and_what_runs_is_left() -> None:
    jobs = [Job(f"job{n}", HERE + "sleeps", {}) for n in range(3)]
    start = time.monotonic()
    assert not list(Pool(workers=2, until=start + 0.5, grace=0.2).each(jobs))
    assert time.monotonic() - start < 30
