"""The steps in which a random model is drawn: each adds a line to its forward, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

    def add(self, expression: str, *, may_be_empty: bool = True) -> None:
        """A line that gives `expression` a name, unless eager rejects it or the result is of no use."""
        try:
            with torch.no_grad():
                value = eval(expression, self.scope, dict(self.values))
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
            return
        if not isinstance(value, Tensor) or value.numel() > self.most or value.dim() > 6:
            return
        if not may_be_empty and value.numel() == 0:
            return
        if value.is_floating_point() and not bool((value.isfinite() & (value.abs() < 1e3)).all()):
            return
        name = f"v{len(self.values)}"
        self.model.lines.append(f"{name} = {expression}")
        self.values[name] = value
        self.owned.add(name)

    def layer(self, made: str, like: Tensor) -> str:
        name = f"l{len(self.model.layers)}"
        self.model.layers[name] = made
        module = eval(made, self.scope).to(like.dtype).train(self.model.training)
        setattr(self.scope["self"], name, module)
        return f"self.{name}"


def _template(sketch: Sketch, templates: Sequence[str], x: str) -> None:
    draw, value = sketch.draw, sketch.values[x]
    text = draw(st.sampled_from(templates))
    fill: dict[str, Any] = {"x": x, "v": x}
    if value.dim():
        axis = draw(st.integers(0, value.dim() - 1))
        other = draw(st.integers(0, value.dim() - 1))
        at = draw(st.integers(0, max(value.shape[axis] - 1, 0)))
        length = draw(st.integers(0 if value.numel() == 0 else 1, max(value.shape[axis] - at, 1)))
        dims = draw(st.lists(st.integers(0, value.dim() - 1), min_size=1, max_size=value.dim(), unique=True))
        if draw(st.booleans()):
            dims = [d - value.dim() for d in dims]
        fill |= {"i": axis, "j": other, "at": at, "length": length, "d": tuple(dims)}
        fill["k"] = ", keepdim=True" if draw(st.booleans()) else ""
    elif "{i}" in text or "{d}" in text:
        return
    sketch.add(text.format(**fill))


def _pointwise(sketch: Sketch) -> None:
    x = sketch.pick()
    if x is not None:
        _template(sketch, (*SMOOTH, *KINKED, *(JUMPING * sketch.is_exact(x))), x)


def _kind(templates: Sequence[str], fits: Callable[[Tensor], bool] = lambda v: v.dim() > 0) -> Callable[[Sketch], None]:
    def step(sketch: Sketch) -> None:
        x = sketch.pick(fits)
        if x is not None:
            _template(sketch, templates, x)

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
    line = text.format(v=x)
    trial = copies(sketch.values)
    try:
        with torch.no_grad():
            exec(line, sketch.scope, trial)
    except (RuntimeError, IndexError):
        return
    if any(
        value.is_floating_point() and not bool((value.isfinite() & (value.abs() < 1e3)).all())
        for value in trial.values()
    ):
        return
    if any(not torch.equal(trial[name], sketch.values[name]) for name in sketch.exact):
        sketch.exact = {name for name in sketch.exact if torch.equal(trial[name], sketch.values[name])}
        if sketch.draw(st.integers(0, 5)) or sketch.model.aliased:
            return  # writes an input, which is rare in models; the oracle has no second input that shares its memory
    sketch.model.lines.append(line)
    sketch.values = {name: trial[name] for name in sketch.values}


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
    x = sketch.pick(lambda v: v.dim() >= 2 and v.shape[1] > 0 and v.numel() > 0)
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
    sketch.add(f"{sketch.layer(draw(st.sampled_from(kinds)), value)}({x})")


def _pool(sketch: Sketch) -> None:
    draw = sketch.draw
    x = sketch.pick(lambda v: 3 <= v.dim() <= 5 and v.numel() > 0)
    if x is None:
        return
    value = sketch.values[x]
    rank = value.dim() - 2
    kernel, stride = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    padding = draw(st.integers(0, kernel // 2))
    ceil = draw(st.booleans())
    size = draw(st.integers(1, 3))
    pools = [
        f"F.avg_pool{rank}d({x}, {kernel}, {stride}, {padding}, ceil_mode={ceil}, count_include_pad={draw(st.booleans())})"
    ]
    pools += [f"F.max_pool{rank}d({x}, {kernel}, {stride}, {padding}, {draw(st.integers(1, 2))}, ceil_mode={ceil})"]
    pools += [f"F.adaptive_avg_pool{rank}d({x}, {size})", f"F.adaptive_max_pool{rank}d({x}, {size})"]
    pools += [f"F.lp_pool{rank}d({x}.abs() + 0.1, 2, {kernel})"] if rank < 3 else []
    if rank > 1:
        pools += [f"F.max_pool{rank}d(torch.sigmoid({x}), {kernel}, {stride}, {padding})"]
        pools += [f"F.max_pool{rank}d(F.max_pool{rank}d({x}, {kernel}, {stride}, {padding}), 2, 1)"]
        pools += [
            f"F.avg_pool{rank}d(F.avg_pool{rank}d({x}, {kernel}), 2, 1)",
            f"F.avg_pool{rank}d({x}, {kernel}).mean((-1, -2))",
        ]
    pools += [f"F.interpolate({x}, scale_factor=2, mode='nearest')"]
    pools += (
        [
            f"F.interpolate({x}, scale_factor=2, mode='bilinear')",
            f"F.pixel_shuffle({x}, 2)",
            f"F.pixel_unshuffle({x}, 2)",
        ]
        if rank == 2
        else []
    )
    pools += [f"F.pad({x}, [1] * {2 * rank}, mode='{draw(st.sampled_from(['reflect', 'replicate', 'circular']))}')"]
    sketch.add(draw(st.sampled_from(pools)))


def _anchor(sketch: Sketch) -> None:
    draw = sketch.draw
    x = sketch.pick(lambda v: v.dim() >= 2 and v.numel() > 0)
    if x is None:
        return
    value = sketch.values[x]
    bias, out = draw(st.booleans()), draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    kinds = [f"nn.Linear({value.shape[-1]}, {out}, bias={bias})"]
    if 3 <= value.dim() <= 5:
        rank, c = value.dim() - 2, value.shape[1]
        kernel, stride, padding = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(0, 1))
        common = f"{kernel}, stride={stride}, padding={padding}, bias={bias}"
        kinds += [f"nn.Conv{rank}d({c}, {out}, {common})", f"nn.Conv{rank}d({c}, {c}, {common}, groups={c})"]
        kinds += [f"nn.ConvTranspose{rank}d({c}, {out}, {common})"] * 2
    if value.dim() >= 2 and draw(st.integers(0, 4)) == 0:
        sketch.add(f"{x} @ {x}.mT * 0.1")
        return
    # PyTorch's float32 convolution gives an empty result where its float64 one, which is the oracle, raises.
    sketch.add(f"{sketch.layer(draw(st.sampled_from(kinds)), value)}({x})", may_be_empty=False)


def _odd(sketch: Sketch) -> None:
    """What models do beside layers."""
    x = sketch.pick()
    if x is None:
        return
    _template(
        sketch,
        ODD,
        x,
    )  # fmt: skip


def _whole_number(sketch: Sketch) -> None:
    """Integers and booleans made of an input, and floats of them."""
    names = [name for name in sketch.values if sketch.is_exact(name)]
    if not names:
        return
    x = sketch.draw(st.sampled_from(names))
    _template(
        sketch,
        WHOLE_NUMBERS,
        x,
    )  # fmt: skip


def _again(sketch: Sketch) -> None:
    """A layer that is there already, with the same parameters."""
    x = sketch.pick(lambda v: v.numel() > 0)
    if x is not None and sketch.model.layers:
        sketch.add(f"self.{sketch.draw(st.sampled_from(list(sketch.model.layers)))}({x})", may_be_empty=False)


STEPS: tuple[Callable[[Sketch], None], ...] = (
    _pointwise, _pointwise, _pointwise, _binary, _binary, _kind(ALONG), _kind(REDUCTIONS), _kind(VIEWS), _kind(VIEWS), _kind(WHOLE, lambda v: True), _kind(ALGEBRA), _kind(ALGEBRA),
    _norm, _norm, _pool, _anchor, _again, _odd, _in_place, _whole_number,
)  # fmt: skip
