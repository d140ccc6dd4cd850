// The build of the kernels (reduce_impl.inc) for x86-64 with AVX-512 (F, BW, DQ, VL). The instruction set is chosen
// here, not by a build flag, so that nothing outside this region (inline functions of headers above all) can pick it
// up; that is also why the headers come first.
#if defined(__x86_64__)
#include <immintrin.h>

#include "reduce.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,f16c")
#endif

#define KERNEL_NS reduce_x86_v4
#define KERNEL_VECTOR_BYTES 64
#define KERNEL_F16C 1
#include "reduce_impl.inc"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
