// What templates/include/fp_cluster.cuh has, for the emulation: the blocks of a launch are threads of the host, and what they share lies equally
// far from a place of each.
#pragma once

#include <atomic>
#include <cstdint>

namespace fp {

namespace emulated_cluster {

constexpr unsigned most_blocks = 4096;
static thread_local char place;  // static: libraries have places of their own
static std::atomic<char*> places[most_blocks];
static std::atomic<unsigned> arrived[most_blocks];  // of each cluster, by its first block
static thread_local unsigned met;
static unsigned members;  // blocks of a cluster

// All threads of all blocks of the cluster come here before one goes on.
inline void meet() {
    __syncthreads();
    if (threadIdx.x == 0) {
        std::atomic<unsigned>& count = arrived[blockIdx.x / members];
        const unsigned wanted = ++met * members;
        ++count;
        while (count < wanted) emulation::give_way();
    }
    __syncthreads();
}

}  // namespace emulated_cluster

inline void enter_cluster() {
    if (threadIdx.x == 0) emulated_cluster::places[blockIdx.x] = &emulated_cluster::place;
}
inline void await_cluster() { emulated_cluster::meet(); }
inline void meet_cluster() { emulated_cluster::meet(); }

template <typename State, int Members>
using MemberSlots = Slots<Words<State>, Members>;

template <int Members, typename State>
void leave_member(MemberSlots<State, Members>& slots, const State& state, int member) {
    if (threadIdx.x >= Members) return;
    const unsigned other = blockIdx.x / Members * Members + threadIdx.x;
    char* const there = reinterpret_cast<char*>(&slots[member]) - &emulated_cluster::place + emulated_cluster::places[other].load();
    *reinterpret_cast<Words<State>*>(there) = Words<State>(state);
}

template <int Members, typename State>
void gather_members(MemberSlots<State, Members>& slots, State& state) {
    state = slots[threadIdx.x % Members].state();
    merge_lanes<Members>(state);
}

// Runs a kernel whose blocks are clusters.
template <auto Kernel, typename... Arguments>
void launch_clusters(int size, int blocks, int threads, int shared, void*, Arguments... arguments) {
    if (blocks % size != 0 || unsigned(blocks) > emulated_cluster::most_blocks) emulation::fail("a launch of an impossible number of clusters");
    emulated_cluster::members = unsigned(size);
    for (auto& each : emulated_cluster::arrived) each = 0;
    emulation::launch(blocks, threads, shared, [&] { Kernel(arguments...); }, true);
}

}  // namespace fp
