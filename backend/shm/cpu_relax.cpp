#include "cpu_relax.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace c10d_custom {
namespace {

std::atomic<bool> cool{false};

#if defined(__x86_64__)

Relaxing ask_processor() {
  unsigned a, b, c, d;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) && (c & 1u << 5)) return Relaxing::kUmwait;
  if (__get_cpuid(0x80000001, &a, &b, &c, &d) && (c & 1u << 29)) return Relaxing::kMwaitx;
  return Relaxing::kPause;
}

#elif defined(__aarch64__)

constexpr unsigned long kEvents = 1ul << 2;  // of AT_HWCAP: the kernel ends each WFE some 10,000 times a second
constexpr unsigned long kWfxt = 1ul << 31;   // of AT_HWCAP2

Relaxing ask_processor() {
  if (getauxval(AT_HWCAP2) & kWfxt) return Relaxing::kWfet;
  return getauxval(AT_HWCAP) & kEvents ? Relaxing::kWfe : Relaxing::kPause;
}

#else

Relaxing ask_processor() { return Relaxing::kPause; }

#endif

}  // namespace

Relaxing relaxing() {
  static const Relaxing found = ask_processor();
  return found;
}

void stay_cool(bool stays) { cool.store(stays, std::memory_order_relaxed); }

namespace relax {

#if defined(__x86_64__)

// As bytes: assemblers of before 2019 do not know the first two.
void watch(Relaxing how, const void* line) {
  if (how == Relaxing::kUmwait)
    asm volatile(".byte 0xf3, 0x0f, 0xae, 0xf0" ::"a"(line) : "memory");  // umonitor rax
  else if (how == Relaxing::kMwaitx)
    asm volatile(".byte 0x0f, 0x01, 0xfa" ::"a"(line), "c"(0), "d"(0) : "memory");  // monitorx
}

void wait(Relaxing how, uint32_t cycles) {
  const bool deep = cool.load(std::memory_order_relaxed);
  if (how == Relaxing::kUmwait) {
    const uint64_t until = __builtin_ia32_rdtsc() + cycles;
    const uint32_t light = deep ? 0 : 1;  // C0.2, C0.1
    asm volatile(".byte 0xf2, 0x0f, 0xae, 0xf1" ::"c"(light), "d"(uint32_t(until >> 32)), "a"(uint32_t(until))
                 : "memory", "cc");  // umwait ecx
  } else if (how == Relaxing::kMwaitx) {
    const uint32_t light = deep ? 0 : 0xf0;                                               // C1, none
    asm volatile(".byte 0x0f, 0x01, 0xfb" ::"a"(light), "b"(cycles), "c"(2) : "memory");  // mwaitx, with a timer
  } else {
    cpu_relax();
  }
}

#elif defined(__aarch64__)

// A load of which the processor remembers the line: it being written is an event.
void watch(Relaxing, const void* line) {
  uint64_t value;
  const auto at = reinterpret_cast<uintptr_t>(line) & ~uintptr_t(7);
  asm volatile("ldaxr %0, [%1]" : "=r"(value) : "r"(at) : "memory");
}

void wait(Relaxing how, uint32_t cycles) {
  if (how == Relaxing::kWfet) {
    uint64_t now;
    asm volatile("isb\n\tmrs %0, cntvct_el0" : "=r"(now)::"memory");
    register uint64_t until asm("x0") = now + cycles;
    asm volatile(".inst 0xd5031000" ::"r"(until) : "memory");  // wfet x0
  } else if (how == Relaxing::kWfe) {
    asm volatile("wfe" ::: "memory");
  } else {
    cpu_relax();
  }
}

#else

void watch(Relaxing, const void*) {}
void wait(Relaxing, uint32_t) { cpu_relax(); }

#endif

}  // namespace relax
}  // namespace c10d_custom
