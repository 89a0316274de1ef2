// Products of halves by groups of four warps where two of each four numbers on the left are zeros (wgmma.sp): these are left out, so that
// a product of twice as many terms takes as long. Goes behind fp_wgmma.cuh; needs sm_90a.
#pragma once

#include <cstdint>

namespace fp {

// Says where columns lie in shared memory: 16 bytes of a column, 8 columns side by side; `deeper` units of 16 bytes lead to the next 8 terms,
// `across` to the next 8 columns. May be moved on by adding units.
using SparseColumns = uint64_t;

__device__ __forceinline__ SparseColumns sparse_columns(const void* columns, uint32_t deeper, uint32_t across) {
    return tile_descriptor(columns, deeper * 16, across * 16);
}

// Two numbers, rounded, as a word; the first is in its lower half.
__device__ __forceinline__ uint32_t rounded_pair(float first, float second) {
    uint32_t word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    return word;
}

// Begins sums = a b, or sums += a b where `add`, for 64 rows, 32 terms and N columns. Of each four neighbouring terms of a row two are in
// `a`: warp w of the group has rows 16 w and on, its thread t holds in a[i] those of terms 4 (t%4) + 16 (i/2) and on at row t/4 + 8 (i%2).
// A nibble of `pattern` says which they are, two bits each, the same for all rows of a warp. Sums lie as those of `multiply_group`.
template <int N>
__device__ __forceinline__ void multiply_sparse(float (&sums)[N / 2], const uint32_t (&a)[4], uint32_t pattern, SparseColumns b, bool add);

#define FP_MULTIPLY_SPARSE(N, REGISTERS, A, B, PATTERN, ADD, ...)                                                                       \
    template <>                                                                                                                         \
    __device__ __forceinline__ void multiply_sparse<N>(                                                                                 \
        float (&sums)[N / 2], const uint32_t (&a)[4], uint32_t pattern, SparseColumns b, bool add)                                      \
    {                                                                                                                                   \
        asm volatile(                                                                                                                   \
            "{ .reg .pred p; setp.ne.b32 p, " ADD ", 0; wgmma.mma_async.sp.sync.aligned.m64n" #N "k32.f32.f16.f16 {" REGISTERS "}, {" A \
            "}, " B ", " PATTERN ", 0, p, 1, 1, 0; }"                                                                                   \
            : __VA_ARGS__                                                                                                               \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(pattern), "r"(int(add)));                                         \
    }

FP_MULTIPLY_SPARSE(16, FP_REGISTERS_0, "%8, %9, %10, %11", "%12", "%13", "%14", FP_EIGHT(0))
FP_MULTIPLY_SPARSE(32, FP_REGISTERS_0 ", " FP_REGISTERS_1, "%16, %17, %18, %19", "%20", "%21", "%22", FP_EIGHT(0), FP_EIGHT(8))
FP_MULTIPLY_SPARSE(48, FP_REGISTERS_0 ", " FP_REGISTERS_1 ", " FP_REGISTERS_2, "%24, %25, %26, %27", "%28", "%29", "%30", FP_EIGHT(0), FP_EIGHT(8), FP_EIGHT(16))

}  // namespace fp
