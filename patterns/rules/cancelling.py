"""What a normalisation, or the subtraction of a mean, takes away again does not have to be added before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import fx

from fusepass.patterns.analysis.linearity import Factor, Operand, is_sum, summands
from fusepass.patterns.analysis.normalisation import (
    DEVIATION,
    MEAN,
    RUNNING_MEAN,
    RUNNING_VARIANCE,
    VALUE,
    Normalisation,
)
from fusepass.patterns.arguments import arguments
from fusepass.patterns.language import op, var
from fusepass.patterns.matcher import Declined, Match
from fusepass.patterns.rule import Rule
from fusepass.patterns.rules.broadcast import Parted
from fusepass.patterns.rules.builder import Builder, shape_of
from fusepass.patterns.rules.reduction import times

aten = torch.ops.aten

_LARGEST_SCALE = 2.0**20
"""A scale beyond it, or below its reciprocal, could bring eps or a running statistic out of the range of float32."""


def _zero(build: Builder, shift: Operand | None) -> Operand | None:
    """What is left of a shift that cancels: 0 where it is finite, NaN elsewhere. None for a number."""
    return None if shift is None else Operand(build.subtract(shift.node, shift.node), shift.shape)


Results = Mapping[int, fx.Node]


def _unshifted(found: Match) -> Results:
    """The normalisation of what varies; the rest shows in means only."""
    norm = _known(found)
    parts, build = Parted.of(norm.source, norm.dims), Builder(found)
    shift, number = parts.shift(build)
    zero = _zero(build, shift)
    x = _reshaped(build, norm, parts.value(build))
    bias = None if zero is None else _joined(build, norm, zero)
    call = build.again(found.root, input=x, **({} if bias is None else {"bias": bias}))
    results = {number: build.item(call, number) for number in _used(found.root)}
    if zero is not None and bias is None and VALUE in results:
        results[VALUE] = _added(build, norm, results[VALUE], zero)
    moves = {MEAN: (shift, number), RUNNING_MEAN: (shift, norm.momentum * number)}
    if zero is not None:
        moves |= dict.fromkeys((DEVIATION, RUNNING_VARIANCE), (zero, 1.0))
    for place in results.keys() & moves.keys():
        results[place] = _moved(build, norm, results[place], *moves[place])
    return results


def _known(found: Match) -> Normalisation:
    norm = Normalisation.of(found.root)
    if norm is None:
        raise Declined("it uses other statistics than those of its input")
    return norm


def _used(call: fx.Node) -> list[int]:
    return sorted({cast(int, item.args[1]) for item in call.users if item.users})


def _reshaped(build: Builder, norm: Normalisation, value: fx.Node) -> fx.Node:
    """`value` in the place of the source, as the call takes it."""
    if value.meta["val"].stride() != norm.source.meta["val"].stride():
        raise Declined("what is normalised would be laid out in another way")
    return build.view(value, shape_of(norm.x))


def _statistic(build: Builder, norm: Normalisation, shift: Operand) -> fx.Node:
    """A tensor that is the same along the normalised dimensions in a shape that broadcasts with the statistics."""
    if norm.is_layer:
        return build.operand(shift)
    samples, channels = _lead(norm, shift)
    if not norm.is_batch:
        return build.view(shift.node, (samples, channels))
    if norm.source is norm.x:
        return build.view(shift.node, (channels,))
    return build.view(build.expand(build.view(shift.node, (samples, channels)), shape_of(norm.source)[:2]), (-1,))


def _lead(norm: Normalisation, shift: Operand) -> tuple[int, ...]:
    """The first two sizes of `shift` when it has as many dimensions as the source."""
    missing = len(shape_of(norm.source)) - len(shift.shape)
    return ((1,) * missing + shift.shape)[:2]


def _joined(build: Builder, norm: Normalisation, zero: Operand) -> fx.Node | None:
    """The bias of the normalisation with `zero` added; None where `zero` does not have the shape for it."""
    bias, value = norm.bias, zero.node.meta["val"]
    if norm.is_layer:
        fits, vector = value.numel() == 1, (1,)
    else:
        fits, vector = norm.is_batch or _lead(norm, zero)[0] == 1, (-1,)
    if not fits:
        return None
    added = _statistic(build, norm, zero) if norm.is_batch else build.view(zero.node, vector)
    if bias is not None:
        return build.blend(bias, added) if bias.meta["val"].dtype.itemsize >= value.dtype.itemsize else None
    channels = shape_of(norm.x)[1]
    alike = norm.weight is None or norm.weight.meta["val"].dtype is value.dtype
    usable = not norm.is_layer and shape_of(added) == (channels,) and alike and value.dtype.itemsize > 2
    return added if usable else None


def _added(build: Builder, norm: Normalisation, result: fx.Node, zero: Operand) -> fx.Node:
    """`zero` added to what is normalised."""
    shape = shape_of(result)
    return build.view(build.add(build.view(result, shape_of(norm.source)), build.operand(zero)), shape)


def _moved(build: Builder, norm: Normalisation, result: fx.Node, shift: Operand | None, factor: float) -> fx.Node:
    """A statistic with `factor` times a shift, or `factor` itself, added."""
    if shift is None:
        return build.shift(result, factor)
    return build.blend(result, _statistic(build, norm, shift), factor)


def _unscaled(found: Match) -> Results:
    """The normalisation of what a number was multiplied with: eps is divided by its square."""
    norm = _known(found)
    if is_sum(norm.source):
        raise Declined("a sum has no factor")
    terms = summands(norm.source)
    if len(terms) != 1 or terms[0].value is None or terms[0].number == 1:
        raise Declined("no number is multiplied with")
    scale = terms[0].number
    if not 1 / _LARGEST_SCALE <= abs(scale) <= _LARGEST_SCALE:
        raise Declined("eps would become too large or too small")
    if any(running.meta["val"].dtype.itemsize < 4 for running in norm.running.values()):
        raise Declined("running statistics would be rounded to their narrow type twice more")
    build = Builder(found)
    x = _reshaped(build, norm, times(build, build.operand(terms[0].value), terms[0].factors))
    changes: dict[str, object] = {"input": x, "eps": norm.eps / scale**2}
    for name, factor in (("running_mean", scale), ("running_var", scale**2)):
        if name in norm.running:
            changes[name] = build.scale(norm.running[name], 1 / factor)
    if scale < 0 and norm.weight is not None:
        changes["weight"] = build.scale(norm.weight, -1.0)
    call = build.again(found.root, **changes)
    flipped = -1.0 if scale < 0 and norm.weight is None else 1.0
    factors = {VALUE: flipped, MEAN: scale, DEVIATION: 1 / abs(scale), RUNNING_MEAN: scale, RUNNING_VARIANCE: scale**2}
    if flipped < 0 and norm.bias is not None:
        raise Declined("a bias is added, and there is no weight to take the sign")
    return {number: build.scale(build.item(call, number), factors[number]) for number in _used(found.root)}


def _centred(found: Match) -> fx.Node:
    """``x - mean(x)`` with what is the same for all that the mean is over left out, and common factors behind it."""
    over = _dims(found.mean)
    parts, build = Parted.of(found.x, over), Builder(found)
    rank = len(shape_of(found.x))
    behind: tuple[Factor, ...] = ()
    number = 1.0
    if len(parts.varying) == 1:
        (term,) = parts.varying
        inside = tuple(factor for factor in term.factors if any(factor.operand.varies(dim - rank) for dim in over))
        behind, number = tuple(factor for factor in term.factors if factor not in inside), term.number
        value = parts.factor(build, term, inside)
    else:
        value = parts.value(build)
    mean, zero = build.mean(value, over), _zero(build, parts.shift(build)[0])
    result = build.subtract(value, mean if zero is None else build.add(mean, build.operand(zero)))
    if behind:
        result = build.multiply(result, times(build, None, behind))
    return build.scale(result, number)


def _dims(mean: fx.Node) -> tuple[int, ...]:
    chosen = arguments(mean).get("dim")
    rank = len(shape_of(mean.all_input_nodes[0]))
    return tuple(sorted(dim % rank for dim in chosen or range(rank)))


def kept(found: Match) -> str | None:
    """A guard: the mean must broadcast with what it is the mean of, in the same type."""
    mean, x = found.mean.meta["val"], found.x.meta["val"]
    if mean.dtype is not x.dtype or not x.dtype.is_floating_point:
        return "the mean has another type"
    return None if mean.dim() == x.dim() and x.dim() else "the mean does not keep its dimensions"


def floating(found: Match) -> str | None:
    """A guard."""
    value = found.root.meta["val"][VALUE]
    return None if value.numel() and not value.is_complex() else "there is nothing to normalise"


_x = var("x")
_norms = op(
    aten._native_batch_norm_legit_functional,
    aten._native_batch_norm_legit,
    aten.native_group_norm,
    aten.native_layer_norm,
    open=True,
)

RULES: tuple[Rule, ...] = (
    Rule(
        name="shift-before-normalisation",
        pattern=_norms(_x),
        guards=(floating,),
        rewrite=_unshifted,
        why="what is the same for all numbers of a mean cancels, and moves their mean; where it is not finite, NaN is added",
        early=True,
    ),
    Rule(
        name="scale-before-normalisation",
        pattern=_norms(_x),
        guards=(floating,),
        rewrite=_unscaled,
        why="s * x normalised with eps is x normalised with eps / s ** 2, with the sign of s; statistics are scaled",
        early=True,
    ),
    Rule(
        name="shift-before-centring",
        pattern=op(aten.sub)(_x, op(aten.mean, open=True)(_x)["mean"]),
        guards=(kept,),
        rewrite=_centred,
        why="what is the same for all numbers of a mean cancels; where it is not finite, NaN is added",
        early=True,
    ),
)
