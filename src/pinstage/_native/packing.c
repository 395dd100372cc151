/* Packing for Python: `pack`, and `Job` for batches that are sent in chunks. */
#include "core.h"

#include <stdlib.h>

/* Interval at which a working thread checks for Ctrl-C. */
enum { ANSWER_MS = 20 };

static void work_end(Work *work) {
    free(work->leaves);
    Py_CLEAR(work->sources);
    table_end(&work->table);
}

/* The number of samples in all stacks; -1 with an error if one isn't a stack. */
static int64_t count_samples(PyObject *stacks) {
    PyObject *row, *found;
    Py_ssize_t at = 0;
    int64_t samples = 0;
    while (stacks != NULL && PyDict_Next(stacks, &at, &row, &found)) {
        const Stack *stack = stack_of(found);
        if (stack == NULL) return -1;
        samples += stack->count;
    }
    return samples;
}

/* The stack of a row; NULL if it has none, or with an error. */
static const Stack *stack_at(PyObject *stacks, int64_t index) {
    if (stacks == NULL || PyDict_Size(stacks) == 0) return NULL;
    PyObject *row = PyLong_FromLongLong(index);
    PyObject *found = row == NULL ? NULL : PyDict_GetItemWithError(stacks, row);
    Py_XDECREF(row);
    return found == NULL ? NULL : stack_of(found);
}

/* Add the samples of a row; false if they don't fill it. */
static bool add_samples(Work *work, const Row *row, const Stack *stack) {
    if (row->kind != RAW || row->nbytes != stack->nbytes) return false;
    for (int64_t i = 0; i < stack->count; i++) {
        Leaf *leaf = &work->leaves[work->count++];
        *leaf = stack->leaves[i];
        leaf->offset += row->offset;
    }
    return true;
}

static bool take_leaves(Work *work, const Table *table, PyObject *sources, PyObject *stacks,
                        int64_t room) {
    const Header *header = table->header;
    char *start;
    Py_ssize_t length;
    work->nbytes = slab_bytes(header);
    work->sources = Py_NewRef(sources);
    if (PyBytes_AsStringAndSize(sources, &start, &length) != 0) return false;
    if (work->nbytes > room || (size_t)length != source_bytes(header->width) * (size_t)header->rows)
        return fail(PyExc_ValueError,
                    "the slab is smaller than the offset table says, or the sources are another's");
    int64_t samples = count_samples(stacks), used = 0;
    if (samples < 0) return false;
    work->leaves = malloc(sizeof(Leaf) * (size_t)(table->packed + samples + 1));
    if (work->leaves == NULL) return no_memory();
    for (int64_t i = 0; i < table->packed; i++) {
        int64_t index = table->order[i];
        const Row *row = row_at(header, index);
        if (row->kind == LOCKED) continue;
        const Stack *stack = stack_at(stacks, index);
        if (stack != NULL && add_samples(work, row, stack)) {
            used += stack->count;
            continue;
        }
        const int64_t *source =
            (const int64_t *)(start + source_bytes(header->width) * (size_t)index);
        if (source[0] == 0 && row->nbytes > 0 && !PyErr_Occurred())
            return fail(PyExc_ValueError, "a row has neither a source nor samples");
        work->leaves[work->count++] = (Leaf){
            .source = (const char *)(uintptr_t)source[0],
            .offset = row->offset,
            .nbytes = row->nbytes,
            .shape = row->sizes,
            .strides = row->kind == STRIDED ? source + 1 : NULL,
            .ndim = row->ndim,
            .itemsize = torch.itemsize[row->dtype],
        };
    }
    if (used < samples && !PyErr_Occurred())
        return fail(PyExc_ValueError, "samples of a stack don't fill its row");
    return !PyErr_Occurred();
}

bool work_begin(Work *work, const Table *table, PyObject *sources, PyObject *stacks, int64_t room) {
    bool is_good = take_leaves(work, table, sources, stacks, room);
    if (!is_good) work_end(work);
    return is_good;
}

void work_do(Work *work, char *slab) {
    /* A smaller batch is also left in the caches: writing past them gains nothing, and the CPU
     * reads a batch of at most 64 KiB. */
    bool is_large = work->nbytes >= RELEASE_FROM_BYTES;
    PyThreadState *state = is_large ? PyEval_SaveThread() : NULL;
    pack_all(work->leaves, work->count, slab, work->nbytes, is_large);
    if (is_large) PyEval_RestoreThread(state);
    work_end(work);
}

PyObject *pack(UNUSED PyObject *module, PyObject *args) {
    PyObject *table, *sources, *stacks = NULL;
    unsigned long long address;
    long long room;
    if (!PyArg_ParseTuple(args, "OOKL|O!:pack", &table, &sources, &address, &room, &PyDict_Type,
                          &stacks))
        return NULL;
    Work work = {.leaves = NULL};
    if (!table_begin(&work.table, table) || !work_begin(&work, &work.table, sources, stacks, room))
        return NULL;
    work_do(&work, (char *)(uintptr_t)address);
    Py_RETURN_NONE;
}

/* -- Job --------------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    Work work;
    PyObject *owner; /* keeps leaves and slab alive */
    Job *job;        /* NULL when it is closed */
    int waiting;     /* calls of `wait` that are under way */
} JobObject;

/* Time for which the deallocation of a job waits for its threads; one piece takes microseconds. */
enum { END_MS = 2 * 1000 };

/* Free the job. Memory that a thread still touches after `milliseconds` (-1: no limit) is never
 * freed. */
static void job_close(JobObject *self, int milliseconds) {
    if (self->job == NULL) return;
    Job *job = self->job;
    self->job = NULL;
    bool is_free;
    Py_BEGIN_ALLOW_THREADS
    is_free = job_free(job, milliseconds);
    Py_END_ALLOW_THREADS
    if (!is_free) return;
    work_end(&self->work);
    Py_CLEAR(self->owner);
}

static PyObject *job_make(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *table, *sources, *owner, *stacks = NULL;
    unsigned long long address;
    long long room;
    int most_threads, reuses = 0;
    if (kwargs != NULL && PyDict_Size(kwargs) > 0)
        return PyErr_Format(PyExc_TypeError, "Job takes no keywords");
    if (!PyArg_ParseTuple(args, "OOKLOi|pO!:Job", &table, &sources, &address, &room, &owner,
                          &most_threads, &reuses, &PyDict_Type, &stacks))
        return NULL;
    JobObject *self = (JobObject *)PyType_GenericAlloc(type, 0);
    if (self == NULL) return NULL;
    Work *work = &self->work;
    if (!table_begin(&work->table, table) ||
        !work_begin(work, &work->table, sources, stacks, room)) {
        Py_DECREF(self);
        return NULL;
    }
    char *slab = (char *)(uintptr_t)address;
    self->job = job_new(work->leaves, work->count, slab, work->nbytes, most_threads, reuses != 0);
    if (self->job == NULL) {
        work_end(work);
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    self->owner = Py_XNewRef(owner);
    return (PyObject *)self;
}

static void job_dealloc(PyObject *object) {
    job_close((JobObject *)object, END_MS);
    free_object(object);
}

static PyObject *job_ends(PyObject *object, UNUSED void *nothing) {
    Job *job = ((JobObject *)object)->job;
    int64_t count = job == NULL ? 0 : job_chunks(job);
    PyObject *ends = PyTuple_New((Py_ssize_t)count);
    for (int64_t i = 0; ends != NULL && i < count; i++) {
        PyObject *end = PyLong_FromLongLong(job_chunk_end(job, i));
        if (end == NULL || PyTuple_SetItem(ends, (Py_ssize_t)i, end) != 0) Py_CLEAR(ends);
    }
    return ends;
}

/* Return a chunk's number; -1 with an error if there is no such chunk. */
static long long chunk_of(const JobObject *self, PyObject *number) {
    long long chunk = PyLong_AsLongLong(number);
    if (chunk == -1 && PyErr_Occurred()) return -1;
    if (self->job != NULL && chunk >= 0 && chunk < job_chunks(self->job)) return chunk;
    PyErr_SetString(PyExc_ValueError, "there is no such chunk, or the job was closed");
    return -1;
}

static PyObject *job_place(PyObject *object, PyObject *number) {
    JobObject *self = (JobObject *)object;
    long long chunk = chunk_of(self, number);
    return chunk < 0 ? NULL : PyLong_FromLongLong(job_chunk_place(self->job, chunk));
}

static PyObject *job_reuse_place(PyObject *object, PyObject *number) {
    JobObject *self = (JobObject *)object;
    long long chunk = chunk_of(self, number);
    if (chunk < 0) return NULL;
    job_reuse(self->job, chunk);
    Py_RETURN_NONE;
}

static PyObject *job_wait(PyObject *object, PyObject *number) {
    JobObject *self = (JobObject *)object;
    long long chunk = chunk_of(self, number);
    if (chunk < 0) return NULL;
    self->waiting++;
    bool complete = false, raised = false;
    while (!complete && !raised) {
        Py_BEGIN_ALLOW_THREADS
        complete = job_work(self->job, chunk, ANSWER_MS);
        Py_END_ALLOW_THREADS
        if (!complete) raised = PyErr_CheckSignals() != 0;
        if (!complete && !raised && job_is_lost(self->job)) { /* a signal handler may have forked */
            PyErr_SetString(
                PyExc_RuntimeError,
                "this process was forked in the middle of packing; only its parent goes on");
            raised = true;
        }
    }
    self->waiting--;
    if (raised) return NULL;
    Py_RETURN_NONE;
}

/* The end of a `with` block: return when no thread touches the slab or the leaves. Pieces that
 * no thread has begun are left out. */
static PyObject *job_exit(PyObject *object, UNUSED PyObject *raised) {
    if (((JobObject *)object)->waiting > 0)
        return PyErr_Format(PyExc_RuntimeError, "this job is being waited for");
    job_close((JobObject *)object, -1);
    Py_RETURN_NONE;
}

/* Warn of slower staging, once. The warning can be turned into an error, since its class is
 * Python's. */
static int warn_of_threads(int code) {
    PyObject *errors = PyImport_ImportModule("pinstage.errors");
    PyObject *kind = errors == NULL ? NULL : PyObject_GetAttrString(errors, "StagingWarning");
    static const char text[] =
        "packing goes on with %d threads: no other could be started (error %d); raise the limit of "
        "threads (ulimit -u, pids.max of the cgroup), or pass Stager(pack_threads=...)";
    int failed = kind == NULL ? -1 : PyErr_WarnFormat(kind, 1, text, pack_threads() + 1, code);
    Py_XDECREF(kind);
    Py_XDECREF(errors);
    return failed;
}

static PyObject *job_enter(PyObject *object, UNUSED PyObject *nothing) {
    static bool has_warned;
    Job *job = ((JobObject *)object)->job;
    int code = job == NULL ? 0 : job_begin(job);
    if (code != 0 && !has_warned) {
        has_warned = true;
        if (warn_of_threads(code) != 0) return NULL;
    }
    return Py_XNewRef(object);
}

static PyMethodDef job_methods[] = {
    {"wait", job_wait, METH_O,
     "wait(chunk): work until a chunk is complete; answers Ctrl-C meanwhile."},
    {"place", job_place, METH_O, "place(chunk): where in the slab a complete chunk is stored."},
    {"reuse", job_reuse_place, METH_O,
     "reuse(chunk): let a later chunk be packed in the place of this one, which was copied."},
    {"__enter__", job_enter, METH_NOARGS, "Let threads begin."},
    {"__exit__", job_exit, METH_VARARGS,
     "Wait until no thread touches slab or leaves. Pieces not begun are left out."},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef job_getters[] = {
    {"ends", job_ends, NULL, "Where each chunk ends, in bytes of the batch.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static const char job_doc[] =
    "Job(table, sources, address, nbytes, owner, threads[, reuses[, stacks]]): packs a batch by "
    "threads; a context manager.\n\n"
    "owner: keeps leaves, stacks and slab alive. If the block isn't entered, no thread writes to "
    "the slab. stacks: as for `pack`.";
static PyType_Slot job_slots[] = {
    {Py_tp_new, job_make},       {Py_tp_dealloc, job_dealloc}, {Py_tp_methods, job_methods},
    {Py_tp_getset, job_getters}, {Py_tp_doc, (void *)job_doc}, {0, NULL},
};
PyType_Spec job_spec = {"pinstage._native._core.Job", sizeof(JobObject), 0, Py_TPFLAGS_DEFAULT,
                        job_slots};
