// What this folder uses of Python's limited API (https://docs.python.org/3/c-api/stable.html), declared here: its
// binary interface is the same for every CPython from 3.11 on that has a global interpreter lock, so no headers of one
// Python are needed, and one build serves all, on every architecture. With Py_GIL_DISABLED it is that of the CPythons
// without the lock (3.13t, 3.14t), whose objects begin with more: a build of its own.
#pragma once
#include <stddef.h>
#include <stdint.h>

typedef ptrdiff_t Py_ssize_t, Py_hash_t;
typedef struct PyTypeObject PyTypeObject;
#ifdef Py_GIL_DISABLED
typedef struct {
  uintptr_t thread;
  uint16_t flags;
  uint8_t mutex, collected;
  uint32_t local;
  Py_ssize_t shared;
  PyTypeObject* type;
} PyObject;
#define PY_OBJECT_FOR_EVER {0, 0, 0, 0, UINT32_MAX, 0, NULL}
#else
typedef struct {
  Py_ssize_t references;
  PyTypeObject* type;
} PyObject;
#define PY_OBJECT_FOR_EVER {1, NULL}
#endif

#define PyObject_HEAD PyObject head;
#define Py_TYPE(o) (((PyObject*)(o))->type)

// ---- Modules and types ----

typedef PyObject* (*PyCFunction)(PyObject*, PyObject*);
typedef struct {
  const char* name;
  PyCFunction function;
  int flags;
  const char* doc;
} PyMethodDef;
enum { METH_NOARGS = 4, METH_O = 8, METH_FASTCALL = 128 };

typedef struct {
  PyObject head;
  PyObject* (*init)(void);
  Py_ssize_t index;
  PyObject* copy;
} PyModuleDef_Base;
typedef struct PyModuleDef {
  PyModuleDef_Base base;
  const char *name, *doc;
  Py_ssize_t size;
  PyMethodDef* methods;
  void *slots, *traverse, *clear, *free;
} PyModuleDef;
#define PyModuleDef_HEAD_INIT {PY_OBJECT_FOR_EVER, NULL, 0, NULL}
#define PyModule_Create(definition) PyModule_Create2(definition, 3)
#define PyMODINIT_FUNC __attribute__((visibility("default"))) PyObject*

typedef PyObject* (*allocfunc)(PyTypeObject*, Py_ssize_t);
typedef void (*freefunc)(void*);
typedef struct {
  int slot;
  void* function;
} PyType_Slot;
typedef struct {
  const char* name;
  int size, item_size;
  unsigned flags;
  PyType_Slot* slots;
} PyType_Spec;
enum { Py_tp_alloc = 47, Py_tp_dealloc = 52, Py_tp_methods = 64, Py_tp_new = 65, Py_tp_members = 72, Py_tp_free = 74 };
enum { Py_TPFLAGS_DEFAULT = 0, Py_TPFLAGS_BASETYPE = 1 << 10 };
typedef struct {
  const char* name;
  int type;
  Py_ssize_t offset;
  int flags;
  const char* doc;
} PyMemberDef;
enum { Py_T_INT = 1, Py_T_PYSSIZET = 19, Py_READONLY = 1 };

PyObject* PyModule_Create2(PyModuleDef*, int);
#ifdef Py_GIL_DISABLED
#define Py_MOD_GIL_NOT_USED ((void*)1)
int PyUnstable_Module_SetGIL(PyObject*, void*);
#endif
int PyModule_AddObjectRef(PyObject*, const char*, PyObject*);
PyObject* PyType_FromSpec(PyType_Spec*);
void* PyType_GetSlot(PyTypeObject*, int);
unsigned long PyType_GetFlags(PyTypeObject*);
int PyType_IsSubtype(PyTypeObject*, PyTypeObject*);

// ---- Objects ----

extern PyObject _Py_NoneStruct, _Py_TrueStruct, _Py_FalseStruct;
#define Py_None (&_Py_NoneStruct)
#define Py_True (&_Py_TrueStruct)
#define Py_False (&_Py_FalseStruct)
#define Py_INCREF(o) Py_IncRef((PyObject*)(o))
#define Py_DECREF(o) Py_DecRef((PyObject*)(o))
#define Py_XDECREF(o) Py_DecRef((PyObject*)(o))  // which takes NULL
#define Py_RETURN_NONE return Py_IncRef(Py_None), Py_None
#define Py_RETURN_TRUE return Py_IncRef(Py_True), Py_True
#define Py_RETURN_FALSE return Py_IncRef(Py_False), Py_False
// Bits of a type's flags say what it is derived from.
#define PyList_Check(o) (PyType_GetFlags(Py_TYPE(o)) >> 25 & 1)
#define PyLong_Check(o) (PyType_GetFlags(Py_TYPE(o)) >> 24 & 1)
#define PyTuple_Check(o) (PyType_GetFlags(Py_TYPE(o)) >> 26 & 1)
#define PyBytes_Check(o) (PyType_GetFlags(Py_TYPE(o)) >> 27 & 1)

void Py_IncRef(PyObject*);
void Py_DecRef(PyObject*);
Py_hash_t PyObject_Hash(PyObject*);
PyObject* PyObject_GetItem(PyObject*, PyObject*);
int PyObject_SetItem(PyObject*, PyObject*, PyObject*);
int PyArg_ParseTuple(PyObject*, const char*, ...);
PyObject* Py_BuildValue(const char*, ...);
char* PyBytes_AsString(PyObject*);
int PyBytes_AsStringAndSize(PyObject*, char**, Py_ssize_t*);
void* PyCapsule_GetPointer(PyObject*, const char*);
int PyList_Append(PyObject*, PyObject*);
PyObject* PyList_GetItem(PyObject*, Py_ssize_t);
PyObject* PyList_GetSlice(PyObject*, Py_ssize_t, Py_ssize_t);
int PyList_SetItem(PyObject*, Py_ssize_t, PyObject*);
Py_ssize_t PyList_Size(PyObject*);
PyObject* PyTuple_GetItem(PyObject*, Py_ssize_t);
Py_ssize_t PyTuple_Size(PyObject*);
long PyLong_AsLong(PyObject*);
long long PyLong_AsLongLong(PyObject*);
unsigned long PyLong_AsUnsignedLong(PyObject*);
unsigned long long PyLong_AsUnsignedLongLong(PyObject*);
void* PyLong_AsVoidPtr(PyObject*);
PyObject* PyLong_FromLong(long);
PyObject* PyLong_FromVoidPtr(void*);

// ---- Errors, memory, the lock ----

extern PyObject *PyExc_TypeError, *PyExc_ValueError;
void PyErr_Clear(void);
PyObject* PyErr_Format(PyObject*, const char*, ...);
PyObject* PyErr_NoMemory(void);
PyObject* PyErr_Occurred(void);
void PyErr_SetString(PyObject*, const char*);
void* PyMem_Malloc(size_t);
void PyMem_Free(void*);

typedef struct PyThreadState PyThreadState;
PyThreadState* PyEval_SaveThread(void);
void PyEval_RestoreThread(PyThreadState*);
#define Py_BEGIN_ALLOW_THREADS \
  {                            \
    PyThreadState* const without_lock = PyEval_SaveThread();
#define Py_END_ALLOW_THREADS          \
  PyEval_RestoreThread(without_lock); \
  }
