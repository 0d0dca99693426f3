/* What runs at every brick, compiled: the same names, the same records and the same tests as hot_path.py.

   Rules
   - Start, stop, the `with` form and the layer's scope; nothing else. A new place in the graph and a record without
     a ring are calls back into Python.
   - The GIL is held throughout. A thread reserves a slot by one atomic step of the ring's cursor, writes it, and
     stores its tag last; nothing of Python runs between these. So a record is whole or does not count.
   - A brick that one thread starts and another stops is recorded; only the thread it runs in moves in the graph.
*/

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdatomic.h>
#include <stdint.h>
#include <structmember.h>
#include <time.h>

#ifndef __linux__
#error "time.perf_counter_ns is CLOCK_MONOTONIC on Linux alone; elsewhere the Python hot path is used"
#endif

/* The layout of protocol/ring.py, version 2. */
enum { CURSOR_WORD = 16, HEADER_BYTES = 4096, RECORD_BYTES = 32, RECORD_WORDS = 4, SEQUENCE_SHIFT = 32 };
#define SEQUENCE_MASK ((INT64_C(1) << 31) - 1)
#define FLAG_FAILED (INT64_C(1) << 24)
#define TAG_MASK INT64_C(0xffffffff)
#define NO_NODE 0

/* A place in the graph: its node, the place above, and the places below by what was started there. */
typedef struct Place {
    PyObject_HEAD
    PyObject *key;
    PyObject *below;
    struct Place *above;
    int64_t node;
} Place;

/* Where in the graph one thread is. */
typedef struct {
    PyObject_HEAD
    Place *here;
} Thread;

/* A running brick. Not collected: a place does not hold timers. */
typedef struct {
    PyObject_HEAD
    Place *place;
    int64_t start_ns;
} Timer;

typedef struct {
    PyObject_HEAD
    PyObject *define;
    PyObject *clock_ns; /* NULL: the monotonic clock, read here */
    PyObject *record;
    PyObject *threads; /* a threading.local: each thread's Thread, as `thread` */
    Place *root;
    uint64_t serial; /* never given twice: what a thread remembers by it cannot be another's */
    int recording;
    Py_buffer ring; /* ring.buf is NULL while none is attached */
    int64_t wrap;   /* capacity - 1 */
} HotPath;

typedef struct {
    PyObject_HEAD
    HotPath *hot_path;
    PyObject *key;
    PyObject *elements;
    Place *place; /* NULL before it is entered, and while nothing is recorded */
    int64_t start_ns;
} Span;

static PyTypeObject *PlaceType, *ThreadType, *TimerType, *HotPathType, *SpanType;
static PyObject *new_local, *perf_counter_ns, *layer_kind, *one, *name_thread;
static uint64_t serials;

/* The Thread that this thread used last, and whose hot path it belongs to. The model saves a call at each look; where
   a loader has no room for it, the import fails and the Python hot path is used. */
static _Thread_local struct {
    uint64_t serial;
    Thread *thread;
} last __attribute__((tls_model("initial-exec"))) = {UINT64_MAX, NULL};

/* Timers and spans that were let go, to be used again: a third of the cost of making one. */
enum { SPARE = 16 };
static struct {
    void *objects[SPARE];
    int count;
} spare_timers, spare_spans;

/* ---- place ---- */

static PyObject *
place_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"key", "node", "above", NULL};
    PyObject *key, *above;
    long long node;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OLO", names, &key, &node, &above))
        return NULL;
    if (above != Py_None && !PyObject_TypeCheck(above, PlaceType)) {
        PyErr_Format(PyExc_TypeError, "above is a %s; a Place or None is wanted", Py_TYPE(above)->tp_name);
        return NULL;
    }
    Place *self = (Place *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->key = Py_NewRef(key);
    self->above = above == Py_None ? NULL : (Place *)Py_NewRef(above);
    self->node = node;
    self->below = PyDict_New();
    if (self->below == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static int
place_traverse(Place *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->key);
    Py_VISIT(self->below);
    Py_VISIT(self->above);
    return 0;
}

static int
place_clear(Place *self)
{
    /* `below` stays: a place that someone can still reach must be one to look into. */
    if (self->below != NULL)
        PyDict_Clear(self->below);
    Py_CLEAR(self->key);
    Py_CLEAR(self->above);
    return 0;
}

static void
place_dealloc(Place *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    Py_TRASHCAN_BEGIN(self, place_dealloc)
    Py_CLEAR(self->key);
    Py_CLEAR(self->below);
    Py_CLEAR(self->above);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
    Py_TRASHCAN_END
}

static PyMemberDef place_members[] = {
    {"key", T_OBJECT, offsetof(Place, key), READONLY, "What was started here."},
    {"node", T_LONGLONG, offsetof(Place, node), READONLY, "The id of its node."},
    {"above", T_OBJECT, offsetof(Place, above), READONLY, "The place above; None for the root."},
    {"below", T_OBJECT, offsetof(Place, below), READONLY, "The places below, by what was started there."},
    {0},
};

static PyType_Slot place_slots[] = {
    {Py_tp_doc, "A place in the graph: its node, the place above, and the places below by what was started there."},
    {Py_tp_new, place_new},
    {Py_tp_traverse, place_traverse},
    {Py_tp_clear, place_clear},
    {Py_tp_dealloc, place_dealloc},
    {Py_tp_members, place_members},
    {0},
};

static PyType_Spec place_spec = {
    .name = "cbtop.profiler._hot_path.Place",
    .basicsize = sizeof(Place),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = place_slots,
};

/* ---- thread ---- */

static int
thread_traverse(Thread *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->here);
    return 0;
}

static void
thread_dealloc(Thread *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    Py_CLEAR(self->here);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

/* No tp_clear: `here` is never NULL, and a cycle through it is broken at the places. */
static PyType_Slot thread_slots[] = {
    {Py_tp_doc, "Where in the graph one thread is."},
    {Py_tp_traverse, thread_traverse},
    {Py_tp_dealloc, thread_dealloc},
    {0},
};

static PyType_Spec thread_spec = {
    .name = "cbtop.profiler._hot_path.Thread",
    .basicsize = sizeof(Thread),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = thread_slots,
};

/* This thread's Thread, borrowed. */
__attribute__((noinline, cold)) static Thread *
first_look(HotPath *self)
{
    if (self->threads == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "the hot path is not initialised; call HotPath.__init__ first");
        return NULL;
    }
    Thread *thread = (Thread *)PyObject_GetAttr(self->threads, name_thread);
    if (thread == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError))
            return NULL;
        PyErr_Clear();
        thread = (Thread *)ThreadType->tp_alloc(ThreadType, 0);
        if (thread == NULL)
            return NULL;
        thread->here = (Place *)Py_NewRef(self->root);
        if (PyObject_SetAttr(self->threads, name_thread, (PyObject *)thread) < 0) {
            Py_DECREF(thread);
            return NULL;
        }
    }
    Py_DECREF(thread); /* the threading.local holds it as long as this thread and this hot path live */
    last.serial = self->serial;
    last.thread = thread;
    return thread;
}

static inline Thread *
this_thread(HotPath *self)
{
    return last.serial == self->serial ? last.thread : first_look(self);
}

/* ---- timer ---- */

static void
timer_dealloc(Timer *self)
{
    PyTypeObject *type = Py_TYPE(self);
    Py_CLEAR(self->place);
    if (spare_timers.count < SPARE)
        spare_timers.objects[spare_timers.count++] = self;
    else
        PyObject_Free(self);
    Py_DECREF(type);
}

static PyType_Slot timer_slots[] = {
    {Py_tp_doc, "A running brick: what `start_brick` gives and `stop_brick` takes."},
    {Py_tp_dealloc, timer_dealloc},
    {0},
};

static PyType_Spec timer_spec = {
    .name = "cbtop.profiler._hot_path.BrickTimer",
    .basicsize = sizeof(Timer),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = timer_slots,
};

/* ---- the hot path ---- */

static inline int
read_clock(HotPath *self, int64_t *now_ns)
{
    if (self->clock_ns == NULL) {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        *now_ns = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
        return 0;
    }
    PyObject *read = PyObject_CallNoArgs(self->clock_ns);
    if (read == NULL)
        return -1;
    *now_ns = PyLong_AsLongLong(read);
    Py_DECREF(read);
    return *now_ns == -1 && PyErr_Occurred() ? -1 : 0;
}

/* Whether `elements` is a 64-bit integer. */
static inline int
as_elements(PyObject *elements, int64_t *value)
{
    int overflow = 0;
    if (PyLong_Check(elements)) {
        *value = PyLong_AsLongLongAndOverflow(elements, &overflow);
        return !overflow;
    }
    PyObject *index = PyIndex_Check(elements) ? PyNumber_Index(elements) : NULL;
    if (index == NULL) {
        PyErr_Clear();
        return 0;
    }
    *value = PyLong_AsLongLongAndOverflow(index, &overflow);
    Py_DECREF(index);
    return !overflow;
}

static inline void
write_record(HotPath *self, int64_t tag, int64_t start_ns, int64_t end_ns, int64_t elements)
{
    int64_t *words = self->ring.buf;
    int64_t number = atomic_fetch_add_explicit((_Atomic int64_t *)&words[CURSOR_WORD], 1, memory_order_acq_rel);
    int64_t *record = words + HEADER_BYTES / 8 + (number & self->wrap) * RECORD_WORDS;
    record[0] = start_ns;
    record[1] = end_ns;
    record[2] = elements;
    tag = (tag & TAG_MASK) | ((number + 1) & SEQUENCE_MASK) << SEQUENCE_SHIFT;
    atomic_store_explicit((_Atomic int64_t *)&record[3], tag, memory_order_release);
}

/* Write a record; where no ring is attached, hand it over. Converting comes first: it may run Python. */
static int
keep(HotPath *self, int64_t tag, int64_t start_ns, int64_t end_ns, PyObject *elements)
{
    if (self->ring.buf != NULL) {
        int64_t value;
        int whole = as_elements(elements, &value);
        if (self->ring.buf == NULL)
            return 0;
        if (whole)
            write_record(self, tag, start_ns, end_ns, value);
        else
            write_record(self, NO_NODE, 0, 0, 0); /* keep the count */
        return 0;
    }
    PyObject *done = PyObject_CallFunction(self->record, "LLLO", (long long)tag, (long long)start_ns,
                                           (long long)end_ns, elements);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* Go to the place of `key` below where this thread is. Gives a new reference. */
static inline Place *
enter(HotPath *self, PyObject *key)
{
    Thread *thread = this_thread(self);
    if (thread == NULL)
        return NULL;
    Place *here = thread->here;
    Place *place = (Place *)PyDict_GetItemWithError(here->below, key);
    if (place != NULL) {
        Py_INCREF(place);
    }
    else {
        if (PyErr_Occurred())
            return NULL;
        Py_INCREF(here);
        PyObject *made = PyObject_CallFunctionObjArgs(self->define, (PyObject *)here, key, NULL);
        Py_DECREF(here);
        if (made == NULL)
            return NULL;
        if (!Py_IS_TYPE(made, PlaceType)) {
            PyErr_Format(PyExc_TypeError, "define gave a %s; a Place is wanted", Py_TYPE(made)->tp_name);
            Py_DECREF(made);
            return NULL;
        }
        place = (Place *)made;
        thread = this_thread(self);
        if (thread == NULL) {
            Py_DECREF(place);
            return NULL;
        }
    }
    Py_INCREF(place);
    Py_SETREF(thread->here, place);
    return place;
}

/* Go to the place above `place`, if it is one that this thread is in. */
static inline int
leave(HotPath *self, Place *place)
{
    Thread *thread = this_thread(self);
    if (thread == NULL)
        return -1;
    Place *inside = thread->here;
    while (inside != NULL && inside != place)
        inside = inside->above;
    if (inside != NULL && inside->above != NULL) {
        Py_INCREF(inside->above);
        Py_SETREF(thread->here, inside->above);
    }
    return 0;
}

static inline int
finish(HotPath *self, Place *place, int64_t start_ns, PyObject *elements, int failed)
{
    int64_t end_ns;
    if (read_clock(self, &end_ns) < 0 || leave(self, place) < 0)
        return -1;
    if (!self->recording)
        return 0;
    return keep(self, failed ? place->node | FLAG_FAILED : place->node, start_ns, end_ns, elements);
}

/* The arguments of a fast call in the order of `names`; those not given stay as they are. */
__attribute__((noinline)) static int
arguments(const char *function, PyObject *const *args, Py_ssize_t count, PyObject *kwnames, const char *const *names,
          Py_ssize_t wanted, Py_ssize_t most, PyObject **found)
{
    if (count > most) {
        PyErr_Format(PyExc_TypeError, "%s() takes %zd arguments, %zd were given", function, most, count);
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++)
        found[i] = args[i];
    Py_ssize_t named = kwnames == NULL ? 0 : PyTuple_GET_SIZE(kwnames);
    for (Py_ssize_t k = 0; k < named; k++) {
        PyObject *name = PyTuple_GET_ITEM(kwnames, k);
        Py_ssize_t at = 0;
        while (at < most && PyUnicode_CompareWithASCIIString(name, names[at]) != 0)
            at++;
        if (at == most || at < count) {
            PyErr_Format(PyExc_TypeError, "%s() got an unexpected or repeated argument %R", function, name);
            return -1;
        }
        found[at] = args[count + k];
    }
    for (Py_ssize_t i = 0; i < wanted; i++)
        if (found[i] == NULL) {
            PyErr_Format(PyExc_TypeError, "%s() misses its argument '%s'", function, names[i]);
            return -1;
        }
    return 0;
}

static PyObject *
start_brick(HotPath *self, PyObject *brick)
{
    if (!self->recording)
        Py_RETURN_NONE;
    Place *place = enter(self, brick);
    if (place == NULL)
        return NULL;
    Timer *timer;
    if (spare_timers.count > 0)
        timer = (Timer *)PyObject_Init(spare_timers.objects[--spare_timers.count], TimerType);
    else if ((timer = PyObject_New(Timer, TimerType)) == NULL) {
        Py_DECREF(place);
        return NULL;
    }
    timer->place = place;
    if (read_clock(self, &timer->start_ns) < 0) {
        Py_DECREF(timer);
        return NULL;
    }
    return (PyObject *)timer;
}

static PyObject *
stop_brick(HotPath *self, PyObject *const *args, Py_ssize_t count, PyObject *kwnames)
{
    static const char *const names[] = {"timer", "elements", "failed"};
    PyObject *found[3] = {NULL, NULL, Py_False};
    if (count == 2 && kwnames == NULL) {
        found[0] = args[0];
        found[1] = args[1];
    }
    else if (arguments("stop_brick", args, count, kwnames, names, 2, 3, found) < 0)
        return NULL;
    if (found[0] == Py_None)
        Py_RETURN_NONE;
    if (!Py_IS_TYPE(found[0], TimerType)) {
        PyErr_Format(PyExc_TypeError, "stop_brick() takes what start_brick() gave, not a %s",
                     Py_TYPE(found[0])->tp_name);
        return NULL;
    }
    int failed = PyObject_IsTrue(found[2]);
    Timer *timer = (Timer *)found[0];
    if (failed < 0 || finish(self, timer->place, timer->start_ns, found[1], failed) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *
new_span(HotPath *self, PyObject *key, PyObject *elements)
{
    Span *span;
    if (spare_spans.count > 0)
        span = (Span *)PyObject_Init(spare_spans.objects[--spare_spans.count], SpanType);
    else if ((span = PyObject_GC_New(Span, SpanType)) == NULL)
        return NULL;
    span->hot_path = (HotPath *)Py_NewRef(self);
    span->key = Py_NewRef(key);
    span->elements = Py_NewRef(elements);
    span->place = NULL;
    PyObject_GC_Track(span);
    return (PyObject *)span;
}

static PyObject *
brick(HotPath *self, PyObject *const *args, Py_ssize_t count, PyObject *kwnames)
{
    static const char *const names[] = {"brick", "elements"};
    PyObject *found[2] = {NULL, one};
    if (count == 2 && kwnames == NULL)
        return new_span(self, args[0], args[1]);
    if (arguments("brick", args, count, kwnames, names, 1, 2, found) < 0)
        return NULL;
    return new_span(self, found[0], found[1]);
}

static PyObject *
layer(HotPath *self, PyObject *index)
{
    PyObject *key = PyTuple_Pack(2, layer_kind, index);
    if (key == NULL)
        return NULL;
    PyObject *span = new_span(self, key, one);
    Py_DECREF(key);
    return span;
}

static PyObject *
switch_on(HotPath *self, PyObject *on)
{
    int recording = PyObject_IsTrue(on);
    if (recording < 0)
        return NULL;
    self->recording = recording;
    Py_RETURN_NONE;
}

static PyObject *
write_own(HotPath *self, PyObject *const *args, Py_ssize_t count)
{
    int64_t numbers[3], elements;
    if (count != 4) {
        PyErr_Format(PyExc_TypeError, "a record takes 4 arguments, %zd were given", count);
        return NULL;
    }
    for (int i = 0; i < 3; i++) {
        numbers[i] = PyLong_AsLongLong(args[i]);
        if (numbers[i] == -1 && PyErr_Occurred())
            return NULL;
    }
    int whole = as_elements(args[3], &elements);
    if (self->ring.buf != NULL) {
        if (whole)
            write_record(self, numbers[0], numbers[1], numbers[2], elements);
        else
            write_record(self, NO_NODE, 0, 0, 0);
    }
    Py_RETURN_NONE;
}

static void
detach(HotPath *self)
{
    self->ring.buf = NULL; /* releasing leaves it as it was */
    PyBuffer_Release(&self->ring);
}

static PyObject *
attach(HotPath *self, PyObject *ring)
{
    if (ring == Py_None) {
        detach(self);
        return Py_NewRef(self->record == NULL ? Py_None : self->record);
    }
    PyObject *memory = PyObject_GetAttrString(ring, "memory");
    if (memory == NULL)
        return NULL;
    Py_buffer found;
    int given = PyObject_GetBuffer(memory, &found, PyBUF_WRITABLE);
    Py_DECREF(memory);
    if (given < 0)
        return NULL;
    int64_t capacity = (found.len - HEADER_BYTES) / RECORD_BYTES;
    if (capacity < 1 || (capacity & (capacity - 1)) || found.len != HEADER_BYTES + capacity * RECORD_BYTES ||
        (uintptr_t)found.buf % sizeof(int64_t) != 0) {
        PyErr_Format(PyExc_ValueError, "%zd bytes of memory are no ring", found.len);
        PyBuffer_Release(&found);
        return NULL;
    }
    detach(self);
    self->ring = found;
    self->wrap = capacity - 1;
    return PyObject_GetAttrString((PyObject *)self, "_write");
}

static int
hot_path_init(HotPath *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"define", "clock_ns", "record", NULL};
    PyObject *define, *clock_ns, *record;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO", names, &define, &clock_ns, &record))
        return -1;
    PyObject *threads = PyObject_CallNoArgs(new_local);
    if (threads == NULL)
        return -1;
    PyObject *root = PyObject_CallFunction((PyObject *)PlaceType, "OiO", Py_None, NO_NODE, Py_None);
    if (root == NULL) {
        Py_DECREF(threads);
        return -1;
    }
    self->serial = ++serials;
    self->recording = 1;
    Py_XSETREF(self->define, Py_NewRef(define));
    Py_XSETREF(self->clock_ns, clock_ns == perf_counter_ns ? NULL : Py_NewRef(clock_ns));
    Py_XSETREF(self->record, Py_NewRef(record));
    Py_XSETREF(self->root, (Place *)root);
    Py_XSETREF(self->threads, threads);
    return 0;
}

static int
hot_path_traverse(HotPath *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->define);
    Py_VISIT(self->clock_ns);
    Py_VISIT(self->record);
    Py_VISIT(self->threads);
    Py_VISIT(self->root);
    /* Not ring.obj: it leads to no cycle, and a memoryview that the collector cleared first cannot be released. */
    return 0;
}

static int
hot_path_clear(HotPath *self)
{
    self->serial = ++serials; /* no thread remembers this one */
    self->recording = 0;
    detach(self);
    Py_CLEAR(self->threads);
    Py_CLEAR(self->root);
    Py_CLEAR(self->define);
    Py_CLEAR(self->clock_ns);
    Py_CLEAR(self->record);
    return 0;
}

static void
hot_path_dealloc(HotPath *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    hot_path_clear(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

#define FAST(function) ((PyCFunction)(void (*)(void))(function))

static PyMethodDef hot_path_methods[] = {
    {"start_brick", (PyCFunction)start_brick, METH_O,
     "start_brick($self, brick, /)\n--\n\n"
     "Start timing `brick` where this thread is: a BrickId, a BrickDefinition, or a name of your own."},
    {"stop_brick", FAST(stop_brick), METH_FASTCALL | METH_KEYWORDS,
     "stop_brick($self, timer, elements, failed=False)\n--\n\n"
     "Record the brick that `timer` timed, with the `elements` it worked on."},
    {"brick", FAST(brick), METH_FASTCALL | METH_KEYWORDS,
     "brick($self, brick, elements=1)\n--\n\n"
     "`with profiler.brick(BrickId.RMS_NORM, elements=4096):` times the block; an exception marks it failed."},
    {"layer", (PyCFunction)layer, METH_O,
     "layer($self, index, /)\n--\n\n`with profiler.layer(3):` makes what runs inside part of layer 3."},
    {"switch", (PyCFunction)switch_on, METH_O, "switch($self, on, /)\n--\n\nRecord from now on, or do not."},
    {"attach", (PyCFunction)attach, METH_O,
     "attach($self, ring, /)\n--\n\n"
     "Write into `ring` from now on; gives what writes a record of its own beside this hot path."},
    {"_write", FAST(write_own), METH_FASTCALL, "_write($self, tag, start_ns, end_ns, elements, /)\n--\n\n"},
    {0},
};

static PyObject *
get_here(HotPath *self, void *Py_UNUSED(closure))
{
    Thread *thread = this_thread(self);
    return thread == NULL ? NULL : Py_NewRef(thread->here);
}

static PyObject *
get_recording(HotPath *self, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(self->recording);
}

static PyGetSetDef hot_path_properties[] = {
    {"here", (getter)get_here, NULL,
     "Where in the graph the calling thread is: what it starts next is started here.", NULL},
    {"recording", (getter)get_recording, NULL, "Whether what is started now is timed.", NULL},
    {0},
};

static PyType_Slot hot_path_slots[] = {
    {Py_tp_doc, "Times what is started and stopped, and writes each as one record: the base of BrickProfiler."},
    {Py_tp_init, hot_path_init},
    {Py_tp_traverse, hot_path_traverse},
    {Py_tp_clear, hot_path_clear},
    {Py_tp_dealloc, hot_path_dealloc},
    {Py_tp_methods, hot_path_methods},
    {Py_tp_getset, hot_path_properties},
    {0},
};

static PyType_Spec hot_path_spec = {
    .name = "cbtop.profiler._hot_path.HotPath",
    .basicsize = sizeof(HotPath),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
    .slots = hot_path_slots,
};

/* ---- span ---- */

static PyObject *
span_enter(Span *self, PyObject *Py_UNUSED(ignored))
{
    Place *place = NULL;
    if (self->hot_path->recording) {
        place = enter(self->hot_path, self->key);
        if (place == NULL)
            return NULL;
    }
    Py_XSETREF(self->place, place);
    if (place != NULL && read_clock(self->hot_path, &self->start_ns) < 0)
        return NULL;
    return Py_NewRef(self);
}

static PyObject *
span_exit(Span *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 3) {
        PyErr_Format(PyExc_TypeError, "__exit__() takes 3 arguments, %zd were given", count);
        return NULL;
    }
    if (self->place != NULL) {
        Place *place = (Place *)Py_NewRef(self->place);
        PyObject *elements = Py_NewRef(self->elements == NULL ? Py_None : self->elements);
        int done = finish(self->hot_path, place, self->start_ns, elements, args[0] != Py_None);
        Py_DECREF(elements);
        Py_DECREF(place);
        if (done < 0)
            return NULL;
    }
    Py_RETURN_NONE;
}

static int
span_traverse(Span *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->hot_path);
    Py_VISIT(self->key);
    Py_VISIT(self->elements);
    Py_VISIT(self->place);
    return 0;
}

/* No tp_clear: a cycle through a span is broken at the hot path. */
static void
span_dealloc(Span *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    Py_CLEAR(self->place);
    Py_CLEAR(self->elements);
    Py_CLEAR(self->key);
    Py_CLEAR(self->hot_path);
    if (spare_spans.count < SPARE)
        spare_spans.objects[spare_spans.count++] = self;
    else
        PyObject_GC_Del(self);
    Py_DECREF(type);
}

static PyMethodDef span_methods[] = {
    {"__enter__", (PyCFunction)span_enter, METH_NOARGS, NULL},
    {"__exit__", FAST(span_exit), METH_FASTCALL, NULL},
    {0},
};

static PyMemberDef span_members[] = {
    {"elements", T_OBJECT_EX, offsetof(Span, elements), 0, "May be set inside the block, where it is known only then."},
    {0},
};

static PyType_Slot span_slots[] = {
    {Py_tp_doc, "The `with` form of a brick, a layer or a step."},
    {Py_tp_traverse, span_traverse},
    {Py_tp_dealloc, span_dealloc},
    {Py_tp_methods, span_methods},
    {Py_tp_members, span_members},
    {0},
};

static PyType_Spec span_spec = {
    .name = "cbtop.profiler._hot_path.Span",
    .basicsize = sizeof(Span),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = span_slots,
};

/* ---- module ---- */

static PyObject *
attribute_of(const char *module, const char *name)
{
    PyObject *found = PyImport_ImportModule(module);
    if (found == NULL)
        return NULL;
    PyObject *value = PyObject_GetAttrString(found, name);
    Py_DECREF(found);
    return value;
}

static PyTypeObject *
add_type(PyObject *module, PyType_Spec *spec)
{
    PyObject *type = PyType_FromSpec(spec);
    if (type != NULL && PyModule_AddType(module, (PyTypeObject *)type) < 0)
        Py_CLEAR(type);
    return (PyTypeObject *)type;
}

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "cbtop.profiler._hot_path",
    .m_doc = "What runs at every brick, compiled; hot_path.py says what it does.",
    .m_size = -1,
};

PyMODINIT_FUNC
PyInit__hot_path(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL)
        return NULL;
    PyObject *node_kind = attribute_of("cbtop.protocol.vocabulary", "NodeKind");
    PyObject *python = PyUnicode_FromString("compiled");
    if (node_kind == NULL || python == NULL || (layer_kind = PyObject_GetAttrString(node_kind, "LAYER")) == NULL ||
        (new_local = attribute_of("threading", "local")) == NULL ||
        (perf_counter_ns = attribute_of("time", "perf_counter_ns")) == NULL ||
        (one = PyLong_FromLong(1)) == NULL || (name_thread = PyUnicode_InternFromString("thread")) == NULL ||
        (PlaceType = add_type(module, &place_spec)) == NULL ||
        (ThreadType = add_type(module, &thread_spec)) == NULL ||
        (TimerType = add_type(module, &timer_spec)) == NULL ||
        (HotPathType = add_type(module, &hot_path_spec)) == NULL ||
        (SpanType = add_type(module, &span_spec)) == NULL ||
        PyObject_SetAttrString((PyObject *)HotPathType, "place", (PyObject *)PlaceType) < 0 ||
        PyObject_SetAttrString((PyObject *)HotPathType, "implementation", python) < 0)
        Py_CLEAR(module);
    Py_XDECREF(node_kind);
    Py_XDECREF(python);
    return module;
}
