// backend/cuda/device.h for the host: every CUDA thread is a thread of the host's, or a turn of a loop where
// no thread waits for another.
#pragma once
#include <pthread.h>
#include <sched.h>
#include <time.h>

// The compiler cannot know that no kernel folds no sources.
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#define __device__
#define C10D_DEVICE static inline
#define C10D_COLD __attribute__((noinline, unused))
#define C10D_KERNEL extern "C" __attribute__((visibility("default"))) void
#define C10D_ARGUMENT(TYPE) const TYPE&

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct dim3 {
  unsigned x = 1;
};

namespace c10d_custom {

using u8 = unsigned char;
using i8 = signed char;
using u16 = unsigned short;
using i16 = short;
using u32 = unsigned int;
using i32 = int;
using u64 = unsigned long long;
using i64 = long long;

// Set by whoever runs a kernel.
inline thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

template <class To, class From>
static inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}
static inline float as_float(u32 bits) { return bit_cast<float>(bits); }
static inline u32 as_bits(float value) { return bit_cast<u32>(value); }

// By arithmetic that shares nothing with the codecs: through double, where every step is exact.
static inline float half_to_float(u32 code) {
  const double sign = code & 0x8000 ? -1 : 1;
  const u32 exponent = code >> 10 & 31, fraction = code & 1023;
  if (exponent == 31) return (float)(fraction ? __builtin_nan("") : sign * __builtin_inf());
  return (float)(sign * __builtin_ldexp(exponent ? fraction + 1024 : fraction, (exponent ? (int)exponent : 1) - 25));
}
static inline u32 float_to_half(float value) {
  const u32 sign = as_bits(value) >> 16 & 0x8000;
  const double magnitude = __builtin_fabs((double)value);
  if (magnitude == 0) return sign;
  if (magnitude >= 65520) return sign | 0x7c00;
  int exponent;
  __builtin_frexp(magnitude, &exponent);
  if (exponent < -13) exponent = -13;
  // In units of the last place; the addend makes the adder round to a whole number of them.
  const double units = __builtin_ldexp(magnitude, 11 - exponent);
  volatile double rounded = units + 4503599627370496.0;
  return sign | ((u32)(exponent + 13) * 1024 + (u32)(rounded - 4503599627370496.0));
}

// ---- Memory that other ranks read and write ----

// Stands before every step that others can see: the tests make threads late there.
inline void (*delay)() = nullptr;

// A thread that waits lets others run: there are more of them than cores.
static inline u64 load_acquire_system(const u64* p) {
  sched_yield();
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
static inline u64 load_relaxed_system(const u64* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
static inline void store_release_system(u64* p, u64 value) { __atomic_store_n(p, value, __ATOMIC_RELEASE); }
static inline void store_relaxed_system(u64* p, u64 value) { __atomic_store_n(p, value, __ATOMIC_RELAXED); }
static inline void load_pair_relaxed_system(const u64* p, u64 (&value)[2]) {
  if (delay) delay();
  sched_yield();
  for (u32 i = 0; i < 2; ++i) value[i] = load_relaxed_system(p + i);
}
static inline void store_pair_relaxed_system(u64* p, u64 first, u64 second) {
  store_relaxed_system(p, first);
  if (delay) delay();
  store_relaxed_system(p + 1, second);
}
static inline u32 add_acquire_release(u32* p, u32 value) { return __atomic_fetch_add(p, value, __ATOMIC_ACQ_REL); }
static inline u32 exchange_if_zero(u32* p, u32 value) {
  u32 before = 0;
  __atomic_compare_exchange_n(p, &before, value, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
  return before;
}
static inline void store_release(u32* p, u32 value) { __atomic_store_n(p, value, __ATOMIC_RELEASE); }

// The threads of a block.
class Block {
 public:
  explicit Block(unsigned threads) { pthread_barrier_init(&barrier_, nullptr, threads); }
  ~Block() { pthread_barrier_destroy(&barrier_); }
  Block(const Block&) = delete;
  void sync() { pthread_barrier_wait(&barrier_); }
  bool any(bool mine) {
    if (mine) __atomic_store_n(&any_, true, __ATOMIC_RELAXED);
    sync();
    const bool result = __atomic_load_n(&any_, __ATOMIC_RELAXED);
    sync();
    __atomic_store_n(&any_, false, __ATOMIC_RELAXED);
    sync();
    return result;
  }

 private:
  pthread_barrier_t barrier_;
  bool any_ = false;
};
inline thread_local Block* block;

static inline void sync_block() {
  if (delay) delay();
  block->sync();
}
static inline bool sync_block_or(bool mine) {
  if (delay) delay();
  return block->any(mine);
}

static inline u64 clock_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (u64)now.tv_sec * 1000000000u + (u64)now.tv_nsec;
}

}  // namespace c10d_custom
