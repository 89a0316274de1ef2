"""Views of views as one view, and views that show their input as it is."""

from __future__ import annotations

import torch
from torch import fx

from fusepass.patterns.analysis.reordered import order_of
from fusepass.patterns.language import of_class, op, var
from fusepass.patterns.matcher import Match
from fusepass.patterns.opclass import OpClass
from fusepass.patterns.rule import Rule

aten = torch.ops.aten

_x = var("x")
_reshape = op(aten.view, aten._unsafe_view, aten.unsqueeze, aten.squeeze, open=True)
_reorder = op(aten.permute, aten.transpose, aten.t, open=True)
_expand = op(aten.expand, open=True)


def _reorder_once(found: Match) -> fx.Node:
    inner = order_of(found.inner)
    order = [inner[dim] for dim in order_of(found.root)]
    return found.x if order == sorted(order) else found.call(aten.permute.default, found.x, order)


def _reshape_once(found: Match) -> fx.Node:
    return found.call(aten.view.default, found.x, list(found.root.meta["val"].shape))


def only_ones_move(found: Match) -> str | None:
    """A guard: all dimensions but those of size 1 keep their order."""
    shape = found.x.meta["val"].shape
    long = [dim for dim in order_of(found.inner) if shape[dim] != 1]
    return None if long == sorted(long) else "the elements change their order"


def _expand_once(found: Match) -> fx.Node:
    return found.call(aten.expand.default, found.x, list(found.root.meta["val"].shape))


def same_shape(found: Match) -> str | None:
    """A guard that spares the comparison of all that is known of both: most views change the shape."""
    value, viewed = found.root.meta["val"], found.x.meta["val"]
    same = isinstance(value, torch.Tensor) and isinstance(viewed, torch.Tensor) and value.shape == viewed.shape
    return None if same else "it changes the shape"


RULES: tuple[Rule, ...] = (
    Rule(
        name="idle-view",
        pattern=of_class(OpClass.VIEW)(_x),
        guards=(same_shape,),
        rewrite=lambda m: m.x,
        why="a view of the same shape, strides and offset shows the same elements",
        early=True,
        exact=True,
    ),
    Rule(
        name="permutation-of-permutation",
        pattern=_reorder(_reorder(_x)["inner"]),
        rewrite=_reorder_once,
        why="permutations compose",
        exact=True,
    ),
    Rule(
        name="view-of-view",
        pattern=_reshape(_reshape(_x)["inner"]),
        rewrite=_reshape_once,
        why="a reshape depends on the order of the elements only, which both keep",
        early=True,
        exact=True,
    ),
    Rule(
        name="view-of-moved-ones",
        pattern=_reshape(_reorder(_x)["inner"]),
        guards=(only_ones_move,),
        rewrite=_reshape_once,
        why="where a dimension of size 1 stands does not change the order of the elements",
        early=True,
        exact=True,
    ),
    Rule(
        name="expand-of-expand",
        pattern=_expand(_expand(_x)["inner"]),
        rewrite=_expand_once,
        why="a broadcast dimension may be broadcast at once to where it is broadcast to in the end",
        exact=True,
    ),
)
