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

extern PyType_Spec fast_collective_type, ticket_type, window_type;
// How an object of one of them ends.
void drop_object(PyObject* me);
