// Who has which cache line of a segment: a directory as of processors with caches without end. The core is compiled as
// for ThreadSanitizer, whose calls before each access to memory come here instead (Makefile). So a line is counted when
// it moves from core to core, and not when a rank looks again and again at one that it has: waiting costs nothing.
//
// A rank is a thread of this process, with one mapping of the segment for all (one_mapping.h). For one file of a test.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <mutex>
#include <vector>

namespace lines {

constexpr uint64_t kLineBytes = 64;

inline thread_local int rank = -1;  // of this thread; -1: it is none, and not counted

enum Kind { kControl, kData, kWaiting };
enum How { kReads, kWrites, kModifies };

class Directory {
 public:
  // kind: of the line at an offset.
  void watch(const void* base, uint64_t bytes, uint32_t ranks, std::function<Kind(uint64_t)> kind) {
    std::lock_guard<std::mutex> hold(mutex_);
    lines_.assign(bytes / kLineBytes + 1, Line{});
    ranks_ = ranks, bytes_ = bytes, kind_ = std::move(kind);
    base_.store(reinterpret_cast<uintptr_t>(base), std::memory_order_seq_cst);
  }
  void forget() { base_.store(0); }

  // From now on, from 0.
  void count(bool on) {
    std::lock_guard<std::mutex> hold(mutex_);
    counts_ = on;
    if (on)
      for (auto& each : moved_) each.assign(ranks_ * ranks_, 0);
  }

  // `touch` does the access: with its count as one step, for what ranks wait for.
  template <class Touch>
  auto access(const void* at, uint64_t bytes, How how, const Touch& touch) {
    const uintptr_t base = base_.load(std::memory_order_relaxed), from = reinterpret_cast<uintptr_t>(at);
    if (rank < 0 || !base || !bytes || from < base || from >= base + bytes_) return touch();
    std::lock_guard<std::mutex> hold(mutex_);
    const uint64_t me = 1ull << rank;
    for (uint64_t i = (from - base) / kLineBytes; i <= (from + bytes - 1 - base) / kLineBytes; ++i) {
      Line& line = lines_[i];
      if (counts_ && how != kWrites && line.writer && line.writer != rank + 1 && !(line.holders & me))
        ++moved_[kind_(i * kLineBytes)][uint64_t(rank) * ranks_ + line.writer - 1];
      if (how != kReads)
        line.holders = me, line.writer = uint8_t(rank + 1);
      else
        line.holders |= me;
    }
    return touch();
  }

  // Lines that a rank has read and another had written since it last did: [reader * ranks + writer].
  const std::vector<uint64_t>& moved(Kind kind) const { return moved_[kind]; }

 private:
  struct Line {
    uint64_t holders = 0;  // ranks that have it as it is
    uint8_t writer = 0;    // 1 + the last
  };
  std::mutex mutex_;
  std::vector<Line> lines_;
  std::vector<uint64_t> moved_[3];
  std::function<Kind(uint64_t)> kind_;
  uint32_t ranks_ = 0;
  uint64_t bytes_ = 0;
  std::atomic<uintptr_t> base_{0};
  bool counts_ = false;
};

inline Directory directory;

inline void reads(const void* at, uint64_t bytes) {
  directory.access(at, bytes, kReads, [] {});
}
inline void writes(const void* at, uint64_t bytes) {
  directory.access(at, bytes, kWrites, [] {});
}

}  // namespace lines

extern "C" {
void* __real_memcpy(void*, const void*, size_t);
void* __real_memmove(void*, const void*, size_t);

void* __wrap_memmove(void* to, const void* from, size_t bytes) {
  lines::reads(from, bytes), lines::writes(to, bytes);
  return __real_memmove(to, from, bytes);
}
void* __wrap_memcpy(void* to, const void* from, size_t bytes) { return __wrap_memmove(to, from, bytes); }

// What compilers call: GCC and Clang, as far as they differ.
void* __tsan_memcpy(void* to, const void* from, size_t bytes) { return __wrap_memmove(to, from, bytes); }
void* __tsan_memmove(void* to, const void* from, size_t bytes) { return __wrap_memmove(to, from, bytes); }
void* __tsan_memset(void* to, int value, size_t bytes) { return lines::writes(to, bytes), memset(to, value, bytes); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_ignore_thread_begin() {}
void __tsan_ignore_thread_end() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_read_range(void* at, unsigned long bytes) { lines::reads(at, bytes); }
void __tsan_write_range(void* at, unsigned long bytes) { lines::writes(at, bytes); }
void __tsan_atomic_thread_fence(int) { std::atomic_thread_fence(std::memory_order_seq_cst); }
void __tsan_atomic_signal_fence(int) {}

#define ACCESS(N)                                                    \
  void __tsan_read##N(void* at) { lines::reads(at, N); }             \
  void __tsan_write##N(void* at) { lines::writes(at, N); }           \
  void __tsan_unaligned_read##N(void* at) { lines::reads(at, N); }   \
  void __tsan_unaligned_write##N(void* at) { lines::writes(at, N); } \
  void __tsan_volatile_read##N(void* at) { lines::reads(at, N); }    \
  void __tsan_volatile_write##N(void* at) { lines::writes(at, N); }  \
  void __tsan_read_write##N(void* at) { lines::writes(at, N); }      \
  void __tsan_unaligned_read_write##N(void* at) { lines::writes(at, N); }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
#undef ACCESS

#define TOUCHES(T, HOW, WHAT) \
  lines::directory.access(const_cast<const T*>(at), sizeof(T), lines::HOW, [&] { return WHAT; })
#define MODIFY(N, T, NAME)                                                      \
  T __tsan_atomic##N##_##NAME(volatile T* at, T value, int) {                   \
    return TOUCHES(T, kModifies, __atomic_##NAME(at, value, __ATOMIC_SEQ_CST)); \
  }
#define EXCHANGE(N, T, KIND, WEAK)                                                                          \
  int __tsan_atomic##N##_compare_exchange_##KIND(volatile T* at, T* seen, T value, int, int) {              \
    return TOUCHES(T, kModifies,                                                                            \
                   __atomic_compare_exchange_n(at, seen, value, WEAK, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)); \
  }
#define ATOMIC(N, T)                                                                     \
  T __tsan_atomic##N##_load(const volatile T* at, int) {                                 \
    return TOUCHES(T, kReads, __atomic_load_n(at, __ATOMIC_SEQ_CST));                    \
  }                                                                                      \
  void __tsan_atomic##N##_store(volatile T* at, T value, int) {                          \
    TOUCHES(T, kWrites, __atomic_store_n(at, value, __ATOMIC_SEQ_CST));                  \
  }                                                                                      \
  MODIFY(N, T, exchange_n)                                                               \
  MODIFY(N, T, fetch_add)                                                                \
  MODIFY(N, T, fetch_sub)                                                                \
  MODIFY(N, T, fetch_and)                                                                \
  MODIFY(N, T, fetch_or)                                                                 \
  MODIFY(N, T, fetch_xor)                                                                \
  T __tsan_atomic##N##_exchange(volatile T* at, T value, int order) {                    \
    return __tsan_atomic##N##_exchange_n(at, value, order);                              \
  }                                                                                      \
  EXCHANGE(N, T, strong, false)                                                          \
  EXCHANGE(N, T, weak, true)                                                             \
  T __tsan_atomic##N##_compare_exchange_val(volatile T* at, T seen, T value, int, int) { \
    __tsan_atomic##N##_compare_exchange_strong(at, &seen, value, 0, 0);                  \
    return seen;                                                                         \
  }
ATOMIC(8, uint8_t)
ATOMIC(16, uint16_t)
ATOMIC(32, uint32_t)
ATOMIC(64, uint64_t)
#undef ATOMIC
#undef MODIFY
#undef EXCHANGE
#undef TOUCHES
}
