// Launches whose blocks are all resident at the same time.
#pragma once

namespace fp {

// Launches `kernel` with as many teams of `members` blocks as are resident at once, at most `teams`, after zeroing the
// `nbytes` of `exchange`. Where not even one team is, or the driver says so, the error is cudaErrorCooperativeLaunchTooLarge,
// and nothing is launched.
template <typename... Parameters>
int launch_teams(void (*kernel)(Parameters...), int members, int teams, int threads, int shared, void* exchange,
                 int nbytes, void* stream, Parameters... parameters) {
    const void* const function = reinterpret_cast<const void*>(kernel);
    const cudaStream_t where = static_cast<cudaStream_t>(stream);
    int device = 0, multiprocessors = 0, resident = 0;
    cudaError_t error = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    if (error == cudaSuccess) {  // or the caches keep what the second block of a multiprocessor needs
        error = cudaFuncSetAttribute(function, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    }
    if (error == cudaSuccess) error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    if (error == cudaSuccess) {
        error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, function, threads, shared);
    }
    if (error != cudaSuccess) return static_cast<int>(error);
    const int fitting = multiprocessors * resident / members;
    if (fitting == 0) return static_cast<int>(cudaErrorCooperativeLaunchTooLarge);
    error = cudaMemsetAsync(exchange, 0, nbytes, where);
    if (error != cudaSuccess) return static_cast<int>(error);
    void* pointers[] = {&parameters...};
    const dim3 blocks(unsigned((fitting < teams ? fitting : teams) * members));
    error = cudaLaunchCooperativeKernel(function, blocks, dim3(unsigned(threads)), pointers, shared, where);
    if (error == cudaErrorCooperativeLaunchTooLarge) cudaGetLastError();  // the caller has another way; nobody else shall meet it
    return static_cast<int>(error);
}

}  // namespace fp
