"""Draws models as the text of a forward method, so that a failing one can be read and pasted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

Draw = Callable[[st.SearchStrategy[Any]], Any]

SIZES = (1, 2, 3, 4, 5, 7, 8, 13, 16, 31, 64)
MOST_ELEMENTS = 20_000

SMOOTH = (
    "F.gelu({x})", "F.gelu({x}, approximate='tanh')", "F.silu({x})", "torch.tanh({x})", "torch.sigmoid({x})",
    "F.mish({x})", "F.softplus({x})", "F.softplus({x}, beta=2, threshold=3)", "F.elu({x})", "F.celu({x}, 0.7)", "F.selu({x})",
    "F.softsign({x})", "F.logsigmoid({x})", "torch.sin({x})", "torch.cos({x})", "torch.exp(-{x}.abs())",
    "torch.log1p({x}.abs())", "torch.sqrt({x}.abs() + 0.5)", "torch.rsqrt({x} * {x} + 1)", "torch.erf({x})", "torch.atan({x})",
    "{x} ** 2", "{x}.pow(3) * 0.1", "({x}.abs() + 0.1) ** 0.5", "2 ** {x}.clamp(-3, 3)", "torch.addcmul({x}, {x}, {x}, value=0.3)",
    "torch.addcdiv({x}, {x}, {x} * {x} + 1, value=-0.5)", "torch.lerp({x}, {x} * 2, 0.3)", "1 / ({x}.abs() + 1)", "1 - {x}", "-{x}",
    "torch.tanh({x}).square()", "F.hardtanh({x})", "F.tanhshrink({x})", "torch.expm1({x}.clamp(max=1))", "torch.asinh({x})",
    "torch.hypot({x}, torch.ones_like({x}))", "torch.arctan2({x}, {x}.abs() + 1)", "{x}.reciprocal().clamp(-1, 1)", "torch.special.expit({x})",
    "torch.logaddexp({x}, -{x})", "torch.sinc({x})", "torch.erfc({x})", "torch.log2({x}.abs() + 1)", "torch.sinh({x}.clamp(-2, 2))",
)  # fmt: skip
"""Functions whose result moves as little as their argument."""

KINKED = (
    "F.relu({x})", "F.relu6({x})", "F.leaky_relu({x}, 0.2)", "F.hardswish({x})", "F.hardsigmoid({x})", "{x}.clamp(-0.5, 1.5)",
    "{x}.clamp(min=0.25)", "{x}.abs()", "torch.where({x} > 0, {x}, {x} * 0.1)", "{x}.masked_fill({x} < 0, 0.0)",
    "torch.maximum({x}, torch.zeros_like({x}))", "torch.minimum({x}, {x} * 0.5)", "{x} * ({x} > 0)", "F.softshrink({x}, 0.0)",
    "torch.nan_to_num({x})", "F.prelu({x}, torch.full((1,), 0.1, dtype={x}.dtype))", "torch.where({x}.isnan(), 0.0, {x})",
    "torch.fmax({x}, {x} * 2)", "torch.clamp({x}, {x}.mean(), None)",
)  # fmt: skip
"""Piecewise functions without jumps."""

JUMPING = (
    "torch.round({x})", "torch.floor({x} * 2)", "torch.sign({x})", "({x} > 0).to({x}.dtype)", "F.hardshrink({x}, 0.5)",
    "F.threshold({x}, 0.1, -1.0)", "torch.trunc({x})", "{x} % 0.7", "torch.remainder({x}, 1.3)", "torch.fmod({x}, 0.9)", "{x} // 0.5",
    "torch.where(({x} > 0.2) & ({x} < 0.9), {x}, -1.0)", "{x}.frac()", "torch.heaviside({x}, {x})", "torch.signbit({x}).to({x}.dtype)",
    "({x} * 10).to(torch.int32).to({x}.dtype)", "torch.floor_divide({x}, 0.3)", "torch.ceil({x})",
)  # fmt: skip
"""Functions with jumps: only for inputs, which are the same bits in every run."""

ALONG = (
    "{x} - {x}.mean({d}, keepdim=True)", "{x} / (1 + {x}.abs().amax({d}, keepdim=True))", "F.softmax({x}, {i})", "F.log_softmax({x}, {i})",
    "{x} * torch.rsqrt({x}.pow(2).mean({d}, keepdim=True) + 1e-2)", "{x} + {x}.sum({d}, keepdim=True) * 0.1 - {x}.amin({d}, keepdim=True)",
    "({x} - {x}.mean({d}, True)) / ({x}.var({d}, correction=0, keepdim=True) + 0.5).sqrt()", "F.normalize({x}, dim={i}, eps=0.1)",
    "F.softmin({x}, {i})", "{x} - {x}.logsumexp({d}, keepdim=True)", "{x} * {x}.sigmoid().mean({d}, True)", "{x}.softmax({i}).mul(2).softmax({i})",
    "{x} - {x}.norm(dim={i}, keepdim=True) * 0.1",
)  # fmt: skip
REDUCTIONS = (
    "{x}.sum({d}{k}) * 0.1", "{x}.mean({d}{k})", "{x}.amax({d}{k})", "{x}.amin({d}{k})", "torch.logsumexp({x}, {d}{k})",
    "{x}.var({d}, correction=0{k})", "({x}.var({d}, correction=0{k}) + 1).sqrt()", "torch.linalg.vector_norm({x}, 2, {d}{k})",
    "{x}.max({i}{k}).values", "{x}.min({i}{k})[0]", "{x}.abs().sum({d}{k}).log1p()", "torch.var_mean({x}, {d}, correction=0{k})[1]",
    "{x}.clamp(0.5, 1.1).prod({i}{k})", "{x}.norm(1, {d}{k}) * 0.1", "{x}.sum({i}{k}, dtype=torch.float64).to({x}.dtype) * 0.1",
)  # fmt: skip
WHOLE = ("{x}.sum() * 0.01", "{x}.mean()", "{x}.max()", "{x}.amin()", "{x}.norm() * 0.1")
VIEWS = (
    "{x}.transpose({i}, {j})", "{x}.flip({i})", "{x}.flatten()", "{x}.narrow({i}, {at}, {length})", "torch.roll({x}, {at}, {i})",
    "torch.cat([{x}, {x} * 2], {i})", "torch.cat([{x}.tanh(), {x}, {x}.relu()], {i})", "torch.stack([{x}, -{x}], {i})", "{x}.unsqueeze({i})",
    "{x}.select({i}, {at})", "F.pad({x}, (1, 2), value=0.5)", "F.pad({x}, (0, -1)) if {x}.shape[-1] > 1 else {x}", "{x}.reshape({x}.shape[0], -1)",
    "{x}.unflatten({i}, (1, -1))", "{x}.chunk(2, {i})[0]", "{x}.chunk(2, {i})[-1]", "{x}[..., ::2]", "{x}[{at} if {i} == 0 else 0]", "{x}.unsqueeze(0).expand(2, *{x}.shape)",
    "{x}.movedim({i}, {j})", "{x}.contiguous()", "{x}.mT if {x}.dim() > 1 else {x}", "{x}.repeat_interleave(2, {i})", "{x}.repeat(*[2] * {x}.dim())", "{x}.tril() if {x}.dim() > 1 else {x}",
    "{x}.diagonal(0, {i}, {j}) if {i} != {j} else {x}", "{x}.unfold({i}, 1, 1)", "{x}.split(1, {i})[0]", "{x}.squeeze()", "{x}.clone()",
    "{x}.swapaxes({i}, {j}).flatten()", "F.pad({x}, (1, 0)).unflatten(-1, (-1, {x}.shape[-1] + 1))", "{x}.unbind({i})[-1]", "{x}.new_zeros({x}.shape) + {x}",
    "{x}.movedim({i}, -1).contiguous()",
)  # fmt: skip
IN_PLACE = (
    "{v}.add_(1)", "{v}.mul_(0.5)", "{v}.relu_()", "{v}.sigmoid_()", "{v}.clamp_(-1, 1)", "F.relu({v}, inplace=True)", "{v}.neg_()",
    "{v}[..., 0] = 0.5", "{v}[..., :1].mul_(2)", "{v}.fill_(0.3)", "{v}.masked_fill_({v} > 0, 0.1)", "{v}.add_({v})", "{v}.copy_({v}.flip(0)) if {v}.dim() else {v}",
    "{v}.view(-1).add_(0.1) if {v}.is_contiguous() else {v}", "{v} += 1", "{v} *= {v}.abs().amax()", "{v}.transpose(0, -1).mul_(0.3) if {v}.dim() else {v}",
)  # fmt: skip
BINARY = (
    "{x} + {y}", "{x} * {y}", "{x} - 0.5 * {y}", "{x} / ({y}.abs() + 1)", "torch.maximum({x}, {y})", "torch.where({x} > {y}, {x}, {y})",
    "{x} * {y}.sigmoid()", "torch.add({x}, {y}, alpha=0.3)", "torch.lerp({x}, {y}, 0.25)", "torch.addcmul({x}, {y}, {y}, value=0.2)",
    "torch.hypot({x}, {y})", "torch.logaddexp({x}, {y})", "torch.rsub({x}, {y}, alpha=2)", "torch.sub({x}, {y}).square()", "torch.arctan2({x}, {y}.abs() + 1)",
)  # fmt: skip

ALGEBRA = (
    "{x} * 2 * 0.25 + 1 - 0.5", "1 - (2 - {x}) * 3", "(-{x}) * (-{x})", "{x} - (-{x})", "torch.sigmoid({x}).clamp(0, 1)", "F.relu(torch.softmax({x}, -1))",
    "F.relu6({x}).clamp(0, 7)", "{x}.clamp(-1, 1).clamp(min=0)", "torch.exp(-F.relu({x})).clamp(max=2)", "F.relu({x}).abs()", "torch.maximum({x}.tanh(), {x}.tanh())",
    "(-{x}).abs()", "(-{x}) ** 2", "torch.sigmoid({x}).amax({d}{k})", "(1 - {x}).amax({d}{k})", "({x} * 3 + 1).amin({d}{k})", "({x} * 0.1).sum({d}{k})", "(-{x}).mean({d}{k})",
    "({x} * {x}.mean({d}, keepdim=True).sigmoid()).sum({d}, keepdim=True) * 0.1", "{x}.unsqueeze({i}).expand(2, *[-1] * ({x}.dim() + 1)).sum(0) * 0.5",
    "F.gelu({x}.unsqueeze(0).expand(3, *{x}.shape)).mean(0)", "{x}.unsqueeze(-1).softmax(-1)", "{x}.unsqueeze(-1).logsumexp(-1)", "{x}.unsqueeze({i}).sum({i})",
    "{x}.unsqueeze(0).var(0, correction=0)", "{x}.unsqueeze(-1).log_softmax(-1).squeeze(-1)", "{x}.sum({d}, keepdim=True).sum({i}{k}) * 0.1", "{x}.mean({d}, keepdim=True).mean({i}{k})",
    "{x}.t().contiguous().sum(0) * 0.1 if {x}.dim() == 2 else {x}", "({x} - {x}) + {x}", "{x} / {x}.abs().clamp(min=0.5) * 1", "({x}.square() + 0.1).sqrt().square()", "torch.ones_like({x}) - {x} * torch.full_like({x}, 2)",
    "{x} * (torch.tensor(2.0, dtype=torch.float64) * 3).exp() * 0.01", "{x} / {x}.new_full({x}.shape, 4.0).sqrt() + {x}.new_zeros(1)", "torch.sigmoid({x}).max({i}{k}).values",
)  # fmt: skip
"""What the rules of `fusepass.patterns.rules` are about."""


@dataclass
class Model:
    """A drawn model.

    Attributes:
        inputs: how to make each input, as expressions.
        layers: constructor expressions of its submodules, by name.
        lines: the body of forward.
        results: the names that it returns.
    """

    dtype: torch.dtype
    seed: int
    training: bool
    channels_last: bool
    inputs: list[str] = field(default_factory=list)
    layers: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    results: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """A script that defines ``Model`` and ``inputs``."""
        names = ", ".join(f"x{i}" for i in range(len(self.inputs)))
        body = "\n".join(f"        {line}" for line in self.lines)
        layers = "\n".join(f"        self.{name} = {made}" for name, made in self.layers.items())
        values = "\n".join(f"x{i} = {made}" for i, made in enumerate(self.inputs))
        return (
            f"import torch, torch.nn.functional as F\nfrom torch import nn\n\n\nclass Model(nn.Module):\n"
            f"    def __init__(self):\n        super().__init__()\n{layers}\n\n    def forward(self, {names}):\n{body}\n"
            f"        return {', '.join(self.results)},\n\n\ntorch.manual_seed({self.seed})\n"
            f"model = Model().to({self.dtype}).train({self.training})\n{values}\ninputs = ({names},)\n"
        )

    def make(self) -> tuple[nn.Module, tuple[Tensor, ...]]:
        """The module and its inputs; always the same ones."""
        scope: dict[str, Any] = {"__name__": "drawn"}
        exec(compile(self.text, "<drawn>", "exec"), scope)
        model: nn.Module = scope["model"]
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and "weight" in name:  # tell channels apart
                parameter.data += torch.linspace(-0.3, 0.3, parameter.numel()).to(parameter.dtype)
            if parameter.dim() == 4 and self.channels_last:
                parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
        return model, scope["inputs"]

    def __repr__(self) -> str:
        return f"\n{self.text}"


class _Sketch:
    """A model being drawn, with the value of every name at hand."""

    def __init__(self, draw: Draw, model: Model) -> None:
        self.draw = draw
        self.model = model
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
        if not isinstance(value, Tensor) or value.numel() > MOST_ELEMENTS or value.dim() > 6:
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


def _template(sketch: _Sketch, templates: Sequence[str], x: str) -> None:
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


def _pointwise(sketch: _Sketch) -> None:
    x = sketch.pick()
    if x is not None:
        _template(sketch, (*SMOOTH, *KINKED, *(JUMPING * sketch.is_exact(x))), x)


def _kind(
    templates: Sequence[str], fits: Callable[[Tensor], bool] = lambda v: v.dim() > 0
) -> Callable[[_Sketch], None]:
    def step(sketch: _Sketch) -> None:
        x = sketch.pick(fits)
        if x is not None:
            _template(sketch, templates, x)

    return step


def _in_place(sketch: _Sketch) -> None:
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
    # a trial on copies that alias each other as the values do
    copies = _copied(sketch.values)
    try:
        with torch.no_grad():
            exec(line, sketch.scope, copies)
    except (RuntimeError, IndexError):
        return
    if any(
        value.is_floating_point() and not bool((value.isfinite() & (value.abs() < 1e3)).all())
        for value in copies.values()
    ):
        return
    if any(not torch.equal(copies[name], sketch.values[name]) for name in sketch.exact):
        sketch.exact = {name for name in sketch.exact if torch.equal(copies[name], sketch.values[name])}
        if sketch.draw(st.integers(0, 5)):
            return  # writes an input, which is rare in models
    sketch.model.lines.append(line)
    sketch.values = {name: copies[name] for name in sketch.values}


def _copied(values: dict[str, Tensor]) -> dict[str, Tensor]:
    storages: dict[int, Tensor] = {}
    copies = {}
    for name, value in values.items():
        base = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage())  # type: ignore[call-overload]
        copy = storages.setdefault(value.untyped_storage()._cdata, base.clone())
        copies[name] = copy.as_strided(value.shape, value.stride(), value.storage_offset())
    return copies


def _binary(sketch: _Sketch) -> None:
    x = sketch.pick()
    if x is None:
        return
    shape, dtype = sketch.values[x].shape, sketch.values[x].dtype

    def fits(value: Tensor) -> bool:
        try:
            joint = torch.broadcast_shapes(shape, value.shape)
        except RuntimeError:
            return False
        return prod(joint) <= MOST_ELEMENTS and (value.dtype == dtype or value.dim() == 0)

    y = sketch.pick(fits, recent=False)
    if y is not None:
        pair = (x, y) if sketch.draw(st.booleans()) else (y, x)
        text = sketch.draw(st.sampled_from(BINARY))
        sketch.add(text.format(x=pair[0], y=pair[1]))


def _norm(sketch: _Sketch) -> None:
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
        momentum = draw(st.sampled_from([0.1, 0.7, None]))
        kinds += 2 * [
            f"nn.BatchNorm{rank}d({c}, eps=1e-2, affine={affine}, track_running_stats={track}, momentum={momentum})"
        ]
        if value.dim() > 2 and value[0, 0].numel() > 1:
            kinds += [f"nn.InstanceNorm{rank}d({c}, eps=1e-2, affine={affine}, track_running_stats={track})"]
    sketch.add(f"{sketch.layer(draw(st.sampled_from(kinds)), value)}({x})")


def _pool(sketch: _Sketch) -> None:
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


def _anchor(sketch: _Sketch) -> None:
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


def _odd(sketch: _Sketch) -> None:
    """What models do beside layers."""
    x = sketch.pick()
    if x is None:
        return
    _template(
        sketch,
        (
            "F.dropout({x}, 0.3, training=False)", "{x} + torch.tensor(0.5)", "{x} * torch.tensor(3)", "torch.zeros_like({x}) + {x}",
            "{x} + torch.arange({x}.shape[-1]).to({x}.dtype) * 0.1", "{x} * {x}.shape[0]", "{x} + torch.full({x}.shape, 0.2, dtype={x}.dtype)", "{x}.double().to({x}.dtype)",
            "{x} + torch.ones(1, dtype={x}.dtype)", "{x} + True", "{x}.type_as({x})", "torch.ones({x}.shape, dtype={x}.dtype) - {x}", "{x} + torch.linspace(0, 1, {x}.shape[-1], dtype={x}.dtype)",
            "{x} * torch.tensor(0.5, dtype=torch.float64)", "{x} + torch.eye({x}.shape[-1], dtype={x}.dtype)", "torch.einsum('...i,...i->...', {x}, {x}) * 0.1",
            "{x}.masked_fill(torch.ones({x}.shape[-2:], dtype=torch.bool).triu(1), float('-inf')).softmax(-1)", "torch.where(torch.arange({x}.shape[-1]) % 2 == 0, {x}, 0.0)",
            "F.scaled_dot_product_attention({x}, {x}, {x}) if {x}.dim() == 4 else {x}", "F.one_hot(torch.arange({x}.shape[-1])).to({x}.dtype) + {x}.unsqueeze(-1)", "F.glu(torch.cat([{x}, {x}], -1), -1)",
            "F.cosine_similarity({x}, {x} * 2 + 1, dim=-1)", "F.mse_loss({x}, {x} * 0.5)", "F.smooth_l1_loss({x}, {x} * 0.5, reduction='none')", "F.kl_div({x}.log_softmax(-1), {x}.softmax(-1), reduction='batchmean')",
            "{x}.cumsum(-1) * 0.1", "{x}.sort(-1).values", "{x}.gather(-1, torch.zeros({x}.shape, dtype=torch.int64))", "{x}.index_select(-1, torch.tensor([0]))", "F.local_response_norm({x}, 2) if {x}.dim() > 2 else {x}",
            "{x}.abs().amax(-1).to(torch.float64).to({x}.dtype)", "{x}.std(-1) if {x}.shape[-1] > 1 else {x}", "{x}.mean(dtype=torch.float64).to({x}.dtype)", "F.bilinear({x}, {x}, torch.full((2, {x}.shape[-1], {x}.shape[-1]), 0.1, dtype={x}.dtype))",
            "torch.meshgrid({x}.flatten()[:3], {x}.flatten()[:2], indexing='ij')[0]", "torch.outer({x}.flatten()[:5], {x}.flatten()[:7])", "{x}.as_strided({x}.shape, {x}.stride())",
            "torch.clamp({x}, min=torch.zeros((), dtype={x}.dtype))", "{x}.real", "torch.complex({x}, {x}).abs() if {x}.dtype.itemsize > 2 else {x}",
        ),
        x,
    )  # fmt: skip


def _whole_number(sketch: _Sketch) -> None:
    """Integers and booleans made of an input, and floats of them."""
    names = [name for name in sketch.values if sketch.is_exact(name)]
    if not names:
        return
    x = sketch.draw(st.sampled_from(names))
    _template(
        sketch,
        (
            "({x} > 0).sum(-1).to({x}.dtype) * 0.1", "({x} * 4).to(torch.int64).sum(0).to({x}.dtype) * 0.1", "({x} > 0.3).any(-1).to({x}.dtype)", "({x} > -0.3).all(0).to({x}.dtype)",
            "{x}.argmax(-1).to({x}.dtype) * 0.1", "(({x} * 8).to(torch.int32) & 3).to({x}.dtype)", "(({x} * 8).to(torch.int16) // 3).to({x}.dtype)", "(({x} * 8).to(torch.int64) % 3).to({x}.dtype)",
            "(({x} * 8).to(torch.int8) * 2).to({x}.dtype)", "(~({x} > 0)).to({x}.dtype)", "(({x} > 0) ^ ({x} > 1)).to({x}.dtype)", "({x} == {x}.round()).to({x}.dtype)", "(({x} * 8).to(torch.int32) >> 1).to({x}.dtype)",
            "{x}.bool().to({x}.dtype)", "({x} * 3).to(torch.int64).to({x}.dtype) + {x}", "({x} * 3).abs().to(torch.uint8).amax(-1).to({x}.dtype)", "({x} > 0).to(torch.int32).cumsum(-1).to({x}.dtype)", "torch.div(({x} * 9).to(torch.int64), 2, rounding_mode='trunc').to({x}.dtype)",
            "({x} * 9).to(torch.int64)", "{x} > 0.25", "({x} * 5).to(torch.int32).amax(0)", "({x} > 0).sum(0)", "{x}.argmin(0, keepdim=True)", "({x} * 5).to(torch.int8).sum(-1)", "({x} > 0).prod(-1)",
        ),
        x,
    )  # fmt: skip


STEPS: tuple[Callable[[_Sketch], None], ...] = (
    _pointwise, _pointwise, _pointwise, _binary, _binary, _kind(ALONG), _kind(REDUCTIONS), _kind(VIEWS), _kind(VIEWS), _kind(WHOLE, lambda v: True), _kind(ALGEBRA), _kind(ALGEBRA),
    _norm, _norm, _pool, _anchor, _odd, _in_place, _whole_number,
)  # fmt: skip

DTYPES = (torch.float32, torch.float32, torch.float64, torch.float64, torch.float16, torch.bfloat16)


@st.composite
def models(draw: st.DrawFn, most_steps: int = 14) -> Model:
    """Models of one dtype over inputs with all kinds of shapes and strides."""
    dtype = draw(st.sampled_from(DTYPES))
    model = Model(dtype, draw(st.integers(0, 99)), draw(st.booleans()), draw(st.booleans()))
    sketch = _Sketch(draw, model)
    for number in range(draw(st.integers(1, 2))):
        made = _input(draw, model, number)
        model.inputs.append(made)
        torch.manual_seed(model.seed + number)
        sketch.values[f"x{number}"] = eval(made, sketch.scope)
        sketch.exact.add(f"x{number}")
    torch.manual_seed(model.seed)
    steps = draw(st.lists(st.sampled_from(STEPS), min_size=1, max_size=most_steps))
    for step in steps:
        step(sketch)
    made = [name for name in sketch.values if name.startswith("v")]
    if not made:
        model.lines.append("v = x0 * 2")
        made = ["v"]
    extra = draw(st.lists(st.sampled_from(made), max_size=2))
    model.results = [made[-1], *extra]
    return model


def _input(draw: Draw, model: Model, number: int) -> str:
    sizes = st.sampled_from(SIZES) | (st.just(0) if draw(st.integers(0, 15)) == 0 else st.sampled_from(SIZES))
    shape = draw(st.lists(sizes, min_size=0 if number else 1, max_size=5))
    while prod(shape) > MOST_ELEMENTS // 4:
        shape[shape.index(max(shape))] //= 2
    if draw(st.integers(0, 20)) == 0:
        shape = [draw(st.sampled_from([4097, 9000, 16384]))]
    made = f"torch.randn({tuple(shape)}).to({model.dtype})"
    form = draw(st.sampled_from(["", "", "", "channels_last", "transposed", "strided", "offset", "expanded"]))
    if form == "channels_last" and len(shape) in (4, 5):
        made += f".contiguous(memory_format=torch.channels_last{'_3d' if len(shape) == 5 else ''})"
    elif form == "transposed" and len(shape) > 1:
        made += f".transpose(0, {len(shape) - 1}).contiguous().transpose(0, {len(shape) - 1})"
    elif form == "strided" and shape:
        made += ".repeat_interleave(2, -1)[..., ::2]"
    elif form == "offset" and shape:
        made = f"torch.randn({prod(shape) + 1}).to({model.dtype})[1:].view({tuple(shape)})"
    elif form == "expanded" and shape:
        made = f"torch.randn({(1, *shape[1:])}).to({model.dtype}).expand({tuple(shape)})"
    return made
