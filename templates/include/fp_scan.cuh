// Scans of rows by the threads of a block: each of a thread's values becomes what all values of its row up to it give, in an order that does
// not depend on time, so that a run repeats bit for bit. `carry` is what earlier values of the row gave, and then what these gave, too.
#pragma once

#include "fp_merge.cuh"

namespace fp {

template <typename T>
__device__ __forceinline__ T joined(Sum<T>, T first, T second) {
    return T(first + second);
}

template <typename T>
__device__ __forceinline__ T joined(Prod<T>, T first, T second) {
    return T(first * second);
}

// Number `i` of Count in the order of the scan.
template <bool Backward, int Count>
constexpr __device__ __forceinline__ int in_order(int i) {
    return Backward ? Count - 1 - i : i;
}

template <typename State, typename T, int U, int W>
__device__ __forceinline__ void clear(T (&values)[U][W]) {
#pragma unroll
    for (int i = 0; i < U * W; ++i) values[i / W][i % W] = State::none();
}

// What the thread has that is number `lane` of its warp.
template <typename T>
__device__ __forceinline__ T of_lane(const T& value, int lane) {
    Words<T> words(value);
#pragma unroll
    for (int i = 0; i < Words<T>::count; ++i) words.words[i] = __shfl_sync(0xffffffffu, words.words[i], lane & 31);
    return words.state();
}

// Values that lie together; what all of them give.
template <typename State, bool Backward, typename T, int W>
__device__ __forceinline__ T run_vector(T (&values)[W]) {
#pragma unroll
    for (int i = 1; i < W; ++i) {
        T& value = values[in_order<Backward, W>(i)];
        value = joined(State(), values[in_order<Backward, W>(i - 1)], value);
    }
    return values[in_order<Backward, W>(W - 1)];
}

// One value of each of Lanes threads of a warp (a power of two), Apart from each other; what those before the thread's give.
template <typename State, bool Backward, int Lanes, int Apart = 1, typename T>
__device__ __forceinline__ T run_lanes(T& value) {
    const int self = int(threadIdx.x), lane = in_order<Backward, Lanes>(self / Apart % Lanes);
#pragma unroll
    for (int step = 1; step < Lanes; step *= 2) {
        const T other = of_lane(value, Backward ? self + step * Apart : self - step * Apart);
        value = lane >= step ? joined(State(), other, value) : value;
    }
    const T before = of_lane(value, Backward ? self + Apart : self - Apart);
    return lane == 0 ? State::none() : before;
}

// U vectors of each of Lanes neighbouring threads, at most a warp: first the first vectors of all of them.
template <typename State, int Lanes, bool Backward, typename T, int U, int W>
__device__ __forceinline__ void run_warp(T (&values)[U][W], T& carry) {
    const int first = int(threadIdx.x) / Lanes * Lanes;
#pragma unroll
    for (int i = 0; i < U; ++i) {
        const int u = in_order<Backward, U>(i);
        T total = run_vector<State, Backward>(values[u]);
        const T before = joined(State(), carry, run_lanes<State, Backward, Lanes>(total));
#pragma unroll
        for (int v = 0; v < W; ++v) values[u][v] = joined(State(), before, values[u][v]);
        carry = joined(State(), carry, of_lane(total, first + in_order<Backward, Lanes>(Lanes - 1)));
    }
}

// The same of a block of Lanes threads, whole warps, a power of two. Between two calls with the same slots there is a barrier.
template <typename State, int Lanes, bool Backward, typename T, int U, int W>
__device__ __forceinline__ void run_block(T (&values)[U][W], Slots<T, U * Lanes / 32>& slots, T& carry) {
    constexpr int warps = Lanes / 32;
    const int warp = int(threadIdx.x) / 32;
    T before[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
        T total = run_vector<State, Backward>(values[u]);
        before[u] = run_lanes<State, Backward, 32>(total);
        if (threadIdx.x % 32 == in_order<Backward, 32>(31)) slots[u * warps + warp] = total;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < U; ++i) {
        const int u = in_order<Backward, U>(i);
        T total = slots[u * warps + int(threadIdx.x) % warps];
        const T earlier = run_lanes<State, Backward, warps>(total);
        before[u] = joined(State(), joined(State(), carry, of_lane(earlier, warp)), before[u]);
#pragma unroll
        for (int v = 0; v < W; ++v) values[u][v] = joined(State(), before[u], values[u][v]);
        carry = joined(State(), carry, of_lane(total, in_order<Backward, warps>(warps - 1)));
    }
}

// U values of each of W rows of a thread, one after another; the next ones of its rows are those of the next of Groups threads, Lanes apart.
template <typename State, int Lanes, int Groups, typename T, int U, int W, int Parts>
__device__ __forceinline__ void run_groups(T (&values)[U][W], Slots<T, Parts>& slots, T (&carry)[W]) {
    constexpr int together = Lanes < 32 ? 32 / Lanes : 1, parts = Groups / together;  // groups of a warp, and warps or groups
    static_assert(Parts == parts * Lanes * W);
    const int lane = int(threadIdx.x) % Lanes, group = int(threadIdx.x) / Lanes, part = group / together;
    T before[W];
#pragma unroll
    for (int v = 0; v < W; ++v) {
#pragma unroll
        for (int u = 1; u < U; ++u) values[u][v] = joined(State(), values[u - 1][v], values[u][v]);
        T total = values[U - 1][v];
        if constexpr (together > 1) before[v] = run_lanes<State, false, together, Lanes>(total);
        if (group % together == together - 1) slots[(part * W + v) * Lanes + lane] = total;
    }
    __syncthreads();
#pragma unroll
    for (int v = 0; v < W; ++v) {
        T earlier = carry[v];
#pragma unroll 8
        for (int p = 0; p < parts; ++p) {
            earlier = p == part ? carry[v] : earlier;
            carry[v] = joined(State(), carry[v], slots[(p * W + v) * Lanes + lane]);
        }
        if constexpr (together > 1) earlier = joined(State(), earlier, before[v]);
#pragma unroll
        for (int u = 0; u < U; ++u) values[u][v] = joined(State(), earlier, values[u][v]);
    }
}

// The same of threads that have all of their rows.
template <typename State, typename T, int U, int W>
__device__ __forceinline__ void run_alone(T (&values)[U][W], T (&carry)[W]) {
#pragma unroll
    for (int v = 0; v < W; ++v) {
#pragma unroll
        for (int u = 0; u < U; ++u) carry[v] = values[u][v] = joined(State(), carry[v], values[u][v]);
    }
}

}  // namespace fp
