// What the kernels ask of the machine: fixed-width types, bit casts, conversions of float16, memory
// order between ranks, time. PTX, and no header but this: NVRTC has none of the host's. The tests put a
// file of the same contents for the host in its place, and compile all others unchanged.
#pragma once

#define C10D_DEVICE static __device__ __forceinline__
// Off the fast path: not compiled anew at every call.
#define C10D_COLD __device__ __noinline__
#define C10D_KERNEL extern "C" __global__ void __launch_bounds__(512)
// A kernel's one argument.
#define C10D_ARGUMENT(TYPE) const __grid_constant__ TYPE

namespace c10d_custom {

using u8 = unsigned char;
using i8 = signed char;
using u16 = unsigned short;
using i16 = short;
using u32 = unsigned int;
using i32 = int;
using u64 = unsigned long long;
using i64 = long long;

C10D_DEVICE float as_float(u32 bits) { return __uint_as_float(bits); }
C10D_DEVICE u32 as_bits(float value) { return __float_as_uint(value); }

C10D_DEVICE float half_to_float(u32 code) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((u16)code));
  return value;
}
// To the nearest, ties to even. What a NaN becomes is open.
C10D_DEVICE u32 float_to_half(float value) {
  u16 code;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(code) : "f"(value));
  return code;
}

// ---- Memory that other ranks read and write, on this device, on others and on the host ----

C10D_DEVICE u64 load_acquire_system(const u64* p) {
  u64 value;
  asm volatile("ld.acquire.sys.u64 %0, [%1];" : "=l"(value) : "l"(p) : "memory");
  return value;
}
C10D_DEVICE u64 load_relaxed_system(const u64* p) {
  u64 value;
  asm volatile("ld.relaxed.sys.u64 %0, [%1];" : "=l"(value) : "l"(p) : "memory");
  return value;
}
C10D_DEVICE void store_release_system(u64* p, u64 value) {
  asm volatile("st.release.sys.u64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
}
C10D_DEVICE void store_relaxed_system(u64* p, u64 value) {
  asm volatile("st.relaxed.sys.u64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
}

// Two words at once, each of them whole; p is aligned to 16.
C10D_DEVICE void load_pair_relaxed_system(const u64* p, u64 (&value)[2]) {
  asm volatile("ld.relaxed.sys.v2.u64 {%0, %1}, [%2];" : "=l"(value[0]), "=l"(value[1]) : "l"(p) : "memory");
}
C10D_DEVICE void store_pair_relaxed_system(u64* p, u64 first, u64 second) {
  asm volatile("st.relaxed.sys.v2.u64 [%0], {%1, %2};" ::"l"(p), "l"(first), "l"(second) : "memory");
}

// ---- Memory of this rank's own blocks ----

C10D_DEVICE u32 add_acquire_release(u32* p, u32 value) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(p), "r"(value) : "memory");
  return before;
}

// Puts `value` there if 0 is. What was there.
C10D_DEVICE u32 exchange_if_zero(u32* p, u32 value) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.cas.b32 %0, [%1], 0, %2;" : "=r"(before) : "l"(p), "r"(value) : "memory");
  return before;
}
C10D_DEVICE void store_release(u32* p, u32 value) {
  asm volatile("st.release.gpu.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}

// Waits for all threads of the block, and orders their accesses to memory.
C10D_DEVICE void sync_block() { __syncthreads(); }
// The same; true on every thread if `mine` is on one.
C10D_DEVICE bool sync_block_or(bool mine) { return __syncthreads_or(mine) != 0; }

C10D_DEVICE u64 clock_ns() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

}  // namespace c10d_custom
