// What a rank says of a collective over hosts; begins its messages, and stands on the board.
#pragma once
#include <cstddef>
#include <cstdint>

namespace c10d_custom {

struct Head {
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
static_assert(sizeof(Head) == 64,
              "as of the messages' formats in Python; tests/unit/test_layouts.py compares the fields");
constexpr size_t kCompared = offsetof(Head, payload);
static_assert(kCompared % 8 == 0, "see atomic_words.h");

}  // namespace c10d_custom
