// Objects that Python gets: the references that they own, and how they are made, visited and freed.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <structmember.h>

#include <cstddef>
#include <utility>

namespace fp {

// A reference that is given back where its scope ends; null for none.
class Owned {
public:
    explicit Owned(PyObject* object) : object(object) {}
    Owned(const Owned&) = delete;
    Owned& operator=(const Owned&) = delete;
    ~Owned() { Py_XDECREF(object); }

    operator PyObject*() const { return object; }
    PyObject* operator+() const { return object; }  // for macros, which cast

    // The reference, for another owner.
    PyObject* given() { return std::exchange(object, nullptr); }

    // Another one in its place.
    void take(PyObject* other) { Py_XDECREF(std::exchange(object, other)); }

private:
    PyObject* object;
};

// The references that a `T` owns, by its members; any of them may be null.
template <typename T, PyObject* T::*... Members>
struct References {
    static int traverse(PyObject* self, visitproc visit, void* arg) {
        T* const it = reinterpret_cast<T*>(self);
        int stopped = 0;
        const auto visited = [&](PyObject* held) { return held == nullptr || (stopped = visit(held, arg)) == 0; };
        (void)(visited(reinterpret_cast<PyObject*>(Py_TYPE(self))) && ... && visited(it->*Members));
        return stopped;
    }

    // Lets go of all of them, and frees what `T::release` does.
    static void dealloc(PyObject* self) {
        T* const it = reinterpret_cast<T*>(self);
        PyObject_GC_UnTrack(self);
        (Py_XDECREF(std::exchange(it->*Members, nullptr)), ...);
        it->release();
        PyTypeObject* const type = Py_TYPE(self);
        type->tp_free(self);
        Py_DECREF(type);
    }

    // A new `T`, whose members `fill` has set to what others own; null where that says false, with an exception set.
    template <typename Fill>
    static T* made(PyTypeObject* type, const Fill& fill) {
        T* const it = reinterpret_cast<T*>(type->tp_alloc(type, 0));
        if (it == nullptr) return nullptr;
        PyObject* const self = reinterpret_cast<PyObject*>(it);
        PyObject_GC_UnTrack(self);  // until the references are its own
        const bool right = fill(it);
        ((right ? Py_XINCREF(it->*Members) : void(it->*Members = nullptr)), ...);
        PyObject_GC_Track(self);
        if (right) return it;
        Py_DECREF(self);
        return nullptr;
    }
};

}  // namespace fp
