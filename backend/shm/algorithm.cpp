#include "algorithm.h"

#include <algorithm>

#include "collective.h"

namespace c10d_custom {

bool Collective::forced(Algorithm which) const { return Algorithm(g.geometry.forced) == which; }

// The same answer on every rank: it depends on compared fields only. all_to_all is decided after the
// announcements, from what all have (all_to_all_fits_small). One exception: where the parts of a gather or scatter
// differ, ranks may answer differently. The call is announced all the same, and once all ranks have compared their
// calls, the longest part decides, alike on all ranks (`longest_part`, in finish_small).
bool Collective::fits_small() const {
  const uint64_t slot = g.geometry.small_bytes;
  auto fits = [&](uint64_t bytes, uint64_t room) {
    return bytes <= room && !(bytes && (forced(Algorithm::kRings) || forced(Algorithm::kInPlace)));
  };
  auto longest = [&](uint64_t own, const Span* spans, uint32_t count) {
    for (uint32_t i = 0; i < count && uses_table(); ++i) own = std::max(own, spans[i].bytes);
    return own;
  };
  switch (args.op) {
    case kBarrier:
    case kMonitoredBarrier: return true;
    case kBroadcast: return fits(is_root() ? in_bytes(0) : out_bytes(0), slot);
    case kAllReduce:
    case kReduce:
    case kReduceScatter: return fits(input_bytes(), slot);
    case kGather: return fits(longest(in_bytes(0), args.out, args.nout), slot);
    case kScatter: return fits(longest(out_bytes(0), args.in, args.nin), slot / n);
    case kAllGather: {
      uint64_t most = 0;
      for (uint32_t i = 0; i < n; ++i) most = std::max(most, out_bytes(i));
      return fits(most, slot);
    }
    default: return false;
  }
}

bool Collective::all_to_all_fits_small(uint64_t most) const {
  return most <= g.geometry.small_bytes && (!most || !forced(Algorithm::kRings));
}

// Whether a sum in slots is shared out: it costs one more synchronisation, and each rank reads twice the input instead
// of everyone's.
bool Collective::in_two_steps() const {
  const uint64_t from = g.geometry.two_steps_bytes;
  if (!from && !forced(Algorithm::kTwoSteps)) return false;
  if ((args.op != kAllReduce && args.op != kReduce) || forced(Algorithm::kSlots) || !in_bytes(0)) return false;
  return forced(Algorithm::kTwoSteps) || in_bytes(0) >= from;
}

// Whether a call that is not small goes in place, if the inputs of all lie in arenas. Short parts come to their
// readers as fast by way of the rings, without a wait at the end; what is reduced in place never goes that way.
bool Collective::worth_in_place() const {
  const Algorithm which = Algorithm(g.geometry.forced);
  if (which != Algorithm::kBest && which != Algorithm::kInPlace) return false;
  const uint64_t least = which == Algorithm::kInPlace ? 0 : g.geometry.in_place_bytes;
  switch (args.op) {
    case kAllReduce: return in(0) == out(0);
    case kAllGather: return in_bytes(0) >= n * least;
    case kReduceScatter: {  // its parts one after the other
      bool together = input_bytes() >= n * n * least;
      for (uint32_t r = 1; r < n; ++r) together = together && in(r) == in(r - 1) + in_bytes(r - 1);
      return together;
    }
    default: return false;
  }
}

}  // namespace c10d_custom
