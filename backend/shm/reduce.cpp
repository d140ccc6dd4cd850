// Picks, once per process, the fastest build of the reduction kernels that this machine can run.
#include "reduce.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace c10d_custom {

#if defined(__x86_64__)
namespace reduce_x86_v4 {
ReduceFn kernel(uint32_t dtype, uint32_t op);
}
namespace reduce_x86_v3 {
ReduceFn kernel(uint32_t dtype, uint32_t op);
}
#endif
namespace reduce_baseline {
ReduceFn kernel(uint32_t dtype, uint32_t op);
}

namespace {

#if defined(__x86_64__)
// Asked of the processor rather than of __builtin_cpu_supports, whose table lives in a part of
// libgcc that not every tool chain links, and in which older compilers do not know "f16c".
struct X86Features {
  bool v3 = false, v4 = false;

  X86Features() {
    unsigned eax, ebx, ecx, edx;
    constexpr unsigned kOsxsave = 1u << 27, kAvx = 1u << 28, kF16c = 1u << 29;
    constexpr unsigned kNeeded = kOsxsave | kAvx | kF16c;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || (ecx & kNeeded) != kNeeded) return;
    // An instruction set is of use only if the operating system saves its registers.
    unsigned saved, saved_high;
    __asm__("xgetbv" : "=a"(saved), "=d"(saved_high) : "c"(0));
    constexpr unsigned kYmmState = 0x06, kZmmState = 0xe6;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return;
    constexpr unsigned kAvx2 = 1u << 5;
    constexpr unsigned kAvx512 = 1u << 16 /* F */ | 1u << 17 /* DQ */ | 1u << 30 /* BW */ | 1u << 31 /* VL */;
    v3 = (ebx & kAvx2) != 0 && (saved & kYmmState) == kYmmState;
    v4 = v3 && (ebx & kAvx512) == kAvx512 && (saved & kZmmState) == kZmmState;
  }
};

const X86Features& features() {
  static const X86Features found;
  return found;
}

bool has_v3() { return features().v3; }
bool has_v4() { return features().v4; }
#endif

bool always() { return true; }

const ReduceVariant& fastest() {
  static const ReduceVariant& chosen = []() -> const ReduceVariant& {
    const ReduceVariant* variant = kReduceVariants;
    while (!variant->runs_here()) ++variant;
    return *variant;
  }();
  return chosen;
}

}  // namespace

const ReduceVariant kReduceVariants[] = {
#if defined(__x86_64__)
    {"x86-64-v4", has_v4, reduce_x86_v4::kernel},
    {"x86-64-v3", has_v3, reduce_x86_v3::kernel},
#endif
    {"baseline", always, reduce_baseline::kernel},
};
const unsigned kReduceVariantCount = sizeof(kReduceVariants) / sizeof(kReduceVariants[0]);

ReduceFn reduce_kernel(uint32_t dtype, uint32_t op) { return fastest().kernel(dtype, op); }

const char* reduce_variant() { return fastest().name; }

}  // namespace c10d_custom
