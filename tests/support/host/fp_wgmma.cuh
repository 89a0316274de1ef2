// What templates/include/fp_wgmma.cuh has, for the emulation: each warp of a group does its own rows, at once.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>

#include "fp_instructions.cuh"

namespace fp {

// The address and both distances, in units of 16 bytes, as on the device but with more room for the address.
inline uint64_t tile_descriptor(const void* tile, uint32_t deeper, uint32_t across) {
    const auto place = reinterpret_cast<std::uintptr_t>(tile);
    if (place % 16 || deeper / 16 > 255 || across / 16 > 255) emulation::fail("a tile that is not aligned, or too far apart");
    return uint64_t(place >> 4) | uint64_t(deeper >> 4) << 48 | uint64_t(across >> 4) << 56;
}

inline void meet_group() { emulation::wait(emulation::State::at_group); }
inline void publish_to_products() {}
inline void begin_products() {}

// Products are put off until they are awaited.
void put_product_off(std::function<void()> product);
void end_products();
void await_products_but(unsigned groups);

template <int Groups>
void await_products() {
    await_products_but(Groups);
    emulation::wait(emulation::State::at_warp);  // a warp's threads wait together
}

template <int N>
void release(const float (&)[N]) {}

template <int N>
void multiply_group(float (&sums)[N / 2], const float (&a)[4], uint64_t b, bool add) {
    static_assert(N % 8 == 0 && N <= 128);
    static float shown[1024 * 4];
    const unsigned self = threadIdx.x, first = self / 32 * 32;
    std::memcpy(&shown[self * 4], a, sizeof a);
    emulation::wait(emulation::State::at_warp);
    const auto* const tile = reinterpret_cast<const char*>((b & ((uint64_t(1) << 48) - 1)) << 4);
    const uint64_t deeper = (b >> 48 & 255) * 16, across = (b >> 56) * 16;
    for (unsigned i = 0; i < N / 2; ++i) {
        const unsigned row = self % 32 / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + self % 4 * 2 + i % 2;
        float sum = add ? sums[i] : 0.0f;
        for (unsigned k = 0; k < 8; ++k) {
            float weight;
            std::memcpy(&weight, tile + column / 8 * across + k / 4 * deeper + column % 8 * 16 + k % 4 * 4, 4);
            sum += to_tf32(shown[(first + row % 8 * 4 + k % 4) * 4 + row / 8 + k / 4 * 2]) * to_tf32(weight);
        }
        sums[i] = sum;
    }
    emulation::wait(emulation::State::at_warp);
}

}  // namespace fp
