"""Which of several candidates is the fastest, from rounds in which each of them ran once.

Neighbours on a machine disturb whole rounds rather than one candidate, so times are compared within a round: what counts
is the median of the ratios, and an interval that holds the true median by the sign test, whatever the distribution. A
candidate takes over from one before it only where it is surely no slower and typically faster by two percent; where the
rounds leave that open, the second suffices, as a guess is better than the worse of the two.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median

LEAST_ROUNDS = 5
"""Rounds below which nothing can be said with confidence."""

MARGIN = 0.98
"""A candidate must take at most this share of another's time to be preferred to it."""

_NEAR = 1.05
"""What may be lost by a choice that is not measured again."""

_CONFIDENCE = 0.99  # high, because it is asked for after each round; below eight rounds all of them must agree


@dataclass(frozen=True)
class Ratio:
    """Time of one candidate over another's: the median of all rounds, and the bounds of its confidence interval."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: Sequence[float], others: Sequence[float]) -> Ratio:
        """From the seconds of both, round by round."""
        ratios = sorted(a / max(b, 1e-12) for a, b in zip(seconds, others, strict=True))
        rank = _rank(len(ratios))
        if not rank:
            return cls(median(ratios), 0.0, math.inf)
        return cls(median(ratios), ratios[rank - 1], ratios[-rank])

    @property
    def wins(self) -> bool | None:
        """Whether the first is to be preferred to the second; None where the rounds do not tell."""
        if self.median <= MARGIN and self.high <= 1.0:
            return True
        if self.low >= MARGIN:
            return False
        return self.median <= MARGIN if self.high - self.low <= 1 - MARGIN else None

    @property
    def likely(self) -> bool:
        """Whether the first is to be preferred, as a guess where the rounds do not tell."""
        return self.median <= MARGIN if self.wins is None else self.wins


@dataclass(frozen=True)
class Ranking:
    """What the rounds say.

    Attributes:
        winner: the candidate to take.
        decided: whether it would win again, as far as the rounds tell.
        near: whether it is surely near the fastest one, alternatives aside, if not that itself.
    """

    winner: str
    decided: bool
    near: bool


def ranking(samples: Mapping[str, Sequence[float]], alternatives: Collection[str] = ()) -> Ranking:
    """The fastest by `samples`: seconds round by round of each candidate, in order of preference.

    What is not sure goes by the medians; but `alternatives`, which differ from the first candidate in little, take over only where
    that is sure, so that noise changes no choice.
    """
    names = list(samples)
    winner = names[0]
    for name in names[1:]:
        ratio = Ratio.of(samples[name], samples[winner])
        if ratio.wins is True or (ratio.likely and name not in alternatives):
            winner = name
    place = names.index(winner)
    decided = all(_wins(samples, winner, name) for name in names[:place]) and all(
        _wins(samples, name, winner) is False for name in names[place + 1 :]
    )
    others = [name for name in names if name != winner and name not in alternatives]
    near = all(Ratio.of(samples[winner], samples[name]).high <= _NEAR for name in others)
    return Ranking(winner, decided, near)


def _wins(samples: Mapping[str, Sequence[float]], name: str, other: str) -> bool | None:
    return Ratio.of(samples[name], samples[other]).wins


@cache  # asked for after each round
def _rank(count: int) -> int:
    """The k for which the interval of the median goes from the kth smallest to the kth largest of `count` samples.

    The median lies outside with the probability that fewer than k of `count` fair coins show heads, or that fewer show
    tails. 0 where there are too few samples.
    """
    rank, ways, fewer = int(count >= LEAST_ROUNDS), 1, 1  # whole numbers, as floats end at 2**1024
    while rank:
        ways = ways * (count - rank + 1) // rank
        fewer += ways
        if 2 * fewer / 2**count > 1 - _CONFIDENCE:
            break
        rank += 1
    return rank
