// The last calls of this rank, kept for whoever asks later what it was doing.
//
// A ring has one owner, whose mutex guards it: a record costs its stores and one look at the clock. It
// holds what has begun (collectives) or ended (messages). What waits before that, the owner adds from
// its own lists, so that no number of queued calls pushes out the one that is under way.
#pragma once
#include <algorithm>
#include <vector>

#include "api.h"
#include "os.h"

namespace c10d_custom {

inline TraceRecord trace_record(const CallArgs& a, uint64_t seq, int64_t issued, int64_t began) {
  return {seq, a.op,   a.redop, a.dtype, a.root,   a.count, total_bytes(a.in, a.nin), total_bytes(a.out, a.nout),
          0,   issued, began,   0,       kPending, 0};
}

inline TraceRecord trace_record(const MessageArgs& a, uint64_t id, int64_t issued, int64_t began) {
  const uint64_t in = a.is_recv ? 0 : a.data.bytes, out = a.is_recv ? a.data.bytes : 0;
  return {id, a.is_recv ? kTraceRecv : kTraceSend, 0, a.dtype, a.peer, 0, in, out, a.tag, issued, began, 0, kPending,
          0};
}

class TraceRing {
 public:
  // How many to keep; once, the rest of the calls are ignored.
  void keep(uint32_t records) {
    if (ring_.empty()) ring_.resize(records);
  }
  // Where to note the end of it; nullptr if nothing is kept. Valid until `end`, which comes before the
  // next `begin`.
  TraceRecord* begin(const TraceRecord& r) {
    if (ring_.empty()) return nullptr;
    TraceRecord& slot = ring_[written_++ % ring_.size()];
    slot = r;
    return &slot;
  }
  static void end(TraceRecord* r, Status st) {
    if (r) r->ended = now_ns(), r->status = st;
  }
  // Appends what is kept, oldest first.
  void read(std::vector<TraceRecord>& out) const {
    const uint64_t n = ring_.size();
    for (uint64_t i = written_ - std::min(n, written_); i < written_; ++i) out.push_back(ring_[i % n]);
  }

 private:
  std::vector<TraceRecord> ring_;
  uint64_t written_ = 0;
};

}  // namespace c10d_custom
