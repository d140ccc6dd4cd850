// Every reduction kernel of every variant this machine can run, against scalar reference code that
// shares nothing with the kernels: small floats are decoded by formula and encoded by search.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "../shm/reduce.h"
#include "../shm/reduce_variants.h"

using namespace c10d_custom;

namespace {

using Bytes = std::vector<unsigned char>;

// ---- Small floats ----

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

const SmallFloat& small_float(uint32_t dtype) {
  static const SmallFloat half(5, 10, 15, Top::kIeee), bfloat(8, 7, 127, Top::kIeee), e4m3fn(4, 3, 7, Top::kFn),
      e5m2(5, 2, 15, Top::kIeee), e4m3fnuz(4, 3, 8, Top::kFnuz), e5m2fnuz(5, 2, 16, Top::kFnuz);
  switch (dtype) {
    case kBfloat16: return bfloat;
    case kFloat8E4M3FN: return e4m3fn;
    case kFloat8E5M2: return e5m2;
    case kFloat8E4M3FNUZ: return e4m3fnuz;
    case kFloat8E5M2FNUZ: return e5m2fnuz;
    default: return half;
  }
}

// ---- What is tested ----

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
};
static_assert(sizeof(kTypes) / sizeof(kTypes[0]) == kReducibleDTypes, "a dtype is not tested");

const char* const kOpNames[kReduceOps] = {"sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum"};

bool supported(Kind kind, uint32_t op) {
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

bool reference_bool(uint32_t op, const std::vector<unsigned char>& x) {
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

Bytes reference(const Type& type, uint32_t op, const Inputs& in) {
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

// ---- Comparison ----

bool is_nan(const Type& type, const unsigned char* p) {
  switch (type.dtype) {
    case kFloat32:
    case kComplex64: {
      float v;
      std::memcpy(&v, p, 4);
      return std::isnan(v);
    }
    case kFloat64:
    case kComplex128: {
      double v;
      std::memcpy(&v, p, 8);
      return std::isnan(v);
    }
    case kFloat16:
    case kBfloat16:
    case kComplex32: {
      uint16_t v;
      std::memcpy(&v, p, 2);
      return std::isnan(small_float(type.dtype).decode(v));
    }
    default: return type.kind == Kind::kSmallFloat && std::isnan(small_float(type.dtype).decode(*p));
  }
}

int failures = 0;

// Equal bits, or NaN in both; returns whether all agree.
bool agree(const Type& type, const std::string& what, const unsigned char* got, const unsigned char* want,
           size_t count) {
  const size_t step = type.kind == Kind::kComplex || type.kind == Kind::kComplexHalf ? type.size / 2 : type.size;
  for (size_t at = 0; at < count * type.size; at += step) {
    if (std::memcmp(got + at, want + at, step) == 0) continue;
    if (is_nan(type, got + at) && is_nan(type, want + at)) continue;
    std::printf("FAIL %s: component %zu is", what.c_str(), at / step);
    for (size_t k = step; k-- > 0;) std::printf("%s%02x", k + 1 == step ? " " : "", got[at + k]);
    std::printf(", should be");
    for (size_t k = step; k-- > 0;) std::printf("%s%02x", k + 1 == step ? " " : "", want[at + k]);
    std::printf("\n");
    ++failures;
    return false;
  }
  return true;
}

// ---- Inputs ----

std::mt19937_64 rng(20240607);

// Ordinary values, so that results are mostly finite; in small floats random bits are that already.
void fill_raw_tensor(const Type& type, Bytes& bytes) {
  std::normal_distribution<double> normal;
  for (size_t i = 0; i < bytes.size() / 4; ++i) {
    if (type.dtype == kFloat32 || type.dtype == kComplex64) put(bytes, i, (float)normal(rng));
    if ((type.dtype == kFloat64 || type.dtype == kComplex128) && i < bytes.size() / 8) {
      put(bytes, i, normal(rng));
    }
  }
  if (type.dtype == kFloat16 || type.dtype == kComplex32 || type.dtype == kBfloat16) {
    for (size_t i = 0; i < bytes.size() / 2; ++i) {
      put(bytes, i, (uint16_t)small_float(type.dtype).encode((float)normal(rng)));
    }
  }
}

Inputs make_inputs(const Type& type, unsigned nsrc, size_t count, bool ordinary) {
  Inputs in;
  in.count = count;
  for (unsigned j = 0; j < nsrc; ++j) {
    Bytes bytes(count * type.size);
    for (unsigned char& b : bytes) b = (unsigned char)rng();
    if (ordinary) fill_raw_tensor(type, bytes);
    if (type.kind == Kind::kBool) {  // false must be as common as true
      for (unsigned char& b : bytes) b = rng() % 2 ? b : 0;
    }
    in.src.push_back(bytes);
    in.factor.push_back(std::ldexp((double)(int64_t)rng(), -63));
  }
  return in;
}

// ---- Tests ----

struct Case {
  const ReduceVariant& variant;
  const Type& type;
  uint32_t op;
  unsigned nsrc;

  std::string name(size_t count, const char* how) const {
    return std::string(variant.name) + " " + type.name + " " + kOpNames[op] + " nsrc=" + std::to_string(nsrc) +
           " count=" + std::to_string(count) + " " + how;
  }
};

constexpr unsigned char kGuard = 0xa5;

// in_place: index of the source that is also dst, or -1. Every buffer starts one component past
// an aligned address. Returns the result, one guarded element longer than count.
Bytes run(const Case& c, const Inputs& in, size_t count, int in_place) {
  const size_t shift =
      c.type.kind == Kind::kComplex || c.type.kind == Kind::kComplexHalf ? c.type.size / 2 : c.type.size;
  std::vector<Bytes> held;
  std::vector<const void*> src;
  for (const Bytes& bytes : in.src) {
    Bytes copy(shift + (count + 1) * c.type.size, kGuard);
    std::copy(bytes.begin(), bytes.begin() + count * c.type.size, copy.begin() + shift);
    held.push_back(copy);
  }
  held.push_back(Bytes(shift + (count + 1) * c.type.size, kGuard));
  for (size_t j = 0; j < in.src.size(); ++j) src.push_back(held[j].data() + shift);
  Bytes& dst = in_place < 0 ? held.back() : held[in_place];
  c.variant.kernel(c.type.dtype, c.op)(dst.data() + shift, src.data(), c.nsrc, count,
                                       c.op == kPremulSum ? in.factor.data() : nullptr);
  for (size_t j = 0; j < in.src.size(); ++j) {
    if ((int)j != in_place && std::memcmp(held[j].data() + shift, in.src[j].data(), count * c.type.size) != 0) {
      std::printf("FAIL %s: source %zu was written\n", c.name(count, "").c_str(), j);
      ++failures;
    }
  }
  return Bytes(dst.begin() + shift, dst.end());
}

void check(const Case& c, const Inputs& in, const Bytes& want, size_t count, int in_place, const char* how) {
  const Bytes got = run(c, in, count, in_place);
  agree(c.type, c.name(count, how), got.data(), want.data(), count);
  for (size_t k = count * c.type.size; k < got.size(); ++k) {
    if (got[k] == kGuard) continue;
    std::printf("FAIL %s: wrote past the end\n", c.name(count, how).c_str());
    ++failures;
    break;
  }
}

void test_pair(const Type& type, uint32_t op, const std::vector<const ReduceVariant*>& variants) {
  // Blocks are 16 to 256 elements; the counts straddle every power of two in between.
  const size_t kCounts[] = {0,  1,  2,  3,  4,   5,   7,   8,   9,   15,  16,  17,  31,  32,
                            33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 769, 1543};
  for (unsigned nsrc : {1u, 2u, 3u, 4u, 8u}) {
    for (bool ordinary : {false, true}) {
      const Inputs in = make_inputs(type, nsrc, 1543, ordinary);
      const Bytes want = reference(type, op, in);
      const char* const data = ordinary ? "ordinary" : "random bits";
      Bytes first;
      for (const ReduceVariant* variant : variants) {
        const Case c{*variant, type, op, nsrc};
        for (size_t count : kCounts) check(c, in, want, count, -1, data);
        for (unsigned j = 0; j < nsrc; ++j) check(c, in, want, 773, (int)j, "in place");
        // Which of two NaNs an addition of full floats passes on is the compiler's choice; all else
        // must not depend on the variant.
        const Bytes whole = run(c, in, in.count, -1);
        if (first.empty()) first = whole;
        if (type.kind != Kind::kFloat && type.kind != Kind::kComplex && whole != first) {
          std::printf("FAIL %s: not the bits of %s\n", c.name(in.count, data).c_str(), variants[0]->name);
          ++failures;
        }
      }
    }
  }
}

// Every pair of float8 codes, every single float16 and bfloat16 code.
void test_small_float_codes(const Type& type, const std::vector<const ReduceVariant*>& variants) {
  const size_t count = 65536;
  const unsigned nsrc = type.size == 1 ? 2 : 1;
  Inputs in{std::vector<Bytes>(nsrc, Bytes(count * type.size)), {1, 1}, count};
  for (size_t i = 0; i < count; ++i) {
    if (nsrc == 1)
      put(in.src[0], i, (uint16_t)i);
    else
      in.src[0][i] = (unsigned char)(i >> 8), in.src[1][i] = (unsigned char)i;
  }
  for (uint32_t op = 0; op < kReduceOps; ++op) {
    if (!supported(type.kind, op)) continue;
    const Bytes want = reference(type, op, in);
    for (const ReduceVariant* variant : variants) {
      check(Case{*variant, type, op, nsrc}, in, want, count, -1, "all codes");
    }
  }
}

}  // namespace

int main() {
  std::vector<const ReduceVariant*> variants;
  for (unsigned v = 0; v < kReduceVariantCount; ++v) {
    const bool here = kReduceVariants[v].runs_here();
    std::printf("%s: %s\n", kReduceVariants[v].name, here ? "tested" : "not on this machine");
    if (here) variants.push_back(&kReduceVariants[v]);
  }
  for (const Type& type : kTypes) {
    for (uint32_t op = 0; op < kReduceOps; ++op) {
      for (const ReduceVariant* variant : variants) {
        if ((variant->kernel(type.dtype, op) != nullptr) != supported(type.kind, op)) {
          std::printf("FAIL %s %s %s: supported or not?\n", variant->name, type.name, kOpNames[op]);
          return 1;
        }
      }
      if (reduce_kernel(type.dtype, op) != variants[0]->kernel(type.dtype, op)) {
        std::printf("FAIL %s %s: not the fastest variant\n", type.name, kOpNames[op]);
        ++failures;
      }
      if (supported(type.kind, op)) test_pair(type, op, variants);
    }
    if (type.kind == Kind::kSmallFloat) test_small_float_codes(type, variants);
    if (reduce_kernel(type.dtype, kReduceOps)) {
      std::printf("FAIL %s: has an operation that does not exist\n", type.name);
      ++failures;
    }
  }
  if (reduce_kernel(kReducibleDTypes, kSum)) {
    std::printf("FAIL: a dtype that only moves has a kernel\n");
    ++failures;
  }
  std::printf(failures ? "%d failures\n" : "all passed\n", failures);
  return failures != 0;
}
