// An operation under way in the core, as Python holds it: what is asked of each, without a frame of Python's.
#include "core.h"

typedef struct {
  PyObject_HEAD void *handle, *ticket;  // null: none yet
  int status;
} CoreTicket;

// hold(handle, at): takes over the ticket whose address is at[0], and puts None there.
static PyObject* hold(PyObject* me, PyObject* const* args, Py_ssize_t n) {
  CoreTicket* const self = (CoreTicket*)me;
  if (n != 2) return PyErr_SetString(PyExc_TypeError, "expected 2 arguments"), NULL;
  PyObject* const first = PyLong_FromLong(0);
  PyObject* const number = first ? PyObject_GetItem(args[1], first) : NULL;
  void* const handle = args[0] == Py_None ? NULL : PyLong_AsVoidPtr(args[0]);
  void* const ticket = number ? PyLong_AsVoidPtr(number) : NULL;
  const int failed = PyErr_Occurred() || PyObject_SetItem(args[1], first, Py_None);
  Py_XDECREF(number);
  Py_XDECREF(first);
  if (failed) return NULL;
  self->handle = handle, self->ticket = ticket, self->status = kPending;
  Py_RETURN_NONE;
}

static PyObject* said(int yes) {
  if (yes) Py_RETURN_TRUE;
  Py_RETURN_FALSE;
}

static PyObject* done(PyObject* me, PyObject* nothing) {
  (void)nothing;
  CoreTicket* const self = (CoreTicket*)me;
  if (self->status == kPending && self->ticket) self->status = core.test(self->ticket);
  return said(self->status != kPending);
}

// settle(ns, may_run): of c10d_settle; done().
static PyObject* wait(PyObject* me, PyObject* const* args, Py_ssize_t n) {
  CoreTicket* const self = (CoreTicket*)me;
  if (n != 2) return PyErr_SetString(PyExc_TypeError, "expected 2 arguments"), NULL;
  const int64_t ns = PyLong_AsLongLong(args[0]);
  const int may_run = (int)PyLong_AsLong(args[1]);
  if (PyErr_Occurred()) return NULL;
  if (self->status == kPending && self->ticket) {
    int status;
    Py_BEGIN_ALLOW_THREADS status = core.settle(self->handle, self->ticket, ns, may_run);
    Py_END_ALLOW_THREADS self->status = status;
  }
  return said(self->status != kPending);
}

static PyObject* make(PyTypeObject* type, PyObject* args, PyObject* keywords) {
  (void)args, (void)keywords;
  return ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
}

static void drop(PyObject* me) {
  CoreTicket* const self = (CoreTicket*)me;
  if (self->ticket) core.release(self->ticket);
  drop_object(me);
}

static PyMethodDef methods[] = {
    {"hold", (PyCFunction)(void (*)(void))hold, METH_FASTCALL, NULL},
    {"done", done, METH_NOARGS, NULL},
    {"settle", (PyCFunction)(void (*)(void))wait, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef members[] = {
    {"address", Py_T_PYSSIZET, offsetof(CoreTicket, ticket), Py_READONLY, NULL},
    {"status", Py_T_INT, offsetof(CoreTicket, status), Py_READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot slots[] = {
    {Py_tp_new, make}, {Py_tp_dealloc, drop}, {Py_tp_methods, methods}, {Py_tp_members, members}, {0, NULL},
};
PyType_Spec ticket_type = {"c10d_custom.native._fast.CoreTicket", sizeof(CoreTicket), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, slots};
