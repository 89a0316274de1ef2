// Slices of a convolution's products by groups of four warps: inputs from registers, weights from shared memory. Goes behind
// fp_product.cuh and fp_wgmma.cuh. What comes next is loaded before products begin, so that nothing is written while they run. T tiles of 64 positions, of which a warp has 16 each, by N channels; sums lie as `multiply_group` has them.
#pragma once

#include "fp_common.h"

namespace fp {

// Columns from `Begin` on of sums += a b, 64 at a time: three products of TF32 parts for each, as in `multiply_slice`.
template <int T, int N, int U, int Begin = 0>
__device__ __forceinline__ void multiply_parts(
    float (&sums)[T][N / 2], const float (&high)[U][T][4], const float (&low)[U][T][4], uint64_t b_high, uint64_t b_low, uint32_t slice)
{
    constexpr int width = N - Begin < 64 ? N - Begin : 64;
    constexpr uint32_t place = Begin * 2;  // 32 bytes for each column, in units of 16
    float part[T][width / 2];
    begin_products();
#pragma unroll
    for (int u = 0; u < U; ++u) {
#pragma unroll
        for (int t = 0; t < T; ++t) {
            multiply_group<width>(part[t], low[u][t], b_high + place + u * slice, u > 0);
            multiply_group<width>(part[t], high[u][t], b_low + place + u * slice, true);
            multiply_group<width>(part[t], high[u][t], b_high + place + u * slice, true);
        }
    }
    end_products();
    await_products<0>();
#pragma unroll
    for (int u = 0; u < U; ++u) {
#pragma unroll
        for (int t = 0; t < T; ++t) {
            release(high[u][t]);
            release(low[u][t]);
        }
    }
#pragma unroll
    for (int t = 0; t < T; ++t) {
#pragma unroll
        for (int i = 0; i < width / 2; ++i) sums[t][Begin / 2 + i] += part[t][i];
    }
    if constexpr (Begin + 64 < N) multiply_parts<T, N, U, Begin + 64>(sums, high, low, b_high, b_low, slice);
}

// Multiplies `count` slices of 8 places, U at a time: load(a, s) gets the numbers of slice s, multiply(a, s) takes U slices from there on.
template <int U, int T, typename Load, typename Multiply>
__device__ __forceinline__ int over_slices(int count, const Load& load, const Multiply& multiply) {
    float next[U][T][4];
    const auto load_from = [&](int s) {
        if (s + U > count) return;
#pragma unroll
        for (int u = 0; u < U; ++u) load(next[u], s + u);
    };
    int s = 0;
    load_from(0);
#pragma unroll 1
    for (; s + U <= count; s += U) {
        float now[U][T][4];
#pragma unroll
        for (int i = 0; i < U * T * 4; ++i) now[i / (T * 4)][i / 4 % T][i % 4] = next[i / (T * 4)][i / 4 % T][i % 4];
        load_from(s + U);
        multiply(now, s);
    }
    return s;
}

// sums += a b over `count` slices, with float32 accuracy: U slices are added inside of the tensor core, which rounds towards zero, the rest
// outside. The descriptors are of the weights' high and low parts in the first slice, `slice` units of 16 bytes from one to the next.
template <int U, int T, int Half, typename Load>
__device__ __forceinline__ void multiply_slices_exactly(
    float (&sums)[T][Half], int count, uint64_t b_high, uint64_t b_low, uint32_t slice, Load load)
{
    const int s = over_slices<U, T>(count, load, [&](const float (&a)[U][T][4], int from) {
        float high[U][T][4], low[U][T][4];
#pragma unroll
        for (int i = 0; i < U * T; ++i) split(a[i / T][i % T], high[i / T][i % T], low[i / T][i % T]);
        multiply_parts<T, Half * 2, U>(sums, high, low, b_high + from * slice, b_low + from * slice, slice);
    });
    if constexpr (U > 1) {
        multiply_slices_exactly<1>(
            sums, count - s, b_high + s * slice, b_low + s * slice, slice, [&](float (&rest)[T][4], int more) { load(rest, s + more); });
    }
}

// The same of numbers that were rounded to TF32 before, with one product for each, added in the tensor core.
template <int U, int T, int Half, typename Load>
__device__ __forceinline__ void multiply_slices_rounded(float (&sums)[T][Half], int count, uint64_t b, uint32_t slice, Load load) {
    const int s = over_slices<U, T>(count, load, [&](const float (&a)[U][T][4], int from) {
        begin_products();
#pragma unroll
        for (int u = 0; u < U; ++u) {
#pragma unroll
            for (int t = 0; t < T; ++t) multiply_group<Half * 2>(sums[t], a[u][t], b + (from + u) * slice, true);
        }
        end_products();
        await_products<0>();
#pragma unroll
        for (int u = 0; u < U; ++u) {
#pragma unroll
            for (int t = 0; t < T; ++t) release(a[u][t]);
        }
    });
    if constexpr (U > 1) {
        multiply_slices_rounded<1>(sums, count - s, b + s * slice, slice, [&](float (&rest)[T][4], int more) { load(rest, s + more); });
    }
}

// As that of `fp_product.cuh`, for sums as they lie here.
template <int T, int Half>
__device__ __forceinline__ void pool_sums(
    float (&largest)[T][Half], const float (&sums)[T][Half], const float* bias, int first, int channels)
{
    float shifted[T][Half];
#pragma unroll
    for (int i = 0; i < Half; ++i) {
        const int channel = first + i / 8 * 16 + i % 8 / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
        const float shift = channel < channels ? bias[channel] : 0.0f;
#pragma unroll
        for (int t = 0; t < T; ++t) shifted[t][i] = sums[t][i] + shift;
    }
    pool_sums(largest, shifted);
}

// Lays channels 16 m and on of a warp's sums out in `room`, for the two tiles from `first` on: rows `Pitch` floats apart, the 32
// positions of the warp at places c * Pair + `which`.
template <int Pair, int Pitch, int T, int Half>
__device__ __forceinline__ void stage_group(float* room, const float (&sums)[T][Half], int first, int m, int which) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int t = 0; t < 2; ++t) {
#pragma unroll
        for (int i = 0; i < 8 && i < Half; ++i) {  // there may be 8 channels in all
            const int row = i / 4 * 8 + lane % 4 * 2 + i % 2, column = t * 16 + i / 2 % 2 * 8 + lane / 4;
            room[row * Pitch + column * Pair + which] = sums[first + t][m * 8 + i];
        }
    }
}

}  // namespace fp
