"""Whether a graph on a CPU is quicker channels last: a trial of its operators in both layouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from fusepass.autotune.graph_trial import Call, seconds_of, times_decide
from fusepass.config import current
from fusepass.patterns.channels_last import CHANNELS_LAST, Followed, laid_out, wanted
from fusepass.patterns.cost import Cost
from fusepass.patterns.simplify import Application

_WORTH = 0.95
"""Of the time of the plain layout, what channels last may take at most: fused kernels are measured in the one that is chosen."""
_PLAIN = "as captured"


def chosen_layout(graph: fx.GraphModule) -> tuple[fx.GraphModule, list[Application]]:
    """`graph`, or one that computes the same with images channels last inside, if that was measured to be quicker.

    Nothing is tried where ``Config.tune`` is ``"off"``, where ``"channels-last"`` is disabled, or where times are not to decide.
    """
    if not times_decide() or not current().allows(CHANNELS_LAST) or not wanted(graph.graph):
        return graph, []
    other = laid_out(graph)
    if other is None:
        return graph, []
    seconds = seconds_of("layout of the whole graph", graph, lambda: _both(graph, other), {})
    if seconds is None or seconds[CHANNELS_LAST] > _WORTH * seconds[_PLAIN]:
        return graph, []
    first = next(node for node in graph.graph.nodes if node.target is torch.ops.aten.convolution.default)
    before, after = (Cost(seconds=seconds[name]) for name in (_PLAIN, CHANNELS_LAST))
    return other, [Application(CHANNELS_LAST, first.name, before, after)]


def _both(graph: fx.GraphModule, other: fx.GraphModule) -> Mapping[str, Call]:
    """Calls in both layouts; the first one of the second sees that operators do what they are described to."""
    checked = False

    def last(*inputs: Any) -> object:
        nonlocal checked
        if checked:
            return other(*inputs)
        checked = True
        return Followed(other).run(*inputs)

    return {_PLAIN: fx.GraphModule(graph, graph.graph), CHANNELS_LAST: last}
