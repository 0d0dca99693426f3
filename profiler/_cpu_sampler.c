/* A thread that samples which Python function a thread of this process runs, while no brick is timed there.

   Rules
   - The thread never takes the GIL, has no thread state, and blocks every signal. It reads frames by process_vm_readv,
     so an address that is freed meanwhile is an error and no crash. Nothing of the host is written.
   - A sample counts only if the place of the thread and its frame are the same after it was read as before.
   - Places are in the slots of the ring's header (see _hot_path.c), or given by `part` for training steps. A place is
     the node of a slot, -part in a training step, or 0 between steps.
   - Samples in a step that is not recorded are not taken, because it may be in a brick. So are samples in nodes that
     Python has named by `ignore` (bricks), and in a thread with several running steps (tasks).
   - Samples between steps wait until the next step begins or a record is written. Time after the last step is not
     between steps. Samples in a training step wait until it ends, because an unfinished one does not count.
   - The layout of frames belongs to one minor version of CPython. The headers of that version have it.
*/

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#if !defined(__linux__) || PY_VERSION_HEX < 0x030B0000 || PY_VERSION_HEX >= 0x030E0000 || defined(Py_GIL_DISABLED)
#error "frames are read on Linux, in CPython 3.11 to 3.13 with a GIL"
#endif

#define Py_BUILD_CORE 1 /* after Python.h: only for the layout of frames */
#include <internal/pycore_frame.h>

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

/* The layout of protocol/ring.py. */
enum { CURSOR_WORD = 16, HEADER_BYTES = 4096, FIRST_SLOT_WORD = 24, SLOT_WORDS = 8, SLOTS = 61 };
enum { SLOT_THREAD = 0, SLOT_NODE = 1, SLOT_START = 2, SLOT_PLAIN = 4, SLOT_STATE = 5 };

enum { MAX_TEXT = 200, MAX_CODES = 256, MAX_DEPTH = 128, MAX_LINES = 1 << 14 };
enum { MAX_FRAMES = 256, MAX_PLACES = 256, MAX_NODES = 1 << 14, MAX_TRAINING = 16, MAX_PREFIXES = 8, MAX_TRIES = 5 };
enum { MEASURED_TICKS = 200 };          /* the period is chosen again after this many ticks */
#define STACK_BYTES (256 << 10)
#define BETWEEN INT64_C(0)
#define SECOND_NS INT64_C(1000000000)
#define SLOWER 4          /* the period is this many times as long while almost no time is untimed */
#define ENOUGH_PERCENT 2  /* the share of ticks in untimed places that counts as almost no time */

typedef enum { PROGRAM, LIBRARY, STANDARD, OWN } Origin; /* STANDARD: Python's own library */

/* A function: where it is defined. */
typedef struct {
    char function[MAX_TEXT], file[MAX_TEXT];
    Origin origin;
} Name;

/* What is known of a code object at an address. It is still the same object if its fields are the same. */
typedef struct {
    const void *code, *file, *function, *lines;
    int first_line;
    Name name;
} Code;

/* The samples of one line: the innermost function, and the program's innermost function if that is a library's. */
typedef struct {
    int64_t place, count, asleep;
    int line, caller_line;
    Name leaf, caller;
} Line;

typedef struct {
    int64_t place;
    int64_t samples; /* all samples, with the following ones */
    int64_t unread;  /* the frame was not read, or the table of lines was full */
    int64_t own;     /* a function of cbtop ran */
} Place;

/* The samples of a stretch of time. */
typedef struct {
    int64_t since_ns, until_ns, ticks, plain, cpu_ns;
    int places, lines;
    Place place[MAX_PLACES];
    Line line[MAX_FRAMES];
} Window;

typedef struct {
    _Atomic int64_t thread, state, part;
} Trained;

static struct {
    pthread_t thread;
    int is_running;
    pid_t pid;
    const int64_t *ring; /* the header of the ring, mapped for reading */
    int64_t period_ns, window_ns, cost_ppm;
    uint64_t sampled_parts; /* bit n: samples in part n of a training step are wanted */
    char prefix[MAX_PREFIXES][MAX_TEXT];
    int prefixes, own_prefixes; /* the first ones are cbtop's, the others Python's own library */
} set;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of the windows, and of `is_ending` */
static pthread_cond_t ending;
static int is_ending;
static Window windows[2]; /* the newest, and the one before */
/* Samples that may not count: between steps, and in running training steps. */
static Window waiting, in_training;
static _Atomic int training_ended, training_dropped;
static unsigned char ignored[MAX_NODES];
static Trained trained[MAX_TRAINING];
static _Thread_local Trained *trained_here;
/* Only the sampling thread uses what follows. */
static Code codes[MAX_CODES];
static const _Atomic int64_t *last_slot; /* of the thread that was seen in a step last */
static int stat_descriptor = -1;
static int64_t stat_thread;

static int64_t
clock_ns(clockid_t which)
{
    struct timespec now;
    clock_gettime(which, &now);
    return (int64_t)now.tv_sec * SECOND_NS + now.tv_nsec;
}

/* ---- reading the memory of this process ---- */

static int
copy(void *to, const void *from, size_t bytes)
{
    struct iovec here = {to, bytes}, there = {(void *)from, bytes};
    return process_vm_readv(set.pid, &here, 1, &there, 1, 0) == (ssize_t)bytes;
}

static char *
append(char *at, const char *end, Py_UCS4 character)
{
    int bytes = character < 0x80 ? 1 : character < 0x800 ? 2 : character < 0x10000 ? 3 : 4;
    if (end - at < bytes)
        return NULL;
    if (bytes == 1)
        *at = (char)character;
    else {
        for (int i = bytes - 1; i > 0; i--, character >>= 6)
            at[i] = (char)(0x80 | (character & 0x3f));
        *at = (char)((0xf00 >> bytes & 0xff) | character);
    }
    return at + bytes;
}

/* Copy a str as UTF-8. A long one loses its beginning, because the end of a path names the file. */
static int
copy_text(char *text, const void *from)
{
    PyASCIIObject head;
    if (from == NULL || !copy(&head, from, sizeof head) || head.ob_base.ob_type != &PyUnicode_Type || !head.state.compact)
        return 0;
    int kind = head.state.kind;
    if ((kind != 1 && kind != 2 && kind != 4) || head.length < 0 || head.length > 1 << 16)
        return 0;
    const char *data = (const char *)from + (head.state.ascii ? sizeof(PyASCIIObject) : sizeof(PyCompactUnicodeObject));
    Py_ssize_t length = head.length, most = (MAX_TEXT - 1) / kind;
    if (length > most) {
        data += (length - most) * kind;
        length = most;
    }
    unsigned char characters[MAX_TEXT];
    if (!copy(characters, data, (size_t)(length * kind)))
        return 0;
    char *at = text;
    for (Py_ssize_t i = 0; i < length && at != NULL; i++) {
        Py_UCS4 character = kind == 1 ? characters[i] : 0;
        for (int byte = kind - 1; kind > 1 && byte >= 0; byte--)
            character = character << 8 | characters[i * kind + byte];
        char *next = append(at, text + MAX_TEXT - 1, character);
        if (next == NULL)
            break;
        at = next;
    }
    *at = 0;
    return 1;
}

static int
varint(const unsigned char *table, Py_ssize_t size, Py_ssize_t *at)
{
    unsigned value = 0, shift = 0, byte;
    do {
        if (*at >= size || shift > 24)
            return 0;
        byte = table[(*at)++];
        value |= (byte & 63) << shift;
        shift += 6;
    } while (byte & 64);
    return (int)value;
}

/* Return the line of an instruction, from a table of locations (Objects/locations.md), or the first line. */
static int
line_of(const PyCodeObject *code, Py_ssize_t offset)
{
    static unsigned char table[MAX_LINES];
    PyVarObject head;
    int line = code->co_firstlineno;
    if (!copy(&head, code->co_linetable, sizeof head) || head.ob_size < 0 || head.ob_size > MAX_LINES ||
        !copy(table, (const char *)code->co_linetable + offsetof(PyBytesObject, ob_sval), (size_t)head.ob_size))
        return line;
    Py_ssize_t at = 0, end = 0;
    while (at < head.ob_size) {
        unsigned first = table[at++], kind = first >> 3 & 15;
        end += ((first & 7) + 1) * (Py_ssize_t)sizeof(_Py_CODEUNIT);
        if (kind == 13 || kind == 14) {
            unsigned delta = (unsigned)varint(table, head.ob_size, &at);
            line += delta & 1 ? -(int)(delta >> 1) : (int)(delta >> 1);
        }
        else if (kind >= 10 && kind <= 12)
            line += (int)kind - 10;
        while (at < head.ob_size && !(table[at] & 0x80))
            at++;
        if (offset < end)
            break;
    }
    return line;
}

static int
begins_with(const char *text, const char *prefix)
{
    return strncmp(text, prefix, strlen(prefix)) == 0;
}

static Origin
origin_of(const char *file)
{
    for (int i = 0; i < set.own_prefixes; i++)
        if (begins_with(file, set.prefix[i]))
            return OWN;
    if (strstr(file, "/site-packages/") != NULL || strstr(file, "/dist-packages/") != NULL)
        return LIBRARY;
    for (int i = set.own_prefixes; i < set.prefixes; i++)
        if (begins_with(file, set.prefix[i]))
            return STANDARD;
    if (*file != '<')
        return PROGRAM;
    /* Code without a file: of `python -c`, of an interactive Python, or made by a library. */
    return begins_with(file, "<frozen")                                      ? STANDARD
           : begins_with(file, "<string>") || begins_with(file, "<stdin>") ? PROGRAM
                                                                             : LIBRARY;
}

/* Return what is known of the code object `at`, whose fields are in `code`. NULL if it cannot be read. */
static const Name *
name_of(const void *at, const PyCodeObject *code)
{
    Code *known = &codes[((uintptr_t)at >> 5) % MAX_CODES];
    if (known->code == at && known->file == code->co_filename && known->function == code->co_qualname &&
        known->lines == code->co_linetable && known->first_line == code->co_firstlineno)
        return &known->name;
    known->code = NULL;
    if (!copy_text(known->name.file, code->co_filename) || !copy_text(known->name.function, code->co_qualname))
        return NULL;
    known->name.origin = origin_of(known->name.file);
    known->file = code->co_filename;
    known->function = code->co_qualname;
    known->lines = code->co_linetable;
    known->first_line = code->co_firstlineno;
    known->code = at;
    return &known->name;
}

/* ---- frames ---- */

#if PY_VERSION_HEX >= 0x030D0000
#define CODE_OF(frame) ((frame)->f_executable)
#define INSTRUCTION_OF(frame) ((frame)->instr_ptr)
#elif PY_VERSION_HEX >= 0x030C0000
#define CODE_OF(frame) ((frame)->f_code)
#define INSTRUCTION_OF(frame) ((frame)->prev_instr)
#else
#define CODE_OF(frame) ((frame)->f_code)
#define INSTRUCTION_OF(frame) ((frame)->prev_instr)
#endif

/* Where the innermost frame of a thread is. */
typedef struct {
    int64_t state, thread;
    const void *around; /* the structure on the thread's stack that has `top` */
    const void *top;
} Stack;

/* Find the innermost frame of a thread. Returns 0 if `state` is not the state of `thread` any longer. */
static int
find_top(Stack *stack)
{
    PyThreadState known;
    if (!copy(&known, (const void *)(intptr_t)stack->state, sizeof known) ||
        (int64_t)known.native_thread_id != stack->thread)
        return 0;
#if PY_VERSION_HEX >= 0x030D0000
    stack->around = NULL;
    stack->top = known.current_frame;
    return 1;
#else
    _PyCFrame around;
    stack->around = known.cframe;
    if (!copy(&around, known.cframe, sizeof around))
        return 0;
    stack->top = around.current_frame;
    return 1;
#endif
}

/* Return whether the innermost frame of a thread is still the one of `stack`, and runs the same code. */
static int
is_unchanged(const Stack *stack, const void *code)
{
    _PyInterpreterFrame frame;
    const size_t bytes = offsetof(_PyInterpreterFrame, localsplus);
#if PY_VERSION_HEX >= 0x030D0000
    const void *top;
    const void *from[] = {(const char *)(intptr_t)stack->state + offsetof(PyThreadState, current_frame), stack->top};
    struct iovec here[] = {{&top, sizeof top}, {&frame, bytes}};
    struct iovec there[] = {{(void *)from[0], sizeof top}, {(void *)from[1], bytes}};
    ssize_t read = process_vm_readv(set.pid, here, 2, there, 2, 0);
    return read == (ssize_t)(sizeof top + bytes) && top == stack->top && CODE_OF(&frame) == code;
#else
    const void *around;
    _PyCFrame of_thread;
    const char *from = (const char *)(intptr_t)stack->state + offsetof(PyThreadState, cframe);
    struct iovec here[] = {{&around, sizeof around}, {&of_thread, sizeof of_thread}, {&frame, bytes}};
    struct iovec there[] = {
        {(void *)from, sizeof around}, {(void *)stack->around, sizeof of_thread}, {(void *)stack->top, bytes}};
    ssize_t read = process_vm_readv(set.pid, here, 3, there, 3, 0);
    return read == (ssize_t)(sizeof around + sizeof of_thread + bytes) && around == stack->around &&
           of_thread.current_frame == stack->top && (const void *)CODE_OF(&frame) == code;
#endif
}

static int
line_in(const _PyInterpreterFrame *frame, const PyCodeObject *code)
{
    const char *first = (const char *)CODE_OF(frame) + offsetof(PyCodeObject, co_code_adaptive);
    Py_ssize_t offset = (const char *)INSTRUCTION_OF(frame) - first;
    return offset < 0 ? code->co_firstlineno : line_of(code, offset);
}

/* Read the innermost frame of a thread, and the program's innermost frame around it. Returns 0 if that failed, for
   example because the thread ran on meanwhile. */
static int
read_line(int64_t state, int64_t thread, Line *line)
{
    Stack stack = {.state = state, .thread = thread};
    _PyInterpreterFrame frame;
    PyCodeObject code;
    if (!find_top(&stack))
        return 0;
    line->leaf.function[0] = line->caller.function[0] = line->caller.file[0] = 0;
    line->line = line->caller_line = 0;
    int is_found = 0, is_standard = 1;
    const void *at = stack.top, *first = NULL;
    for (int depth = 0; at != NULL && depth < MAX_DEPTH; depth++, at = frame.previous) {
        if (!copy(&frame, at, offsetof(_PyInterpreterFrame, localsplus)))
            return 0;
        if (depth == 0)
            first = CODE_OF(&frame);
#if PY_VERSION_HEX >= 0x030C0000
        if (frame.owner == FRAME_OWNED_BY_CSTACK)
            continue;
#endif
        if (!copy(&code, CODE_OF(&frame), offsetof(PyCodeObject, co_code_adaptive)) ||
            code.ob_base.ob_base.ob_type != &PyCode_Type)
            return 0;
        const Name *name = name_of(CODE_OF(&frame), &code);
        if (name == NULL)
            return 0;
        if (!is_found) {
            line->leaf = *name;
            line->line = line_in(&frame, &code);
            is_found = 1;
            if (name->origin == PROGRAM || name->origin == OWN)
                break;
        }
        else if (name->origin == OWN && is_standard) {
            line->leaf.origin = OWN; /* Python's library works for cbtop */
            break;
        }
        else if (name->origin == PROGRAM) {
            line->caller = *name;
            line->caller_line = line_in(&frame, &code);
            break;
        }
        is_standard &= name->origin == STANDARD;
    }
    return is_found && is_unchanged(&stack, first);
}

/* Return whether the kernel says that a thread sleeps: it waits for a lock, a file, a socket or a time. */
static int
is_asleep(int64_t thread)
{
    char text[512];
    if (stat_thread != thread) {
        if (stat_descriptor >= 0)
            close(stat_descriptor);
        snprintf(text, sizeof text, "/proc/self/task/%lld/stat", (long long)thread);
        stat_descriptor = open(text, O_RDONLY | O_CLOEXEC);
        stat_thread = thread;
    }
    ssize_t bytes = stat_descriptor < 0 ? -1 : pread(stat_descriptor, text, sizeof text - 1, 0);
    if (bytes <= 0)
        return 0;
    text[bytes] = 0;
    const char *name_end = strrchr(text, ')');
    return name_end != NULL && (name_end[2] == 'S' || name_end[2] == 'D');
}

/* ---- windows ---- */

static Place *
place_in(Window *window, int64_t place)
{
    for (int i = 0; i < window->places; i++)
        if (window->place[i].place == place)
            return &window->place[i];
    if (window->places == MAX_PLACES)
        return NULL;
    Place *found = &window->place[window->places++];
    *found = (Place){.place = place};
    return found;
}

/* Count the samples of `line` in a window. Returns 0 if there is no room for another line. */
static int
count_line(Window *window, const Line *line)
{
    for (int i = 0; i < window->lines; i++) {
        Line *known = &window->line[i];
        if (known->place == line->place && known->line == line->line && known->caller_line == line->caller_line &&
            strcmp(known->leaf.function, line->leaf.function) == 0 && strcmp(known->leaf.file, line->leaf.file) == 0 &&
            strcmp(known->caller.function, line->caller.function) == 0 &&
            strcmp(known->caller.file, line->caller.file) == 0) {
            known->count += line->count;
            known->asleep += line->asleep;
            return 1;
        }
    }
    if (window->lines == MAX_FRAMES)
        return 0;
    window->line[window->lines++] = *line;
    return 1;
}

static void
add_window(Window *to, const Window *from)
{
    for (int i = 0; i < from->places; i++) {
        Place *place = place_in(to, from->place[i].place);
        if (place == NULL)
            continue;
        place->samples += from->place[i].samples;
        place->unread += from->place[i].unread;
        place->own += from->place[i].own;
    }
    for (int i = 0; i < from->lines; i++) {
        Place *place = place_in(to, from->line[i].place);
        if (place != NULL && !count_line(to, &from->line[i]))
            place->unread += from->line[i].count;
    }
}

static void
clear(Window *window, int64_t now_ns)
{
    window->places = window->lines = 0;
    window->ticks = window->plain = window->cpu_ns = 0;
    window->since_ns = window->until_ns = now_ns;
}

/* Sample one thread at `place`, which `slot` or `training` shows. The other is NULL. */
static void
sample(int64_t place, int64_t thread, int64_t state, const _Atomic int64_t *slot, const Trained *training)
{
    static Line line;
    int64_t start = slot == NULL ? 0 : slot[SLOT_START];
    int is_read = 0;
    /* A thread that calls many short functions changes its frame while it is read. Without further tries, such
       functions would have fewer samples than a function that waits. */
    for (int tries = 0; !is_read && tries < MAX_TRIES; tries++)
        is_read = read_line(state, thread, &line);
    if (slot != NULL && (slot[SLOT_NODE] != place || slot[SLOT_START] != start || slot[SLOT_PLAIN]))
        return; /* the thread has moved on, so this sample belongs to no place */
    if (training != NULL && training->part != -place)
        return;
    line.place = place;
    line.count = 1;
    line.asleep = is_read && is_asleep(thread);
    pthread_mutex_lock(&lock);
    Window *window = place > 0 ? &windows[0] : place == BETWEEN ? &waiting : &in_training;
    Place *found = place_in(window, place);
    if (found != NULL) {
        found->samples++;
        if (is_read && line.leaf.origin == OWN)
            found->own++;
        else if (!is_read || !count_line(window, &line))
            found->unread++;
    }
    pthread_mutex_unlock(&lock);
}

static int
is_wanted(int64_t node)
{
    return node > 0 && (node >= MAX_NODES || !ignored[node]);
}

/* Look at every thread once. Returns whether one was at an untimed place. */
static int
look(int64_t *cursor)
{
    const _Atomic int64_t *words = (const _Atomic int64_t *)set.ring;
    int running = 0, sampled = 0, slots = 0, plain = 0;
    const _Atomic int64_t *only = NULL;
    if (atomic_exchange(&training_ended, 0)) {
        pthread_mutex_lock(&lock);
        add_window(&windows[0], &in_training);
        clear(&in_training, 0);
        pthread_mutex_unlock(&lock);
    }
    if (atomic_exchange(&training_dropped, 0))
        clear(&in_training, 0);
    for (int i = 0; i < MAX_TRAINING; i++) {
        int64_t part = trained[i].part, thread = trained[i].thread;
        if (part == 0 || thread == 0)
            continue;
        running++;
        if (set.sampled_parts >> part & 1) {
            sampled++;
            sample(-part, thread, trained[i].state, NULL, &trained[i]);
        }
    }
    for (int i = 0; i < SLOTS; i++) {
        const _Atomic int64_t *slot = words + FIRST_SLOT_WORD + i * SLOT_WORDS;
        int64_t thread = slot[SLOT_THREAD];
        if (thread == 0 || slot[SLOT_STATE] == 0)
            continue;
        slots++;
        only = slot;
        if (slot[SLOT_NODE] == 0)
            continue;
        int is_alone = 1;
        for (int k = 0; k < MAX_TRAINING; k++)
            is_alone &= !(trained[k].part != 0 && trained[k].thread == thread);
        if (!is_alone)
            continue;
        running++;
        last_slot = slot;
        for (int k = 0; k < SLOTS; k++) {
            const _Atomic int64_t *other = words + FIRST_SLOT_WORD + k * SLOT_WORDS;
            is_alone &= k == i || other[SLOT_THREAD] != thread || other[SLOT_NODE] == 0;
        }
        if (slot[SLOT_PLAIN])
            plain++;
        else if (is_alone && is_wanted(slot[SLOT_NODE])) {
            sampled++;
            sample(slot[SLOT_NODE], thread, slot[SLOT_STATE], slot, NULL);
        }
    }
    int64_t records = words[CURSOR_WORD];
    if (running || records != *cursor) {
        pthread_mutex_lock(&lock);
        windows[0].plain += plain;
        if (*cursor >= 0)
            add_window(&windows[0], &waiting);
        clear(&waiting, 0);
        pthread_mutex_unlock(&lock);
        *cursor = records;
    }
    if (!running && records > 0) {
        const _Atomic int64_t *slot = last_slot == NULL && slots == 1 ? only : last_slot;
        if (slot != NULL && slot[SLOT_THREAD] != 0 && slot[SLOT_STATE] != 0) {
            sampled++;
            sample(BETWEEN, slot[SLOT_THREAD], slot[SLOT_STATE], slot, NULL);
        }
    }
    return sampled > 0;
}

static void *
run(void *Py_UNUSED(ignored_argument))
{
    prctl(PR_SET_NAME, "cbtop-sampler");
    uint64_t random = (uint64_t)clock_ns(CLOCK_MONOTONIC) | 1;
    int64_t cursor = -1, ticks = 0, untimed = 0, factor = 1, cpu_ns = 0, measured_cpu_ns = 0, measured_ns = 0;
    last_slot = NULL;
    stat_thread = 0;
    stat_descriptor = -1;
    pthread_mutex_lock(&lock);
    while (!is_ending) {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        int64_t period_ns = factor * set.period_ns;
        /* Between half a period and one and a half, so that no loop of the program can be in step with it. */
        int64_t until_ns = clock_ns(CLOCK_MONOTONIC) + period_ns / 2 + (int64_t)(random % (uint64_t)period_ns);
        struct timespec until = {until_ns / SECOND_NS, until_ns % SECOND_NS};
        pthread_cond_timedwait(&ending, &lock, &until);
        if (is_ending)
            break;
        int64_t now_ns = clock_ns(CLOCK_MONOTONIC);
        if (now_ns < until_ns)
            continue;
        if (now_ns - windows[0].since_ns > set.window_ns) {
            windows[1] = windows[0];
            clear(&windows[0], now_ns);
        }
        windows[0].ticks++;
        windows[0].until_ns = now_ns;
        pthread_mutex_unlock(&lock);
        untimed += look(&cursor);
        int64_t used_ns = clock_ns(CLOCK_THREAD_CPUTIME_ID);
        pthread_mutex_lock(&lock);
        windows[0].cpu_ns += used_ns - cpu_ns;
        cpu_ns = used_ns;
        if (++ticks < MEASURED_TICKS)
            continue;
        if (measured_ns && now_ns > measured_ns) {
            int64_t ppm = (cpu_ns - measured_cpu_ns) * 1000000 / (now_ns - measured_ns);
            int is_much = untimed * 100 >= ENOUGH_PERCENT * ticks;
            if (ppm > set.cost_ppm && factor < 64)
                factor *= 2;
            else if (is_much && factor > 1 && 2 * ppm < set.cost_ppm)
                factor /= 2;
            else if (!is_much && factor < SLOWER)
                factor = SLOWER;
        }
        measured_ns = now_ns;
        measured_cpu_ns = cpu_ns;
        ticks = untimed = 0;
    }
    pthread_mutex_unlock(&lock);
    if (stat_descriptor >= 0)
        close(stat_descriptor);
    return NULL;
}

/* ---- the module ---- */

/* End the thread. In a forked child there is none. */
static void
end_thread(void)
{
    if (!set.is_running)
        return;
    set.is_running = 0;
    if (set.pid != getpid())
        return;
    pthread_mutex_lock(&lock);
    is_ending = 1;
    pthread_cond_signal(&ending);
    pthread_mutex_unlock(&lock);
    pthread_join(set.thread, NULL);
}

static void
leave_ring(void)
{
    end_thread();
    if (set.ring != NULL)
        munmap((void *)set.ring, HEADER_BYTES);
    set.ring = NULL;
}

static PyObject *
stop(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored_argument))
{
    leave_ring();
    Py_RETURN_NONE;
}

static PyObject *
pause_thread(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored_argument))
{
    end_thread();
    Py_RETURN_NONE;
}

static int
begin_thread(void)
{
    pthread_attr_t attributes;
    pthread_condattr_t of_condition;
    sigset_t all, before;
    pthread_condattr_init(&of_condition);
    pthread_condattr_setclock(&of_condition, CLOCK_MONOTONIC);
    pthread_cond_init(&ending, &of_condition);
    pthread_condattr_destroy(&of_condition);
    is_ending = 0;
    sigfillset(&all);
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* the host's handlers must never run in this thread */
    int error = pthread_create(&set.thread, &attributes, run, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    set.is_running = error == 0;
    return error;
}

/* Begin again after `pause`. Nothing happens in a forked child, or if the thread has ended for good. */
static PyObject *
resume(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored_argument))
{
    if (set.ring != NULL && !set.is_running && set.pid == getpid())
        begin_thread();
    Py_RETURN_NONE;
}

static PyObject *
start(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"ring", "own", "standard", "period_ns", "window_ns", "cost_ppm", "parts", NULL};
    const char *ring;
    PyObject *given[2];
    long long period_ns, window_ns, cost_ppm;
    unsigned long long parts;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "sO!O!LLLK", names, &ring, &PyTuple_Type, &given[0], &PyTuple_Type,
                                     &given[1], &period_ns, &window_ns, &cost_ppm, &parts))
        return NULL;
    if (period_ns < 100000 || window_ns < period_ns || cost_ppm < 1) {
        PyErr_SetString(PyExc_ValueError, "a period is at least 100,000 ns, a window a period, and a cost 1 ppm");
        return NULL;
    }
    leave_ring();
    set.pid = getpid();
    char probe = 0;
    if (!copy(&probe, "x", 1))
        return PyErr_SetFromErrno(PyExc_OSError);
    set.prefixes = 0;
    for (int which = 0; which < 2; which++) {
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given[which]) && set.prefixes < MAX_PREFIXES; i++) {
            const char *prefix = PyUnicode_AsUTF8(PyTuple_GET_ITEM(given[which], i));
            if (prefix == NULL)
                return NULL;
            if (*prefix && strlen(prefix) < MAX_TEXT)
                strcpy(set.prefix[set.prefixes++], prefix);
        }
        if (which == 0)
            set.own_prefixes = set.prefixes;
    }
    int descriptor = open(ring, O_RDONLY | O_CLOEXEC);
    struct stat status;
    if (descriptor < 0)
        return PyErr_SetFromErrnoWithFilename(PyExc_OSError, ring);
    void *header = MAP_FAILED;
    if (fstat(descriptor, &status) == 0 && status.st_size >= HEADER_BYTES)
        header = mmap(NULL, HEADER_BYTES, PROT_READ, MAP_SHARED, descriptor, 0);
    close(descriptor);
    if (header == MAP_FAILED) {
        PyErr_Format(PyExc_OSError, "%s cannot be mapped", ring);
        return NULL;
    }
    set.ring = header;
    set.period_ns = period_ns;
    set.window_ns = window_ns;
    set.cost_ppm = cost_ppm;
    set.sampled_parts = parts;
    memset(ignored, 0, sizeof ignored);
    memset(codes, 0, sizeof codes);
    int64_t now_ns = clock_ns(CLOCK_MONOTONIC);
    clear(&windows[0], now_ns);
    clear(&windows[1], now_ns);
    clear(&waiting, 0);
    clear(&in_training, 0);
    pthread_mutex_init(&lock, NULL); /* in a forked child, the parent's thread may have held it */
    int error = begin_thread();
    if (error) {
        munmap(header, HEADER_BYTES);
        set.ring = NULL;
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    Py_RETURN_NONE;
}

static PyObject *
ignore(PyObject *Py_UNUSED(module), PyObject *node)
{
    long number = PyLong_AsLong(node);
    if (number == -1 && PyErr_Occurred())
        return NULL;
    if (number > 0 && number < MAX_NODES)
        ignored[number] = 1;
    Py_RETURN_NONE;
}

static void
remove_place(Window *window, int64_t place)
{
    for (int i = window->places - 1; i >= 0; i--)
        if (window->place[i].place == place)
            window->place[i] = window->place[--window->places];
    for (int i = window->lines - 1; i >= 0; i--)
        if (window->line[i].place == place)
            window->line[i] = window->line[--window->lines];
}

/* Forget the samples between steps. */
static PyObject *
forget_between(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored_argument))
{
    pthread_mutex_lock(&lock);
    remove_place(&windows[0], BETWEEN);
    remove_place(&windows[1], BETWEEN);
    clear(&waiting, 0);
    pthread_mutex_unlock(&lock);
    Py_RETURN_NONE;
}

/* Say which part of a training step the calling thread is in: 0 is none. */
static PyObject *
part(PyObject *Py_UNUSED(module), PyObject *number)
{
    long given = PyLong_AsLong(number);
    if (given == -1 && PyErr_Occurred())
        return NULL;
    if (given < 0 || given > 63) {
        PyErr_SetString(PyExc_ValueError, "a part is a number from 0 to 63");
        return NULL;
    }
    int64_t thread = (int64_t)PyThread_get_thread_native_id();
    if (trained_here == NULL || trained_here->thread != thread) {
        if (given == 0)
            Py_RETURN_NONE;
        for (int i = 0; i < MAX_TRAINING; i++)
            if (trained[i].part == 0) {
                trained_here = &trained[i];
                trained_here->thread = thread;
                trained_here->state = (int64_t)(intptr_t)PyThreadState_Get();
                break;
            }
        if (trained_here == NULL || trained_here->thread != thread)
            Py_RETURN_NONE;
    }
    trained_here->part = given;
    Py_RETURN_NONE;
}

/* Say that the training step of this thread has ended as a whole, or that it was dropped. */
static PyObject *
training_step(PyObject *Py_UNUSED(module), PyObject *is_whole)
{
    atomic_store(is_whole == Py_True ? &training_ended : &training_dropped, 1);
    Py_RETURN_NONE;
}

static PyObject *
samples(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored_argument))
{
    /* Too large for a stack, and too large to keep. */
    Window *both = PyMem_Malloc(sizeof(Window));
    if (both == NULL)
        return PyErr_NoMemory();
    pthread_mutex_lock(&lock);
    *both = windows[0];
    if (windows[1].ticks) {
        both->since_ns = windows[1].since_ns;
        both->ticks += windows[1].ticks;
        both->plain += windows[1].plain;
        both->cpu_ns += windows[1].cpu_ns;
        add_window(both, &windows[1]);
    }
    pthread_mutex_unlock(&lock);
    PyObject *places = PyList_New(0), *lines = PyList_New(0), *result = NULL;
    for (int i = 0; places != NULL && lines != NULL && i < both->places; i++) {
        Place *place = &both->place[i];
        PyObject *item = Py_BuildValue("LLLL", (long long)place->place, (long long)place->samples,
                                       (long long)place->unread, (long long)place->own);
        if (item == NULL || PyList_Append(places, item) < 0) {
            Py_XDECREF(item);
            goto done;
        }
        Py_DECREF(item);
    }
    for (int i = 0; places != NULL && lines != NULL && i < both->lines; i++) {
        Line *line = &both->line[i];
        const char *text[] = {line->leaf.function, line->leaf.file, line->caller.function, line->caller.file};
        PyObject *decoded[4] = {NULL, NULL, NULL, NULL}, *item = NULL;
        for (int k = 0; k < 4; k++)
            decoded[k] = PyUnicode_DecodeUTF8(text[k], (Py_ssize_t)strlen(text[k]), "replace");
        if (decoded[0] && decoded[1] && decoded[2] && decoded[3])
            item = Py_BuildValue("LOOiOOiLL", (long long)line->place, decoded[0], decoded[1], line->line, decoded[2],
                                 decoded[3], line->caller_line, (long long)line->count, (long long)line->asleep);
        for (int k = 0; k < 4; k++)
            Py_XDECREF(decoded[k]);
        if (item == NULL || PyList_Append(lines, item) < 0) {
            Py_XDECREF(item);
            goto done;
        }
        Py_DECREF(item);
    }
    if (places != NULL && lines != NULL)
        result = Py_BuildValue("LLLLLOO", (long long)both->since_ns, (long long)both->until_ns, (long long)both->ticks,
                               (long long)both->plain, (long long)both->cpu_ns, places, lines);
done:
    Py_XDECREF(places);
    Py_XDECREF(lines);
    PyMem_Free(both);
    return result;
}

static PyMethodDef methods[] = {
    {"start", (PyCFunction)(void (*)(void))start, METH_VARARGS | METH_KEYWORDS,
     "start($module, ring, own, standard, period_ns, window_ns, cost_ppm, parts)\n--\n\n"
     "Begin to sample. `ring` is a path. Files that begin with one of `own` are cbtop's, with `standard` Python's.\n"
     "Raises OSError if this process may not read its own memory, or has no more threads."},
    {"stop", stop, METH_NOARGS, "stop($module)\n--\n\nEnd the sampling thread. The samples stay."},
    {"ignore", ignore, METH_O, "ignore($module, node, /)\n--\n\nTake no samples in a node, because it is timed."},
    {"forget_between", forget_between, METH_NOARGS, "forget_between($module, /)\n--\n\nForget the samples between steps."},
    {"part", part, METH_O, "part($module, number, /)\n--\n\nSay which part of a training step this thread is in."},
    {"pause", pause_thread, METH_NOARGS, "pause($module)\n--\n\nEnd the thread until `resume`, for example for a fork."},
    {"resume", resume, METH_NOARGS, "resume($module)\n--\n\nSample again after `pause`."},
    {"training_step", training_step, METH_O,
     "training_step($module, is_whole, /)\n--\n\nSay that a training step has ended, or (False) that it does not count."},
    {"samples", samples, METH_NOARGS,
     "samples($module)\n--\n\nReturn the begin, end, ticks, ticks in unrecorded steps, own CPU time, places and lines."},
    {0},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "cbtop.profiler._cpu_sampler",
    .m_doc = "Samples which Python functions run in the time that nobody times.",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC
PyInit__cpu_sampler(void)
{
    return PyModule_Create(&definition);
}
