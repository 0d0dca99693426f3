/* What runs at every brick, compiled: the same names, the same records and the same tests as hot_path.py.

   Rules
   - Start, stop, the `with` form and the layer's scope; nothing else. A new place in the graph and a record without
     a ring are calls back into Python.
   - The GIL is held throughout. A thread reserves a record by one step of the ring's cursor, writes it, and stores
     its tag last; nothing of Python runs between these. So a record is whole or does not count.
   - A brick that one thread starts and another stops is recorded; it is the starting thread that moves in the graph.
   - Where a brick ends, its kernel has filled the caches: in a model, most of the price is lines that are no longer
     there. So a place remembers which one came after it, which saves looking it up; what every brick needs stands
     together; and what will be written is fetched before the clock is read.
   - What a thread is in stands in its slot of the ring's header, for whoever looks after this process was killed.
*/

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdatomic.h>
#include <stdint.h>
#include <structmember.h>
#include <time.h>
#include <unistd.h>

#ifndef __linux__
#error "time.perf_counter_ns is CLOCK_MONOTONIC on Linux alone; elsewhere the Python hot path is used"
#endif

/* The layout of protocol/ring.py, version 2. */
enum { CURSOR_WORD = 16, HEADER_BYTES = 4096, RECORD_BYTES = 32, RECORD_WORDS = 4, SEQUENCE_SHIFT = 32 };
enum { FIRST_SLOT_WORD = 24, SLOT_WORDS = 8, SLOTS = 61, SLOT_THREAD = 0, SLOT_NODE = 1, SLOT_START = 2 };
#define SEQUENCE_MASK ((INT64_C(1) << 31) - 1)
#define FLAG_FAILED (INT64_C(1) << 24)
#define TAG_MASK INT64_C(0xffffffff)
#define NO_NODE 0

#define LIKELY(condition) __builtin_expect(!!(condition), 1)
#define UNLIKELY(condition) __builtin_expect(!!(condition), 0)
/* Waits for nothing: the line is on its way while the clock is read. */
#define FETCH_TO_WRITE(address) __builtin_prefetch((address), 1)

/* A place in the graph: its node, the place above, and the places below by what was started there. */
typedef struct Place {
    PyObject_HEAD
    PyObject *key;
    struct Place *above;
    struct Place *after; /* what was started next to it once it had ended, the last time it was looked up; may be NULL */
    int64_t node;
    int64_t above_node; /* NO_NODE at the root */
    PyObject *below;
} Place;

struct HotPath;

/* Where in the graph one thread is. */
typedef struct {
    PyObject_HEAD
    Place *here; /* the thread holds this one and all above it, so that moving touches only the one it moves into */
    Place *left; /* the one it was in before, if it has started nothing since; may be NULL */
    int64_t *slot;          /* says the same in the ring; `nowhere` where there is none */
    struct HotPath *holder; /* in whose `holders` this thread stands; NULL without a slot. Borrowed */
    uint64_t ring_serial;   /* of the ring in which a slot was last asked for */
} Thread;

/* A running brick. Not collected: neither a place nor a thread holds timers. */
typedef struct {
    PyObject_HEAD
    Thread *thread;
    Place *place;
    int64_t start_ns;
} Timer;

typedef struct HotPath {
    PyObject_HEAD
    uint64_t serial; /* never given twice: what a thread remembers by it cannot be another's */
    uint64_t ring_serial;
    PyObject *clock_ns; /* NULL: the monotonic clock, read here */
    int64_t *words;     /* the ring; NULL while none is attached */
    int64_t wrap;       /* its capacity - 1 */
    int recording;
    pid_t pid; /* that of the process that attached the ring: a forked child writes nothing into its parent's */
    PyObject *define;
    PyObject *record;
    PyObject *threads; /* a threading.local: each thread's Thread, as `thread` */
    Place *root;
    Py_buffer ring;
    Thread *holders[SLOTS]; /* whose each slot of the ring is; borrowed: a thread takes itself out */
} HotPath;

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    HotPath *hot_path;
    PyObject *key;
    PyObject *elements;
    Thread *thread; /* NULL, as is `place`, before it is entered and while nothing is recorded */
    Place *place;
    int64_t start_ns;
} Span;

/* See span_call. */
typedef struct {
    PyObject_HEAD
    PyObject *unbound;
} SpanMethod;

static PyTypeObject *PlaceType, *ThreadType, *TimerType, *HotPathType, *SpanType, *SpanMethodType;
static PyObject *new_local, *perf_counter_ns, *layer_kind, *one, *name_thread;
static uint64_t serials;
static int64_t nowhere[SLOT_WORDS]; /* the slot of threads that have none: written, never read */

/* The Thread that this thread used last, and whose hot path it belongs to. The model saves a call at each look; where
   a loader has no room for it, the import fails and the Python hot path is used. */
static _Thread_local struct {
    uint64_t serial;
    Thread *thread;
} last __attribute__((tls_model("initial-exec"))) = {UINT64_MAX, NULL};

/* Timers and spans that were let go, to be used again: a third of the cost of making one. They keep their reference
   to their type. */
enum { SPARE = 16 };
typedef struct {
    int count;
    PyObject *objects[SPARE];
} Spares;
static Spares spare_timers, spare_spans;

static inline PyObject *
use_again(Spares *spares)
{
    if (spares->count == 0)
        return NULL;
    PyObject *object = spares->objects[--spares->count];
    Py_SET_REFCNT(object, 1);
    return object;
}

static inline int
is_spared(Spares *spares, void *object)
{
    if (spares->count == SPARE)
        return 0;
    spares->objects[spares->count++] = object;
    return 1;
}

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
    self->above_node = self->above == NULL ? NO_NODE : self->above->node;
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
    Py_VISIT(self->after);
    return 0;
}

static int
place_clear(Place *self)
{
    /* `below` stays: a place that someone can still reach must be one to look into. So does `above`: threads go by it,
       and without those below no cycle leads through it. */
    if (self->below != NULL)
        PyDict_Clear(self->below);
    Py_CLEAR(self->key);
    Py_CLEAR(self->after);
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
    Py_CLEAR(self->after);
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
    for (Place *held = self->here; held != NULL; held = held->above)
        Py_VISIT(held);
    Py_VISIT(self->left);
    return 0;
}

static inline void
say_where(Thread *thread, int64_t node, int64_t start_ns)
{
    /* A reader must never see a node with another's start: in between there is none. */
    _Atomic int64_t *slot = (_Atomic int64_t *)thread->slot;
    atomic_store_explicit(&slot[SLOT_NODE], NO_NODE, memory_order_relaxed);
    atomic_store_explicit(&slot[SLOT_START], start_ns, memory_order_release);
    atomic_store_explicit(&slot[SLOT_NODE], node, memory_order_release);
}

/* Give this thread a slot of the ring, if one is free. */
__attribute__((noinline, cold)) static void
take_slot(HotPath *self, Thread *thread)
{
    thread->ring_serial = self->ring_serial;
    if (self->words == NULL)
        return;
    for (int i = 0; i < SLOTS; i++) {
        int64_t *slot = self->words + FIRST_SLOT_WORD + i * SLOT_WORDS;
        if (slot[SLOT_THREAD] == 0) { /* several hot paths may write into one ring */
            thread->slot = slot;
            thread->holder = self;
            self->holders[i] = thread;
            say_where(thread, NO_NODE, 0);
            slot[SLOT_THREAD] = (int64_t)PyThread_get_thread_native_id();
            return;
        }
    }
}

static void
give_slot_back(Thread *thread)
{
    HotPath *holder = thread->holder;
    if (holder == NULL)
        return;
    int64_t *slot = thread->slot;
    if (holder->pid == getpid()) {
        slot[SLOT_THREAD] = 0;
        say_where(thread, NO_NODE, 0);
    }
    holder->holders[(slot - holder->words - FIRST_SLOT_WORD) / SLOT_WORDS] = NULL;
    thread->holder = NULL;
    thread->slot = nowhere;
}

/* Go to `above`, a place that the thread is in; to none when the thread itself goes. */
static inline void
go_up(Thread *thread, Place *above)
{
    Place *place = thread->here;
    thread->here = above;
    while (place != above) {
        Place *next = place->above;
        Py_DECREF(place);
        place = next;
    }
}

/* Go to a place anywhere in the graph. */
__attribute__((noinline, cold)) static void
go_to(Thread *thread, Place *place)
{
    for (Place *held = place; held != NULL; held = held->above)
        Py_INCREF(held);
    Place *left = thread->here;
    thread->here = place;
    while (left != NULL) {
        Place *next = left->above;
        Py_DECREF(left);
        left = next;
    }
}

static void
thread_dealloc(Thread *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    give_slot_back(self);
    go_up(self, NULL);
    Py_CLEAR(self->left);
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
        thread->slot = nowhere;
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

static PyObject *span_call(PyObject *self, PyObject *const *args, size_t count, PyObject *kwnames);

/* ---- timer ---- */

static void
timer_dealloc(Timer *self)
{
    PyTypeObject *type = Py_TYPE(self);
    Py_CLEAR(self->place);
    Py_CLEAR(self->thread);
    if (is_spared(&spare_timers, self))
        return;
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

/* 1: `elements` is a 64-bit integer; 0: it is none; -1: asking raised what is no Exception, such as an interrupt. */
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
        if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception))
            return -1;
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
    int64_t *words = self->words;
    /* No locked step: whoever writes into this ring holds the GIL. */
    int64_t number = words[CURSOR_WORD];
    atomic_store_explicit((_Atomic int64_t *)&words[CURSOR_WORD], number + 1, memory_order_release);
    int64_t *record = words + HEADER_BYTES / 8 + (number & self->wrap) * RECORD_WORDS;
    record[0] = start_ns;
    record[1] = end_ns;
    record[2] = elements;
    tag = (tag & TAG_MASK) | ((number + 1) & SEQUENCE_MASK) << SEQUENCE_SHIFT;
    atomic_store_explicit((_Atomic int64_t *)&record[3], tag, memory_order_release);
}

/* Write a record into the ring. Converting comes first: it may run Python. One without elements keeps the count. */
static inline int
write_whole(HotPath *self, int64_t tag, int64_t start_ns, int64_t end_ns, PyObject *elements)
{
    int64_t value;
    int whole = as_elements(elements, &value);
    if (self->words != NULL) {
        if (LIKELY(whole > 0))
            write_record(self, tag, start_ns, end_ns, value);
        else
            write_record(self, NO_NODE, 0, 0, 0);
    }
    return whole < 0 ? -1 : 0;
}

/* The place of `key` below where this thread is, defined where nobody has started it there yet. A new reference. */
__attribute__((noinline)) static Place *
look_up(HotPath *self, Thread *thread, PyObject *key)
{
    Place *here = thread->here;
    Place *place = (Place *)PyDict_GetItemWithError(here->below, key);
    if (place == NULL) {
        if (PyErr_Occurred())
            return NULL;
        Py_INCREF(here);
        place = (Place *)PyObject_CallFunctionObjArgs(self->define, (PyObject *)here, key, NULL);
        Py_DECREF(here);
        if (place == NULL)
            return NULL;
        if (!Py_IS_TYPE(place, PlaceType)) {
            PyErr_Format(PyExc_TypeError, "define gave a %s; a Place is wanted", Py_TYPE(place)->tp_name);
            Py_DECREF(place);
            return NULL;
        }
    }
    else
        Py_INCREF(place);
    Place *left = thread->left;
    if (left != NULL && left->above == place->above && place->node != NO_NODE) /* such a place is not kept */
        Py_XSETREF(left->after, (Place *)Py_NewRef(place));
    return place;
}

/* Go to the place of `key` below where this thread is, and time it from now on. Gives two new references. */
static inline int
begin(HotPath *self, PyObject *key, Thread **thread_found, Place **place_found, int64_t *start_ns)
{
    Thread *thread = this_thread(self);
    if (thread == NULL)
        return -1;
    FETCH_TO_WRITE(thread->slot);
    Py_INCREF(thread);
    Place *place = thread->left == NULL ? NULL : thread->left->after;
    if (place != NULL && place->key == key && place->above == thread->here)
        Py_INCREF(place);
    else if ((place = look_up(self, thread, key)) == NULL) {
        Py_DECREF(thread);
        return -1;
    }
    Py_CLEAR(thread->left);
    if (LIKELY(place->above == thread->here)) {
        Py_INCREF(place);
        thread->here = place;
    }
    else
        go_to(thread, place);
    if (UNLIKELY(thread->ring_serial != self->ring_serial))
        take_slot(self, thread);
    if (read_clock(self, start_ns) < 0) {
        Py_DECREF(place);
        Py_DECREF(thread);
        return -1;
    }
    say_where(thread, place->node, *start_ns);
    *thread_found = thread;
    *place_found = place;
    return 0;
}

/* Go to the place above `place`, if it is one that the thread is in. */
static inline void
leave(Thread *thread, Place *place)
{
    Place *inside = thread->here;
    while (inside != NULL && inside != place)
        inside = inside->above;
    if (inside == NULL || inside->above == NULL)
        return;
    say_where(thread, place->above_node, 0);
    go_up(thread, place->above);
    Py_INCREF(place);
    Py_XSETREF(thread->left, place);
}

static inline int
finish(HotPath *self, Thread *thread, Place *place, int64_t start_ns, PyObject *elements, int failed)
{
    int64_t end_ns;
    FETCH_TO_WRITE(thread->slot);
    if (self->words != NULL)
        FETCH_TO_WRITE(&self->words[CURSOR_WORD]);
    if (read_clock(self, &end_ns) < 0)
        return -1;
    leave(thread, place);
    if (!self->recording)
        return 0;
    int64_t tag = failed ? place->node | FLAG_FAILED : place->node;
    if (LIKELY(self->words != NULL))
        return write_whole(self, tag, start_ns, end_ns, elements);
    PyObject *done = PyObject_CallFunction(self->record, "LLLO", (long long)tag, (long long)start_ns,
                                           (long long)end_ns, elements);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
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
    Timer *timer = (Timer *)use_again(&spare_timers);
    if (timer == NULL && (timer = PyObject_New(Timer, TimerType)) == NULL)
        return NULL;
    timer->thread = NULL;
    timer->place = NULL;
    if (begin(self, brick, &timer->thread, &timer->place, &timer->start_ns) < 0) {
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
    int failed = found[2] == Py_False ? 0 : PyObject_IsTrue(found[2]);
    Timer *timer = (Timer *)found[0];
    if (failed < 0 || finish(self, timer->thread, timer->place, timer->start_ns, found[1], failed) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *
new_span(HotPath *self, PyObject *key, PyObject *elements)
{
    Span *span = (Span *)use_again(&spare_spans);
    if (span == NULL && (span = PyObject_GC_New(Span, SpanType)) == NULL)
        return NULL;
    span->call = span_call;
    span->hot_path = (HotPath *)Py_NewRef(self);
    span->key = Py_NewRef(key);
    span->elements = Py_NewRef(elements);
    span->thread = NULL;
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
    int64_t numbers[3];
    if (count != 4) {
        PyErr_Format(PyExc_TypeError, "a record takes 4 arguments, %zd were given", count);
        return NULL;
    }
    for (int i = 0; i < 3; i++) {
        numbers[i] = PyLong_AsLongLong(args[i]);
        if (numbers[i] == -1 && PyErr_Occurred())
            return NULL;
    }
    if (write_whole(self, numbers[0], numbers[1], numbers[2], args[3]) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static void
detach(HotPath *self)
{
    for (int i = 0; i < SLOTS; i++)
        if (self->holders[i] != NULL)
            give_slot_back(self->holders[i]);
    self->ring_serial = ++serials;
    self->words = NULL;
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
    self->words = found.buf;
    self->wrap = capacity - 1;
    self->pid = getpid();
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
    Thread *thread = NULL;
    Place *place = NULL;
    if (self->hot_path->recording && begin(self->hot_path, self->key, &thread, &place, &self->start_ns) < 0)
        return NULL;
    Py_XSETREF(self->place, place);
    Py_XSETREF(self->thread, thread);
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
        /* What runs while the elements are asked for may enter this span again. */
        Thread *thread = (Thread *)Py_NewRef(self->thread);
        Place *place = (Place *)Py_NewRef(self->place);
        PyObject *elements = Py_NewRef(self->elements == NULL ? Py_None : self->elements);
        int done = finish(self->hot_path, thread, place, self->start_ns, elements, args[0] != Py_None);
        Py_DECREF(elements);
        Py_DECREF(place);
        Py_DECREF(thread);
        if (done < 0)
            return NULL;
    }
    Py_RETURN_NONE;
}

/* What stands for __enter__ and __exit__: a `with` statement binds both to the span, and makes an object for each.
   Bound, these two are the span itself, which may be called; that saves a quarter of the `with` form. */
static PyObject *
span_call(PyObject *self, PyObject *const *args, size_t count, PyObject *kwnames)
{
    Py_ssize_t given = PyVectorcall_NARGS(count);
    if (kwnames != NULL && PyTuple_GET_SIZE(kwnames) > 0) {
        PyErr_SetString(PyExc_TypeError, "neither __enter__() nor __exit__() takes keyword arguments");
        return NULL;
    }
    return given == 0 ? span_enter((Span *)self, NULL) : span_exit((Span *)self, args, given);
}

static PyObject *
span_method_get(SpanMethod *self, PyObject *span, PyObject *Py_UNUSED(type))
{
    return Py_NewRef(span == NULL ? self->unbound : span);
}

static void
span_method_dealloc(SpanMethod *self)
{
    PyTypeObject *type = Py_TYPE(self);
    Py_CLEAR(self->unbound);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static PyType_Slot span_method_slots[] = {
    {Py_tp_doc, "__enter__ or __exit__ of a span."},
    {Py_tp_descr_get, span_method_get},
    {Py_tp_dealloc, span_method_dealloc},
    {0},
};

static PyType_Spec span_method_spec = {
    .name = "cbtop.profiler._hot_path.SpanMethod",
    .basicsize = sizeof(SpanMethod),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = span_method_slots,
};

/* Put a SpanMethod in the place of the span's method called `name`. */
static int
bind_to_itself(const char *name)
{
    PyObject *unbound = PyObject_GetAttrString((PyObject *)SpanType, name);
    SpanMethod *method = unbound == NULL ? NULL : (SpanMethod *)SpanMethodType->tp_alloc(SpanMethodType, 0);
    if (method == NULL) {
        Py_XDECREF(unbound);
        return -1;
    }
    method->unbound = unbound;
    int done = PyObject_SetAttrString((PyObject *)SpanType, name, (PyObject *)method);
    Py_DECREF(method);
    return done;
}

static int
span_traverse(Span *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->hot_path);
    Py_VISIT(self->key);
    Py_VISIT(self->elements);
    Py_VISIT(self->thread);
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
    Py_CLEAR(self->thread);
    Py_CLEAR(self->elements);
    Py_CLEAR(self->key);
    Py_CLEAR(self->hot_path);
    if (is_spared(&spare_spans, self))
        return;
    PyObject_GC_Del(self);
    Py_DECREF(type);
}

static PyMethodDef span_methods[] = {
    {"__enter__", (PyCFunction)span_enter, METH_NOARGS, NULL},
    {"__exit__", FAST(span_exit), METH_FASTCALL, NULL},
    {0},
};

static PyMemberDef span_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Span, call), READONLY, NULL},
    {"elements", T_OBJECT_EX, offsetof(Span, elements), 0, "May be set inside the block, where it is known only then."},
    {0},
};

static PyType_Slot span_slots[] = {
    {Py_tp_doc, "The `with` form of a brick, a layer or a step."},
    {Py_tp_traverse, span_traverse},
    {Py_tp_dealloc, span_dealloc},
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_methods, span_methods},
    {Py_tp_members, span_members},
    {0},
};

static PyType_Spec span_spec = {
    .name = "cbtop.profiler._hot_path.Span",
    .basicsize = sizeof(Span),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION,
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
        (SpanMethodType = add_type(module, &span_method_spec)) == NULL || bind_to_itself("__enter__") < 0 ||
        bind_to_itself("__exit__") < 0 ||
        PyObject_SetAttrString((PyObject *)HotPathType, "place", (PyObject *)PlaceType) < 0 ||
        PyObject_SetAttrString((PyObject *)HotPathType, "implementation", python) < 0)
        Py_CLEAR(module);
    Py_XDECREF(node_kind);
    Py_XDECREF(python);
    return module;
}
