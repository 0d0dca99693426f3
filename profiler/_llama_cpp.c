/* The callback that llama.cpp's scheduler calls at each node of a graph (`cb_eval`). In one graph of `every`, it
   stores the names and times of the nodes.

   Rules
   - The callback may run in any thread, with or without the GIL, even while Python exits. So it runs no Python code.
     Its memory is never freed, because a context of llama.cpp may call it during the whole life of the context.
   - ggml's structures differ by version. A node's name, operation and sizes are read by ggml's own functions.
   - If the callback declines all nodes of a graph, ggml computes the graph as a whole. In a graph that is stored
     ("kept"), the callback requests every node that computes something. Then ggml computes the nodes one by one and
     waits after each.
   - A graph begins with the look-up of its tokens' rows. It ends with the node result_output, or when the next graph
     begins. If there is no room for a kept graph, it is counted as lost. If a second thread begins a graph meanwhile,
     because two contexts share a callback, the kept graph is also counted as lost.
   - A caller that begins and ends the steps itself switches the callback on (`resume`) and off (`pause`) for one call
     of llama_decode. `pause` also ends a graph that has no node result_output, as in an embedding.
*/

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#ifndef __linux__
#error "time.perf_counter_ns is CLOCK_MONOTONIC on Linux alone"
#endif

enum { NAME_BYTES = 64, OPERATION_BYTES = 32, FIRST_NODES = 1024, MAX_NODES = 16384, GRAPHS = 8 };
enum { EMPTY, KEPT, FULL };
#define UNKNOWN (-1)

typedef struct {
    char name[NAME_BYTES];
    char operation[OPERATION_BYTES];
    int64_t elements, start_ns, end_ns;
} Node;

/* The stored nodes of one graph. The computing thread owns this object until `state` is FULL. Then the reading
   thread owns it. */
typedef struct {
    atomic_int state;
    pthread_t thread;
    int64_t number, start_ns, tokens, outputs;
    int nodes, room;
    Node *node;
} Graph;

typedef struct {
    const char *(*name_of)(const void *tensor);
    const char *(*operation_of)(const void *tensor);
    int64_t (*elements_of)(const void *tensor);
    int64_t (*rows_of)(const void *tensor);
    uint64_t every;
    int wake; /* an eventfd that wakes the reading thread, or -1 */
    atomic_bool is_on;
    atomic_uint_fast64_t lost;
    _Atomic(Graph *) keeps; /* the running graph if its nodes are stored, else NULL */
    atomic_flag is_locked; /* locks the fields below and the graph in `keeps` */
    uint64_t begun;
    int64_t kept;
    Graph graphs[GRAPHS];
} Context;

static int64_t
now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static void
wake(Context *context)
{
    uint64_t one = 1;
    if (context->wake < 0)
        return;
    ssize_t ignored = write(context->wake, &one, sizeof one);
    (void)ignored;
}

static void
lock(Context *context)
{
    while (atomic_flag_test_and_set_explicit(&context->is_locked, memory_order_acquire))
        sched_yield(); /* takes some nanoseconds, and happens only if two contexts share a callback */
}

static void
unlock(Context *context)
{
    atomic_flag_clear_explicit(&context->is_locked, memory_order_release);
}

/* Return the graph in `keeps` if it belongs to the calling thread, else NULL. */
static Graph *
own(Context *context)
{
    Graph *graph = atomic_load(&context->keeps);
    return graph != NULL && pthread_equal(graph->thread, pthread_self()) ? graph : NULL;
}

/* Stop storing the running graph. `state` is FULL, or EMPTY if the graph is lost. */
static void
leave(Context *context, int state)
{
    Graph *graph = atomic_exchange(&context->keeps, NULL);
    atomic_store_explicit(&graph->state, state, memory_order_release);
    if (state == EMPTY)
        atomic_fetch_add(&context->lost, 1);
    wake(context);
}

static void
begin(Context *context, const void *tensor)
{
    if (atomic_load(&context->keeps) != NULL)
        leave(context, own(context) != NULL ? FULL : EMPTY);
    if (context->begun++ % context->every != 0)
        return;
    for (int at = 0; at < GRAPHS; at++) {
        Graph *graph = &context->graphs[at];
        if (atomic_load_explicit(&graph->state, memory_order_acquire) != EMPTY)
            continue;
        atomic_store(&graph->state, KEPT);
        graph->thread = pthread_self();
        graph->number = context->kept++;
        graph->tokens = context->rows_of(tensor);
        graph->outputs = UNKNOWN;
        graph->nodes = 0;
        graph->start_ns = now_ns();
        atomic_store(&context->keeps, graph);
        return;
    }
    atomic_fetch_add(&context->lost, 1);
    wake(context);
}

/* Return the next node of the graph, or NULL if there is no room for it. */
static Node *
room_for_one(Graph *graph)
{
    if (graph->nodes == graph->room) {
        int room = graph->room ? 2 * graph->room : FIRST_NODES;
        Node *node = room <= MAX_NODES ? realloc(graph->node, (size_t)room * sizeof *node) : NULL;
        if (node == NULL)
            return NULL;
        graph->node = node;
        graph->room = room;
    }
    return &graph->node[graph->nodes];
}

static void
copy(char *to, size_t size, const char *from)
{
    size_t length = from == NULL ? 0 : strnlen(from, size - 1);
    memcpy(to, from == NULL ? "" : from, length);
    to[length] = '\0';
}

static bool
is_one_of(const char *name, const char *const *names)
{
    while (*names != NULL)
        if (strcmp(name, *names++) == 0)
            return true;
    return false;
}

static const char *const BEGINS[] = {"inp_embd", "embd", "node_0", NULL};
static const char *const COMPUTES_NOTHING[] = {"NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE", NULL};

/* Store a node of the caller's graph. Returns whether the node computes anything. */
static bool
note(Context *context, Graph *graph, const void *tensor, const char *name)
{
    const char *operation = context->operation_of(tensor);
    if (is_one_of(operation, COMPUTES_NOTHING))
        return false;
    Node *node = room_for_one(graph);
    if (node == NULL) {
        leave(context, EMPTY);
        return false;
    }
    copy(node->name, sizeof node->name, name);
    copy(node->operation, sizeof node->operation, operation);
    node->elements = context->elements_of(tensor);
    node->start_ns = now_ns();
    return true;
}

static bool
ask(Context *context, const void *tensor)
{
    const char *name = context->name_of(tensor);
    bool begins = is_one_of(name, BEGINS) && strcmp(context->operation_of(tensor), "GET_ROWS") == 0;
    if (!begins && atomic_load_explicit(&context->keeps, memory_order_relaxed) == NULL)
        return false;
    lock(context);
    if (begins)
        begin(context, tensor);
    Graph *graph = own(context);
    bool is_wanted = graph != NULL && note(context, graph, tensor, name);
    unlock(context);
    return is_wanted;
}

static void
computed(Context *context, const void *tensor)
{
    int64_t end_ns = now_ns();
    lock(context);
    Graph *graph = own(context);
    if (graph != NULL && graph->nodes < graph->room) {
        Node *node = &graph->node[graph->nodes++];
        node->end_ns = end_ns;
        if (strcmp(node->name, "result_output") == 0) {
            graph->outputs = context->rows_of(tensor);
            leave(context, FULL);
        }
    }
    unlock(context);
}

/* The callback, of type ggml_backend_sched_eval_callback. */
static bool
callback(void *tensor, bool is_asked, void *data)
{
    Context *context = data;
    if (!is_asked) {
        computed(context, tensor);
        return true;
    }
    return atomic_load_explicit(&context->is_on, memory_order_relaxed) && ask(context, tensor);
}

/* Return the context at the address `object`, or NULL with an exception set. */
static Context *
context_at(PyObject *address)
{
    Context *context = PyLong_AsVoidPtr(address);
    if (context == NULL && !PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "there is no context at 0");
    return context;
}

static PyObject *
create(PyObject *module, PyObject *arguments)
{
    unsigned long long name_of, operation_of, elements_of, rows_of, every;
    int wake;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "KKKKKi", &name_of, &operation_of, &elements_of, &rows_of, &every, &wake))
        return NULL;
    Context *context = calloc(1, sizeof *context);
    if (context == NULL)
        return PyErr_NoMemory();
    context->name_of = (const char *(*)(const void *))(uintptr_t)name_of;
    context->operation_of = (const char *(*)(const void *))(uintptr_t)operation_of;
    context->elements_of = (int64_t (*)(const void *))(uintptr_t)elements_of;
    context->rows_of = (int64_t (*)(const void *))(uintptr_t)rows_of;
    context->every = every ? every : 1;
    context->wake = wake;
    atomic_store(&context->is_on, true);
    return Py_BuildValue("KK", (unsigned long long)(uintptr_t)callback, (unsigned long long)(uintptr_t)context);
}

static PyObject *
stop(PyObject *module, PyObject *address)
{
    (void)module;
    Context *context = context_at(address);
    if (context == NULL)
        return NULL;
    atomic_store(&context->is_on, false);
    Py_RETURN_NONE;
}

static PyObject *
resume(PyObject *module, PyObject *address)
{
    (void)module;
    Context *context = context_at(address);
    if (context == NULL)
        return NULL;
    atomic_store(&context->is_on, true);
    Py_RETURN_NONE;
}

static PyObject *
pause_(PyObject *module, PyObject *address)
{
    (void)module;
    Context *context = context_at(address);
    if (context == NULL)
        return NULL;
    atomic_store(&context->is_on, false);
    lock(context);
    if (own(context) != NULL)
        leave(context, FULL);
    unlock(context);
    Py_RETURN_NONE;
}

static PyObject *
as_python(const Graph *graph)
{
    PyObject *nodes = PyList_New(graph->nodes);
    for (int at = 0; nodes != NULL && at < graph->nodes; at++) {
        const Node *node = &graph->node[at];
        PyObject *name = PyUnicode_DecodeUTF8(node->name, (Py_ssize_t)strlen(node->name), "replace");
        PyObject *each = name == NULL ? NULL
                                      : Py_BuildValue("NsLLL", name, node->operation, (long long)node->elements,
                                                      (long long)node->start_ns, (long long)node->end_ns);
        if (each == NULL)
            Py_CLEAR(nodes);
        else
            PyList_SET_ITEM(nodes, at, each);
    }
    if (nodes == NULL)
        return NULL;
    return Py_BuildValue("LLLLN", (long long)graph->number, (long long)graph->start_ns, (long long)graph->tokens,
                         (long long)graph->outputs, nodes);
}

static PyObject *
take(PyObject *module, PyObject *address)
{
    (void)module;
    Context *context = context_at(address);
    if (context == NULL)
        return NULL;
    PyObject *taken = PyList_New(0);
    for (int at = 0; taken != NULL && at < GRAPHS; at++) {
        Graph *graph = &context->graphs[at];
        if (atomic_load_explicit(&graph->state, memory_order_acquire) != FULL)
            continue;
        PyObject *each = as_python(graph);
        if (each == NULL || PyList_Append(taken, each) < 0)
            Py_CLEAR(taken);
        Py_XDECREF(each);
        atomic_store_explicit(&graph->state, EMPTY, memory_order_release);
    }
    if (taken == NULL)
        return NULL;
    return Py_BuildValue("KN", (unsigned long long)atomic_exchange(&context->lost, 0), taken);
}

static PyMethodDef functions[] = {
    {"create", create, METH_VARARGS, "create(name_of, operation_of, elements_of, rows_of, every, wake): the addresses of "
                                     "the callback and of its user data."},
    {"take", take, METH_O, "take(user_data): how many graphs were lost since the last time, and those kept, each as "
                           "(number, start_ns, tokens, outputs, nodes)."},
    {"stop", stop, METH_O, "stop(user_data): decline all from now on."},
    {"resume", resume, METH_O, "resume(user_data): no longer decline all."},
    {"pause", pause_, METH_O, "pause(user_data): decline all from now on. Ends the running graph of this thread."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "cbtop.profiler._llama_cpp",
    .m_doc = "What llama.cpp asks at each node of a graph; instrument/llama_cpp.py says what becomes of it.",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC
PyInit__llama_cpp(void)
{
    return PyModule_Create(&definition);
}
