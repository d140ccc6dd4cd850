// Messages that fit a small slot: the input travels with the announcement.
//
// A slot may be rewritten two calls later without any further signal, for the reason given at
// RankCtl::fingerprint.
#include "collective.h"

#include <algorithm>

namespace c10d_custom {

// The same answer on every rank: it depends on compared fields only. all_to_all is decided after the
// announcements, from everyone's table (all_to_all.cpp). Ranks may answer differently for a gather or scatter whose
// parts differ: then it is decided anew once all have agreed, and is small if every rank says so of its own part.
bool Collective::fits_small() {
  const uint64_t slot = g.geometry.small_bytes;
  auto longest = [&](uint64_t own, const Span* spans, uint32_t count) {
    for (uint32_t i = 0; i < count && uses_table(); ++i) own = std::max(own, spans[i].bytes);
    return own;
  };
  switch (args.op) {
    case kBarrier:
    case kMonitoredBarrier: return true;
    case kBroadcast: return (is_root() ? in_bytes(0) : out_bytes(0)) <= slot;
    case kAllReduce:
    case kReduce:
    case kReduceScatter: return input_bytes() <= slot;
    case kGather: return longest(in_bytes(0), args.out, args.nout) <= slot;
    case kScatter: return longest(out_bytes(0), args.in, args.nin) <= slot / n;
    case kAllGather: {
      for (uint32_t i = 0; i < n; ++i)
        if (out_bytes(i) > slot) return false;
      return true;
    }
    default: return false;
  }
}

void Collective::stage_small() {
  char* slot = g.small(me, seq);
  for (uint32_t i = 0; i < args.nin; ++i) {
    if (in_bytes(i)) memcpy(slot, in(i), in_bytes(i));
    slot += in_bytes(i);
  }
}

bool Collective::collect_small_all_to_all() {
  for (uint32_t r = 0; r < n; ++r) {
    uint64_t offset = 0, room = g.geometry.small_bytes;  // of r's slot, whatever r's table says
    for (uint32_t i = 0; i <= me; ++i) {
      const uint64_t size = i < me ? g.table(r, seq)[i] : out_bytes(r);
      if (size > room) return fail(kMismatch, int32_t(r)), false;
      room -= size;
      if (i < me) offset += size;
    }
    if (out_bytes(r)) memcpy(out(r), g.small(r, seq) + offset, out_bytes(r));
  }
  return true;
}

void Collective::announce_small() {
  const bool from_root = args.op == kBroadcast || args.op == kScatter;
  const bool moves = args.op != kBarrier && args.op != kMonitoredBarrier;
  if (moves && (!from_root || is_root())) stage_small();
  announce();
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
      if (args.op == kReduce && !is_root()) break;
      if (!out_bytes(0)) break;
      uint64_t offset = 0;
      if (args.op == kReduceScatter)
        for (uint32_t r = 0; r < me; ++r) offset += in_bytes(r);
      const void* few[64];
      std::unique_ptr<const void*[]> many;
      const void** src = few;
      if (n > 64) many = std::make_unique<const void*[]>(n), src = many.get();
      for (uint32_t r = 0; r < n; ++r) src[r] = g.small(r, seq) + offset;
      kernel()(out(0), src, n, out_bytes(0) / args.item_bytes, factors());
      break;
    }
    default: break;
  }
}

}  // namespace c10d_custom
