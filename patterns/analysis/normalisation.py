"""Normalisations as one concept: what is normalised, along which dimensions, and what each result is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import fx

from fusepass.patterns.arguments import arguments

aten = torch.ops.aten

_BATCH = aten._native_batch_norm_legit_functional.default
_STATELESS = aten._native_batch_norm_legit.no_stats
_LAYER, _GROUP = aten.native_layer_norm.default, aten.native_group_norm.default
_RESHAPES = frozenset({aten.view.default, aten._unsafe_view.default})

VALUE, MEAN, DEVIATION, RUNNING_MEAN, RUNNING_VARIANCE = range(5)
"""The results by number; the third is the reciprocal of the standard deviation. The last two only `_BATCH` gives."""


@dataclass(frozen=True)
class Normalisation:
    """``(x - mean) / sqrt(variance + eps) * weight + bias``, where mean and variance are those of x.

    Attributes:
        call: the operator.
        source: x, before it was reshaped for the call.
        dims: dimensions of `source`; a number that is the same along them changes the mean by itself, and nothing else.
    """

    call: fx.Node
    source: fx.Node
    dims: frozenset[int]

    @staticmethod
    def of(call: fx.Node) -> Normalisation | None:
        """The normalisation that `call` is, if it uses the statistics of what it is given."""
        if call.target not in (_BATCH, _STATELESS, _LAYER, _GROUP):
            return None
        given = arguments(call)
        x = given["input"]
        rank = x.meta["val"].dim()
        if call.target is _LAYER:
            return Normalisation(call, x, frozenset(range(rank - len(given["normalized_shape"]), rank)))
        if call.target is _GROUP:
            first = 2 if given["group"] == given["C"] else 1
            return Normalisation(call, x, frozenset(range(first, rank)))
        if not given["training"]:
            return None
        source = _by_sample(x)
        if source is not None:
            return Normalisation(call, source, frozenset(range(2, rank)))
        return Normalisation(call, x, frozenset(range(rank)) - {1})

    @property
    def x(self) -> fx.Node:
        """`source` in the shape in which the call takes it."""
        node: fx.Node = arguments(self.call)["input"]
        return node

    @property
    def is_batch(self) -> bool:
        """Whether there is a statistic for each channel of `x`; otherwise there is one for each sample or group."""
        return self.call.target in (_BATCH, _STATELESS)

    @property
    def is_layer(self) -> bool:
        """Whether the statistics have the dimensions of `x`, those that are normalised with size 1."""
        return self.call.target is _LAYER

    @property
    def eps(self) -> float:
        """What is added to the variance."""
        return float(arguments(self.call)["eps"])

    @property
    def weight(self) -> fx.Node | None:
        """What the normalised values are multiplied with."""
        weight: fx.Node | None = arguments(self.call)["weight"]
        return weight

    @property
    def bias(self) -> fx.Node | None:
        """What is added to them."""
        bias: fx.Node | None = arguments(self.call)["bias"]
        return bias

    @property
    def running(self) -> Mapping[str, fx.Node]:
        """The running statistics that it blends its own into, by the name of the argument."""
        given = arguments(self.call)
        return {name: given[name] for name in ("running_mean", "running_var") if name in given}

    @property
    def momentum(self) -> float:
        """How much of its own statistics goes into them; 0 where there are none."""
        return float(arguments(self.call)["momentum"]) if self.running else 0.0


def _by_sample(x: fx.Node) -> fx.Node | None:
    """What `x` shows with samples and channels in one dimension: so instance norm is a batch norm of one sample."""
    if x.target not in _RESHAPES:
        return None
    (source,) = x.all_input_nodes
    shape, shown = tuple(source.meta["val"].shape), tuple(x.meta["val"].shape)
    alike = len(shape) == len(shown) > 2 and shape[2:] == shown[2:] and shown[0] == 1
    return source if alike and prod(shape[:2]) == shown[1] else None
