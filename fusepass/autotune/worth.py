"""Which of a region's candidates are worth a build, by their programs: what rules and the cost models leave out before anything is rendered."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from math import inf

import torch

from fusepass.autotune.work import Candidate, Work
from fusepass.codegen.ir.product import Product
from fusepass.codegen.ir.program import Kernel
from fusepass.codegen.passes.anchors import AnchorSource
from fusepass.codegen.search.prediction import Prediction, predicted
from fusepass.codegen.source import Target
from fusepass.errors import ScheduleError
from fusepass.patterns.anchor_work import moved, multiplications
from fusepass.patterns.cost import cost

RULED_OUT = 2.0
"""Times as long as the fastest candidate's is the predicted time of what is not built. Of 47 regions whose candidates docs/notes/convolutions.md
has times of, on an H200 or H100, the fastest one is predicted to take at most 1.8 times as long, the first candidate aside."""

_CONVOLUTION = torch.ops.aten.convolution.default
_MULTIPLIED = 1.8e14 / 132  # operations a second of a multiprocessor of an H100, in generated convolutions of TF32
_LONGER = 2  # times as long as memory takes: from there on products of halves were faster


def ruled_out(work: Work, others: Sequence[Candidate]) -> Mapping[str, float]:
    """Those of `others`, by name, that are predicted to take at least `RULED_OUT` times as long as another candidate of `work`; and how many times."""
    if not others or work.candidates[0].generated.facts.target is not Target.CUDA:
        return {}
    products = 0 if work.region.anchor is None else cost([work.region.anchor]).flops
    found: dict[str, Prediction] = {}
    for each in (work.candidates[0], *others):
        with contextlib.suppress(ScheduleError):  # which rendering meets, too: it is noted there
            found[each.name] = predicted(each.generated, products)
    least = min((each.seconds for each in found.values() if not each.least), default=inf)
    times = {each.name: found[each.name].seconds / least for each in others if each.name in found}
    return {name: many for name, many in times.items() if many >= RULED_OUT}


def without_slower(work: Work, others: Sequence[Candidate]) -> list[Candidate]:
    """`others` without what is slower as a rule: beside products of halves, a generated convolution.

    Unless it reduces something and they do not, or is a product, too; with tiled halves what reduces over channels may be slower. Or where
    memory bounds it: halves are made by kernels of their own, which move everything once or twice more.
    """
    if _waits_for_memory(work):
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


def _waits_for_memory(work: Work) -> bool:
    """Whether a generated convolution takes little longer than its tensors take to be moved."""
    anchor, facts = work.region.anchor, work.candidates[0].generated.facts
    if anchor is None or anchor.target is not _CONVOLUTION:
        return False
    seconds = 2 * multiplications(anchor) / (_MULTIPLIED * facts.multiprocessors)
    return seconds < _LONGER * moved(anchor) / facts.bandwidth


def _reduce(kernels: Sequence[Kernel]) -> bool:
    return any(kernel.cols or kernel.partials for kernel in kernels)


def _of(candidate: Candidate, anchor: AnchorSource) -> list[Kernel]:
    """The kernels of `candidate` with its anchor, if that is computed by `anchor`."""
    kernels = candidate.generated.program.kernels if candidate.spec.anchor is anchor else ()
    return [kernel for kernel in kernels if kernel.anchor is not None]
