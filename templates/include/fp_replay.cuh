// Launches that are made again and again, as one CUDA graph: to launch that takes the host as long as one kernel.
#pragma once

#if !defined(__CUDACC_RTC__)
namespace fp {

// A graph, and what its nodes and their arguments are; `graph` says which nodes of `made` are meant.
struct Graph {
    cudaGraph_t graph;
    cudaGraphExec_t made;
};

// What a function launches as the nodes of a graph, each behind the one before it. Where it is called again, for other pointers, the nodes
// get these; what is in flight keeps those that it was launched with.
class Nodes {
public:
    // A call of it that launches on these nodes; gives 0 or an error.
    using Launch = int (*)(const void* launch, Nodes* nodes);

    // `known` is of one graph, as are its `nodes` and the pointers among the `arguments` of all.
    Nodes(Graph& known, cudaGraphNode_t* nodes, const void** arguments) : known_(known), nodes_(nodes), arguments_(arguments) {}

    // Launches on `stream` what `launch` launches; false where that cannot be, and nothing is launched.
    bool run(cudaStream_t stream, Launch call, const void* launch) {
        if (fit(call, launch) && cudaGraphLaunch(known_.made, stream) == cudaSuccess) return true;
        clear(known_);
        return false;
    }

    static void clear(Graph& known) {
        if (known.made != nullptr) cudaGraphExecDestroy(known.made);  // which waits for nothing, and takes effect when it is over
        if (known.graph != nullptr) cudaGraphDestroy(known.graph);
        known = {};
        cudaGetLastError();  // what is launched one by one has the same error, if it is one
    }

    cudaError_t kernel(const cudaLaunchConfig_t& config, void* function, const Passed& passed) {
        bool changed = false;
        for (int i = 0; i < passed.count; ++i) {
            // What is none changes with a pointer of which it is made, which is an argument, too.
            if (passed.pointers[i]) changed |= differs(*static_cast<const void* const*>(passed.places[i]));
        }
        cudaKernelNodeParams node = {};
        node.func = function;
        node.gridDim = config.gridDim;
        node.blockDim = config.blockDim;
        node.sharedMemBytes = unsigned(config.dynamicSmemBytes);
        node.kernelParams = passed.places;
        cudaGraphNode_t& at = nodes_[nodes_seen_++];
        if (known_.made != nullptr) return changed ? noted(cudaGraphExecKernelNodeSetParams(known_.made, at, &node)) : cudaSuccess;
        cudaError_t error = cudaGraphAddKernelNode(&at, known_.graph, before(at), nodes_seen_ > 1, &node);
        for (unsigned i = 0; error == cudaSuccess && i < config.numAttrs; ++i) {
            error = cudaGraphKernelNodeSetAttribute(at, config.attrs[i].id, &config.attrs[i].val);
        }
        return noted(error);
    }

    cudaError_t zeros(void* memory, std::size_t nbytes) {
        const bool changed = differs(memory);
        cudaMemsetParams node = {};
        node.dst = memory;
        node.elementSize = 1;
        node.width = nbytes;
        node.height = 1;
        cudaGraphNode_t& at = nodes_[nodes_seen_++];
        if (known_.made != nullptr) return changed ? noted(cudaGraphExecMemsetNodeSetParams(known_.made, at, &node)) : cudaSuccess;
        return noted(cudaGraphAddMemsetNode(&at, known_.graph, before(at), nodes_seen_ > 1, &node));
    }

private:
    bool fit(Launch call, const void* launch) {
        if (known_.made != nullptr) return call(launch, this) == 0 && error_ == cudaSuccess;
        cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;  // captures by other threads go on
        cudaThreadExchangeStreamCaptureMode(&mode);
        bool right = cudaGraphCreate(&known_.graph, 0) == cudaSuccess && call(launch, this) == 0 && error_ == cudaSuccess;
        right = right && cudaGraphInstantiate(&known_.made, known_.graph, 0) == cudaSuccess;
        cudaThreadExchangeStreamCaptureMode(&mode);
        return right;
    }

    // What a node that was just seen is behind.
    const cudaGraphNode_t* before(const cudaGraphNode_t& at) const { return nodes_seen_ > 1 ? &at - 1 : nullptr; }

    // Whether the next argument is another one than it was.
    bool differs(const void* argument) {
        const void*& known = arguments_[arguments_seen_++];
        const bool differs = known != argument;
        known = argument;
        return differs;
    }

    cudaError_t noted(cudaError_t error) {
        if (error != cudaSuccess) error_ = error;
        return error;
    }

    Graph& known_;
    cudaGraphNode_t* nodes_;
    const void** arguments_;
    cudaError_t error_ = cudaSuccess;
    int nodes_seen_ = 0, arguments_seen_ = 0;
};

static inline cudaError_t start(cudaLaunchConfig_t& config, void* kernel, const Passed& passed, Nodes* nodes) {
    return nodes->kernel(config, kernel, passed);
}

static inline cudaError_t zero(void* memory, std::size_t nbytes, Nodes* nodes) { return nodes->zeros(memory, nbytes); }

constexpr int most_streams = 4, most_sets = 8;  // that have graphs at once; sets of pointers are of one stream

// What a function is called with, and its memory for all streams and sets of pointers: pointers, nodes and arguments of each.
struct Replaying {
    const void* const* given;
    const void** pointers;
    cudaGraphNode_t* nodes;
    const void** arguments;
    int count, launches, most_arguments;
};

// The graphs of what a function launches on several streams, for its pointers, on which alone that depends. Launches of one graph come one
// after the other, on whatever streams; so each has graphs of its own.
//
// A model that is called in a loop gets the same few addresses from the allocator. Each set of them has a graph as long as there is room; then
// the graph that was used least recently is given the new ones, which takes the host a little longer.
class Graphs {
public:
    // Replays on `stream` what `launch` launches; false where that is not done, and nothing is launched. From the second call on a stream on
    // that is a graph, unless the stream is captured, or another thread is here.
    bool run(const Replaying& all, cudaStream_t stream, Nodes::Launch call, const void* launch) {
        if (__atomic_test_and_set(&busy_, __ATOMIC_ACQUIRE)) return false;
        const bool replayed = replay(all, stream, call, launch);
        __atomic_clear(&busy_, __ATOMIC_RELEASE);
        return replayed;
    }

private:
    struct Place {
        cudaStream_t stream;
        int device;
        long long met;                       // the call of all in which it was met last; 0 for none
        long long used[most_sets];           // the same of a graph
        unsigned long long keys[most_sets];  // of their pointers, beside each other: few lines of the processor's cache to look through
        Graph graphs[most_sets];
    };
    static constexpr int most_graphs = 64;
    static constexpr long long forgotten_after = 64;

    bool replay(const Replaying& all, cudaStream_t stream, Nodes::Launch call, const void* launch) {
        cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
        int device = 0;
        if (cudaStreamIsCapturing(stream, &status) != cudaSuccess || cudaGetDevice(&device) != cudaSuccess) {
            cudaGetLastError();
            return false;
        }
        Place* const place = status == cudaStreamCaptureStatusNone ? find(stream, device) : nullptr;
        if (place == nullptr) return false;
        const int set = find(*place, all), number = int(place - places_) * most_sets + set;
        if (place->graphs[set].made == nullptr && ++made_ > most_graphs) return false;
        Nodes nodes(place->graphs[set], all.nodes + number * all.launches, all.arguments + number * all.most_arguments);
        return nodes.run(stream, call, launch);
    }

    // The place of a stream that was met before; null for others, which get that of the one that was met least recently if nobody needs it.
    Place* find(cudaStream_t stream, int device) {
        ++now_;
        Place* oldest = places_;
        for (Place& place : places_) {
            if (place.met > 0 && place.stream == stream && place.device == device) {
                place.met = now_;
                return &place;
            }
            if (place.met < oldest->met) oldest = &place;
        }
        if (oldest->met > 0 && now_ - oldest->met < forgotten_after) return nullptr;
        for (Graph& graph : oldest->graphs) Nodes::clear(graph);
        *oldest = {stream, device, now_};
        return nullptr;
    }

    // The set of the given pointers.
    int find(Place& place, const Replaying& all) {
        const void** const pointers = all.pointers + (&place - places_) * most_sets * all.count;
        unsigned long long key = 0;
        for (int i = 0; i < all.count; ++i) key = key * 0x9e3779b97f4a7c15ull + reinterpret_cast<unsigned long long>(all.given[i]);
        int oldest = 0;
        for (int k = 0; k < most_sets; ++k) {
            bool same = place.keys[k] == key && place.used[k] > 0;
            for (int i = 0; same && i < all.count; ++i) same = pointers[k * all.count + i] == all.given[i];
            if (same) {
                place.used[k] = now_;
                return k;
            }
            if (place.used[k] < place.used[oldest]) oldest = k;
        }
        place.keys[oldest] = key;
        place.used[oldest] = now_;
        for (int i = 0; i < all.count; ++i) pointers[oldest * all.count + i] = all.given[i];
        return oldest;
    }

    bool busy_ = false;
    int made_ = 0;
    long long now_ = 0;
    Place places_[most_streams] = {};
};

// What a function launches for its `Pointers`: `Launches` in all, with so many `Arguments` in all.
template <int Pointers, int Launches, int Arguments>
class Replayed {
public:
    // Launches on `stream` what `launch(stream)` launches, which gives 0 or an error.
    template <typename Launch>
    int run(const void* const (&pointers)[Pointers], void* stream, const Launch& launch) {
        const Nodes::Launch call = [](const void* launch, Nodes* nodes) { return (*static_cast<const Launch*>(launch))(nodes); };
        const Replaying all = {pointers, pointers_[0], nodes_[0], arguments_[0], Pointers, Launches, Arguments};
        return graphs_.run(all, static_cast<cudaStream_t>(stream), call, &launch) ? 0 : launch(stream);
    }

private:
    static constexpr int sets_ = most_streams * most_sets;

    Graphs graphs_;
    const void* pointers_[sets_][Pointers] = {};
    cudaGraphNode_t nodes_[sets_][Launches] = {};
    const void* arguments_[sets_][Arguments] = {};
};

}  // namespace fp
#endif
