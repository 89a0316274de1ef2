// A region's launcher without Python: asks for memory and calls a library's entry.
#pragma once

#include "fp_store.hpp"

#include <cstdint>

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
    const Owned number(PyObject_Vectorcall(data_ptr_method, &tensor, 1, nullptr));
    return number == nullptr ? -1 : std::intptr_t(PyLong_AsVoidPtr(number));
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
    PyObject* outputs;    // a tuple of tuples for what it makes: shape, strides, type
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
    int result_count;
    int results[most_tensors];  // of each the input that it is, or -1 where it is made

    void release() { clear_store(store); }
};

using LauncherReferences =
    References<Launcher, &Launcher::name, &Launcher::module, &Launcher::plain, &Launcher::failed, &Launcher::empty, &Launcher::outputs,
               &Launcher::workspace, &Launcher::stream, &Launcher::current, &Launcher::device, &Launcher::increment>;

inline bool fill_stream(const Launcher* it, void** stream) {
    *stream = nullptr;
    if (it->stream == Py_None) return true;
    const Owned number(PyObject_CallOneArg(it->stream, it->device));
    if (number == nullptr) return false;
    *stream = PyLong_AsVoidPtr(number);
    return !PyErr_Occurred();
}

// Tells autograd what was written.
inline bool tell_written(const Launcher* it, PyObject* const* arguments) {
    if (it->written_count == 0) return true;
    const Owned tensors(PyTuple_New(it->written_count));
    if (tensors == nullptr) return false;
    for (int i = 0; i < it->written_count; ++i) PyTuple_SET_ITEM(+tensors, i, Py_NewRef(arguments[it->written[i]]));
    return Owned(PyObject_CallOneArg(it->increment, tensors)) != nullptr;
}

// What a call gives: what it `made`, and inputs that are results.
inline PyObject* results_of(const Launcher* it, Owned& made, PyObject* const* arguments) {
    const bool all_made = PyTuple_GET_SIZE(+made) == it->result_count;
    if (it->single) return Py_NewRef(all_made ? PyTuple_GET_ITEM(+made, 0) : arguments[it->results[0]]);
    if (all_made) return made.given();
    PyObject* const all = PyTuple_New(it->result_count);
    Py_ssize_t next = 0;
    for (int i = 0; all != nullptr && i < it->result_count; ++i) {
        const int input = it->results[i];
        PyTuple_SET_ITEM(all, i, Py_NewRef(input < 0 ? PyTuple_GET_ITEM(+made, next++) : arguments[input]));
    }
    return all;
}

inline PyObject* launch(PyObject* self, PyObject* const* arguments, std::size_t flags, PyObject* names) {
    Launcher* const it = reinterpret_cast<Launcher*>(self);
    const auto plainly = [&] { return PyObject_Vectorcall(it->plain, arguments, flags, names); };
    if (names != nullptr || PyVectorcall_NARGS(flags) != it->inputs || is_profiled()) return plainly();
    if (it->current != Py_None) {
        const Owned current(PyObject_CallNoArgs(it->current));
        const int same = current == nullptr ? -1 : PyObject_RichCompareBool(current, it->device, Py_EQ);
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
    Owned results(from_store && store.ready > 0 ? store.results[--store.ready] : new_results(it->empty, it->outputs));
    if (results == nullptr) return nullptr;
    std::intptr_t starts[most_tensors];
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(+results); ++i) {
        starts[i] = address(PyTuple_GET_ITEM(+results, i));
        if (starts[i] == -1) return nullptr;
    }
    const bool works = it->workspace != Py_None, borrowed = works && from_store && store.keeps_workspace && !store.lent;
    Owned workspace(borrowed ? Py_XNewRef(store.workspace) : nullptr);
    std::intptr_t base = 0;
    if (works) {
        if (workspace == nullptr) workspace.take(PyObject_Call(it->empty, it->workspace, nullptr));
        base = workspace == nullptr ? -1 : address(workspace);
        if (base == -1) return nullptr;
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
    int count = it->count, status = 0;
    if (it->numbers != nullptr) pointers[count++] = it->numbers;
    pointers[count++] = stream;
    Py_BEGIN_ALLOW_THREADS
    status = call_entry(it->entry, pointers, count, std::make_index_sequence<most_pointers + 3>());
    Py_END_ALLOW_THREADS
    if (borrowed) store.lent = false;
    workspace.take(nullptr);
    if (status != 0) {
        results.take(nullptr);
        PyObject* const all = PyTuple_New(it->inputs);
        if (all == nullptr) return nullptr;
        for (int i = 0; i < it->inputs; ++i) PyTuple_SET_ITEM(all, i, Py_NewRef(arguments[i]));
        return PyObject_CallFunction(it->failed, "iN", status, all);
    }
    if (!tell_written(it, arguments)) return nullptr;
    if (from_store) restock(store, it->empty, it->outputs);
    return results_of(it, results, arguments);
}

inline int launcher_clear(PyObject* self) {
    Launcher* const it = reinterpret_cast<Launcher*>(self);
    Py_CLEAR(it->plain);
    Py_CLEAR(it->failed);
    return 0;
}

// Launcher(name, module, plain, failed, empty, outputs, workspace, stream, current, device, entry, numbers, single, inputs, places, capturing,
// forget_error, stores_results, keeps_workspace, increment, written, results)
inline PyObject* launcher_new(PyTypeObject* type, PyObject* args, PyObject*) {
    PyTypeObject* const tuple = &PyTuple_Type;
    PyObject *places, *written, *results;
    unsigned long long entry, numbers, capturing, forget_error;
    int single, stores_results, keeps_workspace;
    Launcher* const it = LauncherReferences::made(type, [&](Launcher* it) {
        return PyArg_ParseTuple(args, "OOOOOO!OOOOKKpiO!KKppOO!O!", &it->name, &it->module, &it->plain, &it->failed, &it->empty, tuple,
                                &it->outputs, &it->workspace, &it->stream, &it->current, &it->device, &entry, &numbers, &single, &it->inputs,
                                tuple, &places, &capturing, &forget_error, &stores_results, &keeps_workspace, &it->increment, tuple, &written,
                                tuple, &results);
    });
    if (it == nullptr) return nullptr;
    Owned made(reinterpret_cast<PyObject*>(it));
    const Py_ssize_t count = PyTuple_GET_SIZE(places);
    if (count > most_pointers || PyTuple_GET_SIZE(results) > most_tensors || PyTuple_GET_SIZE(written) > most_tensors) {
        PyErr_SetString(PyExc_ValueError, "too many buffers");
        return nullptr;
    }
    it->vectorcall = launch;
    it->entry = reinterpret_cast<void*>(std::uintptr_t(entry));
    it->numbers = reinterpret_cast<void*>(std::uintptr_t(numbers));
    it->store.capturing = reinterpret_cast<int (*)(void*, int*)>(std::uintptr_t(capturing));
    it->store.forget_error = reinterpret_cast<int (*)()>(std::uintptr_t(forget_error));
    it->store.stores_results = stores_results != 0;
    it->store.keeps_workspace = keeps_workspace != 0;
    it->single = single != 0;
    it->count = int(count);
    for (int i = 0; i < it->count; ++i) {
        int from, number;
        long long offset;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(places, i), "iiL", &from, &number, &offset)) return nullptr;
        it->places[i] = {From(from), number, std::intptr_t(offset)};
    }
    it->written_count = int(PyTuple_GET_SIZE(written));
    for (int i = 0; i < it->written_count; ++i) it->written[i] = int(PyLong_AsLong(PyTuple_GET_ITEM(written, i)));
    it->result_count = int(PyTuple_GET_SIZE(results));
    for (int i = 0; i < it->result_count; ++i) it->results[i] = int(PyLong_AsLong(PyTuple_GET_ITEM(results, i)));
    return PyErr_Occurred() ? nullptr : made.given();
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
    {Py_tp_traverse, reinterpret_cast<void*>(LauncherReferences::traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(launcher_clear)},
    {Py_tp_dealloc, reinterpret_cast<void*>(LauncherReferences::dealloc)},
    {Py_tp_members, launcher_members},
    {0, nullptr},
};

inline PyType_Spec launcher_spec = {
    "fusepass.Launcher", sizeof(Launcher), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_IMMUTABLETYPE, launcher_slots,
};

}  // namespace fp
