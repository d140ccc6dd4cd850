// A copy that goes past the caches: the lines it writes are not read first, and are in no cache afterwards.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define C10D_STREAMS 1  // the sanitizers see no such stores
#include <emmintrin.h>
#endif

namespace c10d_custom {

#ifdef C10D_STREAMS
constexpr bool kCanPassCaches = true;
#else
constexpr bool kCanPassCaches = false;
#endif

// memcpy, where there is nothing of the kind.
inline void copy_nontemporal(void* dst, const void* src, uint64_t size) {
#ifdef C10D_STREAMS
  char* to = static_cast<char*>(dst);
  const char* from = static_cast<const char*>(src);
  const uint64_t head = std::min<uint64_t>(size, -reinterpret_cast<uintptr_t>(to) & 63);
  memcpy(to, from, head);
  to += head, from += head, size -= head;
  for (; size >= 64; to += 64, from += 64, size -= 64) {  // whole lines: a part of one would be written by itself
    __m128i line[4];
    memcpy(line, from, 64);
    for (int i = 0; i < 4; ++i) _mm_stream_si128(reinterpret_cast<__m128i*>(to) + i, line[i]);
  }
  memcpy(to, from, size);
  _mm_sfence();  // other threads may read it after the next release
#else
  memcpy(dst, src, size);
#endif
}

}  // namespace c10d_custom
