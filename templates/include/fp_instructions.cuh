// Instructions of the PTX ISA that C++ has no name for.
#pragma once

#include <cstdint>

namespace fp {

// sum += a b for a 16 x 8 tile a and an 8 x 8 tile b on a tensor core, which takes 10 bits of mantissa (mma.m16n8k8). Thread t holds
// a[t/4 + 8 (i%2)][t%4 + 4 (i/2)], b[t%4 + 4 i][t/4] and sum[t/4 + 8 (i/2)][2 (t%4) + i%2].
__device__ __forceinline__ void multiply_tile(float (&sum)[4], const float (&a)[4], const float (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
          "r"(__float_as_uint(b[0])), "r"(__float_as_uint(b[1])));
}

// Begins to copy one float from global to shared memory, or zero where there is no `real` one; `from` is read only then.
__device__ __forceinline__ void begin_copy(float* to, const float* from, bool real) {
    const auto place = static_cast<uint32_t>(__cvta_generic_to_shared(to));
    const int nbytes = real ? 4 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(place), "l"(from), "r"(nbytes) : "memory");
}

// Begins to copy `Bytes` bytes (4, 8 or 16, at a multiple of that) from global to shared memory: the first `real` ones, then zeros. What
// is not real is not read.
template <int Bytes>
__device__ __forceinline__ void begin_copy_bytes(void* to, const void* from, int real) {
    const auto place = static_cast<uint32_t>(__cvta_generic_to_shared(to));
    if constexpr (Bytes == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(place), "l"(from), "r"(real) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(place), "l"(from), "n"(Bytes), "r"(real) : "memory");
    }
}

// Ends a group of this thread's copies.
__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for all but the last `Groups` groups of this thread's copies.
template <int Groups>
__device__ __forceinline__ void await_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Groups) : "memory");
}

}  // namespace fp
