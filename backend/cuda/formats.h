// Formats: how 16 bytes of elements in memory become accumulators, and back. The formats are those of
// backend/shm/reduce_formats.inc, which is the authority: bit for bit the same results are tested.
#pragma once
#include "device.h"

namespace c10d_custom {

struct alignas(16) Vector {
  u32 word[4];
};

// Item: accumulator. kItems: of them in a Vector, in the order of memory.

template <class T>
struct Native {
  using Item = T;
  static constexpr u32 kItems = 16 / sizeof(T);
  union Pun {
    Vector vector;
    T item[kItems];
  };

  C10D_DEVICE void load(T* acc, const Vector& v) {
    Pun pun;
    pun.vector = v;
#pragma unroll
    for (u32 i = 0; i < kItems; ++i) acc[i] = pun.item[i];
  }
  C10D_DEVICE Vector store(const T* acc) {
    Pun pun;
#pragma unroll
    for (u32 i = 0; i < kItems; ++i) pun.item[i] = acc[i];
    return pun.vector;
  }
};

struct Bool : Native<u8> {
  C10D_DEVICE void load(u8* acc, const Vector& v) {
    Native<u8>::load(acc, v);
#pragma unroll
    for (u32 i = 0; i < kItems; ++i) acc[i] = acc[i] != 0;
  }
};

// Codecs turn the code of a narrow float into a float and back (nearest even). A NaN is encoded as one
// positive quiet NaN, whatever it was.

struct Bfloat16Codec {
  static constexpr u32 kBits = 16;
  C10D_DEVICE float decode(u32 code) { return as_float(code << 16); }
  C10D_DEVICE u32 encode(float value) {
    const u32 bits = as_bits(value);
    return value != value ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  }
};

struct Float16Codec {
  static constexpr u32 kBits = 16;
  C10D_DEVICE float decode(u32 code) { return half_to_float(code); }
  C10D_DEVICE u32 encode(float value) { return value != value ? 0x7e00 : float_to_half(value); }
};

// What the codes above the largest finite magnitude mean.
enum class Specials {
  kIeee,  // infinities and NaNs at the top exponent; overflow gives infinity
  kFn,    // NaN at the top code only, no infinity; overflow saturates, as torch does
  kFnuz,  // NaN in place of negative zero, no infinity; overflow gives NaN
};

template <u32 kExponent, u32 kMantissa, u32 kBias, Specials kSpecials>
struct SmallFloatCodec {
  static constexpr u32 kBits = 1 + kExponent + kMantissa;
  // From the place of a code's fraction to that of a float's.
  static constexpr u32 kShift = 23 - kMantissa;
  static constexpr u32 kSign = 1u << (kBits - 1);
  static constexpr u32 kInf = ((1u << kExponent) - 1) << kMantissa;  // kIeee only
  static constexpr u32 kFloatInf = 0x7f800000;
  static constexpr u32 kNan = kSpecials == Specials::kIeee ? kInf | 1u << (kMantissa - 1)
                              : kSpecials == Specials::kFn ? kSign - 1
                                                           : kSign;
  // What a magnitude too large for the format becomes.
  static constexpr u32 kOver = kSpecials == Specials::kIeee ? kInf : kSpecials == Specials::kFn ? kSign - 2 : kNan;

  C10D_DEVICE float decode(u32 code) {
    const u32 magnitude = code & (kSign - 1);
    const u32 sign = (code & kSign) << (32 - kBits);
    // The code's exponent taken for a float's is too small by the difference of the biases; a subnormal
    // is a float's subnormal then, and scaled exactly too. Needs a compiler that keeps subnormals.
    u32 bits = as_bits(as_float(magnitude << kShift) * as_float((127 + 127 - kBias) << 23));
    if constexpr (kSpecials == Specials::kIeee) {
      bits = magnitude < kInf ? bits : magnitude << kShift | kFloatInf;
    } else if constexpr (kSpecials == Specials::kFn) {
      bits = magnitude < kNan ? bits : 0x7fc00000;
    } else {
      bits = code == kNan ? 0x7fc00000 : bits;
    }
    return as_float(bits | sign);
  }

  C10D_DEVICE u32 encode(float value) {
    const u32 magnitude = as_bits(value) & 0x7fffffff;
    const u32 sign = (as_bits(value) >> (32 - kBits)) & kSign;
    // Adding a power of two whose last place is the smallest subnormal makes the adder round.
    constexpr u32 kRounder = (127 - kBias + kShift + 1) << 23;
    const u32 subnormal = as_bits(as_float(magnitude) + as_float(kRounder)) - kRounder;
    constexpr u32 kRebias = (127 - kBias) << 23, kBelowHalf = (1u << (kShift - 1)) - 1;
    const u32 normal = (magnitude - (kRebias - kBelowHalf) + ((magnitude >> kShift) & 1)) >> kShift;
    u32 code = magnitude < (128 - kBias) << 23 ? subnormal : normal;
    code = code < kOver ? code : kOver;
    if constexpr (kSpecials == Specials::kFnuz) {
      // NaN is among what is too large, and zero has no sign.
      return code == 0 ? 0 : code | sign;
    } else {
      return magnitude <= kFloatInf ? code | sign : kNan;
    }
  }
};

template <class Codec>
struct Packed {
  using Item = float;
  static constexpr u32 kItems = 128 / Codec::kBits;
  static constexpr u32 kPerWord = 32 / Codec::kBits;

  C10D_DEVICE void load(float* acc, const Vector& v) {
#pragma unroll
    for (u32 i = 0; i < kItems; ++i) {
      const u32 code = v.word[i / kPerWord] >> (i % kPerWord * Codec::kBits);
      acc[i] = Codec::decode(code & ((1u << Codec::kBits) - 1));
    }
  }
  C10D_DEVICE Vector store(const float* acc) {
    Vector v;
#pragma unroll
    for (u32 i = 0; i < kItems; ++i) {
      const u32 code = Codec::encode(acc[i]) << (i % kPerWord * Codec::kBits);
      v.word[i / kPerWord] = i % kPerWord == 0 ? code : v.word[i / kPerWord] | code;
    }
    return v;
  }
};

}  // namespace c10d_custom
