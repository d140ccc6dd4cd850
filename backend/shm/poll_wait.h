// Between two looks of a wait for what no futex tells of: what comes from MPI, or from a rank that polls MPI.
#pragma once
#include <sched.h>
#include <unistd.h>

#include <cstdint>

namespace c10d_custom {

// Yields the core while the wait has lasted less than `yields` ns, then sleeps, longer once nothing has come for long.
inline void poll_wait(int64_t waited, int64_t yields) {
  constexpr int64_t kPatience = 100 * 1000 * 1000;  // ns
  constexpr uint32_t kShort = 50, kLong = 1000;     // us
  if (waited < yields)
    sched_yield();
  else
    usleep(waited < kPatience ? kShort : kLong);
}

}  // namespace c10d_custom
