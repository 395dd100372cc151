/* The structure of a batch: which containers there are, and where each leaf is.
 *
 * This file handles dict (with keys of text), list, tuple, None, named tuples, and objects that
 * consist only of their `__dict__`. For other containers the walk calls the functions that the
 * table of handlers has for their class. Leaves are numbered in the order of the batch, with the
 * keys of dicts sorted. */
#include "core.h"

#include <stdlib.h>
#include <string.h>
#include <structmember.h>

enum {
    LEAF,
    DICT,
    LIST,
    TUPLE,
    NOTHING,
    NAMED,
    INSTANCE,
    CUSTOM
}; /* operations; see pinstage._batch._structure */

typedef struct {
    int32_t op;
    int32_t number; /* of a LEAF, its index; else how many children there are */
    /* Of a DICT or INSTANCE: a tuple, in the order in which it was filled. Of a CUSTOM: (metadata,
     * path entries or None), as its flatten returns them. */
    PyObject *keys;
    PyObject *type;    /* of a container */
    PyObject *handler; /* of an INSTANCE or CUSTOM; see `structure_of` */
    int32_t *order;    /* of a DICT: its children by sorted keys; NULL if keys are sorted */
} Node;

typedef struct {
    PyObject_HEAD
    Node *nodes; /* depth first, children in the order of their leaves */
    Py_ssize_t count, room;
    Py_ssize_t leaves;
    char is_native; /* nothing is CUSTOM */
} Structure;

static Structure *structure_new(PyObject *type) {
    Structure *self = (Structure *)PyType_GenericAlloc((PyTypeObject *)type, 0);
    if (self != NULL) self->is_native = true;
    return self;
}

static int structure_traverse(PyObject *object, visitproc visit, void *arg) {
    Structure *self = (Structure *)object;
    Py_VISIT(Py_TYPE(object));
    for (Py_ssize_t i = 0; i < self->count; i++) {
        Py_VISIT(self->nodes[i].keys);
        Py_VISIT(self->nodes[i].type);
        Py_VISIT(self->nodes[i].handler);
    }
    return 0;
}

static int structure_clear(PyObject *object) {
    Structure *self = (Structure *)object;
    Node *nodes = self->nodes;
    Py_ssize_t count = self->count;
    self->nodes = NULL;
    self->count = 0;
    self->leaves = -1; /* it can't be rebuilt any more */
    for (Py_ssize_t i = 0; i < count; i++) {
        if (nodes[i].type == NULL) continue;
        Py_DECREF(nodes[i].type);
        Py_XDECREF(nodes[i].keys);
        Py_XDECREF(nodes[i].handler);
        free(nodes[i].order);
    }
    free(nodes);
    return 0;
}

static void structure_dealloc(PyObject *object) {
    PyObject_GC_UnTrack(object);
    structure_clear(object);
    free_object(object);
}

static int compare_keys(const void *one, const void *other, void *keys) {
    return PyUnicode_Compare(PyTuple_GetItem(keys, *(const int32_t *)one),
                             PyTuple_GetItem(keys, *(const int32_t *)other));
}

/* Find the order of a DICT's keys; false with an error. */
static bool sort_keys(Node *node) {
    bool sorted = true;
    PyObject *before = NULL, *key;
    for (Py_ssize_t i = 0; i < node->number && sorted; i++, before = key) {
        key = PyTuple_GetItem(node->keys, i);
        sorted = before == NULL || PyUnicode_Compare(before, key) < 0;
    }
    if (sorted) return true;
    node->order = malloc(sizeof(int32_t) * (size_t)node->number);
    if (node->order == NULL) return no_memory();
    for (int32_t i = 0; i < node->number; i++) node->order[i] = i;
    qsort_r(node->order, (size_t)node->number, sizeof(int32_t), compare_keys, node->keys);
    return true;
}

/* Append a node, and return its index; -1 with an error. */
static Py_ssize_t add_node(Structure *self, int32_t op, Py_ssize_t number, PyObject *type,
                           PyObject *handler, PyObject *keys) {
    if (self->count == self->room || number > INT32_MAX) {
        Py_ssize_t room = self->room ? 2 * self->room : 32;
        Node *nodes = number > INT32_MAX ? NULL : realloc(self->nodes, sizeof(Node) * (size_t)room);
        if (nodes == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        self->nodes = nodes;
        self->room = room;
    }
    Node *node = &self->nodes[self->count++];
    *node =
        (Node){op, (int32_t)number, Py_XNewRef(keys), Py_XNewRef(type), Py_XNewRef(handler), NULL};
    return op == DICT && !sort_keys(node) ? -1 : self->count - 1;
}

static inline Py_ssize_t place_of(const Node *node, Py_ssize_t child) {
    return node->order == NULL ? child : node->order[child];
}

/* -- finding the structure --------------------------------------------------------------------- */

/* In a walk, making any object may call the garbage collector, and looking up any class may call
 * a `__hash__` of its own. Both run Python code and other threads, which may change the batch
 * and the handlers. So the walk holds whatever it takes from either, until it is done with it. */

/* How deep a batch may be nested: each level takes more than 0.5 KiB of the stack, and a batch
 * may contain itself. Python's own limit can be set by the user, even higher than the stack
 * allows. */
enum { MOST_DEEP = 1000 };

typedef struct {
    Structure *self;
    PyObject *handlers, *leaves;
    /* For handlers that ask for it: a dict that lasts as long as the walk; NULL until one asks. */
    PyObject *met;
    int depth;
    const Node *next; /* the node that `follow` compares next */
} Walk;

/* The outcome of a visit: an error; the batch has another structure; or neither. */
enum { FAILED = -1, UNKNOWN = 0, KNOWN = 1 };

static int find(Walk *walk, PyObject *object);

/* The size of a list, or of a tuple. */
static Py_ssize_t items_in(int32_t op, PyObject *object) {
    return op == LIST ? PyList_Size(object) : PyTuple_Size(object);
}

/* Visit the items of a list, which may become shorter meanwhile, or of a tuple. */
static inline int each_item(Walk *walk, int32_t op, PyObject *object, Py_ssize_t count,
                            int (*visit)(Walk *walk, PyObject *object)) {
    int result = KNOWN;
    for (Py_ssize_t i = 0; i < count && result == KNOWN; i++) {
        PyObject *item =
            Py_XNewRef(op == LIST ? PyList_GetItem(object, i) : PyTuple_GetItem(object, i));
        result = item == NULL ? FAILED : visit(walk, item);
        Py_XDECREF(item);
    }
    return result;
}

/* The table's handler of a class, held; a class that it doesn't have yet is looked up by its
 * `__missing__`. */
static PyObject *handler_of(PyObject *handlers, PyObject *type) {
    PyObject *handler = PyDict_GetItemWithError(handlers, type);
    if (handler != NULL || PyErr_Occurred()) return Py_XNewRef(handler);
    return PyObject_GetItem(handlers, type);
}

/* Call the n-th function of a CUSTOM handler, with one argument or two, and with `met` if it
 * asks for that. */
static PyObject *call(PyObject *handler, Py_ssize_t n, PyObject *one, PyObject *two,
                      PyObject **met) {
    PyObject *function = PyTuple_GetItem(handler, n),
             *asks = function == NULL ? NULL : PyTuple_GetItem(handler, 3);
    if (asks == NULL) return NULL;
    if (asks == Py_True && *met == NULL && (*met = PyDict_New()) == NULL) return NULL;
    PyObject *last = asks == Py_True ? *met : NULL;
    return PyObject_CallFunctionObjArgs(function, one, two == NULL ? last : two,
                                        two == NULL ? NULL : last, NULL);
}

static int find_custom(Walk *walk, PyObject *object, PyObject *type, PyObject *handler) {
    PyObject *parts = call(handler, 0, object, NULL, &walk->met), *all = NULL, *keys = NULL;
    if (parts == NULL) return FAILED;
    int result = FAILED;
    PyObject *given, *metadata, *entries = Py_None;
    if (!PyArg_ParseTuple(parts, "OO|O:flatten", &given, &metadata, &entries)) goto done;
    all = PySequence_Tuple(given);
    keys = all == NULL ? NULL : Py_BuildValue("(OO)", metadata, entries);
    if (keys == NULL || add_node(walk->self, CUSTOM, PyTuple_Size(all), type, handler, keys) < 0)
        goto done;
    walk->self->is_native = false;
    result = each_item(walk, TUPLE, all, PyTuple_Size(all), find);
done:
    Py_XDECREF(keys);
    Py_XDECREF(all);
    Py_DECREF(parts);
    return result;
}

/* The dict of a DICT or an INSTANCE, held. */
static PyObject *dict_of(int32_t op, PyObject *object) {
    return op == DICT ? Py_XNewRef(object) : PyObject_GenericGetDict(object, NULL);
}

/* A dict's items, taken out of it. */
typedef struct {
    PyObject *keys, *values; /* a tuple, and a list; NULL with an error */
    Py_ssize_t count;
    bool are_text; /* the keys */
} Items;

static Items items_of(PyObject *dict) {
    Items items = {NULL, NULL, 0, true};
    Py_ssize_t at = 0;
    PyObject *key;
    do { /* making either may run a finaliser that changes the dict */
        Py_XDECREF(items.keys);
        Py_XDECREF(items.values);
        items.count = PyDict_Size(dict);
        items.keys = PyTuple_New(items.count);
        items.values = items.keys == NULL ? NULL : PyDict_Values(dict);
    } while (items.values != NULL && PyList_Size(items.values) != items.count);
    if (items.values == NULL) return items;
    for (Py_ssize_t i = 0; i < items.count && PyDict_Next(dict, &at, &key, NULL); i++) {
        items.are_text = items.are_text && Py_TYPE(key) == &PyUnicode_Type;
        PyTuple_SetItem(items.keys, i, Py_NewRef(key));
    }
    return items;
}

/* Add the node of a DICT or an INSTANCE, and visit its values. */
static int find_items(Walk *walk, int32_t op, const Items *items, PyObject *type,
                      PyObject *handler) {
    Py_ssize_t node = add_node(walk->self, op, items->count, type, handler, items->keys);
    if (node < 0) return FAILED;
    const int32_t *order = walk->self->nodes[node].order; /* the nodes may move */
    int result = KNOWN;
    for (Py_ssize_t i = 0; i < items->count && result == KNOWN; i++) {
        result = find(walk, PyList_GetItem(items->values, order == NULL ? i : order[i]));
    }
    return result;
}

static int find_dict(Walk *walk, int32_t op, PyObject *object, PyObject *type, PyObject *handler) {
    PyObject *dict = dict_of(op, object);
    if (dict == NULL) return FAILED;
    Items items = items_of(dict);
    int result = FAILED;
    if (items.values != NULL && op == DICT && !items.are_text) {
        PyObject *other = handler_of(walk->handlers, type);
        result = other == NULL ? FAILED : find_custom(walk, dict, type, other);
        Py_XDECREF(other);
    } else if (items.values != NULL) {
        result = find_items(walk, op, &items, type, handler);
    }
    Py_XDECREF(items.keys);
    Py_XDECREF(items.values);
    Py_DECREF(dict);
    return result;
}

static int find_sequence(Walk *walk, int32_t op, PyObject *object, PyObject *type) {
    Py_ssize_t count = items_in(op, object);
    if (count < 0 || add_node(walk->self, op, count, type, NULL, NULL) < 0) return FAILED;
    return each_item(walk, op, object, count, find);
}

static int find_leaf(Walk *walk, PyObject *object) {
    if (add_node(walk->self, LEAF, walk->self->leaves++, NULL, NULL, NULL) < 0) return FAILED;
    return PyList_Append(walk->leaves, object) != 0 ? FAILED : KNOWN;
}

static int find(Walk *walk, PyObject *object) {
    PyTypeObject *class = Py_TYPE(object);
    if (class == torch.tensor || class == torch.array) return find_leaf(walk, object);
    if (object == Py_None)
        return add_node(walk->self, NOTHING, 0, NULL, NULL, NULL) < 0 ? FAILED : KNOWN;
    PyObject *type = (PyObject *)class, *handler = NULL;
    int32_t op = class == &PyDict_Type    ? DICT
                 : class == &PyList_Type  ? LIST
                 : class == &PyTuple_Type ? TUPLE
                                          : LEAF;
    if (op == LEAF) {
        handler = handler_of(walk->handlers, type);
        if (handler == NULL) return FAILED;
        if (handler != Py_None)
            op = handler == Py_True ? NAMED : PyTuple_Check(handler) ? CUSTOM : INSTANCE;
    }
    int result = FAILED;
    if (op == LEAF) {
        result = find_leaf(walk, object);
    } else if (walk->depth == MOST_DEEP) {
        PyErr_SetString(PyExc_RecursionError, "a batch is nested too deeply");
    } else {
        walk->depth++;
        if (op == CUSTOM) {
            result = find_custom(walk, object, type, handler);
        } else if (op == DICT || op == INSTANCE) {
            result = find_dict(walk, op, object, type, handler);
        } else {
            result = find_sequence(walk, op, object, type);
        }
        walk->depth--;
    }
    Py_XDECREF(handler);
    return result;
}

/* of(batch, handlers): the structure and the leaves of a batch.
 *
 * handlers: by class, None for a leaf; True for a named tuple; for an object that consists only
 * of its `__dict__`, a function that makes an empty one; for any other container a tuple
 * (flatten, unflatten, _, asks). If `asks` is true, both functions get a dict as their last
 * argument, which all calls of one walk or one rebuild share. */
static PyObject *structure_of(PyObject *type, PyObject *args) {
    PyObject *batch;
    Walk walk = {0};
    if (!PyArg_ParseTuple(args, "OO!:of", &batch, &PyDict_Type, &walk.handlers)) return NULL;
    walk.self = structure_new(type);
    walk.leaves = PyList_New(0);
    int result = walk.self == NULL || walk.leaves == NULL ? FAILED : find(&walk, batch);
    Py_XDECREF(walk.met);
    if (result == KNOWN) return Py_BuildValue("(NN)", (PyObject *)walk.self, walk.leaves);
    Py_XDECREF((PyObject *)walk.self);
    Py_XDECREF(walk.leaves);
    return NULL;
}

/* -- another batch of it ----------------------------------------------------------------------- */

enum { FEW = 64 }; /* values of a dict that have room on the stack */

static inline int follow(Walk *walk, PyObject *object);

/* Whether keys of two dicts are the same text; others need only be the same object. */
static inline bool is_same_key(PyObject *one, PyObject *other) {
    if (one == other) return true;
    if (Py_TYPE(one) != &PyUnicode_Type || Py_TYPE(other) != &PyUnicode_Type) return false;
    return PyUnicode_Compare(one, other) == 0;
}

/* Take the values of a dict, held, as long as its keys are those of a node, in that order;
 * return how many. */
static Py_ssize_t take_values(const Node *node, PyObject *dict, PyObject **values) {
    Py_ssize_t at = 0, taken = 0;
    PyObject *key, *value;
    while (taken < node->number && PyDict_Next(dict, &at, &key, &value)) {
        if (!is_same_key(key, PyTuple_GetItem(node->keys, taken))) break;
        values[taken++] = Py_NewRef(value);
    }
    return taken;
}

static int follow_dict(Walk *walk, const Node *node, PyObject *object) {
    Py_ssize_t count = node->number;
    PyObject *few[FEW], **values = count <= FEW ? few : malloc(sizeof(PyObject *) * (size_t)count);
    PyObject *dict = values == NULL ? PyErr_NoMemory() : dict_of(node->op, object);
    bool has_size = dict != NULL && PyDict_Size(dict) == count;
    Py_ssize_t taken = has_size ? take_values(node, dict, values) : 0;
    int result = dict == NULL ? FAILED : has_size && taken == count ? KNOWN : UNKNOWN;
    for (Py_ssize_t i = 0; i < count && result == KNOWN; i++) {
        result = follow(walk, values[place_of(node, i)]);
    }
    for (Py_ssize_t i = 0; i < taken; i++) Py_DECREF(values[i]);
    if (values != few) free(values);
    Py_XDECREF(dict);
    return result;
}

static inline int follow(Walk *walk, PyObject *object) {
    const Node *node = walk->next++;
    PyTypeObject *type = Py_TYPE(object);
    if (node->op == LEAF) {
        if (type != torch.tensor && type != torch.array) {
            PyObject *handler = PyDict_GetItemWithError(walk->handlers, (PyObject *)type);
            if (handler != Py_None) return handler == NULL && PyErr_Occurred() ? FAILED : UNKNOWN;
        }
        return PyList_SetItem(walk->leaves, node->number, Py_XNewRef(object)) != 0 ? FAILED : KNOWN;
    }
    if (node->op == NOTHING) return object == Py_None ? KNOWN : UNKNOWN;
    if ((PyObject *)type != node->type || node->op == CUSTOM) return UNKNOWN;
    if (node->op == DICT || node->op == INSTANCE) return follow_dict(walk, node, object);
    return items_in(node->op, object) == node->number
               ? each_item(walk, node->op, object, node->number, follow)
               : UNKNOWN;
}

/* leaves(batch, handlers): the leaves of a batch of exactly this structure, the order of keys
 * included. None if the batch has another structure, or if one of its containers has functions
 * of its own. */
static PyObject *structure_leaves(PyObject *object, PyObject *args) {
    Structure *self = (Structure *)object;
    PyObject *batch;
    Walk walk = {.next = self->nodes};
    if (!PyArg_ParseTuple(args, "OO!:leaves", &batch, &PyDict_Type, &walk.handlers)) return NULL;
    walk.leaves = PyList_New(self->leaves);
    int result = walk.leaves == NULL ? FAILED : follow(&walk, batch);
    if (result == KNOWN) return walk.leaves;
    Py_XDECREF(walk.leaves);
    if (result == FAILED) return NULL;
    Py_RETURN_NONE;
}

/* -- put together ------------------------------------------------------------------------------ */

typedef struct {
    const Structure *self;
    Py_ssize_t next; /* the node to build */
    PyObject *leaves;
    PyObject *met; /* as in `Walk` */
} Building;

static PyObject *build(Building *building);

/* The children of a node: a list for a LIST, else a tuple. */
static PyObject *build_children(Building *building, const Node *node) {
    Py_ssize_t count = node->number;
    bool is_list = node->op == LIST;
    PyObject *children = is_list ? PyList_New(count) : PyTuple_New(count);
    for (Py_ssize_t i = 0; children != NULL && i < count; i++) {
        PyObject *child = build(building);
        if (child == NULL || (is_list ? PyList_SetItem(children, i, child)
                                      : PyTuple_SetItem(children, place_of(node, i), child)) != 0)
            Py_CLEAR(children);
    }
    return children;
}

/* A DICT or an INSTANCE with these values. */
static PyObject *build_dict(const Node *node, PyObject *values) {
    PyObject *made = node->op == DICT ? PyDict_New() : PyObject_CallObject(node->handler, NULL);
    PyObject *dict = made == NULL ? NULL : dict_of(node->op, made);
    bool is_good = dict != NULL;
    for (Py_ssize_t i = 0; i < node->number && is_good; i++) {
        is_good =
            PyDict_SetItem(dict, PyTuple_GetItem(node->keys, i), PyTuple_GetItem(values, i)) == 0;
    }
    Py_XDECREF(dict);
    if (!is_good) Py_CLEAR(made);
    return made;
}

static PyObject *build(Building *building) {
    const Node *node = &building->self->nodes[building->next++];
    if (node->op == LEAF) return Py_XNewRef(PyList_GetItem(building->leaves, node->number));
    if (node->op == NOTHING) Py_RETURN_NONE;
    PyObject *children = build_children(building, node), *made;
    if (children == NULL || node->op == LIST || node->op == TUPLE) return children;
    if (node->op == NAMED) {
        made = PyObject_CallObject(node->type, children);
    } else if (node->op == CUSTOM) {
        made = call(node->handler, 1, PyTuple_GetItem(node->keys, 0), children, &building->met);
    } else {
        made = build_dict(node, children);
    }
    Py_DECREF(children);
    return made;
}

/* rebuild(leaves): a batch of this structure. */
static PyObject *structure_rebuild(PyObject *object, PyObject *leaves) {
    Structure *self = (Structure *)object;
    if (!PyList_Check(leaves) || PyList_Size(leaves) != self->leaves)
        return PyErr_Format(PyExc_ValueError,
                            "a structure is rebuilt from a list of all its leaves");
    Building building = {self, 0, leaves, NULL};
    PyObject *result = build(&building);
    Py_XDECREF(building.met);
    return result;
}

/* -- compared ---------------------------------------------------------------------------------- */

/* Whether one object can replace another: they are equal, and so are the types of their parts.
 * -1 with an error. */
static int is_same(PyObject *one, PyObject *other) {
    if (one == other) return 1;
    if (Py_TYPE(one) != Py_TYPE(other)) return 0;
    if (PyTuple_Check(one)) {
        Py_ssize_t count = PyTuple_Size(one);
        int result = PyTuple_Size(other) == count;
        for (Py_ssize_t i = 0; i < count && result == 1; i++) {
            result = is_same(PyTuple_GetItem(one, i), PyTuple_GetItem(other, i));
        }
        return result;
    }
    Py_hash_t first = PyObject_Hash(one), second = first == -1 ? -1 : PyObject_Hash(other);
    if (second != -1) return first == second ? PyObject_RichCompareBool(one, other, Py_EQ) : 0;
    if (!PyErr_ExceptionMatches(PyExc_TypeError)) return -1;
    PyErr_Clear(); /* it cannot be hashed, so it may change */
    return 0;
}

static PyObject *structure_compare(PyObject *left, PyObject *right, int operation) {
    if ((operation != Py_EQ && operation != Py_NE) || Py_TYPE(left) != Py_TYPE(right))
        Py_RETURN_NOTIMPLEMENTED;
    const Structure *one = (Structure *)left, *other = (Structure *)right;
    int result = one->count == other->count && one->leaves == other->leaves;
    for (Py_ssize_t i = 0; one != other && i < one->count && result == 1; i++) {
        const Node *a = &one->nodes[i], *b = &other->nodes[i];
        result = a->op == b->op && a->number == b->number && a->type == b->type;
        if (result && a->keys != NULL) result = is_same(a->keys, b->keys);
    }
    return result < 0 ? NULL : PyBool_FromLong(result == (operation == Py_EQ));
}

static Py_hash_t structure_hash(PyObject *object) { /* few structures are compared at a time */
    Structure *self = (Structure *)object;
    return self->count * 1000003 + self->leaves;
}

/* -- taken apart itself ------------------------------------------------------------------------ */

/* nodes(): what the structure is made of: (operation, number, type, keys) of each node. */
static PyObject *structure_nodes(PyObject *object, UNUSED PyObject *nothing) {
    Structure *self = (Structure *)object;
    PyObject *nodes = PyList_New(self->count);
    for (Py_ssize_t i = 0; nodes != NULL && i < self->count; i++) {
        const Node *node = &self->nodes[i];
        PyObject *type = node->type == NULL ? Py_None : node->type,
                 *keys = node->keys == NULL ? Py_None : node->keys;
        PyObject *item =
            Py_BuildValue("(iiOO)", node->op, node->op == LEAF ? 0 : node->number, type, keys);
        if (item == NULL || PyList_SetItem(nodes, i, item) != 0) Py_CLEAR(nodes);
    }
    return nodes;
}

/* The containers whose children are being restored. */
typedef struct {
    Structure *self;
    PyObject *handlers;
    int depth;               /* -1 when all nodes are there */
    int left[MOST_DEEP + 1]; /* how many children are to come, of each container */
} Restoring;

/* Count a node among the children of its container; false if it has none, or is nested too
 * deeply. */
static bool enter(Restoring *restoring, int number) {
    if (restoring->depth < 0) return false;
    restoring->left[restoring->depth]--;
    if (number > 0) {
        if (restoring->depth == MOST_DEEP) return false;
        restoring->left[++restoring->depth] = number;
    }
    while (restoring->depth >= 0 && restoring->left[restoring->depth] == 0) restoring->depth--;
    return true;
}

/* Whether a node's type is the one of its operation. The types of others have handlers, which
 * are checked. */
static bool fits_type(int op, PyObject *type) {
    if (op == DICT) return type == (PyObject *)&PyDict_Type;
    if (op == LIST) return type == (PyObject *)&PyList_Type;
    return op != TUPLE || type == (PyObject *)&PyTuple_Type;
}

static bool fits_handler(int op, PyObject *handler) {
    if (op == NAMED) return handler == Py_True;
    return op == CUSTOM ? PyTuple_Check(handler)
                        : !PyTuple_Check(handler) && PyCallable_Check(handler);
}

static inline bool has_keys(int op) { return op == DICT || op >= INSTANCE; }

static bool fits_keys(int op, int number, PyObject *keys) {
    return !has_keys(op) ||
           (PyTuple_Check(keys) && PyTuple_Size(keys) == (op == CUSTOM ? 2 : number));
}

/* Append the node of a container; false if it isn't valid, with or without an error. */
static bool restore_container(Restoring *restoring, int op, int number, PyObject *type,
                              PyObject *keys) {
    if (!fits_type(op, type) || !fits_keys(op, number, keys)) return false;
    PyObject *handler = op < NAMED ? NULL : handler_of(restoring->handlers, type);
    bool fits = op < NAMED || (handler != NULL && fits_handler(op, handler));
    fits = fits &&
           add_node(restoring->self, op, number, type, handler, has_keys(op) ? keys : NULL) >= 0;
    if (op == CUSTOM) restoring->self->is_native = false;
    Py_XDECREF(handler);
    return fits && !PyErr_Occurred();
}

/* Append a node; false if it isn't valid, with or without an error. */
static bool restore_node(Restoring *restoring, PyObject *node) {
    int op, number;
    PyObject *type, *keys;
    Structure *self = restoring->self;
    if (!PyTuple_Check(node) || !PyArg_ParseTuple(node, "iiOO", &op, &number, &type, &keys))
        return false;
    if (op < LEAF || op > CUSTOM || number < 0 || !enter(restoring, number)) return false;
    if (op == LEAF) return number == 0 && add_node(self, op, self->leaves++, NULL, NULL, NULL) >= 0;
    if (op == NOTHING) return number == 0 && add_node(self, op, 0, NULL, NULL, NULL) >= 0;
    return restore_container(restoring, op, number, type, keys);
}

/* restore(nodes, handlers): the structure that has these nodes. */
static PyObject *structure_restore(PyObject *type, PyObject *args) {
    Restoring restoring = {.left = {1}};
    PyObject *nodes;
    if (!PyArg_ParseTuple(args, "O!O!:restore", &PyList_Type, &nodes, &PyDict_Type,
                          &restoring.handlers))
        return NULL;
    restoring.self = structure_new(type);
    bool fits = restoring.self != NULL;
    for (Py_ssize_t i = 0; fits && i < PyList_Size(nodes); i++)
        fits = restore_node(&restoring, PyList_GetItem(nodes, i));
    if (fits && restoring.depth < 0) return (PyObject *)restoring.self;
    Py_XDECREF((PyObject *)restoring.self);
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "these are not the nodes of a structure");
    return NULL;
}

static PyMethodDef structure_methods[] = {
    {"of", structure_of, METH_VARARGS | METH_CLASS,
     "of(batch, handlers): the structure and the leaves of a batch."},
    {"leaves", structure_leaves, METH_VARARGS,
     "leaves(batch, handlers): those of a batch of this structure; else None."},
    {"rebuild", structure_rebuild, METH_O, "rebuild(leaves): a batch of this structure."},
    {"nodes", structure_nodes, METH_NOARGS,
     "nodes(): (operation, number, type, keys) of each node."},
    {"restore", structure_restore, METH_VARARGS | METH_CLASS,
     "restore(nodes, handlers): the structure that has these nodes."},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef structure_members[] = {
    {"num_leaves", T_PYSSIZET, offsetof(Structure, leaves), READONLY, "How many leaves there are."},
    {"is_native", T_BOOL, offsetof(Structure, is_native), READONLY,
     "Whether no container has functions of its own."},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot structure_slots[] = {
    {Py_tp_dealloc, structure_dealloc},     {Py_tp_traverse, structure_traverse},
    {Py_tp_clear, structure_clear},         {Py_tp_methods, structure_methods},
    {Py_tp_members, structure_members},     {Py_tp_hash, structure_hash},
    {Py_tp_richcompare, structure_compare}, {0, NULL},
};
PyType_Spec structure_spec = {"pinstage._native._core.Structure", sizeof(Structure), 0,
                              Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE |
                                  Py_TPFLAGS_DISALLOW_INSTANTIATION,
                              structure_slots};
