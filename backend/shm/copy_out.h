// Copies into a rank's own memory, past the caches where these cannot hold it.
//
// A plain store reads the line it writes to, and leaves it in the cache: a third of a large copy's traffic, and of no use
// where the buffers of all ranks together are larger than the cache.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>

#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define C10D_STREAMS 1  // the sanitizers see no such stores
#include <emmintrin.h>
#endif

namespace c10d_custom {

class CopyOut {
 public:
  // touched: bytes of input and output of all ranks on the host.
  explicit CopyOut(uint64_t touched) : past_caches_(touched >= limit()) {}

  void operator()(void* to, const void* from, uint64_t size) const {
    if (past_caches_) stream(static_cast<char*>(to), static_cast<const char*>(from), size);
    else memcpy(to, from, size);
  }

 private:
  // Half of the last cache: the rings are in it, too. sysconf would give the sum of all there are.
  static uint64_t limit() {
    static const uint64_t half = [] {
      unsigned long kib = 0;
      if (FILE* f = fopen("/sys/devices/system/cpu/cpu0/cache/index3/size", "re")) {
        if (fscanf(f, "%luK", &kib) != 1) kib = 0;
        fclose(f);
      }
      return uint64_t(kib ? kib : 32 << 10) << 9;
    }();
    return half;
  }

  static void stream(char* to, const char* from, uint64_t size) {
#ifdef C10D_STREAMS
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
    memcpy(to, from, size);
#endif
  }

  bool past_caches_;
};

}  // namespace c10d_custom
