// What a call of a model runs, compared without Python: `fusepass.guards.edits.Code`.
#pragma once

#include "fp_launcher.hpp"

namespace fp {

struct Code {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject* spaces;   // a tuple for each dict: itself, the keys that count, whether no others may come
    PyObject* owners;   // objects of which an attribute counts, each with its name
    PyObject* missing;  // stands for what is not there
    PyObject* values;   // a tuple for each dict: what its keys are to have
    PyObject* pinned;   // what attributes are to be
    std::uint64_t* seen;  // the version of each dict when its keys had that last; none has version 0
    PyObject*** places;   // where attributes are

    void release() {
        PyMem_Free(seen);
        PyMem_Free(places);
    }
};

using CodeReferences = References<Code, &Code::spaces, &Code::owners, &Code::missing, &Code::values, &Code::pinned>;

// The version of a dict, which every change moves on; and what makes sure that it has one.
#if PY_VERSION_HEX >= 0x030e0000
// Dicts have no numbers of their own any more: one stands for all that are watched here.
inline std::uint64_t edits = 1;
inline int edits_watcher = -1;

inline int edited(PyDict_WatchEvent, PyObject*, PyObject*, PyObject*) {
    ++edits;
    return 0;
}

inline std::uint64_t version(PyObject*) { return edits; }

inline bool has_version(PyObject* dict) {
    if (edits_watcher < 0) edits_watcher = PyDict_AddWatcher(edited);
    return edits_watcher >= 0 && PyDict_Watch(edits_watcher, dict) == 0;
}
#else
inline std::uint64_t version(PyObject* dict) {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
    return reinterpret_cast<PyDictObject*>(dict)->ma_version_tag;
#pragma GCC diagnostic pop
}

inline bool has_version(PyObject*) { return true; }
#endif

// Where the attribute `name` of `owner` is; null for none that is known here.
inline PyObject** place_of(PyObject* owner, PyObject* name) {
    const auto is = [name](const char* text) { return PyUnicode_CompareWithASCIIString(name, text) == 0; };
    if (is("__class__")) return reinterpret_cast<PyObject**>(&owner->ob_type);
    if (is("__dict__")) return _PyObject_GetDictPtr(owner);
    if (PyFunction_Check(owner)) {
        PyFunctionObject* const function = reinterpret_cast<PyFunctionObject*>(owner);
        if (is("__code__")) return &function->func_code;
        if (is("__defaults__")) return &function->func_defaults;
        if (is("__kwdefaults__")) return &function->func_kwdefaults;
    }
    if (PyCell_Check(owner) && is("cell_contents")) return &reinterpret_cast<PyCellObject*>(owner)->ob_ref;
    return nullptr;
}

// 1 where the keys of space `i` have what they are to have.
inline int space_fits(const Code* it, Py_ssize_t i) {
    PyObject* const space = PyTuple_GET_ITEM(it->spaces, i);
    PyObject* const dict = PyTuple_GET_ITEM(space, 0);
    PyObject* const keys = PyTuple_GET_ITEM(space, 1);
    PyObject* const wanted = PyTuple_GET_ITEM(it->values, i);
    if (PyTuple_GET_ITEM(space, 2) == Py_True && PyDict_GET_SIZE(dict) != PyTuple_GET_SIZE(keys)) return 0;
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(keys); ++k) {
        PyObject* const value = PyDict_GetItemWithError(dict, PyTuple_GET_ITEM(keys, k));
        if (value == nullptr && PyErr_Occurred()) return -1;
        if ((value == nullptr ? it->missing : value) != PyTuple_GET_ITEM(wanted, k)) return 0;
    }
    return 1;
}

// 1 where a call runs what it ran, 0 where it may not, -1 with an exception set.
inline int code_fits(const Code* it) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(it->pinned); ++i) {
        PyObject* const value = *it->places[i];
        PyObject* const wanted = PyTuple_GET_ITEM(it->pinned, i);
        if (value != wanted && (value != nullptr || (wanted != Py_None && wanted != it->missing))) return 0;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(it->spaces); ++i) {
        const std::uint64_t now = version(PyTuple_GET_ITEM(PyTuple_GET_ITEM(it->spaces, i), 0));
        if (now == it->seen[i]) continue;
        const int right = space_fits(it, i);
        if (right != 1) return right;
        it->seen[i] = now;
    }
    return 1;
}

inline PyObject* code_call(PyObject* self, PyObject* const*, std::size_t, PyObject*) {
    const int right = code_fits(reinterpret_cast<Code*>(self));
    return right < 0 ? nullptr : PyBool_FromLong(right);
}

// Whether there is a tuple of values for the keys of each space, and a value for each attribute.
inline bool has_values(const Code* it, PyObject* values, PyObject* pinned) {
    bool right = PyTuple_GET_SIZE(values) == PyTuple_GET_SIZE(it->spaces) && PyTuple_GET_SIZE(pinned) == PyTuple_GET_SIZE(it->owners);
    for (Py_ssize_t i = 0; right && i < PyTuple_GET_SIZE(values); ++i) {
        PyObject* const keys = PyTuple_GET_ITEM(PyTuple_GET_ITEM(it->spaces, i), 1);
        PyObject* const given = PyTuple_GET_ITEM(values, i);
        right = PyTuple_Check(given) && PyTuple_GET_SIZE(given) == PyTuple_GET_SIZE(keys);
    }
    if (!right) PyErr_SetString(PyExc_ValueError, "a value for each key and attribute");
    return right;
}

// renew(values, pinned): other objects that count as the same.
inline PyObject* code_renew(PyObject* self, PyObject* args) {
    Code* const it = reinterpret_cast<Code*>(self);
    PyObject *values, *pinned;
    if (!PyArg_ParseTuple(args, "O!O!", &PyTuple_Type, &values, &PyTuple_Type, &pinned) || !has_values(it, values, pinned)) return nullptr;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(it->spaces); ++i) it->seen[i] = 0;
    Py_SETREF(it->values, Py_NewRef(values));
    Py_SETREF(it->pinned, Py_NewRef(pinned));
    Py_RETURN_NONE;
}

// Whether each space is a dict, a tuple of keys and a bool, and each attribute is known here.
inline bool read_code(Code* it) {
    const Py_ssize_t spaces = PyTuple_GET_SIZE(it->spaces), owners = PyTuple_GET_SIZE(it->owners);
    PyObject *dict, *keys, *whole, *owner, *name;
    for (Py_ssize_t i = 0; i < spaces; ++i) {
        PyObject* const space = PyTuple_GET_ITEM(it->spaces, i);
        if (!PyArg_ParseTuple(space, "O!O!O!", &PyDict_Type, &dict, &PyTuple_Type, &keys, &PyBool_Type, &whole)) return false;
        if (!has_version(dict)) return false;
    }
    it->seen = static_cast<std::uint64_t*>(PyMem_Calloc(std::size_t(spaces) + 1, sizeof(std::uint64_t)));
    it->places = static_cast<PyObject***>(PyMem_Calloc(std::size_t(owners) + 1, sizeof(PyObject**)));
    if (it->seen == nullptr || it->places == nullptr) return PyErr_NoMemory() != nullptr;
    for (Py_ssize_t i = 0; i < owners; ++i) {
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(it->owners, i), "OU", &owner, &name)) return false;
        it->places[i] = place_of(owner, name);
        if (it->places[i] == nullptr) {
            PyErr_Format(PyExc_ValueError, "attribute %U has no place", name);
            return false;
        }
    }
    return true;
}

// Code(spaces, owners, missing, values, pinned)
inline PyObject* code_new(PyTypeObject* type, PyObject* args, PyObject*) {
    PyTypeObject* const tuple = &PyTuple_Type;
    Code* const it = CodeReferences::made(type, [&](Code* it) {
        return PyArg_ParseTuple(args, "O!O!OO!O!", tuple, &it->spaces, tuple, &it->owners, &it->missing, tuple, &it->values, tuple, &it->pinned);
    });
    if (it == nullptr) return nullptr;
    Owned made(reinterpret_cast<PyObject*>(it));
    it->vectorcall = code_call;
    return read_code(it) && has_values(it, it->values, it->pinned) ? made.given() : nullptr;
}

inline PyMethodDef code_methods[] = {
    {"renew", code_renew, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

inline PyMemberDef code_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Code, vectorcall), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

inline PyType_Slot code_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(code_new)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_members, code_members},
    {Py_tp_traverse, reinterpret_cast<void*>(CodeReferences::traverse)},
    {Py_tp_dealloc, reinterpret_cast<void*>(CodeReferences::dealloc)},
    {Py_tp_methods, code_methods},
    {0, nullptr},
};

inline PyType_Spec code_spec = {
    "fusepass.Code", sizeof(Code), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_IMMUTABLETYPE, code_slots,
};

}  // namespace fp
