// A region's launcher without Python: asks for memory and calls a library's entry.
#pragma once

#include "fp_store.hpp"

#include <structmember.h>

#include <cstddef>
#include <cstdint>
#include <utility>

namespace fp {

constexpr int most_pointers = 40;  // of an entry, beside its numbers and the stream
constexpr int most_tensors = 64;    // that a region takes, and that it gives
constexpr std::intptr_t alignment = 16;  // of what kernels read

inline PyObject* data_ptr_method = nullptr;  // torch.Tensor.data_ptr

inline PyObject* profiler_names = nullptr;  // the dict of torch.autograd.profiler
inline PyObject* profiling_name = nullptr;

// Whether a profiler runs, which is to see regions by name.
inline bool is_profiled() { return PyDict_GetItemWithError(profiler_names, profiling_name) == Py_True; }

// Where `tensor` lies; -1 with an exception set where it cannot tell.
inline std::intptr_t address(PyObject* tensor) {
    PyObject* const number = PyObject_Vectorcall(data_ptr_method, &tensor, 1, nullptr);
    if (number == nullptr) return -1;
    const std::intptr_t value = std::intptr_t(PyLong_AsVoidPtr(number));
    Py_DECREF(number);
    return value;
}

inline void free_instance(PyObject* self) {
    PyTypeObject* const type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

template <std::size_t>
using Pointer = void*;

template <std::size_t... I>
int call_with(void* entry, void* const* pointers, std::index_sequence<I...>) {
    return reinterpret_cast<int (*)(Pointer<I>...)>(entry)(pointers[I]...);
}

template <std::size_t Count>
int call_with_count(void* entry, void* const* pointers) {
    return call_with(entry, pointers, std::make_index_sequence<Count>());
}

template <std::size_t... Count>
int call_entry(void* entry, void* const* pointers, int count, std::index_sequence<Count...>) {
    static constexpr int (*by_count[])(void*, void* const*) = {call_with_count<Count>...};
    return by_count[count](entry, pointers);
}

// Where a pointer of an entry comes from.
enum class From : int { input, output, workspace };  // an input may be written, too

struct Place {
    From from;
    int number;       // of the input or output
    std::intptr_t offset;  // into the workspace, in bytes
};

// Called as the launcher that Python has, `plain`, to which everything unusual is left.
struct Launcher {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject* name;
    PyObject* module;
    PyObject* plain;
    PyObject* failed;     // takes a status and the arguments; gives the result of the call
    PyObject* empty;      // makes a tensor of what follows
    PyObject* outputs;    // a tuple of tuples: shape, strides, type
    PyObject* workspace;  // such a tuple, or None
    PyObject* stream;     // gives the current stream of `device`; None on a CPU
    PyObject* current;    // gives the current device; None where there is one alone
    PyObject* device;     // its number
    PyObject* increment;  // takes tensors that were written
    void* entry;
    void* numbers;
    Store store;
    bool single;
    int inputs;
    int count;
    Place places[most_pointers];
    int written_count;
    int written[most_tensors];  // inputs
};

inline bool fill_stream(const Launcher* it, void** stream) {
    *stream = nullptr;
    if (it->stream == Py_None) return true;
    PyObject* const number = PyObject_CallOneArg(it->stream, it->device);
    if (number == nullptr) return false;
    *stream = PyLong_AsVoidPtr(number);
    Py_DECREF(number);
    return !PyErr_Occurred();
}

// Tells autograd what was written.
inline bool tell_written(const Launcher* it, PyObject* const* arguments) {
    if (it->written_count == 0) return true;
    PyObject* const tensors = PyTuple_New(it->written_count);
    if (tensors == nullptr) return false;
    for (int i = 0; i < it->written_count; ++i) PyTuple_SET_ITEM(tensors, i, Py_NewRef(arguments[it->written[i]]));
    PyObject* const nothing = PyObject_CallOneArg(it->increment, tensors);
    Py_DECREF(tensors);
    Py_XDECREF(nothing);
    return nothing != nullptr;
}

inline PyObject* launch(PyObject* self, PyObject* const* arguments, std::size_t flags, PyObject* names) {
    Launcher* const it = reinterpret_cast<Launcher*>(self);
    const auto plainly = [&] { return PyObject_Vectorcall(it->plain, arguments, flags, names); };
    if (names != nullptr || PyVectorcall_NARGS(flags) != it->inputs || is_profiled()) return plainly();
    if (it->current != Py_None) {
        PyObject* const current = PyObject_CallNoArgs(it->current);
        if (current == nullptr) return nullptr;
        const int same = PyObject_RichCompareBool(current, it->device, Py_EQ);
        Py_DECREF(current);
        if (same < 0) return nullptr;
        if (same == 0) return plainly();
    }
    void* pointers[most_pointers + 2];
    std::intptr_t bits = 0;
    bool missing = false;  // the memory of a tensor, unless it has no elements
    for (int i = 0; i < it->count; ++i) {
        if (it->places[i].from != From::input) continue;
        const std::intptr_t where = address(arguments[it->places[i].number]);
        if (where == -1) return nullptr;
        bits |= where;
        missing |= where == 0;
        pointers[i] = reinterpret_cast<void*>(where);
    }
    if (missing || (bits & (alignment - 1))) return plainly();

    Store& store = it->store;
    void* stream = nullptr;
    if (!fill_stream(it, &stream)) return nullptr;
    const bool from_store = serves(store, stream);
    PyObject* const results = from_store && store.ready > 0 ? store.results[--store.ready] : new_results(it->empty, it->outputs);
    if (results == nullptr) return nullptr;
    PyObject* workspace = nullptr;
    bool borrowed = false;
    std::intptr_t base = 0;
    std::intptr_t starts[most_tensors];
    int status = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(results); ++i) {
        starts[i] = address(PyTuple_GET_ITEM(results, i));
        if (starts[i] == -1) goto error;
    }
    if (it->workspace != Py_None) {
        borrowed = from_store && store.keeps_workspace && !store.lent;
        workspace = borrowed ? Py_XNewRef(store.workspace) : nullptr;
        if (workspace == nullptr) workspace = PyObject_Call(it->empty, it->workspace, nullptr);
        if (workspace == nullptr) goto error;
        base = address(workspace);
        if (base == -1) goto error;
        if (borrowed) {
            if (store.workspace == nullptr) store.workspace = Py_NewRef(workspace);
            store.lent = true;
        }
    }
    for (int i = 0; i < it->count; ++i) {
        const Place& place = it->places[i];
        if (place.from == From::output) pointers[i] = reinterpret_cast<void*>(starts[place.number]);
        if (place.from == From::workspace) pointers[i] = reinterpret_cast<void*>(base + place.offset);
    }
    {
        int count = it->count;
        if (it->numbers != nullptr) pointers[count++] = it->numbers;
        pointers[count++] = stream;
        Py_BEGIN_ALLOW_THREADS
        status = call_entry(it->entry, pointers, count, std::make_index_sequence<most_pointers + 3>());
        Py_END_ALLOW_THREADS
    }
    if (borrowed) store.lent = false;
    Py_XDECREF(workspace);
    if (status != 0) {
        Py_DECREF(results);
        PyObject* const all = PyTuple_New(it->inputs);
        if (all == nullptr) return nullptr;
        for (int i = 0; i < it->inputs; ++i) PyTuple_SET_ITEM(all, i, Py_NewRef(arguments[i]));
        PyObject* const result = PyObject_CallFunction(it->failed, "iN", status, all);
        return result;
    }
    if (!tell_written(it, arguments)) {
        Py_DECREF(results);
        return nullptr;
    }
    if (from_store) restock(store, it->empty, it->outputs);
    if (!it->single) return results;
    {
        PyObject* const only = Py_NewRef(PyTuple_GET_ITEM(results, 0));
        Py_DECREF(results);
        return only;
    }
error:
    Py_XDECREF(workspace);
    Py_DECREF(results);
    return nullptr;
}

inline int launcher_traverse(PyObject* self, visitproc visit, void* arg) {
    Launcher* const it = reinterpret_cast<Launcher*>(self);
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(it->plain);
    Py_VISIT(it->failed);
    return 0;
}

inline int launcher_clear(PyObject* self) {
    Launcher* const it = reinterpret_cast<Launcher*>(self);
    Py_CLEAR(it->plain);
    Py_CLEAR(it->failed);
    return 0;
}

inline void launcher_dealloc(PyObject* self) {
    Launcher* const it = reinterpret_cast<Launcher*>(self);
    PyObject_GC_UnTrack(self);
    launcher_clear(self);
    clear_store(reinterpret_cast<Launcher*>(self)->store);
    for (PyObject** held : {&it->name, &it->module, &it->empty, &it->outputs, &it->workspace, &it->stream, &it->current, &it->device,
                            &it->increment}) {
        Py_CLEAR(*held);
    }
    free_instance(self);
}

// Launcher(name, module, plain, failed, empty, outputs, workspace, stream, current, device, entry, numbers, single, inputs, places, capturing,
// forget_error, stores_results, keeps_workspace, increment, written)
inline PyObject* launcher_new(PyTypeObject* type, PyObject* args, PyObject*) {
    PyObject *name, *module, *plain, *failed, *empty, *outputs, *workspace, *stream, *current, *device, *places, *increment, *written;
    unsigned long long entry, numbers, capturing, forget_error;
    int single, inputs, stores_results, keeps_workspace;
    if (!PyArg_ParseTuple(args, "OOOOOO!OOOOKKpiO!KKppOO!", &name, &module, &plain, &failed, &empty, &PyTuple_Type, &outputs, &workspace,
                          &stream, &current, &device, &entry, &numbers, &single, &inputs, &PyTuple_Type, &places,
                          &capturing, &forget_error, &stores_results, &keeps_workspace, &increment, &PyTuple_Type, &written)) {
        return nullptr;
    }
    const Py_ssize_t count = PyTuple_GET_SIZE(places);
    if (count > most_pointers || PyTuple_GET_SIZE(outputs) > most_tensors || PyTuple_GET_SIZE(written) > most_tensors) {
        PyErr_SetString(PyExc_ValueError, "too many buffers");
        return nullptr;
    }
    Launcher* const it = reinterpret_cast<Launcher*>(type->tp_alloc(type, 0));
    if (it == nullptr) return nullptr;
    it->vectorcall = launch;
    it->name = Py_NewRef(name);
    it->module = Py_NewRef(module);
    it->plain = Py_NewRef(plain);
    it->failed = Py_NewRef(failed);
    it->empty = Py_NewRef(empty);
    it->outputs = Py_NewRef(outputs);
    it->workspace = Py_NewRef(workspace);
    it->stream = Py_NewRef(stream);
    it->current = Py_NewRef(current);
    it->device = Py_NewRef(device);
    it->increment = Py_NewRef(increment);
    it->entry = reinterpret_cast<void*>(std::uintptr_t(entry));
    it->numbers = reinterpret_cast<void*>(std::uintptr_t(numbers));
    it->store.capturing = reinterpret_cast<int (*)(void*, int*)>(std::uintptr_t(capturing));
    it->store.forget_error = reinterpret_cast<int (*)()>(std::uintptr_t(forget_error));
    it->store.stores_results = stores_results != 0;
    it->store.keeps_workspace = keeps_workspace != 0;
    it->single = single != 0;
    it->inputs = inputs;
    it->count = int(count);
    for (int i = 0; i < it->count; ++i) {
        int from, number;
        long long offset;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(places, i), "iiL", &from, &number, &offset)) {
            Py_DECREF(it);
            return nullptr;
        }
        it->places[i] = {From(from), number, std::intptr_t(offset)};
    }
    it->written_count = int(PyTuple_GET_SIZE(written));
    for (int i = 0; i < it->written_count; ++i) it->written[i] = int(PyLong_AsLong(PyTuple_GET_ITEM(written, i)));
    if (PyErr_Occurred()) {
        Py_DECREF(it);
        return nullptr;
    }
    return reinterpret_cast<PyObject*>(it);
}

inline PyMemberDef launcher_members[] = {
    {"__name__", T_OBJECT, offsetof(Launcher, name), READONLY, nullptr},
    {"__qualname__", T_OBJECT, offsetof(Launcher, name), READONLY, nullptr},
    {"__module__", T_OBJECT, offsetof(Launcher, module), READONLY, nullptr},
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Launcher, vectorcall), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

inline PyType_Slot launcher_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(launcher_new)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_traverse, reinterpret_cast<void*>(launcher_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(launcher_clear)},
    {Py_tp_dealloc, reinterpret_cast<void*>(launcher_dealloc)},
    {Py_tp_members, launcher_members},
    {0, nullptr},
};

inline PyType_Spec launcher_spec = {
    "fusepass.Launcher", sizeof(Launcher), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_IMMUTABLETYPE, launcher_slots,
};

}  // namespace fp
