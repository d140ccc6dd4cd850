// What the core needs of a tensor, read through the table of functions that torch.Tensor has for that
// (__dlpack_c_exchange_api__), where Python's way asks the tensor nine questions.
#pragma once
#include "python_abi.h"

// A contiguous CPU tensor whose bytes are its values, and which autograd need not be told of. rows: its first
// dimension; 0 of a scalar.
typedef struct {
  char* data;
  uint64_t count, rows;
  uint8_t code;  // the core's, of its dtype
} RawTensor;

// 1: found; 0: o is no such tensor; -1: an exception is set.
int raw_tensor_find(PyObject* o, RawTensor* found);

// set_up(exchange, dtypes): before all others, and after set_up_inside. exchange: torch.Tensor's capsule; dtypes: two
// bytes of each: torch's number of it, the core's code.
PyObject* raw_tensor_set_up(PyObject* self, PyObject* const* args, Py_ssize_t n);
// raw_tensor(tensor): (address, elements, dtype's code) of such a tensor; else None.
PyObject* raw_tensor(PyObject* self, PyObject* tensor);
