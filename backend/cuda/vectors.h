// Moving Vectors between memory and registers, whatever the memory's alignment; folding the Vectors of
// several sources.
#pragma once
#include "instances.h"

namespace c10d_custom {

C10D_DEVICE Vector load_vector(const u8* p) {
  const uint4 words = *(const uint4*)p;
  return {{words.x, words.y, words.z, words.w}};
}
C10D_DEVICE void store_vector(u8* p, const Vector& v) {
  *(uint4*)p = uint4{v.word[0], v.word[1], v.word[2], v.word[3]};
}

// each(w, b, Unit) for what lies b bytes into word w of a Vector of Units, of which bytes low to high count.
template <class Unit, class Each>
C10D_DEVICE void each_unit(u32 low, u32 high, Each each) {
#pragma unroll
  for (u32 w = 0; w < 4; ++w) {
#pragma unroll 1
    for (u32 b = 0; b < 4; b += sizeof(Unit)) {
      if (4 * w + b >= low && 4 * w + b < high) each(w, b, Unit{});
    }
  }
}
// Of a Vector that is aligned to `unit` (1, 2, 4 or more). A part of a Vector is moved by the byte.
template <class Each>
C10D_DEVICE void by_units(u32 unit, u32 low, u32 high, Each each) {
  if (unit == 1 || low != 0 || high != 16) {
    each_unit<u8>(low, high, each);
  } else if (unit == 2) {
    each_unit<u16>(low, high, each);
  } else {
    each_unit<u32>(low, high, each);
  }
}

// Bytes low to high of a Vector that lies at p; the others are zero and not read.
static C10D_COLD Vector gather_vector(const u8* p, u32 unit, u32 low, u32 high) {
  Vector v = {};
  by_units(unit, low, high,
           [&](u32 w, u32 b, auto part) { v.word[w] |= (u32) * (const decltype(part)*)(p + 4 * w + b) << (8 * b); });
  return v;
}
static C10D_COLD void scatter_vector(u8* p, u32 unit, u32 low, u32 high, const Vector& v) {
  by_units(unit, low, high, [&](u32 w, u32 b, auto part) {
    *(decltype(part)*)(p + 4 * w + b) = (decltype(part))(v.word[w] >> (8 * b));
  });
}

// Folds kVectors Vectors of each of `sources` sources and leaves the result in `vectors`. read(j, in)
// reads those of source j, factor(j) is its factor (PREMUL_SUM). kBatch sources are read before any of
// them is folded, so that their latencies overlap. All is read when this returns, which is what lets a
// target be a source.
template <class R, u32 kVectors, u32 kBatch, class Read, class Factor>
C10D_DEVICE void fold_vectors(Vector (&vectors)[kVectors], u32 sources, Read read, Factor factor) {
  using Item = typename R::Item;
  constexpr u32 kEach = R::Format::kItems, kItems = kVectors * kEach;
  Item acc[kItems];
#pragma unroll 1
  for (u32 first = 0; first < sources; first += kBatch) {
    Vector in[kBatch][kVectors];
#pragma unroll
    for (u32 k = 0; k < kBatch; ++k) {
      if (first + k < sources) read(first + k, in[k]);
    }
#pragma unroll
    for (u32 k = 0; k < kBatch; ++k) {
      if (first + k >= sources) break;
      Item item[kItems];
#pragma unroll
      for (u32 i = 0; i < kVectors; ++i) R::Format::load(item + i * kEach, in[k][i]);
      if constexpr (R::Operation::kScalesInput) {
        const Item scale = (Item)factor(first + k);
#pragma unroll
        for (u32 i = 0; i < kItems; ++i) item[i] *= scale;
      }
      if (first + k == 0) {
#pragma unroll
        for (u32 i = 0; i < kItems; ++i) acc[i] = item[i];
      } else {
        R::Operation::template fold<kItems>(acc, item);
      }
    }
  }
  R::Operation::template finish<kItems>(acc, sources);
#pragma unroll
  for (u32 i = 0; i < kVectors; ++i) vectors[i] = R::Format::store(acc + i * kEach);
}

}  // namespace c10d_custom
