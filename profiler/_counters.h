/* Counters of the processor and the system for a part of the bricks. Included in _hot_path.c.

   Rules
   - Nothing here runs unless a hot path has a `counting`. Then a call is counted if a random number allows it and if
     counting has used less than its allowance. The bricks inside a counted call are counted with it.
   - Counters are read before the clock at the start and after it at the end. So the time of a counted brick does not
     contain the reads, but the time of the brick around it does.
   - getrusage counts page faults and context switches of the thread. Groups of events of perf_event_open count the
     rest. A call counts for a group only if the group ran on the processor during the whole call.
   - The host may have closed our file descriptors, and may use the numbers for its own files. So each read is preceded
     by an ioctl that only files of perf_event_open answer with the expected identity.
   - A forked child inherits counters of its parent's thread, and opens its own.
*/

#include <errno.h>
#include <linux/perf_event.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>

enum { MAX_GROUPS = 2, MAX_EVENTS = 4, MAX_DEPTH = 16, MAX_COUNTED_NODES = 1 << 14, SYSTEM_COUNTS = 4 };
enum { CALIBRATION_READS = 32, ONE_IN = 4 };
enum { ROW_WORDS = 1 + SYSTEM_COUNTS + MAX_GROUPS * (1 + MAX_EVENTS) };

typedef struct {
    int64_t system[SYSTEM_COUNTS]; /* page faults, those that read a disk, voluntary and involuntary switches */
    uint64_t groups[MAX_GROUPS][3 + MAX_EVENTS]; /* number of events, time enabled, time running, values */
    char is_read[MAX_GROUPS];
} Reading;

/* The counters of one thread. */
typedef struct {
    const struct Counting *of; /* compared, never followed */
    int64_t forks;             /* forks of the process when the files were opened */
    uint64_t random;
    int depth; /* number of open counted calls */
    int files[MAX_GROUPS][MAX_EVENTS];
    uint64_t identities[MAX_GROUPS];
    struct { const Scope *scope; const Position *position; Reading reading; } open[MAX_DEPTH];
} ThreadCounters;

typedef struct Counting {
    int groups, events[MAX_GROUPS];
    struct { uint32_t type; uint64_t config; } wanted[MAX_GROUPS][MAX_EVENTS];
    int errors[MAX_GROUPS]; /* errno of the last attempt to open a group, or 0 */
    double share;
    int64_t since_ns, cost_ns, read_ns;
    int64_t rows, (*counts)[ROW_WORDS]; /* by node: calls, system counts, and for each group calls and values */
} Counting;

static inline int64_t
monotonic_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static _Thread_local ThreadCounters *of_thread __attribute__((tls_model("initial-exec"))) = NULL;
static pthread_key_t counters_key;
static int has_counters_key;
static int64_t forks;

static void
close_group(ThreadCounters *own, int group)
{
    for (int i = 0; i < MAX_EVENTS; i++) {
        uint64_t identity;
        /* The first file proves its identity. The others are closed only if they are files of perf_event_open. */
        if (own->files[group][i] >= 0 && ioctl(own->files[group][i], PERF_EVENT_IOC_ID, &identity) == 0 &&
            (i > 0 || identity == own->identities[group]))
            close(own->files[group][i]);
        own->files[group][i] = -1;
    }
}

static void
free_counters(void *thread)
{
    for (int group = 0; group < MAX_GROUPS; group++)
        close_group(thread, group);
    free(thread);
}

/* Open the events of a group for this thread. Returns 0, or the errno of the first event that does not open. */
static int
open_group(Counting *counting, ThreadCounters *own, int group)
{
    for (int i = 0; i < counting->events[group]; i++) {
        struct perf_event_attr wanted;
        memset(&wanted, 0, sizeof wanted);
        wanted.size = sizeof wanted;
        wanted.type = counting->wanted[group][i].type;
        wanted.config = counting->wanted[group][i].config;
        wanted.exclude_kernel = wanted.exclude_hv = 1; /* all that a user may count with perf_event_paranoid at 2 */
        wanted.read_format = PERF_FORMAT_GROUP | PERF_FORMAT_TOTAL_TIME_ENABLED | PERF_FORMAT_TOTAL_TIME_RUNNING;
        int file = (int)syscall(SYS_perf_event_open, &wanted, 0, -1, i == 0 ? -1 : own->files[group][0],
                                PERF_FLAG_FD_CLOEXEC);
        if (file < 0 || (i == 0 && ioctl(file, PERF_EVENT_IOC_ID, &own->identities[group]) != 0)) {
            int error = errno;
            if (file >= 0)
                close(file);
            close_group(own, group);
            return error;
        }
        own->files[group][i] = file;
    }
    return 0;
}

static void
read_counters(Counting *counting, ThreadCounters *own, Reading *reading)
{
    struct rusage usage;
    getrusage(RUSAGE_THREAD, &usage);
    reading->system[0] = usage.ru_minflt + usage.ru_majflt;
    reading->system[1] = usage.ru_majflt;
    reading->system[2] = usage.ru_nvcsw;
    reading->system[3] = usage.ru_nivcsw;
    for (int group = 0; group < counting->groups; group++) {
        uint64_t identity;
        int file = own->files[group][0];
        ssize_t bytes = 8 * (3 + counting->events[group]);
        reading->is_read[group] = file >= 0 && ioctl(file, PERF_EVENT_IOC_ID, &identity) == 0 &&
                                  identity == own->identities[group] &&
                                  read(file, reading->groups[group], (size_t)bytes) == bytes;
    }
}

/* Return whether counting has used less than its share of the time. */
static inline int
may_spend(const Counting *counting)
{
    return (double)counting->cost_ns <= counting->share * (double)(monotonic_ns() - counting->since_ns);
}

/* Return the counters of this thread, opened if this is its first counted call. NULL without memory. */
__attribute__((noinline, cold)) static ThreadCounters *
open_counters(Counting *counting)
{
    ThreadCounters *own = of_thread;
    if (own == NULL) {
        if ((own = calloc(1, sizeof *own)) == NULL)
            return NULL;
        of_thread = own;
        if (has_counters_key)
            pthread_setspecific(counters_key, own);
    }
    else
        for (int group = 0; group < MAX_GROUPS; group++)
            close_group(own, group);
    own->of = counting;
    own->forks = forks;
    own->depth = 0;
    own->random = (uint64_t)(uintptr_t)own | 1;
    memset(own->files, 0xff, sizeof own->files);
    for (int group = 0; group < counting->groups; group++)
        counting->errors[group] = open_group(counting, own, group);
    Reading reading;
    int64_t before_ns = monotonic_ns();
    for (int i = 0; i < CALIBRATION_READS; i++)
        read_counters(counting, own, &reading);
    int64_t taken_ns = monotonic_ns() - before_ns;
    counting->read_ns = taken_ns / CALIBRATION_READS;
    counting->cost_ns += taken_ns;
    return own;
}

/* Return whether a call inside of no counted call is counted. */
static inline int
is_counted(Counting *counting, ThreadCounters *own)
{
    own->random ^= own->random << 13;
    own->random ^= own->random >> 7;
    own->random ^= own->random << 17;
    return own->random % ONE_IN == 0 && may_spend(counting);
}

/* Return whether `scope` at `position` is inside of the counted call number `at`. */
static inline int
is_inside_of(const ThreadCounters *own, int at, const Scope *scope, const Position *position)
{
    if (own->open[at].position != position)
        return 0;
    for (const Scope *around = scope->parent; around != NULL; around = around->parent)
        if (around == own->open[at].scope)
            return 1;
    return 0;
}

/* Read the counters before a call in `scope` begins, if it is counted. */
__attribute__((noinline)) static void
counters_begin(Counting *counting, const Scope *scope, const Position *position)
{
    ThreadCounters *own = of_thread;
    if (own == NULL || own->forks != forks || own->of != counting) {
        if (!may_spend(counting) || (own = open_counters(counting)) == NULL)
            return;
    }
    while (own->depth > 0 && !is_inside_of(own, own->depth - 1, scope, position))
        own->depth--; /* forget calls that were never stopped */
    if (own->depth == MAX_DEPTH || (own->depth == 0 && !is_counted(counting, own)))
        return;
    own->open[own->depth].scope = scope;
    own->open[own->depth].position = position;
    read_counters(counting, own, &own->open[own->depth].reading);
    own->depth++;
}

/* Add the counters of a call that ended to its node, if the same thread counted its start. `is_whole` says whether it
   ended as a recorded call ends, without an error. */
__attribute__((noinline)) static void
counters_end(Counting *counting, const Scope *scope, const Position *position, int is_whole)
{
    ThreadCounters *own = of_thread;
    if (own == NULL || own->forks != forks || own->of != counting)
        return;
    int at = own->depth - 1;
    while (at >= 0 && (own->open[at].scope != scope || own->open[at].position != position))
        at--;
    if (at < 0)
        return;
    own->depth = at; /* calls inside that were never stopped are dropped */
    int64_t node = scope->node;
    Reading now, *before = &own->open[at].reading;
    read_counters(counting, own, &now);
    counting->cost_ns += 2 * counting->read_ns;
    if (!is_whole || node <= NO_NODE || node >= MAX_COUNTED_NODES)
        return;
    if (node >= counting->rows) {
        int64_t rows = node + 256;
        void *more = realloc(counting->counts, (size_t)rows * sizeof *counting->counts);
        if (more == NULL)
            return;
        counting->counts = more;
        memset(counting->counts[counting->rows], 0, (size_t)(rows - counting->rows) * sizeof *counting->counts);
        counting->rows = rows;
    }
    int64_t *row = counting->counts[node];
    *row++ += 1;
    for (int i = 0; i < SYSTEM_COUNTS; i++)
        *row++ += now.system[i] - before->system[i];
    for (int group = 0; group < counting->groups; group++, row += 1 + MAX_EVENTS) {
        uint64_t *first = before->groups[group], *last = now.groups[group];
        if (!now.is_read[group] || !before->is_read[group] || last[2] == first[2] ||
            last[1] - first[1] != last[2] - first[2])
            continue;
        row[0] += 1;
        for (int i = 0; i < counting->events[group]; i++)
            row[1 + i] += (int64_t)(last[3 + i] - first[3 + i]);
    }
}

/* In a forked child, forget what the parent has counted. */
static void
restart_counting(Counting *counting)
{
    forks++;
    if (counting == NULL)
        return;
    free(counting->counts);
    counting->counts = NULL;
    counting->rows = counting->cost_ns = 0;
    counting->since_ns = monotonic_ns();
}

static void
free_counting(Counting *counting)
{
    if (counting != NULL)
        free(counting->counts);
    free(counting);
}

/* Read a list of groups, each a list of (type, config). Returns -1 with an exception set if it is not one. */
static int
take_groups(Counting *counting, PyObject *groups)
{
    if (!PyTuple_Check(groups) || PyTuple_GET_SIZE(groups) > MAX_GROUPS)
        return PyErr_Format(PyExc_ValueError, "a tuple of up to %d groups is wanted", MAX_GROUPS), -1;
    counting->groups = (int)PyTuple_GET_SIZE(groups);
    for (int group = 0; group < counting->groups; group++) {
        PyObject *events = PyTuple_GET_ITEM(groups, group);
        if (!PyTuple_Check(events) || PyTuple_GET_SIZE(events) < 1 || PyTuple_GET_SIZE(events) > MAX_EVENTS)
            return PyErr_Format(PyExc_ValueError, "a group is a tuple of 1 to %d events", MAX_EVENTS), -1;
        counting->events[group] = (int)PyTuple_GET_SIZE(events);
        for (int i = 0; i < counting->events[group]; i++) {
            unsigned int type;
            unsigned long long config;
            if (!PyArg_ParseTuple(PyTuple_GET_ITEM(events, i), "IK", &type, &config))
                return -1;
            counting->wanted[group][i].type = type;
            counting->wanted[group][i].config = config;
        }
    }
    return 0;
}

static Counting *
new_counting(PyObject *groups, double share)
{
    Counting *counting = calloc(1, sizeof *counting);
    if (counting == NULL)
        return (void)PyErr_NoMemory(), NULL;
    if (take_groups(counting, groups) < 0) {
        free_counting(counting);
        return NULL;
    }
    if (!has_counters_key)
        has_counters_key = pthread_key_create(&counters_key, free_counters) == 0;
    counting->share = share;
    counting->since_ns = monotonic_ns();
    return counting;
}

/* Return (cost in ns, ns of a read, errno of each group, [(node, counts), …]). */
static PyObject *
counts_so_far(const Counting *counting)
{
    PyObject *rows = PyList_New(0), *errors = PyList_New(0);
    for (int group = 0; rows != NULL && errors != NULL && group < counting->groups; group++) {
        PyObject *error = PyLong_FromLong(counting->errors[group]);
        if (error == NULL || PyList_Append(errors, error) < 0)
            Py_CLEAR(errors);
        Py_XDECREF(error);
    }
    for (int64_t node = 1; rows != NULL && node < counting->rows; node++) {
        if (counting->counts[node][0] == 0)
            continue;
        PyObject *row = PyTuple_New(1 + ROW_WORDS);
        for (int i = 0; row != NULL && i < 1 + ROW_WORDS; i++) {
            PyObject *number = PyLong_FromLongLong(i == 0 ? node : counting->counts[node][i - 1]);
            if (number == NULL)
                Py_CLEAR(row);
            else
                PyTuple_SET_ITEM(row, i, number);
        }
        if (row == NULL || PyList_Append(rows, row) < 0)
            Py_CLEAR(rows);
        Py_XDECREF(row);
    }
    if (rows == NULL || errors == NULL) {
        Py_XDECREF(rows);
        Py_XDECREF(errors);
        return NULL;
    }
    return Py_BuildValue("LLNN", (long long)counting->cost_ns, (long long)counting->read_ns, errors, rows);
}
