// What a rank says of a collective over hosts; begins its messages, and stands in its call slot.
#pragma once
#include <cstddef>
#include <cstdint>

namespace c10d_custom {

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
static_assert(kCompared % 8 == 0, "see atomic_words.h");

}  // namespace c10d_custom
