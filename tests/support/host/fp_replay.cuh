// What templates/include/fp_replay.cuh has, for the emulation, which has no graphs.
#pragma once

namespace fp {

template <int Pointers, int Launches, int Arguments>
struct Replayed {
    template <typename Launch>
    int run(const void* const (&)[Pointers], void* stream, const Launch& launch) {
        return launch(stream);
    }
};

}  // namespace fp
