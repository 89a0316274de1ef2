// Random numbers as a function of where they stand in the stream of a generator: Philox 4x32 of 10 rounds (Salmon, Moraes, Dror and Shaw,
// "Parallel random numbers: as easy as 1, 2, 3", 2011), with the counters that cuRAND and so PyTorch's CUDA generator give it.
#pragma once

#include "fp_scalar.h"

namespace fp {

// The higher word of a product.
FP_FN std::uint32_t high_word(std::uint32_t a, std::uint32_t b) {
#if defined(__CUDA_ARCH__)
    return __umulhi(a, b);  // else nvcc goes on in 64 bits
#else
    return std::uint32_t(std::uint64_t(a) * b >> 32);
#endif
}

// Number `which` (0 to 3) of the four that call `call` gives in sequence `sequence` of the generator with this seed and offset, above 0 and up to 1.
FP_FN float uniform(
    std::int64_t seed, std::int64_t offset, std::int64_t sequence, std::int64_t call, std::int64_t which) {
    const std::uint64_t count = std::uint64_t(offset) / 4 + std::uint64_t(call);  // an offset counts numbers
    std::uint32_t a = std::uint32_t(count), b = std::uint32_t(count >> 32);
    std::uint32_t c = std::uint32_t(sequence), d = std::uint32_t(std::uint64_t(sequence) >> 32);
    std::uint32_t low = std::uint32_t(seed), high = std::uint32_t(std::uint64_t(seed) >> 32);
#if defined(__CUDACC__)
#pragma unroll
#endif
    for (int round = 0; round < 10; ++round) {
        constexpr std::uint32_t first = 0xD2511F53u, second = 0xCD9E8D57u;
        const std::uint32_t next_a = high_word(second, c) ^ b ^ low, next_c = high_word(first, a) ^ d ^ high;
        b = second * c;
        d = first * a;
        a = next_a;
        c = next_c;
        low += 0x9E3779B9u;
        high += 0xBB67AE85u;
    }
    const std::uint32_t bits = which == 0 ? a : which == 1 ? b : which == 2 ? c : d;
    return float(bits) * 0x1p-32f + 0x1p-33f;
}

}  // namespace fp
