// Launches of kernels that are in a cubin (codegen/nvrtc.py): CUDA's functions that take a kernel, for an empty function that stands for it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#define __global__ static
#define __grid_constant__
#define __launch_bounds__(...)
#define FP_HOST

// The file becomes part of the library.
#define FP_IMAGE(PATH)                                                                             \
    asm(".pushsection .rodata\n.balign 64\nfp_image:\n.incbin \"" PATH "\"\n.popsection\n"); \
    extern "C" __attribute__((visibility("hidden"))) const char fp_image[];                        \
    const void* const fp::image = fp_image;

namespace fp {

struct half;
struct bfloat16;

struct Named {
    void* function;
    const char* name;
};
extern const Named kernels[] __attribute__((visibility("hidden")));
extern const void* const image __attribute__((visibility("hidden")));

// The cubin, loaded once. Not inline: what such a function keeps would be one for all libraries of a process.
static cudaLibrary_t library() {
    static const cudaLibrary_t library = [] {
        cudaLibrary_t loaded = nullptr;
        cudaLibraryLoadData(&loaded, image, nullptr, nullptr, 0, nullptr, nullptr, 0);
        return loaded;
    }();
    return library;
}

// What CUDA knows the kernel by that `Kernel` stands for, on every device; null where the cubin cannot be loaded: then a launch fails.
template <auto Kernel>
void* found() {
    static void* const kernel = [] {
        const Named* named = kernels;
        while (named->function != reinterpret_cast<void*>(Kernel)) ++named;
        cudaKernel_t kernel = nullptr;
        cudaLibraryGetKernel(&kernel, library(), named->name);
        return static_cast<void*>(kernel);
    }();
    return kernel;
}

template <typename... Parameters, typename Use, typename... Arguments>
cudaError_t with_pointers(void (*)(Parameters...), const Use& use, Arguments... arguments) {
    const auto launch = [&use](Parameters... exact) {
        void* pointers[] = {const_cast<void*>(static_cast<const void*>(&exact))...};
        return use(pointers);
    };
    return launch(arguments...);
}

// Launches the kernel that `Kernel` stands for. Arguments become what it takes.
template <auto Kernel, typename... Arguments>
cudaError_t launch_on_device(cudaLaunchConfig_t& config, Arguments... arguments) {
    const auto launch = [&config](void** pointers) { return cudaLaunchKernelExC(&config, found<Kernel>(), pointers); };
    return with_pointers(Kernel, launch, arguments...);
}

}  // namespace fp
