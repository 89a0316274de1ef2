"""The steps in which a random model is drawn: each adds a line to its forward, or nothing."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.property.expressions import (
    ALGEBRA,
    ALONG,
    BINARY,
    IN_PLACE,
    JUMPING,
    KINKED,
    ODD,
    REDUCTIONS,
    SMOOTH,
    SQUARES,
    VIEWS,
    WHOLE,
    WHOLE_NUMBERS,
)
from tests.property.script import Model, copies

Draw = Callable[[st.SearchStrategy[Any]], Any]


class Sketch:
    """A model being drawn, with the value of every name at hand. No value gets more than `most` elements."""

    def __init__(self, draw: Draw, model: Model, most: int) -> None:
        self.draw = draw
        self.model = model
        self.most = most
        self.scope: dict[str, Any] = {"torch": torch, "F": F, "nn": nn, "self": nn.Module()}
        self.values: dict[str, Tensor] = {}
        self.exact: set[str] = set()
        self.owned: set[str] = set()
        self._prefix = ""

    def pick(self, fits: Callable[[Tensor], bool] = lambda _: True, recent: bool = True) -> str | None:
        names = [name for name, value in self.values.items() if value.is_floating_point() and fits(value)]
        if not names:
            return None
        if recent and self.draw(st.integers(0, 3)):
            return names[-1]
        return str(self.draw(st.sampled_from(names)))

    def is_exact(self, name: str) -> bool:
        """Whether a function with jumps gives the same on `name` in every run: fused halves are not rounded in between."""
        return name in self.exact and self.values[name].dtype.itemsize > 2

    def is_short(self, name: str, axis: int) -> bool:
        """Whether the square of a dimension of `name`, if it has it, is no larger than a value may be: gigabytes take minutes."""
        value = self.values[name]
        return value.dim() < -axis or value.shape[axis] ** 2 <= self.most

    def add(self, expression: str, *, may_be_empty: bool = True) -> None:
        """A line that gives `expression` a name, unless eager rejects it or the result is of no use."""
        try:
            with torch.no_grad():
                value = eval(expression, {**self.scope, **self.values})  # what a lambda reads is global
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
            return
        if not isinstance(value, Tensor) or value.numel() > self.most or value.dim() > 6:
            return
        if not may_be_empty and value.numel() == 0:
            return
        if not _is_tame(value):
            return
        name = f"v{len(self.values)}"
        self.model.lines.append(f"{self._prefix}{name} = {expression}")
        self.values[name] = value
        self.owned.add(name)

    @contextlib.contextmanager
    def within(self, context: str) -> Iterator[None]:
        """What is added while open runs in `context`."""
        self._prefix = f"with {context}: "
        try:
            with eval(context, self.scope, dict(self.values)):
                yield
        finally:
            self._prefix = ""

    def layer(self, made: str) -> str:
        """A submodule; returns how forward calls it."""
        name = f"l{len(self.model.layers)}"
        self.model.layers[name] = made
        module = eval(made, self.scope).to(self.model.dtype).train(self.model.training)
        setattr(self.scope["self"], name, module)
        return f"self.{name}"

    def hold(self, made: str) -> str:
        """A parameter or buffer; returns how forward calls it."""
        name = f"l{len(self.model.layers)}"
        self.model.layers[name] = made
        setattr(self.scope["self"], name, eval(made, self.scope))
        self.scope["self"].to(self.model.dtype)
        return f"self.{name}"

    def try_line(self, line: str) -> bool:
        """A line that names no value, unless eager rejects it or numbers grow beyond use."""
        trial, kept = copies(self.values), copy.deepcopy(self.scope["self"].state_dict())
        try:
            with torch.no_grad():
                exec(line, self.scope, trial)
        except (RuntimeError, IndexError):
            return False
        held = [buffer for _, buffer in self.scope["self"].named_buffers()]
        if not all(map(_is_tame, [*trial.values(), *held])):
            self.scope["self"].load_state_dict(kept)
            return False
        if any(not torch.equal(trial[name], self.values[name]) for name in self.exact):
            self.exact = {name for name in self.exact if torch.equal(trial[name], self.values[name])}
            if self.draw(st.integers(0, 5)) or self.model.aliased:
                return False  # writes an input, which is rare in models; the oracle has no second input that shares its memory
        self.model.lines.append(line)
        self.values = {name: trial[name] for name in self.values}
        return True


def _is_tame(value: Any) -> bool:
    """Whether numbers are finite and of a size at which half types are of use."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return True
    return bool((value.isfinite() & (value.abs() < 1e3)).all())


def fill(sketch: Sketch, templates: Sequence[str], x: str) -> None:
    """A line by one of `templates`, for the value `x`."""
    draw, value = sketch.draw, sketch.values[x]
    text = draw(st.sampled_from(templates))
    blanks: dict[str, Any] = {"x": x, "v": x}
    if value.dim():
        axis = draw(st.integers(0, value.dim() - 1))
        other = draw(st.integers(0, value.dim() - 1))
        at = draw(st.integers(0, max(value.shape[axis] - 1, 0)))
        length = draw(st.integers(0 if value.numel() == 0 else 1, max(value.shape[axis] - at, 1)))
        dims = draw(st.lists(st.integers(0, value.dim() - 1), min_size=1, max_size=value.dim(), unique=True))
        if draw(st.booleans()):
            dims = [d - value.dim() for d in dims]
        blanks |= {"i": axis, "j": other, "at": at, "length": length, "d": tuple(dims)}
        blanks["k"] = ", keepdim=True" if draw(st.booleans()) else ""
    elif "{i}" in text or "{d}" in text:
        return
    sketch.add(text.format(**blanks))


def _pointwise(sketch: Sketch) -> None:
    x = sketch.pick()
    if x is not None:
        fill(sketch, (*SMOOTH, *KINKED, *(JUMPING * sketch.is_exact(x))), x)


def _kind(templates: Sequence[str], fits: Callable[[Tensor], bool] = lambda v: v.dim() > 0) -> Callable[[Sketch], None]:
    def step(sketch: Sketch) -> None:
        x = sketch.pick(fits)
        if x is not None:
            fill(sketch, templates, x)

    return step


def _in_place(sketch: Sketch) -> None:
    """On values that the model made, through a clone where they might be views of an input."""
    x = sketch.pick()
    if x is None:
        return
    text = sketch.draw(st.sampled_from(IN_PLACE))
    direct = x in sketch.owned and sketch.draw(st.booleans())
    if not direct:
        sketch.add(f"{x}.clone()")
        x = list(sketch.values)[-1]
    sketch.try_line(text.format(v=x))


def _binary(sketch: Sketch) -> None:
    x = sketch.pick()
    if x is None:
        return
    shape, dtype = sketch.values[x].shape, sketch.values[x].dtype

    def fits(value: Tensor) -> bool:
        try:
            joint = torch.broadcast_shapes(shape, value.shape)
        except RuntimeError:
            return False
        return prod(joint) <= sketch.most and (value.dtype == dtype or value.dim() == 0)

    y = sketch.pick(fits, recent=False)
    if y is not None:
        pair = (x, y) if sketch.draw(st.booleans()) else (y, x)
        text = sketch.draw(st.sampled_from(BINARY))
        sketch.add(text.format(x=pair[0], y=pair[1]))


def _norm(sketch: Sketch) -> None:
    draw = sketch.draw
    x = sketch.pick(lambda v: v.dim() >= 2 and v.numel() > 0 and v.dtype is sketch.model.dtype)
    if x is None:
        return
    value = sketch.values[x]
    n, c = value.shape[:2]
    count = value.numel() // c
    affine = draw(st.booleans())
    tail = tuple(value.shape[draw(st.integers(1, value.dim() - 1)) :])
    groups = draw(st.sampled_from([g for g in range(1, c + 1) if c % g == 0]))
    if value.numel() <= n * groups or prod(tail) == 1:
        return  # x minus its own mean: nothing but rounding errors, which the next normalisation makes large
    kinds = [
        f"nn.LayerNorm({tail}, eps=1e-2, elementwise_affine={affine})",
        f"nn.GroupNorm({groups}, {c}, eps=1e-2, affine={affine})",
    ]
    kinds += [f"nn.RMSNorm({tail}, eps=1e-2, elementwise_affine={affine})"]
    rank = {2: 1, 3: 1, 4: 2, 5: 3}.get(value.dim())
    if rank is not None and count > 1:
        track = draw(st.booleans())
        momentum = draw(st.sampled_from([0.1, 0.1, 0.1, 0.7, 0.7, None]))
        kinds += 2 * [
            f"nn.BatchNorm{rank}d({c}, eps=1e-2, affine={affine}, track_running_stats={track}, momentum={momentum})"
        ]
        if value.dim() > 2 and value[0, 0].numel() > 1:
            kinds += [f"nn.InstanceNorm{rank}d({c}, eps=1e-2, affine={affine}, track_running_stats={track})"]
    sketch.add(f"{sketch.layer(draw(st.sampled_from(kinds)))}({x})")


def _anchor(sketch: Sketch) -> None:
    x = sketch.pick(lambda v: v.dim() >= 2 and v.numel() > 0 and v.dtype is sketch.model.dtype)
    if x is not None:
        add_layer(sketch, x)


def add_layer(sketch: Sketch, x: str) -> None:
    """A matrix product or a convolution of `x`, which has two dimensions at least."""
    draw, value = sketch.draw, sketch.values[x]
    bias, out = draw(st.booleans()), draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    kinds = [f"nn.Linear({value.shape[-1]}, {out}, bias={bias})"]
    if 3 <= value.dim() <= 5:
        rank, c = value.dim() - 2, value.shape[1]
        kernel, stride, padding = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(0, 1))
        common = (
            f"{kernel}, stride={stride}, padding={padding}, bias={bias}, dilation={draw(st.sampled_from([1, 1, 2]))}"
        )
        groups = draw(st.sampled_from([g for g in range(1, c + 1) if c % g == 0]))
        mode = draw(st.sampled_from(["zeros", "reflect", "circular", "replicate"]))
        kinds += [f"nn.Conv{rank}d({c}, {out}, {common})", f"nn.Conv{rank}d({c}, {c}, {common}, groups={c})"]
        kinds += [f"nn.Conv{rank}d({c}, {out * groups}, {common}, groups={groups}, padding_mode='{mode}')"]
        kinds += [f"nn.ConvTranspose{rank}d({c}, {out}, {common})"] * 2
        kinds += [
            f"nn.ConvTranspose{rank}d({c}, {out * groups}, {common}, groups={groups}, output_padding={stride - 1})"
        ]
    if value.dim() >= 2 and sketch.is_short(x, -2) and draw(st.integers(0, 4)) == 0:
        sketch.add(f"{x} @ {x}.mT * 0.1")
        return
    # PyTorch's float32 convolution gives an empty result where its float64 one, which is the oracle, raises.
    sketch.add(f"{sketch.layer(draw(st.sampled_from(kinds)))}({x})", may_be_empty=False)


def _odd(sketch: Sketch) -> None:
    """What models do beside layers."""
    x = sketch.pick()
    if x is None:
        return
    fill(sketch, (*ODD, *(SQUARES * sketch.is_short(x, -1))), x)


def _whole_number(sketch: Sketch) -> None:
    """Integers and booleans made of an input, and floats of them."""
    names = [name for name in sketch.values if sketch.is_exact(name)]
    if not names:
        return
    x = sketch.draw(st.sampled_from(names))
    fill(sketch, WHOLE_NUMBERS, x)


def _again(sketch: Sketch) -> None:
    """A layer that is there already, with the same parameters."""
    x = sketch.pick(lambda v: v.numel() > 0 and v.dtype is sketch.model.dtype)
    layers = [name for name, made in sketch.model.layers.items() if not made.startswith(("nn.Parameter", "nn.Buffer"))]
    if x is not None and layers:
        sketch.add(f"self.{sketch.draw(st.sampled_from(layers))}({x})", may_be_empty=False)


STEPS: tuple[Callable[[Sketch], None], ...] = (
    _pointwise, _pointwise, _pointwise, _binary, _binary, _kind(ALONG), _kind(REDUCTIONS), _kind(VIEWS), _kind(VIEWS), _kind(WHOLE, lambda v: True), _kind(ALGEBRA), _kind(ALGEBRA),
    _norm, _norm, _anchor, _anchor, _again, _odd, _in_place, _whole_number,
)  # fmt: skip
