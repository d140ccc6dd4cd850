// What a reduction must give, in scalar code that shares nothing with the kernels.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#include "../shm/reduce.h"
#include "small_float.h"

namespace c10d_custom {

using Bytes = std::vector<unsigned char>;

// ---- What there is to reduce ----

enum class Kind { kInteger, kBool, kFloat, kSmallFloat, kComplex, kComplexHalf };

struct Type {
  uint32_t dtype;
  const char* name;
  size_t size;  // bytes per element
  Kind kind;
};

const Type kTypes[] = {
    {kUint8, "uint8", 1, Kind::kInteger},
    {kInt8, "int8", 1, Kind::kInteger},
    {kInt16, "int16", 2, Kind::kInteger},
    {kInt32, "int32", 4, Kind::kInteger},
    {kInt64, "int64", 8, Kind::kInteger},
    {kUint16, "uint16", 2, Kind::kInteger},
    {kUint32, "uint32", 4, Kind::kInteger},
    {kUint64, "uint64", 8, Kind::kInteger},
    {kBool, "bool", 1, Kind::kBool},
    {kFloat16, "float16", 2, Kind::kSmallFloat},
    {kBfloat16, "bfloat16", 2, Kind::kSmallFloat},
    {kFloat32, "float32", 4, Kind::kFloat},
    {kFloat64, "float64", 8, Kind::kFloat},
    {kComplex32, "complex32", 4, Kind::kComplexHalf},
    {kComplex64, "complex64", 8, Kind::kComplex},
    {kComplex128, "complex128", 16, Kind::kComplex},
    {kFloat8E4M3FN, "float8_e4m3fn", 1, Kind::kSmallFloat},
    {kFloat8E5M2, "float8_e5m2", 1, Kind::kSmallFloat},
    {kFloat8E4M3FNUZ, "float8_e4m3fnuz", 1, Kind::kSmallFloat},
    {kFloat8E5M2FNUZ, "float8_e5m2fnuz", 1, Kind::kSmallFloat},
    {kBComplex32, "bcomplex32", 4, Kind::kComplexHalf},
};
static_assert(sizeof(kTypes) / sizeof(kTypes[0]) == kReducibleDTypes, "a dtype is not tested");

const char* const kOpNames[kReduceOps] = {"sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum"};

inline bool supported(Kind kind, uint32_t op) {
  switch (kind) {
    case Kind::kInteger: return op != kPremulSum;
    case Kind::kBool: return op != kPremulSum && op != kAvg;
    case Kind::kFloat:
    case Kind::kSmallFloat: return op <= kMax || op == kPremulSum;
    default: return op <= kProduct || op == kPremulSum;
  }
}

// ---- Reference ----

struct Inputs {
  std::vector<Bytes> src;
  std::vector<double> factor;
  size_t count;
};

template <class T>
T get(const Bytes& bytes, size_t i) {
  T value;
  std::memcpy(&value, bytes.data() + i * sizeof(T), sizeof(T));
  return value;
}
template <class T>
void put(Bytes& bytes, size_t i, T value) {
  std::memcpy(bytes.data() + i * sizeof(T), &value, sizeof(T));
}

template <class T>
T reference_integer(uint32_t op, const std::vector<T>& x) {
  uint64_t wide = (uint64_t)x[0];
  T acc = x[0];
  for (size_t j = 1; j < x.size(); ++j) {
    const uint64_t y = (uint64_t)x[j];
    if (op == kSum || op == kAvg) wide += y;
    if (op == kProduct) wide *= y;
    if (op == kBand) wide &= y;
    if (op == kBor) wide |= y;
    if (op == kBxor) wide ^= y;
    if (op == kMin) acc = std::min(acc, x[j]);
    if (op == kMax) acc = std::max(acc, x[j]);
  }
  if (op == kMin || op == kMax) return acc;
  if (op == kAvg)
    return std::is_signed<T>::value ? (T)((int64_t)(T)wide / (int64_t)x.size()) : (T)((uint64_t)(T)wide / x.size());
  return (T)wide;
}

inline bool reference_bool(uint32_t op, const std::vector<unsigned char>& x) {
  bool acc = x[0] != 0;
  for (size_t j = 1; j < x.size(); ++j) {
    const bool y = x[j] != 0;
    if (op == kSum || op == kMax || op == kBor)
      acc = acc || y;
    else if (op == kBxor)
      acc = acc != y;
    else
      acc = acc && y;
  }
  return acc;
}

template <class T>
T reference_float(uint32_t op, const std::vector<T>& x, const std::vector<double>& factor) {
  T acc = op == kPremulSum ? x[0] * (T)factor[0] : x[0];
  for (size_t j = 1; j < x.size(); ++j) {
    const T y = x[j];
    if (op == kSum || op == kAvg) acc = acc + y;
    if (op == kProduct) acc = acc * y;
    if (op == kPremulSum) {
      const T scaled = y * (T)factor[j];
      acc = acc + scaled;
    }
    if (op == kMin) acc = std::isnan(acc) ? acc : std::isnan(y) ? y : acc < y ? acc : y;
    if (op == kMax) acc = std::isnan(acc) ? acc : std::isnan(y) ? y : acc > y ? acc : y;
  }
  return op == kAvg ? acc / (T)x.size() : acc;
}

template <class T>
void reference_product(const std::vector<T>& re, const std::vector<T>& im, T& out_re, T& out_im) {
  T a = re[0], b = im[0];
  for (size_t j = 1; j < re.size(); ++j) {
    const T ac = a * re[j], bd = b * im[j], ad = a * im[j], bc = b * re[j];
    a = ac - bd;
    b = ad + bc;
  }
  out_re = a;
  out_im = b;
}

// Component i of every source as T, through decode.
template <class T, class Decode>
std::vector<T> column(const Inputs& in, size_t i, Decode decode) {
  std::vector<T> x;
  for (const Bytes& src : in.src) x.push_back(decode(src, i));
  return x;
}

template <class T>
void reference_integers(uint32_t op, const Inputs& in, Bytes& out) {
  for (size_t i = 0; i < in.count; ++i) {
    put(out, i, reference_integer<T>(op, column<T>(in, i, get<T>)));
  }
}

// Floats of any kind, seen as components (two per complex number).
template <class T, class Decode, class Encode>
void reference_floats(uint32_t op, const Inputs& in, bool complex, Decode decode, Encode encode) {
  const size_t components = in.count * (complex ? 2 : 1);
  if (complex && op == kProduct) {
    for (size_t i = 0; i < components; i += 2) {
      T re, im;
      reference_product<T>(column<T>(in, i, decode), column<T>(in, i + 1, decode), re, im);
      encode(i, re);
      encode(i + 1, im);
    }
  } else {
    for (size_t i = 0; i < components; ++i) {
      encode(i, reference_float<T>(op, column<T>(in, i, decode), in.factor));
    }
  }
}

inline Bytes reference(const Type& type, uint32_t op, const Inputs& in) {
  Bytes out(in.count * type.size);
  const bool complex = type.kind == Kind::kComplex || type.kind == Kind::kComplexHalf;
  switch (type.dtype) {
    case kUint8: reference_integers<uint8_t>(op, in, out); break;
    case kInt8: reference_integers<int8_t>(op, in, out); break;
    case kUint16: reference_integers<uint16_t>(op, in, out); break;
    case kInt16: reference_integers<int16_t>(op, in, out); break;
    case kUint32: reference_integers<uint32_t>(op, in, out); break;
    case kInt32: reference_integers<int32_t>(op, in, out); break;
    case kUint64: reference_integers<uint64_t>(op, in, out); break;
    case kInt64: reference_integers<int64_t>(op, in, out); break;
    case kBool:
      for (size_t i = 0; i < in.count; ++i) {
        out[i] = reference_bool(op, column<unsigned char>(in, i, get<unsigned char>));
      }
      break;
    case kFloat32:
    case kComplex64:
      reference_floats<float>(op, in, complex, get<float>, [&](size_t i, float v) { put(out, i, v); });
      break;
    case kFloat64:
    case kComplex128:
      reference_floats<double>(op, in, complex, get<double>, [&](size_t i, double v) { put(out, i, v); });
      break;
    default: {
      const SmallFloat& format = small_float(type.dtype);
      const bool wide = type.size / (complex ? 2 : 1) == 2;
      reference_floats<float>(
          op, in, complex, [&](const Bytes& b, size_t i) { return format.decode(wide ? get<uint16_t>(b, i) : b[i]); },
          [&](size_t i, float v) {
            const unsigned code = format.encode(v);
            if (wide)
              put(out, i, (uint16_t)code);
            else
              out[i] = (unsigned char)code;
          });
    }
  }
  return out;
}

}  // namespace c10d_custom
