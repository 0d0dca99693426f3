/* The code that runs at every brick, compiled, with the same names, records and tests as hot_path.py.

   Rules
   - This file contains start, stop, the `with` form, the layer's scope, the timed calls of a host's modules and
     functions, the start and end of a model's steps (_model_steps.h), and calls of
     libraries (_library_calls.h). Counters of the processor are in _counters.h. All other cases call back into Python: a
     new scope, a new position, a record without a ring, every error.
   - The GIL is held throughout. A thread reserves a record by incrementing the ring's cursor. It writes the record,
     and stores the record's tag last, with release order. No Python code runs meanwhile. So a record is either
     complete or does not count.
   - Python finds the caller's position (positions.py). C code calls Python again for this if the thread has switched
     contexts since the last call, or if a position was freed. (Each task and each greenlet runs in a context of its
     own.)
   - Only a wrong argument or an interrupt (an exception that is not an Exception) is raised into the host.
   - If one thread starts a brick and another stops it, the brick is recorded, and the position of the starting thread
     moves.
   - In a model, most of the cost is cache misses, because each brick's kernel fills the caches with its own data. So
     each scope stores which scope followed it last time, and the call that started that scope. This saves a look-up.
     At the end of a brick, the cache lines for the next brick are prefetched. Data that every brick needs is stored
     together. Memory to be written is prefetched before the clock is read. References that a module's replacement
     holds are borrowed, not counted.
   - The current node of each position is also in the ring's header, so that it can be read after this process was
     killed.
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
enum { FIRST_SLOT_WORD = 24, SLOT_WORDS = 8, SLOTS = 61, SLOT_THREAD = 0, SLOT_NODE = 1, SLOT_START = 2, SLOT_SIZE = 3 };
enum { SLOT_PLAIN = 4, SLOT_STATE = 5 }; /* only for the sampler of the same process, see _cpu_sampler.c */
#define SEQUENCE_MASK ((INT64_C(1) << 31) - 1)
#define FLAG_FAILED (INT64_C(1) << 24)
#define FLAG_LOOSE (INT64_C(5) << 25) /* the call was stopped twice, out of order or late */
#define FLAG_AMOUNTS (INT64_C(1) << 27)
#define FLAG_PLAIN (FLAG_AMOUNTS | INT64_C(1) << 28) /* the record of a step that is timed as a whole */
#define UNKNOWN_AMOUNT INT64_C(-1)
#define MOST_AMOUNT ((INT64_C(1) << 31) - 1)
#define TAG_MASK INT64_C(0xffffffff)
#define FLAG_UNCOUNTED (INT64_C(1) << 26)
#define NO_NODE 0
#define HELD (-1) /* in place of a node, for records that wait until their step has a name */
enum { MAX_HELD = 1 << 16 };

#define LIKELY(condition) __builtin_expect(!!(condition), 1)
#define UNLIKELY(condition) __builtin_expect(!!(condition), 0)
/* Fetch a cache line without waiting for it. It arrives while the clock is read. */
#define FETCH_TO_WRITE(address) __builtin_prefetch((address), 1)
/* Fetch the cache lines of an object of up to 112 bytes, at any alignment. */
#define FETCH_OBJECT(object) (FETCH_TO_WRITE(object), FETCH_TO_WRITE((const char *)(object) + 64))

/* A place in the graph: its node, its parent scope, and its child scopes by key. */
typedef struct Scope {
    PyObject_HEAD
    PyObject *key;
    struct Scope *parent;
    /* The scope of the same parent that followed this one last time. May be NULL. */
    struct Scope *next;
    const void *call_after; /* the call that started `next`; used only to prefetch; may be freed or NULL */
    const void *module_after; /* address of that call's reference to its module, only to prefetch; may be NULL */
    int64_t node;
    int64_t parent_node; /* NO_NODE at the root */
    PyObject *children;
    PyObject *work; /* computes the FLOP and bytes of a call from its elements; NULL if they are linear */
} Scope;

struct HotPath;

/* The current place of one thread, task or greenlet in the graph, and the settings of its step. */
typedef struct Position {
    PyObject_HEAD
    Scope *scope; /* holds references to this scope and to all scopes around it */
    Scope *left;  /* the scope that the position left last, if no scope has started since; may be NULL */
    int64_t *slot;          /* the slot in the ring's header that shows this place; `nowhere` if there is none */
    struct HotPath *holder; /* borrowed: the path that has this position in its `holders`; NULL without a slot */
    uint64_t ring_serial;   /* serial of the ring for which a slot was last requested */
    int64_t lane;           /* flags of every record, which distinguish steps that run at the same time */
    PyObject *step;         /* the innermost step around this place; NULL outside of steps */
    PyObject *held;         /* list of the records of a step without a name yet; else NULL */
    PyObject *unit;         /* other data of the same thread, task or greenlet; may be NULL */
    PyObject *weak_references;
    char recording; /* 0 in a step that is not sampled */
} Position;

/* A running brick. The garbage collector need not track it, because no scope or position refers to it.

   It has 40 bytes: 16 of every object of CPython, and 8 for each field. The predecessor promised 32, without such 16
   bytes. The position is needed for a timer that another thread or task stops. */
typedef struct {
    PyObject_HEAD
    Position *position;
    Scope *scope;
    int64_t start_ns;
} Timer;

typedef struct HotPath {
    PyObject_HEAD
    uint64_t ring_serial;
    PyObject *clock_ns; /* the clock; NULL for the monotonic clock, which is read here */
    int64_t *words;     /* the ring; NULL while none is attached */
    int64_t wrap;       /* capacity of the ring - 1 */
    int recording;
    int64_t forked_ns; /* calls that began before this time belong to the parent process */
    pid_t pid; /* the process that attached the ring; a forked child does not write into this ring */
    PyObject *define; /* `define` and the fields after it: see Callbacks in hot_path.py */
    PyObject *record;
    PyObject *uncounted;
    PyObject *amounts;
    PyObject *give_up;
    PyObject *find; /* returns the caller's position */
    Scope *root;
    Py_buffer ring;
    struct Counting *counting; /* the counters of bricks; NULL unless they are counted */
    PyObject *weak_references;
    Position *holders[SLOTS]; /* borrowed: the position of each slot; a freed position removes itself */
} HotPath;

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    HotPath *hot_path;
    PyObject *key;
    PyObject *elements;
    Position *position; /* NULL, like `scope`, until the span is entered, and while recording is off */
    Scope *scope;
    int64_t start_ns;
} Span;

/* See span_call. */
typedef struct {
    PyObject_HEAD
    PyObject *unbound;
} SpanMethod;

static PyTypeObject *ScopeType, *PositionType, *TimerType, *HotPathType, *SpanType, *SpanMethodType;
static PyObject *finder, *perf_counter_ns, *layer_kind, *one, *numel, *call_impl, *getattribute, *model_of_step, *name_of_key;
static PyObject *before_name, *after_name; /* methods of GuardedCall */
static uint64_t serials;     /* the number of rings so far; a serial is never reused */
static uint64_t generation;  /* incremented whenever a position or a hot path is freed */
/* The path on which a model was last called, borrowed. It is used to find the unit of a thread, because every path
   leads to the thread's position. */
static HotPath *path_of_units;
static int64_t nowhere[SLOT_WORDS]; /* the slot of all positions that have no slot of their own */

/* The position that this thread used last, with the state of the thread at that time. It still exists if
   `generation` is unchanged, and is still the caller's if the thread has not switched contexts. The TLS model
   saves a call at each access. If the loader has no room for such a variable, the import fails and the Python hot
   path is used. */
static _Thread_local struct {
    HotPath *hot_path;
    uint64_t thread_state; /* a C thread may have several thread states, one after the other */
    uint64_t context_version;
    uint64_t generation;
    Position *position;
} last __attribute__((tls_model("initial-exec"))) = {NULL, 0, 0, 0, NULL};

/* Maximum number of freed timers and freed spans that are kept. Reuse saves a third of the cost of making one.
   Freed objects keep the reference to their type. */
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

/* ---- scope ---- */

static PyObject *
scope_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"key", "node", "parent", "work", NULL};
    PyObject *key, *parent, *work = Py_None;
    long long node;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OLO|O", names, &key, &node, &parent, &work))
        return NULL;
    if (parent != Py_None && !PyObject_TypeCheck(parent, ScopeType)) {
        PyErr_Format(PyExc_TypeError, "parent is a %s; a Scope or None is wanted", Py_TYPE(parent)->tp_name);
        return NULL;
    }
    Scope *self = (Scope *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->key = Py_NewRef(key);
    self->parent = parent == Py_None ? NULL : (Scope *)Py_NewRef(parent);
    self->node = node;
    self->parent_node = self->parent == NULL ? NO_NODE : self->parent->node;
    self->work = work == Py_None ? NULL : Py_NewRef(work);
    self->children = PyDict_New();
    if (self->children == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static int
scope_traverse(Scope *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->key);
    Py_VISIT(self->children);
    Py_VISIT(self->parent);
    Py_VISIT(self->next);
    Py_VISIT(self->work);
    return 0;
}

static int
scope_clear(Scope *self)
{
    /* Empty the dict `children`, but do not free it, because code that still reaches this scope reads it. Do not
       clear `parent` either, because positions follow it. Without children, no reference cycle leads through
       `parent`. */
    if (self->children != NULL)
        PyDict_Clear(self->children);
    Py_CLEAR(self->key);
    Py_CLEAR(self->next);
    Py_CLEAR(self->work);
    return 0;
}

static void
scope_dealloc(Scope *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    Py_TRASHCAN_BEGIN(self, scope_dealloc)
    Py_CLEAR(self->key);
    Py_CLEAR(self->children);
    Py_CLEAR(self->parent);
    Py_CLEAR(self->next);
    Py_CLEAR(self->work);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
    Py_TRASHCAN_END
}

static PyMemberDef scope_members[] = {
    {"key", T_OBJECT, offsetof(Scope, key), READONLY, "What was started here."},
    {"node", T_LONGLONG, offsetof(Scope, node), READONLY, "The id of its node."},
    {"parent", T_OBJECT, offsetof(Scope, parent), READONLY, "The scope it lies in; None for the root."},
    {"children", T_OBJECT, offsetof(Scope, children), READONLY, "The scopes in it, by what was started there."},
    {"work", T_OBJECT, offsetof(Scope, work), READONLY, "The FLOP and bytes of a call by its elements, or None."},
    {0},
};

static PyType_Slot scope_slots[] = {
    {Py_tp_doc, "A place in the graph: its node, the scope it lies in, and those in it by what was started there."},
    {Py_tp_new, scope_new},
    {Py_tp_traverse, scope_traverse},
    {Py_tp_clear, scope_clear},
    {Py_tp_dealloc, scope_dealloc},
    {Py_tp_members, scope_members},
    {0},
};

static PyType_Spec scope_spec = {
    .name = "cbtop.profiler._hot_path.Scope",
    .basicsize = sizeof(Scope),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = scope_slots,
};

/* ---- position ---- */

static int
position_traverse(Position *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    for (Scope *held = self->scope; held != NULL; held = held->parent)
        Py_VISIT(held);
    Py_VISIT(self->left);
    Py_VISIT(self->step);
    Py_VISIT(self->held);
    Py_VISIT(self->unit);
    return 0;
}

static inline void
say_where(Position *position, int64_t node, int64_t start_ns)
{
    /* A reader must never see a node together with the start time of a different node. So the node is 0 while the
       start time changes. */
    _Atomic int64_t *slot = (_Atomic int64_t *)position->slot;
    atomic_store_explicit(&slot[SLOT_NODE], NO_NODE, memory_order_relaxed);
    atomic_store_explicit(&slot[SLOT_START], start_ns, memory_order_release);
    atomic_store_explicit(&slot[SLOT_NODE], node, memory_order_release);
}

/* Return the tokens of the running step, or its sequences if its tokens are not known, or 0 if both are unknown. */
static inline void
say_size(Position *position, int64_t size)
{
    atomic_store_explicit((_Atomic int64_t *)position->slot + SLOT_SIZE, size, memory_order_relaxed);
}

/* Set whether the calls at this position are recorded. Its slot has the opposite, for the sampler. */
static inline void
say_recording(Position *position, int is_on)
{
    position->recording = (char)is_on;
    atomic_store_explicit((_Atomic int64_t *)position->slot + SLOT_PLAIN, !is_on, memory_order_relaxed);
}

/* Assign a slot of the ring's header to this position, if a slot is free. */
__attribute__((noinline, cold)) static void
take_slot(HotPath *self, Position *position)
{
    position->ring_serial = self->ring_serial;
    if (self->words == NULL)
        return;
    for (int i = 0; i < SLOTS; i++) {
        int64_t *slot = self->words + FIRST_SLOT_WORD + i * SLOT_WORDS;
        if (slot[SLOT_THREAD] == 0) { /* several hot paths may write into the same ring */
            position->slot = slot;
            position->holder = self;
            self->holders[i] = position;
            say_where(position, NO_NODE, 0);
            say_recording(position, position->recording);
            slot[SLOT_STATE] = (int64_t)(intptr_t)PyThreadState_Get();
            slot[SLOT_THREAD] = (int64_t)PyThread_get_thread_native_id();
            return;
        }
    }
}

static inline void
want_slot(HotPath *self, Position *position)
{
    if (UNLIKELY(position->ring_serial != self->ring_serial))
        take_slot(self, position);
}

static void
give_slot_back(Position *position)
{
    HotPath *holder = position->holder;
    if (holder == NULL)
        return;
    int64_t *slot = position->slot;
    if (holder->pid == getpid()) {
        slot[SLOT_THREAD] = 0;
        slot[SLOT_STATE] = 0;
        say_where(position, NO_NODE, 0);
    }
    holder->holders[(slot - holder->words - FIRST_SLOT_WORD) / SLOT_WORDS] = NULL;
    position->holder = NULL;
    position->slot = nowhere;
}

/* Move from the current scope up to `parent`, one of the scopes around it. `parent` is NULL if the position is
   being freed. */
static inline void
go_up(Position *position, Scope *parent)
{
    Scope *scope = position->scope;
    position->scope = parent;
    while (scope != parent) {
        Scope *next = scope->parent;
        Py_DECREF(scope);
        scope = next;
    }
}

/* Move to a scope anywhere in the graph. */
__attribute__((noinline, cold)) static void
go_to(Position *position, Scope *scope)
{
    for (Scope *held = scope; held != NULL; held = held->parent)
        Py_INCREF(held);
    Scope *left = position->scope;
    position->scope = scope;
    while (left != NULL) {
        Scope *next = left->parent;
        Py_DECREF(left);
        left = next;
    }
}

/* If the position is inside `scope`, move to the parent of `scope` and return 1. Otherwise return 0. */
static inline int
leave(Position *position, Scope *scope)
{
    Scope *inside = position->scope;
    while (inside != NULL && inside != scope)
        inside = inside->parent;
    if (inside == NULL || inside->parent == NULL)
        return 0;
    say_where(position, scope->parent_node, 0);
    go_up(position, scope->parent);
    Py_INCREF(scope);
    Py_XSETREF(position->left, scope);
    return 1;
}

static inline void
enter(HotPath *self, Position *position, Scope *scope)
{
    Py_CLEAR(position->left);
    if (LIKELY(scope->parent == position->scope)) {
        Py_INCREF(scope);
        position->scope = scope;
    }
    else
        go_to(position, scope);
    want_slot(self, position);
}

static int
position_clear(Position *self)
{
    /* Do not clear `scope`, because it must never be NULL. A cycle through `scope` is broken when the scope is
       cleared. */
    Py_CLEAR(self->step);
    Py_CLEAR(self->held);
    Py_CLEAR(self->unit);
    return 0;
}

static void
position_dealloc(Position *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    generation++; /* invalidates the position that each thread used last */
    if (self->weak_references != NULL)
        PyObject_ClearWeakRefs((PyObject *)self);
    give_slot_back(self);
    position_clear(self);
    go_up(self, NULL);
    Py_CLEAR(self->left);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static PyObject *
position_leave(Position *self, PyObject *scope)
{
    if (!Py_IS_TYPE(scope, ScopeType)) {
        PyErr_Format(PyExc_TypeError, "leave() takes a Scope, not a %s", Py_TYPE(scope)->tp_name);
        return NULL;
    }
    return PyBool_FromLong(leave(self, (Scope *)scope));
}

static PyObject *
get_held(Position *self, void *Py_UNUSED(closure))
{
    return Py_NewRef(self->held == NULL ? Py_None : self->held);
}

static int
set_held(Position *self, PyObject *held, void *Py_UNUSED(closure))
{
    if (held != NULL && held != Py_None && !PyList_CheckExact(held)) {
        PyErr_Format(PyExc_TypeError, "held is a %s; a list or None is wanted", Py_TYPE(held)->tp_name);
        return -1;
    }
    Py_XSETREF(self->held, held == NULL || held == Py_None ? NULL : Py_NewRef(held));
    return 0;
}

static PyObject *
get_is_recorded(Position *self, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(self->recording);
}

static int
set_is_recorded(Position *self, PyObject *is_on, void *Py_UNUSED(closure))
{
    if (is_on == NULL || !PyBool_Check(is_on)) {
        PyErr_SetString(PyExc_TypeError, "recording takes True or False");
        return -1;
    }
    say_recording(self, is_on == Py_True);
    return 0;
}

static PyMethodDef position_methods[] = {
    {"leave", (PyCFunction)position_leave, METH_O,
     "leave($self, scope, /)\n--\n\n"
     "Go to the parent of `scope`, if this position is in it; gives whether it was."},
    {0},
};

static PyMemberDef position_members[] = {
    {"scope", T_OBJECT, offsetof(Position, scope), READONLY, "Where it is."},
    {"lane", T_LONGLONG, offsetof(Position, lane), 0, "Flags of every record: tells simultaneous steps apart."},
    {"step", T_OBJECT, offsetof(Position, step), 0, "The innermost step it is in, or None."},
    {"unit", T_OBJECT, offsetof(Position, unit), 0, "What else is known of the same thread, task or greenlet."},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(Position, weak_references), READONLY, NULL},
    {0},
};

static PyGetSetDef position_properties[] = {
    {"held", (getter)get_held, (setter)set_held, "The records of a step without a name yet, or None.", NULL},
    {"recording", (getter)get_is_recorded, (setter)set_is_recorded, "False in a step that is not sampled.", NULL},
    {0},
};

static PyType_Slot position_slots[] = {
    {Py_tp_doc, "Where in the graph one thread, task or greenlet is."},
    {Py_tp_traverse, position_traverse},
    {Py_tp_clear, position_clear},
    {Py_tp_dealloc, position_dealloc},
    {Py_tp_methods, position_methods},
    {Py_tp_members, position_members},
    {Py_tp_getset, position_properties},
    {0},
};

static PyType_Spec position_spec = {
    .name = "cbtop.profiler._hot_path.Position",
    .basicsize = sizeof(Position),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = position_slots,
};

static PyObject *
new_position(HotPath *self, PyObject *Py_UNUSED(ignored))
{
    if (self->root == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "the hot path is not initialised; call HotPath.__init__ first");
        return NULL;
    }
    Position *position = (Position *)PositionType->tp_alloc(PositionType, 0);
    if (position == NULL)
        return NULL;
    position->scope = (Scope *)Py_NewRef(self->root);
    position->slot = nowhere;
    position->recording = 1;
    return (PyObject *)position;
}

/* Return the caller's position as a borrowed reference. The caller's thread, task or greenlet keeps it alive. */
__attribute__((noinline, cold)) static Position *
find_position(HotPath *self)
{
    if (self->find == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "the hot path is not initialised; call HotPath.__init__ first");
        return NULL;
    }
    PyObject *found = PyObject_CallNoArgs(self->find);
    if (found == NULL)
        return NULL;
    if (!Py_IS_TYPE(found, PositionType) || Py_REFCNT(found) < 2) {
        PyErr_Format(PyExc_TypeError, "find gave a %s; a Position that somebody holds is wanted", Py_TYPE(found)->tp_name);
        Py_DECREF(found);
        return NULL;
    }
    Py_DECREF(found);
    last.hot_path = self;
    last.thread_state = PyThreadState_Get()->id;
    last.context_version = PyThreadState_Get()->context_ver;
    last.generation = generation;
    last.position = (Position *)found;
    return (Position *)found;
}

static inline Position *
this_position(HotPath *self)
{
    PyThreadState *state = PyThreadState_Get();
    if (LIKELY(last.hot_path == self && last.generation == generation && last.thread_state == state->id &&
               last.context_version == state->context_ver))
        return last.position;
    return find_position(self);
}

static PyObject *span_call(PyObject *self, PyObject *const *args, size_t count, PyObject *kwnames);

/* ---- timer ---- */

static void
timer_dealloc(Timer *self)
{
    PyTypeObject *type = Py_TYPE(self);
    Py_CLEAR(self->scope);
    Py_CLEAR(self->position);
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

#include "_counters.h"

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

/* Returns 1 if `elements` is a count below 2^63, and 0 if it is not. Returns -1 for an exception that is not an
   Exception, such as an interrupt. */
static inline int
as_elements(PyObject *elements, int64_t *value)
{
    int overflow = 0;
    if (PyLong_Check(elements)) {
        *value = PyLong_AsLongLongAndOverflow(elements, &overflow);
        return !overflow && *value >= 0;
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
    return !overflow && *value >= 0;
}

/* End recording after an error of our code or of the host's clock. Python logs the error once, and it does not
   reach the host. Returns 0, or -1 if the error is not an Exception. */
__attribute__((noinline, cold)) static int
give_up(HotPath *self)
{
    if (!PyErr_ExceptionMatches(PyExc_Exception))
        return -1;
    if (PyErr_ExceptionMatches(PyExc_RecursionError)) { /* the host's stack is full: skip only this brick */
        PyErr_Clear();
        return 0;
    }
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (trace != NULL)
        PyException_SetTraceback(error, trace);
    self->recording = 0;
    PyObject *done = self->give_up == NULL ? NULL : PyObject_CallOneArg(self->give_up, error);
    Py_XDECREF(done);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(trace);
    return PyErr_Occurred() ? -1 : 0; /* -1 if a signal handler of the host has raised */
}

static inline void
write_record(HotPath *self, int64_t tag, int64_t start_ns, int64_t end_ns, int64_t elements)
{
    int64_t *words = self->words;
    /* No atomic addition is needed, because every writer of this ring holds the GIL. */
    int64_t number = words[CURSOR_WORD];
    atomic_store_explicit((_Atomic int64_t *)&words[CURSOR_WORD], number + 1, memory_order_relaxed);
    /* From now on, the old record in this place may be half overwritten. So the new cursor must become visible
       first. */
    atomic_thread_fence(memory_order_release);
    _Atomic int64_t *record = (_Atomic int64_t *)(words + HEADER_BYTES / 8 + (number & self->wrap) * RECORD_WORDS);
    atomic_store_explicit(&record[0], start_ns, memory_order_relaxed);
    atomic_store_explicit(&record[1], end_ns, memory_order_relaxed);
    atomic_store_explicit(&record[2], elements, memory_order_relaxed);
    tag = (tag & TAG_MASK) | ((number + 1) & SEQUENCE_MASK) << SEQUENCE_SHIFT;
    atomic_store_explicit(&record[3], tag, memory_order_release);
}

/* Write a record into the ring. Its values are converted first, because that may run Python code. If `elements` is
   not a count, the record has a flag instead, and Python logs that once. */
static inline int
write_whole(HotPath *self, int64_t tag, int64_t start_ns, int64_t end_ns, PyObject *elements)
{
    int64_t value;
    int whole = as_elements(elements, &value);
    if (UNLIKELY(self->words == NULL))
        return whole < 0 ? -1 : 0;
    if (LIKELY(whole > 0)) {
        write_record(self, tag, start_ns, end_ns, value);
        return 0;
    }
    write_record(self, tag | FLAG_UNCOUNTED, start_ns, end_ns, 0);
    if (whole < 0)
        return -1;
    PyObject *done = PyObject_CallOneArg(self->uncounted, elements);
    Py_XDECREF(done);
    return done == NULL ? give_up(self) : 0;
}

/* Record a call of a scope with `work`, or a call that must wait until its step has a name. */
__attribute__((noinline, cold)) static int
write_seldom(HotPath *self, Position *position, Scope *scope, int64_t start_ns, int64_t end_ns, PyObject *elements,
             int64_t flags)
{
    PyObject *done;
    if (scope->node >= 0) {
        int64_t tag = position->lane | scope->node | flags;
        if (self->words != NULL) {
            if (write_whole(self, tag, start_ns, end_ns, elements) < 0)
                return -1;
        }
        else {
            done = PyObject_CallFunction(self->record, "LLLO", (long long)tag, (long long)start_ns, (long long)end_ns,
                                         elements);
            Py_XDECREF(done);
            if (done == NULL)
                return give_up(self);
        }
        done = PyObject_CallFunctionObjArgs(self->amounts, (PyObject *)scope, elements, NULL);
        Py_XDECREF(done);
        return done == NULL ? give_up(self) : 0;
    }
    if (position->held == NULL || PyList_GET_SIZE(position->held) >= MAX_HELD) {
        if (self->words != NULL) {
            write_record(self, NO_NODE, 0, 0, 0);
            return 0;
        }
        done = PyObject_CallFunction(self->record, "iiii", NO_NODE, 0, 0, 0);
        Py_XDECREF(done);
        return done == NULL ? give_up(self) : 0;
    }
    /* Convert to a count, so that no host object is kept alive. */
    int64_t count;
    int whole = as_elements(elements, &count);
    if (whole < 0)
        return -1;
    if (whole == 0) {
        count = -1;
        done = PyObject_CallOneArg(self->uncounted, elements);
        Py_XDECREF(done);
        if (done == NULL && give_up(self) < 0)
            return -1;
    }
    PyObject *record = Py_BuildValue("OLLLL", (PyObject *)scope, (long long)start_ns, (long long)end_ns,
                                     (long long)count, (long long)flags);
    int kept = record == NULL ? -1 : PyList_Append(position->held, record);
    Py_XDECREF(record);
    return kept < 0 ? give_up(self) : 0;
}

/* Return the scope of `key` at this position as a new reference. Defines the scope if it is new. Returns NULL if
   nothing can be recorded, or NULL with an exception set. */
__attribute__((noinline)) static Scope *
look_up(HotPath *self, Position *position, PyObject *key)
{
    Scope *outer = position->scope;
    Scope *scope = (Scope *)PyDict_GetItemWithError(outer->children, key);
    if (scope == NULL) {
        if (PyErr_Occurred())
            return NULL; /* an invalid key is the caller's mistake */
        Py_INCREF(outer);
        scope = (Scope *)PyObject_CallFunctionObjArgs(self->define, (PyObject *)outer, key, NULL);
        Py_DECREF(outer);
        if (scope != NULL && !Py_IS_TYPE(scope, ScopeType)) {
            PyErr_Format(PyExc_TypeError, "define gave a %s; a Scope is wanted", Py_TYPE(scope)->tp_name);
            Py_CLEAR(scope);
        }
        if (scope == NULL) {
            give_up(self);
            return NULL;
        }
    }
    else
        Py_INCREF(scope);
    Scope *left = position->left;
    /* A scope without a node is not stored, because there may be any number of them. */
    if (left != NULL && left->parent == scope->parent && scope->node != NO_NODE)
        Py_XSETREF(left->next, (Scope *)Py_NewRef(scope));
    return scope;
}

/* Move to the scope of `key` at the caller's place, and start timing it. Stores new references to the position and
   the scope, or leaves them NULL if the call is not recorded. */
static inline int
begin(HotPath *self, PyObject *key, Position **position_found, Scope **scope_found, int64_t *start_ns)
{
    Position *position = this_position(self);
    if (UNLIKELY(position == NULL))
        return give_up(self);
    if (!position->recording)
        return 0;
    FETCH_TO_WRITE(position->slot);
    Py_INCREF(position);
    Scope *scope = position->left == NULL ? NULL : position->left->next;
    if (scope != NULL && scope->key == key && scope->parent == position->scope)
        Py_INCREF(scope);
    else if ((scope = look_up(self, position, key)) == NULL) {
        Py_DECREF(position);
        return PyErr_Occurred() ? -1 : 0;
    }
    enter(self, position, scope);
    if (UNLIKELY(self->counting != NULL))
        counters_begin(self->counting, scope, position);
    if (UNLIKELY(read_clock(self, start_ns) < 0)) {
        leave(position, scope);
        Py_DECREF(scope);
        Py_DECREF(position);
        return give_up(self);
    }
    say_where(position, scope->node, *start_ns);
    *position_found = position;
    *scope_found = scope;
    return 0;
}

static inline int
finish(HotPath *self, Position *position, Scope *scope, int64_t start_ns, PyObject *elements, int failed)
{
    int64_t end_ns;
    FETCH_TO_WRITE(position->slot);
    if (self->words != NULL)
        FETCH_TO_WRITE(&self->words[CURSOR_WORD]);
    FETCH_OBJECT(scope->next);
    FETCH_OBJECT(scope->call_after);
    FETCH_TO_WRITE(scope->module_after);
    int read = read_clock(self, &end_ns);
    int was_inside = leave(position, scope);
    if (UNLIKELY(self->counting != NULL))
        counters_end(self->counting, scope, position, !failed && was_inside && self->recording);
    if (UNLIKELY(read < 0))
        return give_up(self);
    if (!self->recording || UNLIKELY(!was_inside && start_ns <= self->forked_ns))
        return 0;
    int64_t flags = (failed ? FLAG_FAILED : 0) | (LIKELY(was_inside) ? 0 : FLAG_LOOSE);
    if (UNLIKELY(scope->work != NULL || scope->node < 0))
        return write_seldom(self, position, scope, start_ns, end_ns, elements, flags);
    int64_t tag = scope->node | position->lane | flags;
    if (LIKELY(self->words != NULL))
        return write_whole(self, tag, start_ns, end_ns, elements);
    PyObject *done = PyObject_CallFunction(self->record, "LLLO", (long long)tag, (long long)start_ns,
                                           (long long)end_ns, elements);
    Py_XDECREF(done);
    return done == NULL ? give_up(self) : 0;
}

/* Read the arguments of a vectorcall into the variables for `names`. Variables of missing arguments keep their
   value. */
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
    timer->position = NULL;
    timer->scope = NULL;
    if (begin(self, brick, &timer->position, &timer->scope, &timer->start_ns) < 0) {
        Py_DECREF(timer);
        return NULL;
    }
    if (UNLIKELY(timer->scope == NULL)) { /* not recorded */
        Py_DECREF(timer);
        Py_RETURN_NONE;
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
    if (failed < 0 || finish(self, timer->position, timer->scope, timer->start_ns, found[1], failed) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* ---- calls of a host's modules and functions ----

   Instances of classes in instrument/wrapping.py and instrument/functions.py are called in place of the host's
   objects. Dynamo traces their `__call__` in Python. In steps that the compiled hot path records, the C code here
   runs instead, and does the same. It leaves all other cases to Python.
*/

enum { MODULE_PATH, MODULE_KEY, MODULE_MODEL, MODULE_MODULE, MODULE_INSTEAD, MODULE_ASKS };
enum { GUARDED_MODULE, GUARDED_INSTEAD };
enum { FUNCTION_ORIGINAL, FUNCTION_NAME, FUNCTION_BRICK, FUNCTION_FIRST, FUNCTION_BRICK_OF };
enum { FUNCTION_QUERIES = FUNCTION_BRICK_OF + 1, FUNCTION_LAST };
enum { MOST_SLOTS = 7 };

/* A class with instances that are called by the C code here. */
typedef struct {
    const char *names[MOST_SLOTS];
    ternaryfunc call;
    Py_ssize_t offsets[MOST_SLOTS];
    PyTypeObject *type;
    PyObject *in_python; /* its `__call__` in Python */
} Calls;

static PyObject *module_call(PyObject *self, PyObject *args, PyObject *kwargs);
static PyObject *guarded_call(PyObject *self, PyObject *args, PyObject *kwargs);
static PyObject *function_call(PyObject *self, PyObject *args, PyObject *kwargs);
static Calls module_calls = {{"_path", "_key", "_model", "module", "instead", "asks"}, module_call};
static Calls guarded_calls = {{"module", "instead"}, guarded_call};
static Calls function_calls = {{"original", "name", "brick", "first", "brick_of", "queries", "last"}, function_call};
static PyObject *count_elements, *tensor_type, *is_overridden, *definition_type, *swapped_in; /* see `functions` */
static PyObject *hiding, *shape_of_tensor, *dtype_of_tensor, *is_cpu_of_tensor, *is_floating_dtype;
/* Functions that are needed at every call, if they are C functions, else NULL. They are called directly, because
   looking one up and calling it like a Python function would double the cost. */
static PyCFunction c_is_overridden, c_numel;
static PyTypeObject *step_type;  /* type of the last step */
static Py_ssize_t model_of_type; /* offset of the attribute `model` in objects of this type; 0 if it is no slot */

/* Return a new reference to the value of a slot, or NULL if the slot is empty. */
static inline PyObject *
slot_of(Calls *calls, PyObject *self, int at)
{
    return Py_XNewRef(*(PyObject **)((char *)self + calls->offsets[at]));
}

/* Return a borrowed reference to the value of a slot, or NULL if the slot is empty. */
static inline PyObject *
lent_by(Calls *calls, PyObject *self, int at)
{
    return *(PyObject **)((char *)self + calls->offsets[at]);
}

/* Call `callable` with `self` in front of the given arguments. */
__attribute__((noinline, cold)) static PyObject *
call_with(PyObject *callable, PyObject *self, PyObject *args, PyObject *kwargs)
{
    Py_ssize_t count = PyTuple_GET_SIZE(args);
    PyObject *all = PyTuple_New(count + 1);
    if (all == NULL)
        return NULL;
    PyTuple_SET_ITEM(all, 0, Py_NewRef(self));
    for (Py_ssize_t i = 0; i < count; i++)
        PyTuple_SET_ITEM(all, i + 1, Py_NewRef(PyTuple_GET_ITEM(args, i)));
    PyObject *result = PyObject_Call(callable, all, kwargs);
    Py_DECREF(all);
    return result;
}

/* Record a call that has raised an exception. The exception stays set, unless recording raises one of its own. */
static void
finish_failed(HotPath *self, Position *position, Scope *scope, int64_t start_ns)
{
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyObject *none = PyLong_FromLong(0); /* this never fails, because small ints always exist */
    if (finish(self, position, scope, start_ns, none, 1) < 0) {
        Py_XDECREF(type);
        Py_XDECREF(error);
        Py_XDECREF(trace);
    }
    else
        PyErr_Restore(type, error, trace);
    Py_DECREF(none);
}

/* Return the elements of a call's arguments from number `first` on, computed by `elements_of` in Python. */
static PyObject *
elements_in_python(PyObject *args, PyObject *kwargs, Py_ssize_t first, PyObject *error)
{
    PyObject *named = kwargs == NULL ? PyDict_New() : Py_NewRef(kwargs);
    PyObject *given = PyTuple_GetSlice(args, first, PyTuple_GET_SIZE(args));
    PyObject *elements = NULL;
    if (named != NULL && given != NULL)
        elements = PyObject_CallFunctionObjArgs(count_elements, given, named, error, NULL);
    Py_XDECREF(named);
    Py_XDECREF(given);
    return elements;
}

static inline PyObject *
ask_whether_overridden(PyObject *tensor)
{
    if (LIKELY(c_is_overridden != NULL))
        return c_is_overridden(PyCFunction_GET_SELF(is_overridden), tensor);
    return PyObject_CallOneArg(is_overridden, tensor);
}

static inline int
is_tensor(PyObject *value)
{
    return PyType_IsSubtype(Py_TYPE(value), (PyTypeObject *)tensor_type);
}

/* Return the elements of a call: the number of elements of its first tensor argument. The number is read in C if
   the tensor is of torch's own class and no `__torch_function__` handles it. */
static inline PyObject *
elements_given(PyObject *args, PyObject *kwargs, Py_ssize_t first)
{
    PyObject *tensor = NULL, *name, *value;
    for (Py_ssize_t i = first; tensor == NULL && i < PyTuple_GET_SIZE(args); i++)
        if (is_tensor(PyTuple_GET_ITEM(args, i)))
            tensor = PyTuple_GET_ITEM(args, i);
    for (Py_ssize_t at = 0; tensor == NULL && kwargs != NULL && PyDict_Next(kwargs, &at, &name, &value);)
        if (is_tensor(value))
            tensor = value;
    if (tensor == NULL || (PyObject *)Py_TYPE(tensor) != tensor_type)
        return elements_in_python(args, kwargs, first, NULL);
    PyObject *elements = ask_whether_overridden(tensor);
    if (LIKELY(elements == Py_False))
        Py_SETREF(elements, c_numel == NULL ? PyObject_CallMethodNoArgs(tensor, numel) : c_numel(tensor, NULL));
    if (LIKELY(elements != NULL && PyLong_CheckExact(elements)))
        return elements;
    if (elements != NULL) {
        Py_DECREF(elements);
        return elements_in_python(args, kwargs, first, NULL);
    }
    if (!PyErr_ExceptionMatches(PyExc_Exception))
        return NULL;
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (trace != NULL)
        PyException_SetTraceback(error, trace);
    elements = elements_in_python(args, kwargs, first, error);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(trace);
    return elements;
}

/* The function `_call_impl` of a class of modules, stored because a look-up costs as much as a brick. Valid while
   the class is unchanged.
*/
typedef struct {
    PyTypeObject *type;
    unsigned int version;
    PyObject *function; /* borrowed: the class holds it while its version is unchanged */
} Implementation;
enum { IMPLEMENTATIONS = 64 };
static Implementation implementations[IMPLEMENTATIONS];

/* Return a number that changes whenever the class or one of its bases changes, or 0 if it is not known. */
static inline unsigned int
version_of(PyTypeObject *type)
{
#if PY_VERSION_HEX < 0x030D0000
    if (!PyType_HasFeature(type, Py_TPFLAGS_VALID_VERSION_TAG))
        return 0;
#endif
    return type->tp_version_tag;
}

__attribute__((noinline, cold)) static void
look_for_implementation(PyTypeObject *type, Implementation *known)
{
    PyObject *own = PyObject_GetAttr((PyObject *)type, getattribute);
    PyObject *plain = PyObject_GetAttr((PyObject *)&PyBaseObject_Type, getattribute);
    PyObject *function = own != NULL && own == plain ? _PyType_Lookup(type, call_impl) : NULL;
    Py_XDECREF(own);
    Py_XDECREF(plain);
    PyErr_Clear();
    known->type = type;
    known->function = function;
    known->version = function != NULL && PyFunction_Check(function) ? version_of(type) : 0;
}

/* Return the callable that a call of `module` runs, as a new reference: its `_call_impl`. Usually that is a
   function of the class. Then `is_bound` is 0, and the caller must pass the module as the first argument. Returns
   NULL with an exception set. */
static inline PyObject *
implementation_of(PyObject *module, int *is_bound)
{
    PyTypeObject *type = Py_TYPE(module);
    Implementation *known = &implementations[((uintptr_t)type >> 6) % IMPLEMENTATIONS];
    if (UNLIKELY(known->type != type || known->version == 0 || known->version != version_of(type)))
        look_for_implementation(type, known);
    *is_bound = 1;
    if (LIKELY(known->version != 0 && type->tp_dictoffset != 0)) {
        PyObject *attributes = PyObject_GenericGetDict(module, NULL);
        if (attributes == NULL)
            return NULL;
        PyObject *own = PyDict_GetItemWithError(attributes, call_impl);
        Py_DECREF(attributes);
        if (LIKELY(own == NULL && !PyErr_Occurred())) {
            *is_bound = 0;
            return Py_NewRef(known->function);
        }
        PyErr_Clear();
    }
    return PyObject_GetAttr(module, call_impl);
}

/* Give `frames` levels of recursion depth back to the host. CPython 3.11 counts a call through one of our objects
   as one level. */
#if PY_VERSION_HEX < 0x030C0000
#define DEEPER(frames) (PyThreadState_GET()->recursion_remaining += (frames))
#else
#define DEEPER(frames) ((void)0)
#endif

enum { MOST_ON_STACK = 8 };

/* Call `callable`. If `self` is not NULL, it is the first argument. */
static inline PyObject *
call_it(PyObject *callable, PyObject *self, PyObject *args, PyObject *kwargs)
{
    Py_ssize_t count = PyTuple_GET_SIZE(args);
    if (self == NULL)
        return PyObject_Call(callable, args, kwargs);
    if (UNLIKELY(count >= MOST_ON_STACK))
        return call_with(callable, self, args, kwargs);
    PyObject *stack[MOST_ON_STACK] = {self};
    for (Py_ssize_t i = 0; i < count; i++)
        stack[i + 1] = PyTuple_GET_ITEM(args, i);
    return PyObject_VectorcallDict(callable, stack, (size_t)count + 1, kwargs);
}

/* Call `callable` and time the call as the brick `key`. If `self` is not NULL, it is the first argument. If
   `elements` is NULL, they are counted from the arguments. */
static inline PyObject *
call_timed(HotPath *path, PyObject *key, PyObject *callable, PyObject *self, PyObject *args, PyObject *kwargs,
           Py_ssize_t first, PyObject *elements)
{
    Position *position = NULL;
    Scope *scope = NULL;
    int64_t start_ns = 0;
    if (path->recording && begin(path, key, &position, &scope, &start_ns) < 0)
        return NULL;
    PyObject *result = call_it(callable, self, args, kwargs);
    if (UNLIKELY(scope == NULL)) /* not recorded */
        return result;
    PyObject *counted = result == NULL     ? NULL
                        : elements != NULL ? Py_NewRef(elements)
                                           : elements_given(args, kwargs, first);
    if (UNLIKELY(counted == NULL)) {
        finish_failed(path, position, scope, start_ns);
        Py_CLEAR(result);
    }
    else {
        if (finish(path, position, scope, start_ns, counted, 0) < 0)
            Py_CLEAR(result);
        Py_DECREF(counted);
    }
    Py_DECREF(scope);
    Py_DECREF(position);
    return result;
}

/* Return the model of a step, as a new reference. */
static inline PyObject *
model_of(PyObject *step)
{
    if (UNLIKELY(Py_TYPE(step) != step_type)) {
        PyObject *slot = PyObject_GetAttr((PyObject *)Py_TYPE(step), model_of_step);
        int is_slot = slot != NULL && Py_IS_TYPE(slot, &PyMemberDescr_Type) &&
                      ((PyMemberDescrObject *)slot)->d_member->type == T_OBJECT_EX;
        model_of_type = is_slot ? ((PyMemberDescrObject *)slot)->d_member->offset : 0;
        Py_XDECREF(slot);
        PyErr_Clear();
        Py_XSETREF(step_type, (PyTypeObject *)Py_NewRef(Py_TYPE(step)));
    }
    PyObject *model = model_of_type == 0 ? NULL : *(PyObject **)((char *)step + model_of_type);
    return model != NULL ? Py_NewRef(model) : PyObject_GetAttr(step, model_of_step);
}

/* Return whether a step of `model` is recorded at the caller's place. NULL means any model. Returns -1 with an
   exception set. */
static inline int
is_in_step(HotPath *path, PyObject *model, Position **found)
{
    Position *position = *found = this_position(path);
    if (UNLIKELY(position == NULL))
        return give_up(path);
    if (position->step == NULL || position->step == Py_None || !position->recording)
        return 0;
    if (model == NULL)
        return 1;
    PyObject *step = Py_NewRef(position->step);
    PyObject *of_step = model_of(step);
    Py_DECREF(step);
    if (of_step == NULL)
        return -1;
    int is_same = of_step == model ? 1 : PyObject_RichCompareBool(of_step, model, Py_EQ);
    Py_DECREF(of_step);
    return is_same;
}

/* Return the target of a weak reference as a new reference. NULL if the target was freed, or with an exception set.
   */
static inline PyObject *
living(PyObject *reference)
{
    if (UNLIKELY(!PyWeakref_CheckRefExact(reference)))
        return PyObject_CallNoArgs(reference);
#if PY_VERSION_HEX >= 0x030D0000
    PyObject *found;
    return PyWeakref_GetRef(reference, &found) < 0 ? NULL : found;
#else
    PyObject *found = PyWeakref_GET_OBJECT(reference);
    return found == Py_None ? NULL : Py_NewRef(found);
#endif
}

/* Return the callable behind a call of the module that `reference` refers to, as a new reference. If the callable
   takes the module first, that is stored in `*first`. Returns NULL, perhaps with an exception set. */
static inline PyObject *
called_in_module(PyObject *reference, PyObject **first)
{
    int is_bound = 1;
    *first = reference == NULL ? NULL : living(reference);
    PyObject *called = *first == NULL ? NULL : implementation_of(*first, &is_bound);
    if (is_bound)
        Py_CLEAR(*first);
    return called;
}

/* Do the same as BrickCall.__call__. References are borrowed, because counting a reference would touch the cache
   line of its object. The caller keeps `self` alive, and `self` keeps alive its members and all keys that it has
   ever had. */
static PyObject *
module_call(PyObject *self, PyObject *args, PyObject *kwargs)
{
    PyObject *path = lent_by(&module_calls, self, MODULE_PATH), *result = NULL;
    if (UNLIKELY(path == NULL || !Py_IS_TYPE(path, HotPathType)))
        return call_with(module_calls.in_python, self, args, kwargs);
    DEEPER(1);
    PyObject *key = NULL, *model = lent_by(&module_calls, self, MODULE_MODEL);
    PyObject *module = lent_by(&module_calls, self, MODULE_MODULE);
    PyObject *called = slot_of(&module_calls, self, MODULE_INSTEAD), *living_module = NULL;
    Position *position;
    int is_timed = is_in_step((HotPath *)path, model, &position);
    if (is_timed < 0)
        goto done;
    PyObject *asks = is_timed ? lent_by(&module_calls, self, MODULE_ASKS) : NULL;
    if (UNLIKELY(asks != NULL && asks != Py_None)) { /* set only for the first layers and products of a step */
        Py_INCREF(asks);
        PyObject *asked = PyObject_CallNoArgs(asks);
        Py_DECREF(asks);
        if (asked == NULL)
            goto done;
        Py_DECREF(asked);
    }
    key = lent_by(&module_calls, self, MODULE_KEY); /* `asks` may have changed it */
    if (is_timed && position->left != NULL && position->left->call_after != self) {
        position->left->call_after = self;
        position->left->module_after = module;
    }
    if (called == NULL || called == Py_None)
        Py_XSETREF(called, called_in_module(module, &living_module));
    if (called == NULL || key == NULL) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "this call was not initialised");
    }
    else if (is_timed)
        result = call_timed((HotPath *)path, key, called, living_module, args, kwargs, 0, NULL);
    else
        result = call_it(called, living_module, args, kwargs);
done:
    DEEPER(-1);
    Py_XDECREF(living_module);
    Py_XDECREF(called);
    return result;
}

/* Do the same as GuardedCall.__call__. */
static PyObject *
guarded_call(PyObject *self, PyObject *args, PyObject *kwargs)
{
    PyObject *called = slot_of(&guarded_calls, self, GUARDED_INSTEAD), *first = NULL, *result = NULL;
    DEEPER(1);
    PyObject *begun = PyObject_CallMethodObjArgs(self, before_name, args, kwargs == NULL ? Py_None : kwargs, NULL);
    if (begun == NULL)
        goto done;
    if (called == NULL || called == Py_None)
        Py_XSETREF(called, called_in_module(lent_by(&guarded_calls, self, GUARDED_MODULE), &first));
    if (called != NULL)
        result = call_it(called, first, args, kwargs);
    else if (!PyErr_Occurred())
        PyErr_SetString(PyExc_TypeError, "this call was not initialised");
    if (result != NULL && begun != Py_None) {
        PyObject *ended = PyObject_CallMethodObjArgs(self, after_name, begun, result, NULL);
        if (ended == NULL)
            Py_CLEAR(result);
        Py_XDECREF(ended);
    }
    Py_DECREF(begun);
done:
    DEEPER(-1);
    Py_XDECREF(first);
    Py_XDECREF(called);
    return result;
}

/* Return the path that times the swapped-in calls of all models, or NULL if there are several paths. */
static inline PyObject *
only_path(void)
{
    PyObject *path = NULL, *model, *of_model;
    Py_ssize_t at = 0;
    while (PyDict_Next(swapped_in, &at, &model, &of_model)) {
        if (path != NULL && path != of_model)
            return NULL;
        path = of_model;
    }
    return Py_XNewRef(path);
}

/* Return whether the caller is in a brick that was defined with the name `name`, or -1 with an exception set. */
static inline int
is_inside(Position *position, PyObject *name)
{
    PyObject *key = position->scope->key;
    if (key == NULL || (PyObject *)Py_TYPE(key) != definition_type)
        return 0;
    PyObject *found = PyObject_GetAttr(key, name_of_key);
    if (found == NULL)
        return -1;
    int is_same = found == name ? 1 : PyObject_RichCompareBool(found, name, Py_EQ);
    Py_DECREF(found);
    return is_same;
}

enum { QUERY_SHAPE, KEY_SHAPE, VALUE_SHAPE, KEY_TYPE, IS_CPU, FOUND, LAST_PARTS };

/* If shapes alone decide the result of `brick_of`, return a tuple of the shapes, the type and the device. This is
   so for attention with one query per sequence and without a mask that hides keys. Returns NULL in other cases, or
   if a look-up raised an exception. */
static PyObject *
shapes_of(PyObject *args, PyObject *kwargs, Py_ssize_t queries)
{
    if (queries < 0 || PyTuple_GET_SIZE(args) <= queries + 3 || PyTuple_GET_ITEM(args, queries + 3) != Py_None)
        return NULL;
    PyObject *query = PyTuple_GET_ITEM(args, queries), *key = PyTuple_GET_ITEM(args, queries + 1);
    PyObject *value = PyTuple_GET_ITEM(args, queries + 2), *name, *argument;
    if ((PyObject *)Py_TYPE(query) != tensor_type || (PyObject *)Py_TYPE(key) != tensor_type ||
        (PyObject *)Py_TYPE(value) != tensor_type)
        return NULL;
    for (Py_ssize_t at = 0; kwargs != NULL && PyDict_Next(kwargs, &at, &name, &argument);)
        if (argument != Py_None && PySet_Contains(hiding, name) != 0)
            return NULL;
    PyObject *asked = ask_whether_overridden(query);
    Py_XDECREF(asked);
    if (asked != Py_False)
        return NULL;
    PyObject *const whose[] = {query, key, value, key, query};
    PyObject *const names[] = {shape_of_tensor, shape_of_tensor, shape_of_tensor, dtype_of_tensor, is_cpu_of_tensor};
    PyObject *found = PyTuple_New(LAST_PARTS);
    for (int i = 0; found != NULL && i < FOUND; i++) {
        PyObject *part = PyObject_GetAttr(whose[i], names[i]);
        if (part == NULL)
            Py_CLEAR(found);
        else
            PyTuple_SET_ITEM(found, i, part);
    }
    if (found != NULL) {
        PyObject *shape = PyTuple_GET_ITEM(found, QUERY_SHAPE);
        if (!PyTuple_Check(shape) || PyTuple_GET_SIZE(shape) != 4 || PyTuple_GET_ITEM(shape, 2) != one)
            Py_CLEAR(found);
    }
    return found;
}

/* Return the result of `brick_of` for the arguments. The result is stored for the next call with equal shapes,
   because the layers of a decoding step are similar. */
static PyObject *
found_by(PyObject *self, PyObject *brick_of, PyObject *args, PyObject *kwargs)
{
    PyObject *queries = slot_of(&function_calls, self, FUNCTION_QUERIES);
    PyObject *shapes = queries == NULL || !PyLong_Check(queries)
                           ? NULL
                           : shapes_of(args, kwargs, (Py_ssize_t)PyLong_AsLong(queries));
    Py_XDECREF(queries);
    if (PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_Exception))
            return NULL;
        PyErr_Clear(); /* Python code runs into the same error and reports it */
    }
    if (shapes != NULL) {
        PyObject *last = slot_of(&function_calls, self, FUNCTION_LAST), *found = NULL;
        int is_alike = last != NULL && PyTuple_GET_ITEM(last, KEY_TYPE) == PyTuple_GET_ITEM(shapes, KEY_TYPE) &&
                       PyTuple_GET_ITEM(last, IS_CPU) == PyTuple_GET_ITEM(shapes, IS_CPU);
        for (int i = QUERY_SHAPE; is_alike == 1 && i <= VALUE_SHAPE; i++)
            is_alike = PyObject_RichCompareBool(PyTuple_GET_ITEM(last, i), PyTuple_GET_ITEM(shapes, i), Py_EQ);
        if (is_alike == 1)
            found = Py_NewRef(PyTuple_GET_ITEM(last, FOUND));
        Py_XDECREF(last);
        if (is_alike != 0) {
            Py_DECREF(shapes);
            return found;
        }
    }
    PyObject *named = kwargs == NULL ? PyDict_New() : Py_NewRef(kwargs);
    PyObject *found = named == NULL ? NULL : PyObject_CallFunctionObjArgs(brick_of, args, named, NULL);
    Py_XDECREF(named);
    if (shapes != NULL && found != NULL && PyTuple_Check(found)) {
        PyTuple_SET_ITEM(shapes, FOUND, Py_NewRef(found));
        PyObject **last = (PyObject **)((char *)self + function_calls.offsets[FUNCTION_LAST]);
        Py_XSETREF(*last, Py_NewRef(shapes));
    }
    Py_XDECREF(shapes);
    return found;
}

/* Do the same as FunctionCall.__call__. */
static PyObject *
function_call(PyObject *self, PyObject *args, PyObject *kwargs)
{
    PyObject *original = slot_of(&function_calls, self, FUNCTION_ORIGINAL), *result = NULL;
    if (original != NULL && PyDict_GET_SIZE(swapped_in) == 0) {
        result = PyObject_Call(original, args, kwargs);
        Py_DECREF(original);
        return result;
    }
    PyObject *path = only_path(), *name = slot_of(&function_calls, self, FUNCTION_NAME);
    PyObject *brick = slot_of(&function_calls, self, FUNCTION_BRICK), *elements = NULL;
    PyObject *first = slot_of(&function_calls, self, FUNCTION_FIRST);
    Position *position;
    if (UNLIKELY(path == NULL || !Py_IS_TYPE(path, HotPathType) || original == NULL || name == NULL || first == NULL ||
                 !PyLong_Check(first))) {
        result = call_with(function_calls.in_python, self, args, kwargs);
        goto done;
    }
    int is_timed = is_in_step((HotPath *)path, NULL, &position);
    int is_a_part = is_timed <= 0 ? 0 : is_inside(position, name);
    if (is_timed < 0 || is_a_part < 0)
        goto done;
    if (is_timed && !is_a_part && (brick == NULL || brick == Py_None)) {
        PyObject *brick_of = slot_of(&function_calls, self, FUNCTION_BRICK_OF);
        PyObject *found = brick_of == NULL ? NULL : found_by(self, brick_of, args, kwargs);
        Py_XDECREF(brick_of);
        if (found == NULL || (found != Py_None && !(PyTuple_Check(found) && PyTuple_GET_SIZE(found) == 2))) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_TypeError, "a brick and its elements are wanted");
            Py_XDECREF(found);
            goto done;
        }
        if (found == Py_None)
            is_timed = 0;
        else {
            Py_XSETREF(brick, Py_NewRef(PyTuple_GET_ITEM(found, 0)));
            elements = Py_NewRef(PyTuple_GET_ITEM(found, 1));
        }
        Py_DECREF(found);
    }
    if (is_timed && !is_a_part) {
        size_t from = PyLong_AsSize_t(first); /* a negative number raises */
        if (from != (size_t)-1 || !PyErr_Occurred())
            result = call_timed((HotPath *)path, brick, original, NULL, args, kwargs, (Py_ssize_t)from, elements);
    }
    else
        result = PyObject_Call(original, args, kwargs);
done:
    Py_XDECREF(elements);
    Py_XDECREF(first);
    Py_XDECREF(brick);
    Py_XDECREF(name);
    Py_XDECREF(path);
    Py_XDECREF(original);
    return result;
}

/* Store the offsets of the slots `names` of `type` in `offsets`, up to the first name that is NULL. */
static int
find_slots(PyTypeObject *type, const char *const *names, Py_ssize_t *offsets, int most)
{
    for (int i = 0; i < most && names[i] != NULL; i++) {
        PyObject *slot = PyObject_GetAttrString((PyObject *)type, names[i]);
        if (slot == NULL)
            return -1;
        int is_slot = Py_IS_TYPE(slot, &PyMemberDescr_Type) &&
                      ((PyMemberDescrObject *)slot)->d_member->type == T_OBJECT_EX;
        if (is_slot)
            offsets[i] = ((PyMemberDescrObject *)slot)->d_member->offset;
        Py_DECREF(slot);
        if (!is_slot) {
            PyErr_Format(PyExc_TypeError, "%s of %s is no slot", names[i], type->tp_name);
            return -1;
        }
    }
    return 0;
}

/* Make calls of instances of `type` run the C code here. The attribute `__call__` stays, because other code, such
   as Dynamo, looks it up. */
static int
compile_type(PyTypeObject *type, Calls *calls)
{
    if (find_slots(type, calls->names, calls->offsets, MOST_SLOTS) < 0)
        return -1;
    PyObject *in_python = PyObject_GetAttrString((PyObject *)type, "__call__");
    if (in_python == NULL)
        return -1;
    Py_XSETREF(calls->in_python, in_python);
    Py_XSETREF(calls->type, (PyTypeObject *)Py_NewRef(type));
    type->tp_call = calls->call;
    return 0;
}

/* Return the FunctionCall in the closure of a Python function, borrowed. NULL if there is none. */
static inline PyObject *
closed_over(PyObject *function)
{
    PyObject *cells = PyFunction_GET_CLOSURE(function);
    for (Py_ssize_t i = 0; cells != NULL && i < PyTuple_GET_SIZE(cells); i++) {
        PyObject *held = PyCell_GET(PyTuple_GET_ITEM(cells, i));
        if (held != NULL && Py_IS_TYPE(held, function_calls.type))
            return held;
    }
    return NULL;
}

/* Return the function in a wrapper's closure that has a FunctionCall in its own closure, borrowed. NULL if there
   is none. */
static inline PyObject *
timed_in(PyObject *wrapper)
{
    PyObject *cells = PyFunction_GET_CLOSURE(wrapper);
    for (Py_ssize_t i = 0; cells != NULL && i < PyTuple_GET_SIZE(cells); i++) {
        PyObject *held = PyCell_GET(PyTuple_GET_ITEM(cells, i));
        if (held != NULL && PyFunction_Check(held) && closed_over(held) != NULL)
            return held;
    }
    return NULL;
}

/* Return the FunctionCall of `function`, which is a wrapper or the function in a wrapper's closure. */
static inline PyObject *
call_of(PyObject *function)
{
    PyObject *found = closed_over(function), *timed = found == NULL ? timed_in(function) : NULL;
    return timed == NULL ? found : closed_over(timed);
}

/* Pack the arguments of a vectorcall: a tuple, and a dict if there are named arguments. Returns -1 with an exception
   set. */
static int
pack_arguments(PyObject *const *args, size_t count, PyObject *kwnames, PyObject **in_order, PyObject **by_name)
{
    Py_ssize_t given = PyVectorcall_NARGS(count), named = kwnames == NULL ? 0 : PyTuple_GET_SIZE(kwnames);
    *in_order = PyTuple_New(given);
    *by_name = named ? PyDict_New() : NULL;
    if (*in_order == NULL || (named && *by_name == NULL))
        return -1;
    for (Py_ssize_t i = 0; i < given; i++)
        PyTuple_SET_ITEM(*in_order, i, Py_NewRef(args[i]));
    for (Py_ssize_t i = 0; i < named; i++)
        if (PyDict_SetItem(*by_name, PyTuple_GET_ITEM(kwnames, i), args[given + i]) < 0)
            return -1;
    return 0;
}

/* The vectorcall that runs the frame of a Python function. Python 3.13 does not declare it. */
static vectorcallfunc call_in_frame;

/* Make calls of a Python function run `call`. */
static void
replace_call(PyObject *function, vectorcallfunc call)
{
    if (call_in_frame == NULL)
        call_in_frame = ((PyFunctionObject *)function)->vectorcall;
#if PY_VERSION_HEX >= 0x030C0000
    PyFunction_SetVectorcall((PyFunctionObject *)function, call);
#else
    ((PyFunctionObject *)function)->vectorcall = call;
#endif
}

/* Call a wrapper of functions.py, or the function in the wrapper, without running its Python frame. Dynamo still
   traces the frame. Python 3.11 still runs the wrapper's frame if Python code calls it by name. */
static PyObject *
wrapper_call(PyObject *function, PyObject *const *args, size_t count, PyObject *kwnames)
{
    PyObject *call = Py_XNewRef(call_of(function));
    if (UNLIKELY(call == NULL))
        return call_in_frame(function, args, count, kwnames);
    PyObject *result = NULL;
    if (PyDict_GET_SIZE(swapped_in) == 0) {
        PyObject *original = slot_of(&function_calls, call, FUNCTION_ORIGINAL);
        Py_DECREF(call);
        if (original != NULL)
            result = PyObject_Vectorcall(original, args, count, kwnames);
        Py_XDECREF(original);
        return result;
    }
    PyObject *in_order = NULL, *by_name = NULL;
    if (pack_arguments(args, count, kwnames, &in_order, &by_name) < 0)
        goto done;
    result = function_call(call, in_order, by_name);
done:
    Py_XDECREF(in_order);
    Py_XDECREF(by_name);
    Py_DECREF(call);
    return result;
}

static PyObject *
compile_wrapper(PyObject *Py_UNUSED(module), PyObject *function)
{
    PyObject *timed = PyFunction_Check(function) ? timed_in(function) : NULL;
    if (timed == NULL) {
        PyErr_SetString(PyExc_TypeError, "a wrapper of a call is wanted");
        return NULL;
    }
    replace_call(function, wrapper_call);
    replace_call(timed, wrapper_call);
    return Py_NewRef(function);
}

/* A builtin function of the host that is being timed. Only its vectorcall is replaced. The identity, hash, name and
   module of the object do not change. */
typedef struct {
    PyCFunctionObject *function;
    PyObject *call; /* a FunctionCall */
} TimedBuiltin;
enum { TIMED_BUILTINS = 4 };
static TimedBuiltin timed_builtins[TIMED_BUILTINS];
static PyObject *dispatch_stack_of_torch; /* returns the number of modes that see calls of torch */

static TimedBuiltin *
timed_builtin_of(PyObject *function)
{
    for (int i = 0; i < TIMED_BUILTINS; i++)
        if ((PyObject *)timed_builtins[i].function == function)
            return &timed_builtins[i];
    return NULL;
}

/* Return whether calls must be timed now: a model is timed, and torch executes calls. torch does not execute calls
   that are traced into a graph, or that have tensors without contents. */
static int
is_run(void)
{
    if (PyDict_GET_SIZE(swapped_in) == 0)
        return 0;
    PyObject *modes = dispatch_stack_of_torch == NULL ? NULL : PyObject_CallNoArgs(dispatch_stack_of_torch);
    int are_none = modes != NULL && PyLong_Check(modes) && PyLong_AsLong(modes) == 0;
    Py_XDECREF(modes);
    PyErr_Clear();
    return are_none;
}

static PyObject *
call_builtin(PyObject *function, PyObject *const *args, size_t count, PyObject *kwnames)
{
    TimedBuiltin *timed = timed_builtin_of(function);
    PyObject *call = timed == NULL ? NULL : Py_XNewRef(timed->call), *result = NULL;
    PyObject *in_order = NULL, *by_name = NULL;
    if (pack_arguments(args, count, kwnames, &in_order, &by_name) < 0)
        goto done;
    if (call != NULL && is_run())
        result = function_call(call, in_order, by_name);
    else {
        PyMethodDef *theirs = ((PyCFunctionObject *)function)->m_ml;
        PyCFunctionWithKeywords method = (PyCFunctionWithKeywords)(void (*)(void))theirs->ml_meth;
        result = method(PyCFunction_GET_SELF(function), in_order, by_name);
    }
done:
    Py_XDECREF(in_order);
    Py_XDECREF(by_name);
    Py_XDECREF(call);
    return result;
}

static int
takes_keywords(PyObject *function)
{
    return Py_IS_TYPE(function, &PyCFunction_Type) &&
           ((PyCFunctionObject *)function)->m_ml->ml_flags == (METH_VARARGS | METH_KEYWORDS) &&
           (((PyCFunctionObject *)function)->vectorcall == NULL ||
            ((PyCFunctionObject *)function)->vectorcall == call_builtin);
}

/* Return a builtin function that does the same as `function`, without timing. */
static PyObject *
copy_builtin(PyObject *Py_UNUSED(module), PyObject *function)
{
    if (!takes_keywords(function)) {
        PyErr_SetString(PyExc_TypeError, "expected a builtin function that takes a tuple and a dict");
        return NULL;
    }
    PyCFunctionObject *theirs = (PyCFunctionObject *)function;
    return PyCFunction_NewEx(theirs->m_ml, theirs->m_self, theirs->m_module);
}

/* Time the calls of a builtin function by `call`, a FunctionCall. If `call` is None, stop timing them. */
static PyObject *
time_builtin(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *function, *call;
    if (!PyArg_ParseTuple(args, "OO", &function, &call))
        return NULL;
    TimedBuiltin *timed = timed_builtin_of(function);
    if (call == Py_None) {
        if (timed != NULL) /* do not free `call`, because it may be running */
            timed->function->vectorcall = NULL;
        Py_RETURN_NONE;
    }
    if (!takes_keywords(function) || !Py_IS_TYPE(call, function_calls.type)) {
        PyErr_SetString(PyExc_TypeError, "expected a builtin function that takes a tuple and a dict, and its call");
        return NULL;
    }
    if (timed == NULL && (timed = timed_builtin_of(NULL)) == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "too many builtin functions are timed");
        return NULL;
    }
    if (timed->function == NULL)
        timed->function = (PyCFunctionObject *)Py_NewRef(function);
    Py_XSETREF(timed->call, Py_NewRef(call));
    timed->function->vectorcall = call_builtin;
    Py_RETURN_NONE;
}

/* Clear the current exception and call `told` with it. Returns -1 if it is not an Exception, or if `told` raised. */
static int
tell_of_exception(PyObject *told)
{
    if (!PyErr_ExceptionMatches(PyExc_Exception))
        return -1;
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (trace != NULL)
        PyException_SetTraceback(error, trace);
    PyObject *done = PyObject_CallOneArg(told, error);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(trace);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

static PyObject *standing, *host_attribute, *missed, *traces, *failed_call; /* see call_attribute.py */

static PyObject *torch_call; /* the code object of torch's function that calls a module */
/* The module for which this thread last got a replacement of its call. torch reads the attribute twice for one
   call. If another thread removes the replacement between both reads, the second read must also return a callable. */
static _Thread_local void *last_replaced;

/* Return whether torch reads the attribute in order to call a module. Other readers get the host's value. */
static int
is_call_of_torch(void)
{
    PyFrameObject *frame = PyThreadState_GetFrame(PyThreadState_Get());
    int is_call = 0, is_lookup = 1;
    while (frame != NULL && !is_call && is_lookup) {
        PyCodeObject *code = PyFrame_GetCode(frame);
        is_call = (PyObject *)code == torch_call;
        /* this frame is a `__getattribute__` of the host's class, called by the next frame */
        is_lookup = !is_call && PyUnicode_Compare(code->co_name, getattribute) == 0;
        Py_DECREF(code);
        if (is_lookup)
            Py_SETREF(frame, PyFrame_GetBack(frame));
    }
    Py_XDECREF(frame);
    return is_call;
}

/* Do the same as `_get` in call_attribute.py: return the replacement of a module's call. */
static PyObject *
slot_get(PyObject *Py_UNUSED(slot), PyObject *module, PyObject *Py_UNUSED(type))
{
    if (module == NULL || module == Py_None)
        Py_RETURN_NONE;
    PyObject *key = PyLong_FromVoidPtr(module);
    if (key == NULL)
        return NULL;
    PyObject *there = PyDict_GetItemWithError(standing, key);
    Py_DECREF(key);
    if (there == NULL && PyErr_Occurred())
        return NULL;
    int is_call = 0;
    if ((there != Py_None || last_replaced == module) && is_call_of_torch()) {
        there = Py_XNewRef(there); /* take a reference, because the next call may remove the replacement */
        PyObject *is_traced = PyObject_CallNoArgs(traces);
        Py_XDECREF(is_traced);
        PyErr_Clear();
        is_call = is_traced != Py_True;
        if (is_call) {
            if (there == NULL) {
                there = PyObject_CallOneArg(missed, module);
                if (there == NULL && tell_of_exception(failed_call) < 0)
                    return NULL;
            }
            if (there != NULL && there != Py_None) {
                last_replaced = module;
                return there;
            }
        }
        Py_XDECREF(there);
    }
    PyObject *attributes = PyObject_GenericGetDict(module, NULL);
    if (attributes == NULL)
        return NULL;
    there = Py_XNewRef(PyDict_GetItemWithError(attributes, host_attribute));
    Py_DECREF(attributes);
    if (there == NULL && PyErr_Occurred())
        return NULL;
    if ((there == NULL || there == Py_None) && last_replaced == module && is_call) {
        Py_XDECREF(there);
        return PyObject_GetAttr(module, call_impl);
    }
    return there != NULL ? there : Py_NewRef(Py_None);
}

/* Do the same as `_call_after` in call_attribute.py. `self` is (prepared, look, module). */
static PyObject *
call_prepared(PyObject *self, PyObject *args, PyObject *kwargs)
{
    PyObject *look = PyTuple_GET_ITEM(self, 1), *module = PyTuple_GET_ITEM(self, 2);
    PyObject *call = PyObject_CallFunctionObjArgs(PyTuple_GET_ITEM(self, 0), look, module, NULL);
    if (call == NULL && tell_of_exception(failed_call) == 0)
        call = PyObject_GetAttr(module, call_impl);
    if (call == NULL)
        return NULL;
    DEEPER(1);
    PyObject *result = PyObject_Call(call, args, kwargs);
    DEEPER(-1);
    Py_DECREF(call);
    return result;
}

static PyMethodDef prepared_call = {"call_prepared", (PyCFunction)(void (*)(void))call_prepared,
                                    METH_VARARGS | METH_KEYWORDS, NULL};

static PyObject *
call_after(PyObject *Py_UNUSED(module), PyObject *args)
{
    if (PyTuple_GET_SIZE(args) != 3) {
        PyErr_SetString(PyExc_TypeError, "expected three arguments");
        return NULL;
    }
    return PyCFunction_New(&prepared_call, args);
}

/* Run an operation of torch, then call `self.ran(operation, result)`. No Python frame stands between the host's code
   and the operation, so the traceback of its exceptions is the same as without cbtop. */
static PyObject *
run_counted(PyObject *self, PyObject *args)
{
    PyObject *operation, *types, *positional, *named = NULL;
    if (!PyArg_UnpackTuple(args, "__torch_dispatch__", 3, 4, &operation, &types, &positional, &named))
        return NULL;
    /* What an OpOverload calls in its `__call__`. Operations of higher order have no such attribute. */
    PyObject *call = PyObject_GetAttrString(operation, "_op");
    if (call == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError))
            return NULL;
        PyErr_Clear();
        call = Py_NewRef(operation);
    }
    PyObject *result = PyObject_Call(call, positional, named == Py_None ? NULL : named);
    Py_DECREF(call);
    if (result == NULL)
        return NULL;
    PyObject *done = PyObject_CallMethod(self, "ran", "OO", operation, result);
    if (done == NULL)
        Py_CLEAR(result);
    Py_XDECREF(done);
    return result;
}

static PyMethodDef counted_operation = {"run_counted", run_counted, METH_VARARGS, NULL};

static PyObject *
count_operations(PyObject *Py_UNUSED(module), PyObject *mode)
{
    return PyCFunction_New(&counted_operation, mode); /* torch requires that its `__self__` is the mode */
}

static PyObject *
compile_slot(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyTypeObject *type;
    PyObject *stands, *name, *miss, *is_tracing, *failed, *code;
    if (!PyArg_ParseTuple(args, "O!O!UOOOO!", &PyType_Type, &type, &PyDict_Type, &stands, &name, &miss, &is_tracing,
                          &failed, &PyCode_Type, &code))
        return NULL;
    Py_XSETREF(standing, Py_NewRef(stands));
    Py_XSETREF(host_attribute, Py_NewRef(name));
    Py_XSETREF(missed, Py_NewRef(miss));
    Py_XSETREF(traces, Py_NewRef(is_tracing));
    Py_XSETREF(failed_call, Py_NewRef(failed));
    Py_XSETREF(torch_call, Py_NewRef(code));
    type->tp_descr_get = slot_get;
    Py_RETURN_NONE;
}

static PyObject *
compile_module_calls(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyTypeObject *type;
    PyObject *elements_of, *kind, *asked;
    if (!PyArg_ParseTuple(args, "O!OO!O", &PyType_Type, &type, &elements_of, &PyType_Type, &kind, &asked))
        return NULL;
    Py_XSETREF(count_elements, Py_NewRef(elements_of));
    Py_XSETREF(tensor_type, Py_NewRef(kind));
    Py_XSETREF(is_overridden, Py_NewRef(asked));
    c_is_overridden = PyCFunction_CheckExact(asked) && PyCFunction_GET_FLAGS(asked) == METH_O
                          ? PyCFunction_GET_FUNCTION(asked)
                          : NULL;
    PyObject *method = PyObject_GetAttr((PyObject *)kind, numel);
    int is_c = method != NULL && Py_IS_TYPE(method, &PyMethodDescr_Type) &&
               ((PyMethodDescrObject *)method)->d_method->ml_flags == METH_NOARGS;
    c_numel = is_c ? ((PyMethodDescrObject *)method)->d_method->ml_meth : NULL;
    Py_XDECREF(method);
    PyErr_Clear();
    if (compile_type(type, &module_calls) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *
compile_guarded_calls(PyObject *Py_UNUSED(module), PyObject *type)
{
    if (!PyType_Check(type)) {
        PyErr_SetString(PyExc_TypeError, "expected a class");
        return NULL;
    }
    if (compile_type((PyTypeObject *)type, &guarded_calls) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *
compile_function_calls(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyTypeObject *type;
    PyObject *definition, *models, *words, *modes;
    if (!PyArg_ParseTuple(args, "O!O!O!O!O", &PyType_Type, &type, &PyType_Type, &definition, &PyDict_Type, &models,
                          &PyFrozenSet_Type, &words, &modes))
        return NULL;
    Py_XSETREF(dispatch_stack_of_torch, Py_NewRef(modes));
    Py_XSETREF(hiding, Py_NewRef(words));
    Py_XSETREF(definition_type, Py_NewRef(definition));
    Py_XSETREF(swapped_in, Py_NewRef(models));
    if (compile_type(type, &function_calls) < 0)
        return NULL;
    Py_RETURN_NONE;
}

#include "_model_steps.h"
#include "_library_calls.h"

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
    span->position = NULL;
    span->scope = NULL;
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
layer(HotPath *self, PyObject *const *args, Py_ssize_t count, PyObject *kwnames)
{
    static const char *const names[] = {"index", "stack"};
    PyObject *found[2] = {NULL, NULL};
    if (arguments("layer", args, count, kwnames, names, 1, 2, found) < 0)
        return NULL;
    int named = found[1] != NULL && PyObject_IsTrue(found[1]);
    if (named < 0)
        return NULL;
    PyObject *key = named ? PyTuple_Pack(3, layer_kind, found[0], found[1]) : PyTuple_Pack(2, layer_kind, found[0]);
    if (key == NULL)
        return NULL;
    PyObject *span = new_span(self, key, one);
    Py_DECREF(key);
    return span;
}

static PyObject *
hot_path_enter(HotPath *self, PyObject *args)
{
    Position *position;
    Scope *scope;
    long long start_ns;
    if (!PyArg_ParseTuple(args, "O!O!L", PositionType, &position, ScopeType, &scope, &start_ns))
        return NULL;
    enter(self, position, scope);
    say_where(position, scope->node, start_ns);
    Py_RETURN_NONE;
}

/* Return the number of tokens or sequences that a host has given. `given` may be any object. Returns 0 if it is
   not a count. */
static int64_t
count_in(PyObject *given)
{
    int is_too_large = 0;
    long long count = PyLong_CheckExact(given) ? PyLong_AsLongLongAndOverflow(given, &is_too_large) : 0;
    return is_too_large || count < 0 ? 0 : count;
}

static PyObject *
publish(HotPath *self, PyObject *args)
{
    PyObject *tokens, *sequences;
    Position *position;
    Scope *scope;
    long long start_ns;
    if (!PyArg_ParseTuple(args, "O!O!LOO", PositionType, &position, ScopeType, &scope, &start_ns, &tokens,
                          &sequences))
        return NULL;
    want_slot(self, position);
    say_where(position, scope->node, start_ns);
    int64_t size = count_in(tokens);
    say_size(position, size ? size : count_in(sequences));
    Py_RETURN_NONE;
}

static PyObject *
now_ns(HotPath *self, PyObject *Py_UNUSED(ignored))
{
    int64_t now;
    return read_clock(self, &now) < 0 ? NULL : PyLong_FromLongLong(now);
}

static PyObject *
after_fork(HotPath *self, PyObject *Py_UNUSED(ignored))
{
    restart_counting(self->counting);
    if (read_clock(self, &self->forked_ns) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *
count(HotPath *self, PyObject *args)
{
    PyObject *groups;
    double share;
    if (!PyArg_ParseTuple(args, "Od", &groups, &share))
        return NULL;
    Counting *counting = new_counting(groups, share);
    if (counting == NULL)
        return NULL;
    free_counting(self->counting);
    self->counting = counting;
    Py_RETURN_NONE;
}

static PyObject *
counted(HotPath *self, PyObject *Py_UNUSED(ignored))
{
    if (self->counting == NULL)
        Py_RETURN_NONE;
    return counts_so_far(self->counting);
}

static PyObject *
set_recording(HotPath *self, PyObject *on)
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

/* Store the attribute `name` of `object` in `field`. */
static int
take(PyObject *object, const char *name, PyObject **field)
{
    PyObject *value = PyObject_GetAttrString(object, name);
    if (value == NULL)
        return -1;
    Py_XSETREF(*field, value);
    return 0;
}

static int
hot_path_init(HotPath *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"callbacks", "clock_ns", NULL};
    PyObject *callbacks, *clock_ns;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO", names, &callbacks, &clock_ns))
        return -1;
    if (take(callbacks, "define", &self->define) < 0 || take(callbacks, "record", &self->record) < 0 ||
        take(callbacks, "uncounted", &self->uncounted) < 0 || take(callbacks, "amounts", &self->amounts) < 0 ||
        take(callbacks, "give_up", &self->give_up) < 0)
        return -1;
    PyObject *make = PyObject_GetAttrString((PyObject *)self, "_new_position");
    PyObject *find = make == NULL ? NULL : PyObject_CallOneArg(finder, make);
    Py_XDECREF(make);
    if (find == NULL)
        return -1;
    Py_XSETREF(self->find, find);
    PyObject *root = PyObject_CallFunction((PyObject *)ScopeType, "OiO", Py_None, NO_NODE, Py_None);
    if (root == NULL)
        return -1;
    Py_XSETREF(self->root, (Scope *)root);
    Py_XSETREF(self->clock_ns, clock_ns == perf_counter_ns ? NULL : Py_NewRef(clock_ns));
    self->recording = 1;
    self->forked_ns = INT64_MIN;
    generation++;
    return 0;
}

static int
hot_path_traverse(HotPath *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->define);
    Py_VISIT(self->clock_ns);
    Py_VISIT(self->record);
    Py_VISIT(self->uncounted);
    Py_VISIT(self->amounts);
    Py_VISIT(self->give_up);
    Py_VISIT(self->find);
    Py_VISIT(self->root);
    /* Do not visit ring.obj, because no cycle leads through it. If the collector cleared that memoryview first,
       the buffer could not be released. */
    return 0;
}

static int
hot_path_clear(HotPath *self)
{
    generation++; /* invalidates the position that each thread used last */
    self->recording = 0;
    detach(self);
    Py_CLEAR(self->find);
    Py_CLEAR(self->root);
    Py_CLEAR(self->define);
    Py_CLEAR(self->clock_ns);
    Py_CLEAR(self->record);
    Py_CLEAR(self->uncounted);
    Py_CLEAR(self->amounts);
    Py_CLEAR(self->give_up);
    return 0;
}

static void
hot_path_dealloc(HotPath *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    if (self->weak_references != NULL)
        PyObject_ClearWeakRefs((PyObject *)self);
    hot_path_clear(self);
    free_counting(self->counting);
    if (path_of_units == self)
        path_of_units = NULL;
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

#define FAST(function) ((PyCFunction)(void (*)(void))(function))

static PyMethodDef hot_path_methods[] = {
    {"start_brick", (PyCFunction)start_brick, METH_O,
     "start_brick($self, brick, /)\n--\n\n"
     "Start timing `brick` where the caller is: a BrickId, a BrickDefinition, or a name of your own."},
    {"stop_brick", FAST(stop_brick), METH_FASTCALL | METH_KEYWORDS,
     "stop_brick($self, timer, elements, failed=False)\n--\n\n"
     "Record the brick that `timer` timed, with the `elements` it worked on."},
    {"brick", FAST(brick), METH_FASTCALL | METH_KEYWORDS,
     "brick($self, brick, elements=1)\n--\n\n"
     "`with profiler.brick(BrickId.RMS_NORM, elements=4096):` times the block; an exception marks it failed."},
    {"layer", FAST(layer), METH_FASTCALL | METH_KEYWORDS,
     "layer($self, index, stack='')\n--\n\n"
     "`with profiler.layer(3):` makes what runs inside part of layer 3, of a named `stack` where there are several."},
    {"set_recording", (PyCFunction)set_recording, METH_O,
     "set_recording($self, on, /)\n--\n\nRecord from now on, or do not."},
    {"enter", (PyCFunction)hot_path_enter, METH_VARARGS,
     "enter($self, position, scope, start_ns, /)\n--\n\nLet `position` go to `scope`, which began at `start_ns`."},
    {"publish", (PyCFunction)publish, METH_VARARGS,
     "publish($self, position, scope, start_ns, tokens, sequences, /)\n--\n\n"
     "Show readers of the ring `position` in `scope`, which began at `start_ns`, and what its step has of either. "
     "It does not move."},
    {"after_fork", (PyCFunction)after_fork, METH_NOARGS,
     "after_fork($self, /)\n--\n\nIn a child, where nobody is in what ran until now: the parent records that."},
    {"count", (PyCFunction)count, METH_VARARGS,
     "count($self, groups, share, /)\n--\n\n"
     "Count events in a part of the bricks from now on. It takes up to this `share` of the time. `groups` has up to 2 "
     "tuples of up to 4 events, each (type, config) of perf_event_open."},
    {"counted", (PyCFunction)counted, METH_NOARGS,
     "counted($self, /)\n--\n\n"
     "Return (ns used, ns of a read, errno of each group, rows), or None if nothing is counted. A row has the node, its "
     "counted calls, page faults, those that read a disk, voluntary and involuntary context switches, and for each "
     "group its calls and 4 counts."},
    {"now_ns", (PyCFunction)now_ns, METH_NOARGS,
     "now_ns($self, /)\n--\n\nThe clock that everything here is timed with."},
    {"_new_position", (PyCFunction)new_position, METH_NOARGS, "_new_position($self, /)\n--\n\n"},
    {"attach", (PyCFunction)attach, METH_O,
     "attach($self, ring, /)\n--\n\n"
     "Write into `ring` from now on; gives what writes a record of its own beside this hot path."},
    {"_write", FAST(write_own), METH_FASTCALL, "_write($self, tag, start_ns, end_ns, elements, /)\n--\n\n"},
    {0},
};

static PyObject *
get_position(HotPath *self, void *Py_UNUSED(closure))
{
    return Py_XNewRef((PyObject *)this_position(self));
}

static PyObject *
get_recording(HotPath *self, void *Py_UNUSED(closure))
{
    if (!self->recording)
        Py_RETURN_FALSE;
    Position *position = this_position(self);
    return position == NULL ? NULL : PyBool_FromLong(position->recording);
}

static PyGetSetDef hot_path_properties[] = {
    {"position", (getter)get_position, NULL,
     "Where in the graph the caller is: what it starts next is started there.", NULL},
    {"recording", (getter)get_recording, NULL, "Whether what the caller starts now is timed.", NULL},
    {0},
};

static PyMemberDef hot_path_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(HotPath, weak_references), READONLY, NULL},
    {0},
};

static PyType_Slot hot_path_slots[] = {
    {Py_tp_doc, "Times what is started and stopped on `clock_ns`, and writes each as one record."},
    {Py_tp_init, hot_path_init},
    {Py_tp_traverse, hot_path_traverse},
    {Py_tp_clear, hot_path_clear},
    {Py_tp_dealloc, hot_path_dealloc},
    {Py_tp_methods, hot_path_methods},
    {Py_tp_getset, hot_path_properties},
    {Py_tp_members, hot_path_members},
    {0},
};

static PyType_Spec hot_path_spec = {
    .name = "cbtop.profiler._hot_path.HotPath",
    .basicsize = sizeof(HotPath),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = hot_path_slots,
};

/* ---- span ---- */

static PyObject *
span_enter(Span *self, PyObject *Py_UNUSED(ignored))
{
    Position *position = NULL;
    Scope *scope = NULL;
    if (self->hot_path->recording && begin(self->hot_path, self->key, &position, &scope, &self->start_ns) < 0)
        return NULL;
    Py_XSETREF(self->scope, scope);
    Py_XSETREF(self->position, position);
    return Py_NewRef(self);
}

static PyObject *
span_exit(Span *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 3) {
        PyErr_Format(PyExc_TypeError, "__exit__() takes 3 arguments, %zd were given", count);
        return NULL;
    }
    if (self->scope != NULL) {
        /* Reading the elements may run code that enters this span again. So take references to the objects of the
           span. */
        Position *position = (Position *)Py_NewRef(self->position);
        Scope *scope = (Scope *)Py_NewRef(self->scope);
        PyObject *elements = Py_NewRef(self->elements == NULL ? Py_None : self->elements);
        int done = finish(self->hot_path, position, scope, self->start_ns, elements, args[0] != Py_None);
        Py_DECREF(elements);
        Py_DECREF(scope);
        Py_DECREF(position);
        if (done < 0)
            return NULL;
    }
    Py_RETURN_NONE;
}

/* Runs __enter__ or __exit__ of a span. A `with` statement binds both methods, which usually makes an object for
   each. Binding a SpanMethod makes no object, because the result is the span itself, which is callable. This saves
   a quarter of the cost of the `with` form. */
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

/* Set a SpanMethod as the method `name` of spans. */
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
    Py_VISIT(self->position);
    Py_VISIT(self->scope);
    return 0;
}

/* No tp_clear is needed, because tp_clear of the hot path breaks every cycle through a span. */
static void
span_dealloc(Span *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    Py_CLEAR(self->scope);
    Py_CLEAR(self->position);
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
    {Py_tp_doc, "The `with` form of a brick or a layer."},
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

static PyMethodDef functions[] = {
    {"compile_module_calls", compile_module_calls, METH_VARARGS,
     "compile_module_calls(type, elements_of, kind, is_overridden, /)\n--\n\n"
     "Let calling an instance of `type` time its module in C. Its elements are the `numel()` of a first argument whose\n"
     "type is `kind` and that is not overridden, and what `elements_of(args, kwargs)` gives of others."},
    {"compile_guarded_calls", compile_guarded_calls, METH_O,
     "compile_guarded_calls(type, /)\n--\n\n"
     "Let calling an instance of `type` call its `before`, its module and its `after` from no Python frame."},
    {"compile_function_calls", compile_function_calls, METH_VARARGS,
     "compile_function_calls(type, definition, swapped_in, hiding, modes, /)\n--\n\n"
     "Let calling an instance of `type` time its function in C, but in a `definition` of the same name. The values of\n"
     "`swapped_in` are the paths that record, `hiding` are the arguments by which attention leaves out keys."},
    {"compile_model_calls", compile_model_calls, METH_VARARGS,
     "compile_model_calls(types, lent, /)\n--\n\n"
     "Let calling an instance of the first of `types` run a step of its model in C; see instrument/compiled_steps.py."},
    {"compile_generation", compile_generation, METH_O,
     "compile_generation(wrapper, /)\n--\n\n"
     "Let C code make the calls of a wrapper of instrument/generation.py; gives it back."},
    {"begin_run", FAST(begin_run), METH_FASTCALL,
     "begin_run(steps, call, called_ns, /)\n--\n\n"
     "Begin the plain step of a runner's run, which `call` describes. None: Python must begin it."},
    {"end_run", FAST(end_run), METH_FASTCALL,
     "end_run(open_step, returned_ns, /)\n--\n\n"
     "End the plain step of a runner's run. False: Python must end it."},
    {"compile_wrapper", compile_wrapper, METH_O,
     "compile_wrapper(function, /)\n--\n\n"
     "Let calling `function`, which closes over such an instance, be calling that; gives it back."},
    {"compile_slot", compile_slot, METH_VARARGS,
     "compile_slot(type, standing, name, missed, is_tracing, failed, code, /)\n--\n\n"
     "Let attributes of `type` be looked up in C: in `standing` by the id of their module, then as `name` in the module's\n"
     "own dictionary; `missed(module)` gives it for a module that does not stand there. `failed(error)` is called with an\n"
     "exception of ours, and raises what the host is to have. Only `code` is given a replacement."},
    {"call_after", call_after, METH_VARARGS,
     "call_after(prepared, look, module, /)\n--\n\n"
     "Make a call that calls what `prepared(look, module)` returns, from no Python frame."},
    {"count_operations", count_operations, METH_O,
     "count_operations(mode, /)\n--\n\n"
     "Make the `__torch_dispatch__` of `mode`. It runs each operation from no Python frame, and then calls\n"
     "`mode.ran(operation, result)`."},
    {"copy_builtin", copy_builtin, METH_O,
     "copy_builtin(function, /)\n--\n\n"
     "Make a builtin function that always does what `function` does when it is not timed."},
    {"time_builtin", time_builtin, METH_VARARGS,
     "time_builtin(function, call, /)\n--\n\n"
     "Let calling the builtin `function` be calling `call`, a FunctionCall; or be its own call again if that is None.\n"
     "The object stays as it is: identity, hash, name, module and pickles."},
    {0},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "cbtop.profiler._hot_path",
    .m_doc = "What runs at every brick, compiled; hot_path.py says what it does.",
    .m_size = -1,
    .m_methods = functions,
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
        (finder = attribute_of("cbtop.profiler.positions", "finder")) == NULL ||
        (perf_counter_ns = attribute_of("cbtop.protocol.clock", "perf_counter_ns")) == NULL ||
        (one = PyLong_FromLong(1)) == NULL || (numel = PyUnicode_InternFromString("numel")) == NULL ||
        (call_impl = PyUnicode_InternFromString("_call_impl")) == NULL ||
        (before_name = PyUnicode_InternFromString("before")) == NULL ||
        (after_name = PyUnicode_InternFromString("after")) == NULL ||
        (getattribute = PyUnicode_InternFromString("__getattribute__")) == NULL ||
        (model_of_step = PyUnicode_InternFromString("_model")) == NULL ||
        (name_of_key = PyUnicode_InternFromString("name")) == NULL ||
        (shape_of_tensor = PyUnicode_InternFromString("shape")) == NULL ||
        (is_floating_dtype = PyUnicode_InternFromString("is_floating_point")) == NULL ||
        (dtype_of_tensor = PyUnicode_InternFromString("dtype")) == NULL ||
        (is_cpu_of_tensor = PyUnicode_InternFromString("is_cpu")) == NULL ||
        (ScopeType = add_type(module, &scope_spec)) == NULL ||
        (PositionType = add_type(module, &position_spec)) == NULL ||
        (TimerType = add_type(module, &timer_spec)) == NULL ||
        (HotPathType = add_type(module, &hot_path_spec)) == NULL ||
        (SpanType = add_type(module, &span_spec)) == NULL ||
        (KnownCallType = add_type(module, &known_call_spec)) == NULL ||
        (LibraryCallType = add_type(module, &library_call_spec)) == NULL ||
        (SpanMethodType = add_type(module, &span_method_spec)) == NULL || bind_to_itself("__enter__") < 0 ||
        bind_to_itself("__exit__") < 0 ||
        PyObject_SetAttrString((PyObject *)HotPathType, "scope_type", (PyObject *)ScopeType) < 0 ||
        PyObject_SetAttrString((PyObject *)HotPathType, "implementation", python) < 0)
        Py_CLEAR(module);
    Py_XDECREF(node_kind);
    Py_XDECREF(python);
    return module;
}
