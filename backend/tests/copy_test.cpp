// Copies past the caches: every alignment and length around a line and a block, and nothing written beside. Copies into
// shared memory: which way they go, given what the two cost, and that all bytes arrive whichever it is.
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include "copies.h"

using namespace c10d_custom;

namespace {

using Copy = std::function<void(void*, const void*, uint64_t)>;

const unsigned char kBlank = 0x5a;

bool arrives(const Copy& copy, uint64_t room, uint64_t at, uint64_t source, uint64_t size) {
  static std::vector<unsigned char> from, to;
  if (from.size() != room) {
    from.resize(room);
    for (uint64_t i = 0; i < room; ++i) from[i] = static_cast<unsigned char>(i * 7 + i / 251);
  }
  to.assign(room, kBlank);
  copy(to.data() + at, from.data() + source, size);
  for (uint64_t i = 0; i < room; ++i) {
    const unsigned char want = i < at || i >= at + size ? kBlank : from[source + i - at];
    if (to[i] == want) continue;
    printf("byte %ld of %lu, to %lu from %lu\n", long(i - at), (unsigned long)size, (unsigned long)at,
           (unsigned long)source);
    return false;
  }
  return true;
}

// Of `copies` with these costs, how many went past the caches. Each seventh is interrupted, and seems to take 1,000
// times as long.
unsigned past(TwoWays& ways, unsigned copies, double through, double beyond) {
  unsigned count = 0;
  for (unsigned i = 0; i < copies; ++i) {
    const bool way = ways.past();
    count += way;
    ways.took(way, (way ? beyond : through) * (i % 7 ? 1 : 1000));
  }
  return count;
}

bool within(const char* what, unsigned got, unsigned low, unsigned high) {
  if (got >= low && got <= high) return true;
  printf("%s: %u copies past the caches, not %u to %u\n", what, got, low, high);
  return false;
}

}  // namespace

int main() {
  const CopyOut out(~0ull);
  for (uint64_t at = 0; at < 66; ++at)
    for (uint64_t source = 0; source < 3; ++source)
      for (uint64_t size = 0; size < 8200; size += size < 260 ? 1 : 397)
        if (!arrives(out, 9000, at, source, size)) return 1;

  CopyIn in;
  for (uint64_t i = 0; i < 2000; ++i)  // some go either way, whatever they cost
    if (!arrives([&](void* to, const void* from, uint64_t size) { in(to, from, size); }, 40000, i % 66, i % 3,
                 16000 + i * 11))
      return 1;

  // Costs in cycles a byte, as measured on cores with a last cache in common, and without one.
  TwoWays ways;
  past(ways, 3200, 0.11, 0.24);
  bool ok = within("near", past(ways, 3200, 0.11, 0.24), 100, 100);
  ok &= within("on the way to far", past(ways, 100, 0.70, 0.17), 50, 98);
  ok &= within("far", past(ways, 3200, 0.70, 0.17), 3100, 3100);
  past(ways, 1600, 0.11, 0.24);  // seldom looked at while it is the slower one
  ok &= within("near again", past(ways, 3200, 0.11, 0.24), 100, 100);
  ok &= within("near, from memory", past(ways, 3200, 0.33, 0.26), 50, 400);
  return ok ? 0 : 1;
}
