// Inputs that fit a small slot: the input travels with the announcement.
//
// A sum that all need, of more than a few ranks, is shared out (in two steps): each rank reduces its part of all slots,
// leaves it in its own, in the place that nobody else reads, and once all have, each copies the parts. So a rank reads
// twice the input, not the input of each (reduce-scatter + all-gather: Rabenseifner 2004).
//
// A slot may be rewritten two calls later without any further signal, for the reason given at
// RankCtl::fingerprint.
#include "collective.h"

#include <algorithm>

namespace c10d_custom {

void Collective::stage_small() {
  char* slot = g.small(me, seq);
  for (uint32_t i = 0; i < args.nin; ++i) {
    if (in_bytes(i)) memcpy(slot, in(i), in_bytes(i));
    slot += in_bytes(i);
  }
}

bool Collective::collect_small_all_to_all() {
  const uint64_t slot = g.geometry.small_bytes;
  for (uint32_t r = 0; r < n; ++r) {
    const uint64_t size = out_bytes(r), at = g.table(r, seq)[2 * n + me];
    if (at > slot || size > slot - at) return fail(kMismatch, int32_t(r)), false;  // whatever r's table says
    if (size) memcpy(out(r), g.small(r, seq) + at, size);
  }
  return true;
}

void Collective::announce_small() {
  const bool from_root = args.op == kBroadcast || args.op == kScatter;
  const bool moves = args.op != kBarrier && args.op != kMonitoredBarrier;
  if (moves && (!from_root || is_root())) stage_small();
  announce();
}

// Of all ranks' slots, from `at` on.
inline void Collective::reduce_slots(char* to, uint64_t at, uint64_t bytes) {
  const void* few[64];
  std::unique_ptr<const void*[]> many;
  const void** src = few;
  if (n > 64) many = std::make_unique<const void*[]>(n), src = many.get();
  for (uint32_t r = 0; r < n; ++r) src[r] = g.small(r, seq) + at;
  kernel()(to, src, n, bytes / args.item_bytes, factors());
}

void Collective::reduce_in_two_steps() {
  const uint64_t size = in_bytes(0), lines = (size + 63) / 64;
  auto begin = [&](uint32_t r) { return std::min(size, lines * r / n * 64); };
  const uint64_t own = begin(me);
  if (begin(me + 1) > own) reduce_slots(g.small(me, seq) + own, own, begin(me + 1) - own);
  if (!meet() || (args.op == kReduce && !is_root())) return;
  for (uint32_t r = 0; r < n; ++r) memcpy(out(0) + begin(r), g.small(r, seq) + begin(r), begin(r + 1) - begin(r));
}

void Collective::finish_small() {
  if (!agree()) return;
  if (uneven_ && longest_part(0) > g.geometry.small_bytes / (args.op == kScatter ? n : 1)) {
    run_large();
    return;
  }
  switch (args.op) {
    case kBroadcast:
      if (!is_root() && out_bytes(0)) memcpy(out(0), g.small(uint32_t(args.root), seq), out_bytes(0));
      break;
    case kAllGather:
    case kGather:
      if (args.op == kGather && !is_root()) break;
      for (uint32_t r = 0; r < n; ++r)
        if (out_bytes(r)) memcpy(out(r), g.small(r, seq), out_bytes(r));
      break;
    case kScatter:
      if (out_bytes(0)) {
        uint64_t offset = me * out_bytes(0);
        if (uneven_) {
          offset = 0;
          for (uint32_t r = 0; r < me; ++r) offset += part(r);
          const uint64_t slot = g.geometry.small_bytes;  // whatever the others say
          if (offset > slot || out_bytes(0) > slot - offset) {
            fail(kMismatch, args.root);
            return;
          }
        }
        memcpy(out(0), g.small(uint32_t(args.root), seq) + offset, out_bytes(0));
      }
      break;
    case kAllReduce:
    case kReduce:
    case kReduceScatter: {
      if (in_two_steps()) {
        reduce_in_two_steps();
        break;
      }
      if (args.op == kReduce && !is_root()) break;
      if (!out_bytes(0)) break;
      uint64_t offset = 0;
      if (args.op == kReduceScatter)
        for (uint32_t r = 0; r < me; ++r) offset += in_bytes(r);
      reduce_slots(out(0), offset, out_bytes(0));
      break;
    }
    default: break;
  }
}

}  // namespace c10d_custom
