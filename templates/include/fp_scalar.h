// Scalar operations of the kernel IR that C++ has no operator for, named as the IR names them, with PyTorch's semantics:
// Python's signs for floor_div and remainder, NaN wins in maximum and minimum and loses in fmax and fmin, round goes to
// even, integers wrap. Selections instead of branches where a loop over them should vectorise.
#pragma once

#include <cmath>
#include <cstring>

#include "fp_cast.h"

namespace fp {

template <typename T>
using IfFloat = std::enable_if_t<std::is_floating_point_v<T>, T>;
template <typename T>
using IfInt = std::enable_if_t<std::is_integral_v<T>, T>;
template <typename T>
using Unsigned = std::make_unsigned_t<T>;

// ---- Choice

#if defined(__CUDACC__)

template <typename A, typename B>
FP_FN auto where(bool condition, A a, B b) {
    return condition ? a : b;
}

#else

template <typename A, typename B>
FP_FN auto where(bool condition, A a, B b) {
    if constexpr (std::is_same_v<A, B> && std::is_floating_point_v<A>) {
        // A choice of bits: GCC would move a call that only one side needs into a branch, and then not vectorise.
        using Bits = std::conditional_t<sizeof(A) == 4, std::uint32_t, std::uint64_t>;
        Bits a_bits, b_bits;
        std::memcpy(&a_bits, &a, sizeof a);
        std::memcpy(&b_bits, &b, sizeof b);
        const Bits mask = -Bits(condition);
        const Bits bits = (a_bits & mask) | (b_bits & ~mask);
        std::memcpy(&a, &bits, sizeof a);
        return a;
    } else {
        return condition ? a : b;
    }
}

#endif

// ---- Tests and signs

template <typename T>
FP_FN bool isnan(T x) {
    return x != x;
}

template <typename T>
FP_FN bool isinf(T x) {
    if constexpr (std::is_floating_point_v<T>) {
        return (x == Limits<T>::highest) | (x == Limits<T>::lowest);
    } else {
        return false;
    }
}

FP_FN float copysign(float x, float y) { return ::copysignf(x, y); }
FP_FN double copysign(double x, double y) { return ::copysign(x, y); }

template <typename T>
FP_FN bool signbit(T x) {
    if constexpr (std::is_floating_point_v<T>) {
        return copysign(T(1), x) < T(0);
    } else {
        return x < T(0);
    }
}

template <typename T>
FP_FN T sign(T x) {  // 0 for NaN
    return T(cast<T>(x > T(0)) - cast<T>(x < T(0)));
}

FP_FN float abs(float x) { return ::fabsf(x); }
FP_FN double abs(double x) { return ::fabs(x); }
template <typename T>
FP_FN IfInt<T> abs(T x) {
    if constexpr (std::is_signed_v<T>) {
        return x < T(0) ? T(Unsigned<T>(0) - Unsigned<T>(x)) : x;
    } else {
        return x;
    }
}

FP_FN float nextafter(float x, float y) { return ::nextafterf(x, y); }
FP_FN double nextafter(double x, double y) { return ::nextafter(x, y); }

// ---- Extremes. `a > b ? a : b`, which gives b where either is NaN, is one instruction on x86.

template <typename T>
FP_FN T maximum(T a, T b) {
    const T greater = a > b ? a : b;
    return isnan(a) ? a : greater;
}

template <typename T>
FP_FN T minimum(T a, T b) {
    const T less = a < b ? a : b;
    return isnan(a) ? a : less;
}

// One instruction from compute capability 8.0 on.
FP_FN float maximum(float a, float b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    float greater;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(greater) : "f"(a), "f"(b));
    return greater;
#else
    return maximum<float>(a, b);
#endif
}

FP_FN float minimum(float a, float b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    float less;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(less) : "f"(a), "f"(b));
    return less;
#else
    return minimum<float>(a, b);
#endif
}

template <typename T>
FP_FN T fmax(T a, T b) {
    const T greater = a > b ? a : b;
    return isnan(b) ? a : greater;
}

template <typename T>
FP_FN T fmin(T a, T b) {
    const T less = a < b ? a : b;
    return isnan(b) ? a : less;
}

// ---- Rounding

FP_FN float floor(float x) { return ::floorf(x); }
FP_FN double floor(double x) { return ::floor(x); }
FP_FN float ceil(float x) { return ::ceilf(x); }
FP_FN double ceil(double x) { return ::ceil(x); }
FP_FN float trunc(float x) { return ::truncf(x); }
FP_FN double trunc(double x) { return ::trunc(x); }
FP_FN float round(float x) { return ::rintf(x); }
FP_FN double round(double x) { return ::rint(x); }

// 10 bits of mantissa, as tensor cores take of a float: to nearest, halves away from zero.
FP_FN float tf32(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    bits = (bits + 0x1000u) & 0xffffe000u;
    float rounded;
    memcpy(&rounded, &bits, sizeof(bits));
    return isnan(x) ? x : rounded;
}

template <typename T>
FP_FN IfInt<T> floor(T x) {
    return x;
}
template <typename T>
FP_FN IfInt<T> ceil(T x) {
    return x;
}
template <typename T>
FP_FN IfInt<T> trunc(T x) {
    return x;
}
template <typename T>
FP_FN IfInt<T> round(T x) {
    return x;
}

// ---- Division

FP_FN float fmod(float a, float b) { return ::fmodf(a, b); }
FP_FN double fmod(double a, double b) { return ::fmod(a, b); }

// Integer division by zero is an error in PyTorch on a CPU: a kernel there reports a fault, for which its caller runs the original
// operators, and they raise. On a GPU it gives some number, the same as the original's, which divides in the same way.
#if !defined(__CUDACC__)

// A divisor; what is reported needs no quotient.
template <typename T>
FP_FN T divisor(T by, int* fault) {
    if (by == T(0)) __atomic_store_n(fault, 1, __ATOMIC_RELAXED);
    return by;
}

#endif

// On a CPU a division by zero would end the process, and so would the smallest integer divided by -1, which wraps.
template <typename T>
FP_FN T quotient(T a, T b) {
#if !defined(__CUDA_ARCH__)
    if (b == T(0)) return T(0);
    if (std::is_signed_v<T> && b == T(-1)) return T(Unsigned<T>(0) - Unsigned<T>(a));
#endif
    return T(a / b);
}

template <typename T>
FP_FN IfInt<T> fmod(T a, T b) {
#if !defined(__CUDA_ARCH__)
    if (b == T(0)) return a;
    if (std::is_signed_v<T> && b == T(-1)) return T(0);
#endif
    return T(a % b);
}

template <typename T>
FP_FN IfInt<T> remainder(T a, T b) {
    const T rest = fmod(a, b);
    return (rest != T(0)) & ((rest < T(0)) != (b < T(0))) ? T(rest + b) : rest;
}

template <typename T>
FP_FN IfInt<T> floor_div(T a, T b) {
#if !defined(__CUDA_ARCH__)
    if (b == T(0)) return T(0);
#endif
    const T whole = quotient(a, b);
    return ((a < T(0)) != (b < T(0))) & (fmod(a, b) != T(0)) ? T(whole - T(1)) : whole;
}

template <typename T>
FP_FN IfFloat<T> remainder(T a, T b) {
    const T rest = fmod(a, b);
    return (rest != T(0)) & ((rest < T(0)) != (b < T(0))) ? rest + b : rest;
}

// Floor of the exact quotient, which the rounded quotient `a / b` may miss by one; as Python's float.__floordiv__.
template <typename T>
FP_FN IfFloat<T> floor_div(T a, T b) {
    const T rest = fmod(a, b);
    const T even = (a - rest) / b;
    const T below = (rest != T(0)) & ((b < T(0)) != (rest < T(0))) ? even - T(1) : even;
    const T whole = floor(below);
    const T nearest = below - whole > T(0.5) ? whole + T(1) : whole;
    const T result = below != T(0) ? nearest : copysign(T(0), a / b);
    return b == T(0) ? a / b : result;
}

// ---- Bits; a count outside the type's width shifts every bit out

template <typename T>
FP_FN T shift_left(T a, T count) {
    constexpr int width = 8 * int(sizeof(T));
    const bool inside = Unsigned<T>(count) < Unsigned<T>(width);  // negative counts are large unsigned ones
    return inside ? T(Unsigned<T>(a) << (count & T(width - 1))) : T(0);
}

template <typename T>
FP_FN T shift_right(T a, T count) {
    constexpr int width = 8 * int(sizeof(T));
    const bool inside = Unsigned<T>(count) < Unsigned<T>(width);
    return inside ? T(a >> (count & T(width - 1))) : T(std::is_signed_v<T> ? a >> (width - 1) : 0);
}

}  // namespace fp
