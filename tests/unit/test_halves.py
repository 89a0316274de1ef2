"""A convolution's operands as scaled halves: their values, and the scales that they come with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from fusepass.codegen.ir.dtype import DType
from fusepass.codegen.ir.expr import Builder
from fusepass.codegen.ir.index import Axis, axis_index, contiguous_strides
from fusepass.codegen.ir.program import Buffer, Program, Role
from fusepass.codegen.ir.verify import verify
from fusepass.codegen.passes.halves import LOW_SHIFT, Layout, Scales, channels_last, scales_of
from tests.support.interpret import interpret
from tests.support.numpy_ops import Array


@dataclass(frozen=True)
class Halved:
    """The operands as a program left them, float64: the input without its border, the weight as (out, in, places), the scale of the
    result as (samples, out)."""

    source: Array
    weight: Array
    scale: Array
    border: Array


NEVER = 1 << 62  # bytes of an input from which scales are guessed


def packed_program(
    shape: tuple[int, ...], weight: tuple[int, ...], *, transposed: bool = False, parts: int = 1, least: int = NEVER
) -> tuple[Program, Scales]:
    b = Builder()
    x = Buffer("x", DType.F32, shape, contiguous_strides(shape), Role.INPUT)
    w = Buffer("w", DType.F32, weight, contiguous_strides(weight), Role.INPUT)
    scales = scales_of(b, "conv", x, w, transposed=transposed, least=least)
    spatial = len(shape) - 2
    layout = channels_last(shape, (1,) * spatial, (2,) * spatial, parts=parts)
    source, pack_source = scales.pack_source(b, "conv_source", layout)
    axes = tuple(Axis(f"w{number}", size) for number, size in enumerate(weight))
    part = Axis("part", parts)
    at = Layout((*axes, part), tuple(map(axis_index, axes)), axis_index(part) if parts > 1 else None)
    packed, pack_weight = scales.pack_weight(b, "conv_weight", at)
    results = [
        Buffer(each.name, each.dtype, each.shape, each.strides, Role.OUTPUT)
        for each in (source, packed, *scales.result)
    ]
    kept = [each for each in scales.buffers if each not in scales.result]
    kernels = (*pack_source, *scales.kernels, pack_weight)
    program = Program("halved", (x, w, *kept, *results), ("x", "w"), tuple(each.name for each in results), (), kernels)
    verify(program)
    return program, scales


def halved(
    x: Array,
    w: Array,
    *,
    transposed: bool = False,
    parts: int = 1,
    low: float = 2.0**-LOW_SHIFT,
    least: int = NEVER,
) -> Halved:
    """The operands of ``parts`` halves each, the second times `low`."""
    program, scales = packed_program(x.shape, w.shape, transposed=transposed, parts=parts, least=least)
    found = interpret(program, {"x": x.ravel(), "w": w.ravel()})
    memory = {name: found[name].reshape(program.buffer(name).shape).astype(np.float64) for name in program.outputs}
    source = memory["conv_source"]
    if parts > 1:
        source = source[..., 0, :] + source[..., 1, :] * low
    inside = source[(slice(None), *(slice(1, 1 + size) for size in x.shape[2:]), slice(x.shape[1]))]
    border = source.copy()
    border[(slice(None), *(slice(1, 1 + size) for size in x.shape[2:]), slice(x.shape[1]))] = 0
    weight = memory["conv_weight"]
    weight = weight[..., 0] + (weight[..., 1] * low if parts > 1 else 0)
    if transposed:
        weight = weight.swapaxes(0, 1)
    scale = memory[scales.result[0].name] * memory[scales.result[1].name]
    return Halved(np.moveaxis(inside, -1, 1), weight, scale, border)


GUESSED = {
    "1d": ((3, 5, 2100), (4, 5, 3)),
    "2d": ((2, 9, 33, 6), (3, 9, 2, 3)),
    "3d": ((2, 16, 3, 40, 5), (5, 16, 1, 2, 2)),
    "3d, planes": ((2, 16, 50, 4, 5), (5, 16, 1, 2, 2)),
}


@pytest.mark.parametrize("name", GUESSED)
def test_large_inputs_are_packed_by_guesses_from_some_rows(name: str) -> None:
    shape, weight = GUESSED[name]
    x, w = operands(5, shape, weight)
    scale = 2.0 ** np.random.default_rng(1).integers(-9, 9, (shape[0], shape[1], *(1,) * len(shape[2:])))
    x = (x * scale).astype(np.float32)
    assert not packed(x, w, 0)["conv_alarm"][0]
    found = halved(x, w, least=0)
    assert 2.0**8 <= np.abs(found.source).max() <= 2.0**12
    product = np.einsum("nca,ocb->nocab", _flat(x.astype(np.float64)), _flat(w.astype(np.float64)))
    largest = np.abs(product).max((2, 3, 4), keepdims=True)
    assert (np.abs(restored(found) - product) <= 2.0**-10 * np.abs(product) + 2.0**-28 * largest).all()


def _beyond(x: Array) -> None:
    x[0, 1, 0, 0, 1] = 2.0**8 * np.abs(x).max()


def _empty_sample(x: Array) -> None:
    x[1] = 0
    x[1, 3, 0, 1, 1] = 1e-30


def _empty_channel(x: Array) -> None:
    x[:, 4] = 0
    x[0, 4, 1, 1, 1] = -(2.0**3) * np.abs(x).max()


def _empty_both(x: Array) -> None:
    x[1], x[:, 4] = 0, 0
    x[1, 4, 2, 1, 1] = np.inf


@pytest.mark.parametrize("change", [_beyond, _empty_sample, _empty_channel, _empty_both])
def test_an_alarm_where_a_guess_is_wrong(change: Callable[[Array], None]) -> None:
    """Then all is as if nothing had been guessed."""
    shape, weight = GUESSED["3d"]
    x, w = operands(6, shape, weight)
    change(x)
    found, exact = (packed(x, w, least) for least in (0, NEVER))
    assert found["conv_alarm"][0]
    for name in ("conv_source", "conv_weight", "conv_result_beyond", "conv_result"):
        np.testing.assert_array_equal(found[name], exact[name])


@pytest.mark.parametrize("seen", [0.0, 1e-5, 1e-3])
def test_no_alarm_for_channels_that_are_nearly_dead(seen: float) -> None:
    """Behind a ReLU: next to nothing where it is looked at, and elsewhere a few numbers of any size."""
    shape, weight = GUESSED["2d"]
    x, w = operands(8, shape, weight)
    x[:, 3] *= np.random.default_rng(2).random(x[:, 3].shape) < 0.05
    x[:, 3, 8::16] = seen
    assert not packed(x, w, 0)["conv_alarm"][0]
    found = halved(x, w, least=0)
    product = np.einsum("nca,ocb->nocab", _flat(x.astype(np.float64)), _flat(w.astype(np.float64)))
    largest = np.abs(product).max((2, 3, 4), keepdims=True)
    assert (np.abs(restored(found) - product) <= 2.0**-10 * np.abs(product) + 2.0**-35 * largest).all()


@pytest.mark.parametrize("tiny", [0.0, 2.0**-149, 2.0**-120])
def test_no_alarm_for_zeros_and_what_is_tiny(tiny: float) -> None:
    shape, weight = GUESSED["2d"]
    x, w = operands(7, shape, weight)
    x[0] = tiny * np.sign(x[0])
    x[0, :, 8::16] = 0
    x[:, 7] = 0
    x[1, 2, 8, 0] = np.nan
    assert not packed(x, w, 0)["conv_alarm"][0]
    found = halved(x, w, least=0)
    product = np.einsum("nca,ocb->nocab", _flat(x[:1].astype(np.float64)), _flat(w.astype(np.float64)))
    least = 2.0**-150 * np.abs(w).max()  # half of the smallest number
    assert (np.abs(restored(found)[:1] - product) <= 2.0**-10 * np.abs(product) + least).all()


def test_inputs_of_few_rows_are_read_whole() -> None:
    for shape in ((2, 9, 12, 900), (2, 9, 900), (2, 9, 8, 10, 900)):
        _, scales = packed_program(shape, (3, 9, *(1,) * (len(shape) - 2)), least=0)
        assert not scales.again


def packed(x: Array, w: Array, least: int) -> dict[str, Array]:
    """What a program leaves in memory."""
    program, _ = packed_program(x.shape, w.shape, least=least)
    return interpret(program, {"x": x.ravel(), "w": w.ravel()})


def operands(seed: int, shape: tuple[int, ...], weight: tuple[int, ...]) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal(shape).astype(np.float32), rng.standard_normal(weight).astype(np.float32)


def restored(found: Halved) -> Array:
    """``x w`` for each sample, element of the input, output channel and place."""
    product = np.einsum("nca,ocb->nocab", _flat(found.source), _flat(found.weight))
    return product * found.scale[:, :, None, None, None]


def _flat(values: Array) -> Array:
    return values.reshape(*values.shape[:2], -1)


SHAPES = {
    "1d": ((3, 5, 11), (4, 5, 3), False),
    "2d": ((2, 9, 5, 6), (3, 9, 2, 3), False),
    "3d": ((2, 16, 3, 4, 5), (5, 16, 1, 2, 2), False),
    "transposed": ((2, 9, 5, 6), (9, 3, 2, 3), True),
}


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("name", SHAPES)
def test_products_are_those_of_rounded_operands(name: str, parts: int) -> None:
    shape, weight, transposed = SHAPES[name]
    x, w = operands(0, shape, weight)
    scale = 2.0 ** np.random.default_rng(1).integers(-20, 20, (shape[0], shape[1], *(1,) * len(shape[2:])))
    x = (x * scale).astype(np.float32)
    found = halved(x, w, transposed=transposed, parts=parts)
    turned = w.swapaxes(0, 1) if transposed else w
    exact = np.einsum("nca,ocb->nocab", _flat(x.astype(np.float64)), _flat(turned.astype(np.float64)))
    largest = np.abs(exact).max((2, 3, 4), keepdims=True)
    tolerance = 2.0 ** (-10 if parts == 1 else -20)
    assert (np.abs(restored(found) - exact) <= tolerance * np.abs(exact) + 2.0**-30 * largest).all()
    assert (found.border == 0).all()
    assert 2.0**12 <= np.abs(found.source).max() <= 2.0**15
    assert 2.0**12 <= np.abs(found.weight).max() <= 2.0**15


@pytest.mark.parametrize("of_sample", [-90, -60, 0, 60, 90])
@pytest.mark.parametrize("of_channel", [-30, 0, 20])
@pytest.mark.parametrize("of_out", [-90, 0, 90])
def test_scales_of_samples_and_channels_cost_no_digits(of_sample: int, of_channel: int, of_out: int) -> None:
    x, w = operands(2, (3, 8, 7, 6), (4, 8, 3, 3))
    plain = restored(halved(x, w))
    x[1] *= 2.0**of_sample
    x[:, 3] *= 2.0**of_channel
    w[:, 3] *= 2.0**-of_channel
    w[2] *= 2.0**of_out
    found = halved(x, w)
    scaled = restored(found)
    scaled[1] *= 2.0**-of_sample
    scaled[:, 2] *= 2.0**-of_out
    largest = np.abs(plain).max((2, 3, 4), keepdims=True)
    assert (np.abs(scaled - plain) <= 2.0**-10 * np.abs(plain) + 2.0**-30 * largest).all()


@pytest.mark.parametrize("extreme", [2.0**-149, 2.0**-130, 2.0**-118, 2.0**120, 2.0**126])
def test_extreme_numbers(extreme: float) -> None:
    x, w = operands(3, (2, 8, 4, 4), (3, 8, 2, 2))
    x = (np.sign(x) * (1 + np.abs(x) % 1) * extreme).astype(np.float32)
    for left, right in ((x, w), (x, (w / max(np.abs(x).max(), 2.0**-120)).astype(np.float32)), (x * np.float32(0), w)):
        found = halved(left, right)
        assert np.isfinite(found.source).all()
        assert np.isfinite(found.weight).all()
        exact = np.einsum("nca,ocb->nocab", _flat(left.astype(np.float64)), _flat(right.astype(np.float64)))
        largest = np.abs(exact).max((2, 3, 4), keepdims=True)
        assert (np.abs(restored(found) - exact) <= 2.0**-10 * np.abs(exact) + 2.0**-23 * largest).all()


@pytest.mark.parametrize("parts", [1, 2])
def test_what_is_not_finite_stays_and_what_is_not_zero_becomes_none(parts: int) -> None:
    x, w = operands(4, (2, 8, 4, 4), (3, 8, 2, 2))
    x[0, 1, 2, 3], x[0, 2, 0, 0], x[1, 0, 1, 1], x[1, 5] = np.inf, np.nan, -np.inf, np.inf
    x[1, 3, 0, 0], x[1, 3, 0, 1] = 1e-30, 0
    w[1, 1, 0, 0], w[1, 2, 0, 1], w[2, 5, 0, 0] = np.nan, -1e-25, -np.inf
    found = halved(x, w, parts=parts, low=0)
    for given, kept in ((x, found.source), (w, found.weight)):
        assert (np.isnan(kept) == np.isnan(given)).all()
        assert (np.isinf(kept) == np.isinf(given)).all()
        assert (np.sign(kept[~np.isnan(given)]) == np.sign(given[~np.isnan(given)])).all()
    assert np.isfinite(found.scale).all()
