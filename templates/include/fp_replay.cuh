// Launches that are made again and again, as one CUDA graph: to launch that takes the host as long as one kernel.
#pragma once

#if !defined(__CUDACC_RTC__)
namespace fp {

struct TensorMap;

// What a function launches as the nodes of a graph, each behind the one before it. Where it is called again, for other pointers, the nodes
// get these; what is in flight keeps those that it was launched with.
template <int Launches, int Arguments>
class Nodes {
public:
    // Launches on `stream` what `launch(this)` launches, which gives 0 or an error; false where that cannot be, and nothing is launched.
    template <typename Launch>
    bool run(cudaStream_t stream, const Launch& launch) {
        if (fit(launch) && cudaGraphLaunch(made_, stream) == cudaSuccess) return true;
        clear();
        return false;
    }

    bool made() const { return made_ != nullptr; }

    void clear() {
        if (made_ != nullptr) cudaGraphExecDestroy(made_);  // which waits for nothing, and takes effect when it is over
        if (graph_ != nullptr) cudaGraphDestroy(graph_);
        made_ = nullptr;
        graph_ = nullptr;
        cudaGetLastError();  // what is launched one by one has the same error, if it is one
    }

    template <auto Kernel, typename... Given>
    cudaError_t kernel(const cudaLaunchConfig_t& config, Given... arguments) {
        const bool changed = (differs(arguments) | ...);
        void* pointers[] = {&arguments...};
        cudaKernelNodeParams node = {};
        node.func = found<Kernel>();
        node.gridDim = config.gridDim;
        node.blockDim = config.blockDim;
        node.sharedMemBytes = unsigned(config.dynamicSmemBytes);
        node.kernelParams = pointers;
        return add(changed, [&](cudaGraphNode_t& at, const cudaGraphNode_t* before) {
            if (made()) return cudaGraphExecKernelNodeSetParams(made_, at, &node);
            cudaError_t error = cudaGraphAddKernelNode(&at, graph_, before, before != nullptr, &node);
            for (unsigned i = 0; error == cudaSuccess && i < config.numAttrs; ++i) {
                error = cudaGraphKernelNodeSetAttribute(at, config.attrs[i].id, &config.attrs[i].val);
            }
            return error;
        });
    }

    cudaError_t zeros(void* memory, std::size_t nbytes) {
        const bool changed = differs(memory);
        cudaMemsetParams node = {};
        node.dst = memory;
        node.elementSize = 1;
        node.width = nbytes;
        node.height = 1;
        return add(changed, [&](cudaGraphNode_t& at, const cudaGraphNode_t* before) {
            if (made()) return cudaGraphExecMemsetNodeSetParams(made_, at, &node);
            return cudaGraphAddMemsetNode(&at, graph_, before, before != nullptr, &node);
        });
    }

private:
    template <typename Launch>
    bool fit(const Launch& launch) {
        nodes_seen_ = arguments_seen_ = 0;
        error_ = cudaSuccess;
        if (made()) return launch(this) == 0 && error_ == cudaSuccess;
        cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;  // captures by other threads go on
        cudaThreadExchangeStreamCaptureMode(&mode);
        bool right = cudaGraphCreate(&graph_, 0) == cudaSuccess && launch(this) == 0 && error_ == cudaSuccess;
        right = right && cudaGraphInstantiate(&made_, graph_, 0) == cudaSuccess;
        cudaThreadExchangeStreamCaptureMode(&mode);
        return right;
    }

    // Whether the next argument is another one than it was.
    bool differs(const void* argument) {
        const void*& known = arguments_[arguments_seen_++];
        const bool differs = known != argument;
        known = argument;
        return differs;
    }

    bool differs(const TensorMap&) { return false; }  // unless a pointer does of which it is made, which is an argument, too

    template <typename Add>
    cudaError_t add(bool changed, const Add& add) {
        const int number = nodes_seen_++;
        const cudaError_t error = changed || !made() ? add(nodes_[number], number > 0 ? &nodes_[number - 1] : nullptr) : cudaSuccess;
        if (error != cudaSuccess) error_ = error;
        return error;
    }

    cudaGraph_t graph_ = nullptr;  // whose nodes say which of `made_` are meant
    cudaGraphExec_t made_ = nullptr;
    cudaError_t error_ = cudaSuccess;
    int nodes_seen_ = 0, arguments_seen_ = 0;
    cudaGraphNode_t nodes_[Launches] = {};
    const void* arguments_[Arguments] = {};  // of all nodes
};

template <auto Kernel, int Launches, int Arguments, typename... Given>
cudaError_t start(cudaLaunchConfig_t& config, Nodes<Launches, Arguments>* nodes, Given... arguments) {
    return nodes->template kernel<Kernel>(config, arguments...);
}

template <int Launches, int Arguments>
cudaError_t zero(void* memory, std::size_t nbytes, Nodes<Launches, Arguments>* nodes) {
    return nodes->zeros(memory, nbytes);
}

// What a function launches on one stream for its `Pointers`, on which alone that depends: `Launches` in all, with so many `Arguments` in all.
//
// A model that is called in a loop gets the same few addresses from the allocator. Each set of them has a graph as long as there is room; then
// the graph that was used least recently is given the new ones, which takes the host a little longer.
template <int Pointers, int Launches, int Arguments>
class Graphs {
public:
    // The graph for these pointers.
    Nodes<Launches, Arguments>& find(const void* const (&pointers)[Pointers]) {
        ++now_;
        unsigned long long key = 0;
        for (const void* pointer : pointers) key = key * 0x9e3779b97f4a7c15ull + reinterpret_cast<unsigned long long>(pointer);
        int oldest = 0;
        for (int k = 0; k < room_; ++k) {
            bool same = keys_[k] == key && last_[k] > 0;
            for (int i = 0; same && i < Pointers; ++i) same = pointers_[k][i] == pointers[i];
            if (same) {
                last_[k] = now_;
                return nodes_[k];
            }
            if (last_[k] < last_[oldest]) oldest = k;
        }
        keys_[oldest] = key;
        last_[oldest] = now_;
        for (int i = 0; i < Pointers; ++i) pointers_[oldest][i] = pointers[i];
        return nodes_[oldest];
    }

    void clear() {
        for (int k = 0; k < room_; ++k) {
            nodes_[k].clear();
            last_[k] = 0;
        }
    }

private:
    static constexpr int room_ = 8;

    long long now_ = 0;
    long long last_[room_] = {};           // the call of all in which it was met last; 0 for none
    unsigned long long keys_[room_] = {};  // of their pointers, beside each other: few lines of the processor's cache to look through
    const void* pointers_[room_][Pointers] = {};
    Nodes<Launches, Arguments> nodes_[room_];
};

// The same on several streams. Launches of one graph come one after the other, on whatever streams; so each has graphs of its own.
template <int Pointers, int Launches, int Arguments>
class Replayed {
public:
    // Launches on `stream` what `launch(stream)` launches, which gives 0 or an error. From the second call on a stream on that is a graph,
    // unless the stream is captured, or another thread is here.
    template <typename Launch>
    int run(const void* const (&pointers)[Pointers], void* stream, const Launch& launch) {
        if (__atomic_test_and_set(&busy_, __ATOMIC_ACQUIRE)) return launch(stream);
        const bool replayed = replay(pointers, static_cast<cudaStream_t>(stream), launch);
        __atomic_clear(&busy_, __ATOMIC_RELEASE);
        return replayed ? 0 : launch(stream);
    }

private:
    struct Place {
        cudaStream_t stream;
        int device;
        long long last;  // the call of all in which it was met last; 0 for none
        Graphs<Pointers, Launches, Arguments> graphs;
    };
    static constexpr int places_ = 4, most_graphs_ = 64;
    static constexpr long long forgotten_after_ = 64;

    template <typename Launch>
    bool replay(const void* const (&pointers)[Pointers], cudaStream_t stream, const Launch& launch) {
        cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
        int device = 0;
        if (cudaStreamIsCapturing(stream, &status) != cudaSuccess || cudaGetDevice(&device) != cudaSuccess) {
            cudaGetLastError();
            return false;
        }
        Place* const place = status == cudaStreamCaptureStatusNone ? find(stream, device) : nullptr;
        if (place == nullptr) return false;
        Nodes<Launches, Arguments>& nodes = place->graphs.find(pointers);
        if (!nodes.made() && ++made_ > most_graphs_) return false;
        return nodes.run(stream, launch);
    }

    // The place of a stream that was met before; null for others, which get that of the one that was met least recently if nobody needs it.
    Place* find(cudaStream_t stream, int device) {
        ++now_;
        Place* oldest = known_;
        for (Place& place : known_) {
            if (place.last > 0 && place.stream == stream && place.device == device) {
                place.last = now_;
                return &place;
            }
            if (place.last < oldest->last) oldest = &place;
        }
        if (oldest->last > 0 && now_ - oldest->last < forgotten_after_) return nullptr;
        oldest->graphs.clear();
        oldest->stream = stream;
        oldest->device = device;
        oldest->last = now_;
        return nullptr;
    }

    bool busy_ = false;
    int made_ = 0;
    long long now_ = 0;
    Place known_[places_] = {};
};

}  // namespace fp
#endif
