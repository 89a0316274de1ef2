"""What a graph on a CPU is compiled as: a trial of its operators as captured, channels last, and with weights that are laid out once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import fx

from fusepass.autotune.graph_trial import seconds_of, times_decide
from fusepass.config import current
from fusepass.errors import BuildError
from fusepass.patterns.channels_last import CHANNELS_LAST, Followed, laid_out, wanted
from fusepass.patterns.cost import Cost
from fusepass.patterns.packing import PACKED_WEIGHTS, pack, packable
from fusepass.patterns.simplify import Application
from fusepass.runtime.packed import Packed

_WORTH = 0.95
"""Of the time of a simpler form, what another may take at most: fused kernels are measured in the one that is chosen."""
_PLAIN = "as captured"


def chosen_layout(graph: fx.GraphModule, states: int = 0) -> tuple[fx.GraphModule, list[Application], Packed | None]:
    """`graph`, or what computes the same and was measured to be quicker; with what it keeps from call to call.

    Images may be channels last inside, and weights packed. Nothing is tried where ``Config.tune`` is ``"off"``, where the form is
    disabled, or where times are not to decide.

    Args:
        graph: simplified.
        states: how many of its first placeholders are parameters or buffers.
    """
    forms = {_PLAIN: graph}
    packed: Packed | None = None
    folded: list[Application] = []
    if times_decide() and current().allows(CHANNELS_LAST) and wanted(graph.graph):
        other = laid_out(graph)
        if other is not None:
            forms[CHANNELS_LAST] = other
    if times_decide() and current().allows(PACKED_WEIGHTS) and packable(graph.graph, states):
        last = [*forms.values()][-1]
        other = fx.GraphModule(last, _copied(last.graph))
        folded = pack(other, states)
        try:
            packed = Packed(other)
            forms[PACKED_WEIGHTS] = other
        except BuildError:
            pass
    if len(forms) == 1:
        return graph, [], None
    seconds = seconds_of(
        "layout of the whole graph",
        graph,
        partial(_calls, forms, packed),
        {"forms": {name: str(form.graph) for name, form in forms.items()}},
    )
    if seconds is None:
        return graph, [], None
    best = _PLAIN
    for name in forms:
        if seconds[name] <= _WORTH * seconds[best]:
            best = name
    if best == _PLAIN:
        return graph, [], None
    first = next(node for node in graph.graph.nodes if node.op == "call_function")
    before, after = (Cost(seconds=seconds[name]) for name in (_PLAIN, best))
    done = [Application(best, first.name, before, after)]
    return (forms[best], [*folded, *done], packed) if best == PACKED_WEIGHTS else (forms[best], done, None)


def _calls(
    forms: dict[str, fx.GraphModule], packed: Packed | None, inputs: Sequence[torch.Tensor]
) -> dict[str, Callable[[], object]]:
    """A call of each form, once it is seen that operators do what they are described to channels last."""
    if CHANNELS_LAST in forms:
        Followed(forms[CHANNELS_LAST]).run(*inputs)
    calls: dict[str, Callable[[], object]] = {}
    for name, form in forms.items():
        made = fx.GraphModule(form, _copied(form.graph))
        if name == PACKED_WEIGHTS and packed is not None:
            packed.use(made)
        calls[name] = partial(made, *inputs)
    return calls


def _copied(graph: fx.Graph) -> fx.Graph:
    made = fx.Graph()
    output = made.graph_copy(graph, {})
    made.output(output)
    return made
