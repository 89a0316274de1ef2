"""All cases, by suite: the vocabulary of a compiler's own tests, and one of converters of single operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.blackbox import converters, indexing, kinds, layers, pointwise, reductions, shapes, writes
from tests.blackbox.case import Case

SUITES: Mapping[str, Sequence[Case]] = {
    "compiler": tuple(
        case for module in (pointwise, shapes, reductions, layers, indexing, kinds, writes) for case in module.CASES
    ),
    "converters": converters.CASES,
}
