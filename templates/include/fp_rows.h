// fp::Row<State>: the reduction of one row on a CPU, fed with blocks of neighbouring elements so that loops vectorise.
// A block is reduced in as many independent partial results as fill the vector units, and merged once, floats in
// double: the error grows with the length of a block, not of the row.
#pragma once

#include "fp_states.h"

namespace fp {

// ---- Loops over a block

// All partial results as one, by halves.
template <typename T, int Width, typename Combine>
FP_FN T combined(const T (&partial)[Width], Combine combine) {
    if constexpr (Width == 1) {
        return partial[0];
    } else {
        T half[Width / 2];
#pragma omp simd
        for (int k = 0; k < Width / 2; ++k) half[k] = combine(partial[k], partial[k + Width / 2]);
        return combined(half, combine);
    }
}

// combine(... combine(identity, value(0)) ..., value(count - 1)) in `Width` partial results, so that it vectorises.
template <int Width, typename T, typename Value, typename Combine>
FP_FN T fold_in(std::int64_t count, T identity, Value value, Combine combine) {
    T partial[Width];
    for (int k = 0; k < Width; ++k) partial[k] = identity;
    const std::int64_t whole = count / Width * Width;
    for (std::int64_t i = 0; i < whole; i += Width) {
#pragma omp simd
        for (int k = 0; k < Width; ++k) partial[k] = combine(partial[k], value(i + k));
    }
    const int rest = int(count - whole);
#pragma omp simd
    for (int k = 0; k < rest; ++k) partial[k] = combine(partial[k], value(whole + k));
    return combined(partial, combine);
}

// Enough partial results to hide the latency of `combine`; in a short block one vector of them.
template <typename T, typename Value, typename Combine>
FP_FN T fold(std::int64_t count, T identity, Value value, Combine combine) {
    constexpr int vector = 32 / int(sizeof(T));
    if (count < 16 * vector) return fold_in<vector>(count, identity, value, combine);
    return fold_in<8 * vector>(count, identity, value, combine);
}

template <typename T, typename Value>
FP_FN T sum_of(std::int64_t count, Value value) {
    return fold(count, T(0), value, [](T a, T b) { return T(a + b); });
}

// The value that `first` puts first, NaN before all. A NaN is looked for beside the comparisons, not in them, so that the
// partial results do not wait for it.
template <int Width, typename T, typename First>
FP_FN T extreme_in(std::int64_t count, const T* values, T identity, First first) {
    using Flag = std::conditional_t<sizeof(T) == 8, std::int64_t, std::int32_t>;  // as wide as T, so that both vectorise
    T partial[Width];
    Flag nans[Width] = {};
    for (int k = 0; k < Width; ++k) partial[k] = identity;
    for (std::int64_t i = 0; i < count; i += Width) {
        const int some = count - i < Width ? int(count - i) : Width;
        if (some == Width) {
#pragma omp simd
            for (int k = 0; k < Width; ++k) {
                partial[k] = first(values[i + k], partial[k]);
                if constexpr (std::is_floating_point_v<T>) nans[k] |= isnan(values[i + k]);
            }
        } else {
#pragma omp simd
            for (int k = 0; k < some; ++k) {
                partial[k] = first(values[i + k], partial[k]);
                if constexpr (std::is_floating_point_v<T>) nans[k] |= isnan(values[i + k]);
            }
        }
    }
    Flag nan = 0;
#pragma omp simd reduction(| : nan)
    for (int k = 0; k < Width; ++k) nan |= nans[k];
    return nan ? std::numeric_limits<T>::quiet_NaN() : combined(partial, first);
}

template <typename T, typename First>
FP_FN T extreme(std::int64_t count, const T* values, T identity, First first) {
    constexpr int vector = 32 / int(sizeof(T));
    if (count < 16 * vector) return extreme_in<vector>(count, values, identity, first);
    return extreme_in<8 * vector>(count, values, identity, first);
}

template <bool Greatest, typename T>
FP_FN T extreme_of(const T* values, std::int64_t count) {
    if constexpr (Greatest) {
        return extreme(count, values, Limits<T>::lowest, [](T a, T b) { return a > b ? a : b; });
    } else {
        return extreme(count, values, Limits<T>::highest, [](T a, T b) { return a < b ? a : b; });
    }
}

// The sums of the differences from `from`, and of their squares.
template <int Width, typename T>
FP_FN void differences_in(std::int64_t count, const T* values, T from, T& sum, T& squares) {
    T sums[Width] = {}, second[Width] = {};
    const std::int64_t whole = count / Width * Width;
    for (std::int64_t i = 0; i < whole; i += Width) {
#pragma omp simd
        for (int k = 0; k < Width; ++k) {
            const T difference = values[i + k] - from;
            sums[k] += difference;
            second[k] = fma(difference, difference, second[k]);
        }
    }
    const int rest = int(count - whole);
#pragma omp simd
    for (int k = 0; k < rest; ++k) {
        const T difference = values[whole + k] - from;
        sums[k] += difference;
        second[k] = fma(difference, difference, second[k]);
    }
    const auto add = [](T a, T b) { return T(a + b); };
    sum = combined(sums, add);
    squares = combined(second, add);
}

template <typename T>
FP_FN void differences(std::int64_t count, const T* values, T from, T& sum, T& squares) {
    constexpr int vector = 32 / int(sizeof(T));
    if (count < 16 * vector) return differences_in<vector>(count, values, from, sum, squares);
    differences_in<4 * vector>(count, values, from, sum, squares);
}

// ---- States

template <typename State>
struct Row {  // any state, one element at a time: for the few partial results of a split row
    State state;

    template <typename... T>
    FP_FN void push(std::int64_t count, const T*... values) {
        for (std::int64_t i = 0; i < count; ++i) state.push(values[i]...);
    }

    template <int I>
    FP_FN auto part() const {
        return state.template part<I>();
    }
};

template <typename T>
struct Row<Sum<T>> {
    Wide<T> total = 0;

    FP_FN void push(std::int64_t count, const T* values) {
        total += sum_of<T>(count, [=](std::int64_t i) { return values[i]; });
    }

    template <int I>
    FP_FN T part() const {
        return T(total);
    }
};

template <typename T>
struct Row<Prod<T>> {
    T total = T(1);

    FP_FN void push(std::int64_t count, const T* values) {
        total *= fold(count, T(1), [=](std::int64_t i) { return values[i]; }, [](T a, T b) { return T(a * b); });
    }

    template <int I>
    FP_FN T part() const {
        return total;
    }
};

template <typename T, bool Greatest>
struct Row<Extreme<T, Greatest>> {
    Extreme<T, Greatest> state;

    FP_FN void push(std::int64_t count, const T* values) { state.push(extreme_of<Greatest>(values, count)); }

    template <int I>
    FP_FN T part() const {
        return state.value;
    }
};

// The mean as it moves from element to element: NaN once another follows an infinity, as in PyTorch.
template <typename T>
__attribute__((noinline, cold)) T moved_mean(std::int64_t count, const T* values) {
    T mean = 0;
    for (std::int64_t i = 0; i < count; ++i) mean += (values[i] - mean) / T(i + 1);
    return mean;
}

template <typename T>
struct Row<Moments<T>> {
    Moments<Wide<T>> state;

    template <typename E>  // moments of doubles take floats, too
    FP_FN void push(std::int64_t count, const E* values) {
        if (count == 0) return;
        const E pivot = values[0];  // equal numbers have exactly their mean
        const E beyond = sum_of<E>(count, [=](std::int64_t i) { return values[i] - pivot; }) / E(count);
        Moments<Wide<T>> block;
        block.count = Wide<T>(count);
        block.mean = beyond - beyond == 0 ? Wide<T>(pivot) + beyond : Wide<T>(moved_mean(count, values));
        // Chan, Golub and LeVeque 1983: the sum of the differences from a rounded mean says how far off it is.
        E off, squares;
        differences(count, values, E(block.mean), off, squares);
        const Wide<T> step = Wide<T>(off) / block.count;
        if (step - step == 0) block.mean = Wide<T>(E(block.mean)) + step;
        block.m2 = Wide<T>(squares) - Wide<T>(off) * step;
        if constexpr (sizeof(E) < sizeof(T)) {
            if (squares - squares != 0) block = moments_in_double(count, values, 1);
        }
        state.merge(block);
    }

    template <int I>
    FP_FN T part() const {
        return T(state.template part<I>());
    }
};

template <typename T>
struct Row<Softmax<T>> {
    T value = Limits<T>::lowest;
    Wide<T> total = 0;

    FP_FN void push(std::int64_t count, const T* values) {
        const T before = value;
        value = maximum(value, extreme_of<true>(values, count));
        const T shift = Softmax<T>::shift(value);
        const T block = sum_of<T>(count, [=](std::int64_t i) { return exp(values[i] - shift); });
        total = total * exp(before - shift) + block;
    }

    template <int I>
    FP_FN T part() const {
        return I == 0 ? value : T(total);
    }
};

template <typename T, bool Greatest, typename P>
struct Row<ArgExtreme<T, Greatest, P>> {
    ArgExtreme<T, Greatest, P> state;

    FP_FN void push(std::int64_t count, const T* values, const std::int64_t* positions) {
        const T extreme = extreme_of<Greatest>(values, count);
        if (Greatest ? extreme < state.value : extreme > state.value) return;
        constexpr int group = 16;
        for (std::int64_t first = 0; first < count; first += group) {
            const int size = int(count - first < group ? count - first : group);
            int found = 0;
#pragma omp simd reduction(| : found)
            for (int k = 0; k < size; ++k) found |= (values[first + k] == extreme) | isnan(values[first + k]);
            if (!found) continue;
            for (std::int64_t i = first; i < first + size; ++i) {
                if (values[i] == extreme || isnan(values[i])) state.push(values[i], positions[i]);
            }
        }
    }

    template <int I>
    FP_FN auto part() const {
        return state.template part<I>();
    }
};

}  // namespace fp
