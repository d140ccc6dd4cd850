// all_reduce and reduce of messages too large for a small slot.
//
// Two ranks: each copies its input through its ring and reduces straight from (own input, peer's
// ring) to its output: one synchronisation a block. Nobody reads the ring of a reduce's root.
// More: two stages, as in reduce-scatter + all-gather (Rabenseifner 2004), block by block: each rank
// reduces one part of every block and puts it into its ring, all ranks copy the reduced parts out. reduce() leaves the
// copy to the root. A rank's own part never passes through its ring unreduced.
#include "pipeline.h"

namespace c10d_custom {

bool ring_all_reduce(Collective& c) {
  Group& g = c.g;
  const uint32_t n = c.n, me = c.me;
  const uint64_t total = c.in_bytes(0), item = c.args.item_bytes;
  const uint64_t blocks = (total + g.geometry.block_bytes - 1) / g.geometry.block_bytes;
  const bool keeps = c.args.op == kAllReduce || c.is_root();
  const ReduceFn kernel = c.kernel();
  std::vector<const void*> src(n);

  // Equal blocks, so that the last one is not a sliver that synchronises for nothing.
  const uint64_t even = align_up((total + blocks - 1) / blocks, 64);
  auto begin = [&](uint64_t k) { return std::min(total, k * even); };
  auto bytes = [&](uint64_t k) { return begin(k + 1) - begin(k); };
  // Part p of block k, cut at cache lines.
  auto part = [&](uint64_t k, uint32_t p) {
    const uint64_t size = bytes(k), lines = (size + 63) / 64;
    return std::min(size, lines * p / n * 64);
  };

  if (n == 2) {
    return pipeline(
        c, blocks, c.args.op == kAllReduce || !keeps, keeps,
        [&](uint64_t k) { g.copy_in(g.block(me, g.blocks_done + k), c.in(0) + begin(k), bytes(k)); }, NoReduce{},
        [&](uint64_t k) {
          for (uint32_t r = 0; r < 2; ++r) src[r] = r == me ? c.in(0) + begin(k) : g.block(r, g.blocks_done + k);
          g.team.reduce(kernel, c.out(0) + begin(k), src.data(), 2, bytes(k), item, c.factors());
        });
  }
  auto stage = [&](uint64_t k) {
    const uint64_t lo = part(k, me), hi = part(k, me + 1), size = bytes(k);
    char* mine = g.block(me, g.blocks_done + k);
    const char* from = c.in(0) + begin(k);
    g.copy_in(mine, from, lo);
    g.copy_in(mine + hi, from + hi, size - hi);
  };
  auto combine = [&](uint64_t k) {
    const uint64_t lo = part(k, me), hi = part(k, me + 1);
    if (lo == hi) return;
    for (uint32_t r = 0; r < n; ++r) src[r] = r == me ? c.in(0) + begin(k) + lo : g.block(r, g.blocks_done + k) + lo;
    char* mine = g.block(me, g.blocks_done + k) + lo;
    char* to = keeps ? c.out(0) + begin(k) + lo : mine;
    g.team.reduce(kernel, to, src.data(), n, hi - lo, item, c.factors());
    if (keeps) g.copy_in(mine, to, hi - lo);
  };
  auto collect = [&](uint64_t k) {
    for (uint32_t r = 0; r < n; ++r) {
      const uint64_t lo = part(k, r), hi = part(k, r + 1);
      if (r != me) g.team.copy(memcpy, c.out(0) + begin(k) + lo, g.block(r, g.blocks_done + k) + lo, hi - lo);
    }
  };
  return pipeline(c, blocks, true, keeps, stage, combine, collect);
}

}  // namespace c10d_custom
