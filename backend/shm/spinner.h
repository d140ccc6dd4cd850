// How long to stay awake in a wait on one host before sleeping (waits between hosts: poll_wait.h).
//
// Where peers have cores of their own they answer in microseconds, and a sleep costs both sides a
// wake-up of ten times that. Where ranks outnumber cores, the answer needs our core: yield it between
// looks, and it goes to the very rank we wait for. Where cores are busy with other work, a yield gives
// that work a whole time slice, and only a sleeper, woken, comes before it: so a yield that took
// longer than ranks hold a core for is the last for a while, and longer and longer as it goes on so.
#pragma once
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "os.h"

namespace c10d_custom {

class Spinner {
 public:
  explicit Spinner(int64_t limit_ns) : limit_(limit_ns) {}

  // Looks until `done` or the limit; `between` looks it may do something else. Returns whether it is done.
  // `leaves`: asked before the first yield, whether to sleep rather (seat.h).
  template <class Done, class Between, class Leaves>
  bool spin(int64_t began, int64_t deadline, Done done, Between between, Leaves leaves) {
    int64_t now = began;
    for (const int64_t until = std::min(deadline, began + kSpin); now < until; now = now_ns())
      for (int i = 0; i < 32; ++i) {
        if (done()) return true;
        cpu_relax();
      }
    if (now < sleep_until_.load(std::memory_order_relaxed) || leaves(now)) return false;
    const int64_t first = now;
    for (const int64_t until = std::min(deadline, began + limit_); now < until;) {
      between();
      sched_yield();
      if (done()) {
        count(now - first);
        return true;
      }
      const int64_t before = now;
      now = now_ns();
      if (now - before > kYieldToOthers) {
        count(before - first);
        avoid(now);
        return false;
      }
    }
    count(now - first);
    return false;
  }

 private:
  // Threads may lose each other's; it is an estimate.
  void count(int64_t ns) { yielding_.store(yielding_.load(std::memory_order_relaxed) + ns, std::memory_order_relaxed); }

  void avoid(int64_t now) {
    const bool again = yielding_.load(std::memory_order_relaxed) < kSoon;
    const int64_t next = again ? std::min(4 * avoided_.load(std::memory_order_relaxed), kMost) : kLeast;
    avoided_.store(next, std::memory_order_relaxed);
    yielding_.store(0, std::memory_order_relaxed);
    sleep_until_.store(now + next, std::memory_order_relaxed);
  }

  static constexpr int64_t kSpin = 1000;                      // ns: an answer that is under way already
  static constexpr int64_t kYieldToOthers = 2 * 1000 * 1000;  // longer than that, a yield went to other work
  static constexpr int64_t kLeast = 10 * 1000 * 1000, kMost = 2000 * 1000 * 1000;  // ns without a yield
  // ns of yielding between two slow ones: with less, they tell of the same work. Not of time: a group may rest
  // meanwhile.
  static constexpr int64_t kSoon = 50 * 1000 * 1000;

  const int64_t limit_;
  std::atomic<int64_t> sleep_until_{0}, avoided_{kLeast / 4}, yielding_{0};
};

}  // namespace c10d_custom
