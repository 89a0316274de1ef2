"""Candidates of a region share what they have in common: it is lowered, passed and rendered once, and let go of afterwards."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusepass
from fusepass.autotune import candidates
from fusepass.codegen import generate as generator
from fusepass.codegen.generate import generate
from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Builder
from fusepass.codegen.ir.index import Axis, axis_index
from fusepass.codegen.passes.anchors import AnchorSource
from fusepass.codegen.passes.pipeline import Known
from tests.support.interpreted import original_operators
from tests.support.products import COPIED, H200, program_of

CASE = COPIED["odd"]


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.conv(x)) * 2


def test_who_computes_the_anchor_as_another_does_gives_the_same_program_rendered_once() -> None:
    program, builder, known = program_of(CASE), Builder(), Known()
    by = {
        anchor: generate(program, builder, H200, anchor, known=known)
        for anchor in (AnchorSource.GENERATED, AnchorSource.HALVES, AnchorSource.LIBRARY)
    }
    assert by[AnchorSource.HALVES] is by[AnchorSource.GENERATED]  # halves are for convolutions
    assert by[AnchorSource.HALVES].generates_anchor
    assert not by[AnchorSource.LIBRARY].generates_anchor


def test_what_is_known_changes_nothing() -> None:
    program, builder, known = program_of(CASE), Builder(), Known()
    for anchor in (AnchorSource.PREFERRED, AnchorSource.GENERATED, AnchorSource.LIBRARY):
        alone = generate(program_of(CASE), Builder(), H200, anchor)
        assert generate(program, builder, H200, anchor, known=known).source == alone.source


def test_loads_of_one_buffer_in_two_types_are_two() -> None:
    builder, index = Builder(), axis_index(Axis("i", 4))
    found = [builder.load("x", index, dtype) for dtype in (DType.F32, DType.F16, DType.F32)]
    assert [each.dtype for each in found] == [DType.F32, DType.F16, DType.F32]
    assert found[0] is found[2]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a stage of generation runs."""
    calls: Counter[str] = Counter()
    for owner, name in ((candidates, "lower"), (generator, "render")):
        function = getattr(owner, name)

        def call(*args: Any, _name: str = name, _function: Any = function, **kwargs: Any) -> Any:
            calls[_name] += 1
            return _function(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)
    return calls


def test_the_same_candidate_again_is_neither_lowered_nor_rendered_and_nothing_is_kept(counted: Counter[str]) -> None:
    works: list[Any] = []
    of = candidates._generate_space

    def noted(work: Any, facts: Any, *rest: Any) -> None:
        of(work, facts, *rest)
        first, lowered, rendered = work.candidates[0], counted["lower"], counted["render"]
        again = candidates.candidate_of(work, first.spec, facts)
        assert again.generated is first.generated
        assert again.sources == first.sources
        assert (counted["lower"], counted["render"]) == (lowered, rendered)
        works.append(work)

    with pytest.MonkeyPatch.context() as patch, original_operators():
        patch.setattr(candidates, "_generate_space", noted)
        fusepass.optimize(Convolved().eval(), example_inputs=(torch.rand(2, 4, 9, 9),))
    assert len(works) == counted["lower"] == 1
    assert not works[0].common.lowered
    assert not works[0].common.known
