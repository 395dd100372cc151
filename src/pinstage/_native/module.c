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

/* begin(capsule, tensor, array, is_neg, is_conj): be told of torch.Tensor and numpy.ndarray; the version of the capsule.
 *
 * capsule: torch.Tensor.__dlpack_c_exchange_api__. */
static PyObject *begin(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *capsule, *tensor, *array, *is_neg, *is_conj;
    if (!PyArg_ParseTuple(args, "OO!O!OO:begin", &capsule, &PyType_Type, &tensor, &PyType_Type, &array, &is_neg, &is_conj))
        return NULL;
    Exchange *exchange = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (exchange == NULL) return NULL;
    while (exchange != NULL && exchange->major != DLPACK_MAJOR) exchange = exchange->older;
    if (exchange == NULL || exchange->tensor_from_object == NULL) {
        PyErr_SetString(PyExc_ImportError, "torch exchanges tensors by another major version of DLPack than 1");
        return NULL;
    }
    PyObject *name = PyUnicode_InternFromString("requires_grad");
    if (name == NULL) return NULL;
    memset(&torch, 0, sizeof torch);
    memset(torch.by_format, 255, sizeof torch.by_format);
    memset(torch.by_scalar, 255, sizeof torch.by_scalar);
    torch.complex_float = torch.complex_double = 255;
    Py_INCREF(tensor);
    Py_INCREF(array);
    Py_INCREF(is_neg);
    Py_INCREF(is_conj);
    torch.tensor = (PyTypeObject *)tensor;
    torch.array = (PyTypeObject *)array;
    torch.is_neg = is_neg;
    torch.is_conj = is_conj;
    torch.requires_grad_name = name;
    torch.export_tensor = exchange->tensor_from_object;
    return Py_BuildValue("(II)", exchange->major, exchange->minor);
}

/* add_dtype(code, itemsize, sample, format): be told of a dtype; whether DLPack has it.
 *
 * sample: a tensor of it, or None. format: numpy's character for it, or "". */
static PyObject *add_dtype(PyObject *module, PyObject *args) {
    (void)module;
    int code, itemsize;
    PyObject *sample;
    const char *format;
    if (!PyArg_ParseTuple(args, "iiOs:add_dtype", &code, &itemsize, &sample, &format)) return NULL;
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
    DLTensor tensor;
    if (sample == Py_None) Py_RETURN_FALSE;
    if (torch.export_tensor(sample, &tensor)) {
        PyErr_Clear();
        Py_RETURN_FALSE;
    }
    if (tensor.dtype.bits * tensor.dtype.lanes != 8 * itemsize) Py_RETURN_FALSE;
    torch.exported[code] = tensor.dtype;
    Py_RETURN_TRUE;
}

/* find_shim(libtorch_cpu, libtorch_python): look for torch's C shim; the names that are missing. */
static PyObject *find_shim(PyObject *module, PyObject *args) {
    (void)module;
    const char *paths[2];
    if (!PyArg_ParseTuple(args, "ss:find_shim", &paths[0], &paths[1])) return NULL;
    static const struct {
        int library;
        const char *name;
        void **function;
    } names[] = {
        {0, "aoti_torch_get_storage_size", (void **)&torch.storage_size},
        {0, "aoti_torch_get_storage_offset", (void **)&torch.storage_offset},
        {0, "aoti_torch_get_dtype", (void **)&torch.get_dtype},
        {0, "aoti_torch__reinterpret_tensor", (void **)&torch.reinterpret},
        {0, "aoti_torch_delete_tensor_object", (void **)&torch.delete_handle},
        {1, "_Z16THPVariable_WrapRKN2at10TensorBaseE", (void **)&torch.wrap},
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

/* add_scalar(code, tensor): be told of a dtype's number in the C shim, by a tensor of it; whether it has one of its own. */
static PyObject *add_scalar(PyObject *module, PyObject *args) {
    (void)module;
    int code;
    PyObject *tensor;
    int32_t number;
    if (!PyArg_ParseTuple(args, "iO:add_scalar", &code, &tensor)) return NULL;
    void *handle = Py_TYPE(tensor) == torch.tensor ? handle_of(tensor) : NULL;
    if (code < 0 || code >= MOST_DTYPES || handle == NULL || torch.get_dtype(handle, &number)) Py_RETURN_FALSE;
    if (number < 0 || number > 255 || torch.by_scalar[number] != 255) Py_RETURN_FALSE;
    torch.by_scalar[number] = (uint8_t)code;
    Py_RETURN_TRUE;
}

/* storage_bytes(tensor): the size of a tensor's storage and where it begins in that, as the C shim says; for a probe. */
static PyObject *storage_bytes(PyObject *module, PyObject *tensor) {
    (void)module;
    int64_t size, offset;
    void *handle = Py_TYPE(tensor) == torch.tensor ? handle_of(tensor) : NULL;
    if (handle == NULL || torch.storage_size == NULL || torch.storage_offset == NULL) Py_RETURN_NONE;
    if (torch.storage_size(handle, &size) || torch.storage_offset(handle, &offset)) Py_RETURN_NONE;
    return Py_BuildValue("(LL)", (long long)size, (long long)offset);
}

PyMethodDef torch_methods[] = {
    {"begin", begin, METH_VARARGS, NULL},
    {"add_dtype", add_dtype, METH_VARARGS, NULL},
    {"find_shim", find_shim, METH_VARARGS, NULL},
    {"find_handle", find_handle, METH_VARARGS, NULL},
    {"add_scalar", add_scalar, METH_VARARGS, NULL},
    {"storage_bytes", storage_bytes, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static int fill(PyObject *module) {
    PyMethodDef *parts[] = {torch_methods, table_methods, describe_methods, pack_methods, view_methods};
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        if (PyModule_AddFunctions(module, parts[i]) != 0) return -1;
    }
    return add_structure_type(module) != 0 || add_job_type(module) != 0 ? -1 : 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)fill}, {0, NULL}};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_core", "Describes, packs and cuts batches; see pinstage._native.", 0, NULL, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&definition); }
