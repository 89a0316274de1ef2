"""PyTorch's own samples of every operator that fuses: values, types, strides, NaN and infinities by the numeric policy.

The kernels are interpreted for half of them and compiled for some. Everything, every sample interpreted and one of each
operator and type compiled, runs with ``pytest -m slow tests/models/test_opinfo.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch

from tests import opinfo_coverage
from tests.support.batched import batched
from tests.support.interpreted import interpreted
from tests.support.opinfo import (
    DTYPES,
    Case,
    Status,
    cases,
    everything_fuses,
    fused,
    operators,
    outcome_of,
    problem,
    summary,
    title,
)

pytestmark = pytest.mark.models

SHARES = 8
"""The operators are dealt out to so many tests."""

PIECES = 64
"""As `SHARES`, where every sample of them runs: a piece takes some two minutes of a CPU."""

PRECISE = ("nextafter",)
"""Operators that the interpreter, which computes in float64, does not give in the type's own precision."""

NOT_HERE = ("jiterator", "as")
"""First words of operators whose samples need a GPU, or memory that a copy of a tensor does not have."""


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


def _fusing(infos: Iterable[Any], dtypes: Sequence[torch.dtype], most: int | None) -> Iterator[Case]:
    """The samples that become generated code; those that PyTorch itself does not run are none."""
    for info in infos:
        for dtype in dtypes:
            try:
                for case in cases(info, dtype, most):
                    if outcome_of(case).status is Status.FUSED:
                        yield case
            except (AssertionError, NotImplementedError, RuntimeError):
                if info.name.partition("_")[0] not in NOT_HERE:
                    raise


def _interpreted(cases: Iterator[Case]) -> tuple[int, list[str]]:
    """How many `cases` there are, and what is wrong with them, alone and in a chain."""
    count, wrong = 0, []
    for case in cases:
        count += 1
        for chain in (False, True):
            found = problem(*fused(case, chain=chain), case)
            wrong += [] if found is None else [f"{'in a chain: ' if chain else ''}{found}"]
    return count, wrong


def _compiled(cases: Iterator[Case]) -> tuple[int, list[str]]:
    """As `_interpreted`, with C++ kernels, and in a chain only."""
    with batched() as batch:
        models = [(case, *fused(case, chain=True)) for case in cases]
        batch.compile()
    found = (problem(model, made, case) for case, model, made in models)
    return len(models), [each for each in found if each is not None]


def _one_type(number: int, info: Any) -> torch.dtype:
    """Another type from operator to operator."""
    has = [dtype for dtype in DTYPES if dtype in info.supported_dtypes("cpu")] or [torch.float32]
    return has[number % len(has)]


@pytest.mark.parametrize("share", range(SHARES))
def test_a_sample_of_every_second_operator(share: int) -> None:
    infos = [(number, info) for number, info in enumerate(operators()) if info.name not in PRECISE]
    with everything_fuses(), interpreted():
        ours = (case for n, info in infos[share :: 2 * SHARES] for case in _fusing([info], [_one_type(n, info)], 1))
        count, wrong = _interpreted(ours)
    assert not wrong, "\n".join(wrong)
    assert count > 10


def test_a_sample_of_some_operators_compiled() -> None:
    infos = list(enumerate(operators()))[::11]
    with everything_fuses():
        ours = (case for n, info in infos for case in _fusing([info], [_one_type(n, info)], 1))
        count, wrong = _compiled(ours)
    assert not wrong, "\n".join(wrong)
    assert count > 20


@pytest.mark.slow
@pytest.mark.parametrize("piece", range(PIECES))
def test_every_sample(piece: int) -> None:
    infos = [info for info in operators()[piece::PIECES] if info.name not in PRECISE]
    with everything_fuses(), interpreted():
        count, wrong = _interpreted(_fusing(infos, DTYPES, None))
    assert not wrong, f"{len(wrong)} of {count}\n" + "\n".join(wrong)
    assert count > 50


@pytest.mark.slow
@pytest.mark.parametrize("piece", range(PIECES))
def test_a_sample_of_every_operator_and_type_compiled(piece: int) -> None:
    with everything_fuses():
        count, wrong = _compiled(_fusing(operators()[piece::PIECES], DTYPES, 1))
    assert not wrong, f"{len(wrong)} of {count}\n" + "\n".join(wrong)
    assert count > 5
