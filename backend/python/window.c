// A window of the core (backend/shm/window.h), as Python holds it: what its calls do in the common case, without a
// frame of ctypes'.
#include "core.h"
#include "raw_tensor.h"
#include "torch_inside.h"

enum { kFewBytes = 64 << 10 };  // of a put, up to which other threads of Python wait for it

typedef struct {
  PyObject_HEAD void* window;
} CoreWindow;

// 1 and the number; 0: it is none, or none from 0 to `most`.
static int find_number(PyObject* o, int64_t most, int64_t* number) {
  if (!PyLong_Check(o)) return 0;
  *number = PyLong_AsLongLong(o);
  if (!PyErr_Occurred()) return *number >= 0 && *number <= most;
  PyErr_Clear();
  return 0;
}

// put(tensor, rank, offset): kOk, another Status, or kSlowPath: nothing was done.
static PyObject* put(PyObject* me, PyObject* const* args, Py_ssize_t n) {
  void* const window = ((CoreWindow*)me)->window;
  if (n != 3) return PyErr_SetString(PyExc_TypeError, "expected 3 arguments"), NULL;
  int64_t rank, offset;
  RawTensor t;
  const int found = unwatched() && find_number(args[1], INT32_MAX, &rank) && find_number(args[2], INT64_MAX, &offset)
                        ? raw_tensor_find(args[0], &t)
                        : 0;
  if (found != 1) return found < 0 ? NULL : PyLong_FromLong(kSlowPath);
  int status;
  if (t.count * bytes_of_an_item(t.code) <= kFewBytes) {
    status = core.put(window, (uint32_t)rank, t.code, t.data, t.count, (uint64_t)offset);
  } else {
    Py_BEGIN_ALLOW_THREADS status = core.put(window, (uint32_t)rank, t.code, t.data, t.count, (uint64_t)offset);
    Py_END_ALLOW_THREADS
  }
  return PyLong_FromLong(status);
}

// signal(rank): as put.
static PyObject* signal(PyObject* me, PyObject* peer) {
  int64_t rank;
  if (!find_number(peer, INT32_MAX, &rank)) return PyLong_FromLong(kSlowPath);
  return PyLong_FromLong(core.signal(((CoreWindow*)me)->window, (uint32_t)rank));
}

// wait(rank, ns): as put.
static PyObject* wait(PyObject* me, PyObject* const* args, Py_ssize_t n) {
  if (n != 2) return PyErr_SetString(PyExc_TypeError, "expected 2 arguments"), NULL;
  int64_t rank, ns;
  if (!find_number(args[0], INT32_MAX, &rank) || !find_number(args[1], INT64_MAX, &ns))
    return PyLong_FromLong(kSlowPath);
  void* const window = ((CoreWindow*)me)->window;
  int status;
  Py_BEGIN_ALLOW_THREADS status = core.wait(window, (uint32_t)rank, ns);
  Py_END_ALLOW_THREADS return PyLong_FromLong(status);
}

static PyObject* make(PyTypeObject* type, PyObject* args, PyObject* keywords) {
  (void)keywords;
  PyObject* address;
  if (!PyArg_ParseTuple(args, "O", &address)) return NULL;
  void* const window = PyLong_AsVoidPtr(address);
  if (PyErr_Occurred()) return NULL;
  if (!window) return PyErr_SetString(PyExc_ValueError, "no window"), NULL;
  CoreWindow* const made = (CoreWindow*)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
  if (made) made->window = window;
  return (PyObject*)made;
}

static void drop(PyObject* me) {
  CoreWindow* const self = (CoreWindow*)me;
  if (self->window) core.free_window(self->window);
  drop_object(me);
}

static PyMethodDef methods[] = {
    {"put", (PyCFunction)(void (*)(void))put, METH_FASTCALL, NULL},
    {"signal", signal, METH_O, NULL},
    {"wait", (PyCFunction)(void (*)(void))wait, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef members[] = {
    {"address", Py_T_PYSSIZET, offsetof(CoreWindow, window), Py_READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot slots[] = {
    {Py_tp_new, make}, {Py_tp_dealloc, drop}, {Py_tp_methods, methods}, {Py_tp_members, members}, {0, NULL},
};
PyType_Spec window_type = {"c10d_custom.native._fast.CoreWindow", sizeof(CoreWindow), 0, Py_TPFLAGS_DEFAULT, slots};
