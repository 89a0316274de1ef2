// Launches: of kernels behind everything before them in a stream, or, where that is done again and again, as nodes of a graph (fp_replay.cuh).
#pragma once

#if !defined(__CUDACC_RTC__)  // which takes no host code
namespace fp {

#if !defined(FP_HOST)  // where fp_host.hpp has these
// What CUDA knows a kernel by.
template <auto Kernel>
void* found() { return reinterpret_cast<void*>(Kernel); }

template <auto Kernel, typename... Arguments>
cudaError_t launch_on_device(cudaLaunchConfig_t& config, Arguments... arguments) { return cudaLaunchKernelEx(&config, Kernel, arguments...); }
#endif

// What is launched goes to a stream.
template <auto Kernel, typename... Arguments>
cudaError_t start(cudaLaunchConfig_t& config, void* stream, Arguments... arguments) {
    config.stream = static_cast<cudaStream_t>(stream);
    return launch_on_device<Kernel>(config, arguments...);
}

inline cudaError_t zero(void* memory, std::size_t nbytes, void* stream) {
    return cudaMemsetAsync(memory, 0, nbytes, static_cast<cudaStream_t>(stream));
}

constexpr int most_devices = 64;

// The number for the current device, which `find` gives; it is asked where none of at least `least` is known. Threads that ask at the same
// time find the same.
template <typename Find>
int known(int (&numbers)[most_devices], int least, const Find& find) {
    int device = most_devices;
    if (cudaGetDevice(&device) != cudaSuccess || device >= most_devices) return find();
    int number = __atomic_load_n(&numbers[device], __ATOMIC_RELAXED);
    if (number < least) {
        number = find();
        __atomic_store_n(&numbers[device], number, __ATOMIC_RELAXED);
    }
    return number;
}

// Launches `Kernel` as `attribute` says. Where it has more than the dynamic shared memory that every kernel may have, the device is told once.
template <auto Kernel, typename Where, typename... Arguments>
cudaError_t launch_as(const cudaLaunchAttribute* attribute, int blocks, int threads, int shared, Where where, Arguments... arguments) {
    static int allowed[most_devices];
    constexpr int always = 48 << 10;
    if (shared > always) {
        known(allowed, shared, [=] {
            const cudaError_t error = cudaFuncSetAttribute(found<Kernel>(), cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
            return error == cudaSuccess ? shared : 0;  // else the launch fails, too
        });
    }
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(unsigned(blocks));
    config.blockDim = dim3(unsigned(threads));
    config.dynamicSmemBytes = std::size_t(shared);
    config.attrs = const_cast<cudaLaunchAttribute*>(attribute);
    config.numAttrs = attribute == nullptr ? 0 : 1;
    return start<Kernel>(config, where, arguments...);
}

// Launches `Kernel` behind everything before it in the stream `where`, or as a node. What fails is what cudaGetLastError gives.
template <auto Kernel, typename Where, typename... Arguments>
void launch(int blocks, int threads, int shared, Where where, Arguments... arguments) {
    launch_as<Kernel>(nullptr, blocks, threads, shared, where, arguments...);
}

// Launches `Kernel` with as many teams of `members` blocks as are resident at once, at most `teams`, after zeroing the
// `nbytes` of `exchange`. Where not even one team is, or the driver says so, the error is cudaErrorCooperativeLaunchTooLarge,
// and nothing is launched.
template <auto Kernel, typename Where, typename... Arguments>
int launch_teams(int members, int teams, int threads, int shared, void* exchange, int nbytes, Where where, Arguments... arguments) {
    static int blocks[most_devices];  // that are resident at once
    cudaError_t error = cudaSuccess;
    const int resident = known(blocks, 1, [&] {
        int device = 0, multiprocessors = 0, each = 0;
        error = cudaFuncSetAttribute(found<Kernel>(), cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
        if (error == cudaSuccess) {  // or the caches keep what the second block of a multiprocessor needs
            error = cudaFuncSetAttribute(found<Kernel>(), cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
        }
        if (error == cudaSuccess) error = cudaGetDevice(&device);
        if (error == cudaSuccess) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
        if (error == cudaSuccess) error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, found<Kernel>(), threads, shared);
        return error == cudaSuccess ? multiprocessors * each : 0;
    });
    if (error != cudaSuccess) return static_cast<int>(error);
    const int fitting = resident / members;
    if (fitting == 0) return static_cast<int>(cudaErrorCooperativeLaunchTooLarge);
    error = zero(exchange, std::size_t(nbytes), where);
    if (error != cudaSuccess) return static_cast<int>(error);
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
    error = launch_as<Kernel>(&attribute, (fitting < teams ? fitting : teams) * members, threads, shared, where, arguments...);
    if (error == cudaErrorCooperativeLaunchTooLarge) cudaGetLastError();  // the caller has another way; nobody else shall meet it
    return static_cast<int>(error);
}

}  // namespace fp
#endif
