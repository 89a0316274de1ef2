// Scans on a CPU: what a state has found after each of some elements, in their order. `run` takes elements of the state's type and
// leaves in the place of each what all up to it give, those of earlier calls included.
#pragma once

#include "fp_states.h"

namespace fp {

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
};

}  // namespace fp
