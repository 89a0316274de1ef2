"""Which of several candidates is the fastest: intervals of paired ratios, preferences, and what stays open."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from statistics import median

import pytest

from fusepass.autotune.ranking import LEAST_ROUNDS, MARGIN, Ratio, ranking


def test_the_interval_holds_the_median_as_often_as_it_says() -> None:
    """Whatever the distribution: here one with a long tail, whose median is known."""
    draw, hits, trials = random.Random(0), 0, 2000
    for _ in range(trials):
        ratio = Ratio.of([math.exp(draw.gauss(0, 1)) for _ in range(20)], [1.0] * 20)
        hits += ratio.low <= 1.0 <= ratio.high
    assert 0.985 < hits / trials < 1.0


def test_more_rounds_give_a_narrower_interval() -> None:
    draw = random.Random(0)
    samples = [math.exp(draw.gauss(0, 0.1)) for _ in range(3000)]
    ratios = [Ratio.of(samples[:count], [1.0] * count) for count in (5, 20, 80, 200, 3000)]
    assert all(a.high - a.low > b.high - b.low for a, b in pairwise(ratios))
    assert ratios[-1].median == median(samples)


@pytest.mark.parametrize("count", range(1, LEAST_ROUNDS))
def test_few_rounds_say_nothing(count: int) -> None:
    ratio = Ratio.of([1.0] * count, [9.0] * count)
    assert (ratio.low, ratio.high, ratio.wins) == (0.0, math.inf, None)


@pytest.mark.parametrize(
    ("median", "low", "high", "wins"),
    [
        (0.5, 0.4, 0.6, True),
        (0.5, 0.4, 1.0, True),
        (0.5, 0.4, 1.1, None),  # it may be slower
        (1.5, 1.2, 1.9, False),
        (1.0, 0.985, 1.5, False),  # it cannot be faster by what counts
        (1.0, 0.9, 1.1, None),
        (0.99, 0.975, 0.9949, False),  # so narrow that nothing is at stake
        (0.979, 0.975, 0.9949, True),
        (MARGIN, MARGIN, MARGIN, True),
    ],
)
def test_when_a_candidate_wins(median: float, low: float, high: float, wins: bool | None) -> None:
    assert Ratio(median, low, high).wins is wins


def test_rounds_that_are_disturbed_as_a_whole_say_as_much_as_others() -> None:
    """A neighbour that slows rounds down five times changes no ratio."""
    disturbed = [1.0, 5.0, 5.0, 1.0, 5.0, 1.0]
    found = ranking({"a": [1.1 * each for each in disturbed], "b": disturbed})
    assert (found.winner, found.decided) == ("b", True)


@pytest.mark.parametrize(
    ("times", "winner"),
    [
        ({"a": 1.0, "b": 1.01}, "a"),
        ({"a": 1.0, "b": 0.99}, "a"),
        ({"a": 1.0, "b": 0.9}, "b"),
        ({"a": 1.0, "b": 0.9, "c": 0.8}, "c"),
        ({"a": 1.0, "b": 0.9, "c": 0.895}, "b"),
        ({"a": 1.0}, "a"),
    ],
)
def test_the_first_is_preferred(times: dict[str, float], winner: str) -> None:
    found = ranking({name: [seconds] * 8 for name, seconds in times.items()})
    assert (found.winner, found.decided) == (winner, True)


def test_what_is_open_goes_by_the_median() -> None:
    wild = [0.1, 9.0, 0.1, 9.0, 0.1, 9.0]
    found = ranking({"a": [1.0] * 9, "b": [*wild, 0.9, 0.9, 0.9]})
    assert (found.winner, found.decided) == ("b", False)
    found = ranking({"a": [1.0] * 6, "b": wild})
    assert (found.winner, found.decided) == ("a", False)
    found = ranking({"a": [1.0] * 6, "b": wild, "c": [0.5] * 6})
    assert (found.winner, found.decided) == ("c", False)


def test_what_is_open_may_be_near() -> None:
    """Times that overlap by little need no other measurement, those that overlap by much do."""
    close = ranking({"a": [1.0, 1.03, 1.0, 1.03, 1.0, 1.03], "b": [1.03, 1.0, 1.03, 1.0, 1.03, 1.0]})
    wide = ranking({"a": [1.0, 1.2, 1.0, 1.2, 1.0, 1.2], "b": [1.2, 1.0, 1.2, 1.0, 1.2, 1.0]})
    assert (close.decided, close.near) == (False, True)
    assert (wide.decided, wide.near) == (False, False)
