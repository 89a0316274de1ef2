// What templates/include/fp_wgmma_rows.cuh has, for the emulation: each warp of a group does its own rows, when they are awaited: as
// late as it may. A descriptor is the address in units of 16 bytes.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>

#include "fp_wgmma.cuh"

namespace fp {

inline uint64_t row_descriptor(const void* rows) {
    const auto place = reinterpret_cast<std::uintptr_t>(rows);
    if (place % 1024) emulation::fail("rows that are not aligned");
    return place >> 4;
}

// The address in units of 16 bytes, the distance behind it: 48 and 16 bits.
inline uint64_t run_descriptor(const void* columns, uint32_t deeper) {
    const auto place = reinterpret_cast<std::uintptr_t>(columns);
    if (place % 16 || deeper >> 14) emulation::fail("columns that are not aligned, or too far apart");
    return place >> 4 | uint64_t(deeper) << 48;
}

// A number of row `row`, `k` from where the descriptor points to, in float32.
template <typename T, bool Turned>
float number_of(uint64_t rows, unsigned row, unsigned k) {
    const unsigned along = Turned ? row / 64 * 8192 + k * 128 + row % 64 * sizeof(T) : row * 128 + k * sizeof(T);
    const uint64_t place = (rows << 4) + along;
    T number;
    std::memcpy(&number, reinterpret_cast<const char*>(place ^ (place >> 7 & 7) << 4), sizeof(T));
    if constexpr (sizeof(T) == 4) return to_tf32(number);
    else return to_float(number);
}

template <int N>
void multiply_columns(float (&sums)[N / 2], const float (&a)[4], uint64_t b, bool add) {
    static float shown[1024 * 4];
    const unsigned self = threadIdx.x, first = self / 32 * 32, lane = self % 32;
    std::memcpy(&shown[self * 4], a, sizeof a);
    emulation::wait(emulation::State::at_warp);
    std::array<float, 16> rows;  // of this thread, 8 numbers of each
    for (unsigned i = 0; i < 16; ++i) rows[i] = to_tf32(shown[(first + lane / 4 * 4 + i % 4) * 4 + i / 8 + i % 8 / 4 * 2]);
    emulation::wait(emulation::State::at_warp);
    put_product_off([&sums, rows, b, add, lane] {
        for (unsigned i = 0; i < N / 2; ++i) {
            float sum = add ? sums[i] : 0.0f;
            for (unsigned k = 0; k < 8; ++k) {
                sum += rows[i / 2 % 2 * 8 + k] * number_of<float, false>(b, i / 4 * 8 + lane % 4 * 2 + i % 2, k);
            }
            sums[i] = sum;
        }
    });
}

template <typename T, int N>
struct RowProduct {
    template <bool ATurned, bool BTurned>
    static void begin(float (&sums)[N / 2], uint64_t a, uint64_t b) {
        static_assert(sizeof(T) == 2 || !(ATurned || BTurned));
        emulation::wait(emulation::State::at_warp);
        const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
        put_product_off([&sums, a, b, lane, warp] {
            for (unsigned i = 0; i < N / 2; ++i) {
                const unsigned row = warp * 16 + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
                for (unsigned k = 0; k < 32 / sizeof(T); ++k) {
                    sums[i] += number_of<T, ATurned>(a, row, k) * number_of<T, BTurned>(b, column, k);
                }
            }
        });
    }
};

// A number of a row or column that `run_descriptor` says, in float32.
template <typename T>
float number_of_run(uint64_t rows, unsigned row, unsigned k) {
    const auto* const first = reinterpret_cast<const char*>((rows & ((uint64_t(1) << 48) - 1)) << 4);
    T number;
    std::memcpy(&number, first + row * 16 + k / 8 * (rows >> 48) * 16 + k % 8 * 2, sizeof(T));
    return to_float(number);
}

template <typename T, int N, bool RowsInRuns = false>
struct RunProduct {
    static void begin(float (&sums)[N / 2], uint64_t a, uint64_t b) {
        emulation::wait(emulation::State::at_warp);
        const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
        put_product_off([&sums, a, b, lane, warp] {
            for (unsigned i = 0; i < N / 2; ++i) {
                const unsigned row = warp * 16 + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
                for (unsigned k = 0; k < 16; ++k) {
                    const float left = RowsInRuns ? number_of_run<T>(a, row, k) : number_of<T, false>(a, row, k);
                    sums[i] += left * number_of_run<T>(b, column, k);
                }
            }
        });
    }
};

template <typename T, int N>
struct ChunkProduct : RunProduct<T, N, true> {};

}  // namespace fp
