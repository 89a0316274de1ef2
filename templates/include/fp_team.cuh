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

// Adds one; what this thread, and those it has met at a barrier, did before comes before it.
__device__ __forceinline__ void add_release(unsigned* to) {
#if defined(__CUDA_ARCH__)
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(to) : "memory");
#else
    __threadfence();
    atomicAdd(to, 1u);
#endif
}

// What this thread, and those it meets at a barrier, do next comes after it.
__device__ __forceinline__ unsigned load_acquire(const unsigned* from) {
    unsigned value;
#if defined(__CUDA_ARCH__)
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
#else
    __nanosleep(20);
    value = *static_cast<const volatile unsigned*>(from);
    __threadfence();
#endif
    return value;
}

// Begins to copy a vector from global to shared memory (see `begin_copy_bytes` in fp_instructions.cuh, which comes before).
template <Reuse reuse = Reuse::normal, typename T, int N>
__device__ __forceinline__ void fetch(Vec<T, N>* to, const T* from) {
    constexpr int nbytes = sizeof(Vec<T, N>);
#if defined(__CUDA_ARCH__)
    if constexpr (reuse == Reuse::none && nbytes == 16) {
        const auto place = static_cast<uint32_t>(__cvta_generic_to_shared(to));
        uint64_t leaves_first;
        asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(leaves_first));
        asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(place), "l"(from), "l"(leaves_first)
                     : "memory");
        return;
    }
#endif
    begin_copy_bytes<nbytes>(to, from, nbytes);
}

// A block's place in its team, and how the team meets. `Members` neighbouring blocks are a team; there are at most `Teams`.
//
// Members meet once for each sweep over each row, all of them equally often. In turn n each member's first warp leaves its
// states, arrives, waits until all members have arrived n times, and reads what they left. A member that writes in turn
// n + 2 has seen all arrive in turn n + 1, which they do after they have read in turn n: so two places per member suffice.
// All blocks are resident, so nobody waits for a block that cannot start.
template <int Members, int Teams>
class Team {
public:
    const int number, count, member;  // which team of how many, and which of its blocks

    // `exchange` begins with a counter for each team, in a line of its own, all of them zero when the kernel starts.
    __device__ __forceinline__ explicit Team(void* exchange)
        : number(int(blockIdx.x) / Members),
          count(int(gridDim.x) / Members),
          member(int(blockIdx.x) % Members),
          exchange_(static_cast<unsigned char*>(exchange)) {}

    // To be called by the first warp. States begin `Offset` bytes into the exchange.
    template <int Offset, typename State>
    __device__ __forceinline__ void leave(const State& state) {
        if (threadIdx.x != 0) return;
        const Words<State> words(state);
        volatile unsigned* to = place<Offset, State>(member);
#pragma unroll
        for (int i = 0; i < Words<State>::count; ++i) to[i] = words.words[i];
    }

    // To be called by the first warp: what any member left before it came is visible after it.
    __device__ __forceinline__ void meet() {
        if (threadIdx.x == 0) {
            unsigned* const arrived = reinterpret_cast<unsigned*>(exchange_ + number * 128);
            const unsigned wanted = (turn_ + 1) * Members;
            add_release(arrived);  // what this block has left and read comes before its arrival
            while (load_acquire(arrived) < wanted) {  // what is read next comes after all arrivals
            }
        }
        __syncwarp();
    }

    // To be called by the first warp, after the meeting: the states of all members merged, in the same order in each of them.
    template <int Offset, typename State>
    __device__ __forceinline__ State gather() const {
        constexpr int rounds = (Members + 31) / 32;
        const int lane = threadIdx.x % 32;
        State merged;
        unsigned left[rounds][Words<State>::count];  // all of them under way before the first is merged
#pragma unroll
        for (int i = 0; i < rounds; ++i) {
            const int other = i * 32 + lane < Members ? i * 32 + lane : 0;
            const volatile unsigned* from = place<Offset, State>(other);  // volatile: never from the first-level cache, nor earlier
#pragma unroll
            for (int k = 0; k < Words<State>::count; ++k) left[i][k] = from[k];
        }
#pragma unroll
        for (int i = 0; i < rounds; ++i) {
            Words<State> words(merged);
#pragma unroll
            for (int k = 0; k < Words<State>::count; ++k) words.words[k] = left[i][k];
            if (i * 32 + lane < Members) merged.merge(words.state());
        }
        merge_lanes<32>(merged);
        return merged;
    }

    // After the last state of a sweep is gathered.
    __device__ __forceinline__ void next() { ++turn_; }

private:
    template <int Offset, typename State>
    __device__ __forceinline__ unsigned* place(int of) const {
        const int first = (int(turn_ % 2) * Teams + number) * Members + of;
        return reinterpret_cast<unsigned*>(exchange_ + Offset) + first * Words<State>::count;
    }

    unsigned char* const exchange_;
    unsigned turn_ = 0;
};

}  // namespace fp
