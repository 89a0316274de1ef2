// Launches: of kernels behind everything before them in a stream, or, where that is done again and again, as nodes of a graph (fp_replay.cuh).
// What depends on the kernel is small, because every library compiles it for each of its kernels.
#pragma once

#if !defined(__CUDACC_RTC__)  // which takes no host code
namespace fp {

#if !defined(FP_HOST)  // where fp_host.hpp has these
// What stands for a kernel with these parameters.
template <typename... Parameters>
using KernelOf = void (*)(Parameters...);

// What CUDA knows a kernel by.
template <typename... Parameters>
void* found(void (*kernel)(Parameters...)) { return reinterpret_cast<void*>(kernel); }
#endif

// The arguments of a launch, in the order of the kernel's parameters.
struct Passed {
    void** places;         // where they are
    const bool* pointers;  // which of them are pointers
    int count;
};

template <typename T>
constexpr bool is_pointer = false;
template <typename T>
constexpr bool is_pointer<T*> = true;

template <typename T>
struct Exactly {
    using type = T;  // takes no part in deduction
};

constexpr int most_devices = 64;

// How a kernel is launched.
struct Shape {
    int blocks, threads, shared;
    int* allowed;  // dynamic shared memory that each device has been told of for this kernel
    const cudaLaunchAttribute* attribute;
};

// The number for the current device, which `find` gives; it is asked where none of at least `least` is known. Threads that ask at the same
// time find the same.
template <typename Find>
int known(int* numbers, int least, const Find& find) {
    int device = most_devices;
    if (cudaGetDevice(&device) != cudaSuccess || device >= most_devices) return find();
    int number = __atomic_load_n(&numbers[device], __ATOMIC_RELAXED);
    if (number < least) {
        number = find();
        __atomic_store_n(&numbers[device], number, __ATOMIC_RELAXED);
    }
    return number;
}

// What is launched goes to a stream.
static inline cudaError_t start(cudaLaunchConfig_t& config, void* kernel, const Passed& passed, void* stream) {
    config.stream = static_cast<cudaStream_t>(stream);
    return cudaLaunchKernelExC(&config, kernel, passed.places);
}

static inline cudaError_t zero(void* memory, std::size_t nbytes, void* stream) {
    return cudaMemsetAsync(memory, 0, nbytes, static_cast<cudaStream_t>(stream));
}

// Where it has more than the dynamic shared memory that every kernel may have, the device is told once.
template <typename Where>
cudaError_t launch_found(void* kernel, const Shape& shape, const Passed& passed, Where* where) {
    constexpr int always = 48 << 10;
    if (shape.shared > always) {
        known(shape.allowed, shape.shared, [&] {
            const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.shared);
            return error == cudaSuccess ? shape.shared : 0;  // else the launch fails, too
        });
    }
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(unsigned(shape.blocks));
    config.blockDim = dim3(unsigned(shape.threads));
    config.dynamicSmemBytes = std::size_t(shape.shared);
    config.attrs = const_cast<cudaLaunchAttribute*>(shape.attribute);
    config.numAttrs = shape.attribute == nullptr ? 0 : 1;
    return start(config, kernel, passed, where);
}

// Arguments become what the kernel takes.
template <typename Where, typename... Parameters>
cudaError_t launch_as(KernelOf<Parameters...> kernel, const Shape& shape, Where* where, typename Exactly<Parameters>::type... arguments) {
    const bool pointers[] = {is_pointer<Parameters>...};
    void* places[] = {const_cast<void*>(static_cast<const void*>(&arguments))...};
    return launch_found(found(kernel), shape, {places, pointers, int(sizeof...(Parameters))}, where);
}

template <auto Kernel>
static int allowed[most_devices];

// Launches `Kernel` behind everything before it in the stream `where`, or as a node. What fails is what cudaGetLastError gives.
template <auto Kernel, typename Where, typename... Arguments>
void launch(int blocks, int threads, int shared, Where* where, const Arguments&... arguments) {
    launch_as(Kernel, {blocks, threads, shared, allowed<Kernel>, nullptr}, where, arguments...);
}

template <auto Kernel>
static int resident[most_devices];

// Into `blocks`, of `kernel`, that are resident at once; 0 where none is.
static inline cudaError_t find_resident(int& blocks, int* resident, void* kernel, int threads, int shared) {
    cudaError_t error = cudaSuccess;
    blocks = known(resident, 1, [&] {
        int device = 0, multiprocessors = 0, each = 0;
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
        if (error == cudaSuccess) {  // or the caches keep what the second block of a multiprocessor needs
            error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
        }
        if (error == cudaSuccess) error = cudaGetDevice(&device);
        if (error == cudaSuccess) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
        if (error == cudaSuccess) error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, threads, shared);
        return error == cudaSuccess ? multiprocessors * each : 0;
    });
    return error;
}

// Launches `Kernel` with as many teams of `members` blocks as are resident at once, at most `teams`, after zeroing the
// `nbytes` of `exchange`. Where not even one team is, or the driver says so, the error is cudaErrorCooperativeLaunchTooLarge,
// and nothing is launched.
template <auto Kernel, typename Where, typename... Arguments>
int launch_teams(int members, int teams, int threads, int shared, void* exchange, int nbytes, Where* where, const Arguments&... arguments) {
    int blocks = 0;
    cudaError_t error = find_resident(blocks, resident<Kernel>, found(Kernel), threads, shared);
    if (error != cudaSuccess) return static_cast<int>(error);
    const int fitting = blocks / members;
    if (fitting == 0) return static_cast<int>(cudaErrorCooperativeLaunchTooLarge);
    error = zero(exchange, std::size_t(nbytes), where);
    if (error != cudaSuccess) return static_cast<int>(error);
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
    error = launch_as(Kernel, {(fitting < teams ? fitting : teams) * members, threads, shared, allowed<Kernel>, &attribute}, where, arguments...);
    if (error == cudaErrorCooperativeLaunchTooLarge) cudaGetLastError();  // the caller has another way; nobody else shall meet it
    return static_cast<int>(error);
}

}  // namespace fp
#endif
