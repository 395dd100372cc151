/* The module, and torch's functions and classes that Python passes to it. */
#include "core.h"

Torch torch = {.by_format = {[0 ... 255] = 255},
               .by_scalar = {[0 ... 255] = 255},
               .scalar = {[0 ... MOST_DTYPES - 1] = -1}};

typedef struct Exchange { /* DLPackExchangeAPI of DLPack 1.3: a stable header, then functions */
    uint32_t major, minor;
    struct Exchange *older;
    void *allocate, *from_object, *to_object;
    int (*tensor_from_object)(void *object, DLTensor *out);
    void *work_stream;
} Exchange;

enum { DLPACK_MAJOR = 1 };

/* Replace the object at a place. */
static void keep(PyObject **place, PyObject *object) {
    PyObject *before = *place;
    Py_INCREF(object);
    *place = object;
    Py_XDECREF(before);
}

static PyObject *begin(UNUSED PyObject *module, PyObject *args) {
    PyObject *tensor, *array;
    if (!PyArg_ParseTuple(args, "O!O!:begin", &PyType_Type, &tensor, &PyType_Type, &array))
        return NULL;
    keep((PyObject **)&torch.tensor, tensor);
    keep((PyObject **)&torch.array, array);
    Py_RETURN_NONE;
}

static PyObject *use_torch(UNUSED PyObject *module, PyObject *args) {
    PyObject *capsule, *addresses, *owner, *name, *modes;
    if (!PyArg_ParseTuple(args, "OO!OUO:use_torch", &capsule, &PyTuple_Type, &addresses, &owner,
                          &name, &modes))
        return NULL;
    Exchange *exchange = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (exchange == NULL) return NULL;
    while (exchange != NULL && exchange->major != DLPACK_MAJOR) exchange = exchange->older;
    Py_ssize_t count = sizeof torch.functions / sizeof torch.functions[0];
    if (exchange == NULL || exchange->tensor_from_object == NULL ||
        PyTuple_Size(addresses) != count)
        return PyErr_Format(PyExc_ImportError,
                            "torch exchanges tensors by another major version of DLPack than 1");
    torch.export_tensor = exchange->tensor_from_object;
    for (Py_ssize_t i = 0; i < count; i++) {
        torch.functions[i] = PyLong_AsVoidPtr(PyTuple_GetItem(addresses, i));
        if (torch.functions[i] == NULL)
            return PyErr_Occurred() ? NULL
                                    : PyErr_Format(PyExc_ValueError, "function %zd is at 0", i);
    }
    keep(&torch.level_owner, owner);
    keep(&torch.level_name, name);
    keep(&torch.count_modes, modes);
    Py_RETURN_NONE;
}

static PyObject *use_handle(UNUSED PyObject *module, PyObject *place) {
    Py_ssize_t before = torch.handle_at, at = PyLong_AsSsize_t(place);
    if (PyErr_Occurred()) return NULL;
    if (at != 0 && (at < (Py_ssize_t)sizeof(PyObject) || torch.export_tensor == NULL))
        return PyErr_Format(PyExc_ValueError, "no place for a C++ tensor: %zd", at);
    torch.handle_at = at;
    return PyLong_FromSsize_t(before);
}

static PyObject *add_dtype(UNUSED PyObject *module, PyObject *args) {
    int code, itemsize;
    const char *format;
    if (!PyArg_ParseTuple(args, "iis:add_dtype", &code, &itemsize, &format)) return NULL;
    if (code < 0 || code >= MOST_DTYPES || itemsize < 1 || itemsize > ALIGNMENT)
        return PyErr_Format(PyExc_ValueError, "no such dtype");
    torch.itemsize[code] = (uint8_t)itemsize;
    bool is_complex = format[0] == 'Z';
    for (format += is_complex; *format; format++)
        torch.by_format[format_index(*format, is_complex)] = (uint8_t)code;
    Py_RETURN_NONE;
}

/* `level_owner` is NULL until `use_torch` has succeeded. */
bool may_be_dual(void) {
    PyObject *level =
        torch.level_owner == NULL ? NULL : PyObject_GetAttr(torch.level_owner, torch.level_name);
    long found = level == NULL ? 0 : PyLong_AsLong(level);
    Py_XDECREF(level);
    if (PyErr_Occurred()) PyErr_Clear();
    return level == NULL || found >= 0;
}

static PyObject *add_scalar(UNUSED PyObject *module, PyObject *args) {
    int code, number;
    if (!PyArg_ParseTuple(args, "ii:add_scalar", &code, &number)) return NULL;
    if (code < 0 || code >= MOST_DTYPES || number < 0 || number > 254)
        return PyErr_Format(PyExc_ValueError, "no such dtype: %d, number %d", code, number);
    torch.by_scalar[number] = (uint8_t)code;
    torch.scalar[code] = (int16_t)number;
    Py_RETURN_NONE;
}

static PyObject *facts(UNUSED PyObject *module, PyObject *tensor) {
    if (Py_TYPE(tensor) != torch.tensor || torch.handle_at == 0)
        return PyErr_Format(PyExc_TypeError,
                            "not a torch.Tensor, or the place of its C++ tensor isn't known");
    void *handle = handle_of(tensor);
    int64_t size, offset;
    int32_t dtype;
    if (torch.storage_size(handle, &size) || torch.storage_offset(handle, &offset) ||
        torch.get_dtype(handle, &dtype))
        return PyErr_Format(PyExc_RuntimeError, "torch's C shim does not describe a tensor");
    return Py_BuildValue("(LLiiii)", (long long)size, (long long)offset, dtype,
                         torch.requires_grad(*(void **)handle), torch.is_neg(handle),
                         torch.is_conj(handle));
}

void free_object(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

/* Add a type to the module; -1 with an error. */
static int add_type(PyObject *module, PyType_Spec *spec) {
    PyObject *type = PyType_FromSpec(spec);
    int status = type == NULL ? -1 : PyModule_AddType(module, (PyTypeObject *)type);
    Py_XDECREF(type);
    return status;
}

/* -- a context that does nothing --------------------------------------------------------------- */

static PyObject *nothing_enter(UNUSED PyObject *self, UNUSED PyObject *nothing) { Py_RETURN_NONE; }

static PyObject *nothing_exit(UNUSED PyObject *self, UNUSED PyObject *const *raised,
                              UNUSED Py_ssize_t count) {
    Py_RETURN_NONE;
}

static PyMethodDef nothing_methods[] = {
    {"__enter__", nothing_enter, METH_NOARGS, NULL},
    {"__exit__", (PyCFunction)(void (*)(void))nothing_exit, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot nothing_slots[] = {{Py_tp_methods, nothing_methods}, {0, NULL}};
static PyType_Spec nothing_spec = {"pinstage._native._core.Nothing", sizeof(PyObject), 0,
                                   Py_TPFLAGS_DEFAULT, nothing_slots};

/* -- the module -------------------------------------------------------------------------------- */

static PyMethodDef functions[] = {
    {"begin", begin, METH_VARARGS, "begin(tensor, array): take torch.Tensor and numpy.ndarray."},
    {"use_torch", use_torch, METH_VARARGS,
     "use_torch(exchange, functions, owner, name, modes): take DLPack's capsule, addresses of "
     "functions, the level of "
     "forward-mode AD as an attribute, and a function that counts modes."},
    {"use_handle", use_handle, METH_O,
     "use_handle(place): set where a tensor object has its at::Tensor, 0 for nowhere; return the "
     "last place."},
    {"add_dtype", add_dtype, METH_VARARGS,
     "add_dtype(code, itemsize, format): take a dtype, and numpy's characters for it."},
    {"add_scalar", add_scalar, METH_VARARGS,
     "add_scalar(code, number): take the number that torch's C shim has for a dtype."},
    {"facts", facts, METH_O,
     "facts(tensor): bytes of its storage, offset, dtype, requires_grad, is_neg, is_conj; for a "
     "probe."},
    {"figures", figures, METH_O,
     "figures(table): the table, and nbytes, payload, packed, moved, others, slab_bytes, if its "
     "rows are valid."},
    {"describe", describe, METH_VARARGS,
     "describe(leaves, atoms, plainly, (device_type, device_id), arrays[, cut, each]): a table"},
    {"alike", alike, METH_VARARGS,
     "alike(samples, usual): a stack for `pack` or `Job`, or None if they differ or are not "
     "plain, or if `usual` and they have other strides than new tensors."},
    {"stack_rows", stack_rows, METH_VARARGS,
     "stack_rows(tensor, index, copies): a stack of rows for `pack` or `Job`, or, if torch has to "
     "gather them, bytes with the int64 of the index, which count from the start; an IndexError, "
     "without a subject, if one is out of range. copies: a dict for the rows of one batch."},
    {"pack", pack, METH_VARARGS,
     "pack(table, sources, address, nbytes[, stacks]): write leaves to their places; samples of "
     "stacks, by row, one after the other."},
    {"find_driver", find_driver, METH_NOARGS,
     "find_driver(): find the functions of CUDA's driver; return whether it can copy."},
    {"has_context", has_context, METH_NOARGS,
     "has_context(): whether this thread has a current context of CUDA."},
    {"make_stream", make_stream, METH_NOARGS,
     "make_stream(): the handle of another non-blocking stream, or -error of CUDA"},
    {"match", match, METH_VARARGS,
     "match(leaves, existing, table, (atoms, wrappers), device_type, device_index): leaves that "
     "torch can copy by one call for each pair of dtypes, by these, and all others."},
    {"move_few", move_few, METH_VARARGS,
     "move_few(leaves, (atoms, wrappers), device_type, device_index, stream, copies, borrows, "
     "most_bytes)"},
    {"copy_out", copy_out, METH_VARARGS,
     "copy_out([(to, from, nbytes)...], stream): copy from a device to the host; the number of "
     "copies, or -error of CUDA"},
    {"fetch_few", fetch_few, METH_VARARGS,
     "fetch_few(leaves, (atoms, wrappers), device_index, stream, slab, room, waits)"},
    {"fill_few", fill_few, METH_VARARGS, "fill_few(leaves, slab)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_core",
    .m_doc = "Describes, packs and cuts batches; see pinstage._native.", .m_size = -1,
    .m_methods = functions};

/* Single-phase: torch's functions and the packing threads belong to the process, so
 * subinterpreters are refused. */
PyMODINIT_FUNC PyInit__core(void) {
    PyType_Spec *types[] = {&nothing_spec, &structure_spec, &job_spec, &blocks_spec, &stack_spec};
    PyObject *module = PyModule_Create(&definition);
    int status = module == NULL
                     ? -1
                     : PyModule_AddObjectRef(module, "demotes", can_demote() ? Py_True : Py_False);
    if (status == 0) status = PyModule_AddIntConstant(module, "AT_ONCE_BYTES", AT_ONCE_BYTES);
    if (status == 0) status = PyModule_AddIntConstant(module, "MOST_FEW", MOST_FEW);
    for (size_t i = 0; i < sizeof types / sizeof types[0] && status == 0; i++)
        status = add_type(module, types[i]);
    stack_type = status == 0 ? PyObject_GetAttrString(module, "Stack") : NULL;
    if (stack_type == NULL) Py_CLEAR(module);
    return module;
}
