// Products of scaled halves for convolutions of few channels, by groups of four warps, of which each has one of four neighbouring positions;
// `codegen.schedule_convolution.sparse` says how they are laid out. Goes behind fp_held.cuh and fp_wgmma_sparse.cuh.
#pragma once

#include "fp_common.h"
#include "fp_half.h"

namespace fp {

// Where the two numbers of a warp, which has every fourth position from its number on, are among each four of the order 0 4 1 5 2 6 3 7: those
// of taps from its number on.
__device__ __forceinline__ uint32_t sparse_pattern(int warp) {
    const uint32_t first = warp == 0 ? 0x8 : warp == 1 ? 0x9 : 0xd, second = warp == 3 ? 0x9 : 0x8;
    return (first | second << 4) * 0x01010101u;
}

// Lays scaled halves of a tile out in Width places of 16 bytes for each of `Rows` rows of a channel: place n has those of the numbers from
// Shift + 4 n on, eight of them in the order 0 4 1 5 2 6 3 7, and `layer` places behind it those of their low parts. Rows of the tile have
// `Extent` numbers; its channels lie `pitch` floats apart.
template <int Parts, int Threads, int Rows, int Width, int Extent, int Shift, int Channels>
__device__ __forceinline__ void pack_runs(uint4* to, int layer, const float* tile, int pitch, const TileScale<Channels>& scale) {
#pragma unroll 1
    for (int i = threadIdx.x; i < Rows * Width; i += Threads) {
        const float* const from = tile + i / Width * Extent + Shift + i % Width * 4;
#pragma unroll
        for (int c = 0; c < Channels; ++c) {
            float numbers[8];
            memcpy(numbers, __builtin_assume_aligned(from + c * pitch, Shift % 4 == 0 ? 16 : 4), sizeof(numbers));
            uint32_t highs[4], lows[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float first = numbers[j] * scale.factors[c], second = numbers[j + 4] * scale.factors[c];
                highs[j] = rounded_pair(first, second);
                if constexpr (Parts == 2) {
                    half two[2];
                    memcpy(two, &highs[j], sizeof(two));
                    lows[j] = rounded_pair((first - to_float(two[0])) * 2048.0f, (second - to_float(two[1])) * 2048.0f);
                }
            }
            uint4* const place = to + c * (Rows * Width) + i;
            *place = {highs[0], highs[1], highs[2], highs[3]};
            if constexpr (Parts == 2) place[layer] = {lows[0], lows[1], lows[2], lows[3]};
        }
    }
}

// Sums of 16 channels at Columns times 4 positions for a group of four warps, a warp those of every fourth one. Steps says how far what each
// step multiplies lies from `columns`, low parts `layer` places behind. With two parts, products of a high and a low part have sums of their
// own, and no more than Chain others are added in the tensor core.
template <typename Steps, int Chain, int Parts, int Columns>
__device__ __forceinline__ void multiply_runs(
    float (&sums)[Columns / 2], const HeldWeights<1, Steps::count, Parts>& held, uint32_t pattern, SparseColumns columns, int layer)
{
    constexpr int chains = (Steps::count + Chain - 1) / Chain;
    float chained[Columns / 2], crossed[Columns / 2];
#pragma unroll
    for (int chain = 0; chain < chains; ++chain) {
        begin_products();
#pragma unroll
        for (int k = 0; k < Chain; ++k) {
            const int s = chain * Chain + k;
            if (s >= Steps::count) continue;
            multiply_sparse<Columns>(chained, held.words[0][s][0], pattern, columns + Steps::at(s), k > 0);
        }
        end_products();
        if constexpr (Parts == 2) {
#pragma unroll
            for (int k = 0; k < Chain; ++k) {
                const int s = chain * Chain + k;
                if (s >= Steps::count) continue;
                multiply_sparse<Columns>(crossed, held.words[0][s][Parts - 1], pattern, columns + Steps::at(s), s > 0);
                multiply_sparse<Columns>(crossed, held.words[0][s][0], pattern, columns + (Steps::at(s) + layer), true);
            }
            end_products();
        }
        await_products<Parts - 1>();
#pragma unroll
        for (int i = 0; i < Columns / 2; ++i) sums[i] = chain == 0 ? chained[i] : sums[i] + chained[i];
    }
    if constexpr (Parts == 2) {
        await_products<0>();
#pragma unroll
        for (int i = 0; i < Columns / 2; ++i) sums[i] = fma(crossed[i], low_part, sums[i]);
    }
}

// Adds values that took the place of sums; `real` has a bit for each of a channel's, where it is a result.
template <bool Whole, typename States, int Half>
__device__ __forceinline__ void push_runs(States& states, const float (&sums)[Half], unsigned real) {
    float values[2][Half / 2];
#pragma unroll
    for (int i = 0; i < Half; ++i) values[i / 2 % 2][i / 4 * 2 + i % 2] = sums[i];
    states.template push<Whole>(values, real);
}

}  // namespace fp
