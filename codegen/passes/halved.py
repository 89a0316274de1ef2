"""Convolutions as matrix products of scaled halves; see `fusepass.codegen.passes.halves`.

Each sample is a product: its rows are output channels, its columns positions of the result, its terms kernel positions and input
channels. The packed input is its right operand as it lies: a column begins at its position, and its terms are further on by the
same steps everywhere, so that columns overlap in memory. Where neighbouring positions read neighbours, the packed input has planes of
8 channels each, and all of its places are columns, those between two rows of the result among them: so columns are neighbours in memory.
"""

from __future__ import annotations

from math import prod

from fusepass.codegen.ir.convolution import HALVES, Convolution, fill_halves
from fusepass.codegen.ir.dtype import Precision
from fusepass.codegen.ir.expr import Builder
from fusepass.codegen.ir.index import Axis, axis_index, contiguous_strides
from fusepass.codegen.ir.product import PLACE, Filling, Operand, Product, Runs, nested
from fusepass.codegen.ir.program import Buffer, Kernel, Program
from fusepass.codegen.passes.halved_kernel import Halved
from fusepass.codegen.passes.halves import Layout, Scales, Unscaled, as_halves, channels_last, in_places
from fusepass.codegen.passes.steps import Step, border_of, has_even_phases, planes_of, runs_of, step_of

_VECTOR = 4  # float32 numbers that are read at once
_MOST_ADDED = 1 / 8  # of the packed input
_MOST_TERMS = 32  # kernel positions along all axes, of an input that is not packed


def halved_of(
    program: Program,
    builder: Builder,
    anchor: Convolution,
    result: Buffer,
    *,
    by_phases: bool = False,
    by_positions: bool = False,
    in_runs: bool = False,
    packed: bool = False,
) -> Halved | None:
    """A product of halves for a convolution of halves, or one whose operands may be rounded to TF32; None where it would not pay or is
    not known.

    Rows are channels, each with its phases; if `by_phases`, phases, but for those along the last axis, each with its channels; if
    `by_positions`, positions of all samples. If `in_runs`, columns are neighbours in memory; see `Runs`. If `packed`, the input is, even
    where it could be read as it lies.
    """
    source, weight = program.buffer(anchor.source), program.buffer(anchor.weight)
    channels, are_halves = source.shape[1], source.dtype.is_half
    padded = -(-channels // HALVES) * HALVES
    if not are_halves and (anchor.precision is not Precision.TF32 or not fill_halves(channels)):
        return None
    if anchor.transposed and not has_even_phases(anchor, weight):
        return None
    steps = tuple(step_of(anchor, source, weight, result, axis) for axis in range(len(anchor.stride)))
    name = program.unused_prefix(f"{result.name}_halves")
    scales = as_halves(builder, name, source, weight, transposed=anchor.transposed)
    before, after = ([getattr(step, side) for step in steps] for side in ("before", "after"))
    first, runs = before[-1], _runs(source, steps, padded) if in_runs else None
    if in_runs and runs is None:
        return None
    lies = (
        are_halves
        and not (in_runs or packed)
        and lies_in_places(source)
        and sum(step.taps for step in steps) <= _MOST_TERMS
    )
    if runs is None:
        before[-1], after[-1] = _aligned(source.shape[-1], before[-1], after[-1])
    lying = in_places if runs else channels_last
    image, pack_image = source, tuple[Kernel, ...]()
    if not lies:
        image, pack_image = scales.pack_source(builder, f"{name}_input", lying(source.shape, before, after))
    some = runs.planes * PLACE if runs else padded
    taps, pack_taps = scales.pack_weight(
        builder,
        f"{name}_weight",
        _weight_layout(anchor, weight, steps, (padded, some), by_phases, by_positions),
    )
    planes = planes_of(source, steps) if runs else ()
    across = image.strides[2:] if lies else image.strides[2:-1] if runs else image.strides[1:-1]
    sizes = [step.taps for step in steps]
    terms = prod(sizes) * padded
    sizes_and_strides = [(step.positions, step.step * s) for step, s in zip(steps, across, strict=True)]
    if by_positions:
        sizes_and_strides.insert(0, (source.shape[0], image.strides[0]))
    positions = nested(*zip(*sizes_and_strides, strict=True))
    *outer, last = (step.apart * s for step, s in zip(steps, across, strict=True))
    inner = nested([*sizes[:-1], padded // some, sizes[-1], some], [*outer, some, last, 1])
    weights = Operand(taps.name, 0, terms, 1)
    if lies:
        offset = -sum(step.before * stride for step, stride in zip(steps, across, strict=True))
        border = border_of(steps, source.shape[2:], across, padded)
        found = Operand(image.name, image.strides[0], positions, inner, offset, border)
    else:
        found = Operand(
            image.name,
            image.strides[0],
            PLACE if runs else positions,
            runs.inner if runs else inner,
            (before[-1] - first) * across[-1],
        )
    product = Product(
        name=anchor.name,
        left=found if by_positions else weights,
        right=weights if by_positions else found,
        inner=terms,
        length=terms,
        dtype=image.dtype,
        apart=steps[-1].spread if by_phases else 0,
        runs=runs,
        filling=_filling(source, steps, scales, runs),
    )
    kernels = (*pack_image, *scales.kernels, pack_taps)
    buffers = (*scales.buffers, taps, *(() if lies else (image,)))
    return Halved(anchor, product, scales, kernels, buffers, steps, across, planes, by_positions)


def _filling(source: Buffer, steps: tuple[Step, ...], scales: Scales | Unscaled, runs: Runs | None) -> Filling | None:
    """What a product could make its right operand of; None where the scales are not guessed, or images do not lie in one piece."""
    if runs is None or isinstance(scales, Unscaled) or not scales.again or runs.planes * PLACE != source.shape[1]:
        return None
    image = source.shape[2:]
    if source.strides[2:] != contiguous_strides(image) or any(min(step.before, step.after) < 0 for step in steps):
        return None
    padded = planes_of(source, steps)
    return Filling(
        source=source.name,
        sample=source.strides[0],
        channel=source.strides[1],
        image=tuple((size, step.before, whole) for size, step, whole in zip(image, steps, padded, strict=True)),
        factors=(scales.factors[0].name, scales.factors[1].name),
        overflow_flag=scales.flag,
    )


def lies_in_places(source: Buffer) -> bool:
    """Whether the channels of each position of a tensor are neighbours, and whole places."""
    _, channels, *_ = source.shape
    steps = (source.strides[0], *source.strides[2:])
    return channels % PLACE == 0 and source.strides[1] == 1 and not any(step % PLACE for step in steps)


def _runs(source: Buffer, steps: tuple[Step, ...], padded: int) -> Runs | None:
    """How the columns lie if they are neighbours in memory; None where that is not known to pay."""
    if any(step.step > 1 for step in steps):
        return None
    planes = planes_of(source, steps)
    taps = [(step.taps, step.apart) for step in steps]
    return runs_of(planes, [step.positions for step in steps], taps, padded)


def _aligned(size: int, before: int, after: int) -> tuple[int, int]:
    """The border before and after rows of `size` numbers so that they are read in vectors, if that adds little to it."""
    wide = -(-before // _VECTOR) * _VECTOR
    rest = -(-(size + wide + after) // _VECTOR) * _VECTOR - size - wide
    fits = size % _VECTOR == 0 and before >= 0 and rest >= 0
    little = wide + rest - before - after <= _MOST_ADDED * (size + before + after)
    return (wide, rest) if fits and little else (before, after)


def _weight_layout(
    anchor: Convolution,
    weight: Buffer,
    steps: tuple[Step, ...],
    channels: tuple[int, int],
    by_phases: bool,
    by_positions: bool,
) -> Layout:
    """(output channel, *phases, *taps, input channel), or the channel before the last axis' phases, or behind all.

    Of all input `channels`, some stand together behind the taps of the last axis, the others before these.
    """
    padded, some = channels
    out, block, channel = Axis("ho", weight.shape[int(anchor.transposed)]), Axis("hb", padded // some), Axis("hc", some)
    at = axis_index(block) * some + axis_index(channel)
    taps = tuple(Axis(f"ht{number}", step.taps) for number, step in enumerate(steps))
    phases = tuple(Axis(f"hs{number}", step.spread) for number, step in enumerate(steps))
    places = [
        axis_index(tap) * step.along_tap + axis_index(phase) * step.along_phase + step.start
        for tap, phase, step in zip(taps, phases, steps, strict=True)
    ]
    both = [at, axis_index(out)] if anchor.transposed else [axis_index(out), at]
    inside = len(phases) if by_positions else len(phases) - 1 if by_phases else 0
    rows = (*phases[:inside], out, *phases[inside:])
    blocks = (block,) if block.size > 1 else ()
    return Layout((*rows, *taps[:-1], *blocks, taps[-1], channel), (*both, *places))
