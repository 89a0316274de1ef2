"""Steps of a random model about kinds of numbers: whole ones and truths, several types at once, autocast, random numbers."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.property.expressions import AUTOCAST, BRANCHES, INTEGERS, MIXED, PAIRS_OF_INTEGERS, RANDOM, VIEWS
from tests.property.steps import Sketch, add_layer, fill


def _is_whole(value: Tensor) -> bool:
    return not (value.is_floating_point() or value.is_complex())


def _whole(sketch: Sketch) -> str | None:
    """A value of integers or truths, which is the same in every run: none is made of rounded numbers."""
    names = [name for name, value in sketch.values.items() if _is_whole(value)]
    return str(sketch.draw(st.sampled_from(names))) if names else None


def _integers(sketch: Sketch) -> None:
    x = _whole(sketch)
    if x is not None:
        fill(sketch, (*INTEGERS, *INTEGERS, *VIEWS), x)


def _pair(sketch: Sketch, templates: tuple[str, ...], x: str, fits: Callable[[Tensor], bool]) -> None:
    """A line of `x` and any value that fits and is broadcast with it."""
    shape = sketch.values[x].shape

    def joins(value: Tensor) -> bool:
        try:
            return fits(value) and prod(torch.broadcast_shapes(shape, value.shape)) <= sketch.most
        except RuntimeError:
            return False

    names = [name for name, value in sketch.values.items() if joins(value)]
    if names:
        y = sketch.draw(st.sampled_from(names))
        sketch.add(sketch.draw(st.sampled_from(templates)).format(x=x, y=y))


def _pairs_of_integers(sketch: Sketch) -> None:
    x = _whole(sketch)
    if x is not None:
        _pair(sketch, PAIRS_OF_INTEGERS, x, _is_whole)


def _mixed(sketch: Sketch) -> None:
    """Types that differ: promotion. The other value is the same in every run, as some ask for its sign."""
    x = sketch.pick()
    if x is None:
        return
    dtype, exact = sketch.values[x].dtype, [sketch.values[name] for name in sketch.exact]
    same = lambda value: _is_whole(value) or any(value is other for other in exact)  # noqa: E731
    _pair(sketch, MIXED, x, lambda value: value.dtype != dtype and same(value))


def _autocast(sketch: Sketch) -> None:
    """In bfloat16 what autocast says; nothing in float64, which it leaves alone."""
    x = sketch.pick(lambda value: value.dtype is torch.float32 and value.dim() >= 2 and value.numel() > 0)
    if x is None:
        return
    enabled = sketch.draw(st.sampled_from(["", "", "", ", enabled=False"]))
    with sketch.within(f"torch.autocast(x0.device.type, torch.bfloat16{enabled})"):
        if sketch.model.dtype is torch.float32 and sketch.draw(st.booleans()):
            add_layer(sketch, x)
        elif sketch.is_short(x, -2):
            fill(sketch, AUTOCAST, x)


def _random(sketch: Sketch) -> None:
    x = sketch.pick(lambda value: value.numel() > 0)
    if x is not None:
        fill(sketch, RANDOM, x)


def _branch(sketch: Sketch) -> None:
    """Python that asks for the value of an input."""
    x = sketch.pick()
    asked = [name for name in sketch.values if sketch.is_exact(name) and sketch.values[name].numel()]
    if x is not None and asked:
        question = sketch.draw(st.sampled_from(asked))
        sketch.add(sketch.draw(st.sampled_from(BRANCHES)).format(x=x, e=question))


STEPS = (_integers, _integers, _pairs_of_integers, _mixed, _mixed, _autocast, _random, _branch)
