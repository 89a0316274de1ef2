"""Plans are small, one type a family; what an architecture has is in one place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

import fusepass.codegen
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.ir.index import Index
from fusepass.codegen.machine import ARCHITECTURES, Machine, machine_of
from fusepass.codegen.render.cuda.families import SHIPPED
from fusepass.codegen.schedule.plan import CircularBuffer, Keep, Pieces, Schedule, TeamPart
from fusepass.codegen.schedule.plan_rows import Columns, Rows, Start
from fusepass.codegen.schedule_convolution.tiles import Launch
from fusepass.codegen.schedule_cpu import CpuSchedule
from fusepass.codegen.schedule_product import ProductSchedule
from fusepass.codegen.source import Target

_MOST_FIELDS = 15


def _below(kind: type) -> Iterator[type]:
    yield kind
    for each in kind.__subclasses__():
        yield from _below(each)


def _values_in(hint: Any) -> Iterator[type]:
    """The dataclasses that a field of this type may have."""
    if isinstance(hint, type) and is_dataclass(hint):
        yield hint
    for part in get_args(hint):
        yield from _values_in(part)


PLANS = [*_below(Schedule), *_below(Launch), ProductSchedule, CpuSchedule]


def test_what_is_rendered_is_a_plan() -> None:
    """Of each family that ships."""
    assert len(SHIPPED) == len({family.name for family in SHIPPED})
    for family in SHIPPED:
        hint = get_type_hints(type(family).plan)["return"]
        assert {*get_args(hint)} - {type(None)} <= {*PLANS} if get_args(hint) else hint is Schedule


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.__name__)
def test_no_plan_has_more_fields_than_a_reader_keeps_in_mind(plan: Any) -> None:
    hints = get_type_hints(plan)
    values = {plan, *(value for each in fields(plan) for value in _values_in(hints[each.name]))}
    assert {value.__name__: len(fields(value)) for value in values if len(fields(value)) > _MOST_FIELDS} == {}


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (
            Rows(4, 2, 512, 1, 132, keep=Keep.FETCHED, split=TeamPart(2, 3000, kept=2048, held=1)),
            "132 blocks, vectors of 4, teams of 2, 512 lanes x 1 rows, 2 per thread at a time, "
            "shared memory for 2048 of 3000 vectors and 1 a thread in registers, fetched ahead",
        ),
        (
            Rows(4, 2, 512, 1, 132, keep=Keep.SHARED, split=TeamPart(2, 9, kept=9, buffer=CircularBuffer(7, 3, 0, 4))),
            "132 blocks, vectors of 4, teams of 2, 512 lanes x 1 rows, 2 per thread at a time, shared memory, a ring of 7 places, "
            "4 vectors of weights a thread in registers",
        ),
        (
            Rows(4, 1, 32, 8, 9, keep=Keep.REGISTERS, start=Start(Index(), run=49), split=Pieces(4, 99, early=True)),
            "9 blocks, vectors of 4, 32 lanes x 8 rows, 1 per thread at a time, registers, pieces of 25 rows, "
            "the next one under way, runs of 49 begin anywhere",
        ),
        (
            Columns(
                4, 2, 16, 32, 9, keep=Keep.SHARED, team=TeamPart(3, 9, kept=9, buffer=CircularBuffer(6, 2)), span=2
            ),
            "9 blocks, vectors of 4, 16 lanes of rows x 32 groups of columns, 2 columns at a time, shared memory, teams of 3, "
            "strips of 32 rows, a ring of 6 places",
        ),
    ],
    ids=["team", "circular buffer", "pieces", "strips"],
)
def test_a_plan_tells_how_blocks_share_rows(plan: Schedule, said: str) -> None:
    assert str(plan) == said


def test_ends_are_apart_unless_vectors_cover_them() -> None:
    plan = Rows(4, 8, 32, 4, 9, keep=Keep.REGISTERS, start=Start(Index()))
    assert (plan.ends_apart, plan.overhangs, plan.vectors(1001)) == (True, False, 250)
    others = plan.covering, replace(plan, general=True), replace(plan, keep=Keep.FETCHED)
    assert all((each.ends_apart, each.overhangs, each.vectors(1001)) == (False, True, 251) for each in others)
    assert replace(plan, start=None).covering == replace(plan, start=None)


# ---- What an architecture has


def test_an_unknown_architecture_is_its_predecessor() -> None:
    known = {capability: machine_of(capability).name for capability in (80, 87, 90, 103, 121)}
    assert known == {
        80: ARCHITECTURES["sm_80"].name,
        87: ARCHITECTURES["sm_86"].name,
        90: ARCHITECTURES["sm_90"].name,
        103: ARCHITECTURES["sm_100"].name,
        121: ARCHITECTURES["sm_120"].name,
    }


@pytest.mark.parametrize("arch", ["sm_70", "sm_75"])
def test_what_came_before_has_no_features(arch: str) -> None:
    machine = replace(DeviceFacts.h200(), arch=arch).machine
    assert _features(machine) == _features(DeviceFacts.cpu(2)) == (False, False, False)


def _features(of: DeviceFacts | Machine) -> tuple[bool, ...]:
    return of.copies, of.tensor_cores, of.warp_groups


def test_a_described_device_is_its_machine() -> None:
    for arch, machine in ARCHITECTURES.items():
        facts = DeviceFacts.described(arch)
        assert facts.machine is machine
        assert facts.target is Target.CUDA
        assert _features(facts) == _features(machine)


def test_cost_formulas_have_no_clocks_of_their_own() -> None:
    """Nor rates: numbers of that size are in `codegen/machine.py`."""
    (root,) = fusepass.codegen.__path__
    folders = ("schedule", "schedule_convolution", "schedule_product", "passes")
    texts = {path: path.read_text() for folder in folders for path in Path(root, folder).glob("*.py")}
    assert len(texts) > 50
    assert {path.name for path, text in texts.items() if re.search(r"\d(\.\d+)?e(9|1\d)\b", text)} == set()
