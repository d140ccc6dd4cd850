// An operation under way in the core, as Python holds it: what is asked of each, without a frame of Python's.
#pragma once
#include "python_abi.h"

// Adds the type CoreTicket to the module. 0, or -1 with an exception set.
int add_ticket(PyObject* module);
// set_up_tickets(test, settle, release): before all others; the addresses of c10d_test, c10d_settle, c10d_release.
PyObject* set_up_tickets(PyObject* self, PyObject* const* args, Py_ssize_t n);
