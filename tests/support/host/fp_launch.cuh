// What templates/include/fp_launch.cuh has, for the emulation: kernels run one after the other; the blocks of a launch of teams side by side.
#pragma once

#include <cstdlib>
#include <cstring>

namespace fp {

template <auto Kernel, typename... Arguments>
void launch(int blocks, int threads, int shared, void*, Arguments... arguments) {
    emulation::launch(blocks, threads, shared, [&] { Kernel(arguments...); });
}

// EMULATED_TEAMS in the environment says how many teams the device has room for.
template <auto Kernel, typename... Arguments>
int launch_teams(int members, int teams, int threads, int shared, void* exchange, int nbytes, void*, Arguments... arguments) {
    const char* const room = std::getenv("EMULATED_TEAMS");
    const int fitting = room ? std::atoi(room) : teams;
    if (fitting == 0) return cudaErrorCooperativeLaunchTooLarge;
    std::memset(exchange, 0, nbytes);
    emulation::launch((fitting < teams ? fitting : teams) * members, threads, shared, [&] { Kernel(arguments...); }, true);
    return cudaSuccess;
}

}  // namespace fp
