// Blocks of a cluster that share a row: each leaves its reduction states in the shared memory of all. Goes behind fp_merge.cuh.
//
// A block leaves states after it has found that all blocks of its cluster run, and nobody reads them, or ends, before all blocks have
// left theirs. Each place is written once.
#pragma once

#include <cstdint>

namespace fp {

// To be called by all threads at the beginning: the block runs.
__device__ __forceinline__ void enter_cluster() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }

// To be called by all threads before the first state is left: all blocks run.
__device__ __forceinline__ void await_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// To be called by all threads: what blocks left before is there.
__device__ __forceinline__ void meet_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Room for a state of each block.
template <typename State, int Members>
using MemberSlots = Slots<Words<State>, Members>;

// To be called by all threads, which have the same state: block `member` leaves it in every block.
template <int Members, typename State>
__device__ __forceinline__ void leave_member(MemberSlots<State, Members>& slots, const State& state, int member) {
    if (threadIdx.x >= Members) return;
    const Words<State> words(state);
    const auto own = static_cast<uint32_t>(__cvta_generic_to_shared(&slots[member]));
    uint32_t there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(own), "r"(threadIdx.x));
#pragma unroll
    for (int i = 0; i < Words<State>::count; ++i) {
        asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(there + 4 * i), "r"(words.words[i]) : "memory");
    }
}

// To be called by all threads behind `meet_cluster`: the merged state of all blocks, the same bits in each.
template <int Members, typename State>
__device__ __forceinline__ void gather_members(MemberSlots<State, Members>& slots, State& state) {
    const int place = threadIdx.x % Members;
    state = slots[place].state();
    merge_lanes<Members>(state);
}

}  // namespace fp
