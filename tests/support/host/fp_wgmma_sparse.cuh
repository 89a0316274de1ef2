// What templates/include/fp_wgmma_sparse.cuh has, for the emulation: each warp of a group does its own rows, when they are awaited.
#pragma once

#include <cstdint>
#include <cstring>

#include "fp_half.h"
#include "fp_wgmma.cuh"

namespace fp {

struct SparseColumns {
    const char* at;
    uint64_t deeper, across;
    SparseColumns operator+(int units) const { return {at + 16 * units, deeper, across}; }
};

inline SparseColumns sparse_columns(const void* columns, uint32_t deeper, uint32_t across) {
    if (reinterpret_cast<std::uintptr_t>(columns) % 16 || deeper >> 14 || across >> 14) emulation::fail("columns that are not aligned, or too far apart");
    return {static_cast<const char*>(columns), deeper * 16, across * 16};
}

inline uint32_t rounded_pair(float first, float second) {
    half halves[2];
    round_to(first, halves[0]);
    round_to(second, halves[1]);
    uint32_t word;
    std::memcpy(&word, halves, sizeof word);
    return word;
}

template <int N>
void multiply_sparse(float (&sums)[N / 2], const uint32_t (&a)[4], uint32_t pattern, SparseColumns b, bool add) {
    static_assert(N % 8 == 0 && N <= 256);
    static uint32_t shown[1024][5];
    const unsigned self = threadIdx.x, first = self / 32 * 32;
    std::memcpy(shown[self], a, sizeof a);
    shown[self][4] = pattern;
    emulation::wait(emulation::State::at_warp);
    // the rows of this thread, with zeros
    float rows[2][32] = {};
    for (unsigned row = 0; row < 2; ++row) {
        for (unsigned four = 0; four < 8; ++four) {
            const uint32_t* const holder = shown[first + self % 32 / 4 * 4 + four % 4];
            if (holder[4] != shown[first][4]) emulation::fail("threads of a warp with different patterns");
            half two[2];
            std::memcpy(two, &holder[four / 4 * 2 + row], sizeof two);
            const unsigned which = pattern >> 4 * four & 15;
            if ((which & 3) >= which >> 2) emulation::fail("a pattern that is none");
            rows[row][four * 4 + (which & 3)] = to_float(two[0]);
            rows[row][four * 4 + (which >> 2)] = to_float(two[1]);
        }
    }
    emulation::wait(emulation::State::at_warp);
    const unsigned lane = self % 32;
    put_product_off([&sums, b, lane, add, rows] {
        for (unsigned i = 0; i < N / 2; ++i) {
            const unsigned row = i / 2 % 2, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
            float sum = add ? sums[i] : 0.0f;
            for (unsigned k = 0; k < 32; ++k) {
                half right;
                std::memcpy(&right, b.at + column / 8 * b.across + column % 8 * 16 + k / 8 * b.deeper + k % 8 * 2, 2);
                sum += rows[row][k] * to_float(right);
            }
            sums[i] = sum;
        }
    });
}

}  // namespace fp
