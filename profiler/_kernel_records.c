/* Reads the records of CUPTI's buffers in C. It does the same as `read_in_python` in device/cupti.py, which explains
   the offsets. A step of 700 launches has 12,000 to 20,000 records, most of them of calls: 60 ms in Python, 1 ms
   here.

   The address of CUPTI's function that returns the next record is an argument, so that a test can replace the
   function. No Python code runs while records are read.
*/

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

enum { KERNEL = 10, EXTERNAL = 39, CUSTOM = 3 };
enum { HEAD_BYTES = 4, KERNEL_BYTES = 160, EXTERNAL_BYTES = 20 };
enum { REGISTERS_AT = 6, TIMES_AT = 16, SIZES_AT = 52, LOCAL_AT = 84, CALL_AT = 92, NAME_AT = 104, GRAPH_NODE_AT = 144, GRAPH_AT = 156 };

typedef int (*Next)(uint8_t *buffer, size_t size_bytes, uint8_t **record);

/* Return the kernel of a record as a tuple, or None if the record is invalid. */
static PyObject *
kernel_of(const uint8_t *record)
{
    uint64_t times_ns[2], name, node;
    int32_t sizes[8]; /* grid x, y, z; block x, y, z; static bytes; dynamic bytes */
    uint32_t local_bytes, call, graph;
    uint16_t registers;
    memcpy(times_ns, record + TIMES_AT, sizeof times_ns);
    memcpy(sizes, record + SIZES_AT, sizeof sizes);
    int is_right = times_ns[0] > 0 && times_ns[0] <= times_ns[1] && times_ns[1] < UINT64_C(1) << 63;
    for (int at = 0; at < 8; at++) {
        is_right = is_right && sizes[at] >= (at < 6);
    }
    if (!is_right) {
        Py_RETURN_NONE;
    }
    memcpy(&registers, record + REGISTERS_AT, sizeof registers);
    memcpy(&local_bytes, record + LOCAL_AT, sizeof local_bytes);
    memcpy(&call, record + CALL_AT, sizeof call);
    memcpy(&name, record + NAME_AT, sizeof name);
    memcpy(&node, record + GRAPH_NODE_AT, sizeof node);
    memcpy(&graph, record + GRAPH_AT, sizeof graph);
    return Py_BuildValue("(KKK(iii)(iii)HiiIIIK)", (unsigned long long)name, (unsigned long long)times_ns[0],
                         (unsigned long long)times_ns[1], sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5],
                         registers, sizes[6], sizes[7], local_bytes, call, graph,
                         (unsigned long long)(node & UINT32_MAX));
}

/* Add a record of at most `left` bytes. Returns 1 if the record is invalid and counts as lost, and -1 with an
   exception set. */
static int
add(const uint8_t *record, size_t left, PyObject *kernels, PyObject *externals)
{
    uint32_t kind;
    if (left < HEAD_BYTES) {
        return 1;
    }
    memcpy(&kind, record, sizeof kind);
    if (kind == KERNEL) {
        PyObject *kernel = left < KERNEL_BYTES ? Py_NewRef(Py_None) : kernel_of(record);
        if (kernel == NULL) {
            return -1;
        }
        int result = Py_IsNone(kernel) ? 1 : PyList_Append(kernels, kernel);
        Py_DECREF(kernel);
        return result;
    }
    if (kind != EXTERNAL) {
        return 0;
    }
    if (left < EXTERNAL_BYTES) {
        return 1;
    }
    uint32_t whose, call;
    uint64_t external;
    memcpy(&whose, record + 4, sizeof whose);
    memcpy(&external, record + 8, sizeof external);
    memcpy(&call, record + 16, sizeof call);
    if (whose != CUSTOM) {
        return 0;
    }
    PyObject *key = PyLong_FromUnsignedLong(call), *value = PyLong_FromUnsignedLongLong(external);
    int result = key == NULL || value == NULL ? -1 : PyDict_SetItem(externals, key, value);
    Py_XDECREF(key);
    Py_XDECREF(value);
    return result;
}

static PyObject *
read_records(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    unsigned long long next_address;
    PyObject *buffers;
    Py_ssize_t most, count = 0, lost = 0;
    if (!PyArg_ParseTuple(arguments, "KO!n", &next_address, &PyList_Type, &buffers, &most)) {
        return NULL;
    }
    Next next = (Next)(uintptr_t)next_address;
    PyObject *kernels = PyList_New(0), *externals = PyDict_New();
    int result = kernels == NULL || externals == NULL ? -1 : 0;
    for (Py_ssize_t at = 0; result >= 0 && at < PyList_GET_SIZE(buffers); at++) {
        unsigned long long address, size_bytes;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(buffers, at), "KK", &address, &size_bytes)) {
            result = -1;
            break;
        }
        uint8_t *buffer = (uint8_t *)(uintptr_t)address, *end = buffer + size_bytes, *record = NULL;
        while (result >= 0 && next(buffer, (size_t)size_bytes, &record) == 0) {
            if (record < buffer || record >= end) {
                break;
            }
            result = count++ < most ? add(record, (size_t)(end - record), kernels, externals) : 1;
            lost += result > 0;
        }
    }
    if (result < 0) {
        Py_XDECREF(kernels);
        Py_XDECREF(externals);
        return NULL;
    }
    return Py_BuildValue("(NNn)", kernels, externals, lost);
}

static PyMethodDef functions[] = {
    {"read_records", read_records, METH_VARARGS, "read_records(next_address, buffers, most, /)\n--\n\n"},
    {0},
};

static PyModuleDef_Slot slots[] = {
#ifdef Py_mod_multiple_interpreters
    {Py_mod_multiple_interpreters, Py_MOD_PER_INTERPRETER_GIL_SUPPORTED},
#endif
    {0},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "cbtop.profiler._kernel_records",
    .m_doc = "Records of CUPTI, read in C.",
    .m_methods = functions,
    .m_slots = slots,
};

PyMODINIT_FUNC
PyInit__kernel_records(void)
{
    return PyModuleDef_Init(&definition);
}
