"""What a graph on a CPU is compiled as: a trial of its operators as captured, channels last, and with weights that are laid out once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.utils._pytree as pytree
from torch import fx

from fusepass.autotune.graph_trial import CPU, seconds_of, times_decide
from fusepass.codegen import choices
from fusepass.codegen.forms import Forms
from fusepass.config import current
from fusepass.errors import BuildError
from fusepass.measure import free_bytes, nbytes
from fusepass.patterns.channels_last import CHANNELS_LAST, Followed, laid_out, wanted
from fusepass.patterns.cost import Cost
from fusepass.patterns.packing import PACKED_WEIGHTS, kept_values, pack, packable, packed_calls
from fusepass.patterns.simplify import Application
from fusepass.runtime.packed import Packed

_WORTH = 0.95
"""Of the time of a simpler form, what another may take at most: fused kernels are measured in the one that is chosen."""
_MEMORY_SHARE = 0.25
"""Of what is free that parameters may take, to have them in memory twice."""
_PLAIN = "as captured"
_PLAIN_PACKED = f"{_PLAIN}, {PACKED_WEIGHTS}"
"""Is tried where images cannot be channels last."""


@dataclass(frozen=True)
class _Form:
    """One way to compute a graph: the graph, what it keeps from call to call, what was rewritten for that."""

    graph: fx.GraphModule
    packed: Packed | None = None
    applied: Sequence[Application] = ()

    def call(self, inputs: Sequence[torch.Tensor]) -> Callable[[], object]:
        made = fx.GraphModule(self.graph, _copied(self.graph.graph))
        if self.packed is not None:
            self.packed.use(made)
        return partial(made, *inputs)


def chosen_layout(
    graph: fx.GraphModule, parameters: Collection[int] = (), known: Forms | None = None
) -> tuple[fx.GraphModule, Sequence[Application], Packed | None]:
    """`graph`, or what computes the same and was measured to be quicker; with what it keeps from call to call.

    Images may be channels last inside, and weights packed. Nothing is tried where ``Config.tune`` is ``"off"``, where the form is
    disabled, or where times are not to decide.

    Args:
        graph: simplified.
        parameters: the positions of placeholders that are parameters or buffers, the same from call to call.
        known: what was found for other sizes; of about as many bytes it holds for these.
    """
    forms = dict(_forms(graph, parameters)) if times_decide() else {}
    if len(forms) < 2:
        return graph, [], None
    layouts = known.layouts if known is not None else {}
    kind = _kind(graph.graph)
    if kind not in layouts or layouts[kind][0] not in forms:
        layouts[kind] = _fastest(graph, forms)
    best, seconds = layouts[kind]
    if best == _PLAIN:
        return graph, [], None
    chosen = forms[best]
    first = next(node for node in graph.graph.nodes if node.op == "call_function")
    before, after = (Cost(seconds=seconds[name]) for name in (_PLAIN, best))
    rule = PACKED_WEIGHTS if chosen.packed is not None else CHANNELS_LAST
    return chosen.graph, [*chosen.applied, Application(rule, first.name, before, after)], chosen.packed


def _fastest(graph: fx.GraphModule, forms: Mapping[str, _Form]) -> tuple[str, Mapping[str, float]]:
    """The form that is worth it, with the seconds that each takes; nothing is known of these where nothing could be timed."""
    depends = {"forms": {name: str(form.graph.graph) for name, form in forms.items()}}
    seconds = seconds_of("layout of the whole graph", graph, partial(_calls, forms), depends)
    best = _PLAIN
    for name, taken in (seconds or {}).items():
        if seconds is not None and taken <= _WORTH * seconds[best]:
            best = name
    return best, seconds or {}


def _kind(graph: fx.Graph) -> tuple[object, ...]:
    """What sizes change little about a graph."""
    values = [value for node in graph.nodes for value in pytree.tree_leaves(node.meta.get("val"))]
    moved = sum(nbytes(value) for value in values if isinstance(value, torch.Tensor))
    return (*(str(node.target) for node in graph.nodes), moved.bit_length())


def _forms(graph: fx.GraphModule, parameters: Collection[int]) -> Iterator[tuple[str, _Form]]:
    """Those that may be tried, by name."""
    allows = current().allows
    last = laid_out(graph) if allows(CHANNELS_LAST) and wanted(graph.graph) else None
    yield _PLAIN, _Form(graph)
    if last is not None:
        yield CHANNELS_LAST, _Form(last)
    if not allows(PACKED_WEIGHTS) or not packable(graph.graph, parameters):
        return
    given = [*graph.graph.find_nodes(op="placeholder")]
    bytes_given = [nbytes(given[number].meta["val"]) for number in parameters]
    for name, form in ((PACKED_WEIGHTS, last), (_PLAIN_PACKED, graph)):
        if form is None:
            continue
        made = fx.GraphModule(form, _copied(form.graph))
        applied = pack(made, parameters)
        others = [nbytes(node.meta["val"]) for node in kept_values(made.graph)]
        if not fit_twice([*bytes_given, *others]):
            choices.momentary()
            return
        try:
            if others or any(packed_calls(made.graph)):
                yield name, _Form(made, Packed(made), applied)
        except BuildError:  # nothing tells whether parameters have changed
            choices.momentary()
            return


def fit_twice(sizes: Sequence[int]) -> bool:
    """Whether there is memory for parameters of so many bytes once more."""
    return sum(sizes) <= _MEMORY_SHARE * free_bytes(CPU)


def _calls(forms: Mapping[str, _Form], inputs: Sequence[torch.Tensor]) -> dict[str, Callable[[], object]]:
    """A call of each form to try: channels last where it is seen that operators do what they are described to."""
    names = {*forms} - ({_PLAIN_PACKED} if CHANNELS_LAST in forms else set())
    try:
        if CHANNELS_LAST in forms:
            Followed(forms[CHANNELS_LAST].graph).run(*inputs)
    except RuntimeError:
        names = {*forms} - {CHANNELS_LAST, PACKED_WEIGHTS}
    return {name: form.call(inputs) for name, form in forms.items() if name in names}


def _copied(graph: fx.Graph) -> fx.Graph:
    made = fx.Graph()
    output = made.graph_copy(graph, {})
    made.output(output)
    return made
