// One collective call on one rank: announce it, agree with the other ranks, move the data.
//
// The ways to move data, which algorithm.cpp chooses among, all ranks alike:
//   small: the whole input fits this rank's small slot and travels with the announcement; once all
//          ranks have announced, each reads what it needs. One synchronisation; or two, and a sum that all need is
//          shared out among the ranks. (small.cpp)
//   ring:  the input is cut into blocks that pass through the ranks' rings. (pipeline.h and the
//          file of each operation)
//   in place: where all ranks have announced that their inputs lie in their arenas, they are read there.
//          (in_place.cpp)
// Each way begins with every rank's fingerprint compared, by all ranks or, where there are many, along a tree: so ranks
// that disagree find out before any result is written, and memory of the call before last may be used again (layout.h).
#pragma once
#include <cstring>

#include "algorithm.h"
#include "group.h"
#include "reduce.h"

namespace c10d_custom {

class Collective {
 public:
  Collective(Group& g, uint64_t seq, const CallArgs& a, int64_t started, Failure* failure);

  // Runs the collective to its end in the calling thread. Calls of one group must not overlap.
  Status run();
  // Whether the input of a call that makes sense travels with its announcement.
  bool is_small() {
    return n > 1 && args.op != kRejected && !args.pipelined && args.device == kHost && shape_ok() && fits_small();
  }
  // Tells the other ranks of such a call, which is to be the next of this group; they then have what they need of this
  // one. False, and nothing done, where that would take a wait.
  bool announce_early();
  // The rest of a call that has been announced early, by another Collective of the same arguments.
  Status go_on();

  Group& g;
  const uint32_t me, n;
  const uint64_t seq;
  const CallArgs& args;
  const uint64_t number;  // what failures call it by
  const int64_t deadline;

  // Waits for a peer's signal; on failure records it, tells the group, and returns false.
  bool wait(Signal& s, uint64_t need, uint64_t worth, uint32_t peer);
  // The same for another thing, perhaps before all have agreed.
  bool wait(Wait& w, bool yields, uint32_t peer);

  // The rank that keeps the others waiting; `peer`, for which this rank waits, may itself wait for it. A rank that has
  // not come, else the rank whose counters add up to least. (That one is stuck. The others stop only at a step that
  // needs it, so each of them has done all of its steps and one more at least.)
  uint32_t straggler(uint32_t peer) const;

  // Records the failure; false.
  bool fails(Status st, int32_t peer) { return fail(st, peer), false; }
  // Gets the memory that the call needs, by one of Group's functions for that; on failure as `wait`.
  bool has_memory(int (Group::*reserve)(const GoesOn&));
  // Ends the call here, without a word to the other ranks; false.
  bool give_up() { return fails(kAborted, -1); }

  // For loops that move without waiting: false, and recorded, once the deadline is over or this rank has aborted.
  bool may_go_on(uint32_t peer);
  // As may_go_on, and false once the group has failed anywhere.
  bool all_go_on(uint32_t peer);

  // Publishes fingerprint and table, and the input where it is small.
  void announce();
  // Waits for all announcements and compares them.
  bool agree();
  // The two at the beginning of what moves data: they may have been done before.
  void announce_once() {
    if (!announced_) announce();
  }
  bool agree_once() { return agreed_ || agree(); }
  // Whether the parts of a gather or scatter on which all have agreed may differ.
  bool uneven() const { return uneven_; }
  // Waits until all ranks have come this far in the call.
  bool meet();
  // Bytes of the longest part of a gather or scatter on which all have agreed, of which a rank's own are `own`.
  uint64_t longest_part(uint64_t own) const;

  char* in(uint32_t i) const { return static_cast<char*>(args.in[i].data); }
  char* out(uint32_t i) const { return static_cast<char*>(args.out[i].data); }
  uint64_t in_bytes(uint32_t i) const { return args.in[i].bytes; }
  uint64_t out_bytes(uint32_t i) const { return args.out[i].bytes; }
  bool is_root() const { return int32_t(me) == args.root; }
  // The input, all parts of it, into this rank's small slot.
  void stage_small();
  bool collect_small_all_to_all();
  // `most`: bytes of the longest of all ranks' inputs.
  bool all_to_all_fits_small(uint64_t most) const;
  uint64_t input_bytes() const { return total_bytes(args.in, args.nin); }
  uint64_t output_bytes() const { return total_bytes(args.out, args.nout); }
  // What the kernel takes beside its sources.
  const double* factors();
  // Where rank r's input lies, as this rank sees it, of a call whose inputs are all in arenas.
  char* placed(uint32_t r) const { return placed_[r]; }
  ReduceFn kernel() const { return kernel_ ? kernel_ : kernel_ = reduce_kernel(args.dtype, args.redop); }

 private:
  Status fail(Status, int32_t peer);
  bool healthy();
  bool waited(Status, uint32_t peer);
  // Where the group is broken for a disagreement over this very call, this rank looks for itself whom it differs from.
  bool waited_to_agree(Status st, uint32_t peer) { return st == kOk || disagrees(st, peer); }
  bool disagrees(Status, uint32_t peer);
  bool shape_ok() const;
  // Whether no part of it lies at a null address.
  bool memory_ok() const;
  bool on_device() const { return memory_of(args) >= kDevice; }
  bool runs_ahead() const { return runs_ahead_; }
  // The arguments make no sense: says so to the others, who must not wait for this rank, as kRejected does.
  Status refuse();
  bool uses_table() const { return args.count == kNever; }
  // Whether this rank may write to its table or its small slots.
  bool needs_slots() {
    return uses_table() || (!on_device() && args.op != kBarrier && args.op != kMonitoredBarrier && fits_small());
  }
  // What a rank that has come to this call has announced.
  const Fingerprint& said(uint32_t rank) const;
  // Whether a rank's call is another than this rank's, whatever its tables say.
  bool differs(uint32_t peer) const { return differ(said(me), said(peer)); }
  bool differ(const Fingerprint&, const Fingerprint&) const;
  // Whether this rank's parts are not those that a rank expects, or the other way round.
  bool parts_differ(uint32_t peer) const;
  bool counts_differ(uint32_t peer) const;
  // Tells the others that what this rank announces is there.
  void enter();
  // Of a call whose ranks may have parts of other sizes than this one's, and of those all pairs.
  bool all_parts_fit();
  bool agree_in_pairs();
  bool agree_by_tree();
  // Waits until all have come to this rank's round of the combining tree.
  bool all_come(bool* flag);
  // Whether two ranks give each other what they expect, as their tables say.
  bool parts_fit(uint32_t a, uint32_t b) const;
  // In gather and scatter each part is known to two: the root, and the rank whose part it is. So these announce their
  // own counts, which the root's must fit: equal to all, or, where its is kNever, what its table has for each.
  bool has_parts_at_root() const { return args.op == kGather || args.op == kScatter; }
  // What rank r has announced that it gives to the root, or gets from it.
  uint64_t part(uint32_t r) const;
  bool fits_root(uint32_t r) const;
  Status mismatch(uint32_t peer);
  // Which way the call goes: algorithm.cpp.
  bool forced(Algorithm) const;
  bool fits_small() const;
  bool in_two_steps() const;
  bool worth_in_place() const;
  void reduce_slots(char* to, uint64_t at, uint64_t bytes);
  void reduce_in_two_steps();
  uint64_t own_place();
  bool all_placed();
  // After a failure: from now on no peer touches what this rank has announced to be in its arena.
  void part_from_peers();
  bool run_large();
  bool run_ahead();
  void run_alone();
  void announce_small();
  void finish_small();

  const int64_t started_;
  Failure* const failure_;
  Status status_ = kOk;
  uint64_t place_ = 0;  // this rank's of the fingerprint
  const bool runs_ahead_ = memory_of(args) == kDeviceAhead;
  bool announced_ = false, agreed_ = false;
  bool uneven_ = false;  // the parts of a gather or scatter may differ; known once all have agreed
  std::vector<char*> placed_;
  mutable ReduceFn kernel_ = nullptr;
  double factors_[64];
  std::unique_ptr<double[]> many_factors_;
};

// The ring form of each operation. On entry nothing is agreed: they announce, fill what they can,
// agree, and then go on, so that the first blocks are copied while the slowest rank arrives.
bool ring_all_reduce(Collective&);        // all_reduce.cpp; also reduce
bool ring_multicast(Collective&);         // multicast.cpp: broadcast, all_gather
bool ring_scatter_gather(Collective&);    // scatter_gather.cpp: scatter, gather, reduce_scatter
bool pair_rings_all_to_all(Collective&);  // all_to_all.cpp

// What is left to do of a call on which all ranks have agreed, and whose inputs are all in their ranks' arenas.
bool in_place(Collective&);  // in_place.cpp: all_reduce, all_gather, reduce_scatter

// The ring form of a reduction that goes on to other hosts (backend/hosts).
bool pipelined_ok(const Collective&);  // pipelined_reduce.cpp: whether the arguments make sense
bool ring_pipelined_reduce(Collective&);

}  // namespace c10d_custom
