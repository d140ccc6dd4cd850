// Calls from Python into the core without ctypes, which takes several times as long: for the few functions that carry
// out a collective (fast_collective.c) or a message in a call or two. And what they need of tensors: raw_tensor.h. The
// stable ABI: one build serves every Python that has a global interpreter lock.
#include "core.h"
#include "raw_tensor.h"
#include "torch_inside.h"

Core core;

static const uint64_t kReceived = 1ull << 32;  // as in backend/shm/api.h, which is C++

// Of a number, of bytes, or None.
static void* address(PyObject* o) {
  return o == Py_None ? NULL : PyBytes_Check(o) ? PyBytes_AsString(o) : PyLong_AsVoidPtr(o);
}

static int expect(Py_ssize_t n, Py_ssize_t wanted) {
  if (n == wanted) return 1;
  PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", wanted, n);
  return 0;
}

// message(function, handle, ranks, tensors, is_recv, peer, tag, ns, wait_ns, list): of c10d_message. 0: it is over. 1:
// the ticket's address is appended to the list, unless the group is closed. 2: nothing was begun, for `tensors` is no
// list of one that raw_tensor.h knows, or has no elements, or there is no such peer, or somebody watches torch's
// dispatcher.
static PyObject* message(PyObject* self, PyObject* const* args, Py_ssize_t n) {
  (void)self;
  if (!expect(n, 10)) return NULL;
  int (*function)(void*, uint64_t, int32_t, int64_t, void*, uint64_t, int64_t, int64_t, void**);
  *(void**)&function = PyLong_AsVoidPtr(args[0]);
  void* handle = address(args[1]);
  const long ranks = PyLong_AsLong(args[2]), received = PyLong_AsLong(args[4]);
  if (PyErr_Occurred()) return NULL;
  RawTensor t;
  const int known = unwatched() && PyList_Check(args[3]) && PyList_Size(args[3]) == 1 && PyLong_Check(args[5]) &&
                            PyLong_Check(args[6])
                        ? raw_tensor_find(PyList_GetItem(args[3], 0), &t)
                        : 0;
  if (known < 0) return NULL;
  const long peer = known ? PyLong_AsLong(args[5]) : -1;
  const int64_t tag = known ? PyLong_AsLongLong(args[6]) : 0;
  const int64_t ns = PyLong_AsLongLong(args[7]), wait_ns = PyLong_AsLongLong(args[8]);
  if (PyErr_Occurred()) return NULL;
  if (!known || !t.count || peer < 0 || peer >= ranks) return PyLong_FromLong(2);
  const uint64_t kind = t.code | (uint64_t)bytes_of_an_item(t.code) << 16 | (received ? kReceived : 0);
  void* ticket;
  int status;
  Py_BEGIN_ALLOW_THREADS status = function(handle, kind, (int32_t)peer, tag, t.data, t.count, ns, wait_ns, &ticket);
  Py_END_ALLOW_THREADS if (ticket) {
    PyObject* const number = PyLong_FromVoidPtr(ticket);
    const int failed = !number || PyList_Append(args[9], number);
    Py_XDECREF(number);
    if (failed) return NULL;
  }
  return PyLong_FromLong(status != 0);
}

// ask(function, address): what an int (*)(void*) answers at once, with the GIL held.
static PyObject* ask(PyObject* self, PyObject* const* args, Py_ssize_t n) {
  (void)self;
  if (!expect(n, 2)) return NULL;
  int (*function)(void*);
  *(void**)&function = PyLong_AsVoidPtr(args[0]);
  void* of = address(args[1]);
  return PyErr_Occurred() ? NULL : PyLong_FromLong(function(of));
}

// set_up_core(addresses...): before all others; those of Core, in its order.
static PyObject* set_up_core(PyObject* self, PyObject* const* args, Py_ssize_t n) {
  (void)self;
  if (!expect(n, sizeof core / sizeof(void*))) return NULL;
  for (Py_ssize_t i = 0; i < n; ++i) ((void**)&core)[i] = PyLong_AsVoidPtr(args[i]);
  if (PyErr_Occurred()) return NULL;
  Py_RETURN_NONE;
}

void drop_object(PyObject* me) {
  PyTypeObject* const type = Py_TYPE(me);
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(me);
  Py_DECREF(type);
}

static int add(PyObject* module, const char* name, PyType_Spec* spec) {
  PyObject* const type = PyType_FromSpec(spec);
  const int status = type ? PyModule_AddObjectRef(module, name, type) : -1;
  Py_XDECREF(type);
  return status;
}

static PyMethodDef methods[] = {
    {"message", (PyCFunction)(void (*)(void))message, METH_FASTCALL, NULL},
    {"ask", (PyCFunction)(void (*)(void))ask, METH_FASTCALL, NULL},
    {"set_up_core", (PyCFunction)(void (*)(void))set_up_core, METH_FASTCALL, NULL},
    {"set_up", (PyCFunction)(void (*)(void))raw_tensor_set_up, METH_FASTCALL, NULL},
    {"set_up_kinds", (PyCFunction)(void (*)(void))set_up_kinds, METH_FASTCALL, NULL},
    {"set_up_inside", (PyCFunction)(void (*)(void))set_up_inside, METH_FASTCALL, NULL},
    {"goes_direct", (PyCFunction)(void (*)(void))goes_direct, METH_FASTCALL, NULL},
    {"nobody_watches", nobody_watches, METH_NOARGS, NULL},
    {"raw_tensor", raw_tensor, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_fast", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__fast(void) {
  PyObject* const made = PyModule_Create(&module);
#ifdef Py_GIL_DISABLED
  // Else Python would turn the lock on for the whole process. What is set up once, is set up amid the import of
  // c10d_custom.native.direct, which one thread alone is in; a group's calls, its owner orders (transport/tickets.py).
  if (made) PyUnstable_Module_SetGIL(made, Py_MOD_GIL_NOT_USED);
#endif
  if (!made || (!add(made, "FastCollective", &fast_collective_type) && !add(made, "CoreTicket", &ticket_type) &&
                !add(made, "CoreWindow", &window_type)))
    return made;
  Py_DECREF(made);
  return NULL;
}
