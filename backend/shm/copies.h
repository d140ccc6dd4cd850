// Copies between a rank's memory and what ranks share: through the caches, or past them.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "os.h"
#include "team.h"

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

// Past the caches: the lines it writes are not read first, and are in no cache afterwards. memcpy, where there is
// nothing of the kind.
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

// --- copy in: into memory that a peer reads and that is written again and again: through the caches, or past them.
//
// Where both ranks' cores have a last cache in common, a plain store is better: the peer finds the bytes there. Where
// they have not (other sockets, other core complexes of one socket) each line must first be fetched from the peer's
// cache, which takes several times as long as to write it past them. Which of the two holds is measured, copy by copy:
// ranks move between cores, the cores of a virtual machine between those of its host.

// What is known of the two ways. A cost may have any unit, the same for both.
class TwoWays {
 public:
  // The way for the next copy; now and then the one that seems slower.
  bool past() { return ++copies_ % kTry ? better_ : !better_; }

  // Each figure goes after the median of what it is told: up by a step where that was more, down where less. So a copy
  // during which the core was taken away counts as much as any other.
  void took(bool past, double cost) {
    double& known = known_[past];
    known *= known < cost ? kStep : 1 / kStep;
    better_ = known_[0] > kFor * known_[1];
  }

 private:
  static constexpr uint32_t kTry = 32;
  static constexpr double kStep = 1.125, kFor = 1.5;  // what is in the cache saves the reader time, too

  double known_[2] = {1, 1};
  uint32_t copies_ = 0;
  bool better_ = false;
};

// For one thread at a time.
class CopyIn {
 public:
  static constexpr uint64_t kWorth = 16 << 10;  // bytes: of less, the clock would be a part of the cost

  // `team`: who shares the copies; null: nobody.
  explicit CopyIn(Team* team = nullptr) : team_(team) {}

  void operator()(void* to, const void* from, uint64_t size) {
    if (!kCanPassCaches || size < kWorth) {
      if (size) memcpy(to, from, size);
      return;
    }
    const bool past = ways_.past();
    const uint64_t began = ticks();
    const auto copy = past ? copy_nontemporal : through;
    if (team_)
      team_->copy(copy, to, from, size);
    else
      copy(to, from, size);
    ways_.took(past, double(ticks() - began) / double(size));
  }

 private:
  static void through(void* to, const void* from, uint64_t size) { memcpy(to, from, size); }

  static uint64_t ticks() {
#if defined(__x86_64__)
    return __builtin_ia32_rdtsc();
#else
    return 0;
#endif
  }

  Team* const team_;
  TwoWays ways_;
};

// --- copy out: into a rank's own memory, past the caches where these cannot hold it.
//
// A plain store reads the line it writes to, and leaves it in the cache: a third of a large copy's traffic, and of no
// use where the buffers of all ranks together are larger than the cache.

class CopyOut {
 public:
  // touched: bytes of input and output of all ranks on the host.
  explicit CopyOut(uint64_t touched) : nontemporal_(touched >= limit()) {}

  void operator()(void* to, const void* from, uint64_t size) const {
    if (nontemporal_)
      copy_nontemporal(to, from, size);
    else
      memcpy(to, from, size);
  }

 private:
  // Half of the last cache: the rings are in it, too. sysconf would give the sum of all there are.
  static uint64_t limit() {
    static const uint64_t half = [] {
      uint64_t kib = 0;
      number_after(file_text("/sys/devices/system/cpu/cpu0/cache/index3/size"), "", &kib);
      return (kib ? kib : 32 << 10) << 9;
    }();
    return half;
  }

  bool nontemporal_;
};

}  // namespace c10d_custom
