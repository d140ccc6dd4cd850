// Floats of 16 and 8 bits, which share nothing with the kernels: decoded by formula and encoded by search.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "../shm/reduce.h"

namespace c10d_custom {

enum class Top { kIeee, kFn, kFnuz };

struct SmallFloat {
  int exponent, mantissa, bias;
  Top top;
  std::vector<float> finite;  // value of each non-negative finite code, ascending

  SmallFloat(int e, int m, int b, Top t) : exponent(e), mantissa(m), bias(b), top(t) {
    for (unsigned code = 0; code < sign(); ++code) {
      const float value = decode(code);
      if (!std::isfinite(value)) break;
      finite.push_back(value);
    }
  }
  unsigned sign() const { return 1u << (exponent + mantissa); }

  float decode(unsigned code) const {
    const unsigned magnitude = code & (sign() - 1), field = magnitude >> mantissa;
    const unsigned fraction = magnitude & ((1u << mantissa) - 1);
    const float s = code & sign() ? -1.0f : 1.0f;
    if (top == Top::kFnuz && code == sign()) return NAN;
    if (top == Top::kFn && magnitude == sign() - 1) return NAN;
    if (top == Top::kIeee && field == (1u << exponent) - 1) return fraction ? NAN : s * INFINITY;
    if (field == 0) return s * std::ldexp((float)fraction, 1 - bias - mantissa);
    return s * std::ldexp((float)(fraction + (1u << mantissa)), (int)field - bias - mantissa);
  }

  unsigned encode(float value) const {
    const unsigned nan = top == Top::kFnuz ? sign() : sign() - 1;
    if (std::isnan(value)) return nan;
    const unsigned s = std::signbit(value) ? sign() : 0;
    const double v = std::fabs((double)value);
    const unsigned last = finite.size() - 1;
    // Where the next code would be, did the format go on.
    const double beyond = finite[last] + ((double)finite[last] - finite[last - 1]);
    unsigned code;
    if (v >= finite[last]) {
      const double tie = (finite[last] + beyond) / 2;
      code = v < tie || (v == tie && last % 2 == 0) ? last : last + 1;
      if (code > last) {
        if (top == Top::kFnuz) return nan;
        if (top == Top::kFn) code = last;  // saturates; for kIeee last + 1 is infinity
      }
    } else {
      code = std::upper_bound(finite.begin(), finite.end(), (float)v) - finite.begin() - 1;
      const double below = v - finite[code], above = finite[code + 1] - v;
      if (above < below || (above == below && code % 2 == 1)) ++code;
    }
    return top == Top::kFnuz && code == 0 ? 0 : code | s;
  }
};

inline const SmallFloat& small_float(uint32_t dtype) {
  static const SmallFloat half(5, 10, 15, Top::kIeee), bfloat(8, 7, 127, Top::kIeee), e4m3fn(4, 3, 7, Top::kFn),
      e5m2(5, 2, 15, Top::kIeee), e4m3fnuz(4, 3, 8, Top::kFnuz), e5m2fnuz(5, 2, 16, Top::kFnuz);
  switch (dtype) {
    case kBfloat16:
    case kBComplex32: return bfloat;
    case kFloat8E4M3FN: return e4m3fn;
    case kFloat8E5M2: return e5m2;
    case kFloat8E4M3FNUZ: return e4m3fnuz;
    case kFloat8E5M2FNUZ: return e5m2fnuz;
    default: return half;
  }
}

}  // namespace c10d_custom
