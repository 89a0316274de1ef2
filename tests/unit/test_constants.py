"""What a graph makes of nothing but numbers is computed once: masks, places; what a caller may see or what is cheap stays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fusepass
from fusepass.compile.constants import CONSTANTS


class Windows(nn.Module):
    """Softmax of scores of which a mask of numbered regions hides some, as in windows that were shifted."""

    def forward(self, x: Tensor) -> Tensor:
        places = x.new_zeros((4, 4))
        for number, (rows, columns) in enumerate(
            [(slice(0, 2), slice(0, 3)), (slice(0, 2), slice(3, 4)), (slice(2, 4), slice(0, 4))]
        ):
            places[rows, columns] = number
        places = places.flatten()
        apart = places[:, None] - places[None]
        return (x + apart.masked_fill(apart != 0, -100.0)).softmax(-1)


def rewrites(fused: nn.Module) -> list[str]:
    return [each.rule for each in fused.report().rewrites]  # type: ignore[operator]


def test_a_mask_is_made_once(tmp_path: Path) -> None:
    model, x = Windows(), torch.rand(3, 16, 16)
    fused = fusepass.optimize(model, tune="off")
    with torch.no_grad():
        for given in (x, x * 2, x * torch.nan):
            torch.testing.assert_close(fused(given), model(given), equal_nan=True)
        assert CONSTANTS in rewrites(fused)
        targets = [str(node.target) for node in fused.graph_module(x).graph.nodes]
        assert not any("slice" in target or "fill" in target or "zeros" in target for target in targets)
        fusepass.save(fused, tmp_path / "windows.fusepass", x)
        torch.testing.assert_close(fusepass.load(tmp_path / "windows.fusepass")(x), model(x))
        whole = fusepass.optimize(model, tune="off", disable=CONSTANTS)
        torch.testing.assert_close(whole(x), model(x))
        assert CONSTANTS not in rewrites(whole)


def ramp() -> Tensor:
    return ((torch.arange(16.0) + 1) * 0.5).sin().exp()


STAYS: dict[str, Callable[[Tensor], object]] = {
    "it is given to the caller": lambda x: (x * 2 + 1, ramp()),
    "a view of it is given to the caller": lambda x: (x * 2 + 1, ramp()[2:]),
    "it is drawn": lambda x: (x * 2 + torch.rand(16).add(1).mul(2).exp().sin()).exp(),
    "it is cheap": lambda x: (x * 2 + torch.arange(16.0) * 2).exp(),
    "it is made of the input": lambda x: (x * 2 + x.sum(0).sin().exp().add(1)).exp(),
    "it is large": lambda x: (x.sum() + torch.arange(2.0**21).sin().exp().add(1).mul(2)).sqrt(),
}


@pytest.mark.parametrize("name", STAYS)
def test_what_stays(name: str) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> object:
            return STAYS[name](x)

    model, x = Model(), torch.rand(16)
    fused = fusepass.optimize(model, tune="off")
    with torch.no_grad():
        torch.manual_seed(0)
        wanted = model(x)
        torch.manual_seed(0)
        torch.testing.assert_close(fused(x), wanted)
    assert CONSTANTS not in rewrites(fused)


def test_what_is_given_to_the_caller_is_read_elsewhere_as_it_was() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            places = ramp()
            return places, (x + places).exp()

    model, x = Model(), torch.rand(16)
    fused = fusepass.optimize(model, tune="off")
    with torch.no_grad():
        fused(x)[0].zero_()
        torch.testing.assert_close(fused(x), model(x))
