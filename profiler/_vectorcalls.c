/* Redirects the calls of objects that have a vectorcall: ufuncs and dispatchers of NumPy, functions of Cython.

   Only the pointer to the vectorcall in the object is replaced. So the identity, type, name, pickle, signature and
   attributes of the object do not change. The operator `@` of arrays calls the ufunc `matmul`, so it is redirected,
   too.

   A call without an array of `smallest` elements, a list or a tuple is small. It is counted, and runs without the redirection. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#include <numpy/ndarraytypes.h>
#include <stddef.h>

typedef struct {
    PyObject *object; /* NULL: the entry is free */
    PyObject *call;   /* called instead of the object; NULL: calls are not redirected now */
    vectorcallfunc own;
    Py_ssize_t smallest; /* 0: no call is small */
    long long small;     /* number of small calls */
} Redirected;

enum { ENTRIES = 1024, MOST = ENTRIES / 2 }; /* a power of two */
static Redirected entries[ENTRIES];
static int used;
static PyTypeObject *array_type; /* numpy.ndarray */

static Redirected *
entry_of(PyObject *object)
{
    size_t at = (size_t)((uintptr_t)object >> 4) * 0x9E3779B97F4A7C15u >> 32;
    for (;; at++) {
        Redirected *entry = &entries[at % ENTRIES];
        if (entry->object == object || entry->object == NULL)
            return entry;
    }
}

static vectorcallfunc *
vectorcall_in(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    if (!PyType_HasFeature(type, Py_TPFLAGS_HAVE_VECTORCALL) || type->tp_vectorcall_offset <= 0 ||
        PyFunction_Check(object) || PyCFunction_CheckExact(object) || PyMethod_Check(object))
        return NULL; /* the interpreter calls these types without their vectorcall */
    vectorcallfunc *place = (vectorcallfunc *)((char *)object + type->tp_vectorcall_offset);
    return *place == NULL ? NULL : place; /* functions of Cython with `*args` have none */
}

static int
is_small(const Redirected *entry, PyObject *const *args, Py_ssize_t count)
{
    if (entry->smallest == 0)
        return 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (PyList_CheckExact(args[i]) || PyTuple_CheckExact(args[i]))
            return 0; /* may have arrays, as for `concatenate` */
        if (!PyObject_TypeCheck(args[i], array_type))
            continue;
        npy_intp elements = 1;
        for (int axis = 0; axis < PyArray_NDIM((PyArrayObject *)args[i]); axis++)
            elements *= PyArray_DIM((PyArrayObject *)args[i], axis);
        if (elements >= entry->smallest)
            return 0;
    }
    return 1;
}

static PyObject *
redirected(PyObject *object, PyObject *const *args, size_t flags, PyObject *names)
{
    Redirected *entry = entry_of(object);
    Py_ssize_t count = PyVectorcall_NARGS(flags);
    if (entry->call == NULL)
        return entry->own(object, args, flags, names);
    if (is_small(entry, args, names == NULL ? count : count + PyTuple_GET_SIZE(names))) {
        entry->small++;
        return entry->own(object, args, flags, names);
    }
    PyObject *call = Py_NewRef(entry->call);
    PyObject *result = PyObject_Vectorcall(call, args, flags, names);
    Py_DECREF(call);
    return result;
}

/* --- calls an object without the redirection ------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *object;
} OwnCall;

static PyObject *
call_own(PyObject *self, PyObject *const *args, size_t flags, PyObject *names)
{
    PyObject *object = ((OwnCall *)self)->object;
    vectorcallfunc *now = vectorcall_in(object);
    vectorcallfunc own = *now == redirected ? entry_of(object)->own : *now;
    return own(object, args, flags, names);
}

static void
own_call_dealloc(OwnCall *self)
{
    Py_DECREF(self->object);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyTypeObject OwnCallType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "cbtop.profiler._vectorcalls.OwnCall",
    .tp_doc = "Calls an object as if its calls were not redirected.",
    .tp_basicsize = sizeof(OwnCall),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(OwnCall, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_dealloc = (destructor)own_call_dealloc,
};

/* --- functions of the module ----------------------------------------------------------------------------------- */

static PyObject *
own_call(PyObject *Py_UNUSED(module), PyObject *object)
{
    if (vectorcall_in(object) == NULL)
        return PyErr_Format(PyExc_TypeError, "calls of a %s cannot be redirected", Py_TYPE(object)->tp_name);
    OwnCall *self = PyObject_New(OwnCall, &OwnCallType);
    if (self == NULL)
        return NULL;
    self->vectorcall = call_own;
    self->object = Py_NewRef(object);
    return (PyObject *)self;
}

static PyObject *
redirect(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *object, *call, *arrays;
    Py_ssize_t smallest;
    if (!PyArg_ParseTuple(args, "OOnO!", &object, &call, &smallest, &PyType_Type, &arrays))
        return NULL;
    vectorcallfunc *place = vectorcall_in(object);
    if (place == NULL)
        return PyErr_Format(PyExc_TypeError, "calls of a %s cannot be redirected", Py_TYPE(object)->tp_name);
    Redirected *entry = entry_of(object);
    if (entry->object == NULL) {
        if (used >= MOST)
            return PyErr_Format(PyExc_RuntimeError, "calls of more than %d objects are redirected", MOST);
        used++;
        entry->object = Py_NewRef(object); /* for ever, because threads may be calling it */
    }
    if (*place != redirected) {
        entry->own = *place;
        *place = redirected;
    }
    Py_INCREF(arrays);
    Py_XSETREF(array_type, (PyTypeObject *)arrays);
    entry->smallest = smallest;
    Py_XSETREF(entry->call, Py_NewRef(call));
    Py_RETURN_NONE;
}

static PyObject *
restore(PyObject *Py_UNUSED(module), PyObject *object)
{
    vectorcallfunc *place = vectorcall_in(object);
    Redirected *entry = entry_of(object);
    if (place != NULL && entry->object == object) {
        if (*place == redirected)
            *place = entry->own;
        Py_CLEAR(entry->call);
    }
    Py_RETURN_NONE;
}

static PyObject *
small_calls(PyObject *Py_UNUSED(module), PyObject *object)
{
    Redirected *entry = entry_of(object);
    return PyLong_FromLongLong(entry->object == object ? entry->small : 0);
}

static PyMethodDef functions[] = {
    {"own_call", own_call, METH_O, "own_call(object, /)\n--\n\nReturn a callable that calls `object` unredirected."},
    {"redirect", redirect, METH_VARARGS,
     "redirect(object, call, smallest, array_type, /)\n--\n\n"
     "Run `call` when `object` is called with an array of at least `smallest` elements. 0: at every call."},
    {"restore", restore, METH_O, "restore(object, /)\n--\n\nStop redirecting the calls of `object`."},
    {"small_calls", small_calls, METH_O,
     "small_calls(object, /)\n--\n\nReturn the number of calls of `object` that were too small to be redirected."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_vectorcalls",
    .m_doc = "Redirects the calls of objects that have a vectorcall.",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC
PyInit__vectorcalls(void)
{
    if (PyType_Ready(&OwnCallType) < 0)
        return NULL;
    return PyModule_Create(&module);
}
