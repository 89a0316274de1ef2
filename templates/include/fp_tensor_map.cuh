// Matrices of 16-bit numbers that the copy engine brings to shared memory in boxes: how the host tells it where they lie
// (cuTensorMapEncodeTiled). The copies are in fp_barriers.cuh.
#pragma once

#include <cstdint>

namespace fp {

// What the driver makes of a matrix; only the copy engine knows what is in it.
struct alignas(64) TensorMap {
    uint64_t words[16];
};

#if !defined(__CUDACC_RTC__)
// Describes, in `map`, a matrix from `base` on: `sizes` numbers along three dimensions, the first of neighbours; `strides` numbers lead to the next
// element of the others. A box has `box` numbers along the first two. It comes in rows of 128 bytes whose chunks of 16 bytes lie as
// fp_wgmma_rows.cuh says, with zeros beyond the ends. Returns 0, or a cudaError_t: then nothing may be launched with it.
static inline int describe(TensorMap& map, const void* base, const uint64_t (&sizes)[3], const uint64_t (&strides)[2], const uint32_t (&box)[2]) {
    // As in cuda.h, which the runtime's headers do not need.
    using Encode = int (*)(TensorMap*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*, const uint32_t*, int, int, int, int);
    constexpr int sixteen_bits = 1, in_order = 0, swizzled = 3, two_sectors = 2, zeros = 0;  // CU_TENSOR_MAP_*
    static void* known;  // by threads that ask at the same time, too: they find the same
    void* found = __atomic_load_n(&known, __ATOMIC_ACQUIRE);
    if (found == nullptr) {
        cudaDriverEntryPointQueryResult status;
#if CUDART_VERSION >= 12050
        const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &status);
#else
        const cudaError_t error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &status);
#endif
        if (error != cudaSuccess || status != cudaDriverEntryPointSuccess || found == nullptr) return cudaErrorNotSupported;
        __atomic_store_n(&known, found, __ATOMIC_RELEASE);
    }
    const auto encode = reinterpret_cast<Encode>(found);
    const uint64_t apart[2] = {strides[0] * 2, strides[1] * 2};
    const uint32_t boxes[3] = {box[0], box[1], 1}, steps[3] = {1, 1, 1};
    const int status = encode(
        &map, sixteen_bits, 3, const_cast<void*>(base), sizes, apart, boxes, steps, in_order, swizzled, two_sectors, zeros);
    return status == 0 ? cudaSuccess : cudaErrorInvalidValue;
}
#endif

}  // namespace fp
