/* Calls of library functions, compiled. In Python this is done by instrument/libraries/calls.py, whose rules apply. This
   file is a part of _hot_path.c.

   - The key of a call has the shapes and types of its arrays and its other arguments. A call with a known key, in a
     known scope, is recorded here. Python records all other calls, and returns what is then known of the key.
   - Python does not run between the records of a call, so records of threads do not mix. */

#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#include <numpy/ndarraytypes.h>

enum { KEY_BYTES = 512, MAX_KNOWN = 1024, MAX_TEXT = 64, FIRST_SAID = 1024 };
enum { NO_KEY, KEY_OF_ARGUMENTS, KEY_OF_RESULT };

/* The brick and the work of calls with one key. `step` and `brick` are the scopes of a call outside of steps. */
typedef struct {
    PyObject_HEAD
    PyObject *definition;
    PyObject *step;
    PyObject *brick;
    long long flops;
    long long bytes;
} KnownCall;

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    HotPath *hot_path;
    PyObject *own;      /* the library's function */
    PyObject *mark;     /* key of the scope of running calls; calls inside a key of this type are not timed */
    PyObject *recorded; /* records a call in Python */
    PyObject *say_small;
    PyObject *parts; /* tuple of the names of attributes that describe an argument that is not an array */
    PyObject *array_type;
    PyObject *known; /* KnownCall by key */
    Scope *inside;   /* the scope of running calls, or NULL */
    int64_t shown;   /* the node that viewers see while a call outside of steps runs */
    int64_t small_ns;
    int key_from;
    long long small;
} LibraryCall;

static PyTypeObject *KnownCallType, *LibraryCallType;

typedef struct {
    Py_ssize_t length; /* -1: the call has no key */
    char bytes[KEY_BYTES];
} CallKey;

static void
add_bytes(CallKey *key, const void *bytes, Py_ssize_t count)
{
    if (key->length < 0 || key->length + count > KEY_BYTES) {
        key->length = -1;
        return;
    }
    memcpy(key->bytes + key->length, bytes, count);
    key->length += count;
}

static void
add_number(CallKey *key, char kind, int64_t number)
{
    add_bytes(key, &kind, 1);
    add_bytes(key, &number, sizeof(number));
}

static void add_value(CallKey *key, LibraryCall *call, PyObject *value);

static void
add_items(CallKey *key, LibraryCall *call, PyObject *const *items, Py_ssize_t count)
{
    add_number(key, 't', count);
    for (Py_ssize_t i = 0; i < count && key->length >= 0; i++)
        add_value(key, call, items[i]);
}

static void
add_array(CallKey *key, PyArrayObject *array)
{
    add_number(key, 'a', PyArray_NDIM(array));
    add_number(key, 'd', PyArray_DESCR(array)->type_num);
    add_bytes(key, PyArray_DIMS(array), PyArray_NDIM(array) * sizeof(npy_intp));
    int64_t repeated = 0; /* the axes with a stride of 0, whose elements are stored once */
    for (int i = 0; i < PyArray_NDIM(array); i++)
        repeated |= (int64_t)(PyArray_STRIDE(array, i) == 0) << (i & 63);
    add_number(key, 'z', repeated);
}

static void
add_parts(CallKey *key, LibraryCall *call, PyObject *value)
{
    Py_ssize_t count = PyTuple_GET_SIZE(call->parts);
    add_number(key, 'o', count);
    if (count == 0)
        key->length = -1;
    for (Py_ssize_t i = 0; i < count && key->length >= 0; i++) {
        PyObject *part = PyObject_GetAttr(value, PyTuple_GET_ITEM(call->parts, i));
        if (part == NULL || part == value)
            key->length = -1;
        else
            add_value(key, call, part);
        Py_XDECREF(part);
    }
}

static void
add_value(CallKey *key, LibraryCall *call, PyObject *value)
{
    if (Py_IS_TYPE(value, (PyTypeObject *)call->array_type))
        add_array(key, (PyArrayObject *)value);
    else if (value == Py_None || PyBool_Check(value) || PyType_Check(value))
        add_number(key, 'p', (int64_t)(intptr_t)value);
    else if (PyLong_CheckExact(value)) {
        int overflow;
        add_number(key, 'i', PyLong_AsLongLongAndOverflow(value, &overflow));
        if (overflow)
            key->length = -1;
    }
    else if (PyFloat_CheckExact(value)) {
        double number = PyFloat_AS_DOUBLE(value);
        add_bytes(key, "f", 1);
        add_bytes(key, &number, sizeof(number));
    }
    else if (PyUnicode_CheckExact(value)) {
        Py_ssize_t length;
        const char *text = PyUnicode_AsUTF8AndSize(value, &length);
        add_number(key, 's', length);
        if (text == NULL || length > MAX_TEXT)
            key->length = -1;
        else
            add_bytes(key, text, length);
    }
    else if (PyTuple_CheckExact(value))
        add_items(key, call, &PyTuple_GET_ITEM(value, 0), PyTuple_GET_SIZE(value));
    else
        add_parts(key, call, value);
}

/* Return the key of a call as bytes, or NULL without an exception if it has no key. */
static PyObject *
key_of_call(LibraryCall *self, PyObject *const *args, Py_ssize_t count, PyObject *names, PyObject *result)
{
    CallKey key;
    key.length = 0;
    if (self->key_from == KEY_OF_RESULT)
        add_value(&key, self, result);
    else {
        Py_ssize_t named = names == NULL ? 0 : PyTuple_GET_SIZE(names);
        add_items(&key, self, args, count + named);
        if (named > 0)
            add_value(&key, self, names);
    }
    PyObject *found = key.length < 0 ? NULL : PyBytes_FromStringAndSize(key.bytes, key.length);
    PyErr_Clear();
    return found;
}

/* Record a call with a known key. Returns 0 if Python must record it. */
static int
write_known(LibraryCall *self, KnownCall *known, Position *position, Scope *outer, int64_t start_ns, int64_t end_ns)
{
    HotPath *hot_path = self->hot_path;
    if (outer->parent == NULL) {
        if (known->step == NULL || known->brick == NULL)
            return 0;
        int64_t step = ((Scope *)known->step)->node, brick = ((Scope *)known->brick)->node;
        self->shown = brick;
        write_record(hot_path, brick, start_ns, end_ns, 1);
        write_record(hot_path, brick | FLAG_AMOUNTS, known->flops, known->bytes, 0);
        write_record(hot_path, step, start_ns, end_ns, 0);
        return 1;
    }
    Scope *scope = (Scope *)PyDict_GetItemWithError(outer->children, known->definition);
    if (scope == NULL || !Py_IS_TYPE(scope, ScopeType) || scope->node <= NO_NODE) {
        PyErr_Clear();
        return 0;
    }
    write_record(hot_path, position->lane | scope->node, start_ns, end_ns, 1);
    write_record(hot_path, position->lane | scope->node | FLAG_AMOUNTS, known->flops, known->bytes, 0);
    return 1;
}

/* Record a call. Returns -1 if an exception is to reach the host. */
static int
record_library_call(LibraryCall *self, Position *position, Scope *outer, int64_t start_ns, int64_t end_ns,
                    PyObject *const *args, Py_ssize_t count, PyObject *names, PyObject *result)
{
    PyObject *key = NULL, *in_order = NULL, *by_name = NULL, *made = NULL;
    if (result != NULL && self->key_from != NO_KEY && self->hot_path->words != NULL &&
        (key = key_of_call(self, args, count, names, result)) != NULL) {
        PyObject *known = PyDict_GetItemWithError(self->known, key);
        if (known != NULL && write_known(self, (KnownCall *)known, position, outer, start_ns, end_ns)) {
            Py_DECREF(key);
            return 0;
        }
    }
    if (pack_arguments(args, (size_t)count, names, &in_order, &by_name) == 0)
        made = PyObject_CallFunction(self->recorded, "OOLLOOOO", (PyObject *)position, (PyObject *)outer,
                                     (long long)start_ns, (long long)end_ns, in_order,
                                     by_name == NULL ? Py_None : by_name, result == NULL ? Py_None : result,
                                     result == NULL ? Py_True : Py_False);
    int status = made == NULL ? give_up(self->hot_path) : 0;
    if (made != NULL && key != NULL && Py_IS_TYPE(made, KnownCallType)) {
        if (PyDict_GET_SIZE(self->known) >= MAX_KNOWN)
            PyDict_Clear(self->known);
        if (PyDict_SetItem(self->known, key, made) < 0)
            status = give_up(self->hot_path);
    }
    Py_XDECREF(key);
    Py_XDECREF(in_order);
    Py_XDECREF(by_name);
    Py_XDECREF(made);
    return status;
}

/* Count a small call. Python announces the count at 1024, 2048, 4096 … small calls. */
static int
count_small(LibraryCall *self)
{
    long long small = ++self->small;
    if (small < FIRST_SAID || small & (small - 1))
        return 0;
    PyObject *done = PyObject_CallNoArgs(self->say_small);
    Py_XDECREF(done);
    return done == NULL ? give_up(self->hot_path) : 0;
}

static PyObject *
library_call(PyObject *callable, PyObject *const *args, size_t flags, PyObject *names)
{
    LibraryCall *self = (LibraryCall *)callable;
    HotPath *hot_path = self->hot_path;
    Position *position = hot_path->recording ? this_position(hot_path) : NULL;
    if (position == NULL && PyErr_Occurred() && give_up(hot_path) < 0)
        return NULL;
    Scope *outer = position == NULL ? NULL : position->scope;
    if (outer == NULL || !position->recording || outer->key == NULL ||
        Py_IS_TYPE(outer->key, Py_TYPE(self->mark)) || self->recorded == NULL)
        return PyObject_Vectorcall(self->own, args, flags, names);
    if (self->inside == NULL || self->inside->parent != outer) {
        PyObject *made = PyObject_CallFunction((PyObject *)ScopeType, "OiO", self->mark, NO_NODE, (PyObject *)outer);
        if (made == NULL)
            return give_up(hot_path) < 0 ? NULL : PyObject_Vectorcall(self->own, args, flags, names);
        Py_XSETREF(self->inside, (Scope *)made);
    }
    Scope *inside = (Scope *)Py_NewRef(self->inside);
    Py_INCREF(self);
    Py_INCREF(position);
    Py_INCREF(outer);
    PyObject *result, *type, *error, *trace;
    int64_t start_ns, end_ns;
    int status = read_clock(hot_path, &start_ns) < 0 ? give_up(hot_path) : 1;
    if (status > 0) {
        enter(hot_path, position, inside);
        say_where(position, outer->parent == NULL ? self->shown : outer->node, start_ns);
    }
    result = status < 0 ? NULL : PyObject_Vectorcall(self->own, args, flags, names);
    if (status > 0) {
        PyErr_Fetch(&type, &error, &trace);
        if (read_clock(hot_path, &end_ns) < 0)
            status = give_up(hot_path);
        else if (end_ns - start_ns < self->small_ns)
            status = count_small(self);
        else if (position->scope == inside) /* else this is a forked child, or a step has ended inside */
            status = record_library_call(self, position, outer, start_ns, end_ns, args, PyVectorcall_NARGS(flags),
                                         names, result);
        leave(position, inside);
        if (status < 0) { /* a signal handler of the host has raised */
            Py_CLEAR(result);
            Py_XDECREF(type);
            Py_XDECREF(error);
            Py_XDECREF(trace);
        }
        else
            PyErr_Restore(type, error, trace);
    }
    Py_DECREF(inside);
    Py_DECREF(outer);
    Py_DECREF(position);
    Py_DECREF(self);
    return result;
}

/* ---- types ---- */

static PyObject *
known_call_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    PyObject *definition;
    long long flops, bytes;
    if (!PyArg_ParseTuple(args, "OLL", &definition, &flops, &bytes))
        return NULL;
    KnownCall *self = (KnownCall *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->definition = Py_NewRef(definition);
    self->flops = flops;
    self->bytes = bytes;
    return (PyObject *)self;
}

static void
known_call_dealloc(KnownCall *self)
{
    PyTypeObject *type = Py_TYPE(self);
    Py_CLEAR(self->definition);
    Py_CLEAR(self->step);
    Py_CLEAR(self->brick);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static PyObject *
known_call_set_scopes(KnownCall *self, PyObject *args)
{
    PyObject *step, *brick;
    if (!PyArg_ParseTuple(args, "O!O!", ScopeType, &step, ScopeType, &brick))
        return NULL;
    Py_XSETREF(self->step, Py_NewRef(step));
    Py_XSETREF(self->brick, Py_NewRef(brick));
    Py_RETURN_NONE;
}

static PyMethodDef known_call_methods[] = {
    {"set_scopes", (PyCFunction)known_call_set_scopes, METH_VARARGS, "Set the scopes of a call outside of steps."},
    {0},
};

static PyMemberDef known_call_members[] = {
    {"definition", T_OBJECT, offsetof(KnownCall, definition), READONLY, "The brick."},
    {"step", T_OBJECT, offsetof(KnownCall, step), READONLY, "The scope of a step that is one call, or None."},
    {"brick", T_OBJECT, offsetof(KnownCall, brick), READONLY, "The scope of the brick in this step, or None."},
    {"flops", T_LONGLONG, offsetof(KnownCall, flops), READONLY, "The FLOP of a call; -1: unknown."},
    {"bytes", T_LONGLONG, offsetof(KnownCall, bytes), READONLY, "The bytes of a call; -1: unknown."},
    {0},
};

static PyType_Slot known_call_slots[] = {
    {Py_tp_doc, "KnownCall(definition, flops, bytes)\n--\n\nThe brick and the work of calls with the same shapes."},
    {Py_tp_new, known_call_new},
    {Py_tp_dealloc, known_call_dealloc},
    {Py_tp_methods, known_call_methods},
    {Py_tp_members, known_call_members},
    {0},
};

static PyType_Spec known_call_spec = {
    .name = "cbtop.profiler._hot_path.KnownCall",
    .basicsize = sizeof(KnownCall),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = known_call_slots,
};

static PyObject *
library_call_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    PyObject *hot_path, *own, *mark, *recorded, *say_small, *parts, *array_type;
    long long small_ns;
    int key_from;
    if (!PyArg_ParseTuple(args, "O!OOOOO!O!Li", HotPathType, &hot_path, &own, &mark, &recorded, &say_small,
                          &PyTuple_Type, &parts, &PyType_Type, &array_type, &small_ns, &key_from))
        return NULL;
    LibraryCall *self = (LibraryCall *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->vectorcall = library_call;
    self->hot_path = (HotPath *)Py_NewRef(hot_path);
    self->own = Py_NewRef(own);
    self->mark = Py_NewRef(mark);
    self->recorded = Py_NewRef(recorded);
    self->say_small = Py_NewRef(say_small);
    self->parts = Py_NewRef(parts);
    self->array_type = Py_NewRef(array_type);
    self->known = PyDict_New();
    self->small_ns = small_ns;
    self->key_from = key_from;
    if (self->known == NULL)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static int
library_call_traverse(LibraryCall *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->hot_path);
    Py_VISIT(self->own);
    Py_VISIT(self->mark);
    Py_VISIT(self->recorded);
    Py_VISIT(self->say_small);
    Py_VISIT(self->known);
    Py_VISIT(self->inside);
    return 0;
}

/* Only these two lead back to a LibraryCall. A call that garbage collection has reached needs the other fields. */
static int
library_call_clear(LibraryCall *self)
{
    Py_CLEAR(self->recorded);
    Py_CLEAR(self->say_small);
    return 0;
}

static void
library_call_dealloc(LibraryCall *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    library_call_clear(self);
    Py_CLEAR(self->hot_path);
    Py_CLEAR(self->own);
    Py_CLEAR(self->mark);
    Py_CLEAR(self->parts);
    Py_CLEAR(self->array_type);
    Py_CLEAR(self->known);
    Py_CLEAR(self->inside);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static PyMemberDef library_call_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(LibraryCall, vectorcall), READONLY, NULL},
    {"small", T_LONGLONG, offsetof(LibraryCall, small), READONLY, "The number of small calls."},
    {0},
};

static PyType_Slot library_call_slots[] = {
    {Py_tp_doc, "LibraryCall(hot_path, own, mark, recorded, say_small, parts, array_type, small_ns, key_from)\n--\n\n"
                "Calls `own` and times the call."},
    {Py_tp_new, library_call_new},
    {Py_tp_traverse, library_call_traverse},
    {Py_tp_clear, library_call_clear},
    {Py_tp_dealloc, library_call_dealloc},
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_members, library_call_members},
    {0},
};

static PyType_Spec library_call_spec = {
    .name = "cbtop.profiler._hot_path.LibraryCall",
    .basicsize = sizeof(LibraryCall),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .slots = library_call_slots,
};
