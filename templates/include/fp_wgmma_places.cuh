// Products by groups of four warps (wgmma) of halves that both lie in shared memory without a swizzle: 8 halves of a position, or of a column,
// are a place of 16 bytes; 8 neighbours are 128 bytes. Goes behind fp_wgmma.cuh; needs sm_90a.
#pragma once

#include <cstdint>

#include "fp_half.h"

namespace fp {

// Says where places begin whose 8 groups of 8 neighbours are `run` places apart, for `multiply_places`. Places may be added to it.
__device__ __forceinline__ uint64_t place_descriptor(const void* tile, uint32_t run) {
    const auto place = static_cast<uint32_t>(__cvta_generic_to_shared(tile));
    return uint64_t(place >> 4 & 0x3fff) | uint64_t(run) << 32;
}

// The same, `taps` % 2^16 places further on, with the other half of the inner dimension `taps` / 2^16 places behind. Neither field runs over.
__device__ __forceinline__ uint64_t at_taps(uint64_t places, uint32_t taps) {
    return (places >> 32 << 32) | (uint32_t(places) + taps);
}

// Where weights begin that lie `units` of 16 bytes further on; `weights` says where others do, or would.
__device__ __forceinline__ uint64_t at_weights(uint64_t weights, uint32_t units) {
    return (weights >> 32 << 32) | (uint32_t(weights) + units);
}

// The number of this thread's warp. The compiler knows of it that a warp's threads agree, so what descriptors are made of is computed once for
// a warp: a product by five instructions instead of seventeen.
__device__ __forceinline__ int warp_number() { return __shfl_sync(0xffffffffu, int(threadIdx.x) / 32, 0); }

// Begins sums = a b, or sums += a b where `Add`, for 64 rows and N columns, 16 halves of type T along the inner dimension; sums lie as those of
// `multiply_group`. They must have a value in any case: given registers without one, the compiler was seen to leave products out.
template <typename T, int N, bool Add>
__device__ __forceinline__ void multiply_places(float (&sums)[N / 2], uint64_t a, uint64_t b);

#define FP_IS_true "1"
#define FP_IS_false "0"
#define FP_MULTIPLY_PLACES_BY(T, KIND, N, ADD, REGISTERS, A, B, ...)                                                             \
    template <>                                                                                                                  \
    __device__ __forceinline__ void multiply_places<T, N, ADD>(float (&sums)[N / 2], uint64_t a, uint64_t b) {                   \
        asm volatile(                                                                                                            \
            "{ .reg .pred p; setp.ne.b32 p, " FP_IS_##ADD ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." KIND "." KIND   \
            " {" REGISTERS "}, " A ", " B ", p, 1, 1, 0, 0; }"                                                                   \
            : __VA_ARGS__                                                                                                        \
            : "l"(a), "l"(b));                                                                                                   \
    }
#define FP_MULTIPLY_PLACES(N, REGISTERS, A, B, ...)                                                                              \
    FP_MULTIPLY_PLACES_BY(half, "f16", N, true, REGISTERS, A, B, __VA_ARGS__)                                                    \
    FP_MULTIPLY_PLACES_BY(half, "f16", N, false, REGISTERS, A, B, __VA_ARGS__)                                                   \
    FP_MULTIPLY_PLACES_BY(bfloat16, "bf16", N, true, REGISTERS, A, B, __VA_ARGS__)                                               \
    FP_MULTIPLY_PLACES_BY(bfloat16, "bf16", N, false, REGISTERS, A, B, __VA_ARGS__)

FP_MULTIPLY_PLACES(16, FP_REGISTERS_0, "%8", "%9", FP_EIGHT(0))
FP_MULTIPLY_PLACES(32, FP_REGISTERS_0 ", " FP_REGISTERS_1, "%16", "%17", FP_EIGHT(0), FP_EIGHT(8))
FP_MULTIPLY_PLACES(48, FP_REGISTERS_0 ", " FP_REGISTERS_1 ", " FP_REGISTERS_2, "%24", "%25", FP_EIGHT(0), FP_EIGHT(8), FP_EIGHT(16))
FP_MULTIPLY_PLACES(64, FP_REGISTERS_0 ", " FP_REGISTERS_1 ", " FP_REGISTERS_2 ", " FP_REGISTERS_3, "%32", "%33", FP_EIGHT(0), FP_EIGHT(8), FP_EIGHT(16), FP_EIGHT(24))
FP_MULTIPLY_PLACES(80, FP_REGISTERS_0 ", " FP_REGISTERS_1 ", " FP_REGISTERS_2 ", " FP_REGISTERS_3 ", " FP_REGISTERS_4, "%40", "%41", FP_EIGHT(0), FP_EIGHT(8), FP_EIGHT(16), FP_EIGHT(24), FP_EIGHT(32))
FP_MULTIPLY_PLACES(96, FP_REGISTERS_0 ", " FP_REGISTERS_1 ", " FP_REGISTERS_2 ", " FP_REGISTERS_3 ", " FP_REGISTERS_4 ", " FP_REGISTERS_5, "%48", "%49", FP_EIGHT(0), FP_EIGHT(8), FP_EIGHT(16), FP_EIGHT(24), FP_EIGHT(32), FP_EIGHT(40))
FP_MULTIPLY_PLACES(112, FP_REGISTERS_0 ", " FP_REGISTERS_1 ", " FP_REGISTERS_2 ", " FP_REGISTERS_3 ", " FP_REGISTERS_4 ", " FP_REGISTERS_5 ", " FP_REGISTERS_6, "%56", "%57", FP_EIGHT(0), FP_EIGHT(8), FP_EIGHT(16), FP_EIGHT(24), FP_EIGHT(32), FP_EIGHT(40), FP_EIGHT(48))
FP_MULTIPLY_PLACES(128, FP_REGISTERS_0 ", " FP_REGISTERS_1 ", " FP_REGISTERS_2 ", " FP_REGISTERS_3 ", " FP_REGISTERS_4 ", " FP_REGISTERS_5 ", " FP_REGISTERS_6 ", " FP_REGISTERS_7, "%64", "%65", FP_EIGHT(0), FP_EIGHT(8), FP_EIGHT(16), FP_EIGHT(24), FP_EIGHT(32), FP_EIGHT(40), FP_EIGHT(48), FP_EIGHT(56))

}  // namespace fp
