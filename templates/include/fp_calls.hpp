// The usual call of a model without Python: which of the calls that are known serves it.
#pragma once

#include "fp_recording.hpp"

namespace fp {

// What a model asks first: the calls that may serve, in turn, unless hooks are to run around them.
struct Door {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject* hooks;  // dicts that must be empty
    PyObject* calls;  // a tuple of `Call`
    PyObject* recording;  // a `Recording`, or null
    std::uint64_t seen;
    bool known;
    bool recorded;  // whether the last call recorded gradients: then the next one is likely to

    void release() {}
};

using DoorReferences = References<Door, &Door::hooks, &Door::calls, &Door::recording>;

inline PyObject* door_result(Door* it, PyObject* given, PyObject* keywords) {
    const Owned recording(Py_XNewRef(it->recording)), calls(Py_NewRef(it->calls));
    const auto record = [&] { return serve_recorded(reinterpret_cast<Recording*>(+recording), given, keywords); };
    const bool first = recording != nullptr && it->recorded;
    PyObject* result = first ? record() : Py_NewRef(missed);
    for (Py_ssize_t i = 0; result == missed && i < PyTuple_GET_SIZE(+calls); ++i) {
        Py_DECREF(result);
        result = serve(reinterpret_cast<Call*>(PyTuple_GET_ITEM(+calls, i)), given, keywords);
        if (result != missed) it->recorded = false;
    }
    if (result == missed && recording != nullptr && !first) {
        Py_DECREF(result);
        result = record();
        it->recorded = result != missed;
    }
    return result;
}

// door(args, kwargs={}): the result for the positional and keyword arguments, or `missed`.
inline PyObject* door_call(PyObject* self, PyObject* const* arguments, std::size_t flags, PyObject* names) {
    Door* const it = reinterpret_cast<Door*>(self);
    const Py_ssize_t count = PyVectorcall_NARGS(flags);
    if (names != nullptr || count < 1 || count > 2 || !PyTuple_Check(arguments[0]) || (count == 2 && !PyDict_Check(arguments[1]))) {
        PyErr_SetString(PyExc_TypeError, "a door takes a tuple and a dict");
        return nullptr;
    }
    const std::uint64_t now = moment(it->hooks);
    if (!it->known || now != it->seen) {
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(it->hooks); ++i) {
            if (PyDict_GET_SIZE(PyTuple_GET_ITEM(it->hooks, i)) > 0) return Py_NewRef(missed);
        }
        it->seen = now;
        it->known = true;
    }
    return door_result(it, arguments[0], count == 2 ? arguments[1] : nullptr);
}

// offer(calls, recording=None): a tuple of `Call`, the one to try first at its start, and what serves calls that record gradients.
inline PyObject* door_offer(PyObject* self, PyObject* args) {
    PyObject *calls, *recording = Py_None;
    if (!PyArg_ParseTuple(args, "O!|O", &PyTuple_Type, &calls, &recording)) return nullptr;
    if (recording != Py_None && Py_TYPE(recording) != recording_type) {
        PyErr_SetString(PyExc_TypeError, "a recording is offered, or none");
        return nullptr;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(calls); ++i) {
        if (Py_TYPE(PyTuple_GET_ITEM(calls, i)) != call_type) {
            PyErr_SetString(PyExc_TypeError, "only calls are offered");
            return nullptr;
        }
    }
    Door* const it = reinterpret_cast<Door*>(self);
    Py_SETREF(it->calls, Py_NewRef(calls));
    Py_XSETREF(it->recording, recording == Py_None ? nullptr : Py_NewRef(recording));
    Py_RETURN_NONE;
}

// Door(hooks)
inline PyObject* door_new(PyTypeObject* type, PyObject* args, PyObject*) {
    Door* const it = DoorReferences::made(type, [&](Door* it) { return PyArg_ParseTuple(args, "O!", &PyTuple_Type, &it->hooks); });
    if (it == nullptr) return nullptr;
    Owned made(reinterpret_cast<PyObject*>(it));
    it->vectorcall = door_call;
    it->calls = PyTuple_New(0);
    return it->calls != nullptr && watch_all(it->hooks) ? made.given() : nullptr;
}

inline PyMethodDef door_methods[] = {
    {"offer", door_offer, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

inline PyMemberDef door_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Door, vectorcall), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

inline PyType_Slot door_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(door_new)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_members, door_members},
    {Py_tp_traverse, reinterpret_cast<void*>(DoorReferences::traverse)},
    {Py_tp_dealloc, reinterpret_cast<void*>(DoorReferences::dealloc)},
    {Py_tp_methods, door_methods},
    {0, nullptr},
};

inline PyType_Spec door_spec = {
    "fusepass.Door", sizeof(Door), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_IMMUTABLETYPE, door_slots,
};

// What Python gets: the types, for `missed_`, `torch.Tensor.data_ptr` and the dict of torch.autograd.profiler.
inline PyObject* types(PyObject* missed_, PyObject* data_ptr, PyObject* profiler) {
    missed = Py_NewRef(missed_);
    profiler_names = Py_NewRef(profiler);
    profiling_name = PyUnicode_InternFromString("_is_profiler_enabled");
    forward_name = PyUnicode_InternFromString("forward");
    requires_grad_name = PyUnicode_InternFromString("requires_grad");
    dataclass_name = PyUnicode_InternFromString("__dataclass_fields__");
    data_ptr_method = Py_NewRef(data_ptr);
    PyObject* const launcher = PyType_FromSpec(&launcher_spec);
    PyObject* const call = PyType_FromSpec(&call_spec);
    PyObject* const door = PyType_FromSpec(&door_spec);
    PyObject* const code = PyType_FromSpec(&code_spec);
    PyObject* const recording = PyType_FromSpec(&recording_spec);
    for (PyObject* made : {profiling_name, forward_name, requires_grad_name, dataclass_name, launcher, call, door, code, recording}) {
        if (made == nullptr) return nullptr;
    }
    launcher_type = reinterpret_cast<PyTypeObject*>(launcher);
    call_type = reinterpret_cast<PyTypeObject*>(call);
    code_type = reinterpret_cast<PyTypeObject*>(code);
    recording_type = reinterpret_cast<PyTypeObject*>(recording);
    return Py_BuildValue("NNNNN", launcher, call, door, code, recording);
}

}  // namespace fp
