// Where the ranks of a host read what each of them is calling over hosts, and its small payload: a slot for each in the
// shared memory of their group (c10d_call_slots), and one for the result.
//
// A rank puts up each of its calls, in order, and overwrites the one before. The leader, the first rank, takes a
// small all_reduce's payloads once all have put up that call, and the others its result. So nobody overwrites a payload
// or a result that is still to be read: who puts up the next call has read the result of this, and the leader
// writes the next result after all have put up the next call.
#pragma once
#include <atomic>
#include <cstring>

#include "../shm/api.h"
#include "call_header.h"
#include "atomic_words.h"

namespace c10d_custom {

class CallSlots {
 public:
  CallSlots(void* base, uint64_t stride, uint32_t ranks)
      : base_(static_cast<char*>(base)), stride_(stride), ranks_(ranks) {}

  static constexpr size_t kPayload = 128;  // where in a slot

  void put(uint32_t slot, const CallHeader& header, const void* payload, uint64_t bytes) {
    Slot& s = at(slot);
    // Readers look at the number before and after.
    s.number.store(0, std::memory_order_relaxed);
    store_words(&s.header, &header, sizeof header);
    if (bytes) memcpy(base_ + slot * stride_ + kPayload, payload, bytes);
    s.number.store(header.number, std::memory_order_release);
  }

  // Whether a slot has the call of `mine`: kOk, kPending (not yet) or kMismatch (another of that number, or a later
  // one).
  Status look(uint32_t slot, const CallHeader& mine) const {
    const Slot& s = at(slot);
    const uint64_t number = s.number.load(std::memory_order_acquire);
    if (number < mine.number) return kPending;
    CallHeader header;
    load_words(&header, &s.header, kCompared);
    if (s.number.load(std::memory_order_relaxed) != number) return kPending;
    return number == mine.number && !memcmp(&header, &mine, kCompared) ? kOk : kMismatch;
  }

  // The same of the result, for which the leader's slot is looked at as well.
  Status look_result(const CallHeader& mine) const {
    const Status leaders = look(0, mine);
    if (const Status st = look(ranks_, mine); st != kPending) return st;
    return leaders == kMismatch ? kMismatch : kPending;
  }

  const void* payload(uint32_t slot) const { return base_ + slot * stride_ + kPayload; }
  double factor(uint32_t slot) const { return at(slot).header.factor; }
  uint32_t result() const { return ranks_; }

 private:
  struct Slot {
    std::atomic<uint64_t> number;
    CallHeader header;
  };
  static_assert(sizeof(Slot) <= kPayload);
  Slot& at(uint32_t slot) const { return *reinterpret_cast<Slot*>(base_ + slot * stride_); }

  char* const base_;
  const uint64_t stride_;
  const uint32_t ranks_;
};

}  // namespace c10d_custom

// Puts up a call without a payload: `header` is a CallHeader.
C10D_API void c10d_put_call(void* slots, uint64_t stride, uint32_t rank, const void* header);
