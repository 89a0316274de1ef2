// Teams whose blocks share the columns of several rows at once, a strip of rows that lie together in memory. Goes behind fp_team.cuh.
#pragma once

#include "fp_team.cuh"

namespace fp {

// Moments of a few values, from their differences to the first of them: three operations for each. As that is one of them, the squares of N
// differences are at most N times those to the mean, so that few digits cancel.
template <typename T>
struct FirstMoments {
    T count = T(0);
    T first = T(0);
    T total = T(0);
    T squares = T(0);

    FP_FN void push(T value) {
        const T one[1] = {value};
        push_many(one);
    }

    template <int N>
    FP_FN void push_many(const T (&values)[N]) {
        first = count > T(0) ? first : values[0];
        count += T(N);
        for (int i = 0; i < N; ++i) {
            const T difference = values[i] - first;
            total += difference;
            squares = fma(difference, difference, squares);
        }
    }

    FP_FN Moments<T> moments() const {
        Moments<T> result;
        const T off = count > T(0) ? total / count : T(0);
        result.count = count;
        result.mean = first + off;
        result.m2 = fma(-total, off, squares);
        return result;
    }
};

// Sums of values and of their squares, which merge without a division; in double, or they would cancel.
struct PowerSums {
    double total = 0.0;
    double squares = 0.0;

    FP_FN void merge(const PowerSums& other) {
        total += other.total;
        squares += other.squares;
    }
};
template <>
inline constexpr bool symmetric<PowerSums> = true;

// How the state of a row is merged: `Kept` is what a thread leaves for its block, `Sum` what is added up, `Shown` what a block leaves for its
// team. Of most states all are the same.
template <typename State>
struct Merging {
    using Kept = State;
    using Sum = State;
    using Shown = State;
    using Result = State;
    static FP_FN Kept kept(const State& state) { return state; }
    static FP_FN Sum sum(const Kept& kept) { return kept; }
    static FP_FN Shown shown(const Sum& sum, int) { return sum; }
    static FP_FN Sum seen(const Shown& shown, int) { return shown; }
    static FP_FN Result result(const Sum& sum, int) { return sum; }
};

template <typename T>
struct Merging<FirstMoments<T>> {
    using Kept = Moments<T>;
    using Sum = PowerSums;
    struct Shown {
        T mean = T(0);
        T m2 = T(0);
    };
    using Result = Moments<T>;

    static FP_FN Kept kept(const FirstMoments<T>& state) { return state.moments(); }
    static FP_FN Sum sum(const Kept& kept) { return powers(double(kept.count), double(kept.mean), double(kept.m2)); }
    static FP_FN Shown shown(const Sum& sum, int count) {
        const Result moments = result(sum, count);
        return {moments.mean, moments.m2};
    }
    static FP_FN Sum seen(const Shown& shown, int count) { return powers(double(count), double(shown.mean), double(shown.m2)); }
    static FP_FN Result result(const Sum& sum, int count) {
        Result moments;
        const double mean = sum.total / double(count), m2 = fma(-sum.total, mean, sum.squares);
        moments.count = T(count);
        moments.mean = T(mean);
        moments.m2 = m2 < 0.0 ? T(0) : T(m2);
        return moments;
    }

private:
    static FP_FN Sum powers(double count, double mean, double m2) { return {count * mean, fma(count * mean, mean, m2)}; }
};

// Room for states of `Rows` rows side by side, `Parts` of each; what several threads read of one row is in different banks.
template <typename State, int Parts, int Rows>
struct Side {
    Slots<State, Parts*(Rows + 1)> slots;
    __device__ __forceinline__ State& at(int part, int row) { return slots[part * (Rows + 1) + row]; }
};

// Each thread, of which Lanes side by side have V rows each, leaves what it has found of them; groups of a warp merge theirs before.
template <int Lanes, int Groups, int V, typename State, typename Kept>
__device__ __forceinline__ void leave_side(Side<Kept, Groups / groups_of_warp<Lanes>, Lanes * V>& side, const State (&states)[V]) {
    constexpr int together = groups_of_warp<Lanes>;
    const int lane = threadIdx.x % Lanes, part = threadIdx.x / (Lanes * together);
#pragma unroll
    for (int v = 0; v < V; ++v) {
        Kept kept = Merging<State>::kept(states[v]);
        merge_across<Lanes, Lanes * together>(kept);
        if (threadIdx.x % (Lanes * together) < Lanes) side.at(part, lane * V + v) = kept;
    }
}

// The most threads of a warp, a power of two, that so many rows may have each.
template <int Rows, int Threads>
constexpr int threads_of_row = Rows * 32 <= Threads ? 32 : Rows * 16 <= Threads ? 16 : Rows * 8 <= Threads ? 8 : Rows * 4 <= Threads ? 4 : Rows * 2 <= Threads ? 2 : 1;

// To be called by all threads of a block of `Threads`, after a barrier: merges the parts of each row, of which `Span` neighbours side by side
// are one; take(row, sum) is called by one thread for each.
template <int Threads, int Span, typename State, typename Kept, int Parts, int Positions, typename Sum, typename Take>
__device__ __forceinline__ void gather_side(Side<Kept, Parts, Positions>& side, Sum sum_of, Take take) {
    constexpr int rows = Positions / Span, whole = Threads / 32 * 32, each = threads_of_row<rows, whole>;
    constexpr int step = whole / each;  // rows at a time
    using Total = typename Merging<State>::Sum;
    if (int(threadIdx.x) >= whole) return;
    const int member = threadIdx.x % each;
    for (int first = 0; first < rows; first += step) {
        const int row = first + threadIdx.x / each;
        Total total;
        if (row < rows) {
            for (int i = member; i < Parts * Span; i += each) total.merge(sum_of(side.at(i / Span, row * Span + i % Span)));
        }
        merge_lanes<each>(total);
        if (member == 0 && row < rows) take(row, total);
    }
}

// A block's place in its team, and how the team meets over strips of `Rows` rows by blocks of `Threads`. As in `Team`, a member leaves words
// with the number of their turn (the strip's among those of the team, from 1), and who finds the number has the word. A member leaves states
// of turn n + 4 after it has found those of turn n + 2, which their members left after they had found those of turn n: four places suffice.
template <int Members, int Teams, int Rows, int Threads>
class StripTeam {
public:
    const int number, count, member;

    static constexpr int side_by_side = Threads / Rows;  // members that threads look at at once
    static constexpr int looks = (Members + side_by_side - 1) / side_by_side;

    // All of `exchange` is zero when the kernel starts.
    __device__ __forceinline__ explicit StripTeam(void* exchange)
        : number(int(blockIdx.x) / Members),
          count(int(gridDim.x) / Members),
          member(int(blockIdx.x) % Members),
          exchange_(static_cast<unsigned char*>(exchange)) {}

    // The block's state of `row` of a strip. States begin `Offset` bytes into the exchange.
    template <int Offset, typename Shown>
    __device__ __forceinline__ void leave(int strip, int row, const Shown& state) {
        const unsigned turn = turn_of(strip);
        Left<Shown>::leave(place<Offset, Shown>(turn, row, member), state, turn);
    }

    // What there is of a strip's states that the thread is to find, as it stands now.
    template <int Offset, typename Shown>
    __device__ __forceinline__ void ask(int strip, Left<Shown> (&left)[looks]) const {
#pragma unroll
        for (int i = 0; i < looks; ++i) {
            if (is_own(i)) left[i] = look_at<Offset, Shown>(turn_of(strip), i);
        }
    }

    // What several members, of `columns` columns in all, the last of which has fewer than `part`, have found of the thread's row, merged and
    // left in `side`. `left` is what was asked for.
    template <int Offset, typename State, typename Total>
    __device__ __forceinline__ void find(
        int strip, Left<typename Merging<State>::Shown> (&left)[looks], int part, int columns, int span,
        Side<Total, side_by_side, Rows>& side) const
    {
        using Shown = typename Merging<State>::Shown;
        const unsigned turn = turn_of(strip);
        if (int(threadIdx.x) >= side_by_side * Rows) return;
        Total total;
#pragma unroll
        for (int i = 0; i < looks; ++i) {
            if (!is_own(i)) continue;
            const int from = member_of(i), own = least(part, columns - from * part);
            total.merge(Merging<State>::seen(await<Offset, Shown>(turn, i, left[i]), own * span));
        }
        side.at(threadIdx.x / Rows, threadIdx.x % Rows) = total;
    }

private:
    // Teams take one strip after another in turn.
    __device__ __forceinline__ unsigned turn_of(int strip) const { return unsigned(strip / count) + 1; }

    __device__ __forceinline__ int member_of(int look) const { return int(threadIdx.x) / Rows + look * side_by_side; }

    __device__ __forceinline__ bool is_own(int look) const {
        return int(threadIdx.x) < side_by_side * Rows && member_of(look) < Members;
    }

    template <int Offset, typename Shown>
    __device__ __forceinline__ std::uint64_t* place(unsigned turn, int row, int of) const {
        const int first = ((int(turn % 4) * Teams + number) * Members + of) * Rows + row;
        return reinterpret_cast<std::uint64_t*>(exchange_ + Offset) + first * Left<Shown>::places;
    }

    template <int Offset, typename Shown>
    __device__ __forceinline__ Left<Shown> look_at(unsigned turn, int look) const {
        return Left<Shown>::at(place<Offset, Shown>(turn, threadIdx.x % Rows, member_of(look)));
    }

    template <int Offset, typename Shown>
    __device__ __forceinline__ Shown await(unsigned turn, int look, Left<Shown> left) const {
        while (!left.is_of(turn)) left = look_at<Offset, Shown>(turn, look);
        return left.state();
    }

    unsigned char* const exchange_;
};

}  // namespace fp
