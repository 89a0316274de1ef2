"""Which candidates of a graph's regions are generated at all: `Config.tune_budget` is spent where operators take most time.

What a candidate costs, and what it may gain, is estimated from the region alone, as nothing is generated yet. So it depends on neither the
load of the machine nor on what is in the cache, and a later process decides likewise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

import torch

from fusepass.autotune.work import Work
from fusepass.codegen import units
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.passes.anchors import AnchorSource
from fusepass.codegen.search.candidate import CandidateSpec
from fusepass.codegen.search.space import search_space
from fusepass.config import Config, current
from fusepass.patterns.anchor_work import HALVES
from fusepass.patterns.cost import cost

BUDGETS = {"off": 0.0, "fast": 5.0, "max": inf}
"""Seconds by `Config.tune`, where `Config.tune_budget` is None."""

# Bytes of a candidate's text: for each input and operator of its region, and for what scales float32 to halves; and seconds of Python for
# each. Fitted to 420 candidates of ResNet-50, EfficientNet-B0, GoogLeNet and DenseNet-121, which are 30 % off in the mean.
_INPUT, _OPERATOR, _SCALING = 1300, 300, 27000
_GENERATED = 2e-6

_OF_HALVES = (AnchorSource.HALVES, AnchorSource.TILED_HALVES, AnchorSource.REGISTER_STATIONARY)
_BY_ONE_OR_THE_OTHER = (AnchorSource.LIBRARY, AnchorSource.GENERATED)


@dataclass(frozen=True)
class _Bid:
    """Candidates of a region that are tried together, or not at all.

    Attributes:
        work: the region.
        names: of the candidates.
        seconds: what they add to the first call.
        gain: seconds that the region's operators take in one call of the graph, those of equal regions among them.
    """

    work: Work
    names: tuple[str, ...]
    seconds: float
    gain: float


def spend(works: Sequence[Work], facts_of: Callable[[torch.device], DeviceFacts]) -> float:
    """Tell each of `works` which candidates are beyond the budget; gives the seconds of it that are left."""
    config = current()
    left = BUDGETS[config.tune] if config.tune_budget is None else config.tune_budget
    if config.tune == "off" or left == inf:
        return left
    alike = Counter(id(work.like or work) for work in works)
    first = [work for work in works if work.like is None]
    bids = [bid for work in first for bid in _bids(work, alike[id(work)], facts_of, config)]
    for bid in sorted(bids, key=lambda bid: bid.gain / bid.seconds, reverse=True):  # equal ones stay in their order
        if bid.seconds <= left:
            left -= bid.seconds
        else:
            bid.work.beyond_budget += bid.names
    return left


def build_seconds(work: Work, anchor: AnchorSource, config: Config) -> float:
    """About what one more candidate of `work` adds to the first call: its generation, and the share of its build that one of `Config.jobs` has."""
    region = work.region
    scaled = anchor in _OF_HALVES and all(node.meta["val"].dtype not in HALVES for node in region.inputs)
    nbytes = _INPUT * len(region.inputs) + _OPERATOR * len(region.nodes) + _SCALING * scaled
    return nbytes * (_GENERATED + units.SECONDS / config.jobs)


def _bids(work: Work, alike: int, facts_of: Callable[[torch.device], DeviceFacts], config: Config) -> Iterator[_Bid]:
    """What `work` may be tried in besides; `alike` regions are what it is."""
    if work.region.anchor is None or work.device.type not in ("cpu", "cuda"):
        return  # there is one way to generate it
    _, *others = search_space(work.graph, facts_of(work.device), config.tune)
    groups: dict[object, list[CandidateSpec]] = {}
    for spec in others:
        # Of the library and generated code one is what the first candidate prefers.
        either = spec.anchor_format if spec.anchor in _BY_ONE_OR_THE_OTHER else spec
        groups.setdefault(either, []).append(spec)
    gain = alike * cost(work.region.nodes).seconds
    for specs in groups.values():
        seconds = build_seconds(work, specs[-1].anchor, config)
        yield _Bid(work, tuple(spec.name for spec in specs), seconds, gain)
