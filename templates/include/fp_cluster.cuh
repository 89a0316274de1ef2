// Blocks of a cluster.
#pragma once

namespace fp {

// To be called by all threads of all blocks of the cluster: what blocks left before is there.
__device__ __forceinline__ void meet_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

}  // namespace fp
