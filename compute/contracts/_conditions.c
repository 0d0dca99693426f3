/* Evaluate the conditions of a contract together. Numbers and shapes are evaluated one by one, and arrays in
   blocks.

   Rules
   - If this file finds that a condition holds, that is the result. `Expression.evaluate` decides every other case: a
     condition that does not hold, an unknown type, shape or number, and a division by zero.
   - Nodes come after their operands. Nodes that read arrays keep their results for other nodes in the same call.
   - Each node reads an array once, in loops that compilers vectorise for each kind of processor. The result is the same
     on all of them: no sum of floats is reordered (this file defines the order in `lengths`), and no operations are
     contracted.
   - Numbers are float32 next to float32 arrays, as in NumPy. Next to other arrays, everything is float64. uint16 holds
     the bits of float16, as everywhere in compute.
   - The GIL is held throughout, and no Python code runs unless a condition does not hold here.
*/

#define PY_SSIZE_T_CLEAN
#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#include <Python.h>
#include <math.h>
#include <numpy/arrayobject.h>
#include <stdint.h>
#include <structmember.h>

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
/* x86-64-v4 includes AVX-512 */
#define EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#elif defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define EACH_PROCESSOR __attribute__((target_clones("avx2", "default")))
#else
#define EACH_PROCESSOR
#endif

enum { BLOCK = 1024, MAX_DIMENSIONS = 4, MAX_OPERANDS = 5, MAX_DEPTH = 24, MAX_CONDITIONS = 62, MAX_NODES = 1 << 14 };
#define EXACT (INT64_C(1) << 53) /* whole numbers below this are exact in float64 */
#define UNSURE (-1)
#define ALIGNED __attribute__((aligned(64))) /* a vector is never in two cache lines */
#define OR_UNSURE(call)                                                                                               \
    do {                                                                                                              \
        if ((call) < 0)                                                                                               \
            return UNSURE;                                                                                            \
    } while (0)

typedef enum {
    CONSTANT, ARGUMENT, ADD, SUBTRACT, MULTIPLY, DIVIDE, FLOOR, REMAINDER, NEGATE, NOT, AND, OR, LESS, LESS_EQUAL,
    GREATER, GREATER_EQUAL, EQUAL, UNEQUAL, MAGNITUDE, ROOT, MOST, LEAST, SIZE, EXTENT, SLICE, INDEX, FINITE, LARGEST,
    MAXIMUM, MINIMUM, ALL, COUNT, LENGTHS, AT, OPERATIONS
} Operation;
static const char *const NAMES[OPERATIONS] = {
    "constant", "argument", "add", "subtract", "multiply", "divide", "floor", "remainder", "negate", "not", "and", "or",
    "less", "less_equal", "greater", "greater_equal", "equal", "unequal", "magnitude", "root", "most", "least", "size",
    "extent", "slice", "index", "finite", "largest", "maximum", "minimum", "all", "count", "lengths", "at",
};
/* The number of operands of each operation that are nodes. An operand that follows the nodes is a dimension. The
   only operand of an argument is its place. In a `slice`, a node of -1 means that this bound is left out. */
static const int NODES[OPERATIONS] = {
    0, 0, 2, 2, 2, 2, 2, 2, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 1, 1, 2, 2, 1, 1, 4, 2, 1, 1, 1, 1, 1, 1, 1, 2,
};
static int operands(Operation operation) {
    int is_more = operation == ARGUMENT || operation == EXTENT || operation == SLICE || operation == INDEX;
    return NODES[operation] + is_more;
}

typedef enum { OTHER, FLOATS, DOUBLES, HALVES, INTS, LONGS } Type;
static const int TYPE_BYTES[] = {1, 4, 8, 2, 4, 8};

typedef struct {
    const char *data;
    Type type;
    int dimensions;
    /* strides in bytes; `Runs` needs the additional element */
    npy_intp extent[MAX_DIMENSIONS + 1], stride[MAX_DIMENSIONS + 1];
} View;

typedef struct {
    int is_whole;
    union {
        int64_t whole;
        double real;
    };
} Number;

/* Nodes are small, because a brick that has run leaves none of them in the cache. */
typedef struct {
    uint8_t operation, has_elements; /* has_elements: 0 if the node is always a number */
    int16_t operand[MAX_OPERANDS];
    int16_t kept; /* the index of the node's `Kept`; constants have one, too */
} Node;

/* The result of a node that reads arrays. It is kept for other nodes of the same call. */
typedef struct {
    uint64_t call;
    int status;
    Number number;
    double *block; /* `count` lengths; the first belongs to row `first` */
    npy_intp first;
    int count;
} Kept;

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    Py_ssize_t nodes, conditions;
    Node *node;
    Kept *kept;
    int16_t *condition; /* the node of each condition; -1 if Python always decides it */
    PyObject *meaning;
    PyObject *const *value; /* the arguments of the running call */
    Py_ssize_t values;
    uint64_t call;
} Conditions;

/* Loops over elements. */

EACH_PROCESSOR static int are_finite(const char *data, npy_intp count, Type type) {
    /* NaN and infinities have all exponent bits set. So adding one to the exponent sets the sign bit. */
    if (type == FLOATS) {
        const uint32_t *bits = (const uint32_t *)data;
        uint32_t found = 0;
        for (npy_intp i = 0; i < count; i++)
            found |= (bits[i] & UINT32_C(0x7fffffff)) + UINT32_C(0x00800000);
        return !(found >> 31);
    }
    if (type == HALVES) {
        const uint16_t *bits = (const uint16_t *)data;
        uint16_t found = 0;
        for (npy_intp i = 0; i < count; i++)
            found |= (uint16_t)((bits[i] & 0x7fff) + 0x0400);
        return !(found >> 15);
    }
    const uint64_t *bits = (const uint64_t *)data;
    uint64_t found = 0;
    for (npy_intp i = 0; i < count; i++)
        found |= (bits[i] & UINT64_C(0x7fffffffffffffff)) + UINT64_C(0x0010000000000000);
    return !(found >> 63);
}

EACH_PROCESSOR static int32_t largest_bits(const char *data, npy_intp count, Type type) {
    /* Magnitudes are compared as whole numbers with the same bits, because these have the same order. NaN is the
       largest. */
    if (type == FLOATS) {
        const int32_t *bits = (const int32_t *)data;
        int32_t found = 0;
        for (npy_intp i = 0; i < count; i++) {
            int32_t one = bits[i] & 0x7fffffff;
            found = one > found ? one : found;
        }
        return found;
    }
    const int16_t *bits = (const int16_t *)data;
    int16_t found = 0;
    for (npy_intp i = 0; i < count; i++) {
        int16_t one = bits[i] & 0x7fff;
        found = one > found ? one : found;
    }
    return found;
}

enum { SUMS = 16 };

EACH_PROCESSOR static double length_of(const float *x, npy_intp count) {
    double sums[SUMS], sum = 0;
    npy_intp i = 0;
    for (int j = 0; j < SUMS; j++)
        sums[j] = 0;
    for (; i + SUMS <= count; i += SUMS)
        for (int j = 0; j < SUMS; j++)
            sums[j] += (double)x[i + j] * x[i + j];
    for (; i < count; i++)
        sum += (double)x[i] * x[i];
    for (int j = 0; j < SUMS; j++)
        sum += sums[j];
    return sqrt(sum);
}

/* The kinds of operands of an operation: contiguous elements, one element that is used for all, or a number.
   Operands are read through a bit mask, which can clear the sign. */
typedef enum { ELEMENTS, ONE, LONE_NUMBER } Kind;
typedef uint32_t __attribute__((may_alias)) float_bits;
typedef uint64_t __attribute__((may_alias)) double_bits;

/* `apply_T` applies an operation to each element. `out` may be one of the operands. `count_T` returns the number
   of elements for which a comparison holds. `block_T` returns `count` elements of a node, starting at (row,
   column). They are in `out` or in the node's array. */
#define LEFT(T, i) value_of_##T(left[i] & a->mask)
#define RIGHT(T, i) value_of_##T(right[i] & b->mask)
#define APPLIED(T, SYMBOL)                                                                                            \
    if (a->kind)                                                                                                      \
        for (int i = 0; i < count; i++)                                                                               \
            out[i] = first SYMBOL RIGHT(T, i);                                                                        \
    else if (b->kind)                                                                                                 \
        for (int i = 0; i < count; i++)                                                                               \
            out[i] = LEFT(T, i) SYMBOL second;                                                                        \
    else                                                                                                              \
        for (int i = 0; i < count; i++)                                                                               \
            out[i] = LEFT(T, i) SYMBOL RIGHT(T, i);                                                                   \
    break;
#define COUNTED(T, SYMBOL)                                                                                            \
    if (a->kind)                                                                                                      \
        for (int i = 0; i < count; i++)                                                                               \
            found += first SYMBOL RIGHT(T, i);                                                                        \
    else if (b->kind)                                                                                                 \
        for (int i = 0; i < count; i++)                                                                               \
            found += LEFT(T, i) SYMBOL second;                                                                        \
    else                                                                                                              \
        for (int i = 0; i < count; i++)                                                                               \
            found += LEFT(T, i) SYMBOL RIGHT(T, i);                                                                   \
    break;
#define OF_TYPE(T, WHOLE, TYPE)                                                                                       \
    typedef struct {                                                                                                  \
        const T *at;                                                                                                  \
        Kind kind;                                                                                                    \
        T##_bits mask;                                                                                                \
    } T##_side;                                                                                                       \
                                                                                                                      \
    static inline T value_of_##T(T##_bits bits) {                                                                     \
        T value;                                                                                                      \
        memcpy(&value, &bits, sizeof value);                                                                          \
        return value;                                                                                                 \
    }                                                                                                                 \
                                                                                                                      \
    EACH_PROCESSOR static void apply_##T(                                                                             \
        Operation operation, T *out, const T##_side *a, const T##_side *b, int count                                  \
    ) {                                                                                                               \
        const T##_bits *left = (const T##_bits *)a->at, *right = (const T##_bits *)b->at;                             \
        T first = LEFT(T, 0), second = RIGHT(T, 0);                                                                   \
        switch (operation) {                                                                                          \
        case ADD: APPLIED(T, +)                                                                                       \
        case SUBTRACT: APPLIED(T, -)                                                                                  \
        case MULTIPLY: APPLIED(T, *)                                                                                  \
        case DIVIDE: APPLIED(T, /)                                                                                    \
        default:                                                                                                      \
            for (int i = 0; i < count; i++)                                                                           \
                out[i] = -LEFT(T, i);                                                                                 \
        }                                                                                                             \
    }                                                                                                                 \
                                                                                                                      \
    EACH_PROCESSOR static npy_intp count_##T(                                                                         \
        Operation operation, const T##_side *a, const T##_side *b, int count                                          \
    ) {                                                                                                               \
        const T##_bits *left = (const T##_bits *)a->at, *right = (const T##_bits *)b->at;                             \
        T first = LEFT(T, 0), second = RIGHT(T, 0);                                                                   \
        WHOLE found = 0;                                                                                              \
        switch (operation) {                                                                                          \
        case LESS: COUNTED(T, <)                                                                                      \
        case LESS_EQUAL: COUNTED(T, <=)                                                                               \
        case GREATER: COUNTED(T, >)                                                                                   \
        case GREATER_EQUAL: COUNTED(T, >=)                                                                            \
        case EQUAL: COUNTED(T, ==)                                                                                    \
        default: COUNTED(T, !=)                                                                                       \
        }                                                                                                             \
        return found;                                                                                                 \
    }                                                                                                                 \
                                                                                                                      \
    static int block_##T(                                                                                             \
        Conditions *self, int at, npy_intp row, npy_intp column, int count, T *out, T##_side *found                   \
    ) {                                                                                                               \
        Node *node = self->node + at;                                                                                 \
        T##_side left, right;                                                                                         \
        T other[BLOCK] ALIGNED;                                                                                       \
        *found = (T##_side){out, ELEMENTS, ~(T##_bits)0};                                                             \
        switch (node->has_elements ? (Operation)node->operation : CONSTANT) {                                         \
        case ADD:                                                                                                     \
        case SUBTRACT:                                                                                                \
        case MULTIPLY:                                                                                                \
        case DIVIDE:                                                                                                  \
            OR_UNSURE(block_##T(self, node->operand[0], row, column, count, out, &left));                             \
            OR_UNSURE(block_##T(self, node->operand[1], row, column, count, other, &right));                          \
            if (left.kind == LONE_NUMBER && right.kind == LONE_NUMBER)                                                \
                break;                                                                                                \
            found->kind = left.kind && right.kind ? ONE : ELEMENTS;                                                   \
            apply_##T(node->operation, out, &left, &right, found->kind ? 1 : count);                                  \
            return 0;                                                                                                 \
        case NEGATE:                                                                                                  \
            OR_UNSURE(block_##T(self, node->operand[0], row, column, count, out, &left));                             \
            if (left.kind == LONE_NUMBER)                                                                             \
                break;                                                                                                \
            found->kind = left.kind;                                                                                  \
            apply_##T(NEGATE, out, &left, &left, left.kind ? 1 : count);                                              \
            return 0;                                                                                                 \
        case MAGNITUDE:                                                                                               \
            OR_UNSURE(block_##T(self, node->operand[0], row, column, count, out, found));                             \
            if (found->kind == LONE_NUMBER)                                                                           \
                break;                                                                                                \
            found->mask = ~(T##_bits)0 >> 1;                                                                          \
            return 0;                                                                                                 \
        case LENGTHS: {                                                                                               \
            const double *lengths;                                                                                    \
            OR_UNSURE(lengths_of(self, node, column, count, &lengths));                                               \
            for (int i = 0; i < count; i++)                                                                           \
                out[i] = (T)lengths[i];                                                                               \
            return 0;                                                                                                 \
        }                                                                                                             \
        case ARGUMENT:                                                                                                \
        case SLICE:                                                                                                   \
        case INDEX:                                                                                                   \
        case AT: {                                                                                                    \
            View view;                                                                                                \
            if (node->operation == ARGUMENT && !array_of(self, at))                                                   \
                break;                                                                                                \
            OR_UNSURE(node->operation == AT ? element_at(self, node, row, &view) : view_of(self, at, &view));         \
            if (!view.dimensions)                                                                                     \
                break;                                                                                                \
            int last = view.dimensions - 1;                                                                           \
            found->kind = view.extent[last] == 1 ? ONE : ELEMENTS;                                                    \
            const char *from = view.data + (found->kind ? 0 : column * view.stride[last]);                            \
            if (last == 1 && view.extent[0] > 1)                                                                      \
                from += row * view.stride[0];                                                                         \
            if (view.type == TYPE && (found->kind || view.stride[last] == (npy_intp)sizeof(T))) {                     \
                found->at = (const T *)from;                                                                          \
                return 0;                                                                                             \
            }                                                                                                         \
            for (int i = 0; i < (found->kind ? 1 : count); i++) {                                                     \
                double one = element(from + i * view.stride[last], view.type);                                        \
                OR_UNSURE(as_it_is(one, view.type));                                                                  \
                out[i] = (T)one;                                                                                      \
            }                                                                                                         \
            return 0;                                                                                                 \
        }                                                                                                             \
        default:                                                                                                      \
            break;                                                                                                    \
        }                                                                                                             \
        Number number;                                                                                                \
        OR_UNSURE(number_of(self, at, &number));                                                                      \
        out[0] = (T)as_real(&number);                                                                                 \
        *found = (T##_side){out, LONE_NUMBER, ~(T##_bits)0};                                                          \
        return 0;                                                                                                     \
    }

static double element(const char *at, Type type) {
    switch (type) {
    case FLOATS:
        return *(const float *)at;
    case DOUBLES:
        return *(const double *)at;
    case INTS:
        return *(const int32_t *)at;
    default:
        return (double)*(const int64_t *)at;
    }
}

/* Returns UNSURE if `value` may stand for several whole numbers, because float64 does not represent all of them. */
static int as_it_is(double value, Type type) { return type == LONGS && fabs(value) >= (double)EXACT ? UNSURE : 0; }

static double half(uint16_t magnitude) {
    if (magnitude > 0x7c00)
        return NAN;
    if (magnitude == 0x7c00)
        return INFINITY;
    int exponent = magnitude >> 10, mantissa = magnitude & 0x03ff;
    return exponent ? ldexp(mantissa | 0x0400, exponent - 25) : ldexp(mantissa, -24);
}

static Number whole(int64_t number) { return (Number){.is_whole = 1, .whole = number}; }

static Number real(double number) { return (Number){.is_whole = 0, .real = number}; }

static double as_real(const Number *number) { return number->is_whole ? (double)number->whole : number->real; }

/* Parts of arrays. */

static int number_of(Conditions *self, int at, Number *out);

static int index_of(Conditions *self, int at, npy_intp otherwise, npy_intp *out) {
    Number number;
    if (at < 0) {
        *out = otherwise;
        return 0;
    }
    OR_UNSURE(number_of(self, at, &number));
    *out = number.whole;
    return number.is_whole ? 0 : UNSURE;
}

static PyArrayObject *array_of(Conditions *self, int at) {
    const Node *node = self->node + at;
    int place = node->operand[0];
    if (node->operation != ARGUMENT || place >= self->values || !PyArray_Check(self->value[place]))
        return NULL;
    return (PyArrayObject *)self->value[place];
}

static Type type_of(PyArrayObject *array) {
    if (!PyArray_ISALIGNED(array) || PyArray_ISBYTESWAPPED(array))
        return OTHER;
    switch (PyArray_TYPE(array)) {
    case NPY_FLOAT:
        return FLOATS;
    case NPY_DOUBLE:
        return DOUBLES;
    case NPY_USHORT:
    case NPY_HALF:
        return HALVES;
    case NPY_INT:
        return INTS;
    case NPY_LONG:
    case NPY_LONGLONG:
        return PyArray_ITEMSIZE(array) == 8 ? LONGS : INTS;
    default:
        return OTHER;
    }
}

static int view_of(Conditions *self, int at, View *out) {
    Node *node = self->node + at;
    PyArrayObject *array = array_of(self, at);
    if (array) {
        out->dimensions = PyArray_NDIM(array);
        if (out->dimensions < 1 || out->dimensions > MAX_DIMENSIONS)
            return UNSURE;
        out->data = PyArray_BYTES(array);
        out->type = type_of(array);
        for (int one = 0; one < out->dimensions; one++) {
            out->extent[one] = PyArray_DIM(array, one);
            out->stride[one] = PyArray_STRIDE(array, one);
        }
        return 0;
    }
    if (node->operation != SLICE && node->operation != INDEX)
        return UNSURE;
    OR_UNSURE(view_of(self, node->operand[0], out));
    int dimension = node->operand[NODES[node->operation]];
    if (dimension >= out->dimensions)
        return UNSURE;
    npy_intp extent = out->extent[dimension], stride = out->stride[dimension], first, end, step;
    if (node->operation == INDEX) {
        OR_UNSURE(index_of(self, node->operand[1], 0, &first));
        if (first < 0 || first >= extent)
            return UNSURE;
        out->dimensions--;
        for (int one = dimension; one < out->dimensions; one++) {
            out->extent[one] = out->extent[one + 1];
            out->stride[one] = out->stride[one + 1];
        }
    } else {
        OR_UNSURE(index_of(self, node->operand[1], 0, &first));
        OR_UNSURE(index_of(self, node->operand[2], extent, &end));
        OR_UNSURE(index_of(self, node->operand[3], 1, &step));
        if (step < 1)
            return UNSURE;
        out->extent[dimension] = PySlice_AdjustIndices(extent, &first, &end, step);
        out->stride[dimension] = stride * step;
    }
    out->data += first * stride;
    return 0;
}

/* Makes a column. Its only element in each row is values[row, places[row]]. */
static int element_at(Conditions *self, Node *node, npy_intp row, View *out) {
    View places;
    OR_UNSURE(view_of(self, node->operand[0], out));
    OR_UNSURE(view_of(self, node->operand[1], &places));
    if (out->dimensions != 2 || places.dimensions != 1 || out->extent[0] != places.extent[0] || row >= out->extent[0] ||
        (places.type != INTS && places.type != LONGS))
        return UNSURE;
    double place = element(places.data + row * places.stride[0], places.type);
    if (!(place >= 0 && place < out->extent[1]))
        return UNSURE;
    out->data += row * out->stride[0] + (npy_intp)place * out->stride[1];
    out->extent[0] = out->extent[1] = 1;
    return 0;
}

static int lengths_of(Conditions *self, Node *node, npy_intp first, int count, const double **out) {
    View view;
    Kept *kept = self->kept + node->kept;
    *out = kept->block;
    if (kept->call == self->call && kept->first == first && kept->count == count)
        return 0;
    OR_UNSURE(view_of(self, node->operand[0], &view));
    for (int i = 0; i < count; i++)
        kept->block[i] = length_of((const float *)(view.data + (first + i) * view.stride[0]), view.extent[1]);
    kept->call = self->call;
    kept->first = first;
    kept->count = count;
    return 0;
}

/* Iterates over a view in runs of contiguous elements. */
typedef struct {
    View view; /* the view, with dimensions merged as far as possible */
    npy_intp index[MAX_DIMENSIONS + 1];
    int is_over;
} Runs;

static void begin(Runs *runs, const View *view) {
    View *merged = &runs->view;
    merged->data = view->data;
    merged->type = view->type;
    merged->dimensions = 0;
    runs->is_over = 0;
    for (int at = 0; at < view->dimensions; at++) {
        npy_intp extent = view->extent[at], stride = view->stride[at];
        int last = merged->dimensions - 1;
        runs->is_over |= extent == 0;
        if (extent == 1)
            continue;
        if (last >= 0 && merged->stride[last] == extent * stride) {
            merged->extent[last] *= extent;
            merged->stride[last] = stride;
        } else {
            runs->index[last + 1] = 0;
            merged->extent[last + 1] = extent;
            merged->stride[last + 1] = stride;
            merged->dimensions++;
        }
    }
    int last = merged->dimensions - 1;
    /* elements are not contiguous, so each of them is a run */
    if (last < 0 || merged->stride[last] != TYPE_BYTES[view->type]) {
        runs->index[last + 1] = 0;
        merged->extent[last + 1] = 1;
        merged->stride[last + 1] = TYPE_BYTES[view->type];
        merged->dimensions++;
    }
}

static int next(Runs *runs, const char **data, npy_intp *count) {
    View *view = &runs->view;
    int last = view->dimensions - 1;
    if (runs->is_over)
        return 0;
    *data = view->data;
    *count = view->extent[last];
    for (int at = last - 1; at >= 0; at--) {
        view->data += view->stride[at];
        if (++runs->index[at] < view->extent[at])
            return 1;
        view->data -= runs->index[at] * view->stride[at];
        runs->index[at] = 0;
    }
    runs->is_over = 1;
    return 1;
}

static int all_finite(Conditions *self, int at) {
    View view;
    Runs runs;
    const char *data;
    npy_intp count;
    OR_UNSURE(view_of(self, at, &view));
    if (view.type != FLOATS && view.type != DOUBLES && view.type != HALVES)
        return UNSURE;
    for (begin(&runs, &view); next(&runs, &data, &count);)
        if (!are_finite(data, count, view.type))
            return UNSURE;
    return 0;
}

static int largest(Conditions *self, int at, double *out) {
    View view;
    Runs runs;
    const char *data;
    npy_intp count;
    int32_t found = -1;
    OR_UNSURE(view_of(self, at, &view));
    if (view.type != FLOATS && view.type != HALVES)
        return UNSURE;
    for (begin(&runs, &view); next(&runs, &data, &count);) {
        int32_t bits = largest_bits(data, count, view.type);
        found = bits > found ? bits : found;
    }
    float single;
    memcpy(&single, &found, sizeof single);
    *out = view.type == FLOATS ? single : half((uint16_t)found);
    return found < 0 ? UNSURE : 0; /* an array without elements has no largest element */
}

static int extreme(Conditions *self, int at, double sign, double *out) {
    View view;
    Runs runs;
    const char *data;
    npy_intp count;
    double found = -INFINITY;
    OR_UNSURE(view_of(self, at, &view));
    begin(&runs, &view);
    if (view.type == HALVES || view.type == OTHER || runs.is_over)
        return UNSURE;
    while (next(&runs, &data, &count))
        for (npy_intp i = 0; i < count; i++) {
            double one = sign * element(data + i * TYPE_BYTES[view.type], view.type);
            if (one != one)
                return UNSURE;
            found = one > found ? one : found;
        }
    *out = sign * found;
    return as_it_is(found, view.type);
}

/* Comparisons of elements. */

typedef struct {
    npy_intp rows, columns; /* 1 if no array has more than one */
    int is_double;
    int is_flat; /* whether every array has all rows and columns and is contiguous */
    int arrays;
} Shape;

static int widen(npy_intp *extent, npy_intp other) {
    if (*extent == 1)
        *extent = other;
    return other == 1 || other == *extent ? 0 : UNSURE;
}

static int add_shape(Conditions *self, int at, Shape *shape) {
    Node *node = self->node + at;
    View view;
    if (!node->has_elements || (node->operation == ARGUMENT && !array_of(self, at)))
        return 0; /* a number has no shape */
    switch (node->operation) {
    case ADD:
    case SUBTRACT:
    case MULTIPLY:
    case DIVIDE:
        OR_UNSURE(add_shape(self, node->operand[1], shape));
        /* fall through */
    case NEGATE:
    case MAGNITUDE:
        return add_shape(self, node->operand[0], shape);
    case LENGTHS:
        OR_UNSURE(view_of(self, node->operand[0], &view));
        if (view.dimensions != 2 || view.type != FLOATS || (view.extent[1] > 1 && view.stride[1] != sizeof(float)))
            return UNSURE;
        shape->is_double = 1;
        shape->is_flat = 0;
        shape->arrays++;
        return widen(&shape->columns, view.extent[0]);
    case AT:
        OR_UNSURE(view_of(self, node->operand[0], &view));
        if (view.dimensions != 2)
            return UNSURE;
        view.extent[1] = 1;
        view.stride[0] = 0; /* the view is not flat */
        break;
    default:
        OR_UNSURE(view_of(self, at, &view));
        if (!view.dimensions)
            return 0;
    }
    if (view.dimensions > 2 || view.type == OTHER || view.type == HALVES)
        return UNSURE;
    int last = view.dimensions - 1;
    shape->is_double |= view.type != FLOATS;
    shape->is_flat &= last == 1 && view.extent[1] > 1 && view.stride[1] == TYPE_BYTES[view.type] &&
                      view.stride[0] == view.extent[1] * view.stride[1];
    if (shape->arrays++ && shape->is_flat)
        shape->is_flat = shape->rows == view.extent[0] && shape->columns == view.extent[1];
    OR_UNSURE(widen(&shape->columns, view.extent[last]));
    return last == 1 ? widen(&shape->rows, view.extent[0]) : 0;
}

OF_TYPE(float, int32_t, FLOATS)
OF_TYPE(double, int64_t, DOUBLES)

/* Counts the elements for which a comparison holds (`out`) and all elements (`elements`). */
static int compared(Conditions *self, int at, npy_intp *out, npy_intp *elements) {
    Node *node = self->node + at;
    Shape shape = {1, 1, 0, 1, 0};
    npy_intp found = 0;
    if (node->operation < LESS || node->operation > UNEQUAL)
        return UNSURE;
    OR_UNSURE(add_shape(self, node->operand[0], &shape));
    OR_UNSURE(add_shape(self, node->operand[1], &shape));
    /* without elements, neither side of the comparison would be checked */
    if (!shape.arrays || !shape.rows || !shape.columns)
        return UNSURE;
    *elements = shape.rows * shape.columns;
    if (shape.is_flat) {
        shape.columns = *elements;
        shape.rows = 1;
    }
    for (npy_intp row = 0; row < shape.rows; row++)
        for (npy_intp column = 0; column < shape.columns; column += BLOCK) {
            int count = shape.columns - column < BLOCK ? (int)(shape.columns - column) : BLOCK;
#define IN_TYPE(T)                                                                                                    \
    {                                                                                                                 \
        T space[BLOCK] ALIGNED, other[BLOCK] ALIGNED;                                                                 \
        T##_side left, right;                                                                                         \
        OR_UNSURE(block_##T(self, node->operand[0], row, column, count, space, &left));                               \
        OR_UNSURE(block_##T(self, node->operand[1], row, column, count, other, &right));                              \
        if (left.kind && right.kind)                                                                                  \
            found += count * count_##T(node->operation, &left, &right, 1);                                            \
        else                                                                                                          \
            found += count_##T(node->operation, &left, &right, count);                                                \
    }
            if (shape.is_double)
                IN_TYPE(double)
            else
                IN_TYPE(float)
        }
    *out = found;
    return 0;
}

/* Numbers. */

static int is_true(const Number *number) { return number->is_whole ? number->whole != 0 : number->real != 0; }

static int compare(Operation operation, const Number *a, const Number *b) {
#define BY(SYMBOL) (a->is_whole && b->is_whole ? a->whole SYMBOL b->whole : as_real(a) SYMBOL as_real(b))
    switch (operation) {
    case LESS:
        return BY(<);
    case LESS_EQUAL:
        return BY(<=);
    case GREATER:
        return BY(>);
    case GREATER_EQUAL:
        return BY(>=);
    case EQUAL:
        return BY(==);
    default:
        return BY(!=);
    }
}

static int calculate_whole(Operation operation, int64_t a, int64_t b, int64_t *out) {
    switch (operation) { /* a and b are below EXACT */
    case ADD:
        *out = a + b;
        break;
    case SUBTRACT:
        *out = a - b;
        break;
    case MULTIPLY:
        if (__builtin_mul_overflow(a, b, out))
            return UNSURE;
        break;
    default: /* FLOOR and REMAINDER round down, as in Python */
        if (b == 0)
            return UNSURE;
        int64_t rest = a % b;
        int is_above = rest && (rest < 0) != (b < 0);
        *out = operation == FLOOR ? a / b - is_above : rest + is_above * b;
    }
    return *out >= EXACT || *out <= -EXACT ? UNSURE : 0;
}

static int calculate(Operation operation, const Number *a, const Number *b, Number *out) {
    if (a->is_whole && b->is_whole && operation != DIVIDE) {
        out->is_whole = 1;
        return calculate_whole(operation, a->whole, b->whole, &out->whole);
    }
    double left = as_real(a), right = as_real(b);
    switch (operation) {
    case ADD:
        *out = real(left + right);
        return 0;
    case SUBTRACT:
        *out = real(left - right);
        return 0;
    case MULTIPLY:
        *out = real(left * right);
        return 0;
    case DIVIDE:
        *out = real(left / right);
        return right == 0 ? UNSURE : 0;
    default:
        return UNSURE;
    }
}

/* Reads a number, which is an argument or a constant of a condition. */
static int read_number(PyObject *given, Number *out) {
    if (PyFloat_Check(given)) {
        *out = real(PyFloat_AS_DOUBLE(given));
        return 0;
    }
    if (!PyLong_Check(given))
        return UNSURE;
    int overflow;
    *out = whole(PyLong_AsLongLongAndOverflow(given, &overflow));
    return overflow || out->whole >= EXACT || out->whole <= -EXACT ? UNSURE : 0;
}

static int find(Conditions *self, int at, Number *out) {
    Node *node = self->node + at;
    const int16_t *operand = node->operand;
    Number a, b;
    View view;
    npy_intp found, elements;
    double value, other;
    switch (node->operation) {
    case CONSTANT:
        *out = self->kept[node->kept].number;
        return 0;
    case ARGUMENT:
        return operand[0] < self->values ? read_number(self->value[operand[0]], out) : UNSURE;
    case ADD:
    case SUBTRACT:
    case MULTIPLY:
    case DIVIDE:
    case FLOOR:
    case REMAINDER:
        OR_UNSURE(number_of(self, operand[0], &a));
        OR_UNSURE(number_of(self, operand[1], &b));
        return calculate(node->operation, &a, &b, out);
    case AND:
    case OR:
        OR_UNSURE(number_of(self, operand[0], out));
        return is_true(out) == (node->operation == OR) ? 0 : number_of(self, operand[1], out);
    case LESS:
    case LESS_EQUAL:
    case GREATER:
    case GREATER_EQUAL:
    case EQUAL:
    case UNEQUAL:
        OR_UNSURE(number_of(self, operand[0], &a));
        OR_UNSURE(number_of(self, operand[1], &b));
        *out = whole(compare(node->operation, &a, &b));
        return 0;
    case MOST:
    case LEAST:
        OR_UNSURE(number_of(self, operand[0], &a));
        OR_UNSURE(number_of(self, operand[1], &b));
        value = as_real(&a);
        other = as_real(&b);
        *out = real((value > other) == (node->operation == MOST) ? value : other);
        return value != value || other != other ? UNSURE : 0;
    case NOT:
        OR_UNSURE(number_of(self, operand[0], &a));
        *out = whole(!is_true(&a));
        return 0;
    case NEGATE:
        OR_UNSURE(number_of(self, operand[0], &a));
        *out = a.is_whole ? whole(-a.whole) : real(-a.real);
        return 0;
    case MAGNITUDE:
        OR_UNSURE(number_of(self, operand[0], &a));
        *out = a.is_whole ? whole(a.whole < 0 ? -a.whole : a.whole) : real(fabs(a.real));
        return 0;
    case ROOT:
        OR_UNSURE(number_of(self, operand[0], &a));
        *out = real(sqrt(as_real(&a)));
        return 0;
    case SIZE:
        OR_UNSURE(view_of(self, operand[0], &view));
        for (*out = whole(1); view.dimensions;)
            *out = whole(out->whole * view.extent[--view.dimensions]);
        return 0;
    case EXTENT:
        OR_UNSURE(view_of(self, operand[0], &view));
        *out = whole(operand[1] < view.dimensions ? view.extent[operand[1]] : 0);
        return operand[1] < view.dimensions ? 0 : UNSURE;
    case INDEX:
        OR_UNSURE(view_of(self, at, &view));
        if (view.dimensions || view.type == HALVES || view.type == OTHER)
            return UNSURE;
        *out = real(element(view.data, view.type));
        return as_it_is(out->real, view.type);
    case FINITE:
        OR_UNSURE(all_finite(self, operand[0]));
        *out = whole(1);
        return 0;
    case LARGEST:
        OR_UNSURE(largest(self, operand[0], &value));
        *out = real(value);
        return 0;
    case MAXIMUM:
    case MINIMUM:
        OR_UNSURE(extreme(self, operand[0], node->operation == MAXIMUM ? 1 : -1, &value));
        *out = real(value);
        return 0;
    case ALL:
    case COUNT:
        OR_UNSURE(compared(self, operand[0], &found, &elements));
        *out = whole(node->operation == ALL ? found == elements : found);
        return 0;
    default:
        return UNSURE;
    }
}

static int number_of(Conditions *self, int at, Number *out) {
    Node *node = self->node + at;
    PyArrayObject *array;
    if (node->operation == EXTENT && (array = array_of(self, node->operand[0]))) { /* the most frequent case */
        if (node->operand[1] >= PyArray_NDIM(array))
            return UNSURE;
        *out = whole(PyArray_DIM(array, node->operand[1]));
        return 0;
    }
    if (node->operation < FINITE || node->operation > COUNT)
        return find(self, at, out);
    Kept *kept = self->kept + node->kept;
    if (kept->call != self->call) {
        kept->call = self->call;
        kept->status = find(self, at, &kept->number);
    }
    *out = kept->number;
    return kept->status;
}

/* Calls from Python. */

static PyObject *called(Conditions *self, PyObject *const *arguments, size_t given, PyObject *keywords) {
    if (PyVectorcall_NARGS(given) != 1 || keywords || !PyTuple_Check(arguments[0])) {
        PyErr_SetString(PyExc_TypeError, "conditions take the values of a call, a tuple");
        return NULL;
    }
    PyObject *values = arguments[0];
    int64_t failed = 0;
    Number number;
    self->call++;
    self->value = &PyTuple_GET_ITEM(values, 0);
    self->values = PyTuple_GET_SIZE(values);
    for (Py_ssize_t at = 0; at < self->conditions; at++)
        if (self->condition[at] < 0 || number_of(self, self->condition[at], &number) < 0 || !is_true(&number))
            failed |= INT64_C(1) << at;
    if (!failed)
        return PyLong_FromLong(0);
    for (Py_ssize_t at = 0; at < self->conditions; at++) {
        if (!(failed >> at & 1))
            continue;
        PyObject *holds = PyObject_CallOneArg(PyTuple_GET_ITEM(self->meaning, at), values);
        int is_met = holds ? PyObject_IsTrue(holds) : -1;
        Py_XDECREF(holds);
        if (is_met < 0)
            return NULL;
        failed &= ~((int64_t)is_met << at);
    }
    return PyLong_FromLongLong(failed);
}

static int operation_of(PyObject *name) {
    for (int at = 0; at < OPERATIONS; at++)
        if (PyUnicode_Check(name) && PyUnicode_CompareWithASCIIString(name, NAMES[at]) == 0)
            return at;
    PyErr_Format(PyExc_ValueError, "%R is no operation", name);
    return -1;
}

/* Reads one node, (name, operand, …). Returns the node's height, or -1 with an error set. The height of an
   argument or a constant is 1. */
static int read_node(Conditions *self, PyObject *given, Py_ssize_t at, const int *depths) {
    Node *node = self->node + at;
    if (!PyTuple_Check(given) || PyTuple_GET_SIZE(given) < 2) {
        PyErr_Format(PyExc_ValueError, "%R is no node", given);
        return -1;
    }
    int operation = operation_of(PyTuple_GET_ITEM(given, 0)), depth = 0;
    if (operation < 0)
        return -1;
    node->operation = (uint8_t)operation;
    node->kept = (int16_t)at;
    if (operation == CONSTANT) /* numbers that are too large are left to Python */
        return read_number(PyTuple_GET_ITEM(given, 1), &self->kept[at].number) < 0 ? MAX_DEPTH + 1 : 1;
    int wanted = operands((Operation)operation), is_right = PyTuple_GET_SIZE(given) == 1 + wanted;
    node->has_elements = operation == ARGUMENT || operation == SLICE || operation == INDEX || operation == AT ||
                         operation == LENGTHS;
    for (int one = 0; is_right && one < wanted; one++) {
        long operand = PyLong_AsLong(PyTuple_GET_ITEM(given, 1 + one));
        if (PyErr_Occurred())
            return -1;
        int is_node = one < NODES[operation], is_left_out = operation == SLICE && one && is_node && operand == -1;
        is_right = is_left_out || (operand >= 0 && operand < (is_node ? at : MAX_NODES));
        node->operand[one] = (int16_t)operand;
        if (!is_right || !is_node || is_left_out)
            continue;
        if (operation <= DIVIDE || operation == NEGATE || operation == MAGNITUDE)
            node->has_elements |= self->node[operand].has_elements;
        if (depths[operand] > depth)
            depth = depths[operand];
    }
    if (!is_right) {
        PyErr_Format(PyExc_ValueError, "%R is no node", given);
        return -1;
    }
    if (operation == LENGTHS && !(self->kept[at].block = PyMem_New(double, BLOCK))) {
        PyErr_NoMemory();
        return -1;
    }
    return depth + 1;
}

static int read_program(Conditions *self, PyObject *nodes, PyObject *conditions, int *depths) {
    for (Py_ssize_t at = 0; at < self->nodes; at++)
        if ((depths[at] = read_node(self, PyList_GET_ITEM(nodes, at), at, depths)) < 0)
            return -1;
    for (Py_ssize_t at = 0; at < self->conditions; at++) {
        long root = PyLong_AsLong(PyList_GET_ITEM(conditions, at));
        if (PyErr_Occurred())
            return -1;
        if (root >= self->nodes) {
            PyErr_SetString(PyExc_ValueError, "a condition of no node");
            return -1;
        }
        self->condition[at] = root < 0 || depths[root] > MAX_DEPTH ? -1 : (int16_t)root;
    }
    return 0;
}

static PyObject *made(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    PyObject *nodes, *conditions, *meaning;
    if (keywords && PyDict_GET_SIZE(keywords)) {
        PyErr_SetString(PyExc_TypeError, "nodes, conditions and meaning stand in this order");
        return NULL;
    }
    if (!PyArg_ParseTuple(
            arguments, "O!O!O!", &PyList_Type, &nodes, &PyList_Type, &conditions, &PyTuple_Type, &meaning))
        return NULL;
    Py_ssize_t count = PyList_GET_SIZE(conditions);
    if (PyList_GET_SIZE(nodes) > MAX_NODES || count > MAX_CONDITIONS || PyTuple_GET_SIZE(meaning) != count) {
        PyErr_Format(PyExc_ValueError, "%d conditions at most are wanted, each with its meaning", MAX_CONDITIONS);
        return NULL;
    }
    Conditions *self = (Conditions *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->vectorcall = (vectorcallfunc)called;
    self->nodes = PyList_GET_SIZE(nodes);
    self->conditions = count;
    self->meaning = Py_NewRef(meaning);
    self->node = PyMem_Calloc(self->nodes + 1, sizeof(Node));
    self->kept = PyMem_Calloc(self->nodes + 1, sizeof(Kept));
    self->condition = PyMem_New(int16_t, self->conditions + 1);
    int *depths = PyMem_New(int, self->nodes + 1);
    if (!self->node || !self->kept || !self->condition || !depths)
        PyErr_NoMemory();
    else if (read_program(self, nodes, conditions, depths) == 0) {
        PyMem_Free(depths);
        return (PyObject *)self;
    }
    PyMem_Free(depths);
    Py_DECREF(self);
    return NULL;
}

static int visited(Conditions *self, visitproc visit, void *arg) {
    Py_VISIT(self->meaning);
    return 0;
}

static int cleared(Conditions *self) {
    Py_CLEAR(self->meaning);
    return 0;
}

static void freed(Conditions *self) {
    PyObject_GC_UnTrack(self);
    cleared(self);
    for (Py_ssize_t at = 0; self->kept && at < self->nodes; at++)
        PyMem_Free(self->kept[at].block);
    PyMem_Free(self->node);
    PyMem_Free(self->condition);
    PyMem_Free(self->kept);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyTypeObject ConditionsType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "cbtop.compute.contracts._conditions.Conditions",
    .tp_doc = "Conditions(nodes, conditions, meaning): called with the values of a call, bit n is set of condition n.",
    .tp_basicsize = sizeof(Conditions),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Conditions, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = made,
    .tp_traverse = (traverseproc)visited,
    .tp_clear = (inquiry)cleared,
    .tp_dealloc = (destructor)freed,
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "_conditions", "The conditions of a contract, evaluated together.", -1, NULL,
};

PyMODINIT_FUNC PyInit__conditions(void) {
    import_array();
    PyObject *module = PyModule_Create(&MODULE);
    if (!module || PyType_Ready(&ConditionsType) < 0 ||
        PyModule_AddObjectRef(module, "Conditions", (PyObject *)&ConditionsType) < 0) {
        Py_XDECREF(module);
        return NULL;
    }
    return module;
}
