// A window of the core (backend/shm/window.h), as Python holds it: what its calls do in the common case, without a
// frame of ctypes'.
#pragma once
#include "python_abi.h"

// Adds the type CoreWindow to the module. 0, or -1 with an exception set.
int add_window(PyObject* module);
// set_up_windows(put, signal, wait, free): before all others; the addresses of the core's functions c10d_window_...
PyObject* set_up_windows(PyObject* self, PyObject* const* args, Py_ssize_t n);
