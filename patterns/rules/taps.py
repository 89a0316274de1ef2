"""Sums of a convolution's input for each of its weights along an axis, and weights that share such a sum."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import groupby

from torch import fx

from fusepass.patterns.matcher import Declined
from fusepass.patterns.rules.builder import Builder

MOST_TAPS = 16
"""A longer kernel would need too many operators."""

Reads = Mapping[int, Sequence[range]]
"""For each axis, as a dimension of the tensor, what each weight along it reads."""


def tap_sums(build: Builder, x: fx.Node, reads: Reads) -> fx.Node:
    """`x`, along each axis of `reads` the sums of what the weights read; those that read the same share one.

    What different weights read is nearly the same: the common part is summed once. Nothing is subtracted, so that no
    digits cancel and an element that a weight does not read cannot make its sum NaN.

    Raises:
        Declined: no weight reads anything, or there are too many.
    """
    shares = {dim: list(_shares(parts)) for dim, parts in reads.items()}
    if any(not parts or len(parts) > MOST_TAPS for parts in shares.values()):
        raise Declined("the kernel reads nothing, or has too many weights along an axis")
    single = [dim for dim, parts in shares.items() if len(parts) == 1]
    for dim in single:
        x = build.slice(x, dim, shares[dim][0][0])
    x = build.sum(x, single) if single else x
    for dim in sorted(shares.keys() - set(single), reverse=True):
        x = build.cat(_sums(build, x, dim, [part for part, _ in shares[dim]]), dim)
    return x


def merged_weights(build: Builder, weight: fx.Node, reads: Reads) -> fx.Node:
    """`weight`, along each axis of `reads` one weight, their sum, in the place of those that read the same."""
    single = []
    for dim, parts in reads.items():
        shares = list(_shares(parts))
        if len(shares) == 1:
            weight = build.slice(weight, dim, shares[0][1])
            single.append(dim)
        elif any(len(taps) != 1 for _, taps in shares) or len(shares) != len(parts):
            weight = build.cat([build.sum(build.slice(weight, dim, taps), [dim]) for _, taps in shares], dim)
    return build.sum(weight, single) if single else weight


def _shares(parts: Sequence[range]) -> list[tuple[range, range]]:
    """The different parts that are read, with the neighbouring weights that read them; but not what reads nothing."""
    shares, start = [], 0
    for part, group in groupby(parts):
        taps = range(start, start + len(list(group)))
        start = taps.stop
        if part:
            shares.append((part, taps))
    return shares


def _sums(build: Builder, x: fx.Node, dim: int, parts: Sequence[range]) -> list[fx.Node]:
    """The sum of each part of `x` along `dim`."""
    families: dict[int, list[range]] = defaultdict(list)
    for part in parts:
        families[part[0] % part.step].append(part)
    sums: dict[range, fx.Node] = {}
    for family in families.values():
        step = family[0].step
        core = range(max(part[0] for part in family), min(part[-1] for part in family) + 1, step)
        if not core:
            sums |= {part: build.sum(build.slice(x, dim, part), [dim]) for part in family}
            continue
        middle = build.sum(build.slice(x, dim, core), [dim])
        before = _growing(build, x, dim, [range(part[0], core[0], step) for part in family], left=True)
        ends = [range(core[-1] + step, part[-1] + 1, step) for part in family]
        after = _growing(build, x, dim, ends, left=False)
        for part in family:
            total = middle
            for side in (before.get(part[0]), after.get(part[-1])):
                total = total if side is None else build.add(total, side)
            sums[part] = total
    return [sums[part] for part in parts]


def _growing(build: Builder, x: fx.Node, dim: int, parts: Sequence[range], left: bool) -> dict[int, fx.Node]:
    """The sums of parts that share their last element, or their first, by the end at which they grow."""
    sums: dict[int, fx.Node] = {}
    known, total = range(0), None
    for part in sorted(filter(None, parts), key=len):
        more = len(part) - len(known)
        if more:
            piece = build.sum(build.slice(x, dim, part[:more] if left else part[len(known) :]), [dim])
            total = piece if total is None else build.add(total, piece)
        assert total is not None
        known = part
        sums[part[0] if left else part[-1]] = total
    return sums
