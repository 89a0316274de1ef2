// What templates/include/fp_wgmma_places.cuh has, for the emulation: each warp of a group does its own rows, when they are awaited: as
// late as it may.
#pragma once

#include <cstdint>
#include <cstring>

#include "fp_half.h"
#include "fp_wgmma.cuh"

namespace fp {

// The address in units of 16 bytes, both distances behind it: 43, 14 and 7 bits.
inline uint64_t place_descriptor(const void* tile, uint32_t run) {
    const auto place = reinterpret_cast<std::uintptr_t>(tile);
    if (place % 16 || run > 127) emulation::fail("places that are not aligned, or too far apart");
    return uint64_t(place >> 4) | uint64_t(run) << 57;
}

inline uint64_t at_taps(uint64_t places, uint32_t taps) {
    if (taps >> 30) emulation::fail("places that are too far apart");
    return places + (taps & 0xffff) + (uint64_t(taps >> 16) << 43);
}

inline uint64_t at_weights(uint64_t weights, uint32_t units) { return weights + units; }

inline int warp_number() { return int(threadIdx.x) / 32; }

template <typename T, int N, bool Add>
void multiply_places(float (&sums)[N / 2], uint64_t a, uint64_t b) {
    emulation::wait(emulation::State::at_warp);
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    put_product_off([&sums, a, b, lane, warp] {
        const auto* const tile = reinterpret_cast<const char*>((a & ((uint64_t(1) << 43) - 1)) << 4);
        const uint64_t far = (a >> 43 & 0x3fff) * 16, run = (a >> 57) * 16;
        const auto* const weights = reinterpret_cast<const char*>((b & ((uint64_t(1) << 48) - 1)) << 4);
        const uint64_t deeper = (b >> 48 & 255) * 16, across = (b >> 56) * 16;
        for (unsigned i = 0; i < N / 2; ++i) {
            const unsigned row = warp * 16 + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
            float sum = Add ? sums[i] : 0.0f;
            for (unsigned k = 0; k < 16; ++k) {
                T left, right;
                std::memcpy(&left, tile + row / 8 * run + row % 8 * 16 + k / 8 * far + k % 8 * 2, 2);
                std::memcpy(&right, weights + column / 8 * across + column % 8 * 16 + k / 8 * deeper + k % 8 * 2, 2);
                sum += to_float(left) * to_float(right);
            }
            sums[i] = sum;
        }
    });
}

}  // namespace fp
