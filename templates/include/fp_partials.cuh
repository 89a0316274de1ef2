// Reductions over the positions of a convolution, or the columns of a product: of what a warp has laid out for its stores, or of what
// its threads have, one state for each channel.
#pragma once

#include "fp_merge.cuh"

namespace fp {

// As many bits as `count` says, at most 32.
__device__ __forceinline__ unsigned lowest_bits(int64_t count) {
    return count >= 32 ? 0xffffffffu : count > 0 ? (1u << count) - 1 : 0;
}

// A thread's share of a row of 32 Pair results; the warp has 16 such rows. Two threads share one, each has every second four
// of its results: so the 8 threads that shared memory serves at once meet in no bank. Rows may have their results `Apart` from each other.
template <int Pair, bool Apart = false>
struct Share {
    static constexpr int count = 16 * Pair, all = 32 * Pair;
    float values[count];
    unsigned real[Pair];  // which of the values are results: bits 0 to 3, 8 to 11, and so on
    int total = 0;        // how many of the whole row are

    static __device__ __forceinline__ int row() { return threadIdx.x % 32 / 8 * 4 + threadIdx.x % 4; }
    static __device__ __forceinline__ int half() { return threadIdx.x / 4 % 2; }
    static __device__ __forceinline__ bool is_first() { return half() == 0; }  // of the threads of a row

    // Where the value `i` of this thread stands in its row.
    static __device__ __forceinline__ int place(int i) { return half() * 4 + i / 4 * 8 + i % 4; }

    template <typename State>
    static __device__ __forceinline__ void merge(State& state) {
        merge_across<4, 8>(state);
    }

    // `inside` has a bit for each result of a row, set where it is one: the others lie past the end.
    __device__ __forceinline__ Share(const float* room, int pitch, const unsigned (&inside)[Pair]) {
        const float* const from = room + row() * pitch + half() * 4;
#pragma unroll
        for (int i = 0; i < count / 4; ++i) {
            const uint4 four = *reinterpret_cast<const uint4*>(from + i * 8);
            memcpy(values + i * 4, &four, sizeof(four));
        }
#pragma unroll
        for (int p = 0; p < Pair; ++p) {
            real[p] = inside[p] >> half() * 4;
            total += __popc(inside[p]);
        }
    }

    // Puts the values back where they came from.
    __device__ __forceinline__ void leave(float* room, int pitch) const {
        float* const to = room + row() * pitch + half() * 4;
#pragma unroll
        for (int i = 0; i < count / 4; ++i) {
            uint4 four;
            memcpy(&four, values + i * 4, sizeof(four));
            *reinterpret_cast<uint4*>(to + i * 8) = four;
        }
    }

    __device__ __forceinline__ bool is_real(int i) const { return real[i / 16] >> (i % 16 / 4 * 8 + i % 4) & 1; }
    // Whether all are, which is the same for all threads of a warp.
    __device__ __forceinline__ bool whole() const { return Apart ? !__any_sync(0xffffffffu, total != all) : total == all; }
};

// What the threads of row `row` have, for all; see `Share::row`.
__device__ __forceinline__ float of_row(float value, int row) { return __shfl_sync(0xffffffffu, value, row / 4 * 8 + row % 4); }

// All threads of a row get the state of its results.
template <typename State, typename Share>
__device__ __forceinline__ void reduce_row(State& state, const Share& share) {
    if (share.whole()) {
        state.push_many(share.values);
    } else {
#pragma unroll
        for (int i = 0; i < share.count; ++i) {
            if (share.is_real(i)) state.push(share.values[i]);
        }
    }
    share.merge(state);
}

template <typename Share, typename T>
__device__ __forceinline__ T sum_of_row(T mine) {
    Sum<T> sum;
    sum.total = mine;
    Share::merge(sum);
    return sum.total;
}

// Moments by the corrected two-pass algorithm of Chan, Golub and LeVeque 1983: the values are at hand twice.
template <bool Whole, typename T, typename Share>
__device__ __forceinline__ Moments<T> moments_of_row(const Share& share) {
    constexpr int chains = 4;  // sums that do not wait for each other
    const T total = Whole ? T(share.all) : T(share.total);
    const T one_of = Whole ? T(1) / T(share.all) : share.total > 0 ? T(1) / total : T(0);
    T sums[chains] = {}, offs[chains] = {}, squares[chains] = {};
#pragma unroll
    for (int i = 0; i < share.count; ++i) sums[i % chains] += Whole || share.is_real(i) ? share.values[i] : T(0);
    const T mean = sum_of_row<Share>(sum_by_halves<0, chains>(sums)) * one_of;
#pragma unroll
    for (int i = 0; i < share.count; ++i) {
        const T difference = Whole || share.is_real(i) ? share.values[i] - mean : T(0);
        offs[i % chains] += difference;
        squares[i % chains] = fma(difference, difference, squares[i % chains]);
    }
    const T off = sum_of_row<Share>(sum_by_halves<0, chains>(offs));
    const T shift = off * one_of;
    Moments<T> state;
    state.count = total;
    state.mean = mean + shift;
    state.m2 = maximum(fma(-off, shift, sum_of_row<Share>(sum_by_halves<0, chains>(squares))), T(0));
    return state;
}

template <typename T, typename Share>
__device__ __forceinline__ void reduce_row(Moments<T>& state, const Share& share) {
    state = share.whole() ? moments_of_row<true, T>(share) : moments_of_row<false, T>(share);
}

// Adds the results of a row to those that its threads had before.
template <typename State, typename Share>
__device__ __forceinline__ void add_row(State& before, const Share& share) {
    State state;
    reduce_row(state, share);
    merge_into(before, state);
}

// Adds the results of a row to those that this warp had before.
template <typename State, typename Share>
__device__ __forceinline__ void leave_row(State* states, const Share& share) {
    State state;
    reduce_row(state, share);
    if (share.is_first()) merge_into(states[share.row()], state);
}

// Which of a strip of 32 Words columns exist, for a thread that has two neighbours of each eight, as `multiply_group` leaves them: bits 0
// and 1 of a word, 8 and 9, and so on.
template <int Words>
struct OwnColumns {
    unsigned real[Words];
    bool whole;  // whether all do

    static __device__ __forceinline__ constexpr int bit(int value) { return value % 8 / 2 * 8 + value % 2; }

    // `inside` has a bit for each column, alike in all rows.
    static __device__ __forceinline__ OwnColumns of_strip(const unsigned (&inside)[Words]) {
        OwnColumns own;
        own.whole = true;
#pragma unroll
        for (int w = 0; w < Words; ++w) {
            own.real[w] = inside[w] >> threadIdx.x % 4 * 2;
            own.whole = own.whole && inside[w] == 0xffffffffu;
        }
        return own;
    }

    // `mine` has a bit for each of the thread's own.
    static __device__ __forceinline__ OwnColumns of_thread(const unsigned (&mine)[Words]) {
        OwnColumns own;
        own.whole = true;
#pragma unroll
        for (int w = 0; w < Words; ++w) {
            own.real[w] = mine[w];
            own.whole = own.whole && mine[w] == 0x03030303u;
        }
        return own;
    }

    __device__ __forceinline__ bool is_real(int value) const { return real[value / 8] >> bit(value % 8) & 1; }
};

// What a thread finds of its sums of a row, strip after strip; four threads share a row.
template <typename State>
struct OwnRow {
    State state;

    template <int Words>
    __device__ __forceinline__ void push(const float (&values)[Words * 8], const OwnColumns<Words>& columns) {
        if (columns.whole) {
            state.push_many(values);
        } else {
#pragma unroll
            for (int i = 0; i < Words * 8; ++i) {
                if (columns.is_real(i)) state.push(values[i]);
            }
        }
    }

    __device__ __forceinline__ State found() const { return state; }
};

// Moments by sums of differences from the first value and of their squares, which is two instructions less for a value than two sweeps. That
// loses few digits: a value is at most sqrt(n - 1) standard deviations from the mean of the n that it is one of (Samuelson 1968).
template <typename T>
struct OwnRow<Moments<T>> {
    T first = T(0), count = T(0), total = T(0), squares = T(0);

    template <int Words>
    __device__ __forceinline__ void push(const float (&values)[Words * 8], const OwnColumns<Words>& columns) {
        constexpr int all = Words * 8;
        if (count == T(0)) {
            first = T(values[0]);
            if (!columns.whole) {
                first = T(0);
#pragma unroll
                for (int i = all; i-- > 0;) first = columns.is_real(i) ? T(values[i]) : first;
            }
        }
        T differences[all], sum = T(0), square = T(0);
#pragma unroll
        for (int i = 0; i < all; ++i) differences[i] = T(values[i]) - first;
        if (columns.whole) {
            count += T(all);
        } else {
#pragma unroll
            for (int w = 0; w < Words; ++w) count += T(__popc(columns.real[w] & 0x03030303u));
#pragma unroll
            for (int i = 0; i < all; ++i) differences[i] = columns.is_real(i) ? differences[i] : T(0);
        }
#pragma unroll
        for (int i = 0; i < all; ++i) {
            sum += differences[i];
            square = fma(differences[i], differences[i], square);
        }
        total += sum;
        squares += square;
    }

    __device__ __forceinline__ Moments<T> found() const {
        const T mean = count > T(0) ? total / count : T(0);
        Moments<T> state;
        state.count = count;
        state.mean = count > T(0) ? first + mean : T(0);
        state.m2 = maximum(fma(-total, mean, squares), T(0));
        return state;
    }
};

// Adds the values that took the place of a thread's sums in the first strip of columns, of the row `down`.
template <int Words, int N, typename State>
__device__ __forceinline__ void push_strip(OwnRow<State>& row, const float (&sums)[N][4], int down, const OwnColumns<Words>& columns) {
    float values[Words * 8];
#pragma unroll
    for (int i = 0; i < Words * 8; ++i) values[i] = sums[i / 2][down * 2 + i % 2];
    row.push(values, columns);
}

// Moves sums to the place of those `Groups` groups of 8 columns before.
template <int Groups, int N>
__device__ __forceinline__ void next_strip(float (&sums)[N][4]) {
#pragma unroll
    for (int at = Groups; at < N; ++at) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[at - Groups][i] = sums[at][i];
    }
}

// What the four threads of a row found of it.
template <typename State>
__device__ __forceinline__ State found_of(const OwnRow<State>& row) {
    State state = row.found();
    merge_lanes<4>(state);
    return state;
}

// What a thread finds of the sums that it has itself, a state for each of its `Count` channels; see `push_sums`.
template <typename State, int Count>
struct OwnStates {
    static constexpr int room = Count > 8 ? 16 : Count > 4 ? 8 : 4;
    State states[room];

    // One value of each channel, where the thread has a `real` one.
    __device__ __forceinline__ void push(const float (&values)[Count], bool real) {
#pragma unroll
        for (int k = 0; k < Count; ++k) {
            State next = states[k];
            next.push(values[k]);
            states[k] = chosen(real, next, states[k]);
        }
    }

    // The first `half` states become those of as many channels, the upper ones in threads that are upper by `mask`.
    template <int Half>
    __device__ __forceinline__ void halve(int mask) {
        const bool is_upper = threadIdx.x & mask;
#pragma unroll
        for (int k = 0; k < Half; ++k) {
            const State other = exchanged(is_upper, states[k], states[k + Half], mask);
            merge_into(states[k], other);
        }
    }

    __device__ __forceinline__ State state(int k) const { return states[k]; }
};

// Moments have one count for all channels: element by element (Welford 1962), with one quotient for all.
template <typename T, int Count>
struct OwnStates<Moments<T>, Count> {
    static constexpr int room = Count > 8 ? 16 : Count > 4 ? 8 : 4;
    T count = T(0), means[room] = {}, squares[room] = {};

    __device__ __forceinline__ void push(const float (&values)[Count], bool real) {
        count += real ? T(1) : T(0);
        const T one_of = count > T(0) ? reciprocal(count) : T(0);
#pragma unroll
        for (int k = 0; k < Count; ++k) {
            const T value = real ? values[k] : means[k], difference = value - means[k];
            means[k] = fma(difference, one_of, means[k]);
            squares[k] = fma(difference, value - means[k], squares[k]);
        }
    }

    template <int Half>
    __device__ __forceinline__ void halve(int mask) {
        const bool is_upper = threadIdx.x & mask;
        const T other = other_lane(count, mask), all = count + other;
        const T share = count > T(0) ? other * reciprocal(all) : T(1);  // so that equal means stay what they are
        const T weight = share * count;
#pragma unroll
        for (int k = 0; k < Half; ++k) {
            const T mean = exchanged(is_upper, means[k], means[k + Half], mask);
            const T square = exchanged(is_upper, squares[k], squares[k + Half], mask);
            const T difference = mean - means[k];
            squares[k] += fma(difference * weight, difference, square);
            means[k] = fma(difference, share, means[k]);
        }
        count = all;
    }

    __device__ __forceinline__ Moments<T> state(int k) const {
        Moments<T> made;
        made.count = count;
        made.mean = means[k];
        made.m2 = squares[k];
        return made;
    }
};

// Adds values that took the place of a thread's sums for two tiles of positions, as `add_places` leaves them: of each channel four
// positions of the warp, of which `inside` has a bit where they are results.
template <bool Whole, typename States, int Half>
__device__ __forceinline__ void push_sums(States& states, const float (&sums)[2][Half], unsigned inside) {
    constexpr int count = Half / 2;
#pragma unroll
    for (int position = 0; position < 4; ++position) {
        const int t = position / 2, i = position % 2 * 2;
        float values[count];
#pragma unroll
        for (int k = 0; k < count; ++k) values[k] = sums[t][k / 4 * 8 + k % 4 / 2 * 4 + i + k % 2];
        states.push(values, Whole || inside >> (i * 8 + t * 8 + threadIdx.x % 32 / 4) & 1);
    }
}

// Adds what the threads of a warp found to the warp's states of its channels. Of eight threads with the same channels, each ends with
// those that it adds.
template <typename State, int Count>
__device__ __forceinline__ void leave_sums(State* states, OwnStates<State, Count>& own) {
    constexpr int room = OwnStates<State, Count>::room, left = room > 4 ? room / 8 : 1;
    const int lane = threadIdx.x % 32;
    own.template halve<room / 2>(16);
    own.template halve<room / 4>(8);
    if constexpr (room > 4) own.template halve<room / 8>(4);
    const int first = lane / 16 * (room / 2) + lane / 8 % 2 * (room / 4) + lane / 4 % 2 * (room / 8);
#pragma unroll
    for (int i = 0; i < left; ++i) {
        const int k = first + i, row = k / 4 * 16 + k % 4 / 2 * 8 + lane % 4 * 2 + k % 2;
        State found = own.state(i);
        if constexpr (room == 4) merge_across<4, 8>(found);
        if (k < Count && (room > 4 || lane / 4 % 2 == 0)) merge_into(states[row], found);
    }
}

// The states of channel number `channel` of a block, which one in High of its Warps has, in the warps' order; they begin anew. Warps with
// the same channels are neighbours where they multiply `Together`, else every High-th.
template <int Warps, int High, int Channels, bool Together, typename State>
__device__ __forceinline__ State gather_channel(State* states, int channel) {
    State merged;
    const int side = channel / Channels;
#pragma unroll
    for (int warp = 0; warp < Warps / High; ++warp) {
        const int owner = Together ? side * (Warps / High) + warp : warp * High + side;
        State& next = states[owner * Channels + channel % Channels];
        merge_into(merged, next);
        next = State();
    }
    return merged;
}

}  // namespace fp
