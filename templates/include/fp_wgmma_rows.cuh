// Products by groups of four warps whose operands lie in shared memory in rows of 128 bytes, the chunks of 16 bytes of row r in the order
// c ^ r % 8. A row goes along the inner dimension, as in `fp::Panel`; or it has 64 numbers of 16 bits along the other one, row k is at
// place k of the inner dimension, and 64 rows on the next 64 numbers begin. Goes behind fp_wgmma.cuh; needs sm_90a.
#pragma once

#include <cstdint>

#include "fp_half.h"

namespace fp {

// Says where such rows begin: a multiple of 1024 bytes, plus 32 bytes for each slice of the inner dimension, or 16 rows of 128 bytes. A
// descriptor may be moved on by adding bytes / 16.
__device__ __forceinline__ uint64_t row_descriptor(const void* rows) {
    const auto place = static_cast<uint32_t>(__cvta_generic_to_shared(rows));
    constexpr uint64_t next_columns = 64 * 128 / 16, next_rows = 8 * 128 / 16, swizzled = 1;
    return uint64_t(place >> 4 & 0x3fff) | next_columns << 16 | next_rows << 32 | swizzled << 62;
}

// Says where columns begin that are no rows but lie without a swizzle: 16 bytes of each, 8 neighbours side by side, one after another;
// `deeper` units of 16 bytes lead to the second half of what a product takes of the inner dimension. May be moved on as well.
__device__ __forceinline__ uint64_t run_descriptor(const void* columns, uint32_t deeper) {
    return tile_descriptor(columns, deeper * 16, 128);
}

// As `multiply_group`, for columns in such rows.
template <int N>
__device__ __forceinline__ void multiply_columns(float (&sums)[N / 2], const float (&a)[4], uint64_t b, bool add) {
    multiply_group<N>(sums, a, b, add);
}

// Begins sums += a b for 64 rows and N columns of type T, 32 bytes of each along the inner dimension, both in such rows, which go along
// the inner dimension unless `ATurned` or `BTurned`; sums lie as those of `multiply_group`.
template <typename T, int N>
struct RowProduct;

#define FP_ROW_PRODUCT(T, N, SHAPE, TURNED, REGISTERS, A, B, ...)                                                            \
    template <>                                                                                                              \
    struct RowProduct<T, N> {                                                                                                \
        template <bool ATurned, bool BTurned>                                                                                \
        static __device__ __forceinline__ void begin(float (&sums)[N / 2], uint64_t a, uint64_t b) {                         \
            asm volatile(                                                                                                    \
                "{ .reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n" #N SHAPE " {" REGISTERS "}, " A     \
                ", " B ", p, 1, 1" TURNED "; }"                                                                              \
                : __VA_ARGS__                                                                                                \
                : "l"(a), "l"(b), "n"(int(ATurned)), "n"(int(BTurned)));                                                     \
        }                                                                                                                    \
    };
#define FP_ROW_PRODUCTS(T, SHAPE, TURNED_64, TURNED_128, TURNED_256)                                                         \
    FP_ROW_PRODUCT(T, 64, SHAPE, TURNED_64, FP_REGISTERS_TO_32, "%32", "%33", FP_SUMS_TO_32)                                 \
    FP_ROW_PRODUCT(T, 128, SHAPE, TURNED_128, FP_REGISTERS_TO_32 ", " FP_REGISTERS_TO_64, "%64", "%65", FP_SUMS_TO_64)       \
    FP_ROW_PRODUCT(T, 256, SHAPE, TURNED_256, FP_REGISTERS_TO_32 ", " FP_REGISTERS_TO_64 ", " FP_REGISTERS_TO_128, "%128", "%129", FP_SUMS_TO_128)

#define FP_REGISTERS_TO_32 FP_REGISTERS_0 ", " FP_REGISTERS_1 ", " FP_REGISTERS_2 ", " FP_REGISTERS_3
#define FP_REGISTERS_TO_64 FP_REGISTERS_4 ", " FP_REGISTERS_5 ", " FP_REGISTERS_6 ", " FP_REGISTERS_7
#define FP_REGISTERS_TO_128                                                                                                  \
    FP_REGISTERS_8 ", " FP_REGISTERS_9 ", " FP_REGISTERS_10 ", " FP_REGISTERS_11 ", " FP_REGISTERS_12 ", " FP_REGISTERS_13   \
    ", " FP_REGISTERS_14 ", " FP_REGISTERS_15
#define FP_SUMS_TO_32 FP_EIGHT(0), FP_EIGHT(8), FP_EIGHT(16), FP_EIGHT(24)
#define FP_SUMS_TO_64 FP_SUMS_TO_32, FP_EIGHT(32), FP_EIGHT(40), FP_EIGHT(48), FP_EIGHT(56)
#define FP_SUMS_TO_128                                                                                                       \
    FP_SUMS_TO_64, FP_EIGHT(64), FP_EIGHT(72), FP_EIGHT(80), FP_EIGHT(88), FP_EIGHT(96), FP_EIGHT(104), FP_EIGHT(112), FP_EIGHT(120)

// The same for columns that `run_descriptor` says.
template <typename T, int N>
struct RunProduct {
    static __device__ __forceinline__ void begin(float (&sums)[N / 2], uint64_t a, uint64_t b) {
        RowProduct<T, N>::template begin<false, false>(sums, a, b);
    }
};

// The same for rows, too, that lie as such columns do.
template <typename T, int N>
struct ChunkProduct : RunProduct<T, N> {};

FP_ROW_PRODUCTS(float, "k8.f32.tf32.tf32", "", "", "")
FP_ROW_PRODUCTS(half, "k16.f32.f16.f16", ", %34, %35", ", %66, %67", ", %130, %131")
FP_ROW_PRODUCTS(bfloat16, "k16.f32.bf16.bf16", ", %34, %35", ", %66, %67", ", %130, %131")

}  // namespace fp
