// Reduction of n rank-ordered inputs into one output: the arithmetic of every collective that reduces.
//
// Order is fixed: ((src[0] op src[1]) op src[2]) ..., one final rounding. float16, bfloat16, float8
// and both complex32 accumulate in float. AVG divides in the accumulator (integers: the wrapped sum is
// divided, truncating toward zero). PREMUL_SUM multiplies src[j] by factor[j] as it is read.
// The result does not depend on count, alignment, nor on which instruction set was chosen.
#pragma once
#include <cstddef>
#include <cstdint>

namespace c10d_custom {

// Codes are shared with python/c10d_custom/dtypes.py, which a test holds against this list.
enum DType : uint32_t {
  kUint8 = 0,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kUint16,
  kUint32,
  kUint64,
  kBool,
  kFloat16,
  kBfloat16,
  kFloat32,
  kFloat64,
  kComplex32,
  kComplex64,
  kComplex128,
  kFloat8E4M3FN,
  kFloat8E5M2,
  kFloat8E4M3FNUZ,
  kFloat8E5M2FNUZ,
  kBComplex32,
  kReducibleDTypes,  // codes from here on only move
};

// Values of torch.distributed.ReduceOp.RedOpType.
enum ReduceOp : uint32_t {
  kSum = 0,
  kAvg,
  kProduct,
  kMin,
  kMax,
  kBand,
  kBor,
  kBxor,
  kPremulSum,
  kReduceOps,
};

// dst may be exactly one of the sources; otherwise dst must not overlap any of them.
// nsrc >= 1. factor, where not null: the nsrc factors of PREMUL_SUM; what AVG divides by, if not nsrc.
using ReduceFn = void (*)(void* dst, const void* const* src, unsigned nsrc, size_t count, const double* factor);

// nullptr where the pair has no meaning (MIN of complex, BAND of float, ...).
ReduceFn reduce_kernel(uint32_t dtype, uint32_t op);

// The name of the build that the kernels are of.
const char* reduce_variant();

// The builds that are compiled in, fastest first, the last of which runs anywhere: for reduce.cpp and the tests only.
struct ReduceVariant {
  const char* name;
  bool (*runs_here)();
  ReduceFn (*kernel)(uint32_t dtype, uint32_t op);
};
extern const ReduceVariant kReduceVariants[];
extern const unsigned kReduceVariantCount;

}  // namespace c10d_custom
