// Instructions of the PTX ISA that C++ has no name for.
#pragma once

#include <cstdint>
#include <cstring>

#include "fp_half.h"

namespace fp {

// sum += a b for a 16 x 8 tile a and an 8 x 8 tile b on a tensor core, which takes 10 bits of mantissa (mma.m16n8k8). Thread t holds
// a[t/4 + 8 (i%2)][t%4 + 4 (i/2)], b[t%4 + 4 i][t/4] and sum[t/4 + 8 (i/2)][2 (t%4) + i%2].
__device__ __forceinline__ void multiply_tile(float (&sum)[4], const float (&a)[4], const float (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
          "r"(__float_as_uint(b[0])), "r"(__float_as_uint(b[1])));
}

// sum += a b for a 16 x 16 tile a and a 16 x 8 tile b of halves, all products exact and the sum in float32 (mma.m16n8k16). A word has
// two neighbours of the inner dimension, the first in its lower half. Thread t holds in a[i] those at row t/4 + 8 (i%2) and inner
// place 2 (t%4) + 8 (i/2), in b[i] those at 2 (t%4) + 8 i of column t/4; sums as above.
template <typename Half>
__device__ __forceinline__ void multiply_tile(float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    if constexpr (std::is_same_v<Half, half>) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
}

// Four 8 x 8 tiles of 16-bit units from shared memory, each row 16 bytes at a multiple of 16. Thread t points to row t%8 of tile t/8, and
// gets in words[i] the units 2 (t%4) and one behind of row t/4 of tile i; with `Transposed`, rows 2 (t%4) and one behind of column t/4.
template <bool Transposed>
__device__ __forceinline__ void load_tiles(uint32_t (&words)[4], const void* row) {
    const auto place = static_cast<uint32_t>(__cvta_generic_to_shared(row));
    if constexpr (Transposed) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(place) : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(place) : "memory");
    }
}

// Begins to copy one float from global to shared memory, or zero where there is no `real` one; `from` is read only then.
__device__ __forceinline__ void begin_copy(float* to, const float* from, bool real) {
    const auto place = static_cast<uint32_t>(__cvta_generic_to_shared(to));
    const int nbytes = real ? 4 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(place), "l"(from), "r"(nbytes) : "memory");
}

// Begins to copy `Bytes` bytes (4, 8 or 16, at a multiple of that) from global to shared memory: the first `real` ones, then zeros. What
// is not real is not read. Fewer, for which there is no such instruction, are copied at once.
template <int Bytes>
__device__ __forceinline__ void begin_copy_bytes(void* to, const void* from, int real) {
    if constexpr (Bytes == 2) {
        *static_cast<uint16_t*>(to) = real ? *static_cast<const uint16_t*>(from) : uint16_t(0);
        return;
    }
    if constexpr (Bytes == 1) {
        *static_cast<uint8_t*>(to) = real ? *static_cast<const uint8_t*>(from) : uint8_t(0);
        return;
    }
    const auto place = static_cast<uint32_t>(__cvta_generic_to_shared(to));
    if constexpr (Bytes == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(place), "l"(from), "r"(real) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(place), "l"(from), "n"(Bytes), "r"(real) : "memory");
    }
}

// Four neighbours, at a multiple of 16 bytes if `Aligned`. Loads stay in their order, and before what follows them.
template <bool Aligned>
__device__ __forceinline__ void load_quad(float (&to)[4], const float* from) {
    if constexpr (Aligned) {
        asm volatile("ld.global.nc.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3]) : "l"(from) : "memory");
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(to[i]) : "l"(from + i) : "memory");
    }
}

// Two numbers rounded to halves, the first in the lower half of a word.
__device__ __forceinline__ uint32_t pack_halves(float first, float second) {
    uint32_t made;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(made) : "f"(second), "f"(first));
    return made;
}

// The larger one of each two halves and the magnitudes of others; NaN is smaller than all.
__device__ __forceinline__ uint32_t largest_halves(uint32_t halves, uint32_t others) {
    asm("{ .reg .b32 magnitudes; abs.f16x2 magnitudes, %1; max.f16x2 %0, %0, magnitudes; }" : "+r"(halves) : "r"(others));
    return halves;
}

// Whether one of two halves that are not negative is infinite.
constexpr uint32_t infinite_half = 0x7c00;
__device__ __forceinline__ bool has_infinity(uint32_t halves) {
    return halves >> 16 == infinite_half || (halves & 0xffff) == infinite_half;
}

// The warps of a group of four give up registers until so many are left to each thread, or take as many as that from what was given up.
template <int Count>
__device__ __forceinline__ void leave_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count)); }
template <int Count>
__device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count)); }

// Ends a group of this thread's copies.
__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for all but the last `Groups` groups of this thread's copies.
template <int Groups>
__device__ __forceinline__ void await_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Groups) : "memory");
}

}  // namespace fp
