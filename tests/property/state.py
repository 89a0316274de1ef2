"""Steps of a random model about what its module holds: parameters and buffers, read by several, and written."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from tests.property.expressions import HELD, SHARED, WRITTEN
from tests.property.steps import Sketch


def _held(sketch: Sketch) -> None:
    """A parameter or a buffer of the model itself, of a shape that is broadcast with a value."""
    x = sketch.pick(lambda value: value.dtype is sketch.model.dtype)
    if x is None:
        return
    draw, shape = sketch.draw, sketch.values[x].shape
    own = [size if draw(st.booleans()) else 1 for size in shape][draw(st.integers(0, len(shape))) :]
    made = draw(st.sampled_from(["nn.Parameter", "nn.Buffer"]))
    name = sketch.hold(f"{made}(torch.linspace(-1, 1, {torch.Size(own).numel()}).view({tuple(own)}))")
    if name is not None:
        sketch.add(draw(st.sampled_from(HELD)).format(x=x, p=name))


def _written(sketch: Sketch) -> None:
    """A buffer that a call changes, read before or after."""
    x = sketch.pick(lambda value: value.numel() > 0)
    buffers = [name for name, made in sketch.model.layers.items() if made.startswith("nn.Buffer(")]
    if x is None or not buffers:
        return
    name = f"self.{sketch.draw(st.sampled_from(buffers))}"
    if sketch.try_line(sketch.draw(st.sampled_from(WRITTEN)).format(x=x, p=name)) and sketch.draw(st.booleans()):
        sketch.add(f"{x} * {name}.mean().to({x}.dtype)")


def _shared(sketch: Sketch) -> None:
    """The parameters of a layer that is there already, once more."""
    x = sketch.pick(lambda value: value.dtype is sketch.model.dtype and value.numel() > 0)
    layers = [name for name, made in sketch.model.layers.items() if made.startswith(("nn.Linear", "nn.Conv"))]
    if x is not None and layers:
        name = f"self.{sketch.draw(st.sampled_from(layers))}"
        sketch.add(sketch.draw(st.sampled_from(SHARED)).format(x=x, p=name))


STEPS = (_held, _written, _shared)
