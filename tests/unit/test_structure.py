"""Nested values of all kinds are taken apart and put together again."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict

import torch
from torch import Tensor, nn

import fusepass
from fusepass.structure import flatten


@dataclasses.dataclass
class Named(OrderedDict[str, Tensor]):
    """A dict that has its entries as fields as well, as results of well-known models are."""

    scores: Tensor

    def __post_init__(self) -> None:
        self["scores"] = self.scores


@dataclasses.dataclass
class Plain:
    scores: Tensor
    names: tuple[str, ...] = ()


class Giving(nn.Module):
    def __init__(self, kind: type[Named] | type[Plain]) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Named | Plain:
        return self.kind(torch.tanh(x) + 1)


def test_a_dataclass_is_its_fields() -> None:
    value = Plain(torch.ones(2), ("a", "b"))
    leaves, structure = flatten([value, 3])
    made, number = structure.unflatten(leaves)
    assert type(made) is Plain
    assert made.scores is value.scores
    assert (made.names, number) == (("a", "b"), 3)
    assert leaves[1:] == ["a", "b", 3]


def test_a_dataclass_that_is_a_dict_as_well_is_left_whole() -> None:
    value = Named(torch.ones(2))
    leaves, structure = flatten((value,))
    assert leaves[0] is value
    assert structure.unflatten(leaves)[0] is value


def test_what_a_model_gives_is_of_its_kind() -> None:
    x = torch.randn(3, 4)
    for kind in (Named, Plain):
        model = Giving(kind)
        optimised = fusepass.optimize(model)
        with torch.no_grad():
            for _ in range(2):
                made, wanted = optimised(x), model(x)
                assert type(made) is kind
                torch.testing.assert_close(made.scores, wanted.scores)
    assert list(fusepass.optimize(Giving(Named))(x)) == ["scores"]
