// Collectives of plain CPU tensors in equal parts, from c10d's arguments to the core in one call.
#pragma once
#include "raw_tensor.h"

// By the core's code of a dtype.
uint8_t bytes_of_an_item(uint8_t code);
// set_up_kinds(dtypes, operations): before all others. Two bytes of each dtype, by the core's code: the bytes of an
// item, and a bit for each reduce op that has a meaning for it (1 << redop), but those that need a factor. One byte of
// each operation, by its number: its Shape in call.py, packed as fast_collective.c says.
PyObject* set_up_kinds(PyObject* self, PyObject* const* args, Py_ssize_t n);
