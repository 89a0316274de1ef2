// Functions of the kernel IR that are computed: quotients, powers, exponentials and what is made of them, with PyTorch's semantics. On a GPU they
// have no branches; see docs/kernels/pointwise.md.
#pragma once

#include "fp_libm.h"
#include "fp_scalar.h"

namespace fp {

// ---- Quotients without a branch. A GPU's division is a short sequence and, for rare operands, a call. The branch to it keeps the compiler
// from working on several elements at once, behind which a warp hides what it waits for.

// 1 / x: on a GPU within one unit of the last place, exact for powers of two.
template <typename T>
FP_FN T reciprocal(T x) {
    return T(1) / x;
}

#if defined(__CUDA_ARCH__)
FP_FN float reciprocal(float x) {
    float result;
    asm("rcp.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}
#endif

// The same where neither is a denormal number.
FP_FN float reciprocal_of_tame(float x) {
#if defined(__CUDA_ARCH__)
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
#else
    return 1.0f / x;
#endif
}

// 1 / x, towards zero.
FP_FN float reciprocal_towards_zero(float x) {
#if defined(__CUDA_ARCH__)
    return __frcp_rz(x);
#else
    const float nearest = 1.0f / x;
    if (!(abs(nearest) < Limits<float>::highest)) return nearest;
    const bool beyond = ::fmaf(abs(nearest), abs(x), -1.0f) > 0.0f;
    return beyond ? nextafter(nearest, 0.0f) : nearest;
#endif
}

// What numbers are multiplied with so that the reciprocal of `by` is neither infinite nor a denormal number.
FP_FN float tamed(float by) { return abs(by) > 0x1p64f ? 0x1p-64f : abs(by) < 0x1p-64f ? 0x1p64f : 1.0f; }

// An estimate of dividend / divisor, which is a product with the reciprocal, corrected by its remainder (Markstein 1990). The last bit may
// differ from the rounded quotient where the remainder is not exact (|dividend| < 2^-100), and as the callers say; exact quotients are exact.
FP_FN float corrected(float estimate, float dividend, float divisor, float inverse) {
    return ::fmaf(::fmaf(-estimate, divisor, dividend), inverse, estimate);
}

// a / by; the last bit may differ where the reciprocal's error decides a tie.
FP_FN float divide(float a, float by) {
    const float scale = tamed(by), divisor = by * scale, inverse = reciprocal_of_tame(divisor);
    const float dividend = a * scale, estimate = dividend * inverse;
    const float result = corrected(estimate, dividend, divisor, inverse);
    // zeros with their sign, infinities and NaN come out of the product
    return isnan(result) | (estimate == 0.0f) ? estimate : result;
}

// a / by for many `a` and one `by`, which the compiler knows or takes out of loops: a product with the reciprocal in two parts, as good as
// `divide`. Both parts have one sign and neither is zero where `by` is finite, so that infinities stay what they are.
FP_FN float divide_by(float a, float by) {
    const float scale = tamed(by), divisor = by * scale, high = reciprocal_towards_zero(divisor);
    const float rest = ::fmaf(-high, divisor, 1.0f);
    const float low = high * (rest > 0.0f ? rest : 0x1p-60f);
    const float dividend = a * scale;
    return ::fmaf(dividend, high, dividend * low);
}

// ---- Powers, exponentials and other functions

FP_FN float sqrt(float x) { return ::sqrtf(x); }
FP_FN double sqrt(double x) { return ::sqrt(x); }

#if defined(__CUDA_ARCH__)
FP_FN float rsqrt(float x) { return ::rsqrtf(x); }
FP_FN double rsqrt(double x) { return ::rsqrt(x); }
#else
FP_FN float rsqrt(float x) { return 1.0f / ::sqrtf(x); }
FP_FN double rsqrt(double x) { return 1.0 / ::sqrt(x); }
#endif

using libm::acos;
using libm::acosh;
using libm::asin;
using libm::asinh;
using libm::atan;
using libm::atan2;
using libm::atanh;
using libm::cos;
using libm::cosh;
using libm::erf;
using libm::erfc;
using libm::expm1;
using libm::hypot;
using libm::log;
using libm::log10;
using libm::log2;
using libm::pow;
using libm::sin;
using libm::sinh;
using libm::tan;

// e^x and 2^x. On a CPU float's are sums and products alone, so that they stay in vectors without a call: within 1.4 units of the last place,
// denormal results and all, where libmvec takes 1.6 to 2.7 times as long for 2.6 of them.
#if defined(__CUDACC__) || !(defined(__FMA__) || defined(__aarch64__))
using libm::exp;
using libm::exp2;

FP_FN float near_exp2(float x) { return exp2(x); }
#else
constexpr float to_whole = 0x1.8p23f;  // what is added to this is rounded to a whole number, which the last bits of the sum are

// 2^n value, for a `value` near 1 and the n that was added to `to_whole` to give `place`, where that is a normal number: n is added to the exponent.
FP_FN float times_power(float value, float place) {
    return float_of(std::int32_t(std::uint32_t(bits_of(value)) + (std::uint32_t(bits_of(place)) << 23)));
}

// 2^n e^rest, with |rest| <= log(2) / 2. The polynomial is fitted so that the largest relative error is least, 2e-9.
FP_FN float scaled_exp(float place, float rest) {
    float p = 1.384365351e-03f;
    p = ::fmaf(p, rest, 8.374155312e-03f);
    p = ::fmaf(p, rest, 4.166800204e-02f);
    p = ::fmaf(p, rest, 1.666643126e-01f);
    p = ::fmaf(p, rest, 4.999999421e-01f);
    p = ::fmaf(p, rest, 1.000000032e+00f);
    p = ::fmaf(p, rest, 1.0f);
    return times_power(p, place);
}

// The same of arguments whose results are normal numbers. What n times log(2) is rounded by is taken off in a second step (Cody and Waite 1980).
FP_FN float normal_exp(float x) {
    const float place = ::fmaf(x, 1.44269504f, to_whole), n = place - to_whole;
    return scaled_exp(place, ::fmaf(n, 1.90465429e-9f, ::fmaf(n, -0.693147182f, x)));
}

FP_FN float normal_exp2(float x) {
    const float place = x + to_whole;
    return scaled_exp(place, (x - (place - to_whole)) * 0.693147181f);
}

// 2^x within 2^-22 of it, where that is a normal number: another polynomial, of one degree less, with an error of 9e-8.
FP_FN float near_exp2(float x) {
    const float place = x + to_whole, rest = x - (place - to_whole);
    float p = 1.326472712e-03f;
    p = ::fmaf(p, rest, 9.671512645e-03f);
    p = ::fmaf(p, rest, 5.550733743e-02f);
    p = ::fmaf(p, rest, 2.402224209e-01f);
    p = ::fmaf(p, rest, 6.931469776e-01f);
    p = ::fmaf(p, rest, 1.0f);
    return times_power(p, place);
}

// Denormal results are products of larger ones with a power of e, or of 2.
FP_FN float exp(float x) {
    const bool low = x < -87.0f;
    const float power = normal_exp(x + (low ? 32.0f : 0.0f)) * (low ? 0x1.c8464fp-47f : 1.0f);
    const float result = x <= 0x1.62e42ep6f ? power : x + Limits<float>::highest;  // NaN stays what it is
    return x < -104.0f ? 0.0f : result;
}

FP_FN float exp2(float x) {
    const bool low = x < -126.0f;
    const float power = normal_exp2(x + (low ? 64.0f : 0.0f)) * (low ? 0x1p-64f : 1.0f);
    const float result = x < 128.0f ? power : x + Limits<float>::highest;
    return x < -150.0f ? 0.0f : result;
}

FP_FN double exp(double x) { return libm::exp(x); }
FP_FN double exp2(double x) { return libm::exp2(x); }
#endif

FP_FN double log1p(double x) { return libm::log1p(x); }

// log2(x), for x = 0 or above 2^-126: within 2^-22, of it where |log2(x)| > 1.
FP_FN float rough_log2(float x) {
#if defined(__CUDA_ARCH__)
    float result;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
#else
    return log2(x);
#endif
}

// log(1 + x) without a branch: 1 + x = 2^k (1 + m) with |m| <= 1/3, where m comes from x itself, so that no digit of a small x is lost. The
// polynomial in log(1 + m) = m + m^2 P(m) is fitted so that the largest relative error of the result is least, 2.6e-8.
FP_FN float plain_log1p(float x) {
    const float sum = 1.0f + x;
    const std::int32_t power = (bits_of(sum) - bits_of(2.0f / 3.0f)) & ~0x7fffff;  // k, in the place of the exponent
    const float quarter = ::fmaf(0.25f, float_of(bits_of(4.0f) - power), -1.0f);  // 2^-k - 1, for k = 128, too
    const float m = float_of(bits_of(x) - power) + quarter;
    float p = 1.402058452e-01f;
    p = ::fmaf(p, m, -1.538361311e-01f);
    p = ::fmaf(p, m, 1.399713457e-01f);
    p = ::fmaf(p, m, -1.641702801e-01f);
    p = ::fmaf(p, m, 2.001107335e-01f);
    p = ::fmaf(p, m, -2.500774860e-01f);
    p = ::fmaf(p, m, 3.333320022e-01f);
    p = ::fmaf(p, m, -4.999993742e-01f);
    const float result = ::fmaf(float(power), 0.693147181f * 0x1p-23f, ::fmaf(m * m, p, m));
    const float edge = rough_log2(sum);
    return abs(edge) < Limits<float>::highest ? result : edge;  // infinities and NaN are those of the logarithm
}

FP_FN float log1p(float x) {
#if defined(__CUDA_ARCH__)
    return plain_log1p(x);  // CUDA's own branches
#else
    return libm::log1p(x);
#endif
}

// The same within 2^-15: for what is rounded to 16 bits. Near 0, where the sum has lost digits of x, three terms of the series.
FP_FN float log1p_few(float x) {
    const float series = x * ::fmaf(x, ::fmaf(x, 1.0f / 3.0f, -0.5f), 1.0f);
    return abs(x) < 0x1p-6f ? series : rough_log2(1.0f + x) * 0.693147181f;
}

// 2^x within 2^-22 of it, and 0 for what would be a denormal number.
FP_FN float power_of_two(float x) {
#if defined(__CUDA_ARCH__)
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
#else
    const float result = x < 128.0f ? near_exp2(x) : x + Limits<float>::highest;
    return x < -126.0f ? 0.0f : result;
#endif
}

// tanh(x) without a branch: from 0.6 on by an exponential, below as |x| + |x|^3 P(x^2). The polynomial is fitted so that the largest relative
// error is least, 2.8e-9.
FP_FN float plain_tanh(float x) {
    const float distance = abs(x), square = x * x;
    float p = -5.895157650e-03f;
    p = ::fmaf(p, square, 2.079597127e-02f);
    p = ::fmaf(p, square, -5.378383015e-02f);
    p = ::fmaf(p, square, 1.333192413e-01f);
    p = ::fmaf(p, square, -3.333329800e-01f);
    const float near = ::fmaf(p * square, distance, distance);
    const float far = ::fmaf(-2.0f, reciprocal_of_tame(1.0f + power_of_two(distance * 2.88539008f)), 1.0f);
    return copysign(distance < 0.6f ? near : far, x);
}

FP_FN double tanh(double x) { return libm::tanh(x); }

FP_FN float tanh(float x) { return plain_tanh(x); }

// e^x within 2^-17 of it (2^-18 for |x| < 32), 0 for what would be a denormal number: for what is rounded to 16 bits.
FP_FN float exp_few(float x) { return power_of_two(x * 1.44269504f); }

// 2^x within 2^-21 of it, 0 for what would be a denormal number: for what is rounded to 16 bits.
FP_FN float exp2_few(float x) { return power_of_two(x); }

// e^x - 1 within 2^-15 of it: for what is rounded to 16 bits. Near 0, where the difference has few digits left, three terms of the series.
FP_FN float expm1_few(float x) {
    const float series = x * ::fmaf(x, ::fmaf(x, 1.0f / 6.0f, 0.5f), 1.0f);
    return abs(x) < 0x1p-4f ? series : exp_few(x) - 1.0f;
}

// a / by as `divide_by`, within 2^-21: for what is rounded to 16 bits.
FP_FN float divide_by_few(float a, float by) {
    const float scale = abs(by) < 0x1p-64f ? 0x1p64f : 1.0f;
    return a * scale * reciprocal_towards_zero(by * scale);
}

// The normal distribution's integral up to x within 1e-7, as near as 1 + erf(x / sqrt(2)) comes: half of what |x| leaves is
// 2^-(|x| P(|x|) + 1). The polynomial, of degree 7, is fitted so that the largest error of the result is least, 8e-9 for |x| < 5.8; beyond,
// it grows. CUDA's erf chooses between two polynomials, coefficient by coefficient, and glibc's for vectors computes more, too:
// twice the instructions.
FP_FN float normal_cdf(float x) {
    const float distance = abs(x);
    float sum = 2.834867473e-06f;
    sum = ::fmaf(sum, distance, -3.937722431e-05f);
    sum = ::fmaf(sum, distance, 1.861783676e-04f);
    sum = ::fmaf(sum, distance, 1.369401288e-04f);
    sum = ::fmaf(sum, distance, -7.063424215e-03f);
    sum = ::fmaf(sum, distance, 5.249617994e-02f);
    sum = ::fmaf(sum, distance, 4.592081904e-01f);
    sum = ::fmaf(sum, distance, 1.151105165e+00f);
    const float rest = power_of_two(::fmaf(sum, -distance, -1.0f));
    return x > 0.0f ? 1.0f - rest : rest;
}

template <typename T>
FP_FN T normal_cdf(T x) {
    return T(0.5) * (T(1) + erf(x * T(0.70710678118654752440)));
}

// Integer power by squaring, wrapping; a negative exponent gives the reciprocal rounded towards zero.
template <typename T>
FP_FN IfInt<T> pow(T base, T exponent) {
    if (exponent < T(0)) {
        if (base == T(1)) return T(1);
        if (base == T(-1)) return exponent & T(1) ? T(-1) : T(1);
        return T(0);
    }
    std::uint64_t result = 1;
    std::uint64_t factor = static_cast<std::uint64_t>(base);
    for (auto rest = Unsigned<T>(exponent); rest != 0; rest >>= 1) {
        if (rest & 1) result *= factor;
        factor *= factor;
    }
    return T(result);
}

FP_FN float lgamma(float x) { return ::lgammaf(x); }
FP_FN double lgamma(double x) { return ::lgamma(x); }

template <typename T>
FP_FN T sigmoid(T x) {  // exp(-x) overflowing to infinity gives the right 0
    return reciprocal(T(1) + exp(-x));
}

// For what is rounded to 16 bits: within 2^-17, 0 for what would be a denormal number.
FP_FN float sigmoid_few(float x) { return reciprocal_of_tame(1.0f + exp_few(-x)); }

// For what is rounded to 16 bits: within 2^-14. Near 0, where the difference has few digits left, x itself is as near.
FP_FN float tanh_few(float x) {
    const float result = ::fmaf(-2.0f, reciprocal_of_tame(1.0f + power_of_two(x * 2.88539008f)), 1.0f);
    return abs(x) < 0x1p-8f ? x : result;
}

}  // namespace fp
