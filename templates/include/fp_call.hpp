// A call that a specialisation serves, without Python: compares what it was made for, and calls it.
#pragma once

#include "fp_form.hpp"

#include <exception>

namespace fp {

constexpr int most_arguments = 2048;  // of a graph: the tensors of a large model, and its inputs

inline PyObject* missed = nullptr;  // stands for a call that needs more than this
inline PyTypeObject* call_type = nullptr;
inline PyTypeObject* code_type = nullptr;
inline PyTypeObject* launcher_type = nullptr;
inline PyObject* forward_name = nullptr;

#if PY_VERSION_HEX >= 0x030c0000
inline std::uint64_t changes = 0;  // of the dicts that are watched
inline int watcher = -1;

inline int noticed(PyDict_WatchEvent, PyObject*, PyObject*, PyObject*) {
    ++changes;
    return 0;
}

inline bool watch(PyObject* dict) {
    if (watcher < 0) watcher = PyDict_AddWatcher(noticed);
    return watcher >= 0 && PyDict_Watch(watcher, dict) == 0;
}

inline std::uint64_t moment(PyObject* dicts) { return PyTuple_GET_SIZE(dicts) == 0 ? 0 : changes; }
#else
inline bool watch(PyObject*) { return true; }

// Versions only ever grow, so an equal sum stands for equal versions.
inline std::uint64_t moment(PyObject* dicts) {
    std::uint64_t sum = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(dicts); ++i) {
        sum += version(PyTuple_GET_ITEM(dicts, i));
    }
    return sum;
}
#endif

// Watches the dicts of the tuple; false with an exception set where that cannot be.
inline bool watch_all(PyObject* dicts) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(dicts); ++i) {
        if (!PyDict_Check(PyTuple_GET_ITEM(dicts, i))) {
            PyErr_SetString(PyExc_TypeError, "only dicts are watched");
            return false;
        }
        if (!watch(PyTuple_GET_ITEM(dicts, i))) return false;
    }
    return true;
}

// What `fusepass.dispatch.specialisation.Specialisation.serve` does, where nothing changed since `renew`.
struct Call {
    PyObject_HEAD
    PyObject* dicts;     // all that must be as it was
    PyObject* code;      // a `Code` that must fit; None where nothing needs to
    PyObject* tensors;   // compares the inputs
    PyObject* own;       // compares the model's tensors
    PyObject* lists;     // of the model's Python state
    PyObject* listed;    // a tuple for each, of what it is to have
    PyObject* form;      // of the arguments; None where they are tensors without names, no two the same
    PyObject* globals;   // compares global settings; None where nothing needs to
    PyObject* zeros;     // functions that must give 0
    PyObject* settings;  // functions that must give what `expected` holds
    PyObject* expected;
    PyObject* run;       // the graph; the model whose forward serves where nothing is gained
    PyObject* finish;    // makes the result of its results; None for the first of them; ... for the model itself
    PyObject* states;    // the model's tensors
    std::uint64_t seen;
    std::uint64_t served;  // calls
    bool known;
    bool early;  // whether the launch, on a device that works beside the host, may come before the global settings are compared
    int arity;   // how many tensors are among the arguments
    int count;   // of the graph's arguments
    int written_count;
    int picked[most_arguments];  // which of the model's tensors and the inputs these are
    int written[most_tensors];   // which of its arguments it writes
    std::intptr_t sizes[most_arguments];  // of its arguments, in bytes

    void release() {}
};

using CallReferences =
    References<Call, &Call::dicts, &Call::code, &Call::tensors, &Call::own, &Call::lists, &Call::listed, &Call::form, &Call::globals,
               &Call::zeros, &Call::settings, &Call::expected, &Call::run, &Call::finish, &Call::states>;

// 1 for what `function` gave as it should be, 0 for something else, -1 with an exception set.
inline int holds(PyObject* function, PyObject* wanted) {
    const Owned value(PyObject_CallNoArgs(function));
    if (value == nullptr) return -1;
    return wanted == nullptr ? PyObject_Not(value) : PyObject_RichCompareBool(value, wanted, Py_EQ);
}

// 1 where `function` gives True for `tensors`.
//
// A comparison asks each tensor for its sizes, and one that has none (a nested tensor) throws. It is called without the interpreter
// between it and here, through whose frames nothing may be thrown; what throws fits nothing.
inline int tensors_fit(PyObject* function, PyObject* tensors) {
    PyObject* same = nullptr;
    if (PyCFunction_CheckExact(function) && PyCFunction_GET_FLAGS(function) == (METH_VARARGS | METH_KEYWORDS)) {
        const auto compare =
            reinterpret_cast<PyCFunctionWithKeywords>(reinterpret_cast<void (*)()>(PyCFunction_GET_FUNCTION(function)));
        try {
            same = compare(PyCFunction_GET_SELF(function), tensors, nullptr);
        } catch (const std::exception&) {
            return 0;
        }
    } else {
        same = PyObject_Call(function, tensors, nullptr);
    }
    if (same == nullptr) return -1;
    Py_DECREF(same);
    return same == Py_True;
}

// 1 where lists have what they are to have.
inline int lists_fit(const Call* it) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(it->lists); ++i) {
        PyObject* const list = PyTuple_GET_ITEM(it->lists, i);
        PyObject* const wanted = PyTuple_GET_ITEM(it->listed, i);
        if (PyList_GET_SIZE(list) != PyTuple_GET_SIZE(wanted)) return 0;
        for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(wanted); ++k) {
            if (PyList_GET_ITEM(list, k) != PyTuple_GET_ITEM(wanted, k)) return 0;
        }
    }
    return 1;
}

// 1 where everything around the call is.
inline int surroundings_fit(const Call* it) {
    int right = it->globals == Py_None ? 1 : holds(it->globals, Py_True);
    for (Py_ssize_t i = 0; right == 1 && i < PyTuple_GET_SIZE(it->zeros); ++i) {
        right = holds(PyTuple_GET_ITEM(it->zeros, i), nullptr);
    }
    for (Py_ssize_t i = 0; right == 1 && i < PyTuple_GET_SIZE(it->settings); ++i) {
        right = holds(PyTuple_GET_ITEM(it->settings, i), PyTuple_GET_ITEM(it->expected, i));
    }
    return right;
}

// 1 where something that the graph writes shares memory with another argument.
inline int written_memory_is_shared(const Call* it, PyObject* const* arguments, int count) {
    std::intptr_t starts[most_arguments];
    for (int i = 0; i < count; ++i) {
        starts[i] = address(arguments[i]);
        if (starts[i] == -1) return -1;
    }
    for (int w = 0; w < it->written_count; ++w) {
        const int a = it->written[w];
        for (int b = 0; b < count; ++b) {
            if (b == a || it->sizes[a] == 0 || it->sizes[b] == 0) continue;
            if (starts[a] < starts[b] + it->sizes[b] && starts[b] < starts[a] + it->sizes[a]) return 1;
        }
    }
    return 0;
}

// What forward of `model` gives for positional and keyword arguments; there may be none of these.
inline PyObject* call_forward(PyObject* model, PyObject* given, PyObject* keywords) {
    constexpr Py_ssize_t few = 8;
    const Py_ssize_t count = PyTuple_GET_SIZE(given);
    if (count <= few && (keywords == nullptr || PyDict_GET_SIZE(keywords) == 0)) {
        PyObject* with_model[few + 1] = {model};
        for (Py_ssize_t i = 0; i < count; ++i) with_model[i + 1] = PyTuple_GET_ITEM(given, i);
        return PyObject_VectorcallMethod(forward_name, with_model, std::size_t(count + 1), nullptr);
    }
    const Owned forward(PyObject_GetAttr(model, forward_name));
    return forward == nullptr ? nullptr : PyObject_Call(forward, given, keywords);
}

// What the graph gives for its arguments.
inline PyObject* run_graph(const Call* it, PyObject* const* arguments) {
    const Owned values(PyObject_Vectorcall(it->run, arguments, std::size_t(it->count), nullptr));
    if (values == nullptr) return nullptr;
    return it->finish == Py_None ? PySequence_GetItem(values, 0) : PyObject_CallOneArg(it->finish, values);
}

// As `surroundings_fit`, behind a launch; where they do not, its result, or what it raised, is no more.
inline int made_in_time(Call* it, PyObject** result) {
    PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
    if (*result == nullptr) PyErr_Fetch(&type, &value, &traceback);
    const int right = surroundings_fit(it);
    if (right == 1) {
        if (*result == nullptr) PyErr_Restore(type, value, traceback);
        return right;
    }
    it->early = false;
    Py_CLEAR(*result);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
    return right;
}

// The result for the arguments `given` and `keywords`, which may be null, or `missed`.
//
// A launch reads the tensors that were compared, and writes what nobody has seen. So it comes before global settings are compared, which
// then takes the device's time and not the caller's. Where they are others, the result is dropped, and the next call compares them first.
inline PyObject* serve(Call* it, PyObject* given, PyObject* keywords) {
    if (!it->known || moment(it->dicts) != it->seen) return Py_NewRef(missed);
    const Owned inputs(tensors_of<most_arguments>(it->form, it->arity, given, keywords));
    if (inputs == nullptr) return PyErr_Occurred() ? nullptr : Py_NewRef(missed);
    const Owned states(Py_NewRef(it->states));
    const Py_ssize_t own = PyTuple_GET_SIZE(+states);
    int right = tensors_fit(it->tensors, inputs);
    if (right == 1 && it->code != Py_None) right = code_fits(reinterpret_cast<Code*>(it->code));
    if (right == 1) right = lists_fit(it);
    if (right == 1 && own > 0 && it->own != Py_None) right = tensors_fit(it->own, states);
    PyObject* result = nullptr;
    if (right == 1 && it->finish == Py_Ellipsis) right = surroundings_fit(it);
    if (right == 1 && it->finish == Py_Ellipsis) {
        result = call_forward(it->run, given, keywords);
    } else if (right == 1) {
        PyObject* arguments[most_arguments];  // most of it is never used, and not touched
        for (int i = 0; i < it->count; ++i) {
            const Py_ssize_t place = it->picked[i];
            arguments[i] = place < own ? PyTuple_GET_ITEM(+states, place) : PyTuple_GET_ITEM(+inputs, place - own);
        }
        const bool early = it->early;
        if (!early) right = surroundings_fit(it);
        if (right == 1 && it->written_count > 0) {
            const int shared = written_memory_is_shared(it, arguments, it->count);
            right = shared < 0 ? -1 : !shared;
        }
        if (right == 1) {
            result = run_graph(it, arguments);
            if (early) right = made_in_time(it, &result);
        }
    }
    if (right == 1) ++it->served;
    return right == 0 ? Py_NewRef(missed) : result;
}

inline PyObject* call_call(PyObject* self, PyObject* args, PyObject* keywords) {
    return serve(reinterpret_cast<Call*>(self), args, keywords);
}

// How many calls it served.
inline PyObject* call_count(PyObject* self, PyObject*) { return PyLong_FromUnsignedLongLong(reinterpret_cast<Call*>(self)->served); }

// A number that `renew` takes, and that moves on whenever a dict changes.
inline PyObject* call_moment(PyObject* self, PyObject*) {
    return PyLong_FromUnsignedLongLong(moment(reinterpret_cast<Call*>(self)->dicts));
}

// renew(moment, states, listed=()): all was compared since that moment; these are the model's tensors, and this is what its lists have.
inline PyObject* call_renew(PyObject* self, PyObject* args) {
    Call* const it = reinterpret_cast<Call*>(self);
    unsigned long long seen;
    PyObject *states, *listed = nullptr;
    if (!PyArg_ParseTuple(args, "KO!|O!", &seen, &PyTuple_Type, &states, &PyTuple_Type, &listed)) return nullptr;
    bool each = PyTuple_GET_SIZE(it->lists) == (listed == nullptr ? 0 : PyTuple_GET_SIZE(listed));
    for (Py_ssize_t i = 0; each && i < PyTuple_GET_SIZE(it->lists); ++i) each = PyTuple_Check(PyTuple_GET_ITEM(listed, i));
    if (PyTuple_GET_SIZE(states) != PyTuple_GET_SIZE(it->states) || !each) {
        it->known = false;
    } else {
        Py_SETREF(it->states, Py_NewRef(states));
        if (listed != nullptr) Py_SETREF(it->listed, Py_NewRef(listed));
        it->seen = seen;
        it->known = true;
        const bool plain = it->finish == Py_None || it->finish == reinterpret_cast<PyObject*>(&PyTuple_Type);  // runs nothing of the caller's
        const bool launches = Py_IS_TYPE(it->run, launcher_type) && reinterpret_cast<Launcher*>(it->run)->stream != Py_None;
        it->early = launches && plain && it->written_count == 0;
    }
    Py_RETURN_NONE;
}

inline bool read_numbers(PyObject* tuple, int* numbers, Py_ssize_t most) {
    if (PyTuple_GET_SIZE(tuple) > most) {
        PyErr_SetString(PyExc_ValueError, "too many tensors");
        return false;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) numbers[i] = int(PyLong_AsLong(PyTuple_GET_ITEM(tuple, i)));
    return !PyErr_Occurred();
}

// Call(dicts, tensors, globals, zeros, settings, expected, run, finish, states, form, picked, written, sizes, code=None, own=None, lists=())
//
// A form is the number of tensors, or that number and nodes for positional and keyword arguments.
inline PyObject* call_new(PyTypeObject* type, PyObject* args, PyObject*) {
    PyTypeObject* const tuple = &PyTuple_Type;
    PyObject *form, *picked, *written, *sizes;
    Call* const it = CallReferences::made(type, [&](Call* it) {
        it->code = it->own = it->form = Py_None;
        return PyArg_ParseTuple(args, "O!OOO!O!O!OOO!OO!O!O!|OOO!", tuple, &it->dicts, &it->tensors, &it->globals, tuple, &it->zeros, tuple,
                                &it->settings, tuple, &it->expected, &it->run, &it->finish, tuple, &it->states, &form, tuple, &picked, tuple,
                                &written, tuple, &sizes, &it->code, &it->own, tuple, &it->lists);
    });
    if (it == nullptr) return nullptr;
    Owned made(reinterpret_cast<PyObject*>(it));
    const bool nodes = PyTuple_Check(form) && PyTuple_GET_SIZE(form) == 3;
    const long arity = PyLong_AsLong(nodes ? PyTuple_GET_ITEM(form, 0) : form);
    if (arity == -1 && PyErr_Occurred()) return nullptr;
    if (it->lists == nullptr) it->lists = PyTuple_New(0);
    it->listed = PyTuple_New(0);
    if (nodes) Py_SETREF(it->form, PyTuple_GetSlice(form, 1, 3));
    it->arity = int(arity);
    it->count = int(PyTuple_GET_SIZE(picked));
    it->written_count = int(PyTuple_GET_SIZE(written));
    bool right = read_numbers(picked, it->picked, most_arguments) && read_numbers(written, it->written, most_tensors);
    right = right && PyTuple_GET_SIZE(sizes) <= most_arguments && PyTuple_GET_SIZE(it->settings) == PyTuple_GET_SIZE(it->expected);
    if (!right && !PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "too many tensors");
    for (Py_ssize_t i = 0; right && i < PyTuple_GET_SIZE(sizes); ++i) it->sizes[i] = PyLong_AsSsize_t(PyTuple_GET_ITEM(sizes, i));
    right = right && it->lists != nullptr && it->listed != nullptr && it->form != nullptr;
    for (Py_ssize_t i = 0; right && i < PyTuple_GET_SIZE(it->lists); ++i) right = PyList_Check(PyTuple_GET_ITEM(it->lists, i));
    right = right && is_form(it->form, it->arity, most_arguments);
    if (!right && !PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "lists, and a form that has all tensors");
    if (right && it->code != Py_None && !Py_IS_TYPE(it->code, code_type)) {
        PyErr_SetString(PyExc_TypeError, "code is a Code");
        right = false;
    }
    return right && !PyErr_Occurred() && watch_all(it->dicts) ? made.given() : nullptr;
}

inline PyMethodDef call_methods[] = {
    {"count", call_count, METH_NOARGS, nullptr},
    {"moment", call_moment, METH_NOARGS, nullptr},
    {"renew", call_renew, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

inline PyType_Slot call_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(call_new)},
    {Py_tp_call, reinterpret_cast<void*>(call_call)},
    {Py_tp_traverse, reinterpret_cast<void*>(CallReferences::traverse)},
    {Py_tp_dealloc, reinterpret_cast<void*>(CallReferences::dealloc)},
    {Py_tp_methods, call_methods},
    {0, nullptr},
};

inline PyType_Spec call_spec = {
    "fusepass.Call", sizeof(Call), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE, call_slots,
};

}  // namespace fp
