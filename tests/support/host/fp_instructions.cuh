// What templates/include/fp_instructions.cuh has, for the emulation. In a product the threads of a warp show each other their numbers;
// copies take place when they are awaited, as late as they may, and spoil what they overwrite when they begin, as early as they may.
#pragma once

#include <cstdint>
#include <cstring>

#include "fp_half.h"

namespace fp {

// What the tensor core takes of a number.
inline float to_tf32(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    bits &= 0xffffe000u;
    std::memcpy(&x, &bits, 4);
    return x;
}

inline void multiply_tile(float (&sum)[4], const float (&a)[4], const float (&b)[2]) {
    static float shown[1024 * 6];
    const unsigned self = threadIdx.x, first = self / 32 * 32;
    std::memcpy(&shown[self * 6], a, sizeof a);
    std::memcpy(&shown[self * 6 + 4], b, sizeof b);
    emulation::wait(emulation::State::at_warp);
    for (unsigned i = 0; i < 4; ++i) {
        const unsigned row = self % 32 / 4 + i / 2 * 8, column = self % 4 * 2 + i % 2;
        for (unsigned k = 0; k < 8; ++k) {
            const unsigned left = first + row % 8 * 4 + k % 4, right = first + column * 4 + k % 4;
            sum[i] += to_tf32(shown[left * 6 + row / 8 + k / 4 * 2]) * to_tf32(shown[right * 6 + 4 + k / 4]);
        }
    }
    emulation::wait(emulation::State::at_warp);
}

template <typename Half>
inline void multiply_tile(float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    static uint32_t shown[1024 * 6];
    const unsigned self = threadIdx.x, first = self / 32 * 32;
    std::memcpy(&shown[self * 6], a, sizeof a);
    std::memcpy(&shown[self * 6 + 4], b, sizeof b);
    emulation::wait(emulation::State::at_warp);
    const auto number = [&](unsigned word, unsigned which) {
        const auto bits = static_cast<uint16_t>(shown[word] >> 16 * which);
        Half value;
        std::memcpy(&value, &bits, 2);
        return to_float(value);
    };
    for (unsigned i = 0; i < 4; ++i) {
        const unsigned row = self % 32 / 4 + i / 2 * 8, column = self % 4 * 2 + i % 2;
        for (unsigned k = 0; k < 16; ++k) {
            const unsigned left = first + row % 8 * 4 + k % 8 / 2, right = first + column * 4 + k % 8 / 2;
            sum[i] += number(left * 6 + row / 8 + k / 8 * 2, k % 2) * number(right * 6 + 4 + k / 8, k % 2);
        }
    }
    emulation::wait(emulation::State::at_warp);
}

template <bool Transposed>
inline void load_tiles(uint32_t (&words)[4], const void* row) {
    static const uint16_t* shown[1024];
    const unsigned self = threadIdx.x, first = self / 32 * 32, lane = self % 32;
    if (reinterpret_cast<std::uintptr_t>(row) % 16) emulation::fail("a row of a tile that is not aligned");
    shown[self] = static_cast<const uint16_t*>(row);
    emulation::wait(emulation::State::at_warp);
    for (unsigned i = 0; i < 4; ++i) {
        uint16_t units[2];
        for (unsigned u = 0; u < 2; ++u) {
            const unsigned at = lane % 4 * 2 + u;
            units[u] = Transposed ? shown[first + i * 8 + at][lane / 4] : shown[first + i * 8 + lane / 4][at];
        }
        std::memcpy(&words[i], units, 4);
    }
    emulation::wait(emulation::State::at_warp);
}

// Begins a copy of the first `real` of at most 16 bytes; the others become 0.
void begin_copy_of(void* to, const void* from, int real, int bytes);

inline void begin_copy(float* to, const float* from, bool real) { begin_copy_of(to, from, real ? 4 : 0, 4); }

template <int Bytes>
inline void begin_copy_bytes(void* to, const void* from, int real) {
    const auto misplaced = [](const void* at) { return reinterpret_cast<std::uintptr_t>(at) % Bytes != 0; };
    if (misplaced(to) || misplaced(from)) emulation::fail("a copy that is not aligned");
    begin_copy_of(to, from, real, Bytes);
}

template <bool Aligned>
inline void load_quad(float (&to)[4], const float* from) {
    if (Aligned && reinterpret_cast<std::uintptr_t>(from) % sizeof to) emulation::fail("four numbers that are not aligned");
    emulation::check_read(from, sizeof to);
    std::memcpy(to, from, sizeof to);
}

inline uint32_t pack_halves(float first, float second) {
    half halves[2];
    round_to(first, halves[0]);
    round_to(second, halves[1]);
    uint32_t made;
    std::memcpy(&made, halves, sizeof made);
    return made;
}

inline uint32_t largest_halves(uint32_t halves, uint32_t others) {
    const auto larger = [](uint32_t one, uint32_t other) { return other <= 0x7c00 && other > one ? other : one; };
    return larger(halves >> 16, others >> 16 & 0x7fff) << 16 | larger(halves & 0xffff, others & 0x7fff);
}

constexpr uint32_t infinite_half = 0x7c00;
inline bool has_infinity(uint32_t halves) { return halves >> 16 == infinite_half || (halves & 0xffff) == infinite_half; }

template <int Count>
inline void leave_registers() {
    static_assert(Count % 8 == 0 && Count >= 24 && Count <= 256);
}
template <int Count>
inline void take_registers() {
    static_assert(Count % 8 == 0 && Count >= 24 && Count <= 256);
}

void end_copies();
void await_copies_but(unsigned groups);

template <int Groups>
void await_copies() {
    await_copies_but(Groups);
}

}  // namespace fp
