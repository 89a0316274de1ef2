"""Index expressions keep their value in normal form, know their bounds, and cancel what reshapes leave behind."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusepass.codegen.ir.index import (
    Axis,
    Bound,
    FloorDiv,
    Index,
    Mod,
    axis_index,
    contiguous_strides,
    delinearize,
    linear,
)

Point = Mapping[Axis, int]
SIZES = (1, 2, 3, 4, 6)
DIVISORS = (1, 2, 3, 4, 6, 8, 12)


def value(index: Index, point: Point) -> int:
    """`index` at `point`, by plain arithmetic on its atoms."""
    total = index.constant
    for atom, factor in index.terms:
        if isinstance(atom, Axis):
            total += factor * point[atom]
        else:
            inner = value(atom.index, point)
            total += factor * (inner // atom.divisor if isinstance(atom, FloorDiv) else inner % atom.divisor)
    return total


def points(axes: tuple[Axis, ...]) -> Iterator[Point]:
    for at in product(*(range(axis.size) for axis in axes)):
        yield dict(zip(axes, at, strict=True))


@dataclass(frozen=True)
class Drawn:
    """An index made with the operators, and the same computed with Python's integers."""

    axes: tuple[Axis, ...]
    index: Index
    plain: Callable[[Point], int]


@st.composite
def drawn(draw: st.DrawFn, prefix: str = "a") -> Drawn:
    axes = tuple(Axis(f"{prefix}{n}", draw(st.sampled_from(SIZES))) for n in range(3))
    constant = draw(st.integers(-7, 7))
    pool: list[tuple[Index, Callable[[Point], int]]] = [
        *((axis_index(axis), lambda p, axis=axis: p[axis]) for axis in axes),
        (Index(constant), lambda p: constant),
    ]
    for _ in range(draw(st.integers(1, 8))):
        x, plain = draw(st.sampled_from(pool))
        op = draw(st.sampled_from("+-*/%"))
        if op in "+-":
            y, other = draw(st.sampled_from(pool))
            made = (
                (x + y, lambda p, f=plain, g=other: f(p) + g(p))
                if op == "+"
                else (x - y, lambda p, f=plain, g=other: f(p) - g(p))
            )
        else:
            by = draw(st.sampled_from(DIVISORS))
            made = {
                "*": lambda x=x, f=plain, by=by: (x * by, lambda p: f(p) * by),
                "/": lambda x=x, f=plain, by=by: (x // by, lambda p: f(p) // by),
                "%": lambda x=x, f=plain, by=by: (x % by, lambda p: f(p) % by),
            }[op]()
        pool.append(made)
    return Drawn(axes, *pool[-1])


@given(drawn())
def test_normal_form_keeps_the_value_within_its_bounds(d: Drawn) -> None:
    low, high = d.index.bounds
    least, most = d.index.tight_bounds
    assert low <= least <= most <= high
    for point in points(d.axes):
        assert value(d.index, point) == d.plain(point), str(d.index)
        assert least <= d.plain(point) <= most


def test_bounds_of_terms_that_share_an_axis() -> None:
    i = axis_index(Axis("i", 2))
    index = i * -3 + (i + 1) // 2 + 2
    assert index.bounds == (-1, 3)
    assert index.tight_bounds == (0, 2)


@given(drawn(), drawn(prefix="b"), st.integers(0, 2))
def test_substitution_commutes_with_evaluation(d: Drawn, by: Drawn, which: int) -> None:
    replaced = d.index.substitute({d.axes[which]: by.index % d.axes[which].size})
    for point in points((*d.axes, *by.axes)):
        inside = value(by.index, point) % d.axes[which].size
        assert value(replaced, point) == d.plain({**point, d.axes[which]: inside})


@given(drawn(), st.sampled_from(DIVISORS))
def test_quotient_and_remainder_recombine(d: Drawn, by: int) -> None:
    assert (d.index // by) * by + d.index % by == d.index


@given(drawn())
def test_stride_is_the_change_per_step(d: Drawn) -> None:
    for axis in d.axes:
        stride = d.index.stride(axis)
        if stride is None:
            continue
        for point in points(d.axes):
            if point[axis] + 1 < axis.size:
                assert d.plain({**point, axis: point[axis] + 1}) - d.plain(point) == stride


@given(st.lists(st.sampled_from((1, 2, 3, 5)), min_size=1, max_size=4))
def test_delinearize_undoes_linear(shape: list[int]) -> None:
    axes = tuple(Axis(f"d{n}", size) for n, size in enumerate(shape))
    coordinates = tuple(map(axis_index, axes))
    assert delinearize(linear(coordinates, contiguous_strides(shape)), shape) == coordinates


@given(st.permutations([2, 3, 4]), st.permutations([2, 3, 4]))
def test_reshape_there_and_back_disappears(first: list[int], second: list[int]) -> None:
    coordinates = tuple(axis_index(Axis(f"d{n}", size)) for n, size in enumerate(first))
    there = delinearize(linear(coordinates, contiguous_strides(first)), second)
    assert delinearize(linear(there, contiguous_strides(second)), first) == coordinates


def test_group_norm_channels() -> None:
    """The channel of an element of a group, which must not be computed by division per element."""
    n, g, r = Axis("n", 4), Axis("g", 8), Axis("r", 8 * 36)
    flat = linear([axis_index(n), axis_index(g), axis_index(r)], (8 * 8 * 36, 8 * 36, 1))
    batch, channel, _, _ = delinearize(flat, (4, 64, 6, 6))
    assert str(batch) == "n"
    assert str(channel) == "8*g + (r // 36)"
    assert str(channel // 8) == "g"


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_flipped_axis_fits_its_dimension(size: int) -> None:
    flipped = axis_index(Axis("i", size)) * -1 + (size - 1)
    outer = axis_index(Axis("n", 5))
    assert (outer * size + flipped) // size == outer
    assert (outer * size + flipped) % size == flipped


def test_positions_of_an_empty_shape() -> None:
    assert delinearize(axis_index(Axis("d0", 3)), (3, 0, 2)) == delinearize(axis_index(Axis("d0", 3)), (3, 1, 2))


def test_axis_of_one_is_zero() -> None:
    assert axis_index(Axis("i", 1)) == Index()


@pytest.mark.parametrize("divisor", [0, -2])
def test_divisor_is_positive(divisor: int) -> None:
    with pytest.raises(ValueError, match=f"divisor must be positive, got {divisor}"):
        axis_index(Axis("i", 4)) // divisor


def test_multiplying_by_zero_forgets_the_axes() -> None:
    assert (axis_index(Axis("i", 4)) * 0) == Index()


@pytest.mark.parametrize(("low", "high", "always"), [(0, 8, True), (0, 7, False), (1, 8, False), (-3, 20, True)])
def test_bound_that_always_holds(low: int, high: int, always: bool) -> None:
    assert Bound(axis_index(Axis("i", 8)), low, high).always is always


def test_text_is_ordered_by_coefficient() -> None:
    i, j = axis_index(Axis("i", 4)), axis_index(Axis("j", 5))
    assert str(j + i * 5 + 2) == str(i * 5 + j + 2) == "5*i + j + 2"
    assert str(Index()) == "0"


@pytest.mark.parametrize(
    ("index", "narrow"),
    [
        (axis_index(Axis("i", 1 << 31)), True),
        (axis_index(Axis("i", (1 << 31) + 1)), False),
        (axis_index(Axis("i", 1 << 30)) * 4 - (1 << 31), False),  # what is added to the constant does not fit
        (axis_index(Axis("i", 1 << 30)) * 2 - (1 << 30), True),
        ((axis_index(Axis("i", 1 << 31)) * 3 + 1) % 7, False),  # nor what is divided
    ],
)
def test_whether_32_bits_are_enough(index: Index, narrow: bool) -> None:
    assert index.narrow is narrow


def test_a_remainder_of_a_remainder_stays_where_32_bits_would_not_be_enough() -> None:
    for size, stays in ((1 << 20, False), (1 << 31, True)):
        i = axis_index(Axis("i", size))
        ((atom, _),) = (((i % 32) * 2 + 3) % 4).terms
        assert isinstance(atom, Mod)
        ((below, _),) = atom.index.terms
        assert isinstance(below, Mod) is stays


def test_a_remembered_hash_stays_in_its_process() -> None:
    index = axis_index(Axis("i", 12)) // 5 * 3 + 1
    assert hash(index) == hash(axis_index(Axis("i", 12)) // 5 * 3 + 1)
    assert b"_hash" not in pickle.dumps(index)
    assert pickle.loads(pickle.dumps(index)) == index
