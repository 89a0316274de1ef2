"""The patterns that fusepass comes with."""

from __future__ import annotations

from fusepass.config import current
from fusepass.patterns.opclass import OpClass
from fusepass.patterns.pattern import Pattern, patterns, register

_LOCAL = frozenset({OpClass.POINTWISE, OpClass.VIEW})
_CHAIN = _LOCAL | {OpClass.REDUCTION, OpClass.NORMALISATION, OpClass.POOLING}
_ROWS = _CHAIN | {OpClass.SCAN}

ANCHOR = Pattern(
    name="anchor",
    seed=frozenset({OpClass.ANCHOR}),
    upstream=_LOCAL,  # of the operators behind the anchor; what the anchor itself waits for is illegal
    downstream=_CHAIN,
    min_ops=1,
    why="the result of a convolution or matrix product, bias included, is finished before it is written",
)
NORMALISATION = Pattern(
    name="normalisation",
    seed=frozenset({OpClass.NORMALISATION}),
    upstream=_ROWS,
    downstream=_ROWS,
    min_ops=1,
    why="statistics and result share one reading of the input, the operators around them need none",
)
REDUCTION = Pattern(
    name="reduction",
    seed=frozenset({OpClass.REDUCTION}),
    upstream=_ROWS,
    downstream=_ROWS,
    min_ops=1,
    why="the large input of a reduction is not written, and reductions of one value share its reading",
)
POOLING = Pattern(
    name="pooling",
    seed=frozenset({OpClass.POOLING}),
    upstream=_CHAIN,
    downstream=_CHAIN,
    min_ops=1,
    why="the operators before a window are applied as it is read, those behind it before it is written",
)
SCAN = Pattern(
    name="scan",
    seed=frozenset({OpClass.SCAN}),
    upstream=_ROWS,
    downstream=_ROWS,
    min_ops=1,
    why="what is scanned is computed as it is read, and what is made of the results before they are written",
)
POINTWISE = Pattern(
    name="pointwise",
    seed=frozenset({OpClass.POINTWISE}),
    upstream=_LOCAL,
    downstream=_LOCAL,
    min_ops=1,
    why="a chain of elementwise operators reads its inputs once and writes its results once; elements that only change "
    "places are read and written in whole cache lines",
)

_SHIPPED = (ANCHOR, NORMALISATION, REDUCTION, POOLING, SCAN, POINTWISE)

for _pattern in _SHIPPED:
    register(_pattern)


def is_as_shipped() -> bool:
    """Whether the patterns are those of this package, as far as options do not disable them."""
    allows = current().allows
    return patterns() == tuple(pattern for pattern in _SHIPPED if allows(pattern.name))
