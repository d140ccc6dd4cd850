// Whose turn it is among the collectives of a group that are carried out above the core: one at a time, in the order of
// their numbers. One word, so that a number and the turn are taken in one step: by the queue (transport/tickets.py),
// whose lock guards what waits, and by the fast path (leader_all_reduce.h), which takes no lock. The word has the lower
// 40 bits of the number. `whole` finds the upper ones by `near_`, a number that was given not long ago: all that are in
// use differ from it by less than 2^39.
#pragma once
#include <atomic>

#include "../shm/api.h"

namespace c10d_custom {

class Sequencer {
 public:
  uint64_t last() const { return whole(word_.load(std::memory_order_acquire) >> kNumber); }

  // Takes the next number and the turn. 0: a collective is under way or waits.
  uint64_t take() {
    uint64_t word = word_.load(std::memory_order_relaxed);
    do {
      if (word & (kTaken | kWaiting)) return 0;
    } while (!word_.compare_exchange_weak(word, word + (1ull << kNumber) + kTaken));
    return given((word >> kNumber) + 1);
  }

  // Takes the next number, and waits.
  uint64_t wait() { return given((word_.fetch_add((1ull << kNumber) + kOneWaits) >> kNumber) + 1); }

  // Takes the turn for the number that has waited longest. 0: none waits, or another is under way.
  uint64_t next() {
    uint64_t word = word_.load(std::memory_order_relaxed), after;
    do {
      if (word & kTaken || !(word & kWaiting)) return 0;
      after = word - kOneWaits + kTaken;
    } while (!word_.compare_exchange_weak(word, after));
    return number_of(after);
  }

  // The number that has the turn, or 0.
  uint64_t under_way() const {
    const uint64_t word = word_.load(std::memory_order_acquire);
    return word & kTaken ? number_of(word) : 0;
  }

  // True if somebody waits for that: a collective, or who closes the group.
  bool free() { return word_.fetch_sub(kTaken) & (kWaiting | kClosing); }

  void close() { word_.fetch_or(kClosing); }

 private:
  static constexpr uint64_t kTaken = 1, kClosing = 2, kOneWaits = 4, kWaiting = 0xfffffc;
  static constexpr int kNumber = 24;  // bits below it

  // Of the collective under way: those that wait have come after it.
  uint64_t number_of(uint64_t word) const { return whole((word >> kNumber) - (word & kWaiting) / kOneWaits); }

  // The number that has these lower bits (others are ignored).
  uint64_t whole(uint64_t low) const {
    const uint64_t near = near_.load(std::memory_order_relaxed);
    return near + uint64_t(int64_t((low - near) << kNumber) >> kNumber);
  }
  uint64_t given(uint64_t low) {
    const uint64_t number = whole(low);
    near_.store(number, std::memory_order_relaxed);
    return number;
  }

  std::atomic<uint64_t> word_{0};
  std::atomic<uint64_t> near_{0};  // a number that was given not long ago
};

}  // namespace c10d_custom

// The memory is the caller's: sixteen bytes, zeros at first.
C10D_API uint64_t c10d_sequencer_last(const c10d_custom::Sequencer*);
C10D_API uint64_t c10d_sequencer_take(c10d_custom::Sequencer*);
C10D_API uint64_t c10d_sequencer_wait(c10d_custom::Sequencer*);
C10D_API uint64_t c10d_sequencer_next(c10d_custom::Sequencer*);
C10D_API uint64_t c10d_sequencer_under_way(const c10d_custom::Sequencer*);
C10D_API int c10d_sequencer_free(c10d_custom::Sequencer*);
C10D_API void c10d_sequencer_close(c10d_custom::Sequencer*);
