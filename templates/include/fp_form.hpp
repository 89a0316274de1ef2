// How the tensors of a call are found in its arguments: `fusepass.runtime.fast_path.Form`.
#pragma once

#include "fp_code.hpp"

#include <cstring>

namespace fp {

// Whether two values of one type are equal to the bit: 0.0 is not -0.0.
inline int equal(PyObject* value, PyObject* wanted) {
    if (value == wanted) return 1;
    if (Py_TYPE(value) != Py_TYPE(wanted)) return 0;
    if (PyFloat_Check(value)) {
        const double one = PyFloat_AS_DOUBLE(value), other = PyFloat_AS_DOUBLE(wanted);
        return std::memcmp(&one, &other, sizeof(double)) == 0;
    }
    return PyObject_RichCompareBool(value, wanted, Py_EQ);
}

inline int take(PyObject* node, PyObject* value, PyObject** tensors, int* count);

// As `take`, for the dict of entries, by their keys and nodes.
inline int take_entries(PyObject* payload, PyObject* entries, PyObject** tensors, int* count) {
    PyObject* const keys = PyTuple_GET_ITEM(payload, 0);
    PyObject* const nodes = PyTuple_GET_ITEM(payload, 1);
    if (PyDict_GET_SIZE(entries) != PyTuple_GET_SIZE(keys)) return 0;
    PyObject *key, *entry;
    Py_ssize_t position = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(keys); ++i) {
        if (!PyDict_Next(entries, &position, &key, &entry)) return 0;
        int right = equal(key, PyTuple_GET_ITEM(keys, i));
        if (right == 1) right = take(PyTuple_GET_ITEM(nodes, i), entry, tensors, count);
        if (right != 1) return right;
    }
    return 1;
}

// Takes the tensors of `value` by the node for it: 1 where it is of that form, 0 where it is not, -1 with an exception set.
//
// `tensors` has the first `count` already, and has room for all; one that comes again is to be the same object.
inline int take(PyObject* node, PyObject* value, PyObject** tensors, int* count) {
    PyObject* const kind = PyTuple_GET_ITEM(node, 0);
    PyObject* const payload = PyTuple_GET_ITEM(node, 1);
    if (kind == Py_None) {
        const int number = int(PyLong_AsLong(payload));
        if (number < *count) return tensors[number] == value;
        tensors[(*count)++] = value;
        return 1;
    }
    if (kind == Py_Ellipsis) return equal(value, payload);
    if (kind == Py_NotImplemented) return reinterpret_cast<PyObject*>(Py_TYPE(value)) == payload;
    if (kind != reinterpret_cast<PyObject*>(Py_TYPE(value))) return 0;
    if (!PyTuple_Check(value) && !PyList_Check(value)) {
        PyObject* const entries = PyDict_CheckExact(value) ? Py_NewRef(value) : PyObject_GenericGetDict(value, nullptr);
        if (entries == nullptr) return -1;
        const int right = take_entries(payload, entries, tensors, count);
        Py_DECREF(entries);  // of which `value` has another reference
        return right;
    }
    if (PySequence_Fast_GET_SIZE(value) != PyTuple_GET_SIZE(payload)) return 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(payload); ++i) {
        if (i >= PySequence_Fast_GET_SIZE(value)) return 0;  // a comparison may run what changes a list
        const int right = take(PyTuple_GET_ITEM(payload, i), PySequence_Fast_GET_ITEM(value, i), tensors, count);
        if (right != 1) return right;
    }
    return 1;
}

// Whether `node` is one that `take` reads; the numbers of new tensors count up to `most`.
inline bool is_node(PyObject* node, int* count, int most) {
    if (!PyTuple_Check(node) || PyTuple_GET_SIZE(node) != 2) return false;
    PyObject* const kind = PyTuple_GET_ITEM(node, 0);
    PyObject* nodes = PyTuple_GET_ITEM(node, 1);
    if (kind == Py_None) {
        if (!PyLong_Check(nodes)) return false;
        const long number = PyLong_AsLong(nodes);
        if (number == *count) ++*count;
        return number >= 0 && number < *count && *count <= most;
    }
    if (kind == Py_Ellipsis || kind == Py_NotImplemented) return true;
    if (!PyType_Check(kind)) return false;
    PyTypeObject* const type = reinterpret_cast<PyTypeObject*>(kind);
    if (!PyType_IsSubtype(type, &PyTuple_Type) && !PyType_IsSubtype(type, &PyList_Type)) {
        if (!PyTuple_Check(nodes) || PyTuple_GET_SIZE(nodes) != 2 || !PyTuple_Check(PyTuple_GET_ITEM(nodes, 0))) return false;
        const Py_ssize_t keys = PyTuple_GET_SIZE(PyTuple_GET_ITEM(nodes, 0));
        nodes = PyTuple_GET_ITEM(nodes, 1);
        if (!PyTuple_Check(nodes) || PyTuple_GET_SIZE(nodes) != keys) return false;
    }
    if (!PyTuple_Check(nodes)) return false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(nodes); ++i) {
        if (!is_node(PyTuple_GET_ITEM(nodes, i), count, most)) return false;
    }
    return true;
}

// Whether `form` is None, or nodes for positional and keyword arguments with `count` tensors.
inline bool is_form(PyObject* form, int count, int most) {
    if (form == Py_None) return true;
    int found = 0;
    return PyTuple_Check(form) && PyTuple_GET_SIZE(form) == 2 && is_node(PyTuple_GET_ITEM(form, 0), &found, most) &&
           is_node(PyTuple_GET_ITEM(form, 1), &found, most) && found == count;
}

// The tensors of a call; null where it is of another form, or with an exception set. `keywords` may be null.
template <int most>
PyObject* tensors_of(PyObject* form, int count, PyObject* given, PyObject* keywords) {
    const bool without = keywords == nullptr || PyDict_GET_SIZE(keywords) == 0;
    if (form == Py_None) return without && PyTuple_GET_SIZE(given) == count ? Py_NewRef(given) : nullptr;
    PyObject* tensors[most];
    int found = 0;
    if (take(PyTuple_GET_ITEM(form, 0), given, tensors, &found) != 1) return nullptr;
    PyObject* const named = PyTuple_GET_ITEM(form, 1);
    if (keywords != nullptr ? take(named, keywords, tensors, &found) != 1 : PyTuple_GET_SIZE(PyTuple_GET_ITEM(PyTuple_GET_ITEM(named, 1), 0)) > 0) {
        return nullptr;
    }
    PyObject* const all = PyTuple_New(count);
    for (int i = 0; all != nullptr && i < count; ++i) PyTuple_SET_ITEM(all, i, Py_NewRef(tensors[i]));
    return all;
}

}  // namespace fp
