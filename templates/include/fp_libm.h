// The C library's mathematical functions by C++ overload, fp::libm::f(float) and f(double), in the fastest accurate form:
// CUDA's own on the device; on x86 with glibc 2.35 or later such that GCC may call libmvec's vector variants in a loop
// (at most 4 units in the last place); plain libm otherwise.
#pragma once

#include <cmath>

#include "fp_common.h"

#if !defined(__CUDACC__) && defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#if __GLIBC_PREREQ(2, 35)
#define FP_VECTOR_LIBM 1
#endif
#endif

namespace fp::libm {

#if defined(FP_VECTOR_LIBM)

// Declared anew under another C++ name (the linker's name stays), because <cmath>'s declarations cannot be given
// the attributes that let the vectoriser use them.
#define FP_LIBM_1(name)                                                                                              \
    extern "C" float fp_vector_##name##f(float) __asm__(#name "f") __attribute__((simd("notinbranch"), const, nothrow)); \
    extern "C" double fp_vector_##name(double) __asm__(#name) __attribute__((simd("notinbranch"), const, nothrow));  \
    FP_FN float name(float x) { return fp_vector_##name##f(x); }                                                     \
    FP_FN double name(double x) { return fp_vector_##name(x); }
#define FP_LIBM_2(name)                                                                                              \
    extern "C" float fp_vector_##name##f(float, float) __asm__(#name "f")                                            \
        __attribute__((simd("notinbranch"), const, nothrow));                                                        \
    extern "C" double fp_vector_##name(double, double) __asm__(#name)                                                \
        __attribute__((simd("notinbranch"), const, nothrow));                                                        \
    FP_FN float name(float x, float y) { return fp_vector_##name##f(x, y); }                                         \
    FP_FN double name(double x, double y) { return fp_vector_##name(x, y); }

#else

#define FP_LIBM_1(name)                               \
    FP_FN float name(float x) { return ::name##f(x); } \
    FP_FN double name(double x) { return ::name(x); }
#define FP_LIBM_2(name)                                           \
    FP_FN float name(float x, float y) { return ::name##f(x, y); } \
    FP_FN double name(double x, double y) { return ::name(x, y); }

#endif

FP_LIBM_1(exp)
FP_LIBM_1(exp2)
FP_LIBM_1(expm1)
FP_LIBM_1(log)
FP_LIBM_1(log2)
FP_LIBM_1(log10)
FP_LIBM_1(log1p)
FP_LIBM_1(sin)
FP_LIBM_1(cos)
FP_LIBM_1(tan)
FP_LIBM_1(asin)
FP_LIBM_1(acos)
FP_LIBM_1(atan)
FP_LIBM_1(sinh)
FP_LIBM_1(cosh)
FP_LIBM_1(tanh)
FP_LIBM_1(asinh)
FP_LIBM_1(acosh)
FP_LIBM_1(atanh)
FP_LIBM_1(erf)
FP_LIBM_1(erfc)
FP_LIBM_2(pow)
FP_LIBM_2(atan2)
FP_LIBM_2(hypot)

#undef FP_LIBM_1
#undef FP_LIBM_2

}  // namespace fp::libm
