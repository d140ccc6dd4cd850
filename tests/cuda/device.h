// backend/cuda/device.h for the host: every CUDA thread is a thread of the host's, or a turn of a loop where
// no thread waits for another.
#pragma once
#include <time.h>

#define __device__
#define C10D_DEVICE static inline
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

}  // namespace c10d_custom
