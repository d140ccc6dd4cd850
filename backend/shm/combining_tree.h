// How a large number of ranks learn that all have come, each by a few cache lines: a combining tree (Yew, Tzeng, Lawrie
// 1987).
//
// The ranks are the leaves of a tree of counters. Each adds one to the counter it shares with its neighbours, and
// whoever makes it full goes on to the next one up; who makes the root's full has come last of all, and says so in one
// word that all wait for. So nobody waits on the way up, and nobody but the last of each counter looks at more than its
// own.
//
// It combines a flag, too: whether any rank has raised one, or whoever made a counter full found that two of the ranks
// below it differ. Who makes a counter full compares its own call with that of the first rank of every other branch
// below it. Inside each branch the same was done before. So, by induction, no flag means that all calls are alike.
//
// A round begins when all have come to the one before, and a rank comes to each round once.
#pragma once
#include <algorithm>

#include "layout.h"

namespace c10d_custom {

class CombiningTree {
 public:
  CombiningTree(char* counters, uint32_t rank, const Geometry& g)
      : counters_(reinterpret_cast<Counter*>(counters)), rank_(rank), n_(g.ranks), fan_in_(n_ > 1 ? g.fan_in : 0) {}

  bool in_use() const { return fan_in_ != 0; }
  // The rounds this rank has come to.
  uint64_t rounds() const { return rounds_; }

  // This rank comes to the next round. `differs(r)`: whether rank r, which has come, is not like this one. True: it is
  // the last of all, and *any whether a flag was raised.
  template <class Differs>
  bool come(bool flag, const Differs& differs, bool* any) {
    ++rounds_;
    Counter* level = counters_;
    uint32_t index = rank_, width = n_;  // among the branches of this level
    for (uint64_t stride = 1;; stride *= fan_in_) {
      Counter& counter = level[index / fan_in_];
      const uint32_t first = index / fan_in_ * fan_in_, branches = std::min(fan_in_, width - first);
      // acq_rel: what the ranks below have written before they came is seen by whoever makes it full.
      const uint64_t come = counter.come.fetch_add(1 + (flag ? kFlag : 0), std::memory_order_acq_rel) + 1;
      if (come % kFlag != rounds_ * branches % kFlag) return false;
      for (uint32_t i = first; i < first + branches && !flag; ++i) flag = i != index && differs(uint32_t(i * stride));
      const uint64_t flags = counter.come.load(std::memory_order_relaxed) / kFlag;
      flag = flag || flags != counter.flags_before.load(std::memory_order_relaxed);
      counter.flags_before.store(flags, std::memory_order_relaxed);
      const uint32_t counters = (width + fan_in_ - 1) / fan_in_;
      if (counters == 1) return *any = flag, true;
      level += counters, index /= fan_in_, width = counters;
    }
  }

 private:
  using Counter = TreeCounter;
  static constexpr uint64_t kFlag = TreeCounter::kFlag;

  Counter* const counters_;
  const uint32_t rank_, n_, fan_in_;
  uint64_t rounds_ = 0;
};

}  // namespace c10d_custom
