// On which core a waiting rank yields, and when it leaves it.
//
// Two ranks that have come to sit on one core and wait for each other by turns would stay there while another is idle:
// each yields to the other, so both have always just run, and such tasks the kernel's balancer leaves where they are.
// The kernel looks for a core only for one that wakes. So a rank that is about to yield says where it sits; and one
// that finds whom it waits for on its own core sleeps instead of yielding, once: it is woken on an idle core, if there
// is one. Where there is none they go on by yielding, which is the best that they can do there: one that sleeps would
// find its core taken by other work.
#pragma once
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "os.h"

namespace c10d_custom {

// In the segment: when and on which core its owner last began to yield. 0: it does not, it sleeps.
struct Seat {
  std::atomic<uint64_t> word;  // written by its owner

  static constexpr uint64_t kCores = 1 << 16;     // the low bits; the time's are cleared
  static constexpr int64_t kFresh = 1000 * 1000;  // ns: what is older tells of another wait
  static uint64_t taken(int64_t now, int core) { return uint64_t(now) / kCores * kCores + uint64_t(core) % kCores; }
};

// Whether there is a core for the calling thread that nobody has, where two that want to run are known to be on one.
inline bool core_is_free() {
  cpu_set_t cores;
  // Where there are more cores than fit, it fails.
  if (!sched_getaffinity(0, sizeof cores, &cores) && CPU_COUNT(&cores) < 2) return false;
  return running_threads() <= sysconf(_SC_NPROCESSORS_ONLN);  // not known: it may be
}

// One waiting thread's choice at a time; of more, some are lost, which costs a sleep.
class SeatChoice {
 public:
  // For who waits for the owner of `peer` (which may be `mine`), and is about to yield. True: it sleeps, rather.
  // `free`: core_is_free, but in tests.
  bool leaves(int64_t now, int core, Seat& mine, const Seat& peer, bool (*free)() = core_is_free) {
    const uint64_t word = Seat::taken(now, core), its = peer.word.load(std::memory_order_relaxed);
    const uint64_t age = word / Seat::kCores - its / Seat::kCores;  // it may have been written later than `now`
    const bool shared = its && &mine != &peer && word % Seat::kCores == its % Seat::kCores &&
                        int64_t(age * Seat::kCores) < Seat::kFresh;
    if (shared && due(now, free)) {
      mine.word.store(0, std::memory_order_relaxed);
      return true;
    }
    mine.word.store(word, std::memory_order_relaxed);
    return false;
  }

 private:
  bool due(int64_t now, bool (*free)()) {
    const int64_t since = now - shared_.load(std::memory_order_relaxed);
    shared_.store(now, std::memory_order_relaxed);
    if (since > kApart) pause_.store(0, std::memory_order_relaxed), next_.store(0, std::memory_order_relaxed);
    if (now < next_.load(std::memory_order_relaxed)) return false;
    if (!free()) {
      next_.store(now + kBusy, std::memory_order_relaxed);
      return false;
    }
    const int64_t pause = std::clamp(4 * pause_.load(std::memory_order_relaxed), kLeast, kMost);
    pause_.store(pause, std::memory_order_relaxed);
    next_.store(now + pause, std::memory_order_relaxed);
    return true;
  }

  static constexpr int64_t kApart = 20 * 1000 * 1000;  // ns on cores of their own: what comes then is new
  static constexpr int64_t kLeast = 1000 * 1000, kMost = 100 * 1000 * 1000;  // ns between two sleeps
  static constexpr int64_t kBusy = 2 * 1000 * 1000;                          // ns between two looks for a free core

  std::atomic<int64_t> shared_{INT64_MIN / 2}, pause_{0}, next_{0};
};

}  // namespace c10d_custom
