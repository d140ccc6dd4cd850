// Copies into memory that a peer reads and that is written again and again: through the caches, or past them.
//
// Where both ranks' cores have a last cache in common, a plain store is better: the peer finds the bytes there. Where
// they have not (other sockets, other core complexes of one socket) each line must first be fetched from the peer's
// cache, which takes several times as long as to write it past them. Which of the two holds is measured, copy by copy:
// ranks move between cores, the cores of a virtual machine between those of its host.
#pragma once
#include <cstdint>
#include <cstring>

#include "nontemporal.h"
#include "team.h"

namespace c10d_custom {

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

  static constexpr uint64_t kWorth = 16 << 10;  // bytes: of less, the clock would be a part of the cost

  Team* const team_;
  TwoWays ways_;
};

}  // namespace c10d_custom
