// Operations in which a rank has different bytes for each rank: scatter, gather, reduce_scatter (also uneven). In an
// uneven scatter or gather the ranks know how many blocks there are once they have agreed.
// all_to_all goes its own way (all_to_all.cpp).
//
// A block of a ring is cut into parts, one for each rank it may carry bytes for; block k holds the
// k-th chunk of each of the writer's messages. In scatter only the root writes, so all rings are the
// root's: block k of a rank's ring holds the k-th chunk for that rank. (A slot is free once every rank
// has drained it, whoever wrote it: pipeline.h.)
#include "pipeline.h"

namespace c10d_custom {

bool ring_scatter_gather(Collective& c) {
  Group& g = c.g;
  const uint32_t n = c.n, me = c.me, op = c.args.op;
  const bool reduces = op == kReduceScatter, to_root = op == kGather, from_root = op == kScatter;
  const bool fills = !from_root || c.is_root(), drains = !to_root || c.is_root();
  const uint32_t parts = to_root || from_root ? 1 : n - 1;
  const uint64_t chunk = g.geometry.block_bytes / parts / 64 * 64;
  auto place = [&](uint32_t writer, uint32_t reader, uint64_t k) {
    char* block = g.block(from_root ? reader : writer, g.blocks_done + k);
    return parts == 1 ? block : block + (reader - (reader > writer)) * chunk;  // nobody writes to itself
  };
  // Bytes that rank `to` gets from this rank, and this rank from `from`.
  auto sent = [&](uint32_t to) { return to_root ? (int32_t(to) == c.args.root ? c.in_bytes(0) : 0) : c.in_bytes(to); };
  auto got = [&](uint32_t from) {
    return from_root ? (int32_t(from) == c.args.root ? c.out_bytes(0) : 0) : c.out_bytes(reduces ? 0 : from);
  };

  // All ranks must count the same blocks: from arguments that must agree.
  uint64_t longest = 0;
  if (fills)
    for (uint32_t i = 0; i < n; ++i) longest = std::max(longest, sent(i));
  if (drains)
    for (uint32_t i = 0; i < n; ++i) longest = std::max(longest, got(i));
  auto in_blocks = [&](uint64_t bytes) { return bytes / chunk + (bytes % chunk != 0); };
  auto piece = [&](uint64_t size, uint64_t k) { return k * chunk >= size ? 0 : std::min(chunk, size - k * chunk); };

  // Each rank takes its own ring, and the root writes there: the first time, once all have. Where parts differ some
  // have announced the call before they knew that it takes rings.
  if (from_root && !g.every_ring_is_there) {
    if (!c.has_memory(&Group::reserve_ring)) return false;
    c.announce_once();
    if (!c.agree_once() || (c.uneven() && !c.meet())) return false;
    g.every_ring_is_there = true;
  }
  const ReduceFn kernel = reduces ? c.kernel() : nullptr;
  std::vector<const void*> src(n);
  auto fill = [&](uint64_t k) {
    for (uint32_t i = 0; i < n; ++i) {
      if (i == me) continue;
      if (const uint64_t size = piece(sent(i), k)) g.copy_in(place(me, i, k), c.in(to_root ? 0 : i) + k * chunk, size);
    }
  };
  const CopyOut copy(2 * longest * n);
  auto drain = [&](uint64_t k) {
    for (uint32_t r = 0; r < n; ++r) {
      const uint64_t size = piece(got(r), k);
      if (!size) continue;
      if (reduces)
        src[r] = r == me ? c.in(me) + k * chunk : place(r, me, k);
      else if (r != me)
        g.team.copy(copy, c.out(from_root ? 0 : r) + k * chunk, place(r, me, k), size);
    }
    if (!reduces) return;
    if (const uint64_t size = piece(c.out_bytes(0), k))
      g.team.reduce(kernel, c.out(0) + k * chunk, src.data(), n, size, c.args.item_bytes, c.factors());
  };
  auto recount = [&](uint64_t blocks) { return reduces ? blocks : in_blocks(c.longest_part(longest)); };
  if (!pipeline(c, in_blocks(longest), fills, drains, fill, NoReduce{}, drain, recount)) return false;
  // What a rank keeps for itself (reduce_scatter reads its own input where it lies).
  if (!reduces && fills && drains) {
    const uint64_t size = c.in_bytes(to_root ? 0 : me);
    if (size) memmove(c.out(from_root ? 0 : me), c.in(to_root ? 0 : me), size);
  }
  return true;
}

}  // namespace c10d_custom
