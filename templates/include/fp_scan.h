// Scans on a CPU: what a state has found after each of some elements, in their order. `run` takes elements of the state's type, in as many
// arrays as the state has parts, and leaves in the place of each what all up to it give, those of earlier calls included.
#pragma once

#include <cmath>

#include "fp_states.h"

namespace fp {

// Pushes an element of two numbers, in whose place it leaves the result.
template <typename State, typename T, typename P>
FP_FN void take(State& state, T& value, P& other) {
    state.push(value, other);
    value = state.template part<0>();
    other = state.template part<1>();
}

// Of the second number nothing is read. With one exponential, as the greater maximum stays: libm's, as the next element waits for it, and one
// of a vector takes longer. No value but these sums is made of it.
template <typename T>
FP_FN void take(Softmax<T>& state, T& value, T& total) {
    const T before = state.value;
    if (value <= before) {
        state.total += std::exp(value - Softmax<T>::shift(before));
    } else {
        state.value = maximum(before, value);
        state.total = state.total * std::exp(before - value) + T(1);
    }
    value = state.value;
    total = state.total;
}

// Of one row, in blocks of neighbouring elements.
template <typename State>
struct RowScan {
    State state;

    template <typename T>
    FP_FN void run(std::int64_t count, T* values) {
        for (std::int64_t i = 0; i < count; ++i) {
            state.push(values[i]);
            values[i] = state.template part<0>();
        }
    }

    template <typename T, typename P>
    FP_FN void run(std::int64_t count, T* values, P* others) {
        for (std::int64_t i = 0; i < count; ++i) take(state, values[i], others[i]);
    }
};

// A sum waits for the one before it: a block is summed in parts at the same time, to which what came before is added.
template <typename T>
struct RowScan<Sum<T>> {
    T total = T(0);

    FP_FN void run(std::int64_t count, T* values) {
        constexpr int parts = 4;
        const std::int64_t each = count < 16 * parts ? 0 : count / parts;
        T sums[parts] = {};
        for (std::int64_t i = 0; i < each; ++i) {
            for (int k = 0; k < parts; ++k) values[k * each + i] = sums[k] += values[k * each + i];
        }
        for (int k = 0; k < parts; ++k) {
#pragma omp simd
            for (std::int64_t i = 0; i < each; ++i) values[k * each + i] += total;
            total += sums[k];
        }
        for (std::int64_t i = parts * each; i < count; ++i) values[i] = total += values[i];
    }
};

// Of Width rows side by side, in panels of a few elements of each.
template <typename State, int Width>
struct LanesScan {
    State states[Width];

    template <typename T>
    FP_FN void run(std::int64_t count, T (*panel)[Width]) {
        for (std::int64_t i = 0; i < count; ++i) {
#pragma omp simd
            for (int lane = 0; lane < Width; ++lane) {
                states[lane].push(panel[i][lane]);
                panel[i][lane] = states[lane].template part<0>();
            }
        }
    }

    template <typename T, typename P>
    FP_FN void run(std::int64_t count, T (*panel)[Width], P (*others)[Width]) {
        for (std::int64_t i = 0; i < count; ++i) {
            for (int lane = 0; lane < Width; ++lane) take(states[lane], panel[i][lane], others[i][lane]);
        }
    }
};

}  // namespace fp
