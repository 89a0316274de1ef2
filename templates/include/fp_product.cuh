// Products of float32 matrices on tensor cores, as exact as float32 arithmetic: each number is split in two TF32 parts, and each
// slice of 8 terms is added outside of the tensor core, which rounds its own sums towards zero. Goes behind fp_instructions.cuh.
#pragma once

#include <cstring>

#include "fp_common.h"
#include "fp_vector.cuh"

namespace fp {

// values = high + low, up to 2^-21 of them. The low part of what is not finite is no number.
template <int N>
__device__ __forceinline__ void split(const float (&values)[N], float (&high)[N], float (&low)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        uint32_t bits;
        memcpy(&bits, &values[i], sizeof(bits));
        bits = (bits + 0x1000u) & 0xffffe000u;  // 10 bits of mantissa, to nearest
        memcpy(&high[i], &bits, sizeof(bits));
        low[i] = values[i] - high[i];
    }
}

// Rounds N neighbours in shared memory, at a multiple of their size, to TF32.
template <int N>
__device__ __forceinline__ void round_numbers(float* at) {
    if constexpr (N == 4) {
        uint4 words = *reinterpret_cast<const uint4*>(at);
        float numbers[4];
        memcpy(numbers, &words, sizeof(words));
#pragma unroll
        for (int i = 0; i < 4; ++i) numbers[i] = tf32(numbers[i]);
        memcpy(&words, numbers, sizeof(words));
        *reinterpret_cast<uint4*>(at) = words;
    } else {
        static_assert(N == 1);
        *at = tf32(*at);
    }
}

// Makes numbers of the N halves that lie at the beginning of their room in shared memory, which is at a multiple of N floats.
template <typename T, int N>
__device__ __forceinline__ void widen_numbers(float* at) {
    const Vec<T, N> halves = as_vector<N>(*reinterpret_cast<T*>(at));
    Vec<float, N> numbers;
#pragma unroll
    for (int i = 0; i < N; ++i) numbers[i] = to_float(halves[i]);
    as_vector<N>(*at) = numbers;
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

// The same with the weights where `load_weights` finds them, one tile after another: fewer registers for more sums.
template <int M, int N>
__device__ __forceinline__ void multiply_exactly(float (&sums)[M][N][4], const float* mine, const float (&b)[N][2]) {
    float b_high[N][2], b_low[N][2];
#pragma unroll
    for (int n = 0; n < N; ++n) split(b[n], b_high[n], b_low[n]);
#pragma unroll
    for (int m = 0; m < M; ++m) {
        float a[1][4], a_high[4], a_low[4];
        load_weights(a, mine + m * 128);
        split(a[0], a_high, a_low);
#pragma unroll
        for (int n = 0; n < N; ++n) {
            float slice[4] = {};
            multiply_tile(slice, a_low, b_high[n]);
            multiply_tile(slice, a_high, b_low[n]);
            multiply_tile(slice, a_high, b_high[n]);
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[m][n][i] += slice[i];
        }
    }
}

// The same of numbers that were rounded to TF32 before, with one product for each, added in the tensor core.
template <int M, int N>
__device__ __forceinline__ void multiply_rounded(float (&sums)[M][N][4], const float* mine, const float (&b)[N][2]) {
    float a[M][4];
    load_weights(a, mine);
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int m = 0; m < M; ++m) multiply_tile(sums[m][n], a[m], b[n]);
    }
}

// The i-th number of sums in any dimensions.
__device__ __forceinline__ float& number_of(float& number, int) { return number; }
__device__ __forceinline__ const float& number_of(const float& number, int) { return number; }
template <typename Inner, int N>
__device__ __forceinline__ auto& number_of(Inner (&sums)[N], int i) {
    constexpr int each = sizeof(Inner) / sizeof(float);
    return number_of(sums[i / each], i % each);
}

template <typename Sums>
inline constexpr int numbers_in = sizeof(Sums) / sizeof(float);

template <typename Sums>
__device__ __forceinline__ void exchange(Sums& first, Sums& second) {
#pragma unroll
    for (int i = 0; i < numbers_in<Sums>; ++i) {
        const float kept = number_of(first, i);
        number_of(first, i) = number_of(second, i);
        number_of(second, i) = kept;
    }
}

// N neighbours in shared memory, a power of two, at a multiple of their size or of 16 bytes.
template <int N>
__device__ __forceinline__ void take(float (&to)[N], const float* from) {
    if constexpr (N % 4 == 0) {
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            const uint4 four = *reinterpret_cast<const uint4*>(from + i);
            memcpy(to + i, &four, sizeof(four));
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) to[i] = from[i];
    }
}

template <typename Sums>
__device__ __forceinline__ bool all_finite(const Sums& sums) {
    float zeros[4] = {};  // NaN where a sum is not finite; four, so that they do not wait for each other
#pragma unroll
    for (int i = 0; i < numbers_in<Sums>; ++i) zeros[i % 4] = fma(number_of(sums, i), 0.0f, zeros[i % 4]);
    return zeros[0] + zeros[1] + zeros[2] + zeros[3] == 0.0f;
}

template <typename Sums>
__device__ __forceinline__ void begin_largest(Sums& largest) {
#pragma unroll
    for (int i = 0; i < numbers_in<Sums>; ++i) number_of(largest, i) = Limits<float>::lowest;
}

// Keeps the larger of what was found of other sums and these.
template <typename Sums>
__device__ __forceinline__ void pool_sums(Sums& largest, const Sums& sums) {
#pragma unroll
    for (int i = 0; i < numbers_in<Sums>; ++i) number_of(largest, i) = maximum(number_of(largest, i), number_of(sums, i));
}

// The same with a number added to each, which `bias` has for each of its `channels`; those of the sums begin at `first`.
template <int M, int N>
__device__ __forceinline__ void pool_sums(
    float (&largest)[M][N][4], const float (&sums)[M][N][4], const float* bias, int first, int channels)
{
    float shifted[M][N][4];
#pragma unroll
    for (int i = 0; i < M * 2; ++i) {
        const int channel = first + i / 2 * 16 + threadIdx.x % 32 / 4 + i % 2 * 8;
        const float shift = channel < channels ? bias[channel] : 0.0f;
#pragma unroll
        for (int j = 0; j < N * 2; ++j) {
            shifted[i / 2][j / 2][i % 2 * 2 + j % 2] = sums[i / 2][j / 2][i % 2 * 2 + j % 2] + shift;
        }
    }
    pool_sums(largest, shifted);
}

// Lays 16 rows of a warp's sums out in `room`, rows `Pitch` floats apart, column c at place c * Pair + `which`.
template <int Pair, int Pitch, int N>
__device__ __forceinline__ void stage(float* room, const float (&sums)[N][4], int which) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = lane / 4 + i / 2 * 8, column = n * 8 + lane % 4 * 2 + i % 2;
            room[row * Pitch + column * Pair + which] = sums[n][i];
        }
    }
}

}  // namespace fp
