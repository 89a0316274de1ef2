// Merging the reduction states of a block's threads, always in the same order, so that a run repeats bit for bit.
#pragma once

#include "fp_states.h"

namespace fp {

// Whether merge(a, b) and merge(b, a) give the same bits.
template <typename State>
inline constexpr bool symmetric = false;
template <typename T>
inline constexpr bool symmetric<Sum<T>> = true;
template <typename T>
inline constexpr bool symmetric<Prod<T>> = true;
template <typename T, bool Greatest, typename P, bool Last>
inline constexpr bool symmetric<ArgExtreme<T, Greatest, P, Last>> = true;

// Room for states in shared memory, which must not be initialised.
template <typename State, int N>
struct Slots {
    alignas(State) unsigned char bytes[N * sizeof(State)];

    __device__ __forceinline__ State& operator[](int i) { return reinterpret_cast<State*>(bytes)[i]; }
};

// A state as 32-bit words: what shuffles move, and what can be selected without going through memory.
template <typename State>
struct Words {
    static constexpr int count = (sizeof(State) + 3) / 4;
    unsigned words[count];

    __device__ __forceinline__ explicit Words(const State& state) : words{} { memcpy(words, &state, sizeof(State)); }

    __device__ __forceinline__ State state() const {
        State result;
        memcpy(&result, words, sizeof(State));
        return result;
    }
};

// One of two, without a choice between their addresses.
template <typename T>
__device__ __forceinline__ T chosen(bool first, const T& one, const T& another) {
    const Words<T> words(one), others(another);
    Words<T> made(one);
#pragma unroll
    for (int i = 0; i < Words<T>::count; ++i) made.words[i] = first ? words.words[i] : others.words[i];
    return made.state();
}

template <typename State>
__device__ __forceinline__ void merge_into(State& state, const State& other) {
    state.merge(other);
}

// As `merge`, but the quotient, which scales differences between means, may be two roundings off.
__device__ __forceinline__ void merge_into(Moments<float>& state, const Moments<float>& other) {
    const float all = state.count + other.count, difference = other.mean - state.mean;
    const float step = difference * (all > 0.0f ? __fdividef(other.count, all) : 0.0f);
    state.m2 += fma(difference * state.count, step, other.m2);
    state.mean = state.count > 0.0f ? state.mean + step : other.mean;
    state.count = all;
}

// Threads of a warp whose numbers differ only in the bits from First to Last (powers of two, Last excluded) get their merged state.
template <int First, int Last, typename State>
__device__ __forceinline__ void merge_across(State& state) {
#pragma unroll
    for (int mask = Last / 2; mask >= First; mask /= 2) {
        Words<State> lower(state), upper(state);
        // The lower thread's state comes first in both threads, or their results would differ in the last bits.
        const bool is_upper = threadIdx.x & mask;
#pragma unroll
        for (int i = 0; i < Words<State>::count; ++i) {
            const unsigned mine = lower.words[i];
            const unsigned other = __shfl_xor_sync(0xffffffffu, mine, mask);
            lower.words[i] = is_upper && !symmetric<State> ? other : mine;
            upper.words[i] = is_upper && !symmetric<State> ? mine : other;
        }
        state = lower.state();
        state.merge(upper.state());
    }
}

// What the thread has whose number differs in the bit `mask`.
template <typename T>
__device__ __forceinline__ T other_lane(const T& value, int mask) {
    Words<T> words(value);
#pragma unroll
    for (int i = 0; i < Words<T>::count; ++i) words.words[i] = __shfl_xor_sync(0xffffffffu, words.words[i], mask);
    return words.state();
}

// Of two threads whose numbers differ in the bit `mask`, the upper one keeps `upper`, as `lower`, and gives away `lower`; the other one
// gives away `upper`. What this one gets.
template <typename T>
__device__ __forceinline__ T exchanged(bool is_upper, T& lower, const T& upper, int mask) {
    const T given = chosen(is_upper, lower, upper);
    lower = chosen(is_upper, upper, lower);
    return other_lane(given, mask);
}

// The sum over Lanes neighbouring threads, the same bits in each.
template <int Lanes, typename T>
__device__ __forceinline__ T sum_lanes(T value) {
#pragma unroll
    for (int mask = Lanes / 2; mask >= 1; mask /= 2) value += other_lane(value, mask);
    return value;
}

// Every group of Lanes neighbouring threads (a power of two, at most a warp) gets its merged state in each of its threads.
template <int Lanes, typename State>
__device__ __forceinline__ void merge_lanes(State& state) {
    merge_across<1, Lanes>(state);
}

// Moments of all lanes at once: one division instead of one for each pair. Means are summed as differences from that of the first
// lane, so that equal ones are exactly their mean.
template <int Lanes, typename T>
__device__ __forceinline__ void merge_lanes(Moments<T>& state) {
    if constexpr (Lanes < 4) {
        merge_across<1, Lanes>(state);
    } else {
        T first = state.mean;
#pragma unroll
        for (int mask = Lanes / 2; mask >= 1; mask /= 2) {
            const T other = other_lane(first, mask);
            first = threadIdx.x & mask ? other : first;
        }
        const T all = sum_lanes<Lanes>(state.count);
        const bool some = state.count > T(0);
        const T mean = first + sum_lanes<Lanes>(some ? (state.mean - first) * (state.count / all) : T(0));
        const T difference = some ? state.mean - mean : T(0);
        state.m2 = sum_lanes<Lanes>(fma(difference * state.count, difference, state.m2));
        state.mean = mean;
        state.count = all;
    }
}

template <int Lanes, typename T>
__device__ __forceinline__ void merge_lanes(MergeMoments<T>& state) {
    merge_lanes<Lanes>(state.moments);
}

// The same for online softmax: one exponential.
template <int Lanes, typename T, bool FewDigits>
__device__ __forceinline__ void merge_lanes(Softmax<T, FewDigits>& state) {
    Max<T> bound;
    bound.value = state.value;
    merge_across<1, Lanes>(bound);
    state.total = sum_lanes<Lanes>(state.total * exp(state.value - Softmax<T>::shift(bound.value)));
    state.value = bound.value;
}

template <int Lanes, typename T>
__device__ __forceinline__ void merge_lanes(MergeSoftmax<T>& state) {
    merge_lanes<Lanes>(state.softmax);
}

// A block of Warps warps: each leaves its merged state, and after a barrier each gathers all of them.
template <int Warps, typename State>
__device__ __forceinline__ void leave_warp(Slots<State, Warps>& slots, State& state) {
    merge_lanes<32>(state);
    if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = state;
}

template <int Warps, typename State>
__device__ __forceinline__ void gather_warps(Slots<State, Warps>& slots, State& state) {
    constexpr int room = Warps <= 1 ? 1 : Warps <= 2 ? 2 : Warps <= 4 ? 4 : Warps <= 8 ? 8 : Warps <= 16 ? 16 : 32;
    const int place = threadIdx.x % room;
    State gathered;
    if (place < Warps) gathered = slots[place];
    state = gathered;
    merge_lanes<room>(state);
}

// A block of Groups x Lanes threads (powers of two, but for Lanes of a warp or more), Lanes neighbours working on different rows: first the groups of a warp, where
// there are several, merge their V rows' states, and each warp leaves the result; after a barrier each thread gathers those of its rows.
template <int Lanes>
constexpr int groups_of_warp = Lanes < 32 ? 32 / Lanes : 1;

template <int Lanes, int Groups, int V, typename State>
__device__ __forceinline__ void leave_group(Slots<State, Lanes * Groups * V / groups_of_warp<Lanes>>& slots, State (&states)[V]) {
    constexpr int together = groups_of_warp<Lanes>;
    const int lane = threadIdx.x % Lanes, part = threadIdx.x / (Lanes * together);
#pragma unroll
    for (int v = 0; v < V; ++v) {
        merge_across<Lanes, Lanes * together>(states[v]);
        if (threadIdx.x % (Lanes * together) < Lanes) slots[(part * V + v) * Lanes + lane] = states[v];
    }
}

template <int Lanes, int Groups, int V, typename State>
__device__ __forceinline__ void gather_groups(Slots<State, Lanes * Groups * V / groups_of_warp<Lanes>>& slots, State (&states)[V]) {
    const int lane = threadIdx.x % Lanes;
#pragma unroll
    for (int v = 0; v < V; ++v) {
        State merged = slots[v * Lanes + lane];
#pragma unroll 4
        for (int part = 1; part < Groups / groups_of_warp<Lanes>; ++part) merged.merge(slots[(part * V + v) * Lanes + lane]);
        states[v] = merged;
    }
}

}  // namespace fp
