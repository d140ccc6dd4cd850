// Reduce operations over accumulators: fold(acc, in) source by source in rank order, then finish(acc,
// divisor). To be compiled without contraction to fused multiply-add, with subnormals and with IEEE
// division. What a NaN that arithmetic makes in float or double looks like is the processor's matter; all
// other bits are the CPU engine's.
#pragma once
#include "device.h"

namespace c10d_custom {

struct Operation {
  static constexpr bool kScalesInput = false;
  template <u32 n, class T>
  C10D_DEVICE void finish(T*, u32) {}
};

// clang-format off: it takes a * b for a declaration
#define C10D_ELEMENTWISE(NAME, EXPRESSION)          \
  struct NAME : Operation {                         \
    template <u32 n, class T>                       \
    C10D_DEVICE void fold(T* acc, const T* in) {    \
      _Pragma("unroll")                             \
      for (u32 i = 0; i < n; ++i) {                 \
        const T a = acc[i], b = in[i];              \
        acc[i] = (T)(EXPRESSION);                   \
      }                                             \
    }                                               \
  }
C10D_ELEMENTWISE(Sum, a + b);
C10D_ELEMENTWISE(Product, a * b);
// Two u16 are multiplied as int, where the product may overflow.
C10D_ELEMENTWISE(IntProduct, 1u * a * b);
C10D_ELEMENTWISE(And, a & b);
C10D_ELEMENTWISE(Or, a | b);
C10D_ELEMENTWISE(Xor, a ^ b);
C10D_ELEMENTWISE(Min, a < b ? a : b);
C10D_ELEMENTWISE(Max, a > b ? a : b);
// A comparison with NaN is false and so yields b; only a NaN in a is left to look after.
C10D_ELEMENTWISE(FloatMin, a != a ? a : (a < b ? a : b));
C10D_ELEMENTWISE(FloatMax, a != a ? a : (a > b ? a : b));
#undef C10D_ELEMENTWISE
// clang-format on

struct PremulSum : Sum {
  static constexpr bool kScalesInput = true;
};

struct FloatAvg : Sum {
  template <u32 n, class T>
  C10D_DEVICE void finish(T* acc, u32 divisor) {
#pragma unroll
    for (u32 i = 0; i < n; ++i) acc[i] /= (T)divisor;
  }
};

// The sum wraps in the unsigned type T and is divided as Value, truncating toward zero. Wide: where both
// the sum and the divisor fit.
template <class Value, class Wide>
struct IntAvg : Sum {
  template <u32 n, class T>
  C10D_DEVICE void finish(T* acc, u32 divisor) {
#pragma unroll
    for (u32 i = 0; i < n; ++i) acc[i] = (T)((Wide)(Value)acc[i] / (Wide)divisor);
  }
};

// (a + bi)(c + di), real and imaginary parts side by side.
struct ComplexProduct : Operation {
  template <u32 n, class T>
  C10D_DEVICE void fold(T* acc, const T* in) {
#pragma unroll
    for (u32 i = 0; i < n; i += 2) {
      const T a = acc[i], b = acc[i + 1], c = in[i], d = in[i + 1];
      acc[i] = a * c - b * d;
      acc[i + 1] = a * d + b * c;
    }
  }
};

}  // namespace c10d_custom
