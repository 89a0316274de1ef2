// Lists of tensors on a CPU: threads share pieces of all members of a list, each of which has tensors of a size of its own.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace fp {

// Calls `work` for pieces of at most `piece` elements, with the `each` pointers of a member and where its piece begins and ends. `first` has for each
// member how many pieces are before its own, and behind that how many there are.
template <typename Work>
void for_pieces(void* const* pointers, int each, const std::int64_t* sizes, const int* first, int count, std::int64_t piece, bool shared, const Work& work) {
#pragma omp parallel for schedule(static) if (shared)
    for (int i = 0; i < first[count]; ++i) {
        const int member = int(std::upper_bound(first, first + count, i) - first) - 1;
        const std::int64_t begin = (i - first[member]) * piece;
        work(pointers + std::size_t(member) * each, begin, std::min(begin + piece, sizes[member]));
    }
}

}  // namespace fp
