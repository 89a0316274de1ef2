// Products of scaled halves whose weights the threads of a group of four warps hold in registers, for convolutions of few channels: each warp
// has one of four neighbouring positions. `codegen.schedule_convolution.register_stationary` says how they are laid out. Goes behind
// fp_scaled.cuh and fp_wgmma_sparse.cuh.
#pragma once

#include "fp_common.h"
#include "fp_half.h"

namespace fp {

// Two halves as a word.
__device__ __forceinline__ unsigned two_halves(half first, half second) {
    return unsigned(static_cast<std::uint16_t>(first)) | unsigned(static_cast<std::uint16_t>(second)) << 16;
}

// Numbers that are known when code is compiled.
template <int... Numbers>
struct Listed {
    static constexpr int count = sizeof...(Numbers);
    static __device__ __forceinline__ constexpr int at(int i) {
        constexpr int numbers[] = {Numbers...};
        return numbers[i];
    }
};

// The weights of 16 output channels, as `multiply_sparse` takes them on the left, for so many Steps.
template <int Steps, int Parts>
struct HeldWeights {
    uint32_t words[Steps][Parts][4];

    // `from` has 4 words for each thread of a warp, for each of these.
    __device__ __forceinline__ void load(const unsigned char* from) {
        const uint4* const mine = reinterpret_cast<const uint4*>(from) + threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < Steps * Parts; ++i) {
            const uint4 four = mine[i * 32];
            memcpy(words[i / Parts][i % Parts], &four, sizeof(four));
        }
    }
};

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
    float (&sums)[Columns / 2], const HeldWeights<Steps::count, Parts>& held, uint32_t pattern, SparseColumns columns, int layer)
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
            multiply_sparse<Columns>(chained, held.words[s][0], pattern, columns + Steps::at(s), k > 0);
        }
        end_products();
        if constexpr (Parts == 2) {
#pragma unroll
            for (int k = 0; k < Chain; ++k) {
                const int s = chain * Chain + k;
                if (s >= Steps::count) continue;
                multiply_sparse<Columns>(crossed, held.words[s][Parts - 1], pattern, columns + Steps::at(s), s > 0);
                multiply_sparse<Columns>(crossed, held.words[s][0], pattern, columns + (Steps::at(s) + layer), true);
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

// What a thread finds of its own values, a state for each of its Count channels.
template <typename State, int Count>
struct HeldStates {
    State states[Count];

    // `real` has a bit for each value of a channel.
    template <bool Whole, int Each>
    __device__ __forceinline__ void push(const float (&values)[Count][Each], unsigned real) {
#pragma unroll
        for (int k = 0; k < Count; ++k) {
#pragma unroll
            for (int i = 0; i < Each; ++i) {
                State next = states[k];
                next.push(values[k][i]);
                states[k] = chosen(Whole || real >> i & 1, next, states[k]);
            }
        }
    }

    __device__ __forceinline__ State state(int k) const { return states[k]; }
};

// Moments have one count for all channels. Squares are those of distances from the mean that was found so far, of the first values from one
// of these: so what the distances have in common is taken away from a number not much larger than what stays.
template <typename T, int Count>
struct HeldStates<Moments<T>, Count> {
    T count = T(0), means[Count] = {}, squares[Count] = {};

    template <bool Whole, int Each>
    __device__ __forceinline__ void push(const float (&values)[Count][Each], unsigned real) {
        const bool begins = count == T(0);
        count += Whole ? T(Each) : T(__popc(real));
        const T one_of = count > T(0) ? reciprocal(count) : T(0);
#pragma unroll
        for (int k = 0; k < Count; ++k) {
            T first = values[k][0];
            if constexpr (!Whole) {
#pragma unroll
                for (int i = 1; i < Each; ++i) first = real >> i & 1 ? values[k][i] : first;
            }
            const T from = begins ? first : means[k];
            T sums[2] = {}, squared[2] = {};
#pragma unroll
            for (int i = 0; i < Each; ++i) {
                const T distance = Whole || real >> i & 1 ? values[k][i] - from : T(0);
                sums[i % 2] += distance;
                squared[i % 2] = fma(distance, distance, squared[i % 2]);
            }
            const T sum = sums[0] + sums[1], step = sum * one_of;
            means[k] = Whole || real ? from + step : means[k];
            squares[k] += fma(-sum, step, squared[0] + squared[1]);
        }
    }

    __device__ __forceinline__ Moments<T> state(int k) const {
        Moments<T> made;
        made.count = count;
        made.mean = means[k];
        made.m2 = maximum(squares[k], T(0));
        return made;
    }
};

// Adds values that took the place of sums; `real` has a bit for each of a channel's, where it is a result.
template <bool Whole, typename States, int Half>
__device__ __forceinline__ void push_runs(States& states, const float (&sums)[Half], unsigned real) {
    float values[2][Half / 2];
#pragma unroll
    for (int i = 0; i < Half; ++i) values[i / 2 % 2][i / 4 * 2 + i % 2] = sums[i];
    states.template push<Whole>(values, real);
}

// Adds what the threads of a warp found to the warp's states of its channels; four threads have the same ones.
template <typename State, int Count>
__device__ __forceinline__ void leave_held(State* states, const HeldStates<State, Count>& own) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < Count; ++k) {
        State found = own.state(k);
        merge_across<1, 4>(found);
        if (lane % 4 == 0) merge_into(states[k * 8 + lane / 4], found);
    }
}

}  // namespace fp
