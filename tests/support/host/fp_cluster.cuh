// What templates/include/fp_cluster.cuh has, for the emulation: the blocks of a launch are threads of the host.
#pragma once

#include <atomic>

namespace fp {

namespace emulated_cluster {

constexpr unsigned most_blocks = 4096;
static std::atomic<unsigned> arrived[most_blocks];  // of each cluster, by its first block
static thread_local unsigned met;
static unsigned members;  // blocks of a cluster

}  // namespace emulated_cluster

// All threads of all blocks of the cluster come here before one goes on.
inline void meet_cluster() {
    __syncthreads();
    if (threadIdx.x == 0) {
        std::atomic<unsigned>& count = emulated_cluster::arrived[blockIdx.x / emulated_cluster::members];
        const unsigned wanted = ++emulated_cluster::met * emulated_cluster::members;
        ++count;
        while (count < wanted) emulation::give_way();
    }
    __syncthreads();
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
