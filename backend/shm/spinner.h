// How long to spin before sleeping.
//
// Where peers have cores of their own they answer in microseconds, and a sleep costs both sides a
// wake-up of ten times that. Where cores are busy, a spin takes one from whoever would have answered.
// Which of the two holds changes while a program runs, and two ranks that both sleep look as slow to
// each other as busy ones do. So: spin while most spins succeed; otherwise sleep, but try again for
// kTrial in every kPeriod, all ranks at once, by the clock that the processes of a host share.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>

namespace c10d_custom {

class Spinner {
 public:
  explicit Spinner(int64_t limit_ns) : limit_(limit_ns) {}

  // For a wait that begins now.
  int64_t budget(int64_t now) const {
    const bool spins = score_.load(std::memory_order_relaxed) > kEven || now % kPeriod < kTrial;
    return spins ? limit_ : std::min(limit_, kLeast);
  }
  // How a spin of that budget ended. Threads may lose each other's counts: it is a tendency.
  void spun(int64_t budget, bool success) {
    if (budget < limit_) return;
    const int score = score_.load(std::memory_order_relaxed);
    score_.store(score + ((success ? kFull : 0) - score) / 16, std::memory_order_relaxed);
  }

 private:
  static constexpr int64_t kLeast = 1000;  // ns: an answer that is under way already
  static constexpr int64_t kPeriod = 100 * 1000 * 1000, kTrial = 4 * 1000 * 1000;
  static constexpr int kFull = 1 << 16, kEven = kFull / 2;

  const int64_t limit_;
  std::atomic<int> score_{kFull};
};

}  // namespace c10d_custom
