// Where the ranks of a host read what each of them is calling over hosts, and its small payload: a slot for each in the
// shared memory of their group (c10d_call_slots), and one for the result.
//
// A rank puts up each of its calls, in order, and overwrites the one before. The leader, the first rank, takes a
// small all_reduce's payloads once all have put up that call, and the others its result. So nobody overwrites a payload
// or a result that is still to be read: who puts up the next call has read the result of this, and the leader
// writes the next result after all have put up the next call.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstring>

#include "../shm/api.h"

namespace c10d_custom {

// What a rank says of a collective over hosts; begins its messages, and stands in its call slot.
struct CallHeader {
  // Equal on all ranks, or they have called different things.
  uint64_t number;
  uint32_t op, redop, dtype;
  int32_t root;
  uint64_t count;
  // This rank's own.
  uint64_t payload;  // bytes
  double factor;
  uint64_t balance[2];  // of uneven parts (transport/hosts/balance.py): nothing to the core
};
static_assert(sizeof(CallHeader) == 64,
              "as of the messages' formats in Python; tests/unit/test_layouts.py compares the fields");
constexpr size_t kCompared = offsetof(CallHeader, payload);
static_assert(kCompared % 8 == 0, "in words");

// Copies, word by word, of what others may be writing or reading at the same time. Each word read is one that was
// written, and marks set before and after the whole is written are seen in that order. (A fence would do, too, but the
// thread sanitizer knows none.)
typedef uint64_t __attribute__((may_alias)) Word;

inline void store_words(void* to, const void* from, size_t bytes) {
  for (size_t i = 0; i < bytes / sizeof(Word); ++i)
    __atomic_store_n(static_cast<Word*>(to) + i, static_cast<const Word*>(from)[i], __ATOMIC_RELEASE);
}

inline void load_words(void* to, const void* from, size_t bytes) {
  for (size_t i = 0; i < bytes / sizeof(Word); ++i)
    static_cast<Word*>(to)[i] = __atomic_load_n(static_cast<const Word*>(from) + i, __ATOMIC_ACQUIRE);
}

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
