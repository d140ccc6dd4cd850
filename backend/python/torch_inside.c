#include "torch_inside.h"

enum { kTypes = 4, kNumbers = 15 };

// Of the process: torch is there once.
static Py_ssize_t impl_at, keys_at, dtype_at, offset_at;
static uint64_t cpu_keys, plain_keys, direct_keys, counted_keys, harmless, inference;
static char (*requires_grad)(const void* impl);  // bool, in C++
static char (*grad_enabled)(void);
static void (*bump_version)(const void* tensor);  // a reference to at::Tensor, which is a pointer to its TensorImpl
static void* (*find)(void*, const char*);
static void* library;
static const char* word_name;
static PyTypeObject *tensor, *types[kTypes];

// libc10's thread-local word: the keys that this thread includes, then those that it excludes; each as it differs from
// what a thread begins with.
static __thread const uint64_t* word;

static uint64_t included(void) {
  if (!word && find) word = find(library, word_name);  // not set up: torch hides it
  return word ? *word : ~0ull;
}

int unwatched(void) { return !(included() & ~harmless); }

static const char* impl_of(PyObject* o) { return *(const char**)((const char*)o + impl_at); }
static uint64_t keys_of(const char* impl) { return *(const uint64_t*)(impl + keys_at); }

int is_tensor_itself(PyObject* o) {
  for (int i = 0; i < kTypes && types[i]; ++i)
    if (Py_TYPE(o) == types[i]) return 1;
  return 0;
}

uint16_t dtype_number(PyObject* o) { return *(const uint16_t*)(impl_of(o) + dtype_at); }

uint64_t storage_offset(PyObject* o) { return *(const uint64_t*)(impl_of(o) + offset_at); }

static int in_graph(const char* impl) { return requires_grad(impl) && grad_enabled(); }

int is_plain(PyObject* o) {
  if (!is_tensor_itself(o)) return 0;
  const char* const impl = impl_of(o);
  const uint64_t keys = impl ? keys_of(impl) : 0;
  return !(keys & ~plain_keys) && (keys & cpu_keys) == cpu_keys && !in_graph(impl);
}

int cannot_count(PyObject* o) { return !(keys_of(impl_of(o)) & counted_keys) && !(included() & inference); }

void count_change(PyObject* o) {
  if (keys_of(impl_of(o)) & counted_keys) bump_version((const char*)o + impl_at);
}

#ifdef Py_GIL_DISABLED
PyObject* hold_still(PyObject* o) {
  if (!PyList_Check(o)) return Py_IncRef(o), o;
  PyObject* const list = PyList_GetSlice(o, 0, PTRDIFF_MAX);
  if (!list || PyList_Size(list) != 1 || !PyList_Check(PyList_GetItem(list, 0))) return list;
  PyObject* const inner = PyList_GetSlice(PyList_GetItem(list, 0), 0, PTRDIFF_MAX);
  if (inner && !PyList_SetItem(list, 0, inner)) return list;
  return Py_DecRef(list), NULL;
}
#endif

static int direct(PyObject* o, int depth) {
  if (PyList_Check(o)) {
    for (Py_ssize_t i = 0; i < PyList_Size(o); ++i)
      if (!depth || !direct(PyList_GetItem(o, i), depth - 1)) return 0;
    return 1;
  }
  if (PyTuple_Check(o)) {
    for (Py_ssize_t i = 0; i < PyTuple_Size(o); ++i)
      if (!depth || !direct(PyTuple_GetItem(o, i), depth - 1)) return 0;
    return 1;
  }
  if (!is_tensor_itself(o)) return !PyType_IsSubtype(Py_TYPE(o), tensor);
  const char* const impl = impl_of(o);
  return impl && !(keys_of(impl) & ~direct_keys) && !in_graph(impl);
}

PyObject* goes_direct(PyObject* self, PyObject* const* args, Py_ssize_t n) {
  (void)self;
  int all = unwatched();
  for (Py_ssize_t i = 0; all && i < n; ++i) {
    PyObject* const still = hold_still(args[i]);
    if (!still) return NULL;
    all = direct(still, 3);
    let_go(still);
  }
  if (all) Py_RETURN_TRUE;
  Py_RETURN_FALSE;
}

PyObject* nobody_watches(PyObject* self, PyObject* nothing) {
  (void)self;
  (void)nothing;
  if (unwatched()) Py_RETURN_TRUE;
  Py_RETURN_FALSE;
}

PyObject* set_up_inside(PyObject* self, PyObject* const* args, Py_ssize_t n) {
  (void)self;
  if (n != kNumbers + 3) return PyErr_SetString(PyExc_TypeError, "expected 18 arguments"), NULL;
  uint64_t number[kNumbers];
  for (int i = 0; i < kNumbers; ++i) number[i] = PyLong_AsUnsignedLongLong(args[i]);
  const Py_ssize_t several = PyTuple_Size(args[kNumbers + 2]);
  char* name;
  Py_ssize_t bytes;
  if (PyErr_Occurred() || PyBytes_AsStringAndSize(args[kNumbers], &name, &bytes)) return NULL;
  if (several > kTypes) return PyErr_SetString(PyExc_ValueError, "too many types"), NULL;
  impl_at = (Py_ssize_t)number[0], keys_at = (Py_ssize_t)number[1], dtype_at = (Py_ssize_t)number[2];
  offset_at = (Py_ssize_t)number[3];
  cpu_keys = number[4], plain_keys = number[5], direct_keys = number[6], counted_keys = number[7];
  harmless = number[8], inference = number[9];
  requires_grad = (char (*)(const void*))number[10], grad_enabled = (char (*)(void))number[11];
  bump_version = (void (*)(const void*))number[12], find = (void* (*)(void*, const char*))number[13];
  library = (void*)number[14];
  Py_INCREF(args[kNumbers]);
  word_name = name, word = NULL;
  Py_INCREF(args[kNumbers + 1]);
  tensor = (PyTypeObject*)args[kNumbers + 1];
  for (Py_ssize_t i = 0; i < several; ++i) {
    types[i] = (PyTypeObject*)PyTuple_GetItem(args[kNumbers + 2], i);
    Py_INCREF(types[i]);
  }
  if (!find || !find(library, word_name)) return PyErr_SetString(PyExc_ValueError, "libc10 has no such word"), NULL;
  Py_RETURN_NONE;
}
