// A convolution's products of scaled halves by groups of four warps, both operands in shared memory. Goes behind fp_group.cuh and
// fp_wgmma_places.cuh. A group multiplies 128 positions as two tiles: of 8 blocks of 16 neighbours, the first 8 of each and the last.
#pragma once

#include "fp_common.h"

namespace fp {

constexpr float low_part = 1.0f / 2048.0f;  // of what low parts are halves

// sums += the products `first` to below `last`: their places are `taps` of them from `inputs`, their weights `step` units of 16 bytes
// apart. All are added in the tensor core, `U` before the next are begun.
template <int U, int Half>
__device__ __forceinline__ void add_places(
    float (&sums)[2][Half], const int* taps, int first, int last, uint64_t inputs, uint64_t weights, uint32_t step)
{
    int i = first;
#pragma unroll 1
    for (; i + U <= last; i += U) {
        begin_products();
#pragma unroll
        for (int u = 0; u < U; ++u) {
            const uint64_t a = at_taps(inputs, taps[i + u]), b = weights + (i + u) * step;
            multiply_places<Half * 2, true>(sums[0], a, b);
            multiply_places<Half * 2, true>(sums[1], a + 8, b);
        }
        end_products();
        await_products<0>();
    }
    if constexpr (U > 1) add_places<U / 2>(sums, taps, i, last, inputs, weights, step);
}

// part = U products for the tile of positions that is `t` places further on; see `add_places`.
template <int U, int Half>
__device__ __forceinline__ void begin_chain(
    float (&part)[Half], const int* taps, int first, int t, uint64_t inputs, uint64_t weights, uint32_t step)
{
    multiply_places<Half * 2, false>(part, at_taps(inputs, taps[first]) + t, weights + first * step);
#pragma unroll
    for (int u = 1; u < U; ++u) {
        multiply_places<Half * 2, true>(part, at_taps(inputs, taps[first + u]) + t, weights + (first + u) * step);
    }
}

// As `add_places` with float32 accuracy: U products are added inside of the tensor core, which rounds towards zero, the rest outside.
template <int U, int Half>
__device__ __forceinline__ void add_places_exactly(
    float (&sums)[2][Half], const int* taps, int first, int last, uint64_t inputs, uint64_t weights, uint32_t step)
{
    constexpr int side = Half <= 16 ? 2 : 1;  // tiles at once, as there are registers
    int i = first;
#pragma unroll 1
    for (; i + U <= last; i += U) {
#pragma unroll
        for (int t = 0; t < 2; t += side) {
            float part[side][Half] = {};  // without a value, products would be left out; see `multiply_places`
            begin_products();
#pragma unroll
            for (int s = 0; s < side; ++s) begin_chain<U>(part[s], taps, i, (t + s) * 8, inputs, weights, step);
            end_products();
            await_products<0>();
#pragma unroll
            for (int j = 0; j < side * Half; ++j) sums[t + j / Half][j % Half] += part[j / Half][j % Half];
        }
    }
    if constexpr (U > 1) add_places_exactly<U / 2>(sums, taps, i, last, inputs, weights, step);
}

// Whether the sums of high parts are finite: those with low parts are where these are.
template <int Rows, int Half>
__device__ __forceinline__ bool high_finite(const float (&sums)[2][Half]) {
    float zeros[4] = {};  // NaN where a sum is not finite; four, so that they do not wait for each other
#pragma unroll
    for (int t = 0; t < 2; ++t) {
#pragma unroll
        for (int i = Half - Rows * 8; i < Half; ++i) zeros[i % 4] += sums[t][i] * 0.0f;
    }
    return zeros[0] + zeros[1] + zeros[2] + zeros[3] == 0.0f;
}

// Lays results of channels 16 m and on out in `room`, for the 32 positions of a warp: rows `Pitch` floats apart, the Pair phases of a
// position side by side. A result is its sums, of low parts first, times both factors of its channel, of which there are `channels`; the
// first of these 16 is `channel`.
template <int Pitch, int Rows, int Pair, int Half>
__device__ __forceinline__ void stage_places(
    float* room, const float (&sums)[Pair][2][Half], int m, const float* factors, const float* more, int channel, int channels)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int row = i / 4 * 8 + lane % 4 * 2 + i % 2, at = channel + row < channels ? channel + row : channels - 1;
        const float factor = factors[at], another = more[at];
#pragma unroll
        for (int t = 0; t < 2; ++t) {
            Vec<float, Pair> results;
#pragma unroll
            for (int p = 0; p < Pair; ++p) {
                float sum = sums[p][t][Half - Rows * 8 + m * 8 + i];
                if constexpr (Half > Rows * 8) sum += sums[p][t][m * 8 + i] * low_part;
                results[p] = sum * factor * another;
            }
            *reinterpret_cast<Vec<float, Pair>*>(room + row * Pitch + (i / 2 % 2 * 16 + t * 8 + lane / 4) * Pair) = results;
        }
    }
}

}  // namespace fp
