"""Whether a graph on a CPU is quicker channels last: a trial of its operators in both layouts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import fx

from fusepass.autotune.graph_trial import seconds_of, times_decide
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
    seconds = seconds_of("layout of the whole graph", graph, partial(_both, graph, other), {})
    if seconds is None or seconds[CHANNELS_LAST] > _WORTH * seconds[_PLAIN]:
        return graph, []
    first = next(node for node in graph.graph.nodes if node.target is torch.ops.aten.convolution.default)
    before, after = (Cost(seconds=seconds[name]) for name in (_PLAIN, CHANNELS_LAST))
    return other, [Application(CHANNELS_LAST, first.name, before, after)]


def _both(graph: fx.GraphModule, other: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> dict[str, partial[object]]:
    """Calls in both layouts, once it is seen that operators do what they are described to in the second."""
    Followed(other).run(*inputs)
    return {_PLAIN: partial(fx.GraphModule(graph, graph.graph), *inputs), CHANNELS_LAST: partial(other, *inputs)}
