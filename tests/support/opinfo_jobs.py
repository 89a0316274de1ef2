"""PyTorch's own samples of its operators: those that fuse are run and judged by the numeric policy, here or as jobs."""

from __future__ import annotations

import contextlib
import dataclasses
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.farm.pool import Job
from tests.support.batched import batched
from tests.support.interpreted import interpreted
from tests.support.lost import Lost, is_lost
from tests.support.opinfo import (
    DTYPES,
    Case,
    Status,
    cases,
    everything_fuses,
    fused,
    is_tensor_code,
    judged,
    operators,
    outcome_of,
    problem,
    title,
)

PIECES = 64
"""The operators are dealt out to so many parts; where every sample runs, one takes about a minute of a CPU."""

PRECISE = ("nextafter", "nn.functional.poisson_nll_loss", "sinc")
"""Operators that the interpreter, which computes in float64, does not give in the type's own precision; compiled instead.

The loss of whole numbers is one: it has no oracle but eager in float32, which is farther from the truth than the policy allows.
"""

NOT_HERE = ("jiterator", "as")
"""First words of operators whose samples need a GPU, or memory that a copy of a tensor does not have."""


@dataclass(frozen=True)
class Tried:
    """What came of one operator.

    Attributes:
        operator: its name in the database.
        samples: those that became generated code and were run.
        wrong: what is wrong with them.
        left_out: what PyTorch itself says where it does not run a sample.
    """

    operator: str
    samples: int = 0
    wrong: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


def wrong(found: Sequence[Tried]) -> list[str]:
    """What is wrong with any of them."""
    return [text for each in found for text in each.wrong]


def tried_interpreted(info: Any, dtypes: Sequence[torch.dtype], most: int | None) -> Tried:
    """The first `most` samples (all) of an operator alone and in a chain; `everything_fuses` and `interpreted` are open."""
    samples = 0
    found: list[str | None] = []
    left_out: list[str] = []
    for case in _running(info, dtypes, most, "cpu", left_out):
        with _noted(case, found):
            alone, made = fused(case, chain=False)
            if judged(made.report()).status is Status.FUSED:
                samples += 1
                found += [problem(alone, made, case), problem(*fused(case, chain=True), case)]
    return Tried(title(info), samples, tuple(filter(None, found)), tuple(left_out))


def tried_compiled(
    asked: Sequence[tuple[Any, Sequence[torch.dtype]]], most: int | None, device: str = "cpu"
) -> list[Tried]:
    """The first `most` samples of operators in some types, in a chain; `everything_fuses` is open."""
    made: list[tuple[Any, list[tuple[Any, ...]], list[str | None], list[str]]] = []
    with batched() as batch:
        for info, dtypes in asked:
            models: list[tuple[Any, ...]] = []
            problems: list[str | None] = []
            left_out: list[str] = []
            for case in _running(info, dtypes, most, device, left_out):
                with _noted(case, problems, device):
                    if outcome_of(case).status is Status.FUSED:
                        models.append((*fused(case, chain=True), case))
            made.append((info, models, problems, left_out))
        batch.compile()
    found = []
    for info, models, problems, left_out in made:
        for model in models:
            with _noted(model[-1], problems, device):
                problems.append(problem(*model))
        found.append(Tried(title(info), len(models), tuple(filter(None, problems)), tuple(left_out)))
    return found


@contextlib.contextmanager
def _noted(case: Case, problems: list[str | None], device: str = "cpu") -> Iterator[None]:
    """An exception is a problem of `case`.

    Raises:
        Lost: the device went with it.
    """
    try:
        yield
    except Exception as error:  # whatever it is
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{case.name}: {type(error).__name__}: {str(error)[:300]} ({where.name}, line {where.lineno})"
        if is_lost(device):
            raise Lost(text) from error
        problems.append(text)


def _running(
    info: Any, dtypes: Sequence[torch.dtype], most: int | None, device: str, left_out: list[str]
) -> Iterator[Case]:
    """The samples that PyTorch runs and that are tensor code; what it says of others goes to `left_out`.

    Raises:
        Lost: the device went with one.
    """
    for dtype in dtypes:
        try:
            drawn = list(cases(info, dtype, most, device))
            ours = [case for case in drawn if is_tensor_code(case)]
        except (AssertionError, NotImplementedError, RuntimeError) as error:
            if device == "cpu" and info.name.partition("_")[0] not in NOT_HERE:
                raise
            if is_lost(device):
                raise Lost(f"{title(info)} {dtype}: {error}") from error
            left_out.append(f"{dtype}: {type(error).__name__}: {str(error)[:100]}")
            continue
        yield from ours


def jobs(device: str, kernels: str) -> list[Job]:
    """All operators: every sample ``interpreted``, or one of each operator and type ``compiled``."""
    arguments = {"device": device, "kernels": kernels}
    seconds = 60.0 if kernels == "interpreted" else 30.0
    return [
        Job(f"operators-{device}-{kernels}-{piece}", f"{__name__}:tried", {"piece": piece, **arguments}, seconds)
        for piece in range(PIECES)
    ]


def tried(piece: int, device: str, kernels: str, left: Path) -> dict[str, Any]:
    """What came of one of the `PIECES`, each operator as a dictionary of what `Tried` holds."""
    start = time.monotonic()
    infos = operators()[piece::PIECES]
    found = []
    with everything_fuses():
        if kernels == "interpreted":
            with interpreted():
                for info in infos:
                    left.write_text(title(info))
                    found += [] if info.name in PRECISE else [tried_interpreted(info, DTYPES, None)]
            found += tried_compiled([(info, DTYPES) for info in infos if info.name in PRECISE], None)
        else:
            try:
                found = tried_compiled([(info, DTYPES) for info in infos], 1, device)
            except Lost as lost:
                found = [Tried(f"piece {piece}", wrong=(f"the device is lost: {lost}",))]
    left.unlink(missing_ok=True)
    seconds = round(time.monotonic() - start, 1)
    told = {"piece": piece, "device": device, "kernels": kernels, "seconds": seconds, "last": is_lost(device)}
    return told | {"operators": [dataclasses.asdict(each) for each in found]}
