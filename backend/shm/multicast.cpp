// broadcast and all_gather: one rank's bytes go to every rank, each of which reads them in place
// from the writer's ring. Lengths may differ between writers (uneven all_gather).
#include "pipeline.h"

namespace c10d_custom {

bool ring_multicast(Collective& c) {
  Group& g = c.g;
  const uint32_t n = c.n, me = c.me;
  const uint64_t block = g.geometry.block_bytes;
  const bool gather = c.args.op == kAllGather;
  const uint32_t first = gather ? 0 : uint32_t(c.args.root), last = gather ? n : first + 1;
  const bool fills = gather || c.is_root(), drains = gather || !c.is_root();
  // Length of what rank r sends, and where it lands here.
  auto length = [&](uint32_t r) { return gather ? c.out_bytes(r) : c.is_root() ? c.in_bytes(0) : c.out_bytes(0); };
  uint64_t longest = 0;
  for (uint32_t r = first; r < last; ++r) longest = std::max(longest, length(r));
  const uint64_t blocks = (longest + block - 1) / block;
  auto bytes = [&](uint32_t r, uint64_t k) {
    const uint64_t size = length(r);
    return k * block >= size ? 0 : std::min(block, size - k * block);
  };
  const CopyOut copy(longest * n * (gather ? n + 1 : 1));
  return pipeline(
      c, blocks, fills, drains,
      [&](uint64_t k) {
        if (const uint64_t size = bytes(me, k)) g.copy_in(g.block(me, g.blocks_done + k), c.in(0) + k * block, size);
      },
      NoReduce{},
      [&](uint64_t k) {
        for (uint32_t r = first; r < last; ++r) {
          const uint64_t size = bytes(r, k);
          char* to = c.out(gather ? r : 0) + k * block;
          if (!size || (r == me && to == c.in(0) + k * block)) continue;
          g.team.copy(copy, to, g.block(r, g.blocks_done + k), size);
        }
      });
}

}  // namespace c10d_custom
