"""What is known of the memory of a rewritten graph's values, so that calls need not look: regions compare no strides, and views take no dispatcher.

Each comparison and each view takes the host about as long as half a launch, and a step of training has some hundred of them. A value
lies as it is described if an input that the caller compares, a region or a product gave it, or if it is a view of one that does. What an
operator of the library gives is compared once, behind it, if regions read it.
"""

from __future__ import annotations

import operator
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import fx

from fusepass.codegen.ir.index import contiguous_strides
from fusepass.codegen.lowering.modes import without_modes
from fusepass.codegen.lowering.tracer import meta_like
from fusepass.compile.casts import cast_all
from fusepass.compile.dropout import draw
from fusepass.patterns.aliasing import base, is_view, viewed
from fusepass.runtime.meta import laid
from fusepass.runtime.operators import gives_contiguous, reinterpret
from fusepass.runtime.region import FusedRegion

aten = torch.ops.aten


def use_layouts(graph: fx.Graph, *, exact_inputs: bool, visible: int = sys.maxsize) -> list[FusedRegion]:
    """Let regions and views use what is known, in place, and the graph call ``region.run``; gives the regions that are called.

    Args:
        graph: flat; every node has ``meta["val"]``, and what calls a region has it as its target.
        exact_inputs: whether each call gives the graph's inputs as they are described.
        visible: how many of the results somebody may write to; nobody writes to what forward saves.
    """
    calls = [node for node in graph.nodes if isinstance(node.target, FusedRegion)]
    known = _known(graph, exact_inputs=exact_inputs)
    for call in calls:
        _compare(graph, call, known)
    known = _known(graph, exact_inputs=exact_inputs)
    regions = []
    for call in calls:
        region = cast(FusedRegion, call.target)
        regions.append(region.exactly([number for number, node in enumerate(call.args) if node in known]))
        call.target = regions[-1].run
    _reinterpret(graph, known, visible)
    return regions


def _known(graph: fx.Graph, *, exact_inputs: bool) -> set[fx.Node]:
    """The values that lie as described."""
    known = set[fx.Node]()
    for node in graph.nodes:
        if _is_known(node, known, exact_inputs=exact_inputs):
            known.add(node)
    return known


def _is_known(node: fx.Node, known: set[fx.Node], *, exact_inputs: bool) -> bool:
    """Whether `node` lies as described; `known` has those before it that do."""
    if node.op == "placeholder":
        return exact_inputs
    if node.op != "call_function":
        return False
    if node.target is operator.getitem or is_view(node.target):
        return next(iter(node.all_input_nodes), None) in known
    if node.target in (cast_all, draw, laid) or isinstance(node.target, FusedRegion):
        return True
    if not gives_contiguous(node.target):
        return False
    value = node.meta["val"]
    return _is_plain(value) and value.stride() == contiguous_strides(value.shape)


def _compare(graph: fx.Graph, call: fx.Node, known: set[fx.Node]) -> None:
    """Have strides that matter to a region, but are not `known`, compared: behind the operator that made the memory, or before the region."""
    region = cast(FusedRegion, call.target)
    for number, node in enumerate(call.args):
        assert isinstance(node, fx.Node)
        owner = base(node)
        if {node, owner} & known or not region.needs_layout(number) or number in region.written.values():
            continue
        behind = owner.op == "call_function" and isinstance(owner.meta["val"], torch.Tensor)
        source = owner if behind else node
        value = source.meta["val"]
        with graph.inserting_after(owner) if behind else graph.inserting_before(call):
            compared = graph.call_function(laid, (source, tuple(value.shape), value.stride()))
        compared.meta = dict(source.meta)
        known.add(compared)
        if behind:
            owner.replace_all_uses_with(compared, lambda user: user.target is not laid)
        else:
            call.update_arg(number, compared)


def _reinterpret(graph: fx.Graph, known: set[fx.Node], visible: int) -> None:
    """Make views of values that lie as described without the dispatcher, each of the memory's owner and not of another view."""
    shown = _seen_by_autograd(graph, visible)
    views = [node for node in graph.nodes if node in known and node not in shown and viewed(node) is not None]
    for node, (owner, offset) in [(node, found) for node in views if (found := _within(node)) is not None]:
        value = node.meta["val"]
        with graph.inserting_before(node):
            made = graph.call_function(reinterpret, (owner, tuple(value.shape), value.stride(), offset))
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
    for node in reversed(graph.nodes):
        if not node.users and (node.target is reinterpret or viewed(node) is not None or is_view(node.target)):
            graph.erase_node(node)


def _within(node: fx.Node) -> tuple[fx.Node, int] | None:
    """The owner of the memory of `node`, and how many elements behind its beginning `node` begins; None where it is no plain view of it."""
    chain, owner = list(_views(node)), base(node)
    value, described = owner.meta["val"], node.meta["val"]
    if not (_is_plain(value) and _is_plain(described)):
        return None
    with without_modes():
        whole = part = meta_like(value)
        for view in reversed(chain):
            part = _seen(view, part)
            if part is None:
                return None
    same = part.untyped_storage()._cdata == whole.untyped_storage()._cdata
    as_described = (part.dtype, part.shape, part.stride()) == (value.dtype, described.shape, described.stride())
    return (owner, int(part.storage_offset())) if same and as_described and _is_plain(part) else None


def _is_plain(value: object) -> bool:
    """Whether a value is a tensor of elements in memory as they are."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    return not (value.is_conj() or value.is_neg() or value.is_quantized)


def _seen(view: fx.Node, source: Any) -> Any:
    """What `view` makes of `source`, on the meta device; None where that depends on more."""
    if view.target is operator.getitem:
        return source[view.args[1]]
    if len(view.all_input_nodes) > 1 or view.target is aten.as_strided.default:
        return None
    args, kwargs = fx.node.map_arg((view.args, view.kwargs), lambda each: source)
    return view.target(*args, **kwargs)  # type: ignore[operator]


def _views(node: fx.Node) -> Iterator[fx.Node]:
    """`node` and the views, and parts of such, that it is made by, the last one first."""
    while viewed(node) is not None:
        yield node
        node = node.all_input_nodes[0]


def _seen_by_autograd(graph: fx.Graph, visible: int) -> set[fx.Node]:
    """Views whose memory somebody holds otherwise, too, and may write to: autograd counts writes to a tensor and to its views together."""
    results: Sequence[Any] = graph.output_node().args[0]  # type: ignore[assignment]
    nodes = [(node, base(node), number < visible) for number, node in enumerate(results) if isinstance(node, fx.Node)]
    holders = Counter(owner for _, owner, _ in nodes)
    written = {owner for _, owner, is_visible in nodes if is_visible}
    shared = [
        node for node, owner, _ in nodes if owner.op == "placeholder" or (holders[owner] > 1 and owner in written)
    ]
    return {view for node in shared for view in _views(node)}
