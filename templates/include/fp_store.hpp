// Memory that a launcher has before a call asks for it.
#pragma once

#include "fp_objects.hpp"

namespace fp {

constexpr int ahead = 4;  // results that are made in a row: no more addresses than launches are replayed for

// An allocator has a long way through code and lists of its own: the longest part of a call that finds nothing in the processor's caches.
// Results are made several in a row, so that one call in many goes that way.
//
// It serves calls on one stream, on which it was allocated: what is launched there later comes later. Nothing here was seen by anybody else,
// and nothing comes back: results are freed as all others are. The workspace stays, and is not lent while a call launches with it.
struct Store {
    int (*capturing)(void*, int*);  // cudaStreamIsCapturing
    int (*forget_error)();          // cudaGetLastError; without these two nothing is stored
    PyObject* results[ahead];       // tuples
    int ready;
    PyObject* workspace;   // a tensor; null where there is none
    bool stores_results;   // whether they are small enough
    bool keeps_workspace;
    bool lent;
    void* stream;  // that of all these
    void* last;    // that of the last call
};

inline void clear_store(Store& store) {
    while (store.ready > 0) Py_DECREF(store.results[--store.ready]);
    if (!store.lent) Py_CLEAR(store.workspace);
}

// The results of a call, which nobody has seen: a tuple of tensors; null with an exception set.
inline PyObject* new_results(PyObject* empty, PyObject* outputs) {
    const Py_ssize_t count = PyTuple_GET_SIZE(outputs);
    Owned results(PyTuple_New(count));
    if (results == nullptr) return nullptr;
    for (Py_ssize_t i = 0; i < count; ++i) {
        PyObject* const made = PyObject_Call(empty, PyTuple_GET_ITEM(outputs, i), nullptr);
        if (made == nullptr) return nullptr;
        PyTuple_SET_ITEM(+results, i, made);
    }
    return results.given();
}

// Whether the store serves a call on `stream`; one for another stream gives way when the second call in a row comes there.
inline bool serves(Store& store, void* stream) {
    int status = 0;
    if (store.capturing == nullptr || store.forget_error == nullptr) return false;
    if (store.capturing(stream, &status) != 0) store.forget_error(), status = 1;
    if (status != 0) return false;  // a graph has memory of its own
    const bool again = store.last == stream;
    store.last = stream;
    if (store.stream == stream) return true;
    if (!again || store.lent) return false;
    clear_store(store);
    store.stream = stream;
    return true;
}

// Behind the launch: what the next calls will take.
inline void restock(Store& store, PyObject* empty, PyObject* outputs) {
    if (store.ready > 0 || !store.stores_results) return;
    PyObject* made[ahead];
    int count = 0;
    void* const stream = store.stream;
    while (count < ahead && (made[count] = new_results(empty, outputs)) != nullptr) ++count;
    PyErr_Clear();  // no memory: the next call asks for its own
    while (count > 0) {
        --count;
        if (store.stream == stream && store.ready < ahead) {  // else another thread was here meanwhile
            store.results[store.ready++] = made[count];
        } else {
            Py_DECREF(made[count]);
        }
    }
}

}  // namespace fp
