// The reduction of several arrays into one or more: every target gets the same result. No thread waits
// for another. A target may be exactly one of the sources; otherwise it must not overlap any.
#pragma once
#include "vectors.h"

namespace c10d_custom {

struct Reduce {
  static constexpr u32 kMaxArrays = 64;

  // unit: 16: all addresses are `skew` past a multiple of 16, and a multiple of 16 lies between two
  // elements; otherwise skew is 0, and unit the largest of 1, 2, 4, 8 that all addresses are multiples of.
  struct Arguments {
    const u8* source[kMaxArrays];
    u8* target[kMaxArrays];
    double factor[kMaxArrays];  // PREMUL_SUM
    u64 bytes;
    u32 sources, targets, unit, skew;
    u32 divisor;  // AVG
    u32 reserved;
  };

  // Vector v holds bytes 16 v - skew to 16 v - skew + 15 of the arrays: parts of them, if it is the
  // first or the last.
  template <class R>
  C10D_DEVICE void run(const Arguments& a) {
    constexpr u32 kVectors = R::Format::kItems < 16 ? 2 : 1;
    const auto factor = [&](u32 j) { return a.factor[j]; };
    const u64 end = a.skew + a.bytes, vectors = (end + 15) / 16;
    const u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, threads = (u64)gridDim.x * blockDim.x;

    // Whole Vectors from `first` up to `last`; none if the arrays are not aligned.
    const u64 first = a.skew != 0, last = a.unit == 16 && end / 16 > first ? end / 16 : first;
#pragma unroll 1
    for (u64 v = first + thread; v < last; v += kVectors * threads) {
      Vector result[kVectors];
      fold_vectors<R, kVectors, 4>(
          result, a.sources, a.divisor,
          [&](u32 j, Vector* in) {
#pragma unroll
            for (u32 i = 0; i < kVectors; ++i) {
              if (i == 0 || v + i * threads < last) in[i] = load_vector(a.source[j] - a.skew + 16 * (v + i * threads));
            }
          },
          factor);
#pragma unroll 1
      for (u32 t = 0; t < a.targets; ++t) {
#pragma unroll
        for (u32 i = 0; i < kVectors; ++i) {
          if (i == 0 || v + i * threads < last) store_vector(a.target[t] - a.skew + 16 * (v + i * threads), result[i]);
        }
      }
    }

    // The others: `first` in front, and those from `last` on.
#pragma unroll 1
    for (u64 k = thread; k < first + (vectors - last); k += threads) {
      const u64 v = k < first ? k : last + (k - first);
      const u32 low = v == 0 ? a.skew : 0, high = end - 16 * v < 16 ? (u32)(end - 16 * v) : 16;
      Vector result[1];
      fold_vectors<R, 1, 1>(
          result, a.sources, a.divisor,
          [&](u32 j, Vector* in) { in[0] = gather_vector(a.source[j] - a.skew + 16 * v, a.unit, low, high); }, factor);
#pragma unroll 1
      for (u32 t = 0; t < a.targets; ++t) {
        scatter_vector(a.target[t] - a.skew + 16 * v, a.unit, low, high, result[0]);
      }
    }
  }
};

}  // namespace c10d_custom

// One kernel: C10D_INSTANCE(Reduce, float16, SUM) is c10d_Reduce_float16_SUM.
#define C10D_INSTANCE(ALGORITHM, DTYPE, OP)                                                           \
  C10D_KERNEL c10d_##ALGORITHM##_##DTYPE##_##OP(C10D_ARGUMENT(c10d_custom::ALGORITHM::Arguments) a) { \
    c10d_custom::ALGORITHM::run<c10d_custom::dtype_##DTYPE::OP>(a);                                   \
  }
