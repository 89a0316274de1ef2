// A call that records gradients, without Python: found by one look, and run as the original: `fusepass.originals`.
#pragma once

#include "fp_call.hpp"

#include <algorithm>

namespace fp {

struct Recording {
    PyObject_HEAD
    PyObject* model;
    PyObject* enabled;   // says whether gradients are recorded
    PyObject* kinds;     // types of tensors that are nothing unusual
    PyObject* strange;   // those that are, with all types made of them
    PyObject* methods;   // what the model's class has: a tuple for each, its name and value
    PyObject* entries;   // what dicts have: a tuple for each, the dict, a key and a value; null while nothing is known
    PyObject* fits;      // compares `witness` and modes around the call
    PyObject* witness;   // a tuple of one tensor that records gradients
    bool owned;          // whether the model has it; else one of the inputs has to record them
    std::uint64_t count;  // calls that were served

    void release() {}
};

using RecordingReferences =
    References<Recording, &Recording::model, &Recording::enabled, &Recording::kinds, &Recording::strange, &Recording::methods,
               &Recording::entries, &Recording::fits, &Recording::witness>;

inline PyTypeObject* recording_type = nullptr;
inline PyObject* requires_grad_name = nullptr;
inline PyObject* dataclass_name = nullptr;

constexpr int deepest = 8;  // of containers among arguments

inline int records(const Recording* it, PyObject* value, int depth);

// What `records` says of two values, from what it says of each.
inline int both(int one, int other) { return one < 1 || other < 1 ? std::min(one, other) : std::max(one, other); }

// As `records`, of all values of a dict.
inline int entries_record(const Recording* it, PyObject* entries, int depth) {
    PyObject *key, *entry;
    Py_ssize_t position = 0;
    int found = 1;
    while (found > 0 && PyDict_Next(entries, &position, &key, &entry)) found = both(found, records(it, entry, depth));
    return found;
}

// 2 where a tensor in `value` is to record gradients, 1 where there is nothing unusual in it, 0 where there is, -1 with an exception set.
inline int records(const Recording* it, PyObject* value, int depth) {
    PyTypeObject* const type = Py_TYPE(value);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(it->kinds); ++i) {
        if (reinterpret_cast<PyObject*>(type) != PyTuple_GET_ITEM(it->kinds, i)) continue;
        if (it->owned) return 1;
        const Owned answer(PyObject_GetAttr(value, requires_grad_name));
        return answer == nullptr ? -1 : answer == Py_True ? 2 : 1;
    }
    if (value == Py_None || type == &PyBool_Type || type == &PyLong_Type || type == &PyFloat_Type || type == &PyUnicode_Type) return 1;
    if (depth == 0) return 0;
    if (type == &PyDict_Type) return entries_record(it, value, depth - 1);
    if (type == &PyTuple_Type || type == &PyList_Type) {
        int found = 1;
        for (Py_ssize_t i = 0; found > 0 && i < PySequence_Fast_GET_SIZE(value); ++i) {
            found = both(found, records(it, PySequence_Fast_GET_ITEM(value, i), depth - 1));
        }
        return found;
    }
    const int strange = PyObject_IsInstance(value, it->strange);
    if (strange != 0) return strange < 0 ? -1 : 0;
    if (it->owned) return 1;  // whatever it is, the model's own tensor decides
    if (_PyType_Lookup(type, dataclass_name) == nullptr) return 0;
    const Owned entries(PyObject_GenericGetDict(value, nullptr));
    if (entries != nullptr) return entries_record(it, entries, depth - 1);
    PyErr_Clear();  // its fields are in slots
    return 0;
}

// 1 where the call records gradients, and nothing is unusual.
inline int is_recorded(Recording* it, PyObject* given, PyObject* keywords) {
    if (it->entries == nullptr) return 0;
    int right = holds(it->enabled, Py_True);
    if (right != 1) return right;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(it->methods); ++i) {
        PyObject* const method = PyTuple_GET_ITEM(it->methods, i);
        if (_PyType_Lookup(Py_TYPE(it->model), PyTuple_GET_ITEM(method, 0)) != PyTuple_GET_ITEM(method, 1)) return 0;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(it->entries); ++i) {
        PyObject* const entry = PyTuple_GET_ITEM(it->entries, i);
        PyObject* const value = PyDict_GetItemWithError(PyTuple_GET_ITEM(entry, 0), PyTuple_GET_ITEM(entry, 1));
        if (value != PyTuple_GET_ITEM(entry, 2)) {
            Py_CLEAR(it->entries);  // what is no longer in the model is not to be kept
            Py_CLEAR(it->witness);
            return PyErr_Occurred() ? -1 : 0;
        }
    }
    right = records(it, given, deepest);
    if (right > 0 && keywords != nullptr) {
        right = both(right, records(it, keywords, deepest));
    }
    if (right < (it->owned ? 1 : 2)) return right < 0 ? right : 0;
    const Owned fits(Py_NewRef(it->fits)), witness(Py_NewRef(it->witness));
    return tensors_fit(fits, witness);
}

// The result of the model's own forward, or `missed`.
inline PyObject* serve_recorded(Recording* it, PyObject* given, PyObject* keywords) {
    const int right = is_recorded(it, given, keywords);
    if (right != 1) return right < 0 ? nullptr : Py_NewRef(missed);
    ++it->count;
    return call_forward(it->model, given, keywords);
}

inline PyObject* recording_count(PyObject* self, PyObject*) {
    return PyLong_FromUnsignedLongLong(reinterpret_cast<Recording*>(self)->count);
}

// renew(methods, entries, fits, witness, owned): a call was one that records gradients, with these.
inline PyObject* recording_renew(PyObject* self, PyObject* args) {
    Recording* const it = reinterpret_cast<Recording*>(self);
    PyTypeObject* const tuple = &PyTuple_Type;
    PyObject *methods, *entries, *fits, *witness, *dict, *name, *value;
    int owned;
    if (!PyArg_ParseTuple(args, "O!O!OO!p", tuple, &methods, tuple, &entries, &fits, tuple, &witness, &owned)) return nullptr;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(methods); ++i) {
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(methods, i), "UO", &name, &value)) return nullptr;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(entries); ++i) {
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(entries, i), "O!UO", &PyDict_Type, &dict, &name, &value)) return nullptr;
    }
    Py_XSETREF(it->methods, Py_NewRef(methods));
    Py_XSETREF(it->entries, Py_NewRef(entries));
    Py_XSETREF(it->fits, Py_NewRef(fits));
    Py_XSETREF(it->witness, Py_NewRef(witness));
    it->owned = owned != 0;
    Py_RETURN_NONE;
}

// Recording(model, enabled, kinds, strange)
inline PyObject* recording_new(PyTypeObject* type, PyObject* args, PyObject*) {
    return reinterpret_cast<PyObject*>(RecordingReferences::made(type, [&](Recording* it) {
        PyTypeObject* const tuple = &PyTuple_Type;
        return PyArg_ParseTuple(args, "OOO!O!", &it->model, &it->enabled, tuple, &it->kinds, tuple, &it->strange);
    }));
}

inline PyMethodDef recording_methods[] = {
    {"count", recording_count, METH_NOARGS, nullptr},
    {"renew", recording_renew, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

inline PyType_Slot recording_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(recording_new)},
    {Py_tp_traverse, reinterpret_cast<void*>(RecordingReferences::traverse)},
    {Py_tp_dealloc, reinterpret_cast<void*>(RecordingReferences::dealloc)},
    {Py_tp_methods, recording_methods},
    {0, nullptr},
};

inline PyType_Spec recording_spec = {
    "fusepass.Recording", sizeof(Recording), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE, recording_slots,
};

}  // namespace fp
