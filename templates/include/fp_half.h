// The 16-bit floating point storage types fp::half and fp::bfloat16 and their conversions.
// Nothing is computed in them: kernels convert to float, compute, and round once (to nearest, ties to even) when storing.
#pragma once

#include "fp_cast.h"

namespace fp {

// Scalars, not structs: GCC does not vectorise loops that copy structs.
enum class half : std::uint16_t {};
enum class bfloat16 : std::uint16_t {};

// A GPU has instructions for most of it. On a CPU: selections instead of branches, and signed comparisons, so that loops over
// these conversions become short vector code.

FP_FN float to_float(half value) {
#if defined(__CUDA_ARCH__)
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(static_cast<std::uint16_t>(value)));
    return result;
#else
    // Sign, exponent and fraction, moved to where float has them, are the value times 2^-112. What was infinite or NaN
    // then lies beyond the largest half, and gets all exponent bits.
    const std::int32_t moved = std::int32_t(std::uint32_t(std::int16_t(value)) << 13) & std::int32_t(0x8fffe000);
    const float scaled = float_of(moved) * 0x1p112f;
    const std::int32_t special = (moved & 0x0f800000) == 0x0f800000 ? 0x7f800000 : 0;
    return float_of(bits_of(scaled) | special);
#endif
}

FP_FN float to_float(bfloat16 value) {
#if defined(__CUDA_ARCH__)
    float result;  // one instruction of either half of a word; a conversion takes two of the upper one
    asm("mov.b32 %0, {0, %1};" : "=f"(result) : "h"(static_cast<std::uint16_t>(value)));
    return result;
#else
    return float_of(std::int32_t(std::uint32_t(static_cast<std::uint16_t>(value)) << 16));
#endif
}

FP_FN void round_to(float value, half& result) {
#if defined(__CUDA_ARCH__)
    std::uint16_t rounded;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(rounded) : "f"(value));
#else
    const std::int32_t bits = bits_of(value);
    const std::int32_t magnitude = bits & 0x7fffffff;
    const std::int32_t sign = (bits >> 16) & 0x8000;
    // Normal: rebias the exponent (15 - 127) and round the 13 dropped bits; a carry into the exponent is right, too.
    const std::int32_t odd = (magnitude >> 13) & 1;
    const std::int32_t normal = (magnitude - 0x38000000 + 0xfff + odd) >> 13;
    // Subnormal: 0.5f's last place is 2^-24, half's smallest step, so the addition rounds there.
    const std::int32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000;
    const std::int32_t finite = magnitude < 0x38800000 ? subnormal : normal;
    const std::int32_t bounded = magnitude > 0x477fefff ? 0x7c00 : finite;  // from 65520 on: infinite
    const std::int32_t rounded = sign | (magnitude > 0x7f800000 ? 0x7e00 : bounded);
#endif
    result = static_cast<half>(rounded);
}

FP_FN void round_to(float value, bfloat16& result) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    std::uint16_t rounded;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded) : "f"(value));
    result = static_cast<bfloat16>(rounded);
#else
    const std::uint32_t bits = std::uint32_t(bits_of(value));
    const std::uint32_t odd = (bits >> 16) & 1;
    const std::uint32_t rounded = (bits + 0x7fff + odd) >> 16;
    const std::uint32_t nan = (bits >> 16) | 0x40;
    result = static_cast<bfloat16>(value != value ? nan : rounded);
#endif
}

#if !defined(__CUDACC__)

// For neighbours x86 has instructions that compilers do not find in loops over the conversions above. They stand here by
// name, as the header that declares functions for them takes longer to compile than a kernel.
#if defined(__AVX512F__)
#define FP_HALVES 16
#elif defined(__AVX__) && defined(__F16C__)
#define FP_HALVES 8
#endif
#if defined(FP_HALVES)
using Halves = std::uint16_t __attribute__((vector_size(2 * FP_HALVES), aligned(2), may_alias));
using Floats = float __attribute__((vector_size(4 * FP_HALVES), aligned(4), may_alias));
#endif

// `count` halves as floats.
inline void widen(std::int64_t count, const half* __restrict from, float* __restrict to) {
    std::int64_t done = 0;
#if defined(FP_HALVES)
    for (; done + FP_HALVES <= count; done += FP_HALVES) {
        Floats wide;
        asm("vcvtph2ps %1, %0" : "=v"(wide) : "m"(*reinterpret_cast<const Halves*>(from + done)));
        *reinterpret_cast<Floats*>(to + done) = wide;
    }
#endif
#pragma omp simd
    for (std::int64_t i = done; i < count; ++i) to[i] = to_float(from[i]);
}

// `count` floats as halves, rounded to nearest, whatever the processor is set to.
inline void narrow(std::int64_t count, const float* __restrict from, half* __restrict to) {
    std::int64_t done = 0;
#if defined(FP_HALVES)
    for (; done + FP_HALVES <= count; done += FP_HALVES) {
        const Floats wide = *reinterpret_cast<const Floats*>(from + done);
        asm("vcvtps2ph $0, %1, %0" : "=m"(*reinterpret_cast<Halves*>(to + done)) : "v"(wide));
    }
#endif
#pragma omp simd
    for (std::int64_t i = done; i < count; ++i) round_to(from[i], to[i]);
}

#endif

template <typename T>
inline constexpr bool is_half = std::is_same_v<T, half> || std::is_same_v<T, bfloat16>;

template <typename Half, typename From>
struct RoundToHalf {
    static FP_FN Half convert(From value) {
        Half result;
        round_to(Cast<float, From>::convert(value), result);
        return result;
    }
};

template <typename To, typename Half>
struct WidenHalf {
    static FP_FN To convert(Half value) { return Cast<To, float>::convert(to_float(value)); }
};

template <typename From>
struct Cast<half, From> : RoundToHalf<half, From> {};
template <typename From>
struct Cast<bfloat16, From> : RoundToHalf<bfloat16, From> {};
template <typename To>
struct Cast<To, half> : WidenHalf<To, half> {};
template <typename To>
struct Cast<To, bfloat16> : WidenHalf<To, bfloat16> {};

template <>
struct Cast<half, bfloat16> : RoundToHalf<half, bfloat16> {};
template <>
struct Cast<bfloat16, half> : RoundToHalf<bfloat16, half> {};
template <>
struct Cast<half, half> {
    static FP_FN half convert(half value) { return value; }
};
template <>
struct Cast<bfloat16, bfloat16> {
    static FP_FN bfloat16 convert(bfloat16 value) { return value; }
};

// Extremes of two pairs, NaN where one is.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
__device__ __forceinline__ void raise_pair(unsigned& pair, unsigned by, half) {
    asm("max.NaN.f16x2 %0, %0, %1;" : "+r"(pair) : "r"(by));
}
__device__ __forceinline__ void raise_pair(unsigned& pair, unsigned by, bfloat16) {
    asm("max.NaN.bf16x2 %0, %0, %1;" : "+r"(pair) : "r"(by));
}
__device__ __forceinline__ void lower_pair(unsigned& pair, unsigned by, half) {
    asm("min.NaN.f16x2 %0, %0, %1;" : "+r"(pair) : "r"(by));
}
__device__ __forceinline__ void lower_pair(unsigned& pair, unsigned by, bfloat16) {
    asm("min.NaN.bf16x2 %0, %0, %1;" : "+r"(pair) : "r"(by));
}
#endif

}  // namespace fp
