// The tensor core instruction of templates/include/fp_mma.cuh for the emulation: the threads of a warp show each other their numbers.
#pragma once

#include <cstdint>
#include <cstring>

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
    static std::vector<float> shown;
    const unsigned self = threadIdx.x, first = self / 32 * 32;
    shown.resize(1024 * 6);
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

}  // namespace fp
