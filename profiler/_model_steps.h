/* Steps of a called model, compiled. This code begins and ends a plain step, or a step of a model whose steps are all
   recorded. In Python this is done by steps.py (ActiveStep) and, of instrument/, by governor.py, model_call.py,
   open_step.py, steps.py and timed_model.py. This file is a part of _hot_path.c.

   Rules
   - This code is in C because a model evicts from the caches all that Python needs for a function: its code, names
     and types. In Python, 20 functions took 34 us of a step of 2.4 ms. Compiled code needs only a few cache lines.
   - Objects are Python's own, and every slot has the value that Python would give it. Code that finds the step while
     it runs sees no difference.
   - In `generate`, or in the run of an engine's runner, a plain step stays open after the call, until its token is
     chosen. Then this code ends the step (generation.py, runners.py).
   - Unusual cases are left to Python: a step inside a step, a recorded step that waits, a `generate` inside a
     `generate` or with a draft, a step that swaps calls in or out, and a clock that fails. This code checks for them
     before it changes anything. Then Python begins or ends the whole step.
   - Making an object may trigger a garbage collection, which may run any code. So the checks are repeated after it.
   - A slot is read by its offset only if the object has exactly the type with this slot.
*/

/* For functions that run once per step. Their code has left the caches by then, so it is optimised for size, not
   speed. */
#define ONCE_A_STEP __attribute__((cold, noinline))

enum { MODEL_CALL, MODEL_STEPS, UNIT, GENERATION, OPEN_STEP, STEP, STEPS, GOVERNOR, MODEL, KIND, PLAIN_TYPES };
enum { CALLED_MODULE, CALLED_INSTEAD, CALLED_STEPS, CALLED_HAS_CACHE, CALLED_NAMES, CALLED_WITHOUT_CACHE,
       CALLED_AXIS, CALLED_TAKES_IDS };
enum { OF_PROFILER, OF_PATH, OF_TIMES, OF_MODEL, OF_BURSTS, OF_IN_PYTHON, OF_ARE_IN, OF_STEPS, OF_KEYS,
       OF_RECORDED, OF_LOOKS, OF_KERNELS_DUE_NS, OF_IS_OF_RUNNER, OF_TRAINING };
enum { UNIT_OPEN, UNIT_GENERATIONS };
enum {
    GENERATING_MODEL, GENERATION_IS_ASSISTED, GENERATION_PREPARED, GENERATION_LENGTH, GENERATION_OWN_NS,
    GENERATION_BEAMS
};
enum {
    OPEN_STEPS, OPEN_PROFILER, OPEN_IS_RUNNING, OPEN_IS_RECORDED, OPEN_GENERATION, OPEN_WAITS, OPEN_UNIT,
    OPEN_SAMPLING, OPEN_CALL, OPEN_STEP_OF, OPEN_BEGUN_NS, OPEN_IN_BURST, OPEN_NOTING,
    OPEN_MAY_BE_TRAINING, OPEN_END_EVALUATION
};
enum {
    STEP_STEPS, STEP_LANE, STEP_POSITION, STEP_SCOPE, STEP_CANCELLED, STEP_ADOPTED, STEP_WAITS, STEP_ENDED, STEP_MARK,
    STEP_NAME, STEP_MODEL, STEP_KEY, STEP_START_NS, STEP_OWN_NS, STEP_RETURNED_NS, STEP_TOKENS, STEP_SEQUENCES,
    STEP_CACHED, STEP_BEGUN_NS, STEP_OUTER, STEP_IS_PLAIN, STEP_FORKS, STEP_IS_OUTERMOST, STEP_INSIDE, STEP_START,
    STEP_OUTER_HELD
};
enum { STEPS_IS_ON, STEPS_FORKS, STEPS_GOVERNOR, STEPS_IS_SAMPLED, STEPS_GIVE_UP, STEPS_FLUSH };
enum {
    GOVERNOR_BEGUN, GOVERNOR_KINDS, GOVERNOR_MODELS, GOVERNOR_OWN, GOVERNOR_TOLD_NS, GOVERNOR_LOOK_NS,
    GOVERNOR_HAS_LOOKED, GOVERNOR_SEEN, GOVERNOR_LIVED_NS, GOVERNOR_RECENT_NS, GOVERNOR_LOOK_AT_STEP,
    GOVERNOR_LOOK_AT_NS, GOVERNOR_EVERY
};
enum { GOVERNED_CALLS_ARE_IN, GOVERNED_RECORDED, GOVERNED_RUNNING };
enum { KIND_SEEN, KIND_RECENT, KIND_COUNTS, KIND_PLAIN_NS, KIND_WAITING };
enum { MOST_PLAIN_SLOTS = 26 };

typedef struct {
    const char *names[MOST_PLAIN_SLOTS];
    PyTypeObject *type;
    Py_ssize_t offsets[MOST_PLAIN_SLOTS];
} Slots;

static Slots plain[PLAIN_TYPES] = {
    [MODEL_CALL] = {{"module", "instead", "_steps", "has_cache", "_names", "without_cache", "_axis", "_takes_ids"}},
    [MODEL_STEPS] = {{"profiler", "path", "times", "model", "bursts", "in_python", "calls_are_in", "profiler_steps",
                     "_keys", "recorded_steps", "looks", "kernels_due_ns", "is_of_runner", "training"}},
    [UNIT] = {{"open", "generations"}},
    [GENERATION] = {{"model", "is_assisted", "prepared", "length", "own_ns", "beams"}},
    [OPEN_STEP] = {{"steps", "profiler", "is_running", "is_recorded", "generation", "waits", "_unit", "_sampling",
                    "call", "active", "_begun_ns", "_in_burst", "_noting", "_may_be_training",
                    "_end_evaluation"}},
    [STEP] = {{"_steps",   "lane",       "position",   "_scope",    "_cancelled", "adopted",      "_waits",
               "_ended",   "_mark",      "_name",      "_model",    "key",        "_start_ns",    "own_ns",
               "returned_ns", "tokens",  "sequences",  "cached",    "_begun_ns",  "outer",        "_is_plain",
               "forks",    "_is_outermost", "_inside", "_start",    "_outer_held"}},
    [STEPS] = {{"is_on", "forks", "governor", "is_sampled", "give_up", "flush"}},
    [GOVERNOR] = {{"begun", "kinds", "models", "own_ns", "told_ns", "look_ns", "has_looked", "seen", "_lived_ns",
                   "_recent_ns", "look_at_step", "_look_at_ns", "every"}},
    [MODEL] = {{"calls_are_in", "recorded", "running"}},
    [KIND] = {{"seen", "recent", "counts", "plain_ns", "waiting"}},
};
/* The other objects that Python code passes to `compile_model_calls`, in the same order. */
static struct {
    PyObject *set_callback; /* sets Dynamo's callback (see dynamo.py); None if this torch has none */
    PyObject *captures, *roles, *prefill, *decode, *extend, *call_type, *mark_type, *sort, *step_kind;
    PyObject *is_compiling, *compiling_flags, *is_tracing, *dispatch_stack, *is_sampled, *warm_up, *every, *look_every, *reraise_host_error, *types_of_ids;
    PyObject *verify, *end_sampling, *sampling_failed;
} lent;
static uint64_t golden;
static PyObject *model_call_in_python;
static PyObject *asked_name, *asked_word_name, *looked_at_name, *enabled_name, *close_name, *append_name, *begin_name;
static PyObject *compiling_flag_name, *ended_name, *sample_every_name, *take_lane_name, *follow_name, *failed_name;
static PyObject *length_name, *layers_name, *own_cache_name, *initialized_name, *keys_name;

/* The description of a model's call, see phases.py. In `cached`, -1 means None. */
typedef struct {
    PyObject *phase; /* borrowed */
    int64_t tokens, sequences, cached;
} Described;

/* Roles of the arguments of a model. The roles below ROLE_CACHE are those of new tokens, and those below ROLE_ELSE
   of caches. If a call has several arguments of one sort, the one with the lowest role is used. A call with an
   argument of role ROLE_ELSE is left to Python, and so is one of role ROLE_USE_CACHE that is false. */
enum { ROLE_CACHE = 32, ROLE_ELSE = 64, ROLE_USE_CACHE = 65, ROLE_END = 96 };

static inline int
is_of(PyObject *object, int type)
{
    return object != NULL && Py_IS_TYPE(object, plain[type].type);
}

/* The value of a slot, borrowed. NULL if the slot is empty. */
#define PLAIN_SLOT(object, type, slot) (*(PyObject **)((char *)(object) + plain[type].offsets[slot]))

static inline void
fill(PyObject *object, int type, int slot, PyObject *value)
{
    PyObject **at = &PLAIN_SLOT(object, type, slot);
    PyObject *before = *at;
    *at = Py_NewRef(value);
    Py_XDECREF(before);
}

/* Store `value` in a slot. Steals the reference to `value`. */
static inline void
give(PyObject *object, int type, int slot, PyObject *value)
{
    PyObject **at = &PLAIN_SLOT(object, type, slot);
    PyObject *before = *at;
    *at = value;
    Py_XDECREF(before);
}

/* Return 1 if a slot holds an integer of at most 63 bits, and store it in `value`. */
static inline int
number_in(PyObject *number, int64_t *value)
{
    if (number == NULL || !PyLong_CheckExact(number))
        return 0;
    int overflow;
    *value = PyLong_AsLongLongAndOverflow(number, &overflow);
    return !overflow;
}

/* Add `ns` to a slot that holds a time in ns. */
static inline void
add_ns(PyObject *object, int type, int slot, int64_t more_ns)
{
    int64_t ns;
    if (!number_in(PLAIN_SLOT(object, type, slot), &ns))
        return;
    PyObject *sum = PyLong_FromLongLong(ns + more_ns);
    if (sum != NULL)
        give(object, type, slot, sum);
    else
        PyErr_Clear();
}

/* Read an optional attribute. Returns 1 with a new reference, 0 if it does not exist, and -1 with an exception set.
   */
static inline int
optional(PyObject *object, PyObject *name, PyObject **found)
{
#if PY_VERSION_HEX >= 0x030D0000
    return PyObject_GetOptionalAttr(object, name, found);
#else
    return _PyObject_LookupAttr(object, name, found);
#endif
}

/* Return whether `thing` can be asked for these attributes without running code of the host, such as
   `__getattr__`. */
static inline int
is_plain_to_ask(PyObject *thing, PyObject *first, PyObject *second)
{
    PyTypeObject *type = Py_TYPE(thing);
    PyObject *length = _PyType_Lookup(type, length_name);
    if (type->tp_getattro != PyObject_GenericGetAttr || length == NULL || !PyFunction_Check(length))
        return 0;
    PyObject *of_class[] = {_PyType_Lookup(type, first), _PyType_Lookup(type, second)};
    for (int i = 0; i < 2; i++)
        if (of_class[i] != NULL && Py_TYPE(of_class[i])->tp_descr_get != NULL)
            return 0;
    return 1;
}

/* Store the number of cached positions of a call in `cached`, like `cached_positions` of phases.py. Works only if
   the first layer of the cache is in use. Returns 0 if Python must find the number, and -1 with an exception set. */
ONCE_A_STEP static int
positions_in(PyObject *cache, int64_t *cached)
{
    PyObject *own = NULL, *layers = NULL, *keys = NULL, *is_used = NULL, *length = NULL;
    if (!is_plain_to_ask(cache, own_cache_name, layers_name))
        return 0;
    int known = optional(cache, own_cache_name, &own);
    if (known < 0)
        return -1;
    if (own != NULL && !is_plain_to_ask(own, layers_name, layers_name)) {
        Py_DECREF(own);
        return 0;
    }
    known = optional(own == NULL ? cache : own, layers_name, &layers);
    Py_XDECREF(own);
    if (known <= 0)
        return known;
    PyObject *first = PyList_CheckExact(layers) && PyList_GET_SIZE(layers) > 0 ? Py_NewRef(PyList_GET_ITEM(layers, 0))
                                                                             : NULL;
    Py_DECREF(layers);
    if (first == NULL || !is_plain_to_ask(first, initialized_name, keys_name)) {
        Py_XDECREF(first);
        return 0;
    }
    /* The type of the keys is checked, because `get_seq_length` of the host reads their shape. If the host has a
       tensor type of its own, Python must hide that read from its `__torch_function__`. */
    known = optional(first, initialized_name, &is_used);
    if (known > 0 && is_used == Py_True && (known = optional(first, length_name, &length)) > 0)
        known = optional(first, keys_name, &keys);
    int is_plain = known > 0 && is_used == Py_True && length != NULL && (PyObject *)Py_TYPE(keys) == tensor_type;
    Py_XDECREF(is_used);
    Py_XDECREF(length);
    Py_XDECREF(keys);
    Py_DECREF(first);
    if (known < 0 || !is_plain)
        return known < 0 ? -1 : 0;
    PyObject *found = PyObject_CallMethodNoArgs(cache, length_name);
    if (found == NULL)
        return -1;
    known = number_in(found, cached) && *cached >= 0 && *cached < INT64_MAX >> 1;
    Py_DECREF(found);
    return known;
}

typedef struct {
    PyObject *new_tokens, *cache; /* borrowed from the arguments */
    long rank_of_tokens, rank_of_cache;
} Arguments;

/* Store the argument `value` if its `name` has a role. Returns 0 if Python must describe the call, and -1 with an
   exception set. */
static inline int
take_argument(Arguments *found, PyObject *name, PyObject *value)
{
    if (value == Py_None)
        return 1;
    PyObject *known = PyDict_GetItemWithError(lent.roles, name);
    if (known == NULL)
        return PyErr_Occurred() ? -1 : 1;
    long role = PyLong_AsLong(known);
    if (role == ROLE_USE_CACHE) /* without a cache, the call may be no prefill */
        return value != Py_False;
    if (role >= ROLE_ELSE)
        return 0;
    if (role >= ROLE_CACHE) {
        if (found->cache == NULL || role < found->rank_of_cache) {
            found->cache = value;
            found->rank_of_cache = role;
        }
        return 1;
    }
    if ((PyObject *)Py_TYPE(value) != tensor_type)
        return 0;
    if (found->new_tokens == NULL || role < found->rank_of_tokens) {
        found->new_tokens = value;
        found->rank_of_tokens = role;
    }
    return 1;
}

/* Return whether the type of a tensor is one of the integer types for token ids, or -1 with an exception set. */
static inline int
has_type_of_ids(PyObject *tensor)
{
    PyObject *dtype = PyObject_GetAttr(tensor, dtype_of_tensor);
    int is_known = dtype == NULL ? -1 : PySequence_Contains(lent.types_of_ids, dtype);
    Py_XDECREF(dtype);
    return is_known;
}

/* Return how many arguments are tensors. */
ONCE_A_STEP static Py_ssize_t
count_tensors(PyObject *args, PyObject *kwargs)
{
    Py_ssize_t tensors = 0;
    PyObject *name, *value;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); i++)
        tensors += is_tensor(PyTuple_GET_ITEM(args, i));
    for (Py_ssize_t at = 0; kwargs != NULL && PyDict_Next(kwargs, &at, &name, &value);)
        tensors += is_tensor(value);
    return tensors;
}

/* Store the number of sequences of a call whose first `tensor` has no token ids in `found`: the first axis of `shape`.
   Two axes are rows of features. Returns 0 if Python must do it, and -1 with an exception set. */
ONCE_A_STEP static int
count_first_axis(PyObject *args, PyObject *kwargs, PyObject *tensor, PyObject *shape, Described *found)
{
    Py_ssize_t dimensions = PyTuple_GET_SIZE(shape);
    if (dimensions == 2) {
        if (count_tensors(args, kwargs) != 1)
            return 0; /* Python compares their numbers of rows. */
        PyObject *dtype = PyObject_GetAttr(tensor, dtype_of_tensor);
        PyObject *is_floating = dtype == NULL ? NULL : PyObject_GetAttr(dtype, is_floating_dtype);
        Py_XDECREF(dtype);
        Py_XDECREF(is_floating);
        if (is_floating != Py_True)
            return is_floating == NULL ? -1 : 1;
    }
    return dimensions < 2 || number_in(PyTuple_GET_ITEM(shape, 0), &found->sequences);
}

/* Describe a model's call by its first tensor, like `describe` of phases.py. For models without a cache and
   without known argument names.
*/
ONCE_A_STEP static int
describe_nameless(PyObject *call, PyObject *args, PyObject *kwargs, Described *found)
{
    PyObject *tensor = NULL, *name, *value;
    for (Py_ssize_t i = 0; tensor == NULL && i < PyTuple_GET_SIZE(args); i++)
        if (is_tensor(PyTuple_GET_ITEM(args, i)))
            tensor = PyTuple_GET_ITEM(args, i);
    for (Py_ssize_t at = 0; tensor == NULL && kwargs != NULL && PyDict_Next(kwargs, &at, &name, &value);)
        if (is_tensor(value))
            tensor = value;
    PyObject *axis = PLAIN_SLOT(call, MODEL_CALL, CALLED_AXIS);
    int is_first_axis = axis != NULL && PyLong_CheckExact(axis) && PyLong_AsLong(axis) == 0;
    if (tensor == NULL || (PyObject *)Py_TYPE(tensor) != tensor_type ||
        PLAIN_SLOT(call, MODEL_CALL, CALLED_HAS_CACHE) != Py_False || (axis != Py_None && !is_first_axis))
        return 0;
    PyObject *overridden = ask_whether_overridden(tensor);
    Py_XDECREF(overridden);
    if (overridden != Py_False)
        return overridden == NULL ? -1 : 0;
    PyObject *shape = PyObject_GetAttr(tensor, shape_of_tensor);
    if (shape == NULL)
        return -1;
    Py_ssize_t dimensions = PyTuple_Check(shape) ? PyTuple_GET_SIZE(shape) : -1;
    int64_t length = 1;
    int known = dimensions >= 0, are_ids = 0;
    found->sequences = found->tokens = 0;
    if (dimensions > 3)
        known = number_in(PyTuple_GET_ITEM(shape, 0), &found->sequences);
    else if (dimensions < 3 && PLAIN_SLOT(call, MODEL_CALL, CALLED_TAKES_IDS) != Py_False && known) {
        are_ids = has_type_of_ids(tensor);
        if (are_ids < 0) {
            Py_DECREF(shape);
            return -1;
        }
        if (are_ids) {
            found->sequences = 1;
            if (dimensions > 1)
                known = number_in(PyTuple_GET_ITEM(shape, 0), &found->sequences) &&
                        number_in(PyTuple_GET_ITEM(shape, 1), &length);
            else if (dimensions == 1)
                known = number_in(PyTuple_GET_ITEM(shape, 0), &length);
            known = known && length >= 0 && length < INT32_MAX && found->sequences >= 0 && found->sequences < INT32_MAX;
            found->tokens = known ? found->sequences * length : 0;
            if (dimensions > 1 && !is_first_axis)
                found->sequences = 0; /* the axis of sequences is unknown */
        }
    }
    if (known > 0 && dimensions < 2 && !are_ids && count_tensors(args, kwargs) > 1)
        known = 0; /* Python looks for rows in the other tensors. */
    if (known > 0 && is_first_axis && !are_ids && dimensions < 4)
        known = count_first_axis(args, kwargs, tensor, shape, found);
    Py_DECREF(shape);
    if (known < 0)
        return -1;
    found->cached = -1;
    found->phase = PLAIN_SLOT(call, MODEL_CALL, CALLED_WITHOUT_CACHE);
    return known && found->phase != NULL && found->sequences < INT32_MAX;
}

/* Do the same as `describe` of phases.py for the usual cases. Returns 0 if Python must do it, and -1 with an
   exception set. */
ONCE_A_STEP static int
describe(PyObject *call, PyObject *args, PyObject *kwargs, Described *found)
{
    Arguments given = {NULL, NULL, 0, 0};
    PyObject *names = PLAIN_SLOT(call, MODEL_CALL, CALLED_NAMES), *name, *value;
    if (names == NULL || !PyTuple_CheckExact(names) || PyTuple_GET_SIZE(args) > PyTuple_GET_SIZE(names))
        return 0;
    int known = 1;
    for (Py_ssize_t i = 0; known > 0 && i < PyTuple_GET_SIZE(args); i++)
        known = take_argument(&given, PyTuple_GET_ITEM(names, i), PyTuple_GET_ITEM(args, i));
    for (Py_ssize_t at = 0; known > 0 && kwargs != NULL && PyDict_Next(kwargs, &at, &name, &value);)
        known = take_argument(&given, name, value);
    if (known <= 0)
        return known;
    if (given.new_tokens == NULL)
        return given.cache == NULL ? describe_nameless(call, args, kwargs, found) : 0;
    PyObject *overridden = ask_whether_overridden(given.new_tokens);
    Py_XDECREF(overridden);
    if (overridden != Py_False)
        return overridden == NULL ? -1 : 0;
    PyObject *shape = PyObject_GetAttr(given.new_tokens, shape_of_tensor);
    if (shape == NULL)
        return -1;
    int64_t length = 1;
    found->sequences = 1;
    Py_ssize_t dimensions = PyTuple_Check(shape) ? PyTuple_GET_SIZE(shape) : -1;
    if (dimensions > 1) {
        known = number_in(PyTuple_GET_ITEM(shape, 0), &found->sequences) && number_in(PyTuple_GET_ITEM(shape, 1), &length);
        if (dimensions > 3)
            length = 0;
    }
    else
        known = dimensions == 0 || (dimensions == 1 && number_in(PyTuple_GET_ITEM(shape, 0), &length));
    Py_DECREF(shape);
    if (!known || found->sequences >= INT32_MAX || length >= INT32_MAX)
        return 0;
    found->tokens = found->sequences * length;
    found->cached = -1;
    found->phase = PLAIN_SLOT(call, MODEL_CALL, CALLED_WITHOUT_CACHE);
    if (found->phase == NULL)
        return 0;
    if (PLAIN_SLOT(call, MODEL_CALL, CALLED_HAS_CACHE) != Py_True)
        return PLAIN_SLOT(call, MODEL_CALL, CALLED_HAS_CACHE) == Py_False;
    found->cached = 0;
    if (given.cache != NULL && (known = positions_in(given.cache, &found->cached)) <= 0)
        return known;
    found->phase = found->cached == 0 ? lent.prefill : length == 1 ? lent.decode : lent.extend;
    return 1;
}

/* Describe a model's call, like `describe`. `call` is a ModelCall, or already a description (of a runner's run),
   which is copied. */
static inline int
described(PyObject *call, PyObject *args, PyObject *kwargs, Described *found)
{
    if ((PyObject *)Py_TYPE(call) != lent.call_type)
        return describe(call, args, kwargs, found);
    PyObject *cached = PyTuple_GET_ITEM(call, 3);
    found->phase = PyTuple_GET_ITEM(call, 0);
    found->cached = -1;
    return PyUnicode_CheckExact(found->phase) && number_in(PyTuple_GET_ITEM(call, 1), &found->tokens) &&
           number_in(PyTuple_GET_ITEM(call, 2), &found->sequences) && found->tokens >= 0 && found->sequences >= 0 &&
           (cached == Py_None || (number_in(cached, &found->cached) && found->cached >= 0));
}

/* Clear an exception of our code, because Python code will run into it again and report it. If the exception is
   the host's (an interrupt, or raised by its signal handler), keep it and return -1. */
static inline int
forget_exception(void)
{
    if (LIKELY(!PyErr_Occurred()))
        return 0;
    return tell_of_exception(lent.reraise_host_error);
}

/* Return whether a command requests a burst of kernels. Returns 1 if that is not known. Clears exceptions. */
ONCE_A_STEP static int
is_burst_asked(PyObject *steps)
{
    PyObject *bursts = PLAIN_SLOT(steps, MODEL_STEPS, OF_BURSTS);
    PyObject *asked = bursts == NULL ? NULL : PyObject_GetAttr(bursts, asked_name);
    PyObject *words = asked == NULL ? NULL : PyObject_GetAttr(asked, asked_word_name);
    PyObject *word = words == NULL ? NULL : PySequence_GetItem(words, 0);
    PyObject *seen = word == NULL ? NULL : PyObject_GetAttr(bursts, looked_at_name);
    int64_t now, before;
    int is_asked = !(number_in(word, &now) && number_in(seen, &before) && now == before);
    Py_XDECREF(asked);
    Py_XDECREF(words);
    Py_XDECREF(word);
    Py_XDECREF(seen);
    if (UNLIKELY(PyErr_Occurred()))
        PyErr_Clear();
    return is_asked;
}

/* Return whether calls are traced or compiled, or run on tensors without contents. Returns 1 if that is not known, or
   if another thread compiles, which Python tells apart. Returns -1 with an exception set. */
ONCE_A_STEP static int
is_traced(void)
{
    PyObject *answer;
    if (lent.compiling_flags == Py_None)
        answer = PyObject_CallNoArgs(lent.is_compiling);
    else /* the same result as `is_compiling`, without its Python frames */
        answer = Py_XNewRef(PyDict_GetItemWithError(lent.compiling_flags, compiling_flag_name));
    Py_XDECREF(answer);
    if (answer != Py_False)
        return answer == NULL && PyErr_Occurred() ? -1 : 1;
    answer = PyObject_CallNoArgs(lent.is_tracing);
    Py_XDECREF(answer);
    if (answer != Py_False)
        return answer == NULL ? -1 : 1;
    PyObject *modes = PyObject_CallNoArgs(lent.dispatch_stack);
    int64_t count = 0;
    int is_known = number_in(modes, &count);
    Py_XDECREF(modes);
    return modes == NULL ? -1 : !is_known || count != 0;
}

enum { IN_PYTHON, PLAIN, RECORDED };

/* Return whether `generation` is the only call of `generate` in `unit`. If `generation` is NULL, return whether
   there is no such call. */
static inline int
is_alone(PyObject *generation, PyObject *unit)
{
    PyObject *generations = PLAIN_SLOT(unit, UNIT, UNIT_GENERATIONS);
    if (generations == NULL || !PyList_CheckExact(generations))
        return 0;
    if (generation == NULL)
        return PyList_GET_SIZE(generations) == 0;
    return PyList_GET_SIZE(generations) == 1 && PyList_GET_ITEM(generations, 0) == generation &&
           is_of(generation, GENERATION);
}

/* Return the innermost call of `generate` in `unit`, borrowed. NULL if there is none. */
static inline PyObject *
generation_in(PyObject *unit)
{
    PyObject *generations = PLAIN_SLOT(unit, UNIT, UNIT_GENERATIONS);
    Py_ssize_t depth = generations != NULL && PyList_CheckExact(generations) ? PyList_GET_SIZE(generations) : 0;
    return depth ? PyList_GET_ITEM(generations, depth - 1) : NULL;
}

/* Return the sort of a step that would begin now: PLAIN or RECORDED, or IN_PYTHON if Python must begin it. Changes
   nothing. */
ONCE_A_STEP static int
sort_of_step(PyObject *steps, HotPath *path, Position *position, PyObject *unit, PyObject *generation, int waits)
{
    PyObject *core = PLAIN_SLOT(steps, MODEL_STEPS, OF_STEPS), *name = PLAIN_SLOT(steps, MODEL_STEPS, OF_MODEL);
    if (!is_of(core, STEPS) || PLAIN_SLOT(core, STEPS, STEPS_IS_ON) != Py_True ||
        PLAIN_SLOT(core, STEPS, STEPS_FORKS) == NULL || name == NULL || !PyUnicode_CheckExact(name))
        return IN_PYTHON;
    PyObject *open = PLAIN_SLOT(unit, UNIT, UNIT_OPEN);
    if (open == NULL || !PyList_CheckExact(open) || PyList_GET_SIZE(open) != 0 || !is_alone(generation, unit))
        return IN_PYTHON;
    if (!path->recording || !position->recording || (position->step != NULL && position->step != Py_None) ||
        position->held != NULL || position->scope != path->root)
        return IN_PYTHON;
    PyObject *governor = PLAIN_SLOT(core, STEPS, STEPS_GOVERNOR), *is_sampled = PLAIN_SLOT(core, STEPS, STEPS_IS_SAMPLED);
    PyObject *are_in = PLAIN_SLOT(steps, MODEL_STEPS, OF_ARE_IN);
    if (is_sampled == NULL || !PyMethod_Check(is_sampled))
        return IN_PYTHON;
    if (governor == Py_None) {
        PyObject *recorded = PLAIN_SLOT(steps, MODEL_STEPS, OF_RECORDED);
        return !waits && PyMethod_GET_FUNCTION(is_sampled) == lent.every && are_in == Py_True && recorded != NULL &&
                       PySet_CheckExact(recorded)
                   ? RECORDED
                   : IN_PYTHON;
    }
    if (!is_of(governor, GOVERNOR) || PyMethod_GET_FUNCTION(is_sampled) != lent.is_sampled ||
        PyMethod_GET_SELF(is_sampled) != governor || are_in != Py_False)
        return IN_PYTHON;
    PyObject *models = PLAIN_SLOT(governor, GOVERNOR, GOVERNOR_MODELS);
    return models != NULL && PyDict_CheckExact(models) ? PLAIN : IN_PYTHON;
}

/* Return whether the next step can be recorded here: every step is recorded, and the model is not checked for
   changes in this step. */
ONCE_A_STEP static int
is_recorded_next(PyObject *steps, PyObject *core)
{
    int64_t looks, every, sampled;
    PyObject *profiler = PyMethod_GET_SELF(PLAIN_SLOT(core, STEPS, STEPS_IS_SAMPLED));
    PyObject *said = PyObject_GetAttr(profiler, sample_every_name);
    int is_known = number_in(said, &sampled) && number_in(lent.look_every, &every) &&
                   number_in(PLAIN_SLOT(steps, MODEL_STEPS, OF_LOOKS), &looks);
    Py_XDECREF(said);
    return is_known && sampled == 1 && every > 0 && looks >= 0 && (looks + 1) % every != 0;
}

/* Return the governor's data of the model, borrowed. NULL if recorded steps are running, or if the timed calls are
   still swapped in. */
static inline PyObject *
governed(PyObject *steps, PyObject *governor)
{
    PyObject *model = PyDict_GetItemWithError(PLAIN_SLOT(governor, GOVERNOR, GOVERNOR_MODELS),
                                              PLAIN_SLOT(steps, MODEL_STEPS, OF_MODEL));
    if (!is_of(model, MODEL) || PLAIN_SLOT(model, MODEL, GOVERNED_CALLS_ARE_IN) != Py_False)
        return NULL;
    PyObject *running = PLAIN_SLOT(model, MODEL, GOVERNED_RUNNING);
    return running != NULL && PyDict_CheckExact(running) && PyDict_GET_SIZE(running) == 0 ? model : NULL;
}

/* Return (phase, key, (phase, model)) of a step, borrowed from `steps`, which stores this tuple for the last step. */
ONCE_A_STEP static PyObject *
keys_of(PyObject *steps, PyObject *phase)
{
    PyObject *keys = PLAIN_SLOT(steps, MODEL_STEPS, OF_KEYS);
    if (keys != NULL && PyTuple_CheckExact(keys) && PyTuple_GET_ITEM(keys, 0) == phase)
        return keys;
    PyObject *model = PLAIN_SLOT(steps, MODEL_STEPS, OF_MODEL);
    PyObject *key = PyUnicode_GET_LENGTH(model) ? PyTuple_Pack(3, lent.step_kind, phase, model)
                                                : PyTuple_Pack(2, lent.step_kind, phase);
    PyObject *kind = key == NULL ? NULL : PyTuple_Pack(2, phase, model);
    keys = kind == NULL ? NULL : PyTuple_Pack(3, phase, key, kind);
    Py_XDECREF(key);
    Py_XDECREF(kind);
    if (keys != NULL)
        give(steps, MODEL_STEPS, OF_KEYS, keys);
    return keys;
}

/* Return a new tuple of class `type`, without calling `__new__`. NULL with an exception set. */
static PyObject *
named_tuple(PyObject *type, Py_ssize_t size)
{
    return ((PyTypeObject *)type)->tp_alloc((PyTypeObject *)type, size);
}

/* Do the same as Governor.is_sampled, for a step that is not the first of its kind. `number` is the number of the
   step. Also returns 1 if the result is not known. */
static inline int
is_sampled(PyObject *governor, int64_t number)
{
    int64_t every;
    uint64_t product;
    return !number_in(PLAIN_SLOT(governor, GOVERNOR, GOVERNOR_EVERY), &every) || every < 0 ||
           !__builtin_mul_overflow((uint64_t)number * golden, (uint64_t)every, &product);
}

/* Return whether this code can begin a step of `call` inside `generation`. If the preparation of the step's inputs
   has begun, stores the time of its begin in `start`, as a new reference. */
static inline int
is_usual_in(PyObject *generation, PyObject *call, HotPath *path, int64_t called_ns, PyObject **start)
{
    if ((PyObject *)Py_TYPE(call) != lent.call_type) {
        PyObject *module = living(PLAIN_SLOT(call, MODEL_CALL, CALLED_MODULE));
        int is_generating = module != NULL && module == PLAIN_SLOT(generation, GENERATION, GENERATING_MODEL);
        Py_XDECREF(module);
        if (!is_generating || PLAIN_SLOT(generation, GENERATION, GENERATION_IS_ASSISTED) != Py_False ||
            PLAIN_SLOT(generation, GENERATION, GENERATION_BEAMS) != Py_None)
            return 0;
    }
    PyObject *prepared = PLAIN_SLOT(generation, GENERATION, GENERATION_PREPARED);
    int64_t start_ns;
    if (prepared == Py_None)
        return 1;
    if (prepared == NULL || !PyTuple_CheckExact(prepared) || PyTuple_GET_SIZE(prepared) != 2 || path->clock_ns != NULL ||
        !number_in(PyTuple_GET_ITEM(prepared, 0), &start_ns) || start_ns < 0 || start_ns > called_ns)
        return 0;
    *start = Py_NewRef(PyTuple_GET_ITEM(prepared, 0));
    return 1;
}

/* Begin the step of a call, and store it in `begun`. `call` is a ModelCall, or the description of a runner's run.
   Returns PLAIN or RECORDED, or IN_PYTHON if Python must begin the step. Returns -1 with an exception set that is
   not an Exception. */
ONCE_A_STEP static int
begin_step(PyObject *call, PyObject *steps, HotPath *path, Position *position, PyObject *unit, PyObject *args,
           PyObject *kwargs, int64_t called_ns, PyObject **begun)
{
    int64_t due_ns;
    if (number_in(PLAIN_SLOT(steps, MODEL_STEPS, OF_KERNELS_DUE_NS), &due_ns) && due_ns > 0 && called_ns >= due_ns)
        return IN_PYTHON;
    PyObject *generation = generation_in(unit), *prepared_ns = NULL;
    int is_run = (PyObject *)Py_TYPE(call) == lent.call_type, waits = is_run || generation != NULL;
    int sort = sort_of_step(steps, path, position, unit, generation, waits);
    if (sort == IN_PYTHON)
        return IN_PYTHON;
    Py_XINCREF(generation);
    Described found = {NULL, 0, 0, -1};
    int known = is_traced();
    known = known != 0 ? -known : !is_burst_asked(steps) && described(call, args, kwargs, &found) > 0;
    /* If `generate` uses no cache, it computes the prompt again for each token. Such steps have a different name,
       which Python gives them. */
    if (known > 0 && generation != NULL && PLAIN_SLOT(generation, GENERATION, GENERATION_LENGTH) != Py_None)
        known = !is_run && found.phase != lent.prefill;
    PyObject *keys = known > 0 ? Py_XNewRef(keys_of(steps, found.phase)) : NULL;
    if (keys == NULL) {
        Py_XDECREF(generation);
        return forget_exception();
    }
    PyObject *core = Py_NewRef(PLAIN_SLOT(steps, MODEL_STEPS, OF_STEPS)), *none = Py_None;
    PyObject *key = PyTuple_GET_ITEM(keys, 1), *mark = NULL;
    PyObject *open_step = plain[OPEN_STEP].type->tp_alloc(plain[OPEN_STEP].type, 0);
    PyObject *step = plain[STEP].type->tp_alloc(plain[STEP].type, 0), *adopted = PyDict_New();
    PyObject *described_as = is_run ? Py_NewRef(call) : named_tuple(lent.call_type, 4);
    PyObject *tokens = PyLong_FromLongLong(found.tokens), *sequences = PyLong_FromLongLong(found.sequences);
    PyObject *cached = found.cached < 0 ? Py_NewRef(none) : PyLong_FromLongLong(found.cached);
    PyObject *zero = PyLong_FromLong(0), *begun_ns = NULL, *start = NULL, *next = NULL, *lane = NULL;
    Scope *scope = NULL;
    int is_begun = 0;
    if (open_step == NULL || step == NULL || adopted == NULL || described_as == NULL || tokens == NULL ||
        sequences == NULL || cached == NULL || zero == NULL)
        goto done;
    if (sort == PLAIN)
        mark = named_tuple(lent.mark_type, 3);
    else if (is_recorded_next(steps, core) && PyDict_GetItemWithError(path->root->children, key) != NULL) {
        /* Fill the slots of `step` that other code reads through the lanes, because `take_lane` stores the step as
           the holder of its lane. */
        PyObject *const of_holder[] = {none, none, none, adopted, zero};
        static const int seen[] = {STEP_LANE, STEP_POSITION, STEP_SCOPE, STEP_ADOPTED, STEP_WAITS};
        for (int i = 0; i < 5; i++)
            fill(step, STEP, seen[i], of_holder[i]);
        lane = PyObject_CallMethodOneArg(core, take_lane_name, step);
    }
    /* From here on, no object is made that the garbage collector tracks. */
    if ((mark == NULL && lane == NULL) || sort_of_step(steps, path, position, unit, generation, waits) != sort ||
        (generation != NULL && !is_usual_in(generation, call, path, called_ns, &prepared_ns)))
        goto done;
    PyObject *governor = PLAIN_SLOT(core, STEPS, STEPS_GOVERNOR), *numbers = NULL, *model = NULL;
    int64_t number, lanes, now_ns = monotonic_ns(), start_ns = now_ns;
    if (sort == PLAIN) {
        model = governed(steps, governor);
        numbers = PLAIN_SLOT(governor, GOVERNOR, GOVERNOR_BEGUN);
        if (model == NULL || PLAIN_SLOT(model, MODEL, GOVERNED_RECORDED) == NULL || numbers == NULL ||
            !PyDict_CheckExact(numbers) || !number_in(PyDict_GetItemWithError(numbers, key), &number) ||
            is_sampled(governor, number))
            goto done;
        number++;
    }
    else {
        scope = (Scope *)Py_XNewRef(PyDict_GetItemWithError(path->root->children, key));
        if (scope == NULL || !Py_IS_TYPE(scope, ScopeType) || scope->node <= NO_NODE || scope->parent != path->root ||
            scope->work != NULL || !number_in(lane, &lanes) ||
            !number_in(PLAIN_SLOT(steps, MODEL_STEPS, OF_LOOKS), &number))
            goto done;
        number++;
    }
    if (path->clock_ns != NULL) {
        int read = read_clock(path, &start_ns);
        if (read < 0 || sort_of_step(steps, path, position, unit, generation, waits) != sort ||
            PLAIN_SLOT(core, STEPS, STEPS_GOVERNOR) != governor ||
            (sort == PLAIN && governed(steps, governor) != model))
            goto done;
    }
    begun_ns = PyLong_FromLongLong(now_ns);
    start = path->clock_ns == NULL ? Py_XNewRef(begun_ns) : PyLong_FromLongLong(start_ns);
    next = PyLong_FromLongLong(number);
    if (begun_ns == NULL || start == NULL || next == NULL ||
        PyList_Append(PLAIN_SLOT(unit, UNIT, UNIT_OPEN), open_step) < 0)
        goto done;
    if (sort == RECORDED)
        fill(steps, MODEL_STEPS, OF_LOOKS, next);
    else if (PyDict_SetItem(numbers, key, next) < 0) {
        PyList_SetSlice(PLAIN_SLOT(unit, UNIT, UNIT_OPEN), 0, 1, NULL);
        goto done;
    }
    if (!is_run) {
        PyTuple_SET_ITEM(described_as, 0, Py_NewRef(found.phase));
        PyTuple_SET_ITEM(described_as, 1, Py_NewRef(tokens));
        PyTuple_SET_ITEM(described_as, 2, Py_NewRef(sequences));
        PyTuple_SET_ITEM(described_as, 3, Py_NewRef(cached));
    }
    if (sort == PLAIN) {
        PyTuple_SET_ITEM(mark, 0, Py_NewRef(lent.sort));
        PyTuple_SET_ITEM(mark, 1, Py_NewRef(PLAIN_SLOT(model, MODEL, GOVERNED_RECORDED)));
        PyTuple_SET_ITEM(mark, 2, Py_NewRef(model));
    }
    PyObject *const of_step[] = {
        [STEP_STEPS] = core, [STEP_LANE] = lane == NULL ? none : lane, [STEP_POSITION] = (PyObject *)position,
        [STEP_SCOPE] = scope == NULL ? none : (PyObject *)scope, [STEP_CANCELLED] = Py_False,
        [STEP_ADOPTED] = adopted, [STEP_WAITS] = zero, [STEP_ENDED] = none, [STEP_MARK] = mark == NULL ? none : mark,
        [STEP_NAME] = found.phase, [STEP_MODEL] = PLAIN_SLOT(steps, MODEL_STEPS, OF_MODEL), [STEP_KEY] = key,
        [STEP_START_NS] = prepared_ns == NULL ? none : prepared_ns, [STEP_OWN_NS] = zero, [STEP_RETURNED_NS] = none, [STEP_TOKENS] = tokens,
        [STEP_SEQUENCES] = found.sequences ? sequences : none, [STEP_CACHED] = cached,
        [STEP_BEGUN_NS] = begun_ns, [STEP_OUTER] = none, [STEP_IS_PLAIN] = sort == PLAIN ? Py_True : Py_False,
        [STEP_FORKS] = PLAIN_SLOT(core, STEPS, STEPS_FORKS), [STEP_IS_OUTERMOST] = Py_True,
        [STEP_INSIDE] = (PyObject *)path->root, [STEP_START] = start, [STEP_OUTER_HELD] = none,
    };
    for (int i = 0; i <= STEP_OUTER_HELD; i++)
        fill(step, STEP, i, of_step[i]);
    PyObject *const of_open[] = {
        [OPEN_STEPS] = steps, [OPEN_PROFILER] = PLAIN_SLOT(steps, MODEL_STEPS, OF_PROFILER),
        [OPEN_IS_RUNNING] = Py_True, [OPEN_IS_RECORDED] = sort == RECORDED ? Py_True : Py_False,
        [OPEN_GENERATION] = generation == NULL ? none : generation, [OPEN_WAITS] = waits ? Py_True : Py_False,
        [OPEN_UNIT] = unit, [OPEN_SAMPLING] = none, [OPEN_CALL] = described_as,
        [OPEN_STEP_OF] = step, [OPEN_BEGUN_NS] = begun_ns, [OPEN_IN_BURST] = none, [OPEN_NOTING] = none,
        [OPEN_MAY_BE_TRAINING] = Py_False, [OPEN_END_EVALUATION] = none,
    };
    for (int i = 0; i <= OPEN_END_EVALUATION; i++)
        fill(open_step, OPEN_STEP, i, of_open[i]);
    PyObject *before = position->step;
    position->step = Py_NewRef(step);
    Py_XDECREF(before);
    if (sort == PLAIN) {
        say_recording(position, 0); /* calls inside this step are not recorded */
        Scope *there = (Scope *)PyDict_GetItemWithError(path->root->children, key);
        want_slot(path, position);
        if (there != NULL && Py_IS_TYPE(there, ScopeType) && there->node > NO_NODE)
            say_where(position, there->node, start_ns);
        PyErr_Clear();
    }
    else {
        position->lane = lanes;
        enter(path, position, scope);
        say_where(position, scope->node, start_ns);
    }
    say_size(position, found.tokens ? found.tokens : found.sequences);
    *begun = Py_NewRef(open_step);
    is_begun = 1;
    if (sort == RECORDED) {
        PyObject *followed = PyObject_CallMethodOneArg(steps, follow_name, open_step);
        Py_XDECREF(followed);
        if (followed == NULL) {
            is_begun = -1;
            goto done;
        }
    }
    add_ns(step, STEP, STEP_OWN_NS, monotonic_ns() - called_ns);
    int64_t before_ns;
    if (generation != NULL && number_in(PLAIN_SLOT(generation, GENERATION, GENERATION_OWN_NS), &before_ns)) {
        add_ns(step, STEP, STEP_OWN_NS, before_ns);
        fill(generation, GENERATION, GENERATION_OWN_NS, zero);
    }
done:
    Py_XDECREF(open_step);
    Py_XDECREF(step);
    Py_XDECREF(adopted);
    Py_XDECREF(described_as);
    Py_XDECREF(generation);
    Py_XDECREF(prepared_ns);
    Py_XDECREF(mark);
    Py_XDECREF(lane);
    Py_XDECREF(scope);
    Py_XDECREF(tokens);
    Py_XDECREF(sequences);
    Py_XDECREF(cached);
    Py_XDECREF(zero);
    Py_XDECREF(begun_ns);
    Py_XDECREF(start);
    Py_XDECREF(next);
    Py_DECREF(keys);
    Py_DECREF(core);
    return is_begun > 0 ? sort : is_begun < 0 ? -1 : forget_exception();
}

/* Return the sort of the step of `open_step`: PLAIN or RECORDED, or IN_PYTHON if Python must end it. Changes
   nothing and runs no Python code. */
ONCE_A_STEP static int
sort_of_end(HotPath *path, Position *position, PyObject *unit, PyObject *open_step, PyObject *step)
{
    PyObject *open = PLAIN_SLOT(unit, UNIT, UNIT_OPEN), *steps = PLAIN_SLOT(open_step, OPEN_STEP, OPEN_STEPS);
    PyObject *generation = PLAIN_SLOT(open_step, OPEN_STEP, OPEN_GENERATION);
    if (open == NULL || !PyList_CheckExact(open) || PyList_GET_SIZE(open) != 1 || PyList_GET_ITEM(open, 0) != open_step ||
        PLAIN_SLOT(open_step, OPEN_STEP, OPEN_END_EVALUATION) != Py_None || !is_of(steps, MODEL_STEPS) ||
        !is_alone(generation == Py_None ? NULL : generation, unit))
        return IN_PYTHON;
    PyObject *core = PLAIN_SLOT(step, STEP, STEP_STEPS), *adopted = PLAIN_SLOT(step, STEP, STEP_ADOPTED);
    PyObject *mark = PLAIN_SLOT(step, STEP, STEP_MARK), *is_plain = PLAIN_SLOT(step, STEP, STEP_IS_PLAIN);
    if (!is_of(core, STEPS) || PLAIN_SLOT(core, STEPS, STEPS_IS_ON) != Py_True ||
        PLAIN_SLOT(core, STEPS, STEPS_FORKS) != PLAIN_SLOT(step, STEP, STEP_FORKS) ||
        PLAIN_SLOT(step, STEP, STEP_CANCELLED) != Py_False ||
        adopted == NULL || !PyDict_CheckExact(adopted) || PyDict_GET_SIZE(adopted) != 0 ||
        PLAIN_SLOT(step, STEP, STEP_POSITION) != (PyObject *)position || position->step != step ||
        PLAIN_SLOT(step, STEP, STEP_INSIDE) != (PyObject *)path->root)
        return IN_PYTHON;
    if (PLAIN_SLOT(open_step, OPEN_STEP, OPEN_WAITS) != Py_False) {
        /* A step with a different key was begun by Python, for example in a warm-up. */
        PyObject *keys = PLAIN_SLOT(steps, MODEL_STEPS, OF_KEYS), *key = PLAIN_SLOT(step, STEP, STEP_KEY);
        if (is_plain != Py_True || core != PLAIN_SLOT(steps, MODEL_STEPS, OF_STEPS) ||
            PLAIN_SLOT(open_step, OPEN_STEP, OPEN_IN_BURST) != Py_None ||
            PLAIN_SLOT(open_step, OPEN_STEP, OPEN_SAMPLING) != Py_None || keys == NULL || !PyTuple_CheckExact(keys) ||
            PyTuple_GET_ITEM(keys, 1) != key)
            return IN_PYTHON;
    }
    else if (PLAIN_SLOT(step, STEP, STEP_START_NS) != Py_None)
        return IN_PYTHON;
    if (is_plain == Py_True && mark != NULL && (PyObject *)Py_TYPE(mark) == lent.mark_type &&
        is_of(PLAIN_SLOT(core, STEPS, STEPS_GOVERNOR), GOVERNOR) && position->scope == path->root)
        return PLAIN;
    PyObject *scope = PLAIN_SLOT(step, STEP, STEP_SCOPE), *recorded = NULL;
    recorded = PLAIN_SLOT(steps, MODEL_STEPS, OF_RECORDED);
    int64_t waits;
    return is_plain == Py_False && mark == Py_None && scope != NULL && Py_IS_TYPE(scope, ScopeType) &&
                   (PyObject *)position->scope == scope && position->held == NULL && path->recording &&
                   position->recording && PLAIN_SLOT(step, STEP, STEP_ENDED) == Py_None && recorded != NULL &&
                   PySet_CheckExact(recorded) && PLAIN_SLOT(core, STEPS, STEPS_FLUSH) != NULL &&
                   PLAIN_SLOT(step, STEP, STEP_OUTER_HELD) == Py_None &&
                   number_in(PLAIN_SLOT(step, STEP, STEP_WAITS), &waits) && waits == 0
               ? RECORDED
               : IN_PYTHON;
}

/* Read a step's number of sequences or cached positions. Returns 0 if Python must read it. */
static inline int
amount_in(PyObject *given, int64_t *amount)
{
    *amount = UNKNOWN_AMOUNT;
    return given == Py_None || (number_in(given, amount) && *amount >= 0 && *amount <= MOST_AMOUNT);
}

/* Write a record into the ring. If there is no ring, pass it to the path's `record`. Returns -1 with an exception
   set. */
static inline int
record_step(HotPath *path, int64_t tag, int64_t first, int64_t second, int64_t elements)
{
    if (LIKELY(path->words != NULL)) {
        write_record(path, tag, first, second, elements);
        return 0;
    }
    PyObject *done = PyObject_CallFunction(path->record, "LLLL", (long long)tag, (long long)first, (long long)second,
                                           (long long)elements);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* Do the same as Governor.ended for a plain step. Returns 0 if Python must do it, for example if the governor is
   due for a decision. */
ONCE_A_STEP static int
count_plain(PyObject *steps, PyObject *governor, PyObject *step, PyObject *mark, int64_t duration_ns, PyObject *own_ns)
{
    int64_t seen, look_at_step, lived_ns, look_at_ns, kind_seen, counted, warm_up;
    PyObject *model = PyTuple_GET_ITEM(mark, 2), *keys = PLAIN_SLOT(steps, MODEL_STEPS, OF_KEYS);
    PyObject *kinds = PLAIN_SLOT(governor, GOVERNOR, GOVERNOR_KINDS), *own = PLAIN_SLOT(governor, GOVERNOR, GOVERNOR_OWN);
    if (PyTuple_GET_ITEM(mark, 0) != lent.sort || !is_of(model, MODEL) ||
        PLAIN_SLOT(model, MODEL, GOVERNED_RECORDED) != PyTuple_GET_ITEM(mark, 1) || keys == NULL ||
        !PyTuple_CheckExact(keys) || PyTuple_GET_ITEM(keys, 1) != PLAIN_SLOT(step, STEP, STEP_KEY) || kinds == NULL ||
        !PyDict_CheckExact(kinds) || own == NULL)
        return 0;
    PyObject *kind = PyDict_GetItemWithError(kinds, PyTuple_GET_ITEM(keys, 2));
    if (!is_of(kind, KIND))
        return 0;
    PyObject *waiting = PLAIN_SLOT(kind, KIND, KIND_WAITING), *counts = PLAIN_SLOT(kind, KIND, KIND_COUNTS);
    PyObject *recent = PLAIN_SLOT(kind, KIND, KIND_RECENT), *recent_ns = PLAIN_SLOT(governor, GOVERNOR, GOVERNOR_RECENT_NS);
    if (waiting == NULL || !PyList_CheckExact(waiting) || PyList_GET_SIZE(waiting) != 0 || counts == NULL ||
        !PyList_CheckExact(counts) || PyList_GET_SIZE(counts) == 0 || !number_in(PyList_GET_ITEM(counts, 0), &counted) ||
        recent == NULL || !PyFloat_CheckExact(recent) || recent_ns == NULL || !PyFloat_CheckExact(recent_ns) ||
        !number_in(PLAIN_SLOT(governor, GOVERNOR, GOVERNOR_SEEN), &seen) || seen == 0 ||
        !number_in(PLAIN_SLOT(governor, GOVERNOR, GOVERNOR_LIVED_NS), &lived_ns) ||
        !number_in(PLAIN_SLOT(governor, GOVERNOR, GOVERNOR_LOOK_AT_STEP), &look_at_step) ||
        !number_in(PLAIN_SLOT(governor, GOVERNOR, GOVERNOR_LOOK_AT_NS), &look_at_ns) ||
        !number_in(PLAIN_SLOT(kind, KIND, KIND_SEEN), &kind_seen) || !number_in(lent.warm_up, &warm_up))
        return 0;
    lived_ns += duration_ns;
    if (++seen >= look_at_step && lived_ns >= look_at_ns)
        return 0;
    kind_seen++;
    PyObject *made[] = {
        PyLong_FromLongLong(seen),          PyLong_FromLongLong(lived_ns),
        PyLong_FromLongLong(kind_seen),     PyLong_FromLongLong(counted + 1),
        PyLong_FromLongLong(duration_ns),   PyFloat_FromDouble(PyFloat_AS_DOUBLE(recent) + 1),
        PyFloat_FromDouble(PyFloat_AS_DOUBLE(recent_ns) + (double)duration_ns),
    };
    enum { MADE = sizeof made / sizeof made[0] };
    int are_made = 1;
    for (int i = 0; i < MADE; i++)
        are_made = are_made && made[i] != NULL;
    PyObject *appended = are_made ? PyObject_CallMethodOneArg(own, append_name, own_ns) : NULL;
    Py_XDECREF(appended);
    if (appended == NULL) {
        for (int i = 0; i < MADE; i++)
            Py_XDECREF(made[i]);
        return 0; /* the caller checks for an exception */
    }
    give(governor, GOVERNOR, GOVERNOR_SEEN, made[0]);
    give(governor, GOVERNOR, GOVERNOR_LIVED_NS, made[1]);
    give(governor, GOVERNOR, GOVERNOR_RECENT_NS, made[6]);
    fill(governor, GOVERNOR, GOVERNOR_HAS_LOOKED, Py_False);
    give(kind, KIND, KIND_SEEN, made[2]);
    give(kind, KIND, KIND_RECENT, made[5]);
    PyList_SetItem(counts, 0, made[3]);
    if (kind_seen > warm_up)
        give(kind, KIND, KIND_PLAIN_NS, made[4]);
    else
        Py_DECREF(made[4]);
    return 1;
}

/* Report a step that has ended, and cbtop's own time in it, to the governor. Returns -1 with an exception set. */
ONCE_A_STEP static int
tell_governor(PyObject *steps, PyObject *core, PyObject *step, PyObject *mark, int64_t ending_ns)
{
    PyObject *governor = Py_NewRef(PLAIN_SLOT(core, STEPS, STEPS_GOVERNOR));
    int64_t begun_ns, own, told_ns, now_ns = monotonic_ns();
    int done = -1;
    if (!number_in(PLAIN_SLOT(step, STEP, STEP_BEGUN_NS), &begun_ns) ||
        !number_in(PLAIN_SLOT(step, STEP, STEP_OWN_NS), &own) ||
        !number_in(PLAIN_SLOT(governor, GOVERNOR, GOVERNOR_TOLD_NS), &told_ns)) {
        PyErr_SetString(PyExc_TypeError, "what a step has paid is no whole number");
        goto done;
    }
    PyObject *own_ns = PyLong_FromLongLong(own + now_ns - ending_ns + told_ns);
    if (own_ns == NULL)
        goto done;
    done = count_plain(steps, governor, step, mark, now_ns - begun_ns, own_ns);
    if (done == 0 && !PyErr_Occurred()) {
        PyObject *name = PLAIN_SLOT(step, STEP, STEP_NAME), *took_ns = PyLong_FromLongLong(now_ns - begun_ns);
        PyObject *answer = NULL;
        if (took_ns != NULL)
            answer = PyObject_CallMethodObjArgs(governor, ended_name, name, PLAIN_SLOT(step, STEP, STEP_MODEL),
                                                took_ns, mark, own_ns, NULL);
        Py_XDECREF(took_ns);
        Py_XDECREF(answer);
    }
    Py_DECREF(own_ns);
    PyObject *told = PyErr_Occurred() ? NULL : PyLong_FromLongLong(monotonic_ns() - now_ns);
    done = told == NULL ? -1 : 0;
    if (told != NULL)
        give(governor, GOVERNOR,
             PLAIN_SLOT(governor, GOVERNOR, GOVERNOR_HAS_LOOKED) == Py_True ? GOVERNOR_LOOK_NS : GOVERNOR_TOLD_NS, told);
done:
    Py_DECREF(governor);
    return done;
}

/* End recording because of the current exception, like ActiveStep.__exit__. Returns -1 if it is not an Exception,
   or if ending the recording raised. */
ONCE_A_STEP static int
steps_give_up(PyObject *core)
{
    return tell_of_exception(PLAIN_SLOT(core, STEPS, STEPS_GIVE_UP));
}

/* End a step after its call has returned. Returns 0 if Python must do it, and -1 with an exception set. */
ONCE_A_STEP static int
end_step(PyObject *steps, HotPath *path, Position *position, PyObject *unit, PyObject *open_step, int64_t ending_ns)
{
    PyObject *step = PLAIN_SLOT(open_step, OPEN_STEP, OPEN_STEP_OF);
    int sort = is_of(step, STEP) ? sort_of_end(path, position, unit, open_step, step) : IN_PYTHON;
    if (sort == IN_PYTHON)
        return 0;
    int64_t start_ns, end_ns, tokens, sequences, cached, lane = 0;
    PyObject *key = PLAIN_SLOT(step, STEP, STEP_KEY), *start = PLAIN_SLOT(step, STEP, STEP_START_NS);
    PyObject *generation = PLAIN_SLOT(open_step, OPEN_STEP, OPEN_GENERATION);
    if (start == Py_None)
        start = PLAIN_SLOT(step, STEP, STEP_START);
    Scope *scope = key == NULL ? NULL : (Scope *)PyDict_GetItemWithError(path->root->children, key);
    if (scope == NULL || !Py_IS_TYPE(scope, ScopeType) || scope->node <= NO_NODE || scope->work != NULL ||
        (sort == RECORDED && ((PyObject *)scope != PLAIN_SLOT(step, STEP, STEP_SCOPE) ||
                              !number_in(PLAIN_SLOT(step, STEP, STEP_LANE), &lane))) ||
        !number_in(start, &start_ns) ||
        !number_in(PLAIN_SLOT(step, STEP, STEP_TOKENS), &tokens) || tokens < 0 ||
        !amount_in(PLAIN_SLOT(step, STEP, STEP_SEQUENCES), &sequences) ||
        !amount_in(PLAIN_SLOT(step, STEP, STEP_CACHED), &cached)) {
        PyErr_Clear();
        return 0;
    }
    Py_INCREF(scope);
    Py_INCREF(step);
    int done = read_clock(path, &end_ns) < 0 ? forget_exception() : 1;
    if (done > 0 && UNLIKELY(path->clock_ns != NULL))
        done = sort_of_end(path, position, unit, open_step, step) == sort;
    if (done <= 0) {
        Py_DECREF(scope);
        Py_DECREF(step);
        return done;
    }
    PyObject *core = Py_NewRef(PLAIN_SLOT(step, STEP, STEP_STEPS)), *mark = Py_NewRef(PLAIN_SLOT(step, STEP, STEP_MARK));
    fill(open_step, OPEN_STEP, OPEN_IS_RUNNING, Py_False);
    fill(step, STEP, STEP_POSITION, Py_None);
    fill(step, STEP, STEP_IS_PLAIN, Py_False);
    fill(step, STEP, STEP_MARK, Py_None);
    Py_CLEAR(position->step);
    say_where(position, NO_NODE, 0);
    say_recording(position, 1);
    if (sort == RECORDED) {
        leave(position, scope);
        enter(path, position, path->root);
        position->lane = 0;
        PySet_Discard(PLAIN_SLOT(steps, MODEL_STEPS, OF_RECORDED), open_step);
    }
    done = PyList_SetSlice(PLAIN_SLOT(unit, UNIT, UNIT_OPEN), 0, 1, NULL);
    if (generation != Py_None)
        fill(generation, GENERATION, GENERATION_PREPARED, Py_None);
    if (done == 0)
        done = record_step(path, scope->node | (sort == PLAIN ? FLAG_PLAIN : lane), start_ns, end_ns, tokens);
    if (done == 0 && (sequences != UNKNOWN_AMOUNT || cached != UNKNOWN_AMOUNT))
        done = record_step(path, scope->node | FLAG_AMOUNTS, sequences, cached, 0);
    if (sort == RECORDED) {
        /* Release the lane only now, so that this step's end is recorded before any record of the next step in the
           lane. */
        fill(step, STEP, STEP_LANE, Py_None);
        PyObject *flushed = done < 0 ? NULL : PyObject_CallNoArgs(PLAIN_SLOT(core, STEPS, STEPS_FLUSH));
        Py_XDECREF(flushed);
        done = flushed == NULL ? -1 : 0;
    }
    if (done < 0)
        done = steps_give_up(core);
    if (done == 0 && sort == PLAIN && tell_governor(steps, core, step, mark, ending_ns) < 0)
        done = steps_give_up(core);
    Py_DECREF(scope);
    Py_DECREF(step);
    Py_DECREF(mark);
    Py_DECREF(core);
    return done < 0 ? -1 : 1;
}

/* Keep Dynamo from seeing Python frames until `dynamo_on`. Returns Dynamo's callback as a new reference, or NULL
   if this thread has none. */
ONCE_A_STEP static PyObject *
dynamo_off(void)
{
    if (lent.set_callback == Py_None)
        return NULL;
    PyObject *callback = PyObject_CallOneArg(lent.set_callback, Py_None);
    if (callback == NULL)
        PyErr_Clear();
    else if (callback == Py_None)
        Py_CLEAR(callback);
    return callback;
}

/* Set Dynamo's callback to `callback` again. Steals the reference. The current exception stays set. */
ONCE_A_STEP static void
dynamo_on(PyObject *callback)
{
    if (callback == NULL)
        return;
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyObject *ours = PyObject_CallOneArg(lent.set_callback, callback);
    if (ours == NULL)
        PyErr_Clear();
    Py_XDECREF(ours);
    Py_DECREF(callback);
    PyErr_Restore(type, error, trace);
}

/* Call the model. During the call, Dynamo has its callback back. */
ONCE_A_STEP static PyObject *
call_model(PyObject *called, PyObject *args, PyObject *kwargs, PyObject **callback)
{
    dynamo_on(*callback);
    *callback = NULL;
    PyObject *result = PyObject_Call(called, args, kwargs);
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    *callback = dynamo_off();
    PyErr_Restore(type, error, trace);
    return result;
}

/* Close an open step by Python code, with the current exception if there is one. That exception stays set, unless
   closing raises another. */
ONCE_A_STEP static int
close_by_python(PyObject *open_step)
{
    PyObject *type = NULL, *error = NULL, *trace = NULL, *done;
    PyErr_Fetch(&type, &error, &trace);
    if (type == NULL)
        done = PyObject_CallMethodNoArgs(open_step, close_name);
    else {
        PyErr_NormalizeException(&type, &error, &trace);
        if (trace != NULL)
            PyException_SetTraceback(error, trace);
        done = PyObject_CallMethodObjArgs(open_step, close_name, type, error, trace == NULL ? Py_None : trace, NULL);
    }
    Py_XDECREF(done);
    if (done != NULL && type != NULL) {
        PyErr_Restore(type, error, trace);
        return -1;
    }
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(trace);
    return done == NULL ? -1 : 0;
}

/* Report the current Exception to `steps`, like ModelSteps.failed. If the host raised it, return -1 and leave it
   set. */
ONCE_A_STEP static int
has_failed(PyObject *steps)
{
    PyObject *type, *error, *trace;
    if (!PyErr_Occurred())
        return 0;
    PyErr_Fetch(&type, &error, &trace);
    PyObject *failed = PyObject_GetAttr(steps, failed_name);
    if (failed == NULL)
        PyErr_Clear();
    PyErr_Restore(type, error, trace);
    int has = failed == NULL ? -1 : tell_of_exception(failed);
    Py_XDECREF(failed);
    return has;
}

/* Handle an Exception raised while a step began, like ModelSteps.begun. The call then runs without a step. If it
   is not an Exception, return -1 and leave it set. */
ONCE_A_STEP static int
begin_has_failed(PyObject *steps, PyObject *open_step)
{
    close_by_python(open_step);
    return has_failed(steps);
}

/* Run the call in the step `open_step`, and end the step. */
ONCE_A_STEP static PyObject *
run_step(PyObject *called, PyObject *args, PyObject *kwargs, PyObject *steps, HotPath *path, Position *position,
         PyObject *unit, PyObject *open_step, PyObject **callback)
{
    PyObject *result = call_model(called, args, kwargs, callback);
    int ended = -1;
    if (result != NULL && PLAIN_SLOT(open_step, OPEN_STEP, OPEN_WAITS) == Py_True) {
        int64_t returned_ns = monotonic_ns();
        fill(open_step, OPEN_STEP, OPEN_IS_RUNNING, Py_False);
        if (is_of(PLAIN_SLOT(open_step, OPEN_STEP, OPEN_STEP_OF), STEP))
            add_ns(PLAIN_SLOT(open_step, OPEN_STEP, OPEN_STEP_OF), STEP, STEP_OWN_NS, monotonic_ns() - returned_ns);
        ended = 1;
    }
    else if (LIKELY(result != NULL)) {
        int64_t returned_ns = monotonic_ns();
        ended = end_step(steps, path, position, unit, open_step, returned_ns);
        if (ended == 0) {
            PyObject *step = PLAIN_SLOT(open_step, OPEN_STEP, OPEN_STEP_OF), *when = PyLong_FromLongLong(returned_ns);
            if (when != NULL && is_of(step, STEP))
                give(step, STEP, STEP_RETURNED_NS, Py_NewRef(when));
            Py_XDECREF(when);
            PyErr_Clear();
            ended = close_by_python(open_step);
        }
    }
    if (ended < 0) {
        Py_CLEAR(result);
        close_by_python(open_step); /* does nothing if the step has ended */
    }
    return result;
}

/* Do the same as ModelCall.__call__. Python's `begin` returns the callable and the step, and Python ends the step. */
static PyObject *
run_by_python(PyObject *self, PyObject *steps, PyObject *called, PyObject *args, PyObject *kwargs, int64_t called_ns,
              PyObject **callback)
{
    PyObject *named = kwargs == NULL ? PyDict_New() : Py_NewRef(kwargs), *when = PyLong_FromLongLong(called_ns);
    PyObject *begun = NULL, *result = NULL;
    if (named != NULL && when != NULL)
        begun = PyObject_CallMethodObjArgs(self, begin_name, args, named, when, NULL);
    Py_XDECREF(named);
    Py_XDECREF(when);
    if (begun == NULL || !PyTuple_CheckExact(begun) || PyTuple_GET_SIZE(begun) != 2) {
        Py_XDECREF(begun);
        return has_failed(steps) < 0 ? NULL : call_model(called, args, kwargs, callback);
    }
    PyObject *step = PyTuple_GET_ITEM(begun, 1);
    result = call_model(PyTuple_GET_ITEM(begun, 0), args, kwargs, callback);
    if (step != Py_None) {
        PyObject *ended = result == NULL ? NULL : PyObject_CallMethodNoArgs(step, ended_name);
        if (ended == NULL) {
            close_by_python(step);
            if (result != NULL && has_failed(steps) < 0)
                Py_CLEAR(result);
        }
        Py_XDECREF(ended);
    }
    Py_DECREF(begun);
    return result;
}

/* Return the step of the innermost open step, borrowed, if that is a running step of this model, else NULL. A call
   inside such a step is not a step of its own. */
static inline PyObject *
step_around(PyObject *steps, PyObject *open, PyObject *generations)
{
    PyObject *last = PyList_GET_ITEM(open, PyList_GET_SIZE(open) - 1);
    if (!is_of(last, OPEN_STEP) || PLAIN_SLOT(last, OPEN_STEP, OPEN_STEPS) != steps ||
        PLAIN_SLOT(last, OPEN_STEP, OPEN_IS_RUNNING) != Py_True)
        return NULL;
    Py_ssize_t inner = PyList_GET_SIZE(generations);
    PyObject *generation = inner ? PyList_GET_ITEM(generations, inner - 1) : Py_None;
    PyObject *step = PLAIN_SLOT(last, OPEN_STEP, OPEN_STEP_OF);
    return PLAIN_SLOT(last, OPEN_STEP, OPEN_GENERATION) == generation && is_of(step, STEP) ? step : NULL;
}

/* Do the same as ModelCall.__call__. */
static PyObject *
model_call(PyObject *self, PyObject *args, PyObject *kwargs)
{
    int64_t called_ns = monotonic_ns();
    PyObject *steps = is_of(self, MODEL_CALL) ? PLAIN_SLOT(self, MODEL_CALL, CALLED_STEPS) : NULL;
    PyObject *module = steps == NULL ? NULL : PLAIN_SLOT(self, MODEL_CALL, CALLED_MODULE);
    PyObject *called = steps == NULL ? NULL : PLAIN_SLOT(self, MODEL_CALL, CALLED_INSTEAD);
    HotPath *path = is_of(steps, MODEL_STEPS) ? (HotPath *)PLAIN_SLOT(steps, MODEL_STEPS, OF_PATH) : NULL;
    if (path == NULL || !Py_IS_TYPE(path, HotPathType) || module == NULL || called == NULL)
        return call_with(model_call_in_python, self, args, kwargs);
    /* References are borrowed, because the caller keeps `self` alive, and `self` keeps its steps alive. */
    PyObject *core = PLAIN_SLOT(steps, MODEL_STEPS, OF_STEPS), *unit = NULL, *open_step = NULL, *result = NULL;
    PyObject *callback = dynamo_off();
    Position *position = NULL;
    int is_called = 0, is_begun = 0;
    int is_of_runner = PLAIN_SLOT(steps, MODEL_STEPS, OF_IS_OF_RUNNER) == Py_True &&
                       PLAIN_SLOT(steps, MODEL_STEPS, OF_TRAINING) == Py_None;
    /* `is_on` is False if the profiler is disabled, or if recording has ended. */
    if (is_of(core, STEPS) && PLAIN_SLOT(core, STEPS, STEPS_IS_ON) == Py_False) {
        PyObject *profiler = PLAIN_SLOT(steps, MODEL_STEPS, OF_PROFILER);
        PyObject *enabled = profiler == NULL ? NULL : PyObject_GetAttr(profiler, enabled_name);
        is_called = enabled == Py_False && PLAIN_SLOT(steps, MODEL_STEPS, OF_ARE_IN) == Py_False;
        Py_XDECREF(enabled);
    }
    else if (PyDict_GET_SIZE(lent.captures) == 0 && (PyObject *)path == PLAIN_SLOT(steps, MODEL_STEPS, OF_TIMES) &&
             (is_of_runner || PLAIN_SLOT(steps, MODEL_STEPS, OF_IN_PYTHON) == Py_False) &&
             (position = this_position(path)) != NULL) {
        Py_INCREF(position);
        unit = Py_XNewRef(position->unit);
        path_of_units = path;
    }
    called = Py_NewRef(called);
    Py_INCREF(path);
    DEEPER(1);
    if (forget_exception() < 0)
        goto done;
    if (called == Py_None) {
        PyObject *found = living(module);
        Py_SETREF(called, found == NULL ? NULL : PyObject_GetAttr(found, call_impl));
        Py_XDECREF(found);
        if (forget_exception() < 0)
            goto done;
    }
    if (called != NULL && is_of(unit, UNIT)) {
        PyObject *open = PLAIN_SLOT(unit, UNIT, UNIT_OPEN), *generations = PLAIN_SLOT(unit, UNIT, UNIT_GENERATIONS);
        if (open == NULL || !PyList_CheckExact(open) || generations == NULL || !PyList_CheckExact(generations))
            ;
        else if (PyList_GET_SIZE(open) == 0) {
            /* If a runner runs the model, a call outside of its runs is not a step. */
            if (!is_of_runner)
                is_begun = begin_step(self, steps, path, position, unit, args, kwargs, called_ns, &open_step);
            if (is_begun < 0) {
                if (open_step == NULL || begin_has_failed(steps, open_step) < 0)
                    goto done;
                is_called = 1;
            }
        }
        else {
            PyObject *step = step_around(steps, open, generations);
            if (step != NULL) {
                add_ns(step, STEP, STEP_OWN_NS, monotonic_ns() - called_ns);
                is_called = 1;
            }
        }
    }
    if (is_begun > 0)
        result = run_step(called, args, kwargs, steps, path, position, unit, open_step, &callback);
    else if (is_called && called != NULL)
        result = call_model(called, args, kwargs, &callback);
    else
        result = run_by_python(self, steps, called, args, kwargs, called_ns, &callback);
done:
    dynamo_on(callback);
    DEEPER(-1);
    Py_XDECREF(open_step);
    Py_XDECREF(called);
    Py_XDECREF(unit);
    Py_XDECREF(position);
    Py_DECREF(path);
    return result;
}

/* Store the caller's unit in `unit`, as a new reference. Returns 0 if it is not known here, and -1 with an
   exception set. */
static int
unit_here(PyObject **unit)
{
    HotPath *path = (HotPath *)Py_XNewRef(path_of_units);
    Position *position = path == NULL ? NULL : this_position(path);
    if (position != NULL && is_of(position->unit, UNIT))
        *unit = Py_NewRef(position->unit);
    Py_XDECREF(path);
    return *unit != NULL ? 1 : forget_exception();
}

/* Do the same as Unit.waiting: return the step that waits for its token, borrowed, or NULL. */
static inline PyObject *
waiting_in(PyObject *unit)
{
    PyObject *open = PLAIN_SLOT(unit, UNIT, UNIT_OPEN), *generation = generation_in(unit);
    if (open == NULL || !PyList_CheckExact(open) || PyList_GET_SIZE(open) == 0)
        return NULL;
    PyObject *last = PyList_GET_ITEM(open, PyList_GET_SIZE(open) - 1);
    return is_of(last, OPEN_STEP) && PLAIN_SLOT(last, OPEN_STEP, OPEN_WAITS) == Py_True &&
                   PLAIN_SLOT(last, OPEN_STEP, OPEN_IS_RUNNING) == Py_False &&
                   PLAIN_SLOT(last, OPEN_STEP, OPEN_GENERATION) == (generation == NULL ? Py_None : generation)
               ? last
               : NULL;
}

/* End a plain step that waits for its token. The call that ends it returned at `returned_ns`. Returns 0 if Python must
   do it, and -1 with an exception set. */
ONCE_A_STEP static int
end_waiting(PyObject *open_step, PyObject *unit, int64_t returned_ns)
{
    PyObject *steps = PLAIN_SLOT(open_step, OPEN_STEP, OPEN_STEPS);
    HotPath *path = is_of(steps, MODEL_STEPS) ? (HotPath *)PLAIN_SLOT(steps, MODEL_STEPS, OF_PATH) : NULL;
    if (path == NULL || !Py_IS_TYPE(path, HotPathType) || (PyObject *)path != PLAIN_SLOT(steps, MODEL_STEPS, OF_TIMES))
        return 0;
    Position *position = this_position(path);
    if (position == NULL || position->unit != unit)
        return forget_exception();
    Py_INCREF(open_step);
    Py_INCREF(steps);
    Py_INCREF(path);
    Py_INCREF(position);
    PyObject *callback = dynamo_off();
    int ended = end_step(steps, path, position, unit, open_step, returned_ns);
    if (ended < 0)
        close_by_python(open_step); /* does nothing if the step has ended */
    dynamo_on(callback);
    Py_DECREF(open_step);
    Py_DECREF(steps);
    Py_DECREF(path);
    Py_DECREF(position);
    return ended;
}

/* Begin the step of a runner's run: `begin_run(steps, call, called_ns)`. Returns None if Python must begin it. */
static PyObject *
begin_run(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    int64_t called_ns;
    if (count != 3 || !is_of(args[0], MODEL_STEPS) || (PyObject *)Py_TYPE(args[1]) != lent.call_type ||
        !number_in(args[2], &called_ns) || PyDict_GET_SIZE(lent.captures) != 0)
        Py_RETURN_NONE;
    HotPath *path = (HotPath *)PLAIN_SLOT(args[0], MODEL_STEPS, OF_PATH);
    if (path == NULL || !Py_IS_TYPE(path, HotPathType) || (PyObject *)path != PLAIN_SLOT(args[0], MODEL_STEPS, OF_TIMES))
        Py_RETURN_NONE;
    Py_INCREF(path);
    Position *position = (Position *)Py_XNewRef(this_position(path));
    PyObject *unit = position != NULL && is_of(position->unit, UNIT) ? Py_NewRef(position->unit) : NULL, *begun = NULL;
    int is_begun = IN_PYTHON;
    if (unit != NULL) {
        path_of_units = path;
        PyObject *callback = dynamo_off();
        is_begun = begin_step(args[1], args[0], path, position, unit, NULL, NULL, called_ns, &begun);
        dynamo_on(callback);
    }
    else if (position == NULL)
        is_begun = forget_exception();
    Py_XDECREF(unit);
    Py_XDECREF(position);
    Py_DECREF(path);
    if (is_begun >= 0 && begun == NULL)
        Py_RETURN_NONE;
    return begun;
}

/* End the step of a runner's run: `end_run(open_step, returned_ns)`. Returns False if Python must end it. */
static PyObject *
end_run(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    int64_t returned_ns;
    if (count != 2 || !is_of(args[0], OPEN_STEP) || !number_in(args[1], &returned_ns))
        Py_RETURN_FALSE;
    PyObject *unit = PLAIN_SLOT(args[0], OPEN_STEP, OPEN_UNIT);
    int ended = 0;
    if (is_of(unit, UNIT)) {
        Py_INCREF(unit);
        ended = end_waiting(args[0], unit, returned_ns);
        Py_DECREF(unit);
    }
    return ended < 0 ? NULL : PyBool_FromLong(ended);
}

/* Call the function of the host in the closure of a wrapper of generation.py. */
static inline PyObject *
call_original(PyObject *wrapper, PyObject *const *args, size_t count, PyObject *kwnames)
{
    PyObject *original = Py_NewRef(PyCell_GET(PyTuple_GET_ITEM(PyFunction_GET_CLOSURE(wrapper), 0)));
    DEEPER(1);
    PyObject *result = PyObject_Vectorcall(original, args, count, kwnames);
    DEEPER(-1);
    Py_DECREF(original);
    return result;
}

/* Do the same as `prepare_inputs` of generation.py. */
static PyObject *
prepare_inputs(PyObject *wrapper, PyObject *const *args, size_t count, PyObject *kwnames)
{
    int64_t called_ns = monotonic_ns();
    PyObject *unit = NULL;
    if (unit_here(&unit) < 0)
        return NULL;
    PyObject *generation = unit == NULL || waiting_in(unit) != NULL ? NULL : Py_XNewRef(generation_in(unit));
    Py_XDECREF(unit);
    if (!is_of(generation, GENERATION)) {
        Py_XDECREF(generation);
        return call_in_frame(wrapper, args, count, kwnames);
    }
    int64_t begun_ns = monotonic_ns();
    PyObject *result = call_original(wrapper, args, count, kwnames);
    if (result != NULL) {
        int64_t returned_ns = monotonic_ns();
        PyObject *prepared = Py_BuildValue("LL", (long long)called_ns, (long long)(returned_ns - called_ns));
        if (prepared != NULL)
            give(generation, GENERATION, GENERATION_PREPARED, prepared);
        else
            PyErr_Clear();
        add_ns(generation, GENERATION, GENERATION_OWN_NS, begun_ns - called_ns + monotonic_ns() - returned_ns);
    }
    Py_DECREF(generation);
    return result;
}

/* Do the same as `process_scores` of generation.py. */
static PyObject *
process_scores(PyObject *wrapper, PyObject *const *args, size_t count, PyObject *kwnames)
{
    int64_t called_ns = monotonic_ns();
    PyObject *unit = NULL;
    if (unit_here(&unit) < 0)
        return NULL;
    PyObject *waiting = unit == NULL ? NULL : Py_XNewRef(waiting_in(unit));
    PyObject *step = waiting == NULL ? NULL : PLAIN_SLOT(waiting, OPEN_STEP, OPEN_STEP_OF);
    int is_usual = unit != NULL && (waiting == NULL || (is_of(step, STEP) && PLAIN_SLOT(waiting, OPEN_STEP,
                                                                                       OPEN_IS_RECORDED) == Py_False));
    Py_XDECREF(unit);
    if (!is_usual) {
        Py_XDECREF(waiting);
        return call_in_frame(wrapper, args, count, kwnames);
    }
    if (waiting != NULL) {
        fill(waiting, OPEN_STEP, OPEN_IS_RUNNING, Py_True);
        add_ns(step, STEP, STEP_OWN_NS, monotonic_ns() - called_ns);
    }
    PyObject *result = call_original(wrapper, args, count, kwnames);
    if (waiting != NULL)
        fill(waiting, OPEN_STEP, OPEN_IS_RUNNING, Py_False);
    Py_XDECREF(waiting);
    return result;
}

/* Store the length of the sequences, which is the last dimension of `words`, in `length`. Returns 0 if Python must
   find it, and -1 with an exception set. */
static int
length_of(PyObject *words, PyObject **length)
{
    if ((PyObject *)Py_TYPE(words) != tensor_type)
        return 0;
    PyObject *overridden = ask_whether_overridden(words);
    Py_XDECREF(overridden);
    PyObject *shape = overridden == Py_False ? PyObject_GetAttr(words, shape_of_tensor) : NULL;
    Py_ssize_t dimensions = shape != NULL && PyTuple_Check(shape) ? PyTuple_GET_SIZE(shape) : 0;
    if (dimensions > 0 && PyLong_CheckExact(PyTuple_GET_ITEM(shape, dimensions - 1)))
        *length = Py_NewRef(PyTuple_GET_ITEM(shape, dimensions - 1));
    Py_XDECREF(shape);
    return *length != NULL ? 1 : forget_exception();
}

/* End the step that waits in `unit`, because its token is chosen. Returns 0 if Python must do it, and -1 with an
   exception set. */
static int
end_sampling(PyObject *unit, PyObject *waiting, PyObject *words, int64_t returned_ns)
{
    PyObject *generation = generation_in(unit), *call = PLAIN_SLOT(waiting, OPEN_STEP, OPEN_CALL), *length = NULL;
    if (!is_of(generation, GENERATION) || (PyObject *)Py_TYPE(call) != lent.call_type ||
        PyTuple_GET_ITEM(call, 0) == lent.verify)
        return 0;
    Py_INCREF(waiting);
    Py_INCREF(generation);
    int done = length_of(words, &length);
    if (done > 0) {
        give(generation, GENERATION, GENERATION_LENGTH, length);
        done = end_waiting(waiting, unit, returned_ns);
    }
    Py_DECREF(generation);
    Py_DECREF(waiting);
    return done;
}

/* Do the same as `is_done` of generation.py. */
static PyObject *
is_done(PyObject *wrapper, PyObject *const *args, size_t count, PyObject *kwnames)
{
    if (lent.end_sampling == NULL)
        return call_in_frame(wrapper, args, count, kwnames);
    PyObject *result = call_original(wrapper, args, count, kwnames), *unit = NULL;
    int64_t returned_ns = monotonic_ns();
    int ended = result == NULL ? -1 : unit_here(&unit);
    PyObject *waiting = unit == NULL ? NULL : waiting_in(unit);
    if (waiting != NULL)
        ended = PyVectorcall_NARGS(count) > 1 ? end_sampling(unit, waiting, args[1], returned_ns) : 0;
    if (ended == 0) {
        PyObject *callback = dynamo_off(), *given = PyTuple_New(PyVectorcall_NARGS(count)), *done = NULL;
        for (Py_ssize_t i = 0; given != NULL && i < PyVectorcall_NARGS(count); i++)
            PyTuple_SET_ITEM(given, i, Py_NewRef(args[i]));
        if (given != NULL)
            done = PyObject_CallFunction(lent.end_sampling, "OL", given, (long long)returned_ns);
        if (done == NULL)
            ended = tell_of_exception(lent.sampling_failed);
        dynamo_on(callback);
        Py_XDECREF(done);
        Py_XDECREF(given);
    }
    Py_XDECREF(unit);
    if (ended < 0)
        Py_CLEAR(result);
    return result;
}

/* Make calls of a wrapper of generation.py run C code. Returns the wrapper. Python 3.11 still runs the wrapper's
   frame if Python code calls it without `**`. */
static PyObject *
compile_generation(PyObject *Py_UNUSED(module), PyObject *wrapper)
{
    static const struct {
        const char *name;
        vectorcallfunc call;
    } known[] = {{"prepare_inputs", prepare_inputs}, {"process_scores", process_scores}, {"is_done", is_done}};
    PyObject *cells = PyFunction_Check(wrapper) ? PyFunction_GET_CLOSURE(wrapper) : NULL;
    for (size_t i = 0; cells != NULL && PyTuple_GET_SIZE(cells) == 1 && i < sizeof known / sizeof known[0]; i++)
        if (PyUnicode_CompareWithASCIIString(((PyFunctionObject *)wrapper)->func_name, known[i].name) == 0) {
            replace_call(wrapper, known[i].call);
            return Py_NewRef(wrapper);
        }
    PyErr_SetString(PyExc_TypeError, "a wrapper of generation.py is wanted");
    return NULL;
}

static PyObject *
compile_model_calls(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *types, *given;
    if (!PyArg_ParseTuple(args, "O!O!", &PyTuple_Type, &types, &PyDict_Type, &given))
        return NULL;
    if (PyTuple_GET_SIZE(types) != PLAIN_TYPES || tensor_type == NULL) {
        PyErr_SetString(PyExc_TypeError, "other types are wanted, and calls of modules to be compiled");
        return NULL;
    }
    static const struct {
        const char *name;
        PyObject **there;
    } wanted[] = {
        {"set_callback", &lent.set_callback},
        {"captures", &lent.captures},         {"roles", &lent.roles},           {"prefill", &lent.prefill},
        {"decode", &lent.decode},             {"extend", &lent.extend},
        {"call", &lent.call_type},            {"mark", &lent.mark_type},        {"sort", &lent.sort},
        {"step", &lent.step_kind},            {"is_compiling", &lent.is_compiling},
        {"compiling_flags", &lent.compiling_flags},
        {"is_tracing", &lent.is_tracing},     {"dispatch_stack", &lent.dispatch_stack},
        {"is_sampled", &lent.is_sampled},     {"warm_up", &lent.warm_up},
        {"every", &lent.every},               {"look_every", &lent.look_every},
        {"reraise_host_error", &lent.reraise_host_error}, {"types_of_ids", &lent.types_of_ids},
        {"verify", &lent.verify},             {"end_sampling", &lent.end_sampling},
        {"sampling_failed", &lent.sampling_failed},
    };
    for (size_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++) {
        PyObject *found = PyDict_GetItemString(given, wanted[i].name);
        if (found == NULL) {
            PyErr_Format(PyExc_TypeError, "%s is wanted", wanted[i].name);
            return NULL;
        }
        Py_XSETREF(*wanted[i].there, Py_NewRef(found));
    }
    static const struct {
        const char *name;
        PyObject **there;
    } interned[] = {
        {"asked", &asked_name},
        {"asked_word", &asked_word_name},
        {"looked_at", &looked_at_name},
        {"enabled", &enabled_name},
        {"close", &close_name},
        {"begin", &begin_name},
        {"append", &append_name},
        {"ended", &ended_name},
        {"_is_compiling_flag", &compiling_flag_name},
        {"get_seq_length", &length_name},
        {"layers", &layers_name},
        {"self_attention_cache", &own_cache_name},
        {"is_initialized", &initialized_name},
        {"keys", &keys_name},
        {"sample_every", &sample_every_name},
        {"take_lane", &take_lane_name},
        {"follow", &follow_name},
        {"failed", &failed_name},
    };
    for (size_t i = 0; i < sizeof interned / sizeof interned[0]; i++)
        if (*interned[i].there == NULL && (*interned[i].there = PyUnicode_InternFromString(interned[i].name)) == NULL)
            return NULL;
    if ((lent.compiling_flags != Py_None && !PyDict_CheckExact(lent.compiling_flags)) ||
        !PyDict_CheckExact(lent.captures) || !PyDict_CheckExact(lent.roles) || !PyType_Check(lent.call_type) ||
        !PyType_Check(lent.mark_type) || !PyType_IsSubtype((PyTypeObject *)lent.call_type, &PyTuple_Type) ||
        !PyType_IsSubtype((PyTypeObject *)lent.mark_type, &PyTuple_Type)) {
        PyErr_SetString(PyExc_TypeError, "dictionaries and types of tuples are wanted");
        return NULL;
    }
    PyObject *ratio = PyDict_GetItemString(given, "golden");
    golden = ratio == NULL ? 0 : PyLong_AsUnsignedLongLong(ratio);
    if (golden == 0 || golden == UINT64_MAX) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "golden is wanted");
        return NULL;
    }
    for (int i = 0; i < PLAIN_TYPES; i++) {
        PyTypeObject *type = (PyTypeObject *)PyTuple_GET_ITEM(types, i);
        if (!PyType_Check(type) || find_slots(type, plain[i].names, plain[i].offsets, MOST_PLAIN_SLOTS) < 0) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_TypeError, "types are wanted");
            return NULL;
        }
        Py_XSETREF(plain[i].type, (PyTypeObject *)Py_NewRef(type));
    }
    PyTypeObject *calls = plain[MODEL_CALL].type;
    PyObject *in_python = PyObject_GetAttrString((PyObject *)calls, "__call__");
    if (in_python == NULL)
        return NULL;
    Py_XSETREF(model_call_in_python, in_python);
    calls->tp_call = model_call;
    Py_RETURN_NONE;
}
