// Windows that overlap, reduced with the parts that neighbours share.
#pragma once

#include "fp_states.h"
#include "fp_vector.cuh"

namespace fp {

// Begins to copy `N` numbers, 4 bytes or more at a multiple of that, from global to shared memory if they are `real` (see
// `begin_copy_bytes` in fp_instructions.cuh, which comes before); else lays down `other`.
template <int N, typename T>
__device__ __forceinline__ void begin_copy_or(T* to, const T* from, bool real, T other) {
    if (real) {
        begin_copy_bytes<N * sizeof(T)>(to, from, N * sizeof(T));
        return;
    }
    Vec<T, N> others;
#pragma unroll
    for (int i = 0; i < N; ++i) others[i] = other;
    as_vector<N>(*to) = others;
}

// The largest power of two that is less than `count`; 0 where there is none.
FP_FN constexpr int power_below(int count) { return count < 2 ? 0 : count < 3 ? 1 : 2 * power_below((count + 1) / 2); }

FP_FN constexpr int common_divisor(int a, int b) { return b == 0 ? a : common_divisor(b, a % b); }

// Windows along a line: part t of window u, for t < Size, is number u * Step + t * Apart of what lies there. Of windows that meet the
// same numbers, `Together` neighbours share the parts that all of them have; to these each adds what comes before, from the nearest
// on, and what comes behind (van Herk 1992; Gil and Werman 1993).
template <int Count, int Step, int Apart, int Size, int Together>
struct Line {
    // Windows so many apart meet the same numbers, each so many parts further on than the one before.
    static constexpr int classes = Apart / common_divisor(Step, Apart), step = Step * classes / Apart;
    static_assert((Together - 1) * step < Size, "windows that share nothing");

    // Window u comes to into[u * Width + w] for w < Width. `part(number, states)` lays down the Width states of a number.
    template <int Width, typename State, typename Part>
    static FP_FN void reduce(State* into, const Part& part) {
        of_class<0, Width>(into, part);
    }

private:
    static FP_FN constexpr int count(int first) { return (Count - first + classes - 1) / classes; }

    template <int First, int Width, typename State, typename Part>
    static FP_FN void of_class(State* into, const Part& part) {
        if constexpr (First < classes && First < Count) {
            State found[((count(First) - 1) * step + Size) * Width];
            of_group<First, 0, Width>(into, found, part);
            of_class<First + 1, Width>(into, part);
        }
    }

    template <int First, int At, int Width, typename State, typename Part>
    static FP_FN void of_group(State* into, State* found, const Part& part) {
        if constexpr (At < count(First)) {
            constexpr int together = At + Together < count(First) ? Together : count(First) - At;
            constexpr int begin = At * step, shared = begin + (together - 1) * step;
            constexpr int end = begin + Size, behind = shared + Size;
            constexpr int known = At > 0 ? end - step : 0;  // groups before have found what comes before it
            State run[Width];
            const auto add = [&](int j, bool anew) {
                State* const here = found + j * Width;
                if (j >= known) part(First * Step + j * Apart, here);
#pragma unroll
                for (int w = 0; w < Width; ++w) {
                    if (anew) {
                        run[w] = here[w];
                    } else {
                        run[w].merge(here[w]);
                    }
                }
            };
            State* const to = into + (First + At * classes) * Width;
#pragma unroll
            for (int j = shared; j < end; ++j) add(j, j == shared);
#pragma unroll
            for (int w = 0; w < Width; ++w) to[(together - 1) * classes * Width + w] = run[w];
#pragma unroll
            for (int j = shared - 1; j >= begin; --j) {
                add(j, false);
                if ((j - begin) % step == 0) {
#pragma unroll
                    for (int w = 0; w < Width; ++w) to[(j - begin) / step * classes * Width + w] = run[w];
                }
            }
#pragma unroll
            for (int j = end; j < behind; ++j) {
                add(j, j == end);
                if ((j - end + 1) % step == 0) {
#pragma unroll
                    for (int w = 0; w < Width; ++w) to[(j - end + 1) / step * classes * Width + w].merge(run[w]);
                }
            }
            of_group<First, At + Together, Width>(into, found, part);
        }
    }
};

// Those of a thread's results, rows of Width each, that no other thread has: from a row and a column on, and before the column `end`.
template <int Width>
struct Own {
    int first_row, first_column, end;

    __device__ __forceinline__ Own(int64_t row, int64_t column, int64_t end)
        : first_row(int(row)), first_column(int(column)), end(int(end)) {}

    __device__ __forceinline__ bool all() const { return first_row <= 0 && first_column <= 0 && end >= Width; }
    __device__ __forceinline__ bool has(int i) const {
        return i / Width >= first_row && i % Width >= first_column && i % Width < end;
    }
};

// Adds them to a state that holds nothing yet.
template <int Width, typename State, typename T, int N>
__device__ __forceinline__ void push_own(State& state, const T (&values)[N], const Own<Width>& own) {
    if (own.all()) return state.push_many(values);
#pragma unroll
    for (int i = 0; i < N; ++i) {
        if (own.has(i)) state.push(values[i]);
    }
}

// Moments by sums of differences from one of the values and of their squares, as in `OwnRow` (fp_partials.cuh): equal numbers are their mean.
template <int Width, typename T, int N>
__device__ __forceinline__ void push_own(Moments<T>& state, const T (&values)[N], const Own<Width>& own) {
    constexpr int chains = 4;  // sums that do not wait for each other
    T one = T(0), count = T(0), sums[chains] = {}, squares[chains] = {};
#pragma unroll
    for (int i = 0; i < N; ++i) {
        one = own.has(i) ? values[i] : one;
        count += own.has(i) ? T(1) : T(0);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const T difference = own.has(i) ? values[i] - one : T(0);
        sums[i % chains] += difference;
        squares[i % chains] = fma(difference, difference, squares[i % chains]);
    }
    const T sum = sum_by_halves<0, chains>(sums), mean = count > T(0) ? sum / count : T(0);
    state.count = count;
    state.mean = one + mean;
    state.m2 = maximum(fma(-sum, mean, sum_by_halves<0, chains>(squares)), T(0));
}

// Merges what groups of Threads neighbouring threads of a block found, by halves; `states` has room for one of each thread, which the
// first one of a group finds its group's in.
template <int Threads, typename State>
__device__ __forceinline__ void merge_threads(State* states, const State& found) {
    constexpr int below = power_below(Threads);
    const int number = threadIdx.x % Threads;
    State& mine = states[threadIdx.x];
    mine = found;
#pragma unroll
    for (int half = below; half > 0; half /= 2) {
        __syncthreads();
        if (number < half && number + half < Threads) merge_into(mine, states[threadIdx.x + half]);
    }
}

// The maxima of two windows of 16-bit numbers, NaN where one is: a GPU compares both in one instruction.
template <typename H>
struct MaxPair {
    unsigned both = std::is_same_v<H, half> ? 0xfc00fc00u : 0xff80ff80u;  // -inf

    FP_FN MaxPair() {}

    FP_FN MaxPair(H first, H second) : both(unsigned(first) | unsigned(second) << 16) {}

    FP_FN float of(int window) const { return to_float(static_cast<H>(std::uint16_t(both >> (16 * window)))); }

    FP_FN void merge(const MaxPair& other) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
        raise_pair(both, other.both, H());
#else
        *this = MaxPair(cast<H>(maximum(of(0), other.of(0))), cast<H>(maximum(of(1), other.of(1))));
#endif
    }
};

// Raises the maxima of as many windows as a vector has numbers, two by two, to these.
template <typename H, int N>
__device__ __forceinline__ void raise_pairs(MaxPair<H>* pairs, const Vec<H, N>& values) {
    unsigned words[N / 2];
    memcpy(words, &values, sizeof(words));
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
        MaxPair<H> other;
        other.both = words[i];
        pairs[i].merge(other);
    }
}

}  // namespace fp
