"""Draws models as the text of a forward method, so that a failing one can be read and pasted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
from hypothesis import strategies as st

from tests.property import kinds, state, steps, windows
from tests.property.script import FORMS, Model
from tests.property.steps import Draw, Sketch

Step = Callable[[Sketch], None]

STEPS: tuple[Step, ...] = (*steps.STEPS, *windows.STEPS, *kinds.STEPS, *state.STEPS)
SIZES = (1, 2, 3, 4, 5, 7, 8, 13, 16, 31, 64)
MOST_ELEMENTS = 20_000
LONG = ([4097], [9000], [16384])
LARGE = (
    *LONG,
    [65_537],
    [2, 20_011],
    [257, 263],
    [20_011, 3],
    [1, 4099, 13],
    [2, 8, 61, 67],
    [3, 5, 4096],
    [512, 2, 9, 8],
)
"""Shapes beyond a tile, a thread block or a row of a cache, many of them primes."""
OTHER_TYPES = (
    "torch.bool", "torch.uint8", "torch.int8", "torch.int16", "torch.int32", "torch.int64", "torch.int64",
    "torch.float16", "torch.bfloat16", "torch.float32", "torch.float64",
)  # fmt: skip
"""Of the second and third input, now and then."""
FORMS_OF_INPUTS = (
    "", "", "", "", "channels_last", "transposed", "permuted", "strided", "offset", "sliced", "expanded", "overlapping",
)  # fmt: skip
DTYPES = (torch.float32, torch.float32, torch.float64, torch.float64, torch.float16, torch.bfloat16)


@st.composite
def models(
    draw: st.DrawFn, most_steps: int = 14, large: bool = False, among: Sequence[Step] = STEPS, least_steps: int = 1
) -> Model:
    """Models of one dtype over inputs with all kinds of shapes and strides; with `large` ones among them or not; of steps `among` these."""
    dtype = draw(st.sampled_from(DTYPES))
    model = Model(dtype, draw(st.integers(0, 99)), draw(st.booleans()), draw(st.booleans()))
    sketch = Sketch(draw, model, MOST_ELEMENTS)
    for number in range(draw(st.sampled_from([1, 1, 2, 2, 2, 3]))):
        made = _input(draw, model, number, large)
        model.inputs.append(made)
        torch.default_generator.manual_seed(model.seed + number)
        sketch.values[f"x{number}"] = value = eval(made, sketch.scope, dict(sketch.values))
        sketch.most = max(sketch.most, 3 * value.numel())
        sketch.exact.add(f"x{number}")
    torch.default_generator.manual_seed(model.seed)  # of the CPU: asking for those of all devices takes milliseconds
    count = draw(st.integers(least_steps, most_steps))  # lists of any length would be short ones mostly
    for step in draw(st.lists(st.sampled_from(among), min_size=count, max_size=count)):
        step(sketch)
    made = [name for name in sketch.values if name.startswith("v")]
    if not made:
        model.lines.append("v = x0 * 2")
        made = ["v"]
    extra = draw(
        st.lists(st.sampled_from([*made, *sketch.values] if draw(st.integers(0, 7)) == 0 else made), max_size=2)
    )
    model.results = [made[-1], *extra]
    model.form = draw(st.sampled_from(FORMS))
    return model


@st.composite
def marked_models(draw: st.DrawFn, most_steps: int = 14, large: bool = False) -> Model:
    """As `models`; every sixth has a NaN or an infinity in an input, unless C++ leaves open what becomes of it."""
    model = draw(models(most_steps, large))
    if draw(st.integers(0, 5)) == 5 and "torch.int" not in model.text and "torch.uint" not in model.text:
        _, inputs = model.make()
        number = draw(st.integers(0, len(inputs) - 1))
        if inputs[number].numel() and inputs[number].is_floating_point():
            place = tuple(draw(st.integers(0, size - 1)) for size in inputs[number].shape)
            means = model.training and "track_running_stats=True" in model.text  # of infinities: README.md
            mark = draw(st.sampled_from(["nan"] if means else ["nan", "inf", "-inf"]))
            model.marks.append(f"x{number}[{place}] = float('{mark}')")
    return model


def _input(draw: Draw, model: Model, number: int, large: bool) -> str:
    if number and draw(st.integers(0, 7)) == 7:
        return str(draw(st.sampled_from(["x0", "x0.flatten()", "x0[..., :1]", "x0.mT if x0.dim() > 1 else x0"])))
    sizes = st.sampled_from(SIZES) | (st.just(0) if draw(st.integers(0, 15)) == 0 else st.sampled_from(SIZES))
    shape = draw(st.lists(sizes, min_size=0 if number else 1, max_size=5))
    while prod(shape) > MOST_ELEMENTS // 4:
        shape[shape.index(max(shape))] //= 2
    if draw(st.integers(0, 20)) == 0:
        shape = draw(st.sampled_from(LARGE if large else LONG))
    dtype = str(model.dtype)
    if number and draw(st.integers(0, 3)) == 0:
        dtype = draw(st.sampled_from(OTHER_TYPES))
    whole = not getattr(torch, dtype.removeprefix("torch.")).is_floating_point

    def numbers(*sizes: int) -> str:
        if whole:
            return f"torch.randint({0 if dtype in ('torch.bool', 'torch.uint8') else -9}, {2 if dtype == 'torch.bool' else 10}, {sizes}).to({dtype})"
        return f"torch.randn({sizes}).to({dtype})"

    made = numbers(*shape)
    form = draw(st.sampled_from(FORMS_OF_INPUTS))
    if form == "channels_last" and len(shape) in (4, 5):
        made += f".contiguous(memory_format=torch.channels_last{'_3d' if len(shape) == 5 else ''})"
    elif form == "transposed" and len(shape) > 1:
        made += f".transpose(0, {len(shape) - 1}).contiguous().transpose(0, {len(shape) - 1})"
    elif form == "permuted" and len(shape) > 1:
        order = draw(st.permutations(range(len(shape))))
        made = (
            f"{numbers(*(shape[dim] for dim in order))}.permute({tuple(order.index(dim) for dim in range(len(shape)))})"
        )
    elif form == "strided" and shape:
        made += ".repeat_interleave(2, -1)[..., ::2]"
    elif form == "offset" and shape:
        made = f"{numbers(prod(shape) + 1)}[1:].view({tuple(shape)})"
    elif form == "sliced" and shape:
        made = f"{numbers(shape[0] + 1, *shape[1:-1], *(size + 2 for size in shape[1:][-1:]))}[1:{', ..., 1:-1' if len(shape) > 1 else ''}]"
    elif form == "expanded" and shape:
        axis = draw(st.integers(0, len(shape) - 1))
        made = f"{numbers(*shape[:axis], 1, *shape[axis + 1 :])}.expand({tuple(shape)})"
    elif form == "overlapping" and shape:
        strides = tuple(draw(st.integers(0, 3)) for _ in shape)
        extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        made = f"{numbers(max(extent, 1) + 1)}.as_strided({tuple(shape)}, {strides}, 1)"
    return made
