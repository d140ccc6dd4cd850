// Collectives of plain CPU tensors in equal parts, from c10d's arguments to the core in one call.
#include "core.h"
#include "raw_tensor.h"
#include "torch_inside.h"

enum { kCodes = 64, kFew = 64, kMostOps = 32 };

// Of an operation's Shape, as set_up_kinds gets it: which ranks have an input, an output.
enum { kReadsAtRoot = 1, kReadsElsewhere = 2, kWritesAtRoot = 4, kWritesElsewhere = 8 };
enum { kFromEach = 16, kToEach = 32, kReduces = 64, kCounted = 128 };
static const uint64_t kListedInputs = 1ull << 32, kListedOutputs = 1ull << 33;

static uint8_t item_bytes[kCodes], reduces[kCodes], shapes[kMostOps];
static unsigned long ops;

uint8_t bytes_of_an_item(uint8_t code) { return item_bytes[code]; }

typedef int (*Function)(void*, uint64_t, int32_t, void*, void*, uint64_t, int64_t);
typedef int (*Submit)(void*, uint64_t, int32_t, void*, void*, uint64_t, int64_t, void**);

typedef struct {
  PyObject_HEAD Function function;
  Submit submit;  // null: always the slow path
  void* handle;   // null once closed
  Py_ssize_t rank, size;
} FastCollective;

// One side of a collective: nothing, one part, or one for each rank.
typedef struct {
  void* data;  // of the part, of all parts one after the other, or their addresses
  uint64_t count;
  uint8_t code;
  int listed;
} Side;

static int is_list_of_one(PyObject* o) { return PyList_Check(o) && PyList_Size(o) == 1; }

// These two: 1: found; 0: not plain tensors in equal parts; -1: an exception is set. A tensor, or the only one of a
// list, as c10d passes most.
static int find_part(PyObject* o, Side* side) {
  RawTensor t;
  const int found = raw_tensor_find(is_list_of_one(o) ? PyList_GetItem(o, 0) : o, &t);
  if (found == 1) *side = (Side){t.data, t.count, t.code, 0};
  return found;
}

// A list of as many tensors as there are ranks, or the only list of a list; or a tensor that is cut into as many.
static int find_parts(PyObject* o, Py_ssize_t ranks, void** addresses, Side* side) {
  if (is_list_of_one(o) && PyList_Check(PyList_GetItem(o, 0))) o = PyList_GetItem(o, 0);
  RawTensor t;
  if (!PyList_Check(o)) {
    const int found = raw_tensor_find(o, &t);
    if (found != 1 || t.rows % (uint64_t)ranks || !t.rows) return found < 0 ? found : 0;
    *side = (Side){t.data, t.count / (uint64_t)ranks, t.code, 0};
    return 1;
  }
  if (PyList_Size(o) != ranks) return 0;
  for (Py_ssize_t i = 0; i < ranks; ++i) {
    const int found = raw_tensor_find(PyList_GetItem(o, i), &t);
    if (found != 1) return found;
    if (!i) *side = (Side){addresses, t.count, t.code, 1};
    if (t.count != side->count || t.code != side->code) return 0;
    addresses[i] = t.data;
  }
  return 1;
}

static int is_nothing(PyObject* o) { return o == Py_None || (PyList_Check(o) && !PyList_Size(o)); }

// Of the reduce op `o` and a dtype; -1: they have no meaning together, or it is none that is known.
static int reduce_op(PyObject* o, uint8_t code) {
  const Py_hash_t op = PyObject_Hash(o);  // of c10d's ReduceOp: its number
  return op >= 0 && op < 8 && reduces[code] >> op & 1 ? (int)op : -1;
}

// These two, of outputs as find_part and find_parts have found them. The GIL is not let go of between.
static int any_cannot_be_counted(PyObject* o) {
  if (!PyList_Check(o)) return cannot_count(o);
  for (Py_ssize_t i = 0; i < PyList_Size(o); ++i)
    if (any_cannot_be_counted(PyList_GetItem(o, i))) return 1;
  return 0;
}

static void count_changes(PyObject* o) {
  if (!PyList_Check(o)) return count_change(o);
  for (Py_ssize_t i = 0; i < PyList_Size(o); ++i) count_changes(PyList_GetItem(o, i));
}

// With `ticket`, submits it.
static int carry_out(const FastCollective* self, uint32_t op, PyObject* source, PyObject* target, int32_t root,
                     PyObject* redop, int64_t ns, void** addresses, void** ticket) {
  const int at_root = root == self->rank;
  const unsigned shape = shapes[op];
  const int rooted =
      !(shape & kReadsAtRoot) != !(shape & kReadsElsewhere) || !(shape & kWritesAtRoot) != !(shape & kWritesElsewhere);
  const int from_each = shape & kFromEach, to_each = shape & kToEach;
  const int has_source = shape & (at_root ? kReadsAtRoot : kReadsElsewhere);
  const int has_target = shape & (at_root ? kWritesAtRoot : kWritesElsewhere);
  if (!unwatched()) return kSlowPath;
  if (rooted ? root < 0 || root >= self->size : root != -1) return kSlowPath;
  // Lists that are for the root alone: the slow path says what is wrong with others.
  if ((from_each && !has_source && !is_nothing(source)) || (to_each && !has_target && !is_nothing(target)))
    return kSlowPath;
  Side from = {0}, to = {0};
  int found = 1;
  if (has_source) found = from_each ? find_parts(source, self->size, addresses, &from) : find_part(source, &from);
  if (found == 1 && has_target)
    found = to_each                          ? find_parts(target, self->size, addresses + self->size, &to)
            : has_source && target == source ? (to = from, 1)
                                             : find_part(target, &to);
  if (found != 1) return found < 0 ? found : kSlowPath;
  const Side* const part = has_source ? &from : &to;
  uint64_t kind = (uint64_t)op << 24;
  if (!has_source && !has_target) {
    kind |= 1 << 16;
  } else {
    if (!part->count || (has_source && has_target && (from.count != to.count || from.code != to.code)))
      return kSlowPath;
    kind |= part->code | (uint64_t)item_bytes[part->code] << 16;
    if (shape & kReduces) {
      const int code = reduce_op(redop, part->code);
      if (code < 0) return PyErr_Occurred() ? -1 : kSlowPath;
      kind |= (uint64_t)code << 8;
    }
    if (from.listed) kind |= kListedInputs;
    if (to.listed) kind |= kListedOutputs;
  }
  // Of all_to_all's outputs only those given as a list count as changed, as gloo has it.
  if (shape & kCounted && has_target && !(from_each && to_each && !to.listed)) {
    if (any_cannot_be_counted(target)) return kSlowPath;
    count_changes(target);
  }
  int status;
  Py_BEGIN_ALLOW_THREADS if (ticket) status =
      self->submit(self->handle, kind, root, from.data, to.data, part->count, ns, ticket);
  else status = self->function(self->handle, kind, root, from.data, to.data, part->count, ns);
  Py_END_ALLOW_THREADS return status;
}

static PyObject* call(PyObject* me, PyObject* const* args, Py_ssize_t n, Py_ssize_t wanted, void** ticket) {
  const FastCollective* const self = (const FastCollective*)me;
  if (n != wanted) return PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", wanted, n), NULL;
  const unsigned long op = PyLong_AsUnsignedLong(args[0]);
  const int32_t root = (int32_t)PyLong_AsLong(args[3]);
  const int64_t ns = PyLong_AsLongLong(args[5]);
  if (PyErr_Occurred()) return NULL;
  if (op >= ops) return PyErr_Format(PyExc_ValueError, "no operation %lu in SHAPES of call.py", op), NULL;
  if (!self->handle || (ticket && !self->submit)) return PyLong_FromLong(kSlowPath);
  void* few[2 * kFew];
  void** const addresses = self->size <= kFew ? few : PyMem_Malloc(2 * (size_t)self->size * sizeof(void*));
  if (!addresses) return PyErr_NoMemory();
  PyObject* const source = hold_still(args[1]);
  PyObject* const target = source ? hold_still(args[2]) : NULL;
  const int status = target ? carry_out(self, (uint32_t)op, source, target, root, args[4], ns, addresses, ticket) : -1;
  if (target) let_go(target);
  if (source) let_go(source);
  if (addresses != few) PyMem_Free(addresses);
  return status < 0 ? NULL : PyLong_FromLong(status);
}

static PyObject* run(PyObject* me, PyObject* const* args, Py_ssize_t n) { return call(me, args, n, 6, NULL); }

static PyObject* submit(PyObject* me, PyObject* const* args, Py_ssize_t n) {
  void* ticket = NULL;
  PyObject* const status = call(me, args, n, 7, &ticket);
  if (!ticket) return status;
  PyObject* const number = PyLong_FromVoidPtr(ticket);
  const int failed = !number || PyList_Append(args[6], number);
  Py_XDECREF(number);
  if (!failed) return status;
  Py_XDECREF(status);
  return NULL;
}

static PyObject* stop(PyObject* me, PyObject* nothing) {
  (void)nothing;
  ((FastCollective*)me)->handle = NULL;
  Py_RETURN_NONE;
}

static PyObject* make(PyTypeObject* type, PyObject* args, PyObject* keywords) {
  (void)keywords;
  PyObject *function, *handle, *to_submit = NULL;
  Py_ssize_t rank, size;
  if (!PyArg_ParseTuple(args, "OOnn|O", &function, &handle, &rank, &size, &to_submit)) return NULL;
  void *at = PyLong_AsVoidPtr(function), *group = PyLong_AsVoidPtr(handle);
  void* const submit_at = to_submit ? PyLong_AsVoidPtr(to_submit) : NULL;
  if (PyErr_Occurred()) return NULL;
  if (!at || rank < 0 || rank >= size) return PyErr_SetString(PyExc_ValueError, "no function, or no such rank"), NULL;
  allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
  FastCollective* const made = (FastCollective*)allocate(type, 0);
  if (!made) return NULL;
  *(void**)&made->function = at;
  *(void**)&made->submit = submit_at;
  made->handle = group, made->rank = rank, made->size = size;
  return (PyObject*)made;
}

static PyMethodDef methods[] = {
    {"run", (PyCFunction)(void (*)(void))run, METH_FASTCALL, NULL},
    {"submit", (PyCFunction)(void (*)(void))submit, METH_FASTCALL, NULL},
    {"close", stop, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot slots[] = {
    {Py_tp_new, make},
    {Py_tp_dealloc, drop_object},
    {Py_tp_methods, methods},
    {0, NULL},
};
PyType_Spec fast_collective_type = {"c10d_custom.native._fast.FastCollective", sizeof(FastCollective), 0,
                                    Py_TPFLAGS_DEFAULT, slots};

PyObject* set_up_kinds(PyObject* self, PyObject* const* args, Py_ssize_t n) {
  (void)self;
  char *table, *of_ops;
  Py_ssize_t bytes, count;
  if (n != 2) return PyErr_Format(PyExc_TypeError, "expected 2 arguments, got %zd", n), NULL;
  if (PyBytes_AsStringAndSize(args[0], &table, &bytes) || PyBytes_AsStringAndSize(args[1], &of_ops, &count))
    return NULL;
  if (bytes > 2 * kCodes) return PyErr_SetString(PyExc_ValueError, "too many dtypes"), NULL;
  if (count > kMostOps) return PyErr_SetString(PyExc_ValueError, "too many operations"), NULL;
  for (Py_ssize_t i = 0; i + 1 < bytes; i += 2)
    item_bytes[i / 2] = (uint8_t)table[i], reduces[i / 2] = (uint8_t)table[i + 1];
  for (Py_ssize_t i = 0; i < count; ++i) shapes[i] = (uint8_t)of_ops[i];
  ops = (unsigned long)count;
  Py_RETURN_NONE;
}
