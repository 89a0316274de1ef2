"""PyTorch's own samples of every operator that fuses: values, types, strides, NaN and infinities by the numeric policy.

The kernels are interpreted for half of them and compiled for some. Everything, every sample interpreted and one of each
operator and type compiled, runs with ``pytest -m slow tests/models/test_opinfo.py``.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tests import opinfo_coverage
from tests.support.interpreted import interpreted
from tests.support.opinfo import DTYPES, everything_fuses, operators, summary, title
from tests.support.opinfo_jobs import PIECES, PRECISE, tried_compiled, tried_interpreted, wrong

pytestmark = pytest.mark.models

SHARES = 8
"""The operators are dealt out to so many tests."""


def test_the_samples_are_of_every_kind() -> None:
    assert len(operators()) > 600
    assert len({title(info) for info in operators()}) == len(operators())


def _listed() -> dict[str, str]:
    """What docs/operators.md says of each operator."""
    return dict(re.findall(r"^\| `(.+?)` \| ([a-z ]+) \|", opinfo_coverage.PAGE.read_text(), re.MULTILINE))


def test_the_page_lists_the_operators_of_its_version() -> None:
    (version,) = re.findall(r"in torch (\S+)\s", opinfo_coverage.PAGE.read_text())
    if version != torch.__version__.partition("+")[0]:
        pytest.skip(f"the page was written with torch {version}")
    assert list(_listed()) == [title(info) for info in operators()]


@pytest.mark.parametrize(
    "name", ["add", "cumsum", "gather", "nn.functional.gelu", "sort", "zeros", "nonzero", "fft.fft"]
)
def test_the_page_says_what_becomes_of_an_operator(name: str) -> None:
    (info,) = (info for info in operators() if title(info) == name)
    with everything_fuses(), interpreted():
        word, _ = summary(list(opinfo_coverage.outcomes(info)))
    assert _listed()[name] == word


def _one_type(number: int, info: Any) -> torch.dtype:
    """Another type from operator to operator."""
    has = [dtype for dtype in DTYPES if dtype in info.supported_dtypes("cpu")] or [torch.float32]
    return has[number % len(has)]


@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.thinned(8)
@pytest.mark.invariant(12)
def test_a_sample_of_every_second_operator(share: int) -> None:
    infos = [(number, info) for number, info in enumerate(operators()) if info.name not in PRECISE]
    with everything_fuses(), interpreted():
        found = [tried_interpreted(info, [_one_type(number, info)], 1) for number, info in infos[share :: 2 * SHARES]]
    assert not wrong(found), "\n".join(wrong(found))
    assert sum(each.samples for each in found) > 10


def test_a_sample_of_some_operators_compiled() -> None:
    with everything_fuses():
        found = tried_compiled([(info, [_one_type(n, info)]) for n, info in list(enumerate(operators()))[::11]], 1)
    assert not wrong(found), "\n".join(wrong(found))
    assert sum(each.samples for each in found) > 20


@pytest.mark.slow
@pytest.mark.parametrize("piece", range(PIECES))
def test_every_sample(piece: int) -> None:
    infos = [info for info in operators()[piece::PIECES] if info.name not in PRECISE]
    with everything_fuses(), interpreted():
        found = [tried_interpreted(info, DTYPES, None) for info in infos]
    assert not wrong(found), "\n".join(wrong(found))


@pytest.mark.slow
@pytest.mark.parametrize("piece", range(PIECES))
def test_a_sample_of_every_operator_and_type_compiled(piece: int) -> None:
    with everything_fuses():
        found = tried_compiled([(info, DTYPES) for info in operators()[piece::PIECES]], 1)
    assert not wrong(found), "\n".join(wrong(found))
