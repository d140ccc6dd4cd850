// Every reduction kernel of every variant this machine can run, against the scalar code of reduce_reference.h.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "../shm/reduce.h"
#include "reduce_reference.h"

using namespace c10d_custom;

namespace {

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
    case kComplex32:
    case kBComplex32: {
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
void fill_ordinary_values(const Type& type, Bytes& bytes) {
  std::normal_distribution<double> normal;
  for (size_t i = 0; i < bytes.size() / 4; ++i) {
    if (type.dtype == kFloat32 || type.dtype == kComplex64) put(bytes, i, (float)normal(rng));
    if ((type.dtype == kFloat64 || type.dtype == kComplex128) && i < bytes.size() / 8) {
      put(bytes, i, normal(rng));
    }
  }
  if (type.dtype == kFloat16 || type.dtype == kBfloat16 || type.kind == Kind::kComplexHalf) {
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
    if (ordinary) fill_ordinary_values(type, bytes);
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
