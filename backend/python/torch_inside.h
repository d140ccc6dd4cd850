// What torch keeps to itself, and says nowhere faster: of a tensor, its address in C++ and its dispatch keys; of a
// thread, whether anyone watches torch's dispatcher there. Where it lies is found by native/direct.py, by trying.
#pragma once
#include "python_abi.h"

// set_up_inside(numbers): before all others. Of bytes: where a tensor's object has the address of torch's TensorImpl,
// where that has its keys, its dtype, its offset in its storage. Keys: those without which a tensor is not in the CPU's
// memory; all that one has whose bytes are its values; all that one of the CPU or of a GPU has that is no stand-in for
// something else; those of a tensor whose changes torch counts; those of a thread that do not say that it is watched,
// and the one of these that says inference mode (direct.py's _CPU, _PLAIN, _DIRECT, _COUNTED, _HARMLESS). Addresses of
// functions: TensorImpl::requires_grad, GradMode::is_enabled, bump_version; dlsym, libc10's handle. The name of the
// thread-local word; torch.Tensor; the types whose tensors are taken.
PyObject* set_up_inside(PyObject* self, PyObject* const* args, Py_ssize_t n);

// Whether `o` is of one of those types, so that the others may be asked of it.
int is_tensor_itself(PyObject* o);
// torch's number of such a tensor's dtype (ScalarType).
uint16_t dtype_number(PyObject* o);
// How many elements of its storage lie before it.
uint64_t storage_offset(PyObject* o);
// 1 of a tensor that is in the CPU's memory, whose bytes are its values, and which autograd need not be told of.
int is_plain(PyObject* o);

// Whether nobody watches the dispatcher in the calling thread.
int unwatched(void);

// Whether count_change would be refused: an inference tensor outside of inference mode.
int cannot_count(PyObject* o);
// Counts a change of a tensor's values, as autograd wants to know.
void count_change(PyObject* o);

// goes_direct(arguments...): whether nobody watches, and all tensors among the arguments, or in lists of them, are of
// the CPU or a GPU, no stand-ins, and such that autograd need not be told.
PyObject* goes_direct(PyObject* self, PyObject* const* args, Py_ssize_t n);
// unwatched()
PyObject* nobody_watches(PyObject* self, PyObject* nothing);

// An argument whose lists no other thread changes until `let_go`: with a global lock the argument itself, without one a
// list of its own of what the list, or the only list in it, has in it. NULL: an exception is set.
#ifdef Py_GIL_DISABLED
PyObject* hold_still(PyObject* o);
#define let_go Py_DecRef
#else
#define hold_still(o) (o)
#define let_go(o) ((void)(o))
#endif
