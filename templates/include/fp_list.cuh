// Lists of tensors: one launch goes over many members of a list, each with tensors of a size of its own.
#pragma once

#include "fp_common.h"

namespace fp {

// What a launch is told of members; the parameters of a kernel are 4 KiB at most.
template <int Pointers>
struct List {
    static constexpr int most = 4000 / (8 * Pointers + 8 + 4);
    static_assert(most > 0, "a member has too many tensors");

    void* pointers[most][Pointers];
    std::int64_t sizes[most];  // elements
    int first[most];           // blocks before those of the member
    int count;

    // The member that `block` works on.
    FP_FN int member(int block) const {
        int low = 0;
        for (int high = count; high - low > 1;) {
            const int middle = (low + high) / 2;
            (first[middle] <= block ? low : high) = middle;
        }
        return low;
    }
};

// Whether 16 bytes can be moved at once from and to each of these places.
template <typename... T>
FP_FN bool aligned(const T*... places) {
    return ((reinterpret_cast<std::uintptr_t>(places) | ...) & 15) == 0;
}

#if !defined(__CUDACC_RTC__)
// Launches `Kernel` for `count` members, of which a block does `piece` elements; for as many at once as its parameters hold.
template <auto Kernel, int Pointers, typename Where>
void launch_list(void* const* pointers, const std::int64_t* sizes, int count, int piece, int threads, Where where) {
    for (int start = 0; start < count; start += List<Pointers>::most) {
        List<Pointers> list = {};
        int blocks = 0;
        for (; list.count < List<Pointers>::most && start + list.count < count; ++list.count) {
            const int member = start + list.count;
            for (int i = 0; i < Pointers; ++i) list.pointers[list.count][i] = pointers[member * Pointers + i];
            list.sizes[list.count] = sizes[member];
            list.first[list.count] = blocks;
            blocks += int((sizes[member] + piece - 1) / piece);
        }
        launch<Kernel>(blocks, threads, 0, where, list);
    }
}
#endif

}  // namespace fp
