// Calls from Python into the core without ctypes, which takes several times as long: for the few functions that carry
// out a collective (fast_collective.h) or a message in a call or two. And what they need of tensors: raw_tensor.h. The
// stable ABI: one build serves every Python.
#include "fast_collective.h"
#include "raw_tensor.h"

// Of a number, of bytes, or None.
static void* address(PyObject* o) {
  return o == Py_None ? NULL : PyBytes_Check(o) ? PyBytes_AsString(o) : PyLong_AsVoidPtr(o);
}

static int expect(Py_ssize_t n, Py_ssize_t wanted) {
  if (n == wanted) return 1;
  PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", wanted, n);
  return 0;
}

// message(function, handle, kind, peer, tag, data, count, ns, wait_ns, list): of c10d_message. True if it is over; else
// the ticket is appended to the list, unless the group is closed.
static PyObject* message(PyObject* self, PyObject* const* args, Py_ssize_t n) {
  (void)self;
  if (!expect(n, 10)) return NULL;
  int (*function)(void*, uint64_t, int32_t, int64_t, void*, uint64_t, int64_t, int64_t, void**);
  *(void**)&function = PyLong_AsVoidPtr(args[0]);
  void* handle = address(args[1]);
  const uint64_t kind = PyLong_AsUnsignedLongLong(args[2]);
  const int32_t peer = (int32_t)PyLong_AsLong(args[3]);
  const int64_t tag = PyLong_AsLongLong(args[4]);
  void* data = address(args[5]);
  const uint64_t count = PyLong_AsUnsignedLongLong(args[6]);
  const int64_t ns = PyLong_AsLongLong(args[7]);
  const int64_t wait_ns = PyLong_AsLongLong(args[8]);
  if (PyErr_Occurred()) return NULL;
  void* ticket;
  int status;
  Py_BEGIN_ALLOW_THREADS status = function(handle, kind, peer, tag, data, count, ns, wait_ns, &ticket);
  Py_END_ALLOW_THREADS if (!status) Py_RETURN_TRUE;
  if (ticket) {
    PyObject* const number = PyLong_FromVoidPtr(ticket);
    const int failed = !number || PyList_Append(args[9], number);
    Py_XDECREF(number);
    if (failed) return NULL;
  }
  Py_RETURN_FALSE;
}

// settle(function, handle, ticket, ns, may_run): of c10d_settle.
static PyObject* settle(PyObject* self, PyObject* const* args, Py_ssize_t n) {
  (void)self;
  if (!expect(n, 5)) return NULL;
  int (*function)(void*, void*, int64_t, int);
  *(void**)&function = PyLong_AsVoidPtr(args[0]);
  void* handle = address(args[1]);
  void* ticket = address(args[2]);
  const int64_t ns = PyLong_AsLongLong(args[3]);
  const int may_run = (int)PyLong_AsLong(args[4]);
  if (PyErr_Occurred()) return NULL;
  int status;
  Py_BEGIN_ALLOW_THREADS status = function(handle, ticket, ns, may_run);
  Py_END_ALLOW_THREADS return PyLong_FromLong(status);
}

static PyMethodDef methods[] = {
    {"message", (PyCFunction)(void (*)(void))message, METH_FASTCALL, NULL},
    {"settle", (PyCFunction)(void (*)(void))settle, METH_FASTCALL, NULL},
    {"set_up", (PyCFunction)(void (*)(void))raw_tensor_set_up, METH_FASTCALL, NULL},
    {"set_up_kinds", (PyCFunction)(void (*)(void))set_up_kinds, METH_FASTCALL, NULL},
    {"raw_tensor", raw_tensor, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_fast", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__fast(void) {
  PyObject* const made = PyModule_Create(&module);
  if (!made || !add_fast_collective(made)) return made;
  Py_DECREF(made);
  return NULL;
}
