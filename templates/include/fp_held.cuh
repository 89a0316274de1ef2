// Products of scaled halves whose weights the threads of a warp hold in registers, for convolutions of few channels;
// `codegen.schedule_convolution.held` says how they are laid out. Goes behind fp_scaled.cuh and fp_instructions.cuh.
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

// Makes words of numbers: of one (Parts of it) where two numbers were, the halves of the high parts, and of the other those of the low parts,
// times 2^11.
template <int Parts>
__device__ __forceinline__ void halve(float first, float second, unsigned& high, unsigned& low) {
    half highs[2], lows[2] = {};
    round_to(first, highs[0]);
    round_to(second, highs[1]);
    if constexpr (Parts == 2) {
        round_to((first - to_float(highs[0])) * 2048.0f, lows[0]);
        round_to((second - to_float(highs[1])) * 2048.0f, lows[1]);
    }
    high = two_halves(highs[0], highs[1]);
    low = two_halves(lows[0], lows[1]);
}

// Makes scaled halves of a tile of `Elements` numbers of each channel, channels `pitch` floats apart, in its place, four at a time: of two
// channels the words of high parts lie in the plane of the first, those of low parts in that of the second one, which may be no channel's.
template <int Parts, int Threads, int Elements, int Channels>
__device__ __forceinline__ void halve_tile(float* tile, int pitch, const TileScale<Channels>& scale) {
    static_assert(Elements % 4 == 0);
    for (int i = threadIdx.x; i < Elements / 4; i += Threads) {
#pragma unroll
        for (int c = 0; c < Channels; c += 2) {
            uint4* const first = reinterpret_cast<uint4*>(tile + c * pitch + i * 4);
            uint4* const second = reinterpret_cast<uint4*>(tile + (c + 1) * pitch + i * 4);
            float numbers[2][4] = {};
            memcpy(numbers[0], first, sizeof(numbers[0]));
            if (c + 1 < Channels) memcpy(numbers[1], second, sizeof(numbers[1]));
            const float other = c + 1 < Channels ? scale.factors[c + 1 < Channels ? c + 1 : 0] : 0.0f;
            unsigned highs[4], lows[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) halve<Parts>(numbers[0][j] * scale.factors[c], numbers[1][j] * other, highs[j], lows[j]);
            *first = {highs[0], highs[1], highs[2], highs[3]};
            if constexpr (Parts == 2) *second = {lows[0], lows[1], lows[2], lows[3]};
        }
    }
}

// The weights of Rows times 16 output channels, as `multiply_tile` takes them on the left, for so many Steps.
template <int Rows, int Steps, int Parts>
struct HeldWeights {
    uint32_t words[Rows][Steps][Parts][4];

    // `from` has 4 words for each thread of a warp, for each of these.
    __device__ __forceinline__ void load(const unsigned char* from) {
        const uint4* const mine = reinterpret_cast<const uint4*>(from) + threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < Rows * Steps * Parts; ++i) {
            const uint4 four = mine[i * 32];
            memcpy(words[i / (Steps * Parts)][i / Parts % Steps][i % Parts], &four, sizeof(four));
        }
    }
};

// How a warp finds its pairs: Quarters has for each half of a product its pattern and the place of its first pair, Apart how far the others
// of each pattern lie from the first one, three numbers each.
template <int Pitch, typename Quarters, typename Apart>
struct HeldPairs {
    static constexpr int steps = Quarters::count / 4, patterns = Apart::count / 3;
    int mine[patterns];

    __device__ __forceinline__ HeldPairs() {
        const int lane = threadIdx.x % 4;
#pragma unroll
        for (int p = 0; p < patterns; ++p) {
            mine[p] = lane == 0 ? 0 : lane == 1 ? Apart::at(p * 3) : lane == 2 ? Apart::at(p * 3 + 1) : Apart::at(p * 3 + 2);
        }
    }

    static constexpr int together = 2;  // groups of 8 positions that are multiplied at once

    // The words of these groups for a quarter; `places` are where they begin.
    template <int Parts>
    __device__ __forceinline__ void load(uint32_t (&words)[together][Parts], const float* const (&places)[together], int quarter) const {
        const int column = threadIdx.x % 32 / 4, place = Quarters::at(quarter * 2 + 1), apart = mine[Quarters::at(quarter * 2)];
#pragma unroll
        for (int i = 0; i < together * Parts; ++i) {
            const float* const from = places[i / Parts] + apart + column + (place + i % Parts * Pitch);
            words[i / Parts][i % Parts] = *reinterpret_cast<const unsigned*>(from);
        }
    }

    // Sums of Rows times 16 channels for these groups, the first of which is number `group`. With two parts, products of a high and a low
    // part have sums of their own, and no more than Chain others are added in the tensor core.
    template <int Chain, int Rows, int Parts>
    __device__ __forceinline__ void multiply(
        float (&sums)[Rows][4][4], int group, const HeldWeights<Rows, steps, Parts>& held, const float* const (&places)[together]) const
    {
        constexpr int count = Rows * together;
        float crossed[count][4] = {}, chained[count][4] = {};
#pragma unroll
        for (int s = 0; s < steps; ++s) {
            uint32_t halves[2][together][Parts], words[together][Parts][2];
            load(halves[0], places, s * 2);
            load(halves[1], places, s * 2 + 1);
#pragma unroll
            for (int i = 0; i < 2 * together * Parts; ++i) words[i / 2 / Parts][i / 2 % Parts][i % 2] = halves[i % 2][i / 2 / Parts][i / 2 % Parts];
            // what is added to a sum comes late behind what was added to it before
            if constexpr (Parts == 2) {
#pragma unroll
                for (int i = 0; i < count; ++i) multiply_tile<half>(crossed[i], held.words[i / together][s][1], words[i % together][0]);
            }
#pragma unroll
            for (int i = 0; i < count; ++i) multiply_tile<half>(chained[i], held.words[i / together][s][0], words[i % together][0]);
            if constexpr (Parts == 2) {
#pragma unroll
                for (int i = 0; i < count; ++i) multiply_tile<half>(crossed[i], held.words[i / together][s][0], words[i % together][Parts - 1]);
            }
            const bool begins = s < Chain, ends = (s + 1) % Chain == 0 || s + 1 == steps;
            if (!ends) continue;
#pragma unroll
            for (int i = 0; i < count * 4; ++i) {
                float& sum = sums[i / 4 / together][group + i / 4 % together][i % 4];
                sum = begins ? chained[i / 4][i % 4] : sum + chained[i / 4][i % 4];
                chained[i / 4][i % 4] = 0.0f;
            }
        }
        if constexpr (Parts == 2) {
#pragma unroll
            for (int i = 0; i < count * 4; ++i) {
                float& sum = sums[i / 4 / together][group + i / 4 % together][i % 4];
                sum = fma(crossed[i / 4][i % 4], low_part, sum);
            }
        }
    }

    // The number, among the 32 positions of the warp, of that of a sum of this thread.
    static __device__ __forceinline__ int position(int group, int which) {
        return group * 8 + threadIdx.x % 4 * 2 + which;
    }

    // Lays 16 channels by 32 positions out in rows.
    template <int Pitched>
    static __device__ __forceinline__ void stage(float* room, const float (&sums)[4][4]) {
        const int row = threadIdx.x % 32 / 4;
#pragma unroll
        for (int i = 0; i < 16; ++i) room[(row + i / 2 % 2 * 8) * Pitched + position(i / 4, i % 2)] = sums[i / 4][i % 4];
    }

    // The same times the factors of channels.
    template <int Pitched>
    static __device__ __forceinline__ void stage(float* room, const float (&sums)[4][4], const float* factors) {
        const int row = threadIdx.x % 32 / 4;
        float scaled[4][4];
#pragma unroll
        for (int i = 0; i < 16; ++i) scaled[i / 4][i % 4] = sums[i / 4][i % 4] * factors[row + i / 2 % 2 * 8];
        stage<Pitched>(room, scaled);
    }

    // Which of a thread's positions of each channel are in `inside`, which has a bit for each of the warp's.
    static __device__ __forceinline__ unsigned own_positions(unsigned inside) {
        unsigned own = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) own |= (inside >> position(i / 2, i % 2) & 1) << i;
        return own;
    }
};

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

// Adds values that took the place of sums, at positions of which `inside` has a bit where they are results.
template <typename Pairs, bool Whole, typename States, int Rows>
__device__ __forceinline__ void push_held(States& states, const float (&sums)[Rows][4][4], unsigned inside) {
    float values[Rows * 2][8];
#pragma unroll
    for (int i = 0; i < Rows * 16; ++i) values[i / 8][i % 8] = sums[i / 16][i % 8 / 2][i / 8 % 2 * 2 + i % 2];
    states.template push<Whole>(values, Whole ? 0xffu : Pairs::own_positions(inside));
}

// Adds what the threads of a warp found to the warp's states of its channels; four threads have the same ones.
template <typename State, int Count>
__device__ __forceinline__ void leave_held(State* states, const HeldStates<State, Count>& own) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < Count; ++k) {
        State found = own.state(k);
        merge_across<1, 4>(found);
        if (lane % 4 == 0) merge_into(states[k / 2 * 16 + k % 2 * 8 + lane / 4], found);
    }
}

}  // namespace fp
