// What of the core this folder calls by itself: as in backend/shm/api.h, which is C++. And the types made here.
#pragma once
#include "python_abi.h"

enum { kPending = 1, kSlowPath = 32 };

// Once for the process.
typedef struct {
  int (*test)(void* ticket);
  int (*settle)(void* handle, void* ticket, int64_t ns, int may_run);
  void (*release)(void* ticket);
  int (*put)(void* window, uint32_t rank, uint32_t dtype, const void* from, uint64_t count, uint64_t offset);
  int (*signal)(void* window, uint32_t rank);
  int (*wait)(void* window, uint32_t rank, int64_t ns);
  void (*free_window)(void* window);
} Core;
extern Core core;

// By the core's code of a dtype.
uint8_t bytes_of_an_item(uint8_t code);
// set_up_kinds(dtypes, operations): before all others. Two bytes of each dtype, by the core's code: the bytes of an
// item, and a bit for each reduce op that has a meaning for it (1 << redop), but those that need a factor. One byte of
// each operation, by its number: its Shape in call.py, packed as fast_collective.c says.
PyObject* set_up_kinds(PyObject* self, PyObject* const* args, Py_ssize_t n);

extern PyType_Spec fast_collective_type, ticket_type, window_type;
// How an object of one of them ends.
void drop_object(PyObject* me);
