"""Which of a region's candidates are worth a build, by their programs: what rules and the cost models leave out before anything is rendered."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from fusepass.codegen.ir.product import Product
from fusepass.codegen.ir.program import Kernel
from fusepass.codegen.passes.anchors import AnchorSource
from fusepass.codegen.search.candidate import Candidate
from fusepass.codegen.search.prediction import Prediction, predicted
from fusepass.codegen.source import Target
from fusepass.errors import ScheduleError

RULED_OUT = 2.0
"""Times as long as the fastest candidate's is the predicted time of what is not built. Of 47 regions whose candidates docs/notes/convolutions.md
has times of, on an H200 or H100, the fastest one is predicted to take at most 1.8 times as long, the first candidate aside."""


@dataclass(frozen=True)
class AnchorCost:
    """What is to be known of a region's convolution or matrix product where candidates are compared.

    Attributes:
        operations: floating-point operations; 0 where there is none.
        waits_for_memory: whether a generated convolution takes little longer than its tensors take to be moved.
    """

    operations: int = 0
    waits_for_memory: bool = False


def ruled_out(first: Candidate, others: Sequence[Candidate], anchor: AnchorCost) -> Mapping[str, float]:
    """Those of `others`, by name, that are predicted to take at least `RULED_OUT` times as long as `first` or another; and how many times."""
    if not others or first.generated.facts.target is not Target.CUDA:
        return {}
    found: dict[str, Prediction] = {}
    for each in (first, *others):
        with contextlib.suppress(ScheduleError):  # which rendering meets, too: it is noted there
            found[each.name] = predicted(each.generated, anchor.operations)
    least = min((each.seconds for each in found.values() if not each.least), default=inf)
    times = {each.name: found[each.name].seconds / least for each in others if each.name in found}
    return {name: many for name, many in times.items() if many >= RULED_OUT}


def without_slower(others: Sequence[Candidate], anchor: AnchorCost) -> list[Candidate]:
    """`others` without what is slower as a rule: beside products of halves, a generated convolution.

    Unless it reduces something and they do not, or is a product, too; with tiled halves what reduces over channels may be slower. Or where
    memory bounds it: halves are made by kernels of their own, which move everything once or twice more.
    """
    if anchor.waits_for_memory:
        return [*others]
    streamed, tiled = (
        [kernel for each in others for kernel in _of(each, anchor)]
        for anchor in (AnchorSource.HALVES, AnchorSource.TILED_HALVES)
    )
    if not tiled and not any(isinstance(kernel.anchor, Product) for kernel in streamed):
        return [*others]
    alone = not _reduce(streamed)
    return [
        each
        for each in others
        if each.spec.anchor is not AnchorSource.GENERATED
        or any(isinstance(kernel.anchor, Product) for kernel in _of(each, AnchorSource.GENERATED))
        or (alone and _reduce(_of(each, AnchorSource.GENERATED)))
    ]


def _reduce(kernels: Sequence[Kernel]) -> bool:
    return any(kernel.cols or kernel.partials for kernel in kernels)


def _of(candidate: Candidate, anchor: AnchorSource) -> list[Kernel]:
    """The kernels of `candidate` with its anchor, if that is computed by `anchor`."""
    kernels = candidate.generated.program.kernels if candidate.spec.anchor is anchor else ()
    return [kernel for kernel in kernels if kernel.anchor is not None]
