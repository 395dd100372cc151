/* The module, and what it is told of torch. */
#include "core.h"

#include <dlfcn.h>
#include <string.h>

Torch torch;

typedef struct Exchange { /* DLPackExchangeAPI of DLPack 1.3: a header that stays, then functions */
    uint32_t major, minor;
    struct Exchange *older;
    void *allocate, *from_object, *to_object;
    int (*tensor_from_object)(void *object, DLTensor *out);
    void *work_stream;
} Exchange;

enum { DLPACK_MAJOR = 1 };

/* Keep an object in place of the one that was there. */
static void keep(PyObject **place, PyObject *object) {
    PyObject *before = *place;
    Py_INCREF(object);
    *place = object;
    Py_XDECREF(before);
}

static PyObject *begin(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *tensor, *array;
    if (!PyArg_ParseTuple(args, "O!O!:begin", &PyType_Type, &tensor, &PyType_Type, &array)) return NULL;
    keep((PyObject **)&torch.tensor, tensor);
    keep((PyObject **)&torch.array, array);
    Py_RETURN_NONE;
}

static PyObject *use_exchange(PyObject *module, PyObject *capsule) {
    (void)module;
    Exchange *exchange = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (exchange == NULL) return NULL;
    while (exchange != NULL && exchange->major != DLPACK_MAJOR) exchange = exchange->older;
    if (exchange == NULL || exchange->tensor_from_object == NULL) {
        PyErr_SetString(PyExc_ImportError, "torch exchanges tensors by another major version of DLPack than 1");
        return NULL;
    }
    torch.export_tensor = exchange->tensor_from_object;
    Py_RETURN_NONE;
}

static PyObject *add_dtype(PyObject *module, PyObject *args) {
    (void)module;
    int code, itemsize;
    const char *format;
    if (!PyArg_ParseTuple(args, "iis:add_dtype", &code, &itemsize, &format)) return NULL;
    if (code < 0 || code >= MOST_DTYPES || itemsize < 1 || itemsize > ALIGNMENT) {
        PyErr_SetString(PyExc_ValueError, "no such dtype");
        return NULL;
    }
    torch.itemsize[code] = (uint8_t)itemsize;
    if (format[0] == 'Z') {
        *(format[1] == 'f' ? &torch.complex_float : &torch.complex_double) = (uint8_t)code;
    } else {
        for (; *format; format++) torch.by_format[(unsigned char)*format] = (uint8_t)code;
    }
    Py_RETURN_NONE;
}

/* The first functions belong to torch's stable C shim, and return a code where they fail. The last four are C++, because the
 * shim has no function that makes an object of Python's, and none for a tensor's flags but its dispatcher of boxed values,
 * which has none for `requires_grad`. They may change, so `pinstage._torch` probes them, and an exception in one would end the
 * process: the three that read flags have nothing to throw, and `THPVariable_Wrap` throws where Python is out of memory. */
static PyObject *find_shim(PyObject *module, PyObject *args) {
    (void)module;
    const char *paths[3];
    if (!PyArg_ParseTuple(args, "sss:find_shim", &paths[0], &paths[1], &paths[2])) return NULL;
    static const struct {
        int library;
        const char *name;
        void **function;
    } names[] = {
        {0, "aoti_torch_get_storage_size", (void **)&torch.storage_size},
        {0, "aoti_torch_get_storage_offset", (void **)&torch.storage_offset},
        {0, "aoti_torch_get_dtype", (void **)&torch.get_dtype},
        {0, "aoti_torch__reinterpret_tensor", (void **)&torch.reinterpret},
        {0, "aoti_torch__alloc_from_pool", (void **)&torch.alloc_from_pool},
        {0, "aoti_torch_empty_strided", (void **)&torch.empty_strided},
        {0, "aoti_torch_get_data_ptr", (void **)&torch.get_data},
        {0, "aoti_torch_delete_tensor_object", (void **)&torch.delete_handle},
        {2, "_Z16THPVariable_WrapON2at10TensorBaseE", (void **)&torch.wrap},
        {0, "_ZN2at25compositeimplicitautograd6is_negERKNS_6TensorE", (void **)&torch.is_neg},
        {0, "_ZN2at25compositeimplicitautograd7is_conjERKNS_6TensorE", (void **)&torch.is_conj},
        {1, "_ZNK3c1010TensorImpl13requires_gradEv", (void **)&torch.requires_grad},
    };
    PyObject *missing = PyList_New(0);
    for (size_t i = 0; missing != NULL && i < sizeof names / sizeof names[0]; i++) {
        void *library = dlopen(paths[names[i].library], RTLD_NOW | RTLD_NOLOAD);
        *names[i].function = library == NULL ? NULL : dlsym(library, names[i].name);
        if (library != NULL) dlclose(library);
        if (*names[i].function == NULL) {
            PyObject *name = PyUnicode_FromString(names[i].name);
            if (name == NULL || PyList_Append(missing, name) != 0) Py_CLEAR(missing);
            Py_XDECREF(name);
        }
    }
    return missing;
}

/* watch_level(owner, name): be told of the number that is not negative while tensors may be dual; see `may_be_dual`. */
static PyObject *watch_level(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *owner, *name;
    if (!PyArg_ParseTuple(args, "OU:watch_level", &owner, &name)) return NULL;
    keep(&torch.level_owner, owner);
    keep(&torch.level_name, name);
    Py_RETURN_NONE;
}

/* watch_modes(count): be told of a function that says how many modes are on in which torch makes other things than views. */
static PyObject *watch_modes(PyObject *module, PyObject *count) {
    (void)module;
    keep(&torch.count_modes, count);
    Py_RETURN_NONE;
}

bool may_be_dual(void) {
    PyObject *level = torch.level_owner == NULL ? NULL : PyObject_GetAttr(torch.level_owner, torch.level_name);
    long found = level == NULL ? 0 : PyLong_AsLong(level);
    Py_XDECREF(level);
    if (PyErr_Occurred()) PyErr_Clear();
    return level == NULL || found >= 0;
}

/* find_handle(tensors, impls): look where a tensor object has its at::Tensor, and remember it; the offset, 0 if none.
 *
 * impls: the addresses of what these tensors are in C++ (`torch.Tensor._cdata`). An at::Tensor is a pointer to that. */
static PyObject *find_handle(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *tensors, *impls;
    if (!PyArg_ParseTuple(args, "O!O!:find_handle", &PyList_Type, &tensors, &PyList_Type, &impls)) return NULL;
    Py_ssize_t count = PyList_Size(tensors), found = 0;
    PyObject *size = PyObject_GetAttrString((PyObject *)torch.tensor, "__basicsize__");
    Py_ssize_t basic = size == NULL ? -1 : PyLong_AsSsize_t(size);
    Py_XDECREF(size);
    if (basic < 0) return NULL;
    torch.handle_at = 0;
    if (PyList_Size(impls) != count || count == 0) return PyLong_FromLong(0);
    for (Py_ssize_t at = (Py_ssize_t)sizeof(PyObject); at + (Py_ssize_t)sizeof(void *) <= basic; at += (Py_ssize_t)sizeof(void *)) {
        bool everywhere = true;
        for (Py_ssize_t i = 0; i < count && everywhere; i++) {
            PyObject *object = PyList_GetItem(tensors, i);
            unsigned long long impl = PyLong_AsUnsignedLongLong(PyList_GetItem(impls, i));
            if (PyErr_Occurred()) return NULL;
            void *word;
            memcpy(&word, (char *)object + at, sizeof word);
            everywhere = Py_TYPE(object) == torch.tensor && impl != 0 && (uintptr_t)word == (uintptr_t)impl;
        }
        if (everywhere) {
            found = at;
            break;
        }
    }
    torch.handle_at = found;
    return PyLong_FromSsize_t(found);
}

/* The at::Tensor of an argument; NULL with an error. */
static void *handle_in_probe(PyObject *tensor) {
    if (Py_TYPE(tensor) == torch.tensor && torch.handle_at != 0) return handle_of(tensor);
    PyErr_SetString(PyExc_TypeError, "not a torch.Tensor, or it isn't known where one has its C++ tensor");
    return NULL;
}

static PyObject *add_scalar(PyObject *module, PyObject *args) {
    (void)module;
    int code;
    PyObject *tensor;
    int32_t number;
    if (!PyArg_ParseTuple(args, "iO:add_scalar", &code, &tensor)) return NULL;
    void *handle = handle_in_probe(tensor);
    if (handle == NULL) return NULL;
    if (code < 0 || code >= MOST_DTYPES || torch.get_dtype(handle, &number)) Py_RETURN_FALSE;
    if (number < 0 || number > 255 || torch.by_scalar[number] != 255) Py_RETURN_FALSE;
    torch.by_scalar[number] = (uint8_t)code;
    torch.scalar[code] = (int16_t)number;
    Py_RETURN_TRUE;
}

static PyObject *storage_bytes(PyObject *module, PyObject *tensor) {
    (void)module;
    int64_t size, offset;
    void *handle = handle_in_probe(tensor);
    if (handle == NULL) return NULL;
    if (torch.storage_size(handle, &size) || torch.storage_offset(handle, &offset)) Py_RETURN_NONE;
    return Py_BuildValue("(LL)", (long long)size, (long long)offset);
}

static PyObject *flags(PyObject *module, PyObject *tensor) {
    (void)module;
    void *handle = handle_in_probe(tensor);
    if (handle == NULL) return NULL;
    return Py_BuildValue("(iii)", torch.requires_grad(*(void **)handle), torch.is_neg(handle), torch.is_conj(handle));
}

PyMethodDef torch_methods[] = {
    {"flags", flags, METH_O, NULL},
    {"begin", begin, METH_VARARGS, NULL},
    {"use_exchange", use_exchange, METH_O, NULL},
    {"add_dtype", add_dtype, METH_VARARGS, NULL},
    {"find_shim", find_shim, METH_VARARGS, NULL},
    {"watch_level", watch_level, METH_VARARGS, NULL},
    {"watch_modes", watch_modes, METH_O, NULL},
    {"find_handle", find_handle, METH_VARARGS, NULL},
    {"add_scalar", add_scalar, METH_VARARGS, NULL},
    {"storage_bytes", storage_bytes, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

/* -- a context that does nothing ------------------------------------------------------------------------------------ */

static PyObject *nothing_enter(PyObject *self, PyObject *nothing) {
    (void)self, (void)nothing;
    Py_RETURN_NONE;
}

static PyObject *nothing_exit(PyObject *self, PyObject *const *raised, Py_ssize_t count) {
    (void)self, (void)raised, (void)count;
    Py_RETURN_NONE;
}

static PyMethodDef nothing_methods[] = {
    {"__enter__", nothing_enter, METH_NOARGS, NULL},
    {"__exit__", (PyCFunction)(void (*)(void))nothing_exit, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot nothing_slots[] = {{Py_tp_methods, nothing_methods}, {0, NULL}};
static PyType_Spec nothing_spec = {"pinstage._native._core.Nothing", sizeof(PyObject), 0, Py_TPFLAGS_DEFAULT, nothing_slots};

/* -- steps ---------------------------------------------------------------------------------------------------------- */

/* step(name): what `pinstage._steps.step` does; self: what `steps` was given, and a `Nothing`. */
static PyObject *step(PyObject *self, PyObject *name) {
    PyObject *timed = PyTuple_GetItem(self, 0), *is_profiling = PyTuple_GetItem(self, 1);
    int looks = PyDict_Size(timed) > 0;
    if (!looks) {
        PyObject *answer = PyObject_CallNoArgs(is_profiling);
        if (answer == NULL) return NULL;
        looks = PyObject_IsTrue(answer);
        Py_DECREF(answer);
    }
    if (looks < 0) return NULL;
    if (looks) return PyObject_CallFunctionObjArgs(PyTuple_GetItem(self, 2), name, NULL);
    PyObject *nothing = PyTuple_GetItem(self, 3);
    Py_XINCREF(nothing);
    return nothing;
}

static PyMethodDef step_method = {"step", step, METH_O, "Return the context of one step; see pinstage._steps."};

/* steps(timed, is_profiling, make, nothing): a function of a name: make(name) if timed is not empty or is_profiling(), else
 * nothing. */
static PyObject *steps(PyObject *module, PyObject *args) {
    (void)module;
    if (PyTuple_Size(args) != 4 || !PyDict_Check(PyTuple_GetItem(args, 0))) {
        PyErr_SetString(PyExc_TypeError, "steps() takes a dict, two functions and a context");
        return NULL;
    }
    return PyCFunction_NewEx(&step_method, args, NULL);
}

static PyMethodDef steps_methods[] = {{"steps", steps, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};

static int fill(PyObject *module) {
    PyMethodDef *parts[] = {torch_methods, table_methods, describe_methods, pack_methods, blocks_methods, steps_methods};
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        if (PyModule_AddFunctions(module, parts[i]) != 0) return -1;
    }
    if (PyModule_AddObject(module, "TABLE_MAGIC", PyLong_FromLongLong(TABLE_MAGIC)) != 0) return -1;
    PyObject *nothing = PyType_FromSpec(&nothing_spec);
    if (nothing == NULL || PyModule_AddObjectRef(module, "Nothing", nothing) != 0) return -1;
    Py_DECREF(nothing);
    return add_structure_type(module) != 0 || add_job_type(module) != 0 || add_blocks_type(module) != 0 ? -1 : 0;
}

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_core", "Describes, packs and cuts batches; see pinstage._native.", -1, NULL, NULL, NULL, NULL, NULL};

/* In one phase: what is known of torch, and the threads that pack, are the process's, so subinterpreters are refused. */
PyMODINIT_FUNC PyInit__core(void) {
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL) return NULL;
    memset(torch.by_format, 255, sizeof torch.by_format);
    memset(torch.by_scalar, 255, sizeof torch.by_scalar);
    memset(torch.scalar, 255, sizeof torch.scalar);
    torch.complex_float = torch.complex_double = 255;
    if (fill(module) == 0) return module;
    Py_DECREF(module);
    return NULL;
}
