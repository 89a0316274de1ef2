// What fused operators need that libtorch calls without Python: checks, calls of other operators, libraries within a library.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace fp {

using Stack = torch::jit::Stack;
using Tensors = std::vector<at::Tensor>;

struct Layout {
    std::vector<int64_t> shape;
    std::vector<int64_t> strides;
    at::ScalarType type;
};

inline at::Tensor empty(const Layout& layout, at::Device device)
{
    return at::empty_strided(layout.shape, layout.strides, at::TensorOptions().dtype(layout.type).device(device));
}

// The tensor, or a copy of it with these strides.
inline at::Tensor lying(at::Tensor tensor, const Layout& layout)
{
    if (tensor.strides() == at::IntArrayRef(layout.strides)) return tensor;
    at::Tensor copy = empty(layout, tensor.device());
    copy.copy_(tensor);
    return copy;
}

// The memory of a tensor without gaps, with this shape.
inline at::Tensor seen(const at::Tensor& tensor, const Layout& layout) { return tensor.as_strided(layout.shape, layout.strides); }

// One of the `count` arguments on top of the stack, which code was generated for.
inline at::Tensor argument(const Stack& stack, size_t count, size_t number, const char* name, at::DeviceType device, const Layout& layout)
{
    const at::Tensor& tensor = torch::jit::peek(stack, number, count).toTensor();
    TORCH_CHECK_VALUE(
        tensor.sizes() == at::IntArrayRef(layout.shape) && tensor.scalar_type() == layout.type && tensor.device().type() == device,
        name, ": argument ", number, " is ", tensor.scalar_type(), tensor.sizes(), " on ", tensor.device(), "; this code was generated for ",
        layout.type, at::IntArrayRef(layout.shape), " on ", device);
    return lying(tensor, layout);
}

inline at::Tensor called(const char* name, const char* overload, Stack stack, size_t item)
{
    c10::Dispatcher::singleton().findSchemaOrThrow(name, overload).callBoxed(stack);
    if (stack.at(0).isTensorList()) return stack[0].toTensorList().get(item);
    return stack.at(item).toTensor();
}

inline void* address(const at::Tensor& tensor, const char* name)
{
    void* pointer = tensor.data_ptr();
    TORCH_CHECK(pointer != nullptr || tensor.numel() == 0, name, ": a tensor has elements but no memory");
    return pointer;
}

inline bool aligned(const void* pointer)
{
    return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

// A function of a library whose bytes begin and end here.
inline void* loaded(const char* begin, const char* end, const char* symbol)
{
    const int file = memfd_create("fusepass", MFD_CLOEXEC);  // stays open: the loader takes a path it knows for the library it knows
    TORCH_CHECK(file >= 0, "fusepass: there is no file in memory for a library");
    while (begin != end) {
        const ssize_t count = write(file, begin, end - begin);
        TORCH_CHECK(count > 0, "fusepass: a library cannot be written to a file in memory");
        begin += count;
    }
    void* library = dlopen(("/proc/self/fd/" + std::to_string(file)).c_str(), RTLD_NOW | RTLD_LOCAL);
    TORCH_CHECK(library != nullptr, "fusepass: a library cannot be loaded: ", dlerror());
    void* function = dlsym(library, symbol);
    TORCH_CHECK(function != nullptr, "fusepass: a library has no ", symbol);
    return function;
}

inline void returned(Stack& stack, size_t count, Tensors results)
{
    torch::jit::drop(stack, count);
    for (at::Tensor& each : results) torch::jit::push(stack, std::move(each));
}

}  // namespace fp
