"""What stays of a model that is gone: nothing for each model, whatever it was used through."""

from __future__ import annotations

import gc
from collections.abc import Callable
from weakref import ref

import pytest
import torch
from torch import fx, nn

import fusepass
from fusepass.api.module import OptimizedModule
from fusepass.compile.pipeline import CompiledGraph
from fusepass.patterns.memo import remembered
from fusepass.runtime.region import FusedRegion

X = torch.rand(4, 8)


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8))


def _called() -> None:
    fused = fusepass.optimize(_model(), tune="off")
    with torch.no_grad():
        for _ in range(3):  # the last one through the calls without Python
            fused(X)
    assert fused.report().regions


def _explained() -> None:
    with torch.no_grad():
        assert fusepass.explain(_model(), X).regions


def _trained() -> None:
    compiled = torch.compile(_model(), backend="fusepass", options={"tune": "off"})
    compiled(X).sum().backward()
    torch._dynamo.reset()


def _count(*kinds: type) -> int:
    gc.collect()
    return sum(type(each) in kinds for each in gc.get_objects())


@pytest.mark.parametrize("use", [_called, _explained, _trained], ids=lambda use: use.__name__)
@pytest.mark.invariant(52)
def test_nothing_stays_of_a_model_that_is_gone(use: Callable[[], None]) -> None:
    kinds = FusedRegion, CompiledGraph, OptimizedModule, fx.Node, nn.LayerNorm
    use()
    before = _count(*kinds)
    for _ in range(3):
        use()
    assert _count(*kinds) == before


@pytest.mark.invariant(52)
def test_what_is_remembered_of_a_function_does_not_keep_it() -> None:
    asked: list[str] = []

    @remembered
    def name(target: object) -> str:
        asked.append(str(target))
        return str(target)

    class Operator:
        def __str__(self) -> str:
            return "one"

    first = Operator()
    assert [name(first), name(first), *asked] == ["one"] * 3
    gone = ref(first)
    del first
    assert gone() is None
    for _ in range(100):  # some of them where the first one lay
        assert name(Operator()) == "one"
    assert len(asked) == 101
    assert name("a name") == "a name"
