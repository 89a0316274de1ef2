// A convolution's products of halves by groups of four warps, both operands in shared memory. Goes behind fp_group.cuh and
// fp_wgmma_places.cuh. A group multiplies 128 positions as two tiles: of 8 blocks of 16 neighbours, the first 8 of each and the last.
#pragma once

#include "fp_common.h"

namespace fp {

constexpr float low_part = 1.0f / 2048.0f;  // of what low parts are halves

// sums += the products of halves T from `first` to below `last`: their places are `taps` of them from `inputs`, their weights `step` units of 16 bytes
// apart. All are added in the tensor core, `U` before the next are begun.
template <typename T, int U, int Half>
__device__ __forceinline__ void add_places(
    float (&sums)[2][Half], const int* taps, int first, int last, uint64_t inputs, uint64_t weights, uint32_t step)
{
    int i = first;
#pragma unroll 1
    for (; i + U <= last; i += U) {
        begin_products();
#pragma unroll
        for (int u = 0; u < U; ++u) {
            const uint64_t a = at_taps(inputs, taps[i + u]), b = at_weights(weights, (i + u) * step);
            multiply_places<T, Half * 2, true>(sums[0], a, b);
            multiply_places<T, Half * 2, true>(sums[1], at_taps(a, 8), b);
        }
        end_products();
        await_products<0>();
    }
    if constexpr (U > 1) add_places<T, U / 2>(sums, taps, i, last, inputs, weights, step);
}

// Begins part = `U` products for `Side` tiles of positions, from the `tile`-th one on, and awaits them.
template <typename T, int U, int Side, int Half>
__device__ __forceinline__ void multiply_chain(
    float (&part)[Side][Half], const int* taps, int first, int tile, uint64_t inputs, uint64_t weights, uint32_t step)
{
    begin_products();
#pragma unroll
    for (int s = 0; s < Side; ++s) {
        multiply_places<T, Half * 2, false>(part[s], at_taps(inputs, taps[first] + (tile + s) * 8), at_weights(weights, first * step));
#pragma unroll
        for (int u = 1; u < U; ++u) {
            const uint64_t a = at_taps(inputs, taps[first + u] + (tile + s) * 8);
            multiply_places<T, Half * 2, true>(part[s], a, at_weights(weights, (first + u) * step));
        }
    }
    end_products();
    await_products<0>();
}

// sums += products, U at a time: so many are added inside of the tensor core, which rounds towards zero.
template <typename T, int U, int Side, int Half>
__device__ __forceinline__ void add_chains(
    float (&sums)[Side][Half], const int* taps, int first, int last, int tile, uint64_t inputs, uint64_t weights, uint32_t step)
{
    int i = first;
#pragma unroll 1
    for (; i + U <= last; i += U) {
        float part[Side][Half] = {};  // without a value, products would be left out; see `multiply_places`
        multiply_chain<T, U>(part, taps, i, tile, inputs, weights, step);
#pragma unroll
        for (int j = 0; j < Side * Half; ++j) sums[j / Half][j % Half] += part[j / Half][j % Half];
    }
    if constexpr (U > 1) add_chains<T, U - 1>(sums, taps, i, last, tile, inputs, weights, step);  // the rest at once
}

// As `add_places`, but sums = what is added, with float32 accuracy. There are twice as many columns as sums, those with low parts first.
template <typename T, int U, int Half>
__device__ __forceinline__ void add_places_exactly(
    float (&sums)[2][Half], const int* taps, int first, int last, uint64_t inputs, uint64_t weights, uint32_t step)
{
    constexpr int side = Half <= 8 ? 2 : 1;  // tiles at once, as there are registers
#pragma unroll
    for (int t = 0; t < 2; t += side) {
        float both[side][2 * Half] = {};
        const bool many = first + U <= last;
        if (many) multiply_chain<T, U>(both, taps, first, t, inputs, weights, step);
        add_chains<T, U>(both, taps, many ? first + U : first, last, t, inputs, weights, step);
#pragma unroll
        for (int j = 0; j < side * Half; ++j) {
            sums[t + j / Half][j % Half] = fma(both[j / Half][j % Half], low_part, both[j / Half][Half + j % Half]);
        }
    }
}

// The same where the parts of numbers have products of their own: those from `first` to below `high` have a low part, which is not scaled,
// and are added first; the others are of high parts. There are as many columns as sums.
template <typename T, int U, int Half>
__device__ __forceinline__ void add_places_by_parts(
    float (&sums)[2][Half], const int* taps, int first, int high, int last, uint64_t inputs, uint64_t weights, uint32_t step)
{
    const int end = high + U < last ? high + U : last;
    add_places<T, 4>(sums, taps, first, end, inputs, weights, step);
#pragma unroll
    for (int t = 0; t < 2; ++t) {
        add_chains<T, U>(reinterpret_cast<float (&)[1][Half]>(sums[t]), taps, end, last, t, inputs, weights, step);
    }
}

// The same, sums = the first products, of which so many `Lows` may be added in the tensor core with any others, and so many `Highs` no more
// than U in a row. What one chain has is begun at once.
template <typename T, int U, int Lows, int Highs, int Half>
__device__ __forceinline__ void sum_up_places(float (&sums)[2][Half], const int* taps, uint64_t inputs, uint64_t weights, uint32_t step) {
    constexpr int end = Lows + (Highs < U ? Highs : U);
    begin_products();
#pragma unroll
    for (int i = 0; i < end; ++i) {
        const uint64_t a = at_taps(inputs, taps[i]), b = at_weights(weights, i * step);
        if (i == 0) {
            multiply_places<T, Half * 2, false>(sums[0], a, b);
            multiply_places<T, Half * 2, false>(sums[1], at_taps(a, 8), b);
        } else {
            multiply_places<T, Half * 2, true>(sums[0], a, b);
            multiply_places<T, Half * 2, true>(sums[1], at_taps(a, 8), b);
        }
    }
    end_products();
    await_products<0>();
    if constexpr (end < Lows + Highs) {
#pragma unroll
        for (int t = 0; t < 2; ++t) {
            add_chains<T, U>(reinterpret_cast<float (&)[1][Half]>(sums[t]), taps, end, Lows + Highs, t, inputs, weights, step);
        }
    }
}

// Lays results of channels 16 m and on out in `room`, for the 32 positions of a warp: rows `Pitch` floats apart, the Pair phases of a
// position side by side. of_row(row) makes results of the sums of a channel, the `row`-th of these 16.
template <int Pitch, int Pair, int Half, typename OfRow>
__device__ __forceinline__ void stage_rows(float* room, const float (&sums)[Pair][2][Half], int m, const OfRow& of_row) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int row = i / 4 * 8 + lane % 4 * 2 + i % 2;
        const auto result = of_row(row);
#pragma unroll
        for (int t = 0; t < 2; ++t) {
            Vec<float, Pair> results;
#pragma unroll
            for (int p = 0; p < Pair; ++p) results[p] = result(sums[p][t][m * 8 + i]);
            *reinterpret_cast<Vec<float, Pair>*>(room + row * Pitch + (i / 2 % 2 * 16 + t * 8 + lane / 4) * Pair) = results;
        }
    }
}

// The same of sums times both factors of their channel, of which there are `channels`; the first of these 16 is `channel`.
template <int Pitch, int Pair, int Half>
__device__ __forceinline__ void stage_places(
    float* room, const float (&sums)[Pair][2][Half], int m, const float* factors, const float* more, int channel, int channels)
{
    stage_rows<Pitch>(room, sums, m, [&](int row) {
        const int at = channel + row < channels ? channel + row : channels - 1;
        return [factor = factors[at], another = more[at]](float sum) { return sum * factor * another; };
    });
}

// The same of sums times one factor for each of the channels from 16 m on.
template <int Pitch, int Pair, int Half>
__device__ __forceinline__ void stage_scaled(float* room, const float (&sums)[Pair][2][Half], int m, const float* factors) {
    stage_rows<Pitch>(room, sums, m, [&](int row) { return [factor = factors[row]](float sum) { return sum * factor; }; });
}

// The same of sums that are results, or values that took their place.
template <int Pitch, int Pair, int Half>
__device__ __forceinline__ void stage_values(float* room, const float (&sums)[Pair][2][Half], int m) {
    stage_rows<Pitch>(room, sums, m, [](int) { return [](float sum) { return sum; }; });
}

}  // namespace fp
