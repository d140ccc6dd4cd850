// One rank's view of a group: the mapped segment, who is alive, how to wait for a peer.
//
// Layers above: collective.cpp (one call at a time), p2p.h (messages), queue.h (order and threads).
#pragma once
#include <memory>
#include <mutex>
#include <vector>

#include "api.h"
#include "arena.h"
#include "combining_tree.h"
#include "copies.h"
#include "os.h"
#include "pages.h"
#include "seat.h"
#include "waiting.h"
#include "layout.h"
#include "team.h"

namespace c10d_custom {

// Grows in a forked child, which must keep its hands off the parent's groups.
extern unsigned g_fork_generation;

class CollectiveQueue;
class Messenger;

// What a wait looks for, and who can wake it.
struct Wait {
  virtual bool ready() = 0;                     // looks; may do what it finds to be done
  virtual const void* ask(uint32_t* seen) = 0;  // asks to be woken. Sleeps on that word, while it has that value
  virtual bool lost(uint32_t* peer) = 0;        // whether it waits in vain, and for whom
 protected:
  ~Wait() = default;
};

class Group {
 public:
  // Takes fd. On failure returns nullptr and *error = errno.
  static Group* open(int fd, uint32_t rank, int64_t spin_ns, int (*interrupted)(), int* error);
  ~Group();

  const uint32_t rank, n;
  const Geometry geometry;
  const Layout layout;

  RankCtl& ctl(uint32_t r) const { return *reinterpret_cast<RankCtl*>(base_ + layout.ctl + r * layout.ctl_bytes); }
  // The table of call `seq`: n byte counts sent, then n byte counts expected, then where each of those sent begins in a
  // small slot.
  uint64_t* table(uint32_t r, uint64_t seq) const {
    return reinterpret_cast<uint64_t*>(base_ + layout.tables + r * layout.table_bytes) + (seq & 1) * 3 * n;
  }
  char* small(uint32_t r, uint64_t seq) const {
    return base_ + layout.small + (2 * r + (seq & 1)) * layout.small_bytes;
  }
  char* block(uint32_t r, uint64_t k) const {
    return base_ + layout.rings + r * layout.ring_bytes + (k % geometry.window) * geometry.block_bytes;
  }
  // The pair rings in which it writes.
  char* pair_rings(uint32_t r) const { return row_of_flows(r) + layout.flow_bytes; }
  Flow& flow(uint32_t src, uint32_t dst) const { return reinterpret_cast<Flow*>(row_of_flows(src))[dst]; }
  char* call_slots() const { return base_ + layout.call_slots; }
  // Whether there is memory for the next two; once there is, there always is.
  std::atomic<uint8_t>& has_cells(uint32_t src, uint32_t dst) const {
    return reinterpret_cast<std::atomic<uint8_t>*>(base_ + layout.has_cells)[size_t(dst) * n + src];
  }
  PairCtl& pair(uint32_t src, uint32_t dst) const { return *reinterpret_cast<PairCtl*>(base_ + at_pair(src, dst)); }
  CellHeader* cell(uint32_t src, uint32_t dst, uint64_t index) const {
    char* p = base_ + at_pair(src, dst) + sizeof(PairCtl);
    return reinterpret_cast<CellHeader*>(p + (index % geometry.cells) * layout.cell_stride);
  }

  // Publishes a new value of one of this rank's own signals and wakes who waits for it.
  void advance(Signal& mine, uint64_t value);

  // Waits until `s`, which `peer` owns, is at least `need`. Spins, then sleeps; a sleeper asks to be
  // woken only at `worth` (>= need), so that one wake-up finds as much work as there will be.
  // Ends with kTimeout, kPeerLost (peer), kAborted, kBroken (poison) or kInterrupted otherwise.
  // Also kPeerLost, with that rank in *peer: where a rank is gone of those that have not come as Absent says; or where
  // `in_vain`, asked whenever a sleeper looks at its peers' health, names one.
  using InVain = bool (*)(const void* context, uint32_t* peer);
  struct Absent {
    uint64_t seq = 0, round = 0;  // has not entered that collective, or not come to that round of the combining tree
    InVain in_vain = nullptr;
    const void* context = nullptr;
  };
  Status wait(Signal& s, uint64_t need, uint64_t worth, uint32_t* peer, int64_t deadline, const Absent& absent) {
    if (s.value.load(std::memory_order_acquire) >= need) return kOk;
    return wait(s, need, worth, peer, deadline, absent, call);
  }
  Status wait(Signal& s, uint64_t need, uint64_t worth, uint32_t* peer, int64_t deadline) {
    return wait(s, need, worth, peer, deadline, Absent{});
  }

  // The same for any other thing to wait for. `yields`: stays awake for a while first.
  Status wait(Wait& w, bool yields, uint32_t* peer, int64_t deadline);
  // The same for a signal that no collective waits for, in any thread.
  Status wait_beside_collectives(Signal& s, uint64_t need, uint32_t peer, int64_t deadline) {
    return wait(s, need, need, &peer, deadline, Absent{}, kNever);
  }

  // For groups with a combining tree: this rank comes to its next round; see CombiningTree::come. Then whether all have
  // come to it, waiting for that, and whether any has raised a flag. Only for the thread that runs a collective, or
  // announces the next.
  template <class Differs>
  void come(bool flag, const Differs& differs) {
    bool any;
    if (tree.come(flag, differs, &any)) advance(header().all_come, 2 * tree.rounds() + any);
    // Only now: a rank that dies on its way up the tree, having filled a counter and told nobody above, must look as if
    // it had not come, or the others would wait for it.
    ctl(rank).rounds.store(tree.rounds(), std::memory_order_release);
  }
  bool all_have_come() const { return header().all_come.value.load(std::memory_order_acquire) >= 2 * tree.rounds(); }
  Status wait_for_all(bool* flag, uint32_t* peer, int64_t deadline, InVain in_vain = nullptr,
                      const void* context = nullptr) {
    *peer = rank;  // nobody in particular
    Signal& all = header().all_come;
    const uint64_t need = 2 * tree.rounds();
    const Status st = wait(all, need, need, peer, deadline, Absent{0, tree.rounds(), in_vain, context});
    *flag = all.value.load(std::memory_order_relaxed) & 1;
    return st;
  }

  // Wakes the owner of a doorbell if it sleeps. Call it after publishing (seq_cst) what it may be asleep for.
  static void wake(Doorbell&);

  // What a sleeper looks at now and then (kSlice): poison, this rank's own abort. A disagreement about a later
  // collective than `number` does not count.
  Status health(uint64_t number = kNever) const;
  // False once the peer's process is gone, whatever became of its pid.
  bool alive(uint32_t peer) const;
  bool gone(uint32_t peer) const { return left(peer) || !alive(peer); }
  // Asks after some of the ranks of which `awaited` says so, after others each time: a few system calls a look, however
  // many ranks there are, and each of them in some eight looks. True: *peer is gone. Only for the thread that runs a
  // collective.
  template <class Awaited>
  bool any_gone(const Awaited& awaited, uint32_t* peer) {
    uint32_t questions = 8 + n / 8;
    for (uint32_t i = 0; i < n && questions; ++i) {
      const uint32_t r = asked_ = (asked_ + 1) % n;  // each rank begins with those after it
      if (r == rank || !awaited(r)) continue;
      if (gone(r)) return *peer = r, true;
      --questions;
    }
    return false;
  }
  bool left(uint32_t peer) const { return ctl(peer).state.load(std::memory_order_acquire) == kLeft; }
  // Whether the peer's process is stopped, by SIGSTOP or a debugger; false where that cannot be seen.
  bool stopped(uint32_t peer) const;

  // Gets memory for the cells between this rank and another, both ways. As take_pages.
  int reserve_cells(uint32_t peer, const GoesOn&) const;
  // The same for this rank's table and small slots, where they have none yet, its pair rings, and its ring. Only for
  // the thread that runs a collective, before it writes there: what others read of them has been written.
  int reserve_slots(const GoesOn&);
  bool has_slots() const { return has_slots_; }
  int reserve_pair_rings(const GoesOn&);
  int reserve_ring(const GoesOn&);

  // The first failure of the group, told to all. Later ones are not recorded, but for one that is worse than a
  // disagreement. `error`: of kExhausted, which errno.
  void poison(Status kind, int32_t peer, uint64_t seq, int error = 0) { poison(kind, peer, int32_t(rank), seq, error); }
  void poison(Status kind, int32_t peer, int32_t by, uint64_t seq, int error = 0);
  bool disagreed(uint64_t number) const;
  bool poisoned(Failure* why, uint64_t number = kNever) const;

  // Once all ranks have joined: whether more of them than there are cores may run only where this one may. Waits depend
  // on it (waiting.h).
  void see_who_shares_cores() {
    if (!counted_) count_who_shares_cores();
  }

  void leave();
  // `why`: kAborted, or kInterrupted: a signal handler raised.
  void abort(Status why = kAborted);
  bool aborted() const { return aborted_.load(std::memory_order_acquire); }

  CollectiveQueue& queue() { return *queue_; }
  Messenger& messenger() { return *messenger_; }

  // Before a wait for `peer` yields: whether it sleeps rather, for a core of its own. Of collectives, of messages.
  bool leaves_core(uint32_t peer, int64_t now) {
    return seat_choice_.leaves(now, sched_getcpu(), ctl(rank).seat, ctl(peer).seat);
  }
  bool leaves_core_of_messages(uint32_t peer, int64_t now) {
    return messages_seat_choice_.leaves(now, sched_getcpu(), ctl(rank).messages_seat, ctl(peer).messages_seat);
  }

  Spinner spinner;
  Team team;              // of the thread that runs a collective
  CopyIn copy_in{&team};  // of collectives
  Arenas arenas;
  CombiningTree tree;

  // Asked every kPollInterrupt by the main thread when it sleeps, never by another; may be null.
  int (*const interrupted)();

  // Called again and again in a collective's waits: transfers that only move while someone asks
  // after them must not stop because their owner waits here. May be null.
  void (*elsewhere)(void*) = nullptr;
  void* elsewhere_context = nullptr;

  uint64_t call = kNever;            // number of the collective that waits
  uint64_t blocks_done = 0;          // the ring counters' value between calls; equal on all ranks
  uint64_t blocks_taken = 0;         // the same of `took`
  bool last_call_waited = true;      // false after kRejected and kDeviceAhead, which wait for nobody
  bool has_run_ahead = false;        // there has been a kDeviceAhead
  bool every_ring_is_there = false;  // of each rank
  std::vector<uint64_t> taken;       // what this rank has written to Flow::taken of each other, between calls

 private:
  void count_who_shares_cores();
  Group(int fd, char* base, uint32_t rank, const Geometry& g, int64_t spin_ns, int (*interrupted)());
  SegmentHeader& header() const { return *reinterpret_cast<SegmentHeader*>(base_); }
  Status wait(Signal& s, uint64_t need, uint64_t worth, uint32_t* peer, int64_t deadline, const Absent& absent,
              uint64_t number);
  Status sleep(Wait& w, int64_t began, uint32_t* peer, int64_t deadline, uint64_t number);
  char* row_of_flows(uint32_t r) const {
    return base_ + layout.flows + r * (layout.flow_bytes + layout.pair_rings_bytes);
  }
  size_t at_pair(uint32_t src, uint32_t dst) const {
    return layout.pairs + (size_t(src) * n + dst) * layout.pair_bytes;
  }
  int reserve(size_t from, size_t bytes, const GoesOn&) const;

  const int fd_;
  char* const base_;
  uint32_t asked_ = rank;
  uint32_t pid_ = 0;
  uint64_t pid_namespace_ = 0;
  std::atomic<bool> aborted_{false};
  SeatChoice seat_choice_, messages_seat_choice_;
  bool has_slots_ = false, has_ring_ = false;
  uint32_t cpus_ = 0;  // that this process may run on; 0: not known
  bool counted_ = false, outnumbers_cores_ = false;
  std::unique_ptr<CollectiveQueue> queue_;
  std::unique_ptr<Messenger> messenger_;
};

// Returns a descriptor, or -errno; *total as c10d_segment_create's.
int create_segment(const Geometry&, uint64_t* total);

}  // namespace c10d_custom
