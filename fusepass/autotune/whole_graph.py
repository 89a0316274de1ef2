"""Which regions of a graph on a CPU are worth it together: the sum of choices is not the choice of the sum.

A region's trial runs it alone, again and again. Between other operators its inputs lie in other caches, and its threads were busy with
something else. So the graph is timed as a whole: with all regions that were chosen, with those that gained most, and with none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.utils._pytree as pytree
from torch import fx

from fusepass.autotune.graph_trial import Call, seconds_of, times_decide
from fusepass.autotune.tune import kind_of_region
from fusepass.autotune.work import Work
from fusepass.codegen.forms import Forms
from fusepass.codegen.key import source_key
from fusepass.config import current
from fusepass.patterns.aliasing import is_view
from fusepass.patterns.effects import may_be_repeated
from fusepass.report.choice import EAGER
from fusepass.report.report import RegionState

WHOLE_GRAPH = "whole-graph"
"""The name by which `Config.disable` knows it."""

_ALL, _MOST, _NONE = "all regions", "those that gain most", "its operators"
_GAIN = 1.25
"""Times its operators' speed: a region that was so much faster alone is among those that gain most."""
_WORTH = 0.97
"""Of the time with all regions, what fewer may take at most."""


def leave_out(
    graph: fx.GraphModule,
    works: Sequence[Work],
    spliced: Callable[[Sequence[Work]], Call],
    forms: Forms,
    *,
    apart: bool = True,
) -> None:
    """Let regions run as their own operators where the whole graph was measured to be faster so.

    Nothing is tried on a GPU, or where one region is all that the graph has.

    Args:
        graph: simplified.
        works: its regions; choices of those that are left out are overruled.
        spliced: makes a function of the graph's arguments in which only the given regions are fused.
        forms: what was found for other sizes; of about as many bytes it holds for these.
        apart: whether a region may run as its operators while others are fused.
    """
    fused = [work for work in works if work.state is RegionState.FUSED]
    if not times_decide() or not current().allows(WHOLE_GRAPH) or not _can_be_tried(graph.graph, fused):
        return
    moved = sum(work.region.bytes_before for work in fused)
    kind = (*map(kind_of_region, fused), moved.bit_length())
    if kind not in forms.left_out:
        forms.left_out[kind] = _left_out(graph, fused, spliced, apart=apart)
    names, why = forms.left_out[kind]
    for work in fused:
        if work.region.name in names and work.choice is not None:
            work.choice = replace(work.choice, chosen=EAGER, overruled=why)


def _left_out(
    graph: fx.GraphModule, fused: Sequence[Work], spliced: Callable[[Sequence[Work]], Call], *, apart: bool
) -> tuple[frozenset[str], str]:
    """The names of the regions that are not worth it, and why."""
    unmeasured = [work for work in fused if work.choice is None]
    strong = [work for work in fused if work.choice is None or work.choice.speedup >= _GAIN]
    sets: dict[str, Sequence[Work]] = {_ALL: fused, _NONE: unmeasured}
    if apart and len(unmeasured) < len(strong) < len(fused):
        sets[_MOST] = strong
    depends = {
        "sources": [source_key(work.generated.source) for work in fused if work.generated is not None],
        "sets": [[name, [work.region.name for work in kept]] for name, kept in sets.items()],
    }

    def ways(inputs: Sequence[torch.Tensor]) -> dict[str, partial[object]]:
        return {name: partial(spliced(kept), *inputs) for name, kept in sets.items()}

    seconds = seconds_of("regions of the whole graph", graph, ways, depends)
    best = min(sets, key=seconds.__getitem__) if seconds is not None else _ALL
    if seconds is None or seconds[best] > _WORTH * seconds[_ALL]:
        return frozenset(), ""
    times = ", ".join(f"with {name} {1e3 * seconds[name]:.3g} ms" for name in sets)
    return frozenset(work.region.name for work in fused if work not in sets[best]), f"the whole graph takes {times}"


def _can_be_tried(graph: fx.Graph, fused: Sequence[Work]) -> bool:
    """Whether `graph` may be run to no effect on a CPU, and more runs in it than one region."""
    inside = {node for work in fused for node in work.region.nodes}
    calls = [node for node in graph.nodes if node.op == "call_function"]
    alone = [node for node in calls if node not in inside and not is_view(node.target)]
    if not fused or len(fused) + len(alone) < 2 or not may_be_repeated(graph):
        return False
    values = [value for node in graph.nodes for value in pytree.tree_leaves(node.meta.get("val"))]
    return all(value.device.type == "cpu" for value in values if isinstance(value, torch.Tensor))
