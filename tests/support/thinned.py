"""Reduction loops of which a usual run takes a part: the rest is marked slow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def thinned(values: Iterable[Any], every: int) -> list[Any]:
    """`values` for `parametrize` (tuples for several parameters): the first of each `every` as it is, the others marked slow."""
    listed = list(values)
    return [each if number % every == 0 else _slow(each) for number, each in enumerate(listed)]


def _slow(value: Any) -> Any:
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=pytest.mark.slow)
