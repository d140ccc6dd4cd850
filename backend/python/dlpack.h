// The part of DLPack 1.x that raw_tensor.c uses (https://dmlc.github.io/dlpack/latest/c_api.html), by its binary
// interface.
#pragma once
#include <stdint.h>

enum { kDLCPU = 1, kDLComplex = 5 };

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
