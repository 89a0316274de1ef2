// Products of float32 matrices on tensor cores, as exact as float32 arithmetic: each number is split in two TF32 parts, and each
// slice of 8 terms is added outside of the tensor core, which rounds its own sums towards zero. Goes
// behind fp_mma.cuh.
#pragma once

#include "fp_scalar.h"

namespace fp {

// values = high + low, up to 2^-22 of them. What is not finite has no low part: `plain_sum` takes over.
template <int N>
__device__ __forceinline__ void split(const float (&values)[N], float (&high)[N], float (&low)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        high[i] = to_tf32(values[i]);
        low[i] = to_tf32(values[i] - high[i]);
    }
}

// M tiles of 16 x 8 weights, as `multiply_tile` takes them; each thread has its 4 numbers of a tile side by side.
template <int M>
__device__ __forceinline__ void load_weights(float (&a)[M][4], const float* mine) {
#pragma unroll
    for (int m = 0; m < M; ++m) {
        const uint4 numbers = *reinterpret_cast<const uint4*>(mine + m * 128);
        memcpy(a[m], &numbers, sizeof(numbers));
    }
}

// sums += a b for M x N tiles, each sum as `multiply_tile` has it.
template <int M, int N>
__device__ __forceinline__ void multiply_slice(float (&sums)[M][N][4], const float (&a)[M][4], const float (&b)[N][2]) {
    float a_high[M][4], a_low[M][4];
#pragma unroll
    for (int m = 0; m < M; ++m) split(a[m], a_high[m], a_low[m]);
#pragma unroll
    for (int n = 0; n < N; ++n) {
        float b_high[2], b_low[2];
        split(b[n], b_high, b_low);
#pragma unroll
        for (int m = 0; m < M; ++m) {
            float slice[4] = {};
            multiply_tile(slice, a_low[m], b_high);
            multiply_tile(slice, a_high[m], b_low);
            multiply_tile(slice, a_high[m], b_high);
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[m][n][i] += slice[i];
        }
    }
}

// The input at a tap, 0 where the list of taps is filled up.
__device__ __forceinline__ float tap(const float* position, int offset) { return offset < 0 ? 0.0f : position[offset]; }

// One result by plain arithmetic, for sums that are not finite: the parts of a number beyond the range are no numbers. `weights` has
// for each slice M tiles of 16 x 8, in each thread's order; `row` is the result's row in them, `position` its place in the input.
template <int M>
__device__ __noinline__ float plain_sum(
    const float* weights, const int* offsets, const float* position, int row, int first, int last)
{
    float sum = 0.0f;
    for (int k = first * 8; k < last * 8; ++k) {
        if (offsets[k] < 0) continue;
        const int thread = row % 8 * 4 + k % 4, part = row / 8 % 2 + k / 4 % 2 * 2;
        const float weight = weights[((k / 8 * M + row / 16) * 32 + thread) * 4 + part];
        sum = fma(weight, position[offsets[k]], sum);
    }
    return sum;
}

}  // namespace fp
