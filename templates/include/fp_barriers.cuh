// Barriers in shared memory that count arrivals and bytes, and copies that arrive there (mbarrier and cp.async.bulk of the PTX ISA). A
// barrier's phase ends when as many arrivals as it was made for, and all bytes that were announced, have come. Needs sm_90.
#pragma once

#include <cstdint>

namespace fp {

using Barrier = uint64_t;
struct TensorMap;  // fp_tensor_map.cuh

__device__ __forceinline__ uint32_t place_of(const void* shared) { return static_cast<uint32_t>(__cvta_generic_to_shared(shared)); }

// Makes a barrier for so many arrivals. By one thread, before `publish_barriers` and a barrier of the block.
__device__ __forceinline__ void make_barrier(Barrier* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(place_of(barrier)), "r"(arrivals) : "memory");
}

// The barriers that this thread made are there for copies, too.
__device__ __forceinline__ void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void arrive(Barrier* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(place_of(barrier)) : "memory");
}

// Arrives, and announces so many bytes of copies.
__device__ __forceinline__ void arrive_before(Barrier* barrier, uint32_t nbytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(place_of(barrier)), "r"(nbytes) : "memory");
}

// Waits until phase number `phase` has ended, the one at hand or the one before.
__device__ __forceinline__ void await_phase(Barrier* barrier, int phase) {
    asm volatile(
        "{ .reg .pred ended; again: mbarrier.try_wait.parity.shared::cta.b64 ended, [%0], %1; @ended bra on; bra again; on: }"
        ::"r"(place_of(barrier)), "r"(phase & 1) : "memory");
}

// Begins to copy `nbytes`, a multiple of 16, from global to shared memory, both at a multiple of 16; they arrive at `barrier`. What was read
// there by products before must have been awaited.
__device__ __forceinline__ void begin_long_copy(void* to, const void* from, uint32_t nbytes, Barrier* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(place_of(to)), "l"(from), "r"(nbytes), "r"(place_of(barrier)) : "memory");
}

// Begins to copy the box of `map` at (x, y, z) to shared memory, a multiple of 1024 bytes; it arrives at `barrier`.
__device__ __forceinline__ void begin_box_copy(void* to, const TensorMap& map, int x, int y, int z, Barrier* barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
                 ::"r"(place_of(to)), "l"(&map), "r"(x), "r"(y), "r"(z), "r"(place_of(barrier)) : "memory");
}

}  // namespace fp
