#include "raw_tensor.h"

#include "dlpack.h"

enum { kTypes = 4, kDlCodes = 32, kWidths = 8 };

// Of the process: torch is there once.
static DLPackExchange* exchange;
static PyObject* types[kTypes];
static PyObject *is_neg, *is_conj;
static uint8_t core_code[kDlCodes][kWidths];  // at [code][log2 of bits]: 1 + ours

static uint8_t* place(uint8_t code, uint8_t bits) {
  const int width = bits ? __builtin_ctz(bits) : 0;
  return code < kDlCodes && bits == 1u << width ? &core_code[code][width] : NULL;
}

static int contiguous(const DLTensor* t, uint64_t* count) {
  int64_t n = 1;
  int ordered = 1;
  for (int i = t->ndim - 1; i >= 0; --i) {
    ordered &= t->shape[i] == 1 || !t->strides || t->strides[i] == n;
    n *= t->shape[i];
  }
  *count = (uint64_t)n;
  return ordered || !n;
}

// 1: it answers no, 0: yes, -1: an exception is set.
static int denies(PyObject* question, PyObject* t) {
  PyObject* answer = PyObject_CallFunctionObjArgs(question, t, NULL);
  if (!answer) return -1;
  Py_DECREF(answer);
  return answer == Py_False;
}

int raw_tensor_find(PyObject* o, RawTensor* found) {
  int known = 0;
  for (int i = 0; i < kTypes && types[i]; ++i) known |= (PyObject*)Py_TYPE(o) == types[i];
  if (!known) return 0;
  DLTensor t;
  if (exchange->tensor_from_object(o, &t)) {
    PyErr_Clear();  // no memory of its own, or a dtype that DLPack does not know
    return 0;
  }
  const uint8_t* code = place(t.code, t.bits);
  if (t.device_type != kDLCPU || t.lanes != 1 || !code || !*code || !contiguous(&t, &found->count)) return 0;
  const int plain = denies(is_neg, o);
  if (plain != 1) return plain;
  if (t.code == kDLComplex) {
    const int as_it_is = denies(is_conj, o);
    if (as_it_is != 1) return as_it_is;
  }
  found->data = (char*)t.data + t.byte_offset;
  found->rows = t.ndim ? (uint64_t)t.shape[0] : 0;
  found->code = (uint8_t)(*code - 1);
  return 1;
}

PyObject* raw_tensor_set_up(PyObject* self, PyObject* const* args, Py_ssize_t n) {
  (void)self;
  if (n != 5) return PyErr_SetString(PyExc_TypeError, "expected 5 arguments"), NULL;
  DLPackExchange* given = PyCapsule_GetPointer(args[0], "dlpack_exchange_api");
  while (given && given->major != 1) given = given->older;
  const Py_ssize_t several = PyTuple_Size(args[1]);
  char* table;
  Py_ssize_t bytes;
  if (PyErr_Occurred() || PyBytes_AsStringAndSize(args[4], &table, &bytes)) return NULL;
  if (!given || !given->tensor_from_object || several > kTypes)
    return PyErr_SetString(PyExc_ValueError, "no exchange of DLPack 1.x"), NULL;
  for (Py_ssize_t i = 0; i + 2 < bytes; i += 3) {
    uint8_t* at = place((uint8_t)table[i], (uint8_t)table[i + 1]);
    if (!at) return PyErr_SetString(PyExc_ValueError, "no such dtype"), NULL;
    *at = (uint8_t)(table[i + 2] + 1);
  }
  exchange = given;
  for (Py_ssize_t i = 0; i < several; ++i) types[i] = PyTuple_GetItem(args[1], i), Py_INCREF(types[i]);
  is_neg = args[2], is_conj = args[3];
  Py_INCREF(is_neg);
  Py_INCREF(is_conj);
  Py_RETURN_NONE;
}

PyObject* raw_tensor(PyObject* self, PyObject* o) {
  (void)self;
  RawTensor f;
  const int st = raw_tensor_find(o, &f);
  if (st < 0) return NULL;
  if (!st) Py_RETURN_NONE;
  PyObject *data = PyLong_FromVoidPtr(f.data), *count = PyLong_FromUnsignedLongLong(f.count),
           *code = PyLong_FromLong(f.code);
  PyObject* all = data && count && code ? PyTuple_Pack(3, data, count, code) : NULL;
  Py_XDECREF(data);
  Py_XDECREF(count);
  Py_XDECREF(code);
  return all;
}
