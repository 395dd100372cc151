/* The structure of a batch: which containers there are, and where each leaf stands.
 *
 * Known here are dict (with keys of text), list, tuple, None, named tuples, and objects that are no more than their
 * `__dict__`. Leaves are numbered as optree does it, keys of a dict sorted. What else there is in a batch is optree's. */
#include "core.h"

#include <stdlib.h>
#include <string.h>

enum { LEAF, DICT, LIST, TUPLE, NOTHING, NAMED, INSTANCE }; /* operations */

typedef struct {
    int32_t op;
    int32_t number;   /* of a LEAF; else how many children there are */
    PyObject *keys;   /* of a DICT or INSTANCE: a tuple, in the order in which it was filled */
    PyObject *type;   /* of a NAMED or INSTANCE */
    PyObject *make;   /* of an INSTANCE: returns a new one without attributes */
    int32_t *order;   /* of a DICT: which child comes when keys are sorted; NULL if they are */
} Node;

typedef struct {
    PyObject_HEAD
    Node *nodes; /* depth first, children in the order of their leaves */
    Py_ssize_t count, room;
    Py_ssize_t leaves;
    int depth;             /* while it is found out */
    PyTypeObject *unknown; /* while it is found out: what `handlers` do not have */
} Structure;

static PyTypeObject *structure_type;

static Structure *structure_new(PyTypeObject *type) {
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Structure *self = (Structure *)alloc(type, 0);
    if (self != NULL) {
        self->nodes = NULL;
        self->count = self->room = self->leaves = 0;
        self->depth = 0;
        self->unknown = NULL;
    }
    return self;
}

static void structure_dealloc(PyObject *object) {
    Structure *self = (Structure *)object;
    PyTypeObject *type = Py_TYPE(object);
    for (Py_ssize_t i = 0; i < self->count; i++) {
        Py_XDECREF(self->nodes[i].keys);
        Py_XDECREF(self->nodes[i].type);
        Py_XDECREF(self->nodes[i].make);
        free(self->nodes[i].order);
    }
    free(self->nodes);
    Py_XDECREF((PyObject *)self->unknown);
    freefunc free_object = (freefunc)PyType_GetSlot(type, Py_tp_free);
    free_object(object);
    Py_DECREF(type);
}

static Py_ssize_t add_node(Structure *self, int32_t op, Py_ssize_t number) {
    if (self->count == self->room) {
        Py_ssize_t room = self->room ? 2 * self->room : 32;
        Node *nodes = realloc(self->nodes, sizeof(Node) * (size_t)room);
        if (nodes == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        self->nodes = nodes;
        self->room = room;
    }
    self->nodes[self->count] = (Node){.op = op, .number = (int32_t)number};
    return self->count++;
}

/* -- values of a dict, in the order in which it was filled ------------------------------------------------------------ */

/* In a walk any object that is made may call the garbage collector, and any class that is looked up may have a `__hash__`
 * of its own. Both run Python, and other threads: they may change the batch and the handlers. What comes from either is
 * held until the walk is done with it. */

enum { FEW = 64 };

/* Room for the children of a container: on the stack, if they are few. */
static PyObject **children(Py_ssize_t count, PyObject **few) {
    if (count <= FEW) return few;
    PyObject **many = malloc(sizeof(PyObject *) * (size_t)count);
    if (many == NULL) PyErr_NoMemory();
    return many;
}

static PyObject *held(PyObject *object) {
    Py_XINCREF(object);
    return object;
}

/* `count`: how many of them are held. */
static void children_end(PyObject **all, Py_ssize_t count, PyObject **few) {
    for (Py_ssize_t i = 0; i < count; i++) Py_DECREF(all[i]);
    if (all != few) free(all);
}

/* -- finding a structure out ----------------------------------------------------------------------------------------- */

enum { FAILED = -1, UNKNOWN = 0, KNOWN = 1 };

/* How deep a batch may be nested here; optree says what becomes of one that is deeper, or has no end. Each level takes more
 * than 1 KiB of the stack. Python's own limit is the user's, and may be higher than any stack. */
enum { MOST_DEEP = 200 };

static int find(Structure *self, PyObject *object, PyObject *handlers, PyObject *leaves);

static int compare_keys(const void *one, const void *other, void *keys) {
    PyObject **all = keys;
    return PyUnicode_Compare(all[*(const int32_t *)one], all[*(const int32_t *)other]);
}

static int find_dict(Structure *self, PyObject *dict, PyObject *type, PyObject *make, PyObject *handlers, PyObject *leaves) {
    Py_ssize_t count = PyDict_Size(dict), at = 0, i = 0, found = 0;
    if (count > INT32_MAX) return UNKNOWN;
    Py_ssize_t node = add_node(self, type == NULL ? DICT : INSTANCE, count);
    if (node < 0) return FAILED;
    PyObject *few_keys[FEW], *few_values[FEW], *key, *value;
    PyObject **keys = children(count, few_keys), **values = NULL, *names = NULL;
    int32_t *order = NULL;
    int result = FAILED;
    if (keys == NULL || (values = children(count, few_values)) == NULL) goto done;
    names = PyTuple_New(count);
    if (names == NULL) goto done;
    while (PyDict_Next(dict, &at, &key, &value) && found < count) {
        if (Py_TYPE(key) != &PyUnicode_Type) {
            result = UNKNOWN;
            goto done;
        }
        Py_INCREF(key);
        PyTuple_SetItem(names, found, key);
        keys[found] = key;
        values[found++] = held(value);
    }
    if (found < count) { /* a finaliser has taken some away meanwhile */
        result = UNKNOWN;
        goto done;
    }
    if (type == NULL) {
        bool sorted = true;
        for (i = 1; i < count && sorted; i++) sorted = PyUnicode_Compare(keys[i - 1], keys[i]) < 0;
        if (!sorted) {
            order = malloc(sizeof(int32_t) * (size_t)count);
            if (order == NULL) {
                PyErr_NoMemory();
                goto done;
            }
            for (int32_t k = 0; k < count; k++) order[k] = k;
            qsort_r(order, (size_t)count, sizeof(int32_t), compare_keys, keys);
        }
    }
    Py_XINCREF(type);
    Py_XINCREF(make);
    self->nodes[node].keys = names;
    self->nodes[node].type = type;
    self->nodes[node].make = make;
    self->nodes[node].order = order;
    names = NULL;
    result = KNOWN;
    for (i = 0; i < count && result == KNOWN; i++) {
        result = find(self, values[order == NULL ? i : order[i]], handlers, leaves);
    }
    order = NULL;
done:
    Py_XDECREF(names);
    free(order);
    if (keys != NULL) children_end(keys, 0, few_keys);
    if (values != NULL) children_end(values, found, few_values);
    return result;
}

static int find_sequence(Structure *self, int32_t op, PyObject *object, PyObject *type, PyObject *handlers, PyObject *leaves) {
    Py_ssize_t count = op == LIST ? PyList_Size(object) : PyTuple_Size(object);
    if (count > INT32_MAX) return UNKNOWN;
    Py_ssize_t node = add_node(self, op, count);
    if (node < 0) return FAILED;
    Py_XINCREF(type);
    self->nodes[node].type = type;
    int result = KNOWN;
    for (Py_ssize_t i = 0; i < count && result == KNOWN; i++) {
        PyObject *child = held(op == LIST ? PyList_GetItem(object, i) : PyTuple_GetItem(object, i));
        if (child == NULL) return FAILED;
        result = find(self, child, handlers, leaves);
        Py_DECREF(child);
    }
    return result;
}

static int find_instance(Structure *self, PyObject *object, PyObject *make, PyObject *handlers, PyObject *leaves) {
    PyObject *dict = PyObject_GenericGetDict(object, NULL);
    if (dict == NULL) return FAILED;
    int result = find_dict(self, dict, (PyObject *)Py_TYPE(object), make, handlers, leaves);
    Py_DECREF(dict);
    return result;
}

static int find(Structure *self, PyObject *object, PyObject *handlers, PyObject *leaves) {
    PyTypeObject *type = Py_TYPE(object);
    PyObject *handler = NULL;
    if (type != torch.tensor && type != torch.array) {
        int result;
        if (type == &PyDict_Type || type == &PyList_Type || type == &PyTuple_Type) {
            if (self->depth == MOST_DEEP) return UNKNOWN;
            self->depth++;
            if (type == &PyDict_Type) {
                result = find_dict(self, object, NULL, NULL, handlers, leaves);
            } else {
                result = find_sequence(self, type == &PyList_Type ? LIST : TUPLE, object, NULL, handlers, leaves);
            }
            self->depth--;
            return result;
        }
        if (object == Py_None) return add_node(self, NOTHING, 0) < 0 ? FAILED : KNOWN;
        handler = PyDict_GetItemWithError(handlers, (PyObject *)type);
        if (handler == NULL) {
            if (PyErr_Occurred()) return FAILED;
            self->unknown = (PyTypeObject *)held((PyObject *)type);
            return UNKNOWN;
        }
        if (handler == Py_False) return UNKNOWN;
        if (handler != Py_None) {
            if (self->depth == MOST_DEEP) return UNKNOWN;
            self->depth++;
            Py_INCREF(handler);
            if (handler == Py_True) {
                result = find_sequence(self, NAMED, object, (PyObject *)type, handlers, leaves);
            } else {
                result = find_instance(self, object, handler, handlers, leaves);
            }
            Py_DECREF(handler);
            self->depth--;
            return result;
        }
    }
    if (add_node(self, LEAF, self->leaves++) < 0) return FAILED;
    return PyList_Append(leaves, object) != 0 ? FAILED : KNOWN;
}

/* Structure.of(batch, handlers): the structure and the leaves of a batch; a type in it that `handlers` do not have; None if
 * only optree knows what is in it.
 *
 * handlers: by type, None for a leaf, True for a named tuple, for an object that is no more than its `__dict__` what makes
 * a new one, False for what only optree knows. */
static PyObject *structure_of(PyObject *type, PyObject *args) {
    PyObject *batch, *handlers;
    if (!PyArg_ParseTuple(args, "OO!:of", &batch, &PyDict_Type, &handlers)) return NULL;
    Structure *self = structure_new((PyTypeObject *)type);
    PyObject *leaves = PyList_New(0);
    int result = self == NULL || leaves == NULL ? FAILED : find(self, batch, handlers, leaves);
    if (result == KNOWN) return Py_BuildValue("(NN)", (PyObject *)self, leaves);
    PyObject *unknown = self == NULL || result == FAILED ? NULL : held((PyObject *)self->unknown);
    Py_XDECREF((PyObject *)self);
    Py_XDECREF(leaves);
    if (result == FAILED) return NULL;
    if (unknown != NULL) return unknown;
    Py_RETURN_NONE;
}

/* -- another batch of it ---------------------------------------------------------------------------------------------- */

static int follow(const Structure *self, Py_ssize_t *next, PyObject *object, PyObject *handlers, PyObject *leaves);

static int follow_dict(const Structure *self, Py_ssize_t *next, const Node *node, PyObject *dict, PyObject *handlers, PyObject *leaves) {
    Py_ssize_t count = node->number, at = 0, found = 0;
    if (PyDict_Size(dict) != count) return UNKNOWN;
    PyObject *few[FEW], *key, *value, **values = children(count, few);
    if (values == NULL) return FAILED;
    int result = KNOWN;
    while (result == KNOWN && found < count && PyDict_Next(dict, &at, &key, &value)) {
        PyObject *expected = PyTuple_GetItem(node->keys, found);
        if (key != expected && (Py_TYPE(key) != &PyUnicode_Type || PyUnicode_Compare(key, expected) != 0)) result = UNKNOWN;
        values[found++] = held(value);
    }
    if (found < count) result = UNKNOWN;
    const int32_t *order = node->order;
    for (Py_ssize_t i = 0; i < count && result == KNOWN; i++) {
        result = follow(self, next, values[order == NULL ? i : order[i]], handlers, leaves);
    }
    children_end(values, found, few);
    return result;
}

static int follow_sequence(const Structure *self, Py_ssize_t *next, const Node *node, PyObject *object, PyObject *handlers, PyObject *leaves) {
    Py_ssize_t count = node->op == LIST ? PyList_Size(object) : PyTuple_Size(object);
    int result = count == node->number ? KNOWN : UNKNOWN;
    for (Py_ssize_t i = 0; i < count && result == KNOWN; i++) {
        PyObject *child = held(node->op == LIST ? PyList_GetItem(object, i) : PyTuple_GetItem(object, i));
        if (child == NULL) return FAILED;
        result = follow(self, next, child, handlers, leaves);
        Py_DECREF(child);
    }
    return result;
}

static int follow(const Structure *self, Py_ssize_t *next, PyObject *object, PyObject *handlers, PyObject *leaves) {
    const Node *node = &self->nodes[(*next)++];
    PyTypeObject *type = Py_TYPE(object);
    PyObject *handler;
    int result;
    switch (node->op) {
    case LEAF:
        if (type != torch.tensor && type != torch.array) {
            handler = PyDict_GetItemWithError(handlers, (PyObject *)type);
            if (handler != Py_None) return handler == NULL && PyErr_Occurred() ? FAILED : UNKNOWN;
        }
        Py_INCREF(object);
        return PyList_SetItem(leaves, node->number, object) != 0 ? FAILED : KNOWN;
    case DICT:
        return type == &PyDict_Type ? follow_dict(self, next, node, object, handlers, leaves) : UNKNOWN;
    case LIST:
        return type == &PyList_Type ? follow_sequence(self, next, node, object, handlers, leaves) : UNKNOWN;
    case TUPLE:
        return type == &PyTuple_Type ? follow_sequence(self, next, node, object, handlers, leaves) : UNKNOWN;
    case NOTHING:
        return object == Py_None ? KNOWN : UNKNOWN;
    case NAMED:
        return (PyObject *)type == node->type ? follow_sequence(self, next, node, object, handlers, leaves) : UNKNOWN;
    default:
        if ((PyObject *)type != node->type) return UNKNOWN;
        PyObject *dict = PyObject_GenericGetDict(object, NULL);
        if (dict == NULL) return FAILED;
        result = follow_dict(self, next, node, dict, handlers, leaves);
        Py_DECREF(dict);
        return result;
    }
}

/* leaves(batch, handlers): of a batch of this very structure, the order of keys included; None if it has another one. */
static PyObject *structure_leaves(PyObject *object, PyObject *args) {
    Structure *self = (Structure *)object;
    PyObject *batch, *handlers;
    if (!PyArg_ParseTuple(args, "OO!:leaves", &batch, &PyDict_Type, &handlers)) return NULL;
    PyObject *leaves = PyList_New(self->leaves);
    if (leaves == NULL) return NULL;
    Py_ssize_t next = 0;
    int result = follow(self, &next, batch, handlers, leaves);
    if (result == KNOWN) return leaves;
    Py_DECREF(leaves);
    if (result == FAILED) return NULL;
    Py_RETURN_NONE;
}

/* -- put together ------------------------------------------------------------------------------------------------------- */

/* Put a part of a batch together. Without `leaves` it is a skeleton, with numbers in their places, and no class of the
 * user's is asked for one of its own. */
static PyObject *build(const Structure *self, Py_ssize_t *next, PyObject *leaves) {
    const Node *node = &self->nodes[(*next)++];
    Py_ssize_t count = node->number;
    if (node->op == LEAF) {
        if (leaves == NULL) return PyLong_FromSsize_t(count);
        PyObject *leaf = PyList_GetItem(leaves, count);
        Py_XINCREF(leaf);
        return leaf;
    }
    if (node->op == NOTHING) Py_RETURN_NONE;
    if (node->op == LIST) {
        PyObject *list = PyList_New(count);
        for (Py_ssize_t i = 0; list != NULL && i < count; i++) {
            PyObject *child = build(self, next, leaves);
            if (child == NULL || PyList_SetItem(list, i, child) != 0) Py_CLEAR(list);
        }
        return list;
    }
    PyObject *items = PyTuple_New(count);
    for (Py_ssize_t i = 0; items != NULL && i < count; i++) {
        PyObject *child = build(self, next, leaves);
        Py_ssize_t place = node->order == NULL ? i : node->order[i];
        if (child == NULL || PyTuple_SetItem(items, place, child) != 0) Py_CLEAR(items);
    }
    if (items == NULL || node->op == TUPLE) return items;
    PyObject *result;
    if (node->op == NAMED) {
        if (leaves != NULL) {
            result = PyObject_CallObject(node->type, items);
        } else {
            result = PyObject_CallMethod((PyObject *)&PyTuple_Type, "__new__", "OO", node->type, items);
        }
        Py_DECREF(items);
        return result;
    }
    PyObject *dict;
    if (node->op == DICT) {
        result = dict = PyDict_New();
        Py_XINCREF(dict);
    } else {
        result = PyObject_CallObject(node->make, NULL);
        dict = result == NULL ? NULL : PyObject_GenericGetDict(result, NULL);
    }
    bool failed = dict == NULL;
    for (Py_ssize_t i = 0; i < count && !failed; i++) {
        failed = PyDict_SetItem(dict, PyTuple_GetItem(node->keys, i), PyTuple_GetItem(items, i)) != 0;
    }
    Py_XDECREF(dict);
    Py_DECREF(items);
    if (failed) Py_CLEAR(result);
    return result;
}

/* rebuild(leaves): a batch of this structure. */
static PyObject *structure_rebuild(PyObject *object, PyObject *leaves) {
    Structure *self = (Structure *)object;
    if (!PyList_Check(leaves) || PyList_Size(leaves) != self->leaves) {
        PyErr_SetString(PyExc_ValueError, "a structure is rebuilt from a list of all its leaves");
        return NULL;
    }
    Py_ssize_t next = 0;
    return build(self, &next, leaves);
}

/* skeleton(): a batch of this structure whose leaves are their numbers. */
static PyObject *structure_skeleton(PyObject *object, PyObject *nothing) {
    (void)nothing;
    Py_ssize_t next = 0;
    return build((Structure *)object, &next, NULL);
}

/* key(): what two equal structures have in common, the order of keys included. */
static PyObject *structure_key(PyObject *object, PyObject *nothing) {
    (void)nothing;
    Structure *self = (Structure *)object;
    PyObject *key = PyTuple_New(self->count);
    for (Py_ssize_t i = 0; key != NULL && i < self->count; i++) {
        const Node *node = &self->nodes[i];
        PyObject *keys = node->keys == NULL ? Py_None : node->keys, *type = node->type == NULL ? Py_None : node->type;
        PyObject *item = node->op == LEAF ? PyLong_FromLong(LEAF) : Py_BuildValue("(iiOO)", node->op, node->number, keys, type);
        if (item == NULL || PyTuple_SetItem(key, i, item) != 0) Py_CLEAR(key);
    }
    return key;
}

static PyObject *structure_count(PyObject *object, void *nothing) {
    (void)nothing;
    return PyLong_FromSsize_t(((Structure *)object)->leaves);
}

static PyMethodDef structure_methods[] = {
    {"of", structure_of, METH_VARARGS | METH_CLASS, NULL},
    {"leaves", structure_leaves, METH_VARARGS, NULL},
    {"rebuild", structure_rebuild, METH_O, NULL},
    {"skeleton", structure_skeleton, METH_NOARGS, NULL},
    {"key", structure_key, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef structure_getters[] = {{"num_leaves", structure_count, NULL, NULL, NULL}, {NULL, NULL, NULL, NULL, NULL}};
static PyType_Slot structure_slots[] = {
    {Py_tp_dealloc, structure_dealloc},
    {Py_tp_methods, structure_methods},
    {Py_tp_getset, structure_getters},
    {0, NULL},
};
static PyType_Spec structure_spec = {"pinstage._native._core.Structure", sizeof(Structure), 0,
                                     Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, structure_slots};

int add_structure_type(PyObject *module) {
    PyObject *type = PyType_FromSpec(&structure_spec);
    if (type == NULL) return -1;
    structure_type = (PyTypeObject *)type;
    int status = PyModule_AddObjectRef(module, "Structure", type);
    Py_DECREF(type);
    return status;
}
