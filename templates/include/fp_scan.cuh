// Scans of rows by the threads of a block: each of a thread's states becomes what all states of its row up to it give, in an order that does
// not depend on time, so that a run repeats bit for bit. `carry` is what earlier states of the row gave, and then what these gave, too.
#pragma once

#include "fp_merge.cuh"

namespace fp {

template <typename State>
__device__ __forceinline__ State joined(State first, const State& second) {
    first.merge(second);
    return first;
}

// With one exponential, as the greater maximum stays. What that exponential is off by is the less of the sum the more it is. Of maxima that are
// infinite or NaN nobody needs the sum.
template <typename T>
__device__ __forceinline__ Softmax<T> joined(const Softmax<T>& first, const Softmax<T>& second) {
    Softmax<T> all;
    all.value = maximum(first.value, second.value);
    const bool stays = first.value >= second.value;
    const T fall = (stays ? second.value : first.value) - all.value;
    const T factor = fall > T(-100) ? Softmax<T, std::is_same_v<T, float>>::power(fall) : T(0);
    all.total = fma(stays ? second.total : first.total, factor, stays ? first.total : second.total);
    return all;
}

template <typename T, bool Greatest, typename P>
__device__ __forceinline__ ArgExtreme<T, Greatest, P, true> joined(
    ArgExtreme<T, Greatest, P, true> first, const ArgExtreme<T, Greatest, P, true>& second) {
    first.push_behind(second.value, second.position);
    return first;
}

// Number `i` of Count in the order of the scan.
template <bool Backward, int Count>
constexpr __device__ __forceinline__ int in_order(int i) {
    return Backward ? Count - 1 - i : i;
}

// What the thread has that is number `lane` of its warp.
template <typename T>
__device__ __forceinline__ T of_lane(const T& value, int lane) {
    Words<T> words(value);
#pragma unroll
    for (int i = 0; i < Words<T>::count; ++i) words.words[i] = __shfl_sync(0xffffffffu, words.words[i], lane & 31);
    return words.state();
}

// States that lie together; what all of them give.
template <bool Backward, typename State, int W>
__device__ __forceinline__ State run_vector(State (&states)[W]) {
#pragma unroll
    for (int i = 1; i < W; ++i) {
        State& state = states[in_order<Backward, W>(i)];
        state = joined(states[in_order<Backward, W>(i - 1)], state);
    }
    return states[in_order<Backward, W>(W - 1)];
}

// One state of each of Lanes threads of a warp (a power of two), Apart from each other; what those before the thread's give.
template <bool Backward, int Lanes, int Apart = 1, typename State>
__device__ __forceinline__ State run_lanes(State& state) {
    const int self = int(threadIdx.x), lane = in_order<Backward, Lanes>(self / Apart % Lanes);
#pragma unroll
    for (int step = 1; step < Lanes; step *= 2) {
        const State other = of_lane(state, Backward ? self + step * Apart : self - step * Apart);
        state = chosen(lane >= step, joined(other, state), state);
    }
    const State before = of_lane(state, Backward ? self + Apart : self - Apart);
    return chosen(lane == 0, State(), before);
}

// U vectors of each of Lanes neighbouring threads, at most a warp: first the first vectors of all of them.
template <int Lanes, bool Backward, typename State, int U, int W>
__device__ __forceinline__ void run_warp(State (&states)[U][W], State& carry) {
    const int first = int(threadIdx.x) / Lanes * Lanes;
#pragma unroll
    for (int i = 0; i < U; ++i) {
        const int u = in_order<Backward, U>(i);
        State total = run_vector<Backward>(states[u]);
        const State before = joined(carry, run_lanes<Backward, Lanes>(total));
#pragma unroll
        for (int v = 0; v < W; ++v) states[u][v] = joined(before, states[u][v]);
        carry = joined(carry, of_lane(total, first + in_order<Backward, Lanes>(Lanes - 1)));
    }
}

// The same of a block of Lanes threads, whole warps, a power of two. Between two calls with the same slots there is a barrier.
template <int Lanes, bool Backward, typename State, int U, int W>
__device__ __forceinline__ void run_block(State (&states)[U][W], Slots<State, U * Lanes / 32>& slots, State& carry) {
    constexpr int warps = Lanes / 32;
    const int warp = int(threadIdx.x) / 32;
    State before[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
        State total = run_vector<Backward>(states[u]);
        before[u] = run_lanes<Backward, 32>(total);
        if (threadIdx.x % 32 == in_order<Backward, 32>(31)) slots[u * warps + warp] = total;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < U; ++i) {
        const int u = in_order<Backward, U>(i);
        State total = slots[u * warps + int(threadIdx.x) % warps];
        const State earlier = run_lanes<Backward, warps>(total);
        before[u] = joined(joined(carry, of_lane(earlier, warp)), before[u]);
#pragma unroll
        for (int v = 0; v < W; ++v) states[u][v] = joined(before[u], states[u][v]);
        carry = joined(carry, of_lane(total, in_order<Backward, warps>(warps - 1)));
    }
}

// U states of each of W rows of a thread, one after another; the next ones of its rows are those of the next of Groups threads, Lanes apart.
template <int Lanes, int Groups, typename State, int U, int W, int Parts>
__device__ __forceinline__ void run_groups(State (&states)[U][W], Slots<State, Parts>& slots, State (&carry)[W]) {
    constexpr int together = Lanes < 32 ? 32 / Lanes : 1, parts = Groups / together;  // groups of a warp, and warps or groups
    static_assert(Parts == parts * Lanes * W);
    const int lane = int(threadIdx.x) % Lanes, group = int(threadIdx.x) / Lanes, part = group / together;
    State before[W];
#pragma unroll
    for (int v = 0; v < W; ++v) {
#pragma unroll
        for (int u = 1; u < U; ++u) states[u][v] = joined(states[u - 1][v], states[u][v]);
        State total = states[U - 1][v];
        if constexpr (together > 1) before[v] = run_lanes<false, together, Lanes>(total);
        if (group % together == together - 1) slots[(part * W + v) * Lanes + lane] = total;
    }
    __syncthreads();
#pragma unroll
    for (int v = 0; v < W; ++v) {
        State earlier = carry[v];
#pragma unroll 8
        for (int p = 0; p < parts; ++p) {
            earlier = chosen(p == part, carry[v], earlier);
            carry[v] = joined(carry[v], slots[(p * W + v) * Lanes + lane]);
        }
        if constexpr (together > 1) earlier = joined(earlier, before[v]);
#pragma unroll
        for (int u = 0; u < U; ++u) states[u][v] = joined(earlier, states[u][v]);
    }
}

// The same of threads that have all of their rows.
template <typename State, int U, int W>
__device__ __forceinline__ void run_alone(State (&states)[U][W], State (&carry)[W]) {
#pragma unroll
    for (int v = 0; v < W; ++v) {
#pragma unroll
        for (int u = 0; u < U; ++u) carry[v] = states[u][v] = joined(carry[v], states[u][v]);
    }
}

}  // namespace fp
