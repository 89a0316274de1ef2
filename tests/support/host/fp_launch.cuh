// What templates/include/fp_launch.cuh has, for the emulation: the blocks of a launch of teams run side by side.
#pragma once

#include <cstdlib>
#include <cstring>

namespace fp {

// EMULATED_TEAMS in the environment says how many teams the device has room for.
template <typename... Parameters>
int launch_teams(void (*kernel)(Parameters...), int members, int teams, int threads, int shared, void* exchange,
                 int nbytes, void*, Parameters... parameters) {
    const char* const room = std::getenv("EMULATED_TEAMS");
    const int fitting = room ? std::atoi(room) : teams;
    if (fitting == 0) return cudaErrorCooperativeLaunchTooLarge;
    std::memset(exchange, 0, nbytes);
    emulation::launch_together((fitting < teams ? fitting : teams) * members, threads, shared, [&] { kernel(parameters...); });
    return cudaSuccess;
}

}  // namespace fp
