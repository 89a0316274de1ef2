// Launches of kernels that are in a cubin (codegen/cubins.py): what stands for a kernel is a pointer to an object that knows its name there.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#define __grid_constant__
#define FP_HOST

// The file becomes part of the library.
#define FP_IMAGE(PATH)                                                                             \
    asm(".pushsection .rodata\n.balign 64\nfp_image:\n.incbin \"" PATH "\"\n.popsection\n"); \
    extern "C" __attribute__((visibility("hidden"))) const char fp_image[];                        \
    const void* const fp::image = fp_image;

// `NAME` stands for the kernel that the cubin calls `LOWERED`.
#define FP_KERNEL(NAME, LOWERED, ...) \
    fp::Kernel<void(__VA_ARGS__)> NAME##_named = {{LOWERED, nullptr}}; \
    constexpr auto* NAME = &NAME##_named;

namespace fp {

struct half;
struct bfloat16;

struct Named {
    const char* name;
    cudaKernel_t kernel;
};

template <typename Parameters>
struct Kernel : Named {};
template <typename... Parameters>
using KernelOf = Kernel<void(Parameters...)>*;

extern const void* const image __attribute__((visibility("hidden")));

// The cubin. Threads that ask at the same time load it twice, and one of them is in vain. Not inline: what such a function keeps would be one
// for all libraries of a process.
static cudaLibrary_t library() {
    static cudaLibrary_t loaded;
    cudaLibrary_t known = __atomic_load_n(&loaded, __ATOMIC_ACQUIRE), own = nullptr;
    if (known != nullptr || cudaLibraryLoadData(&own, image, nullptr, nullptr, 0, nullptr, nullptr, 0) != cudaSuccess) return known;
    if (__atomic_compare_exchange_n(&loaded, &known, own, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) return own;
    cudaLibraryUnload(own);
    return known;
}

// What CUDA knows the kernel by, on every device; null where the cubin cannot be loaded: then a launch fails.
static void* found(Named* named) {
    cudaKernel_t kernel = __atomic_load_n(&named->kernel, __ATOMIC_ACQUIRE);
    if (kernel == nullptr && cudaLibraryGetKernel(&kernel, library(), named->name) == cudaSuccess) {
        __atomic_store_n(&named->kernel, kernel, __ATOMIC_RELEASE);
    }
    return static_cast<void*>(kernel);
}

}  // namespace fp
