// A tile of a convolution's float32 input becomes scaled halves in shared memory, by a power of two of its own; `codegen.passes.packing`
// says what scales are for. Goes behind fp_places.cuh.
#pragma once

#include "fp_common.h"
#include "fp_half.h"

namespace fp {

constexpr int no_number = -(1 << 20);  // the exponent of zero, and of what is not finite

// 2^exponent; false where no normal number is that.
__device__ __forceinline__ bool power(int exponent, float& made) {
    made = float_of(int(unsigned(exponent + 127) << 23));
    return exponent >= -126 && exponent <= 127;
}

// Exponents, which are numbers in memory, as integers.
template <int Threads>
__device__ __forceinline__ void keep_exponents(int* kept, const float* exponents, int first, int count, int channels) {
    for (int i = threadIdx.x; i < count; i += Threads) {
        const float exponent = exponents[first + i < channels ? first + i : channels - 1];
        kept[i] = exponent > -1000.0f && exponent < 1000.0f ? int(exponent) : no_number;
    }
}

// In how many parts the largest number of a channel is looked for, so that each of Warps warps has one or more.
template <int Channels, int Warps>
inline constexpr int largest_parts = (Warps + Channels - 1) / Channels;

// largest[c parts + p] becomes the bits of the largest magnitude of channel c in its p-th part; those of infinity where one is not
// finite. The tile has `Elements` of each channel, whole vectors of them; channels lie `pitch` floats apart.
template <int Channels, int Warps, int Elements, int Vector>
__device__ __forceinline__ void find_largest(unsigned* largest, float* tile, int pitch) {
    constexpr int parts = largest_parts<Channels, Warps>, stride = parts * 32 * Vector, rounds = (Elements + stride - 1) / stride;
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int unit = threadIdx.x / 32; unit < Channels * parts; unit += Warps) {
        float* const from = tile + unit / parts * pitch + (unit % parts * 32 + lane) * Vector;
        float mine = 0.0f;
#pragma unroll 8
        for (int i = 0; i < rounds; ++i) {
            if ((i + 1) * stride > Elements && i * stride + (unit % parts * 32 + lane) * Vector >= Elements) continue;
            const auto numbers = as_vector<Vector>(from[i * stride]);
#pragma unroll
            for (int j = 0; j < Vector; ++j) mine = maximum(mine, fabsf(numbers[j]));
        }
        const unsigned most = __reduce_max_sync(0xffffffffu, unsigned(bits_of(mine)) & 0x7fffffffu);
        if (lane == 0) largest[unit] = most;
    }
}

// The scale s of a tile, a power of two, and what its channels are multiplied with, 1 / (s t).
template <int Channels>
struct TileScale {
    static constexpr int top = 14;  // exponent of the largest halves
    int exponent;                   // of s
    bool exact;                     // whether all of its numbers are finite, and keep their digits
    float factors[Channels];

    // `largest` has so many `parts` of a channel, `channels` the exponents of t; a channel may be 2^most times smaller than the largest
    // one. A lane of each warp has a channel.
    __device__ __forceinline__ TileScale(const unsigned* largest, int parts, const int* channels, int most) {
        static_assert(Channels <= 32);
        const int own = threadIdx.x % 32 < Channels ? threadIdx.x % 32 : 0;
        unsigned bits = 0;
        for (int p = 0; p < parts; ++p) bits = largest[own * parts + p] > bits ? largest[own * parts + p] : bits;
        const int scaled = int(bits >> 23) - 127 - channels[own];
        const int greatest = no_number + int(__reduce_max_sync(0xffffffffu, bits != 0 ? unsigned(scaled - no_number) : 0));
        exponent = greatest == no_number ? 0 : greatest - top;
        float factor;
        const bool normal = power(-exponent - channels[own], factor);
        const bool kept = normal && scaled >= greatest - most && bits - 0x00800000u < 0x7f000000u;  // the exponent is that of the bits
        exact = !__any_sync(0xffffffffu, bits != 0 && !kept);
        factor = bits == 0 ? 0.0f : factor;
#pragma unroll
        for (int c = 0; c < Channels; ++c) factors[c] = __shfl_sync(0xffffffffu, factor, c);
    }
};

// What the sums of `count` output channels are multiplied with, s u, or 0 where there is no such number; `outs` has the exponents of u.
template <int Threads>
__device__ __forceinline__ void leave_factors(float* factors, int exponent, const int* outs, int count) {
    for (int i = threadIdx.x; i < count; i += Threads) {
        float factor;
        const bool normal = power(exponent + outs[i], factor);
        factors[i] = normal ? factor : 0.0f;
    }
}

// Whether a tile's halves, or one of its factors, are not what they should be: the same for all threads of a warp, as the compiler knows
// by the vote. Else it would compute descriptors for each.
template <int Channels>
__device__ __forceinline__ bool is_broken(const TileScale<Channels>& scale, const float* factors, int count) {
    bool broken = !scale.exact;
    for (int i = threadIdx.x % 32; i < count; i += 32) broken = broken || factors[i] == 0.0f;
    return __any_sync(0xffffffffu, broken);
}

// Lays the halves of a position out, Parts for each number, `Filled` channels, of which those past the last are zeros: in places that are
// `layer` bytes apart. The position's channels lie `pitch` floats apart.
template <int Filled, int Parts, bool Shifted, int Channels>
__device__ __forceinline__ void pack_place(
    unsigned char* to, int layer, const float* from, int pitch, const TileScale<Channels>& scale)
{
    constexpr int width = Filled < 8 ? Filled : 8;  // of a part in a place
#pragma unroll
    for (int k = 0; k < Filled; k += width) {
        half halves[Parts][width];
#pragma unroll
        for (int j = 0; j < width; ++j) {
            const int c = k + j < Channels ? k + j : 0;
            const float value = k + j < Channels ? from[c * pitch] * scale.factors[c] : 0.0f;
            round_to(value, halves[0][j]);
            if constexpr (Parts == 2) round_to((value - to_float(halves[0][j])) * (Shifted ? 2048.0f : 1.0f), halves[1][j]);
        }
        if constexpr (width < 8) {
            static_assert(sizeof(halves) == 16);
            uint4 place;
            memcpy(&place, halves, sizeof(place));
            *reinterpret_cast<uint4*>(to) = place;
        } else {
#pragma unroll
            for (int p = 0; p < Parts; ++p) {
                uint4 place;
                memcpy(&place, halves[p], sizeof(place));
                *reinterpret_cast<uint4*>(to + (p * (Filled / 8) + k / 8) * layer) = place;
            }
        }
    }
}

}  // namespace fp
