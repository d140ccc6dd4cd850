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

// Bytes low to high of a Vector that lies at p, which is aligned to `unit` (1, 2, 4 or more); the others
// are zero and not read. A part of a Vector is moved by the byte.
static C10D_COLD Vector gather_vector(const u8* p, u32 unit, u32 low, u32 high) {
  if (low != 0 || high != 16) unit = 1;
  Vector v;
#pragma unroll
  for (u32 w = 0; w < 4; ++w) {
    const u8* const at = p + 4 * w;
    u32 word = 0;
    if (unit >= 4) {
      word = *(const u32*)at;
    } else if (unit == 2) {
      word = *(const u16*)at | ((u32)(*(const u16*)(at + 2)) << 16);
    } else {
#pragma unroll 1
      for (u32 b = 0; b < 4; ++b) {
        if (4 * w + b >= low && 4 * w + b < high) word |= (u32)at[b] << (8 * b);
      }
    }
    v.word[w] = word;
  }
  return v;
}
static C10D_COLD void scatter_vector(u8* p, u32 unit, u32 low, u32 high, const Vector& v) {
  if (low != 0 || high != 16) unit = 1;
#pragma unroll
  for (u32 w = 0; w < 4; ++w) {
    u8* const at = p + 4 * w;
    const u32 word = v.word[w];
    if (unit >= 4) {
      *(u32*)at = word;
    } else if (unit == 2) {
      *(u16*)at = (u16)word;
      *(u16*)(at + 2) = (u16)(word >> 16);
    } else {
#pragma unroll 1
      for (u32 b = 0; b < 4; ++b) {
        if (4 * w + b >= low && 4 * w + b < high) at[b] = (u8)(word >> (8 * b));
      }
    }
  }
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
