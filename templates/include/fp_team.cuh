// Teams: blocks that share each row, in a launch whose blocks are all resident at the same time.
#pragma once

#include "fp_merge.cuh"
#include "fp_vector.cuh"

namespace fp {

// Brings what `from` points at to the L2 cache, where it is valid. It takes no register, unlike a load that is under way.
template <typename T>
__device__ __forceinline__ void prefetch(const T* from) {
#if defined(__CUDA_ARCH__)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
#else
    [[maybe_unused]] volatile T touched = *from;
#endif
}

// The same where only the first `left` elements are there.
template <typename T, typename I>
__device__ __forceinline__ void prefetch(const T* from, I left) {
    if (left > 0) prefetch(from);
}

// Leaves 32 bits with the turn they belong to, as one number: who sees the turn has the bits, too.
__device__ __forceinline__ void leave_word(std::uint64_t* to, unsigned word, unsigned turn) {
    const std::uint64_t number = (static_cast<std::uint64_t>(turn) << 32) | word;
#if defined(__CUDA_ARCH__)
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(number) : "memory");
#else
    *static_cast<volatile std::uint64_t*>(to) = number;
#endif
}

// Such a number as it stands: never from the first-level cache.
__device__ __forceinline__ std::uint64_t look(const std::uint64_t* from) {
    std::uint64_t number;
#if defined(__CUDA_ARCH__)
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(number) : "l"(from) : "memory");
#else
    __nanosleep(20);
    number = *static_cast<const volatile std::uint64_t*>(from);
#endif
    return number;
}

// The same two with neighbours at a multiple of 16 bytes, in one access: each of them is whole, by itself.
__device__ __forceinline__ void leave_words(std::uint64_t* to, const unsigned* words, unsigned turn) {
#if defined(__CUDA_ARCH__)
    const std::uint64_t above = static_cast<std::uint64_t>(turn) << 32, first = above | words[0], second = above | words[1];
    asm volatile("st.relaxed.gpu.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(first), "l"(second) : "memory");
#else
    for (int i = 0; i < 2; ++i) leave_word(to + i, words[i], turn);
#endif
}

__device__ __forceinline__ void look(const std::uint64_t* from, std::uint64_t* numbers) {
#if defined(__CUDA_ARCH__)
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(numbers[0]), "=l"(numbers[1]) : "l"(from) : "memory");
#else
    for (int i = 0; i < 2; ++i) numbers[i] = look(from + i);
#endif
}

// Begins to copy a vector from global to shared memory (see `begin_copy_bytes` in fp_instructions.cuh, which comes before).
template <Reuse reuse = Reuse::normal, typename T, int N>
__device__ __forceinline__ void fetch(Vec<T, N>* to, const T* from) {
    constexpr int nbytes = sizeof(Vec<T, N>);
#if defined(__CUDA_ARCH__)
    if constexpr (reuse == Reuse::none && nbytes == 16) {
        // blockIdx.y is 0, which the compiler does not know: of a place that it knows as a sum of what is the same for a warp and what is not,
        // nvcc 13.0 makes an instruction that takes the hint from the wrong register.
        const auto place = static_cast<uint32_t>(__cvta_generic_to_shared(to)) ^ blockIdx.y;
        uint64_t leaves_first;
        asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(leaves_first));
        asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(place), "l"(from), "l"(leaves_first)
                     : "memory");
        return;
    }
#endif
    begin_copy_bytes<nbytes>(to, from, nbytes);
}

// The same where only the first `left` elements may be there; zeros for the others.
template <Reuse reuse = Reuse::normal, typename T, int N, typename I>
__device__ __forceinline__ void fetch(Vec<T, N>* to, const T* from, I left) {
    if (left >= N) return fetch<reuse>(to, from);
    if (left > 0) begin_copy_bytes<sizeof(Vec<T, N>)>(to, from, static_cast<int>(left) * static_cast<int>(sizeof(T)));
}

// Which of the Steps of a row find in registers what all rows share: Held of them, as far apart as may be, so that what the others need
// is under way for long.
template <int Held, int Steps>
struct Spread {
    // How many of the steps before this one do.
    static constexpr int before(int step) { return step * Held / Steps; }

    static constexpr bool holds(int step) { return before(step + 1) > before(step); }

    // In how many steps comes the next one that does not; there must be one.
    static constexpr int until_next(int step) {
        int next = step + 1;
        while (holds(next % Steps)) ++next;
        return next - step;
    }
};

// What a member leaves: the words of a state, each with the number of its turn above it; with two or more it begins at a multiple of 16 bytes.
// No turn has the number 0.
template <typename State>
struct Left {
    static constexpr int count = Words<State>::count, places = count > 1 ? (count + 1) / 2 * 2 : 1, pairs = count / 2;
    std::uint64_t numbers[count] = {};

    static __device__ __forceinline__ void leave(std::uint64_t* to, const State& state, unsigned turn) {
        const Words<State> words(state);
#pragma unroll
        for (int i = 0; i < pairs; ++i) leave_words(to + 2 * i, words.words + 2 * i, turn);
        if constexpr (count % 2 == 1) leave_word(to + count - 1, words.words[count - 1], turn);
    }

    // As it stands now.
    static __device__ __forceinline__ Left at(const std::uint64_t* from) {
        Left left;
#pragma unroll
        for (int i = 0; i < pairs; ++i) look(from + 2 * i, left.numbers + 2 * i);
        if constexpr (count % 2 == 1) left.numbers[count - 1] = look(from + count - 1);
        return left;
    }

    // Whether all of it is of a turn.
    __device__ __forceinline__ bool is_of(unsigned turn) const {
        bool all = true;
#pragma unroll
        for (int i = 0; i < count; ++i) all &= static_cast<unsigned>(numbers[i] >> 32) == turn;
        return all;
    }

    __device__ __forceinline__ State state() const {
        Words<State> words{State()};
#pragma unroll
        for (int i = 0; i < count; ++i) words.words[i] = static_cast<unsigned>(numbers[i]);
        return words.state();
    }
};

// A block's place in its team, and how the team meets. `Members` neighbouring blocks are a team; there are at most `Teams`.
//
// Members meet once for each sweep over each row, all of them equally often. In turn n (from 1) each member leaves its states,
// every word of them with the number of the turn; a thread of each member for each member looks until it finds that number. So
// nothing is in order but what stands in one word, and no fence is needed. A member that writes in turn n + 2 has found all
// states of turn n + 1, which their members left after they had found those of turn n: so two places per member suffice. All
// blocks are resident, so nobody waits for a block that cannot start.
template <int Members, int Teams>
class Team {
public:
    const int number, count, member;  // which team of how many, and which of its blocks

    // All of `exchange` is zero when the kernel starts.
    __device__ __forceinline__ explicit Team(void* exchange)
        : number(int(blockIdx.x) / Members),
          count(int(gridDim.x) / Members),
          member(int(blockIdx.x) % Members),
          exchange_(static_cast<unsigned char*>(exchange)) {}

    // To be called by the first warp. States begin `Offset` bytes into the exchange.
    template <int Offset, typename State>
    __device__ __forceinline__ void leave(const State& state) {
        if (threadIdx.x == 0) Left<State>::leave(place<Offset, State>(member), state, turn_);
    }

    // What the member that has the thread's number has left, as it stands now. Asked some time before `find`, it has come when that needs it.
    template <int Offset, typename State>
    __device__ __forceinline__ Left<State> ask() const {
        return threadIdx.x < Members ? Left<State>::at(place<Offset, State>(int(threadIdx.x))) : Left<State>();
    }

    // To be called by all threads of a block, after its own first thread has left a state: the state of the member that has the
    // thread's number, none where there is no such member. A block has a thread for each member, or more. `left` is what was asked for.
    template <int Offset, typename State>
    __device__ __forceinline__ State find(Left<State> left = {}) const {
        if (threadIdx.x >= Members) return State();
        while (!left.is_of(turn_)) left = ask<Offset, State>();
        return left.state();
    }

    // To be called by all threads, after the states of a sweep are found.
    __device__ __forceinline__ void next() { ++turn_; }

private:
    template <int Offset, typename State>
    __device__ __forceinline__ std::uint64_t* place(int of) const {
        const int first = (int(turn_ % 2) * Teams + number) * Members + of;
        return reinterpret_cast<std::uint64_t*>(exchange_ + Offset) + first * Left<State>::places;
    }

    unsigned char* const exchange_;
    unsigned turn_ = 1;
};

}  // namespace fp
