// The shared segment: one memfd per group, mapped by every rank of the group on this host.
//
//   SegmentHeader | tree | RankCtl[n] | has_cells[n][n] | call_slots[n + 1] | tables[n] | small[n][2] | ring[n] |
//   { Flow[n], pair ring[n - 1] }[n] | { PairCtl, cells }[n][n] | arena[n]
//
// The parts up to the call slots have their memory from the start: some 3.5 KiB a rank, and a byte for each pair. In a
// group of many ranks each RankCtl has pages of its own, which its rank takes when it joins. Of the others each rank
// takes its own, when it first needs them: its table and small slots with the first call that moves anything, its ring
// with the first large collective, its pair rings with its first large all_to_all, a pair's cells with the first send
// between its ranks, its arena with the tensors that are made in it. Most groups never need all of them, memory takes
// its time to be had, and so it lies on the node of the rank that writes there. The arenas are mapped apart from the
// rest, by who needs them (arena.h).
//
// Every field has one writer (named beside it) unless it says otherwise. Nothing read from here is
// trusted for an address: sizes and offsets come from the reader's own call and from `Geometry`,
// which each rank copies out of the header once, after checking it against the segment's length.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "seat.h"

namespace c10d_custom {

constexpr uint64_t kMagic = 0x63313064'63757340ull;  // bumped whenever the layout changes
// See RankCtl::ahead.
constexpr uint32_t kCallsAhead = 32;
constexpr size_t kLine = 128;  // two cache lines: adjacent-line prefetch makes 64 share

// What every rank must agree on about sizes; rank 0 chooses, the others read.
struct Geometry {
  uint32_t ranks;
  uint32_t window;           // blocks in a ring
  uint32_t block_bytes;      // one block of a ring
  uint32_t small_bytes;      // one small slot: whole messages up to this size need one synchronisation
  uint32_t cell_bytes;       // payload of one point-to-point cell
  uint32_t cells;            // cells in one ordered pair's ring
  uint32_t call_slot_bytes;  // a slot for calls over hosts (hosts/call_slots.h); 0: there is none
  uint64_t arena_bytes = 0;  // one rank's arena; 0: there are none
  // What algorithm.h chooses by.
  uint32_t fan_in = 0;                 // branches of a counter of the combining tree; 0: each rank looks at every other
  uint32_t two_steps_bytes = 0;        // reductions of so many bytes in slots are shared out; 0: none
  uint32_t in_place_bytes = 16 << 10;  // of an input, for each rank: from there on inputs in arenas are read there
  uint32_t forced = 0;                 // an Algorithm that all calls go by which can; 0: the one that is best
};

// A counter that only grows. `value` is written by its owner; sleepers on other ranks leave the
// smallest value that is worth waking them for in `wake_at` (kNever: nobody sleeps). They sleep on `wakes`,
// not on `value`. For the owner wakes all when it finds a `wake_at` that it has reached, and sets that to kNever, which
// also erases what a rank may just have asked for: a later value. That rank sees that `wakes` has changed, and asks
// again; `value` may be what it was when the rank looked.
constexpr uint64_t kNever = ~0ull;
struct alignas(kLine) Signal {
  std::atomic<uint64_t> value;
  std::atomic<uint64_t> wake_at;  // written by all
  std::atomic<uint32_t> wakes;    // wake-ups; written by the owner
};

// Of the combining tree: how many times its branches have come, over the life of the group, and how many of those with
// a flag.
struct alignas(kLine) TreeCounter {
  static constexpr uint64_t kFlag = 1ull << 40;
  std::atomic<uint64_t> come;          // written by the ranks below it
  std::atomic<uint64_t> flags_before;  // come / kFlag after the last round; written by who made it full
};

// Rung by anyone who changed something its owner may be asleep for.
struct alignas(kLine) Doorbell {
  std::atomic<uint32_t> rings;     // written by all
  std::atomic<uint32_t> sleeping;  // set by the owner, cleared by whoever wakes it: one wake-up is enough
};

// What one rank says it is calling: the fingerprint of a collective.
struct alignas(64) Fingerprint {
  uint64_t seq;  // of the group's collectives, from 1
  uint32_t op;
  uint32_t redop;
  uint32_t dtype;
  int32_t root;    // -1 where the operation has none
  uint64_t count;  // elements, as the operation counts them; kNever where ranks may differ
  uint32_t device;
  uint32_t reserved;
  double factor;   // PREMUL_SUM: this rank's; not compared
  uint64_t outer;  // what larger call this one is part of, 0 if none
  uint64_t place;  // 1 + where its input begins in its arena; 0: elsewhere. Of all_to_all: its bytes. Not compared
};
static_assert(sizeof(Fingerprint) == 64, "one cache line");

enum RankState : uint32_t { kAbsent = 0, kJoined = 1, kLeft = 2 };

struct alignas(kLine) RankCtl {
  // Two fingerprints: while this rank writes the one of call s+1, slower ranks may still read the
  // one of call s. It cannot reach s+2 before all have entered s+1, hence are done with s.
  Fingerprint fingerprint[2];
  // Of kDeviceAhead calls, at seq % kCallsAhead. Such a call does not wait for the others to enter it, but only for a
  // rank that is kCallsAhead calls behind: that one may still have to compare the fingerprint which would be
  // overwritten.
  Fingerprint ahead[kCallsAhead];
  Signal arrive;      // seq of the last collective entered
  Signal in;          // blocks copied into this rank's ring, over the life of the group
  Signal red;         // blocks of which this rank has reduced its part
  Signal out;         // blocks this rank no longer reads, in any ring
  Signal took;        // blocks of which this rank has summed its part, over all reductions that went on to other hosts
  Doorbell doorbell;  // of point-to-point messages
  Doorbell pair_rings;                         // of all_to_all
  alignas(kLine) Seat seat;                    // of who waits in a collective
  Seat messages_seat;                          // of who waits for messages
  alignas(kLine) std::atomic<uint32_t> state;  // RankState
  uint32_t pid;
  uint64_t pid_namespace;                    // pids compare only within one
  std::atomic<uint32_t> mark;                // written by its owner, for the layers above
  std::atomic<uint32_t> progress;            // of the last all_to_all by pair rings, in thousandths
  std::atomic<uint32_t> monitored_barriers;  // entered so far
  std::atomic<uint64_t> rounds;              // of the combining tree, to which it has come; written by its owner
  std::atomic<uint32_t> has_pair_rings;      // whether they have memory, and its row of Flow; written by its owner
  // The collective in which this rank may just read and write in the arenas of others; 0: it does not.
  std::atomic<uint64_t> in_place;
  uint64_t
      started;    // of the process, in the kernel's ticks: with its pid, what no other process ever has. 0: not known
  uint64_t cpus;  // a digest of those it might run on when it joined; 0: not known
};

// Why the group is of no more use; the first rank that finds out writes it, once. There are two such records.
// `disagreement` is about call `seq`: earlier calls, in which slower ranks may still be, do not fail for it. If one of
// them fails all the same, or something worse follows, the reason goes into `poison`.
struct alignas(kLine) Poison {
  std::atomic<uint32_t> state;  // 0 free, 1 being written, 2 valid
  uint32_t kind;                // Status
  int32_t by;
  int32_t peer;  // the rank it is about, -1 if none
  uint64_t seq;
  int32_t error;  // kExhausted: errno of what was asked for
};

struct SegmentHeader {
  uint64_t magic;
  uint64_t bytes;
  Geometry geometry;
  Poison poison, disagreement;
  Signal all_come;  // rounds of the combining tree * 2, + 1 with a flag; its owner is who came last to the last round
};

// A cell of the ring of one ordered pair of ranks; see p2p.h for what the kinds mean.
struct alignas(64) CellHeader {
  uint32_t kind;
  uint32_t dtype;
  int64_t tag;
  uint64_t message;  // the sender's number for the message this is about
  uint64_t bytes;    // of the whole message (kEager, kRequest), of this cell's payload (kData)
  char small[24]{};  // a payload that fits, so that it comes with this cache line; any other follows
};
static_assert(sizeof(CellHeader) == 64);

// Of the messages from one rank to another, in front of their cells.
struct PairCtl {
  alignas(kLine) std::atomic<uint64_t> tail;  // cells written; written by the sender
  alignas(kLine) std::atomic<uint64_t> head;  // cells read; written by the receiver
  std::atomic<uint64_t> consumed;             // of short messages, what the receiver no longer keeps; see p2p.h
};

// Bytes of all_to_all from one rank to another, over the life of the group; see all_to_all.cpp.
struct Flow {
  alignas(kLine) std::atomic<uint64_t> sent;  // written by the sender
  alignas(64) std::atomic<uint64_t> taken;    // written by the receiver
};

inline size_t align_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

constexpr uint32_t kManyRanks = 16;  // a group of so many has a page or more for each RankCtl

// Byte offsets of every part, derived from the geometry alone.
struct Layout {
  explicit Layout(const Geometry& g);
  size_t tree, ctl, has_cells, call_slots, tables, small, rings, flows, pairs, arenas, total;
  size_t ctl_bytes, table_bytes, small_bytes, ring_bytes, flow_bytes, pair_rings_bytes, pair_bytes, cell_stride;
};

}  // namespace c10d_custom
