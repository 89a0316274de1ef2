"""Regions at further sizes: which candidates are generated, and what is shared although the first sizes chose between several."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fusepass.autotune import candidates, tune
from fusepass.autotune.work import Work
from fusepass.codegen.device import DeviceFacts
from fusepass.codegen.forms import Forms, obstacle
from fusepass.codegen.generate import Generated
from fusepass.codegen.passes.anchors import AnchorSource
from fusepass.codegen.search import space
from fusepass.codegen.source import Source
from fusepass.compile.splice import subgraph
from fusepass.config import override
from fusepass.patterns.partition import partition
from fusepass.report.choice import EAGER, Choice
from tests.support import kernels as k
from tests.support.candidates import generate_candidates

SIZES = ((2, 12), (3, 14), (4, 17), (5, 20))


def graph_of(channels: int, batch: int, side: int) -> fx.GraphModule:
    """A convolution and what follows it, captured for tensors that exist on no device."""

    def function(x: Tensor, weight: Tensor) -> Tensor:
        return torch.tanh(F.conv2d(x, weight)) * 2.0

    with FakeTensorMode():
        inputs = [torch.empty(shape, device="cuda") for shape in ((batch, channels, side, side), (32, channels, 3, 3))]
        return make_fx(function)(*inputs)


def generated(
    forms: Forms,
    monkeypatch: pytest.MonkeyPatch,
    channels: int,
    batch: int,
    side: int,
    begin: candidates.Begin = lambda source: None,
) -> Work:
    """The region at these sizes, candidates generated."""
    monkeypatch.setattr(candidates, "device_facts", lambda device: DeviceFacts.h200())
    monkeypatch.setattr(candidates, "recall", lambda work: None)
    monkeypatch.setattr(space, "rounds_to_tf32", lambda node: True)
    graph = graph_of(channels, batch, side)
    (region,) = partition(graph).regions
    work = Work(region, subgraph(graph, region), {})
    forms.next_round()
    generate_candidates(work, forms, begin)
    return work


def test_compilers_begin_with_all_that_will_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Source] = []
    with override(tune="fast", debug=True):
        work = generated(Forms(), monkeypatch, 64, 16, 40, begun.append)
    assert {source.text for each in work.candidates for source in each.sources} <= {source.text for source in begun}


def test_further_sizes_have_one_candidate_and_reuse_what_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    forms = Forms()
    with override(tune="fast", debug=True):
        first = generated(forms, monkeypatch, 64, 16, 40)
        assert len(first.candidates) > 1
        first.choice = Choice()
        tune.remember(first, forms)
        second = generated(forms, monkeypatch, 64, 17, 40)
        assert [each.generated.general is not None for each in second.candidates] == [True]
        assert second.choice is None  # its library was not measured yet
        second.choice = Choice(EAGER, seconds=((EAGER, 1.0),))
        tune.remember(second, forms)
        third = generated(forms, monkeypatch, 64, 18, 40)
    assert third.candidates[0].sources[0].text == second.candidates[0].sources[0].text
    assert third.choice == second.choice
    assert third.choice is not None
    assert third.choice.leaves_eager


def test_further_sizes_start_from_the_variant_that_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    forms = Forms()
    with override(tune="fast", debug=True):
        first = generated(forms, monkeypatch, 3, *SIZES[0])
        other = next(each for each in first.candidates if not each.generated.generates_anchor)
        first.choice, first.candidate = Choice(other.name), other
        tune.remember(first, forms)
        second = generated(forms, monkeypatch, 3, *SIZES[1])
    assert [each.name for each in second.candidates] == [other.name]
    assert other.spec.anchor is AnchorSource.LIBRARY


def test_a_generated_convolution_is_built_for_each_size_until_it_is_one_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forms, works = Forms(), []
    with override(tune="off", debug=True, max_builds=2):
        for batch, side in SIZES:
            works.append(generated(forms, monkeypatch, 3, batch, side))
            tune.remember(works[-1], forms)
    made = [work.generated for work in works if work.generated is not None]
    assert [each.generates_anchor for each in made] == [True, True, False, False]
    assert made[1].sizes == "for these sizes alone: a generated convolution is laid out for its sizes"
    assert [each.source.numbers is not None for each in made] == [False, False, False, True]
    assert not any(work.reason for work in works)


def test_where_sizes_change_rows_are_reduced_over_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that one library serves all of them."""
    monkeypatch.setattr(candidates, "device_facts", lambda device: DeviceFacts.h200())
    monkeypatch.setattr(candidates, "recall", lambda work: None)
    forms, works = Forms(), []
    with override(tune="off", debug=True):
        for tokens in range(197, 204):
            with FakeTensorMode():
                x = torch.empty(64, tokens, 768, device="cuda")
                graph = make_fx(lambda x: F.layer_norm(x, (768,)).mean(1))(x)
            (region,) = partition(graph).regions
            works.append(Work(region, subgraph(graph, region), {}))
            forms.next_round()
            generate_candidates(works[-1], forms)
            tune.remember(works[-1], forms)
    first, *others = [work.candidates[0] for work in works]
    assert obstacle(first.generated.program) == "what blocks reduce over rows is laid out for their number"
    assert {each.name for each in others} == {"rows reduced over apart"}
    assert len({each.sources[0].text for each in others[-3:]}) == 1
    assert not any(work.reason for work in works)


def test_what_cannot_be_shared_says_so() -> None:
    team = k.in_teams(k.layer_norm(7, 20_000), 3, 3)
    assert obstacle(team) == "blocks that share rows are laid out for their sizes"
    assert obstacle(k.layer_norm(7, 20_000)) is None
    forms = Forms()
    for program in (team, k.in_teams(k.layer_norm(8, 20_000), 3, 3)):
        forms.next_round()
        shared = forms.shared(Generated(replace(program, name="rows"), DeviceFacts.h200()))
    assert shared.source.numbers is None
    assert shared.sizes == "for these sizes alone: blocks that share rows are laid out for their sizes"
