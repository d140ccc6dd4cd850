// CopyOut past the caches: every alignment and length around a line and a block, and nothing written beside.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "copy_out.h"

using namespace c10d_custom;

int main() {
  const CopyOut past(~0ull);
  const uint64_t room = 9000, blank = 0x5a;
  std::vector<unsigned char> from(room), to(room);
  for (uint64_t i = 0; i < room; ++i) from[i] = static_cast<unsigned char>(i * 7 + i / 251);
  for (uint64_t at = 0; at < 66; ++at)
    for (uint64_t source = 0; source < 3; ++source)
      for (uint64_t size = 0; size < 8200; size += size < 260 ? 1 : 397) {
        std::fill(to.begin(), to.end(), blank);
        past(to.data() + at, from.data() + source, size);
        for (uint64_t i = 0; i < room; ++i) {
          const unsigned char want = i < at || i >= at + size ? blank : from[source + i - at];
          if (to[i] == want) continue;
          printf("byte %ld of %lu, to %lu from %lu\n", long(i - at), (unsigned long)size, (unsigned long)at, (unsigned long)source);
          return 1;
        }
      }
  return 0;
}
