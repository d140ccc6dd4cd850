// The builds of the reduction kernels that this machine can run; for reduce.cpp and the tests only.
#pragma once
#include "reduce.h"

namespace c10d_custom {

struct ReduceVariant {
  const char* name;
  bool (*runs_here)();
  ReduceFn (*kernel)(uint32_t dtype, uint32_t op);
};

// Every variant compiled in, fastest first. The last one runs anywhere.
extern const ReduceVariant kReduceVariants[];
extern const unsigned kReduceVariantCount;

}  // namespace c10d_custom
