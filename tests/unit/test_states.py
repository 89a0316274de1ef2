"""Reduction states of templates/include: element by element, in groups, merged, in blocks, and rows side by side."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from fusepass.codegen.ir.expr import ReduceOp
from tests.support.numpy_ops import REDUCE, Array
from tests.support.probe import Probe, include_lines

NAN, INF = np.nan, np.inf
PLAIN = (ReduceOp.SUM, ReduceOp.PROD, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.MOMENTS, ReduceOp.SOFTMAX)
ARG = (ReduceOp.ARGMAX, ReduceOp.ARGMIN)
FEEDS = ("push", "push_many", "merge", "row", "long_row", "lanes")

TEXT = """
template <typename State> static void give(const State& state, double* result) {
    result[0] = double(state.template part<0>());
    result[1] = double(state.template part<1>());
}

template <typename State> static void push(const float* x, double* result, int64_t count) {
    State state;
    for (int64_t i = 0; i < count; ++i) state.push(x[i]);
    give(state, result);
}

template <typename State> static void push_many(const float* x, double* result, int64_t count) {
    State state;
    int64_t i = 0;
    for (; i + 4 <= count; i += 4) {
        const float values[4] = {x[i], x[i + 1], x[i + 2], x[i + 3]};
        state.push_many(values);
    }
    for (; i < count; ++i) state.push(x[i]);
    give(state, result);
}

// Three states and an empty one, merged as ((a, nothing), (b, c)).
template <typename State> static void merge(const float* x, double* result, int64_t count) {
    State parts[4];
    for (int64_t i = 0; i < count; ++i) parts[i * 3 / count == 0 ? 0 : 1 + i * 3 / count].push(x[i]);
    parts[0].merge(parts[1]);
    parts[2].merge(parts[3]);
    parts[0].merge(parts[2]);
    give(parts[0], result);
}

template <typename State> static void row(const float* x, double* result, int64_t count) {
    fp::Row<State> state;
    for (int64_t i = 0; i < count; i += 100) state.push(std::min<int64_t>(100, count - i), x + i);
    give(state, result);
}

template <typename State> static void long_row(const float* x, double* result, int64_t count) {
    fp::Row<State> state;
    for (int64_t i = 0; i < count; i += 1000) state.push(std::min<int64_t>(1000, count - i), x + i);
    give(state, result);
}

// The row stands on lane 3; others hold something else.
template <typename State> static void lanes(const float* x, double* result, int64_t count) {
    fp::Lanes<State, 8> state;
    for (int64_t i = 0; i < count; i += 5) {
        float panel[5][8];
        const int64_t size = std::min<int64_t>(5, count - i);
        for (int64_t j = 0; j < size; ++j) {
            for (int lane = 0; lane < 8; ++lane) panel[j][lane] = lane == 3 ? x[i + j] : 1000.0f * lane;
        }
        state.push(size, panel);
    }
    result[0] = double(state.template part<0>(3));
    result[1] = double(state.template part<1>(3));
}

template <typename State> static void arg_push(const float* x, const int64_t* at, double* result, int64_t count) {
    State state;
    for (int64_t i = 0; i < count; ++i) state.push(x[i], at[i]);
    give(state, result);
}

template <typename State> static void arg_merge(const float* x, const int64_t* at, double* result, int64_t count) {
    State left, right;
    for (int64_t i = 0; i < count; ++i) (i < count / 2 ? left : right).push(x[i], at[i]);
    right.merge(left);
    give(right, result);
}

template <typename State> static void arg_row(const float* x, const int64_t* at, double* result, int64_t count) {
    fp::Row<State> state;
    for (int64_t i = 0; i < count; i += 30) state.push(std::min<int64_t>(30, count - i), x + i, at + i);
    give(state, result);
}

template <typename State> static void triples(const float* x, double* result, int64_t count) {
    State state;
    fp::Row<State> row;
    row.push(count, x, x + count, x + 2 * count);
    for (int64_t i = 0; i < count; ++i) state.push(x[i], x[count + i], x[2 * count + i]);
    give(state, result);
    give(row, result + 2);
}

template <typename State> static void pairs(const float* x, double* result, int64_t count) {
    State state;
    fp::Row<State> row;
    row.push(count, x, x + count);
    for (int64_t i = 0; i < count; ++i) state.push(x[i], x[count + i]);
    give(state, result);
    give(row, result + 2);
}
"""


@cache
def probe() -> Probe:
    parts = [include_lines(), "#include <algorithm>\n", TEXT]
    for op in PLAIN:
        for feed in FEEDS:
            arguments = "const float* x, double* result, int64_t count"
            call = f"{feed}<fp::{op.value}<float>>(x, result, count);"
            parts.append(f'extern "C" void {feed}_{op.value}({arguments}) {{ {call} }}\n')
    for op in ARG:
        for feed in ("arg_push", "arg_merge", "arg_row"):
            arguments = "const float* x, const int64_t* at, double* result, int64_t count"
            call = f"{feed}<fp::{op.value}<float>>(x, at, result, count);"
            parts.append(f'extern "C" void {feed}_{op.value}({arguments}) {{ {call} }}\n')
    for feed in ("push", "push_many", "merge"):
        call = f"{feed}<fp::LongSum<float>>(x, result, count);"
        parts.append(f'extern "C" void {feed}_LongSum(const float* x, double* result, int64_t count) {{ {call} }}\n')
    for feed, op in (("triples", ReduceOp.MERGE_MOMENTS), ("pairs", ReduceOp.MERGE_SOFTMAX)):
        call = f"{feed}<fp::{op.value}<float>>(x, result, count);"
        parts.append(f'extern "C" void {op.value}(const float* x, double* result, int64_t count) {{ {call} }}\n')
    return Probe("states", "".join(parts))


def expected(op: ReduceOp, *values: Array) -> list[float]:
    with np.errstate(all="ignore"):
        return [float(part) for part in REDUCE[op](*values)][: op.parts]


def check(op: ReduceOp, feed: str, x: Array, tolerance: float = 2e-6) -> None:
    result = np.zeros(2)
    probe()(f"{feed}_{op.value}", [x.astype(np.float32)], result, x.size)
    want = expected(op, x.astype(np.float32).astype(np.float64))
    scale = float(np.abs(x[np.isfinite(x)]).sum()) if op is ReduceOp.SUM else 0.0
    np.testing.assert_allclose(result[: op.parts], want, rtol=tolerance, atol=scale * 1e-7, equal_nan=True)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 33, 100, 101, 1000])
@pytest.mark.parametrize("feed", FEEDS)
@pytest.mark.parametrize("op", PLAIN, ids=lambda op: op.value)
def test_all_ways_agree_with_float64(op: ReduceOp, feed: str, size: int) -> None:
    x = np.random.default_rng(size).standard_normal(size)
    x = 1 + x / 100 if op is ReduceOp.PROD else x * 3 + 2
    check(op, feed, x, tolerance=1e-4 if op is ReduceOp.PROD and size > 100 else 4e-6)


@pytest.mark.parametrize("feed", FEEDS)
@pytest.mark.parametrize("op", PLAIN, ids=lambda op: op.value)
def test_an_empty_state_is_the_identity(op: ReduceOp, feed: str) -> None:
    check(op, feed, np.zeros(0))


@pytest.mark.parametrize(
    "values",
    [
        [1.0, NAN, 2.0, 3.0, 4.0],
        [NAN, 1.0, 2.0, 3.0, 4.0],
        [1.0, 2.0, 3.0, 4.0, NAN],
        [1.0, -INF, 2.0, 3.0, -5.0],
        [-INF, -INF, -INF, 1.0, 0.0],
        [1.0, 2.0, 3.0, -INF, -INF],
        [-INF] * 9,
    ],
    ids=str,
)
@pytest.mark.parametrize("feed", FEEDS)
@pytest.mark.parametrize("op", [ReduceOp.MAX, ReduceOp.MIN, ReduceOp.SOFTMAX, ReduceOp.SUM], ids=lambda op: op.value)
def test_nan_and_infinities(op: ReduceOp, feed: str, values: list[float]) -> None:
    check(op, feed, np.array(values * 3))


@pytest.mark.parametrize("place", [0, 17, 127, 128, 700, 958, 960, 999, 1000, 1130])
@pytest.mark.parametrize("op", [ReduceOp.MAX, ReduceOp.MIN], ids=lambda op: op.value)
def test_one_nan_in_a_long_row_is_found(op: ReduceOp, place: int) -> None:
    """In whole vectors and in what is left of them, in the first block and in the last."""
    x = np.random.default_rng(place).standard_normal(1131)
    check(op, "long_row", x)
    x[place] = NAN
    check(op, "long_row", x)


@pytest.mark.parametrize("feed", FEEDS)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_moments_of_a_row_with_nan_or_infinity_have_nan_spread(feed: str, bad: float) -> None:
    x = np.arange(40, dtype=np.float32)
    x[17] = bad
    result = np.zeros(2)
    probe()(f"{feed}_Moments", [x], result, x.size)
    assert np.isnan(result[1])
    assert not np.isfinite(result[0])


@pytest.mark.parametrize("feed", FEEDS)
def test_softmax_with_infinity_is_nan(feed: str) -> None:
    x = np.array([1.0, INF, 2.0] * 4, np.float32)
    result = np.zeros(2)
    probe()(f"{feed}_Softmax", [x], result, x.size)
    assert result[0] == INF
    assert np.isnan(result[1])


@pytest.mark.parametrize("feed", FEEDS)
def test_moments_do_not_cancel(feed: str) -> None:
    x = 10000 + np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    result = np.zeros(2)
    probe()(f"{feed}_Moments", [x.astype(np.float32)], result, x.size)
    want = expected(ReduceOp.MOMENTS, x.astype(np.float32).astype(np.float64))
    assert abs(result[1] / want[1] - 1) < 2e-3  # E[x^2] - E[x]^2 would be wrong by several times the value
    assert abs(result[0] / want[0] - 1) < 1e-6


@pytest.mark.parametrize("feed", FEEDS)
def test_moments_of_huge_values_do_not_overflow(feed: str) -> None:
    x = np.full(64, 3e18, np.float32)  # the sum of the squares is beyond float32
    result = np.zeros(2)
    probe()(f"{feed}_Moments", [x], result, x.size)
    assert abs(result[0] / 3e18 - 1) < 1e-6
    assert 0 <= result[1] < 64 * (3e18 * 1e-6) ** 2


@pytest.mark.parametrize("feed", ["row", "lanes"])
def test_long_sums_are_as_good_as_their_blocks(feed: str) -> None:
    x = np.random.default_rng(1).random(1_000_000).astype(np.float32)
    result = np.zeros(2)
    probe()(f"{feed}_Sum", [x], result, x.size)
    exact = float(x.astype(np.float64).sum())
    assert abs(result[0] / exact - 1) < 1.2e-7


@pytest.mark.parametrize("feed", ["arg_push", "arg_merge", "arg_row"])
@pytest.mark.parametrize("op", ARG, ids=lambda op: op.value)
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("case", ["random", "ties", "nan", "first nan", "infinite"])
def test_position_of_extremes(op: ReduceOp, feed: str, case: str, shuffled: bool) -> None:
    random = np.random.default_rng(3)
    x = random.standard_normal(100).astype(np.float32)
    if case == "ties":
        x = np.round(x)
    if case.endswith("nan"):
        x[[40, 70]] = NAN
    if case == "first nan":
        x[0] = NAN
    if case == "infinite":
        x[:] = INF if op is ReduceOp.ARGMIN else -INF
    at = random.permutation(100) if shuffled else np.arange(100)
    result = np.zeros(2)
    probe()(f"{feed}_{op.value}", [x, at.astype(np.int64)], result, x.size)
    np.testing.assert_array_equal(result, expected(op, x.astype(np.float64), at))


def test_merging_partial_moments() -> None:
    x = np.random.default_rng(4).standard_normal((7, 50)) + np.arange(7)[:, None]
    sizes = np.array([50, 50, 0, 50, 20, 50, 1])
    parts = [expected(ReduceOp.MOMENTS, row[:size]) for row, size in zip(x, sizes, strict=True)]
    values = np.array([[size, *part] for size, part in zip(sizes, parts, strict=True)]).T.astype(np.float32)
    result = np.zeros(4)
    probe()("MergeMoments", [values], result, 7)
    want = expected(ReduceOp.MOMENTS, np.concatenate([row[:size] for row, size in zip(x, sizes, strict=True)]))
    np.testing.assert_allclose(result, want * 2, rtol=2e-6)


def test_merging_partial_softmax() -> None:
    x = np.random.default_rng(5).standard_normal((6, 50)) * 4
    x[2] = -INF
    parts = [expected(ReduceOp.SOFTMAX, row) for row in x]
    result = np.zeros(4)
    probe()("MergeSoftmax", [np.array(parts).T.astype(np.float32)], result, 6)
    np.testing.assert_allclose(result, expected(ReduceOp.SOFTMAX, x.reshape(-1)) * 2, rtol=2e-6)


@pytest.mark.parametrize("feed", ["push", "push_many", "merge"])
def test_a_long_sum_of_equal_numbers(feed: str) -> None:
    """Plain sums round all of them to the same side."""
    worst = {}
    for state in ("Sum", "LongSum"):
        errors = []
        for value in np.random.default_rng(5).random(20).astype(np.float32) + np.float32(1):
            result = np.zeros(2)
            probe()(f"{feed}_{state}", [np.full(2000, value)], result, 2000)
            errors.append(abs(result[0] / (2000 * float(value)) - 1))
        worst[state] = max(errors)
    assert worst["LongSum"] <= 1.2e-7
    assert worst["Sum"] > 1e-6


@pytest.mark.parametrize("feed", ["push", "push_many", "merge"])
@pytest.mark.parametrize("special", [(INF,), (-INF,), (INF, -INF), (NAN,), (3e38, 3e38)])
def test_a_long_sum_keeps_what_is_not_finite(feed: str, special: tuple[float, ...]) -> None:
    x = np.random.default_rng(6).random(100).astype(np.float32)
    x[20 : 20 + len(special)] = special
    result = np.zeros(2)
    probe()(f"{feed}_LongSum", [x], result, 100)
    with np.errstate(all="ignore"):
        np.testing.assert_equal(np.isfinite(result[0]), False)
        np.testing.assert_equal(result[0], np.float64(x.sum()))
