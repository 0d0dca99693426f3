/* Stamps, launched from C, with the same names, words and tests as pairs.py and stamp_clock.py.

   Rules
   - The addresses of the driver's functions are arguments, so that a test can replace the functions.
   - A launch does not hold the GIL, because it may wait: for room in the device's queue, or for a lock of the driver
     while another thread launches.
   - All other code holds the GIL. No Python code runs between taking a slot and its launch, nor between the launch
     and returning or releasing the slot. So no other thread and no signal handler can interrupt there.
   - The words are volatile, because the device writes them.
*/

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <structmember.h>

typedef struct { /* CUlaunchConfig */
    unsigned grid[3], block[3], shared_bytes;
    void *stream, *attributes;
    unsigned attributes_count;
} LaunchConfig;

/* The data for launching stamps. A launch copies its arguments before it returns. */
typedef struct {
    int (*launch)(const LaunchConfig *config, void *kernel, void **arguments, void **extra);
    int (*is_capturing)(void *stream, int *status);
    int (*current)(void **context);
    PyObject *error; /* `error(name, result)` returns the exception for a failed driver call */
    void *context, *kernel;
    PyObject *owner; /* the object that owns the words */
    volatile uint64_t *words;
    uint64_t address; /* address of the words on the device */
    Py_ssize_t count;
} Stamps;

typedef struct {
    PyObject_HEAD
    Stamps stamps;
    Py_ssize_t *free; /* a queue of free pairs, with room for `pairs` */
    Py_ssize_t pairs, first, waiting;
    Py_ssize_t last; /* index of the word of the last end stamp, or -1 after this stamp was read */
} PairStamps;

typedef struct {
    PyObject_HEAD
    Stamps stamps;
    PyTypeObject *kind; /* the type of marks, StampMark */
    PyObject *stream, *now_ns, *device, *marks, *last;
    uint64_t number;
} MarkStamps;

enum { NOT_HERE = -1 };
static PyObject *name_of_slot, *name_of_number, *name_of_stream, *name_of_host_ns, *name_of_device_ns, *is_of_parent;
static PyObject *zero;

/* ---- stamps ---- */

/* Store the attribute `name` of `object`, an address, in `field`. Returns -1 with an exception set. */
static int
take(PyObject *object, const char *name, uint64_t *field)
{
    PyObject *value = PyObject_GetAttrString(object, name);
    *field = value == NULL ? 0 : PyLong_AsUnsignedLongLong(value);
    Py_XDECREF(value);
    return PyErr_Occurred() ? -1 : 0;
}

/* Initialize stamps of `device` into the first `count` of `words`. */
static int
stamps_init(Stamps *self, PyObject *device, PyObject *words, Py_ssize_t count)
{
    uint64_t context, kernel, host;
    Py_ssize_t size = PyObject_Size(words);
    if (size < 0 || take(device, "context", &context) < 0 || take(device, "stamp", &kernel) < 0 ||
        take(words, "host", &host) < 0 || take(words, "address", &self->address) < 0)
        return -1;
    if (count < 1 || count > size) {
        PyErr_Format(PyExc_ValueError, "%zd stamps in %zd words", count, size);
        return -1;
    }
    PyObject *driver = PyObject_GetAttrString(device, "driver");
    PyObject *functions = driver == NULL ? NULL : PyObject_CallMethod(driver, "functions", NULL);
    Py_XDECREF(driver);
    if (functions == NULL)
        return -1;
    unsigned long long launch, is_capturing, current;
    PyObject *error;
    int done = PyArg_ParseTuple(functions, "KKKO", &launch, &is_capturing, &current, &error);
    if (done) {
        self->launch = (int (*)(const LaunchConfig *, void *, void **, void **))(uintptr_t)launch;
        self->is_capturing = (int (*)(void *, int *))(uintptr_t)is_capturing;
        self->current = (int (*)(void **))(uintptr_t)current;
        self->error = Py_NewRef(error);
    }
    Py_DECREF(functions);
    self->context = (void *)(uintptr_t)context;
    self->kernel = (void *)(uintptr_t)kernel;
    self->owner = Py_NewRef(words);
    self->words = (volatile uint64_t *)(uintptr_t)host;
    self->count = count;
    return done ? 0 : -1;
}

/* Enqueue a stamp into the word `slot`. Call this without the GIL. Returns the driver's result. */
static int
enqueue(const Stamps *self, Py_ssize_t slot, void *stream)
{
    LaunchConfig config = {.grid = {1, 1, 1}, .block = {1, 1, 1}, .stream = stream};
    uint64_t word = self->address + 8 * (uint64_t)slot;
    void *arguments[] = {&word};
    return self->launch(&config, self->kernel, arguments, NULL);
}

static void
refuse(const Stamps *self, const char *name, int result)
{
    PyObject *error = PyObject_CallFunction(self->error, "si", name, result);
    if (error != NULL)
        PyErr_SetObject((PyObject *)Py_TYPE(error), error);
    Py_XDECREF(error);
}

/* Return the address in a Python int. A stream may be NULL, so call PyErr_Occurred() to detect an error. */
static void *
stream_of(PyObject *number)
{
    return (void *)(uintptr_t)PyLong_AsUnsignedLongLong(number);
}

/* ---- pairs ---- */

static PyObject *
pairs_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"device", "words", "pairs", NULL};
    PyObject *device, *words;
    Py_ssize_t pairs;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOn", names, &device, &words, &pairs))
        return NULL;
    PairStamps *self = (PairStamps *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    if (stamps_init(&self->stamps, device, words, 2 * pairs) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    if ((self->free = PyMem_New(Py_ssize_t, pairs)) == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    self->pairs = pairs;
    self->last = -1;
    for (Py_ssize_t at = 0; at < pairs; at++)
        self->free[at] = 2 * at;
    return (PyObject *)self;
}

static void
pairs_give_back(PairStamps *self, Py_ssize_t pair)
{
    self->free[(self->first + self->pairs - self->waiting) % self->pairs] = pair;
    self->waiting--;
}

static PyObject *
pairs_begin(PairStamps *self, PyObject *number)
{
    Stamps *stamps = &self->stamps;
    void *stream = stream_of(number), *context = NULL;
    if (stream == (void *)UINTPTR_MAX && PyErr_Occurred())
        return NULL;
    if (self->waiting == self->pairs)
        Py_RETURN_NONE;
    Py_ssize_t pair = self->free[self->first];
    self->first = (self->first + 1) % self->pairs;
    self->waiting++;
    const char *called = "cuCtxGetCurrent";
    int result, is_here, is_capturing = 0;
    Py_BEGIN_ALLOW_THREADS
    result = stamps->current(&context);
    is_here = context == stamps->context;
    if (!result && is_here) {
        called = "cuStreamIsCapturing";
        result = stamps->is_capturing(stream, &is_capturing);
        is_here = !is_capturing;
    }
    if (!result && is_here) {
        called = "cuLaunchKernelEx";
        result = enqueue(stamps, pair, stream);
    }
    Py_END_ALLOW_THREADS
    if (!result && is_here)
        return PyLong_FromSsize_t(pair);
    pairs_give_back(self, pair);
    if (!result)
        return PyLong_FromLong(NOT_HERE);
    refuse(stamps, called, result);
    return NULL;
}

/* Return the number of a pair in the arguments, or -1 with an exception set if it is invalid. */
static Py_ssize_t
pair_of(PairStamps *self, PyObject *number)
{
    Py_ssize_t pair = PyLong_AsSsize_t(number);
    if (pair == -1 && PyErr_Occurred())
        return -1;
    if (pair >= 0 && pair < 2 * self->pairs && pair % 2 == 0)
        return pair;
    PyErr_Format(PyExc_ValueError, "%zd is no pair", pair);
    return -1;
}

static PyObject *
pairs_end(PairStamps *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 2) {
        PyErr_Format(PyExc_TypeError, "end() takes 2 arguments, %zd were given", count);
        return NULL;
    }
    Py_ssize_t pair = pair_of(self, args[0]);
    if (pair < 0)
        return NULL;
    void *stream = stream_of(args[1]);
    if (stream == (void *)UINTPTR_MAX && PyErr_Occurred())
        return NULL;
    int result;
    Py_BEGIN_ALLOW_THREADS
    result = enqueue(&self->stamps, pair + 1, stream);
    Py_END_ALLOW_THREADS
    if (result) {
        refuse(&self->stamps, "cuLaunchKernelEx", result);
        return NULL;
    }
    self->last = pair + 1;
    Py_RETURN_NONE;
}

static PyObject *
pairs_read(PairStamps *self, PyObject *number)
{
    Py_ssize_t pair = pair_of(self, number);
    if (pair < 0)
        return NULL;
    volatile uint64_t *words = self->stamps.words + pair;
    unsigned long long begun_ns = words[0], ended_ns = words[1];
    if (!begun_ns || !ended_ns)
        Py_RETURN_NONE;
    PyObject *times = Py_BuildValue("KK", begun_ns, ended_ns);
    if (times == NULL)
        return NULL;
    words[0] = words[1] = 0;
    if (self->last == pair + 1)
        self->last = -1;
    if (self->waiting)
        pairs_give_back(self, pair);
    return times;
}

static PyObject *
pairs_is_through(PairStamps *self, PyObject *Py_UNUSED(ignored))
{
    return PyBool_FromLong(self->last < 0 || self->stamps.words[self->last]);
}

static int
pairs_traverse(PairStamps *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->stamps.error);
    Py_VISIT(self->stamps.owner);
    return 0;
}

/* No tp_clear is needed, because every cycle leads through the device clock or the pairs. Both are Python objects. */
static void
pairs_dealloc(PairStamps *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    Py_CLEAR(self->stamps.error);
    Py_CLEAR(self->stamps.owner);
    PyMem_Free(self->free);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

#define FAST(function) ((PyCFunction)(void (*)(void))(function))

static PyMethodDef pairs_methods[] = {
    {"begin", (PyCFunction)pairs_begin, METH_O, "begin($self, stream, /)\n--\n\n"},
    {"end", FAST(pairs_end), METH_FASTCALL, "end($self, pair, stream, /)\n--\n\n"},
    {"read", (PyCFunction)pairs_read, METH_O, "read($self, pair, /)\n--\n\n"},
    {"is_through", (PyCFunction)pairs_is_through, METH_NOARGS, "is_through($self, /)\n--\n\n"},
    {0},
};

static PyMemberDef pairs_members[] = {
    {"waiting", T_PYSSIZET, offsetof(PairStamps, waiting), READONLY, "How many were not read."},
    {0},
};

static PyType_Slot pairs_slots[] = {
    {Py_tp_doc, "PairStamps of pairs.py."},
    {Py_tp_new, pairs_new},
    {Py_tp_traverse, pairs_traverse},
    {Py_tp_dealloc, pairs_dealloc},
    {Py_tp_methods, pairs_methods},
    {Py_tp_members, pairs_members},
    {0},
};

static PyType_Spec pairs_spec = {
    .name = "cbtop.profiler._stamps.PairStamps",
    .basicsize = sizeof(PairStamps),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = pairs_slots,
};

/* ---- marks ---- */

static PyObject *
marks_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"device", "words", "stream", "now_ns", "marks", "last", NULL};
    PyObject *device, *words, *stream, *now_ns, *marks, *last;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOO!O!", names, &device, &words, &stream, &now_ns,
                                     &PyList_Type, &marks, &PyDict_Type, &last))
        return NULL;
    MarkStamps *self = (MarkStamps *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    PyObject *clocks = PyImport_ImportModule("cbtop.profiler.device.stamp_clock");
    self->kind = clocks == NULL ? NULL : (PyTypeObject *)PyObject_GetAttrString(clocks, "StampMark");
    Py_XDECREF(clocks);
    if (self->kind == NULL || stamps_init(&self->stamps, device, words, PyList_GET_SIZE(marks)) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    self->stream = Py_NewRef(stream);
    self->now_ns = Py_NewRef(now_ns);
    self->device = Py_NewRef(device);
    self->marks = Py_NewRef(marks);
    self->last = Py_NewRef(last);
    return (PyObject *)self;
}

/* Return a mark without a slot. `number`, `stream` and `host_ns` are borrowed. */
static PyObject *
new_mark(MarkStamps *self, PyObject *number, PyObject *stream, PyObject *host_ns)
{
    PyObject *mark = self->kind->tp_alloc(self->kind, 0);
    if (mark != NULL &&
        (PyObject_SetAttr(mark, name_of_slot, Py_None) < 0 || PyObject_SetAttr(mark, name_of_device_ns, zero) < 0 ||
         PyObject_SetAttr(mark, name_of_number, number) < 0 || PyObject_SetAttr(mark, name_of_stream, stream) < 0 ||
         PyObject_SetAttr(mark, name_of_host_ns, host_ns) < 0))
        Py_CLEAR(mark);
    return mark;
}

/* Store `device_ns`, the value of the mark's word, in the mark. Returns 1 if done, 0 if the device has not written
   the word yet, and -1 with an exception set. */
static int
keep(PyObject *mark, uint64_t device_ns)
{
    PyObject *time = PyLong_FromUnsignedLongLong(device_ns);
    if (time == NULL)
        return -1;
    int done = PyObject_SetAttr(mark, name_of_device_ns, time);
    Py_DECREF(time);
    if (done < 0 || PyObject_SetAttr(mark, name_of_slot, Py_None) < 0)
        return -1;
    return device_ns != 0;
}

/* Enqueue the stamp of `mark`, which is in the list `marks` at the index `at`. Returns 0 on success. */
static int
launch_mark(MarkStamps *self, Py_ssize_t at, void *stream, PyObject *key, PyObject *mark)
{
    int result;
    Py_BEGIN_ALLOW_THREADS
    result = enqueue(&self->stamps, at, stream);
    Py_END_ALLOW_THREADS
    if (!result)
        return PyDict_SetItem(self->last, key, mark);
    /* The launch failed, so no stamp will write this word. */
    if (at < PyList_GET_SIZE(self->marks) && PyList_GET_ITEM(self->marks, at) == mark)
        PyList_SetItem(self->marks, at, Py_NewRef(Py_None));
    if (PyObject_SetAttr(mark, name_of_slot, Py_None) == 0 && PyObject_SetAttr(mark, name_of_host_ns, zero) == 0)
        refuse(&self->stamps, "cuLaunchKernelEx", result);
    return -1;
}

static PyObject *
marks_mark(MarkStamps *self, PyObject *Py_UNUSED(ignored))
{
    PyObject *answer = PyObject_GetAttr(self->device, is_of_parent);
    int is_parents = answer == NULL ? -1 : PyObject_IsTrue(answer);
    Py_XDECREF(answer);
    if (is_parents < 0)
        return NULL;
    PyObject *stream = is_parents ? Py_NewRef(Py_None) : PyObject_CallNoArgs(self->stream);
    if (stream == NULL)
        return NULL;
    if (stream == Py_None) {
        Py_DECREF(stream);
        return new_mark(self, zero, zero, zero);
    }
    PyObject *host_ns = NULL, *number = NULL, *slot = NULL, *mark = NULL;
    void *handle = stream_of(stream);
    if (handle == (void *)UINTPTR_MAX && PyErr_Occurred())
        goto done;
    host_ns = PyObject_CallNoArgs(self->now_ns);
    /* Making the mark may trigger a garbage collection, which may run any code. No tracked object is made after
       that. */
    mark = host_ns == NULL ? NULL : new_mark(self, zero, stream, host_ns);
    if (mark == NULL)
        goto done;
    Py_ssize_t at = (Py_ssize_t)(self->number % (uint64_t)self->stamps.count);
    number = PyLong_FromUnsignedLongLong(self->number);
    slot = PyLong_FromSsize_t(at);
    if (number == NULL || slot == NULL || PyObject_SetAttr(mark, name_of_number, number) < 0 ||
        at >= PyList_GET_SIZE(self->marks)) {
        Py_CLEAR(mark);
        goto done;
    }
    self->number++;
    PyObject *before = PyList_GET_ITEM(self->marks, at);
    int is_there = before == Py_None ? 1 : keep(before, self->stamps.words[at]);
    if (is_there <= 0) {
        if (is_there < 0)
            Py_CLEAR(mark);
        goto done;
    }
    if (PyObject_SetAttr(mark, name_of_slot, slot) < 0) {
        Py_CLEAR(mark);
        goto done;
    }
    self->stamps.words[at] = 0;
    PyList_SetItem(self->marks, at, Py_NewRef(mark));
    if (launch_mark(self, at, handle, stream, mark) < 0)
        Py_CLEAR(mark);
done:
    Py_XDECREF(slot);
    Py_XDECREF(number);
    Py_XDECREF(host_ns);
    Py_DECREF(stream);
    return mark;
}

static int
marks_traverse(MarkStamps *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->stamps.error);
    Py_VISIT(self->stamps.owner);
    Py_VISIT(self->kind);
    Py_VISIT(self->stream);
    Py_VISIT(self->now_ns);
    Py_VISIT(self->device);
    Py_VISIT(self->marks);
    Py_VISIT(self->last);
    return 0;
}

/* No tp_clear is needed, for the same reason as in pairs. */
static void
marks_dealloc(MarkStamps *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    Py_CLEAR(self->stamps.error);
    Py_CLEAR(self->stamps.owner);
    Py_CLEAR(self->kind);
    Py_CLEAR(self->stream);
    Py_CLEAR(self->now_ns);
    Py_CLEAR(self->device);
    Py_CLEAR(self->marks);
    Py_CLEAR(self->last);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static PyMethodDef marks_methods[] = {
    {"mark", (PyCFunction)marks_mark, METH_NOARGS, "mark($self, /)\n--\n\n"},
    {0},
};

static PyType_Slot marks_slots[] = {
    {Py_tp_doc, "MarkStamps of stamp_clock.py."},
    {Py_tp_new, marks_new},
    {Py_tp_traverse, marks_traverse},
    {Py_tp_dealloc, marks_dealloc},
    {Py_tp_methods, marks_methods},
    {0},
};

static PyType_Spec marks_spec = {
    .name = "cbtop.profiler._stamps.MarkStamps",
    .basicsize = sizeof(MarkStamps),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = marks_slots,
};

/* ---- module ---- */

static int
add_type(PyObject *module, PyType_Spec *spec)
{
    PyObject *type = PyType_FromSpec(spec);
    int done = type == NULL ? -1 : PyModule_AddType(module, (PyTypeObject *)type);
    Py_XDECREF(type);
    return done;
}

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "cbtop.profiler._stamps",
    .m_doc = "Stamps on a device, launched from C; pairs.py and stamp_clock.py say what for.",
    .m_size = -1,
};

PyMODINIT_FUNC
PyInit__stamps(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL)
        return NULL;
    if ((name_of_slot = PyUnicode_InternFromString("slot")) == NULL ||
        (name_of_number = PyUnicode_InternFromString("number")) == NULL ||
        (name_of_stream = PyUnicode_InternFromString("stream")) == NULL ||
        (name_of_host_ns = PyUnicode_InternFromString("host_ns")) == NULL ||
        (name_of_device_ns = PyUnicode_InternFromString("device_ns")) == NULL ||
        (is_of_parent = PyUnicode_InternFromString("is_of_parent")) == NULL || (zero = PyLong_FromLong(0)) == NULL ||
        add_type(module, &pairs_spec) < 0 || add_type(module, &marks_spec) < 0)
        Py_CLEAR(module);
    return module;
}
