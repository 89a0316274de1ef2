// Products on Hopper's tensor cores by groups of four warps (wgmma). Goes behind fp_instructions.cuh; needs sm_90a.
#pragma once

#include <cstdint>

namespace fp {

// Says where a tile of columns lies in shared memory, for `multiply_group`: blocks of 8 columns x 16 bytes along the inner dimension,
// 128 bytes each, a column after the other; `deeper` bytes lead to the next block along the inner dimension, `across` to the next 8 columns.
__device__ __forceinline__ uint64_t tile_descriptor(const void* tile, uint32_t deeper, uint32_t across) {
    const auto place = static_cast<uint32_t>(__cvta_generic_to_shared(tile));
    return uint64_t(place >> 4 & 0x3fff) | uint64_t(deeper >> 4) << 16 | uint64_t(across >> 4) << 32;
}

// What this thread has written to shared memory may be read by products after the next barrier.
__device__ __forceinline__ void publish_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// As `__syncthreads`, for the 128 threads of a group alone: each group has a barrier of its own.
__device__ __forceinline__ void meet_group() { asm volatile("bar.sync %0, 128;" ::"r"(1 + threadIdx.x / 128) : "memory"); }

// Goes before products whose registers were written since the last ones.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Ends a group of products.
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits for all but the last `Groups` groups of products.
template <int Groups>
__device__ __forceinline__ void await_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Groups) : "memory");
}

// Goes behind the wait for products of `a`: products read registers while they run, but to the compiler `a` has been used when they
// begin, and its registers are free. So this uses `a` once more, by a store under a condition that is never true.
template <int N>
__device__ __forceinline__ void release(const float (&a)[N]) {
    static_assert(N % 4 == 0);
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        asm volatile(
            "{ .reg .pred never; .reg .u32 count; mov.u32 count, %%nsmid; setp.eq.u32 never, count, 0; @never st.shared.v4.f32 [count], {%0, %1, %2, %3}; }"
            ::"f"(a[i]), "f"(a[i + 1]), "f"(a[i + 2]), "f"(a[i + 3]) : "memory");
    }
}

#define FP_REGISTERS_0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define FP_REGISTERS_1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define FP_REGISTERS_2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define FP_REGISTERS_3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define FP_REGISTERS_4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define FP_REGISTERS_5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define FP_REGISTERS_6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define FP_REGISTERS_7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define FP_REGISTERS_8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define FP_REGISTERS_9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define FP_REGISTERS_10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define FP_REGISTERS_11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define FP_REGISTERS_12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define FP_REGISTERS_13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define FP_REGISTERS_14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define FP_REGISTERS_15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define FP_EIGHT(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3]), "+f"(sums[i + 4]), "+f"(sums[i + 5]), "+f"(sums[i + 6]), "+f"(sums[i + 7])

// Begins sums = a b, or sums += a b where `add`, for 64 rows and N columns of float32, of which the tensor core takes 10 bits of
// mantissa, 8 along the inner dimension. Warp w of the group has rows 16 w and on: its thread t holds a[i] at row t/4 + 8 (i%2) and inner
// place t%4 + 4 (i/2), and sums[4 j + i] at row t/4 + 8 (i/2) and column 8 j + 2 (t%4) + i%2. `a` must be released; see above.
template <int N>
__device__ __forceinline__ void multiply_group(float (&sums)[N / 2], const float (&a)[4], uint64_t b, bool add);

#define FP_MULTIPLY_GROUP(N, REGISTERS, A, B, ADD, ...)                                                                           \
    template <>                                                                                                                     \
    __device__ __forceinline__ void multiply_group<N>(float (&sums)[N / 2], const float (&a)[4], uint64_t b, bool add) {             \
        asm volatile(                                                                                                               \
            "{ .reg .pred p; setp.ne.b32 p, " ADD ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k8.f32.tf32.tf32 {" REGISTERS "}, {" A  \
            "}, " B ", p, 1, 1; }"                                                                                                  \
            : __VA_ARGS__                                                                                                           \
            : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])), "l"(b), \
              "r"(int(add)));                                                                                                       \
    }

FP_MULTIPLY_GROUP(8, "%0, %1, %2, %3", "%4, %5, %6, %7", "%8", "%9", "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]))
FP_MULTIPLY_GROUP(16, FP_REGISTERS_0, "%8, %9, %10, %11", "%12", "%13", FP_EIGHT(0))
FP_MULTIPLY_GROUP(32, FP_REGISTERS_0 ", " FP_REGISTERS_1, "%16, %17, %18, %19", "%20", "%21", FP_EIGHT(0), FP_EIGHT(8))
FP_MULTIPLY_GROUP(48, FP_REGISTERS_0 ", " FP_REGISTERS_1 ", " FP_REGISTERS_2, "%24, %25, %26, %27", "%28", "%29", FP_EIGHT(0), FP_EIGHT(8), FP_EIGHT(16))
FP_MULTIPLY_GROUP(64, FP_REGISTERS_0 ", " FP_REGISTERS_1 ", " FP_REGISTERS_2 ", " FP_REGISTERS_3, "%32, %33, %34, %35", "%36", "%37", FP_EIGHT(0), FP_EIGHT(8), FP_EIGHT(16), FP_EIGHT(24))
FP_MULTIPLY_GROUP(80, FP_REGISTERS_0 ", " FP_REGISTERS_1 ", " FP_REGISTERS_2 ", " FP_REGISTERS_3 ", " FP_REGISTERS_4, "%40, %41, %42, %43", "%44", "%45", FP_EIGHT(0), FP_EIGHT(8), FP_EIGHT(16), FP_EIGHT(24), FP_EIGHT(32))
FP_MULTIPLY_GROUP(96, FP_REGISTERS_0 ", " FP_REGISTERS_1 ", " FP_REGISTERS_2 ", " FP_REGISTERS_3 ", " FP_REGISTERS_4 ", " FP_REGISTERS_5, "%48, %49, %50, %51", "%52", "%53", FP_EIGHT(0), FP_EIGHT(8), FP_EIGHT(16), FP_EIGHT(24), FP_EIGHT(32), FP_EIGHT(40))
FP_MULTIPLY_GROUP(112, FP_REGISTERS_0 ", " FP_REGISTERS_1 ", " FP_REGISTERS_2 ", " FP_REGISTERS_3 ", " FP_REGISTERS_4 ", " FP_REGISTERS_5 ", " FP_REGISTERS_6, "%56, %57, %58, %59", "%60", "%61", FP_EIGHT(0), FP_EIGHT(8), FP_EIGHT(16), FP_EIGHT(24), FP_EIGHT(32), FP_EIGHT(40), FP_EIGHT(48))
FP_MULTIPLY_GROUP(128, FP_REGISTERS_0 ", " FP_REGISTERS_1 ", " FP_REGISTERS_2 ", " FP_REGISTERS_3 ", " FP_REGISTERS_4 ", " FP_REGISTERS_5 ", " FP_REGISTERS_6 ", " FP_REGISTERS_7, "%64, %65, %66, %67", "%68", "%69", FP_EIGHT(0), FP_EIGHT(8), FP_EIGHT(16), FP_EIGHT(24), FP_EIGHT(32), FP_EIGHT(40), FP_EIGHT(48), FP_EIGHT(56))

}  // namespace fp
