// The C library's mathematical functions by C++ overload, fp::libm::f(float) and f(double). Each gives one set of bits for an argument wherever
// it is called: CUDA's own on the device; on x86 with AVX2 and glibc 2.35 or later libmvec's for the widest vectors (at most 4 units in the last
// place), in loops, at their ends and in single calls; plain libm otherwise.
#pragma once

#include <cmath>

#include "fp_common.h"

#if !defined(__CUDACC__) && defined(__x86_64__) && defined(__AVX2__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#if __GLIBC_PREREQ(2, 35)
#define FP_VECTOR_LIBM 1
#endif
#endif

namespace fp::libm {

#if defined(FP_VECTOR_LIBM)

// In a loop over a function f with the attribute `simd`, GCC calls _ZGVbN4v_f, _ZGVdN8v_f or _ZGVeN16v_f for 4, 8 or 16 floats, or for half as
// many doubles, and f for what is left. libmvec's functions of these names, and libm's f, differ in the last bits. So what GCC sees is fp_f: the
// one for the widest vectors is libmvec's, and all others repeat their argument, call that, and return the beginning of its result.
#define FP_LIBM_CALL(name, repeat, widest)                                                                              \
    ".type " name ", @function\n" name ":\n.cfi_startproc\nsubq $8, %rsp\n.cfi_adjust_cfa_offset 8\n" repeat            \
    "call " widest "@PLT\nvzeroupper\naddq $8, %rsp\n.cfi_adjust_cfa_offset -8\nret\n.cfi_endproc\n"
#if defined(__AVX512F__)
#define FP_LIBM_ONE_FLOAT(x) "vbroadcastss %xmm" #x ", %zmm" #x "\n"
#define FP_LIBM_ONE_DOUBLE(x) "vbroadcastsd %xmm" #x ", %zmm" #x "\n"
#define FP_LIBM_16_BYTES(x) "vshuff32x4 $0, %zmm" #x ", %zmm" #x ", %zmm" #x "\n"
#define FP_LIBM_32_BYTES(x) "vshuff64x2 $0x44, %zmm" #x ", %zmm" #x ", %zmm" #x "\n"
#define FP_LIBM_WIDEST(half, whole, args, repeat, name)                                          \
    ".set _ZGVeN" whole args "_fp_" name ", _ZGVeN" whole args "_" name "\n"                     \
    ".type _ZGVdN" half args "_fp_" name ", @function\n_ZGVdN" half args "_fp_" name ":\n"        \
    repeat(FP_LIBM_32_BYTES) "jmp _ZGVeN" whole args "_" name "@PLT\n"
#define FP_LIBM_FLOATS(args, name) "_ZGVeN16" args "_" name
#define FP_LIBM_DOUBLES(args, name) "_ZGVeN8" args "_" name
#else
#define FP_LIBM_ONE_FLOAT(x) "vbroadcastss %xmm" #x ", %ymm" #x "\n"
#define FP_LIBM_ONE_DOUBLE(x) "vbroadcastsd %xmm" #x ", %ymm" #x "\n"
#define FP_LIBM_16_BYTES(x) "vinsertf128 $1, %xmm" #x ", %ymm" #x ", %ymm" #x "\n"
#define FP_LIBM_WIDEST(half, whole, args, repeat, name) \
    ".set _ZGVdN" half args "_fp_" name ", _ZGVdN" half args "_" name "\n"
#define FP_LIBM_FLOATS(args, name) "_ZGVdN8" args "_" name
#define FP_LIBM_DOUBLES(args, name) "_ZGVdN4" args "_" name
#endif

#define FP_LIBM_FIRST(repeat) repeat(0)
#define FP_LIBM_BOTH(repeat) repeat(0) repeat(1)
#define FP_LIBM_SHARED(args, repeat, name)                                                                              \
    __asm__(".text\n"                                                                                                   \
            FP_LIBM_WIDEST("8", "16", args, repeat, name "f")                                                           \
            FP_LIBM_WIDEST("4", "8", args, repeat, name)                                                                \
            FP_LIBM_CALL("_ZGVbN4" args "_fp_" name "f", repeat(FP_LIBM_16_BYTES), FP_LIBM_FLOATS(args, name "f"))      \
            FP_LIBM_CALL("_ZGVbN2" args "_fp_" name, repeat(FP_LIBM_16_BYTES), FP_LIBM_DOUBLES(args, name))             \
            FP_LIBM_CALL("fp_" name "f", repeat(FP_LIBM_ONE_FLOAT), FP_LIBM_FLOATS(args, name "f"))                     \
            FP_LIBM_CALL("fp_" name, repeat(FP_LIBM_ONE_DOUBLE), FP_LIBM_DOUBLES(args, name)));

#define FP_LIBM_SIMD __attribute__((simd("notinbranch"), const, nothrow))
#define FP_LIBM_1(name)                                                                           \
    FP_LIBM_SHARED("v", FP_LIBM_FIRST, #name)                                                     \
    extern "C" float fp_vector_##name##f(float) __asm__("fp_" #name "f") FP_LIBM_SIMD;            \
    extern "C" double fp_vector_##name(double) __asm__("fp_" #name) FP_LIBM_SIMD;                 \
    FP_FN float name(float x) { return fp_vector_##name##f(x); }                                  \
    FP_FN double name(double x) { return fp_vector_##name(x); }
#define FP_LIBM_2(name)                                                                           \
    FP_LIBM_SHARED("vv", FP_LIBM_BOTH, #name)                                                     \
    extern "C" float fp_vector_##name##f(float, float) __asm__("fp_" #name "f") FP_LIBM_SIMD;     \
    extern "C" double fp_vector_##name(double, double) __asm__("fp_" #name) FP_LIBM_SIMD;         \
    FP_FN float name(float x, float y) { return fp_vector_##name##f(x, y); }                      \
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
