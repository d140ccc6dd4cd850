#include "raw_tensor.h"

#include "torch_inside.h"

// The part of DLPack 1.x that is used here (https://dmlc.github.io/dlpack/latest/c_api.html), by its binary
// interface.
enum { kDLCPU = 1 };

typedef struct {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t code, bits;  // of the dtype
  uint16_t lanes;
  int64_t *shape, *strides;  // strides in elements; null: contiguous
  uint64_t byte_offset;
} DLTensor;

typedef struct DLPackExchange {
  uint32_t major, minor;
  struct DLPackExchange* older;
  void (*others[3])(void);
  // Fills in what is valid as long as the tensor lives. Not 0: an exception is set.
  int (*tensor_from_object)(void* object, DLTensor* out);
  void (*current_stream)(void);
} DLPackExchange;

enum { kDtypes = 256 };

// Of the process: torch is there once.
static DLPackExchange* exchange;
static uint8_t core_code[kDtypes];  // at torch's number of a dtype: 1 + ours

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

int raw_tensor_find(PyObject* o, RawTensor* found) {
  if (!exchange || !is_plain(o)) return 0;
  DLTensor t;
  if (exchange->tensor_from_object(o, &t)) {
    PyErr_Clear();  // no memory of its own, or a dtype that DLPack does not know
    return 0;
  }
  // By torch's number: DLPack shows dtypes of less than a byte (uint4) as those of a byte.
  const uint16_t dtype = dtype_number(o);
  const uint8_t code = dtype < kDtypes ? core_code[dtype] : 0;
  if (t.device_type != kDLCPU || t.lanes != 1 || !code || !contiguous(&t, &found->count)) return 0;
  found->data = (char*)t.data + t.byte_offset;
  // A storage that has been freed (resized to 0) begins at null, and its tensors as far behind that as they lie in it.
  if (found->count && (uintptr_t)found->data == storage_offset(o) * (t.bits / 8)) return 0;
  found->rows = t.ndim ? (uint64_t)t.shape[0] : 0;
  found->code = (uint8_t)(code - 1);
  return 1;
}

PyObject* raw_tensor_set_up(PyObject* self, PyObject* const* args, Py_ssize_t n) {
  (void)self;
  if (n != 2) return PyErr_SetString(PyExc_TypeError, "expected 2 arguments"), NULL;
  DLPackExchange* given = PyCapsule_GetPointer(args[0], "dlpack_exchange_api");
  while (given && given->major != 1) given = given->older;
  char* table;
  Py_ssize_t bytes;
  if (PyErr_Occurred() || PyBytes_AsStringAndSize(args[1], &table, &bytes)) return NULL;
  if (!given || !given->tensor_from_object) return PyErr_SetString(PyExc_ValueError, "no exchange of DLPack 1.x"), NULL;
  for (Py_ssize_t i = 0; i + 1 < bytes; i += 2) core_code[(uint8_t)table[i]] = (uint8_t)(table[i + 1] + 1);
  exchange = given;
  Py_RETURN_NONE;
}

PyObject* raw_tensor(PyObject* self, PyObject* o) {
  (void)self;
  RawTensor f;
  const int st = raw_tensor_find(o, &f);
  if (st < 0) return NULL;
  if (!st) Py_RETURN_NONE;
  return Py_BuildValue("KKi", (unsigned long long)(uintptr_t)f.data, (unsigned long long)f.count, (int)f.code);
}
