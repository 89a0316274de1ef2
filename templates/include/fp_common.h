// What every generated kernel needs first: function qualifiers, the extreme values of element types, the bits of a float, and what rounds once.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__CUDACC__)
#define FP_FN __host__ __device__ __forceinline__
#else
#define FP_FN inline __attribute__((always_inline))
#endif

namespace fp {

// The values that lose every comparison: identities of maximum and minimum.
template <typename T>
struct Limits {
    using Numbers = std::numeric_limits<T>;
    static constexpr T lowest = Numbers::has_infinity ? -Numbers::infinity() : Numbers::lowest();
    static constexpr T highest = Numbers::has_infinity ? Numbers::infinity() : Numbers::max();
};

template <>
struct Limits<bool> {
    static constexpr bool lowest = false;
    static constexpr bool highest = true;
};

FP_FN float float_of(std::int32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof bits);
    return value;
}

FP_FN std::int32_t bits_of(float value) {
    std::int32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

// a * b + c, in one rounding where that is an instruction. For sums of products inside of one operator: of two operators each rounds, wherever
// they are computed, and compilers are told to make no such instruction of their own (codegen/toolchain.py).
template <typename T>
FP_FN T fma(T a, T b, T c) {
    return T(a * b + c);
}

#if defined(__CUDACC__) || defined(__FP_FAST_FMAF)
FP_FN float fma(float a, float b, float c) { return ::fmaf(a, b, c); }
#endif
#if defined(__CUDACC__) || defined(__FP_FAST_FMA)
FP_FN double fma(double a, double b, double c) { return ::fma(a, b, c); }
#endif

}  // namespace fp
