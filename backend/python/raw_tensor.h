// What the core needs of a tensor, read through the table of functions that torch.Tensor has for that
// (__dlpack_c_exchange_api__, see dlpack.h), where Python's way asks the tensor nine questions.
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

// set_up(exchange, types, is_neg, is_conj, dtypes): before all others. exchange: torch.Tensor's capsule; types: a tuple
// of those whose tensors are taken; is_neg, is_conj: methods of torch.Tensor; dtypes: three bytes of each: DLPack's
// code, bits, the core's code.
PyObject* raw_tensor_set_up(PyObject* self, PyObject* const* args, Py_ssize_t n);
// raw_tensor(tensor): (address, elements, dtype's code) of a contiguous CPU tensor whose bytes are its values; else
// None.
PyObject* raw_tensor(PyObject* self, PyObject* tensor);
// raw_parts(tensors, n, code, elements): the addresses of n such tensors of that code and number of elements each, as
// bytes; None where they are not such.
PyObject* raw_parts(PyObject* self, PyObject* const* args, Py_ssize_t n);
